"""The GPU's casts of low-latency messages give the same bits as the CPU's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.cast_checks import CHECKS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no NVIDIA GPU"),
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_like_the_cpu(check: Callable[[str], None]) -> None:
    check("cuda")
