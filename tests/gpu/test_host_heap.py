"""Heaps in memory of the host on a real GPU: results of both modes, launched singly and in graphs, tensors
that lie there, and what is left behind.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from anyep.api.buffer import Buffer
from anyep.backends.cuda.gpu import Gpu
from tests.support.gpu import NEEDS_GPU
from tests.support.gpu_pairs import soak
from tests.support.gpu_scenarios import FEW_SMS, good_arguments, rows_of
from tests.support.low_latency_cases import Case, inputs_of, on
from tests.support.places import Place
from tests.support.world import RankContext

pytestmark = NEEDS_GPU
TIMEOUT_S = 300
NVL_BYTES = 1 << 24
RDMA_BYTES = 1 << 25


def new_buffer(context: RankContext, heap: str = "host") -> Buffer:
    return Buffer(context.group, NVL_BYTES, RDMA_BYTES, low_latency_mode=True, device="cuda", heap=heap)


def heaps_mapped() -> int:
    return Path("/proc/self/maps").read_text().count("heap for kernels")


@pytest.mark.parametrize("place", [Place("cuda", ranks, heap="host") for ranks in (2, 4, 8)], ids=str)
def test_soak(place: Place) -> None:
    seconds = place.world().run(soak, 200, None, 11, timeout=TIMEOUT_S)
    print(f"200 pairs between {place.num_ranks} ranks: {max(seconds) / 200 * 1e6:.0f} us each")


def replay(context: RankContext, num_replays: int) -> None:
    """A cached dispatch and a combine, and a low-latency pair, captured: the rows change."""
    with new_buffer(context) as buffer:
        arguments = good_arguments(buffer)
        x = arguments["x"].clone()
        *_, handle, _ = buffer.dispatch(**arguments)
        case = Case(tokens=(6,) * context.num_ranks, hidden=512)
        mine = on("cuda", inputs_of(case)[context.rank])

        def work() -> list[torch.Tensor]:
            rows, *_ = buffer.dispatch(x, handle=handle, config=FEW_SMS)
            assert isinstance(rows, torch.Tensor)
            combined, *_ = buffer.combine(rows.clone(), handle, config=FEW_SMS)
            received, counts, fast_handle, _, _ = buffer.low_latency_dispatch(
                mine.x, mine.topk_idx, case.max_tokens, case.num_experts, use_fp8=False
            )
            returned, *_ = buffer.low_latency_combine(received, mine.topk_idx, mine.topk_weights, fast_handle)
            return [rows, combined, counts, returned]

        work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            captured = work()
        for number in range(num_replays):
            x.copy_(rows_of(buffer, 100 + number)[: len(x)])
            mine.x.mul_(-1)
            graph.replay()
            again = [part.clone() for part in captured]
            for part, right in zip(again, work(), strict=True):
                assert part.is_cuda
                assert torch.equal(part, right)
        torch.cuda.synchronize()
        dist.barrier(group=context.group)
        del graph, captured


@pytest.mark.parametrize("num_ranks", [2, 8])
def test_replays(num_ranks: int) -> None:
    Place("cuda", num_ranks).world().run(replay, 30, timeout=TIMEOUT_S)


def use_and_leave(context: RankContext) -> None:
    new_buffer(context).destroy()
    new_buffer(context).destroy()
    mapped, free = heaps_mapped(), torch.cuda.mem_get_info()[0]
    buffer = new_buffer(context)
    assert type(buffer.runtime.heap).__name__ == "HostBlock"  # type: ignore[union-attr]
    assert buffer.runtime.windows.num_bytes == 0  # type: ignore[union-attr]
    tensor = buffer.get_local_buffer_tensor(torch.float32, torch.Size([4096]), use_rdma_buffer=True)
    assert tensor.is_cuda
    # By a kernel, by a copy of the driver, and back.
    tensor.fill_(2.0)
    values = torch.arange(4096, dtype=torch.float32, device="cuda")
    assert torch.equal(tensor * 3, torch.full_like(values, 6.0))
    tensor.copy_(values)
    assert torch.equal(tensor.clone(), values)
    assert torch.equal(tensor.cpu(), values.cpu())
    dist.barrier(group=context.group)
    buffer.destroy()
    del buffer
    assert torch.equal(tensor, values), "it keeps its memory"
    del tensor
    # It frees what others left.
    new_buffer(context, "device").destroy()
    new_buffer(context, "device").destroy()
    assert heaps_mapped() < mapped + context.num_ranks
    assert heaps_mapped() == 0
    # CUDA may keep a little for itself.
    assert torch.cuda.mem_get_info()[0] > free - (64 << 20) * context.num_ranks


def test_nothing_is_left_behind() -> None:
    Place("cuda", 2).world().run(use_and_leave, timeout=TIMEOUT_S)


def make_by_default(context: RankContext) -> Any:
    gpu = Gpu()
    with new_buffer(context, "auto") as buffer:
        dist.barrier(group=context.group)
        return gpu.why_not_shared([gpu.identity]), type(buffer.runtime.heap).__name__  # type: ignore[union-attr]


def test_ranks_on_one_gpu_share_its_memory() -> None:
    assert Place("cuda", 2).world().run(make_by_default, timeout=TIMEOUT_S) == [("", "SymmetricBlock")] * 2
