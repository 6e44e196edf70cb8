"""The options of a new `Buffer`: arguments first, then environment variables, then defaults."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, NamedTuple

import torch

from anyep import ending, settings
from anyep.api.arguments import check_num_bytes
from anyep.connection import NETWORKS, Options
from anyep.errors import AnyEPError, InvalidCall, NotSupported


class Given(NamedTuple):
    """What the user passed."""

    num_nvl_bytes: Any
    num_rdma_bytes: Any
    low_latency_mode: bool
    enable_shrink: bool
    device: str | torch.device | None
    ranks_per_node: int | None
    num_window_bytes: int | None
    network: str | None
    heap: str | None = None
    api: str = "Buffer"
    timeout_s: float | None = None
    """The deadline of waits, unless the environment has one."""


def chosen_options(given: Given) -> tuple[torch.device, Options]:
    """The device and the options of a Buffer; raises if something is wrong."""
    if ending.has_begun():
        raise InvalidCall(f"{with_article(given.api)} cannot be made while the process ends")
    settings.warn_of_unknown_variables()
    chosen: dict[str, settings.Chosen[Any]] = {
        "device": settings.DEVICE.choose(None if given.device is None else str(given.device)),
        "ranks_per_node": settings.RANKS_PER_NODE.choose(given.ranks_per_node),
        "num_window_bytes": settings.NUM_WINDOW_BYTES.choose(given.num_window_bytes),
        "network": settings.NETWORK.choose(given.network),
        "heap": settings.HEAP.choose(given.heap),
        "timeout_s": _timeout_s(given.timeout_s),
    }
    try:
        device = checked_device(given.device if given.device is not None else chosen["device"].value)
    except AnyEPError as error:
        raise chosen["device"].explain(error) from None
    if given.network not in (None, *NETWORKS):
        raise InvalidCall(
            f"network is {given.network!r}: it must be {' or '.join(map(repr, NETWORKS))}, or left out"
        )
    if given.heap not in (None, *settings.HEAPS):
        raise InvalidCall(
            f"heap is {given.heap!r}: it must be {', '.join(map(repr, settings.HEAPS[:-1]))} or"
            f" {settings.HEAPS[-1]!r}, or left out"
        )
    window_bytes = chosen["num_window_bytes"].value
    return device, Options(
        device.type,
        check_num_bytes("num_nvl_bytes", given.num_nvl_bytes),
        check_num_bytes("num_rdma_bytes", given.num_rdma_bytes),
        bool(given.low_latency_mode),
        bool(given.enable_shrink),
        chosen["ranks_per_node"].value,
        None if window_bytes is None else check_num_bytes("num_window_bytes", window_bytes),
        chosen["network"].value,
        chosen["heap"].value,
        chosen["timeout_s"].value,
        given.api,
        {name: setting.source for name, setting in chosen.items()},
    )


def with_article(api: str) -> str:
    """A class with its article.

    >>> with_article("Buffer"), with_article("ElasticBuffer")
    ('a Buffer', 'an ElasticBuffer')
    """
    return f"an {api}" if api[0] in "AEIOU" else f"a {api}"


def _timeout_s(given: float | None) -> settings.Chosen[float]:
    chosen = settings.TIMEOUT_S.choose()
    if given is None or chosen.source != settings.DEFAULT:
        return chosen
    return settings.Chosen(float(given), settings.ARGUMENT, "num_cpu_timeout_secs")


def checked_device(device: str | torch.device | None) -> torch.device:
    """The device of a Buffer: by default the current GPU, if there is one. Torch's default device is meant
    for the program's own tensors and is ignored."""
    try:
        wanted = torch.device(
            device if device is not None else "cuda" if torch.cuda.is_available() else "cpu"
        )
    except (RuntimeError, TypeError):
        raise InvalidCall(f"device is {device!r}: pass device='cpu' or device='cuda'") from None
    if wanted.type == "cpu":
        return torch.device("cpu")
    if wanted.type != "cuda":
        raise NotSupported(f"device is {str(device)!r}: AnyEP works on 'cpu' and 'cuda'")
    if not torch.cuda.is_available():
        raise NotSupported("device is 'cuda', but torch finds no GPU here: pass device='cpu'")
    if find_spec("triton") is None:
        raise NotSupported("kernels for GPUs are compiled by Triton, which is missing: pip install triton")
    if torch.cuda.is_current_stream_capturing():
        raise InvalidCall("a Buffer cannot be made while a CUDA graph is captured: make it before")
    current = torch.cuda.current_device()
    if wanted.index not in (None, current):
        raise InvalidCall(
            f"device is {str(wanted)!r}, but the current device is {current}:"
            f" call torch.cuda.set_device({wanted.index}) first"
        )
    return torch.device("cuda", current)
