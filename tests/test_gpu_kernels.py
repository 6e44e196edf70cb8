"""The GPU's data kernels on a GPU, against the CPU's, bit for bit."""

from __future__ import annotations

import importlib

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU that torch can use"),
]


@pytest.mark.parametrize(
    "check", ["check_layout", "check_windows", "check_sums", "check_counts", "check_letters"]
)
def test_data_kernels(check: str) -> None:
    # Only here: without Triton, or without a GPU, the module cannot be loaded or run.
    getattr(importlib.import_module("tests.triton_checks"), check)("cuda")
