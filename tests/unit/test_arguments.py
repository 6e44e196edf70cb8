"""The checks of arguments alone, where no other rank is needed to try them."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from anyep import Config, InvalidCall
from anyep.api.arguments import check_config, check_devices

CPU, FIRST_GPU = torch.device("cpu"), torch.device("cuda:0")


def test_a_config_for_a_handle_keeps_its_chunks() -> None:
    tuned = Config(20, 8, 288, 32, 128)
    assert check_config(None, tuned, 4) == Config(8, 8, 288, 32, 128)
    assert check_config(None, tuned, 10) is tuned


@pytest.mark.parametrize(
    ("found", "wanted", "sentence"),
    [
        (
            "meta",
            CPU,
            "x is on meta, where tensors have no data: AnyEP works on CPU and CUDA tensors; materialise it"
            " first, for example as torch.empty_like(x, device='cpu'), and fill it",
        ),
        ("meta", FIRST_GPU, "for example as torch.empty_like(x, device='cuda:0'), and fill it"),
        ("xpu:0", CPU, "x is on xpu:0: AnyEP works on CPU and CUDA tensors; pass x.to('cpu')"),
        (
            "cpu",
            FIRST_GPU,
            "pass x.to('cuda:0'), or make the Buffer with device='cpu' instead of device='cuda'",
        ),
        (
            "cuda:0",
            CPU,
            "x is on cuda:0, but this Buffer works on the CPU: pass x.to('cpu'), or make the Buffer",
        ),
        ("cuda:1", FIRST_GPU, "x is on cuda:1, but this Buffer works on cuda:0: pass x.to('cuda:0')"),
    ],
)
def test_tensors_elsewhere(found: str, wanted: torch.device, sentence: str) -> None:
    # Tensors that only say that they are on a device, which this machine may not have.
    with FakeTensorMode():
        x = torch.empty(2, 8, device=found)
    with pytest.raises(InvalidCall) as caught:
        check_devices(wanted, x=x)
    assert sentence in str(caught.value)
    assert "device='meta'" not in str(caught.value)
    assert "device='cuda' instead of device='cuda'" not in str(caught.value)
