"""The GPU's kernels on a GPU: the checks that run in Triton's interpreter, and those that need a real one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: pip install 'anyep[cuda]'")

import triton
import triton.language as tl

from anyep.backends.cuda.batch import Batches, Input, Launch
from anyep.backends.cuda.moment import Moment
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


def test_inputs_are_stored_where_they_belong() -> None:
    """One batch, made once, copies between the tensors that each run gives it, aligned or not."""

    def copying() -> Launch:
        arguments = (Input("source", torch.int32), Input("target", torch.int32))
        return Launch(copy_values, 1, {"SIZE": 16}, (1,), arguments)

    batches, moment = Batches(0, "a test"), Moment(torch.cuda.current_stream().cuda_stream)
    for first in (0, 4, 1):
        source = torch.arange(32, dtype=torch.int32).cuda()
        target = torch.zeros(32, dtype=torch.int32).cuda()
        batches.run(((copying,), (copying,)), moment, {"source": source[first:], "target": target[first:]})
        assert target.tolist() == [*[0] * first, *range(first, first + 16), *[0] * (16 - first)]
