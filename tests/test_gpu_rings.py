"""The GPU's ring kernels on a GPU: all ranks at a time, each on a stream of its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.ring_checks import CHECKS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no NVIDIA GPU"),
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_like_the_cpu(check: Callable[[str], None]) -> None:
    check("cuda")
