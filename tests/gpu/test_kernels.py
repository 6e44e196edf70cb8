"""The GPU's kernels on a GPU: the checks that run in Triton's interpreter, and those that need a real one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: pip install 'anyep[cuda]'")

import triton
import triton.language as tl

from anyep.backends.cuda.launch import Launcher
from tests.support.checks import notify
from tests.support.checks.catalogue import checks_for
from tests.support.gpu import NEEDS_GPU

pytestmark = NEEDS_GPU


@triton.jit
def copy_values(source, target, SIZE: tl.constexpr):  # noqa: N803
    index = tl.arange(0, SIZE)
    tl.store(target + index, tl.load(source + index))


@pytest.mark.parametrize(("backend", "check"), checks_for("cuda"))
def test_kernel(backend: str, check: Callable[[str], None]) -> None:
    check(backend)


def test_ranks_that_wait_for_each_other() -> None:
    notify.let_ranks_wait("cuda")


def test_a_launch_is_known_by_the_types_of_its_tensors() -> None:
    """What was compiled for values of 8 bytes is not launched for values of 2."""
    copy = Launcher(copy_values, 1, {"SIZE": 16})
    stream = torch.cuda.current_stream()
    for dtype in (torch.int64, torch.int16, torch.int64):
        source, target = torch.arange(16, dtype=dtype).cuda(), torch.zeros(32, dtype=dtype).cuda()
        copy(stream, (1,), source, target)
        assert target.tolist() == [*range(16), *[0] * 16]
