"""What programs that were written for deep_ep do with it, each in a few lines, on AnyEP under that name.

The calls are those of training (autograd functions that save the handle), of serving with normal calls beside
the caller, and of decoding with hooks; arguments are passed in the same ways.
"""

from __future__ import annotations

import copy
import inspect
import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import anyep
from tests.support import oracle
from tests.support.cases import Case, inputs_of
from tests.support.places import Place, buffer_device, tensor_device
from tests.support.world import RankContext, get_world

CASE = Case(tokens=(30, 20, 10), hidden=64, dtype="float32", num_topk=3)
NVL_BYTES = 1 << 22

SIGNATURES = {
    "__init__": "self, group, num_nvl_bytes=0, num_rdma_bytes=0, low_latency_mode=False, num_qps_per_rank=24,"
    " allow_nvlink_for_low_latency_mode=True, allow_mnnvl=False, use_fabric=False, explicitly_destroy=False,"
    " enable_shrink=False, comm=None, *, device=None, ranks_per_node=None, num_window_bytes=None,"
    " network=None, heap=None",
    "set_num_sms": "new_num_sms",
    "capture": "",
    "is_sm90_compiled": "",
    "get_dispatch_config": "num_ranks",
    "get_combine_config": "num_ranks",
    "get_low_latency_rdma_size_hint": "num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts",
    "destroy": "self",
    "get_comm_stream": "self",
    "get_local_buffer_tensor": "self, dtype, size=None, offset=0, use_rdma_buffer=False",
    "get_dispatch_layout": "self, topk_idx, num_experts, previous_event=None, async_finish=False,"
    " allocate_on_comm_stream=False",
    "dispatch": "self, x, handle=None, num_tokens_per_rank=None, num_tokens_per_rdma_rank=None,"
    " is_token_in_rank=None, num_tokens_per_expert=None, topk_idx=None, topk_weights=None,"
    " expert_alignment=1, num_worst_tokens=0, config=None, previous_event=None, async_finish=False,"
    " allocate_on_comm_stream=False",
    "combine": "self, x, handle, topk_weights=None, bias=None, config=None, previous_event=None,"
    " async_finish=False, allocate_on_comm_stream=False",
    "low_latency_dispatch": "self, x, topk_idx, num_max_dispatch_tokens_per_rank, num_experts,"
    " cumulative_local_expert_recv_stats=None, dispatch_wait_recv_cost_stats=None, use_fp8=True,"
    " round_scale=False, use_ue8m0=False, async_finish=False, return_recv_hook=False",
    "low_latency_combine": "self, x, topk_idx, topk_weights, handle, use_logfmt=False, zero_copy=False,"
    " async_finish=False, return_recv_hook=False, out=None, combine_wait_recv_cost_stats=None",
    "get_next_low_latency_combine_buffer": "self, handle",
    "clean_low_latency_buffer": "self, num_max_dispatch_tokens_per_rank, hidden, num_experts",
    "low_latency_update_mask_buffer": "self, rank_to_mask, mask=False",
    "low_latency_query_mask_buffer": "self, mask_status",
    "low_latency_clean_mask_buffer": "self",
}
SIGNATURES |= {f"internode_{name}": SIGNATURES[name] for name in ("dispatch", "combine")}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name: str) -> None:
    signature = inspect.signature(getattr(anyep.Buffer, name))
    bare = [part.replace(annotation=part.empty) for part in signature.parameters.values()]
    assert str(inspect.Signature(bare)) == f"({SIGNATURES[name]})"


def test_signatures_of_the_rest() -> None:
    config = inspect.signature(anyep.Config).parameters.values()
    assert [(part.name, part.default) for part in config] == [
        ("num_sms", 20),
        ("num_max_nvl_chunked_send_tokens", 6),
        ("num_max_nvl_chunked_recv_tokens", 256),
        ("num_max_rdma_chunked_send_tokens", 6),
        ("num_max_rdma_chunked_recv_tokens", 256),
    ]
    for hint in (anyep.Config.get_nvl_buffer_size_hint, anyep.Config.get_rdma_buffer_size_hint):
        assert list(inspect.signature(hint).parameters)[:3] == ["self", "hidden_bytes", "num_ranks"]
    assert list(inspect.signature(anyep.EventOverlap).parameters) == ["event", "extra_tensors"]
    assert not inspect.signature(anyep.EventHandle).parameters


def test_configs_travel() -> None:
    text = '{"num_sms": 24, "num_max_nvl_chunked_send_tokens": 8, "num_max_nvl_chunked_recv_tokens": 288}'
    config = anyep.Config(**json.loads(text))
    assert config.num_sms == 24
    for other in (copy.deepcopy(config), pickle.loads(pickle.dumps(config)), anyep.Config(24, 8, 288)):
        assert other == config
        assert other.get_nvl_buffer_size_hint(128, 8) == config.get_nvl_buffer_size_hint(128, 8)


def import_deep_ep() -> Any:
    anyep.install_as_deep_ep()
    import deep_ep

    return deep_ep


# A Buffer of the whole process, made when it is needed


def get_buffer(context: RankContext, group: dist.ProcessGroup, hidden_bytes: int) -> Any:
    """Make the process's Buffer anew if the group is another one or the sizes have grown."""
    deep_ep = import_deep_ep()
    num_nvl_bytes = num_rdma_bytes = 0
    for config in (
        deep_ep.Buffer.get_dispatch_config(group.size()),
        deep_ep.Buffer.get_combine_config(group.size()),
    ):
        num_nvl_bytes = max(config.get_nvl_buffer_size_hint(hidden_bytes, group.size()), num_nvl_bytes)
        num_rdma_bytes = max(config.get_rdma_buffer_size_hint(hidden_bytes, group.size()), num_rdma_bytes)
    buffer = context.keep.get(get_buffer)
    if (
        buffer is None
        or buffer.group != group
        or buffer.num_nvl_bytes < num_nvl_bytes
        or buffer.num_rdma_bytes < num_rdma_bytes
    ):
        context.keep[get_buffer] = deep_ep.Buffer(group, num_nvl_bytes, num_rdma_bytes)
    return context.keep[get_buffer]


def buffer_is_kept_while_it_serves(context: RankContext) -> None:
    first = get_buffer(context, context.group, 128)
    assert get_buffer(context, context.group, 128) is first
    larger = get_buffer(context, context.group, 256)
    assert larger is not first
    assert get_buffer(context, context.group, 128) is larger
    same_ranks = dist.new_group(list(range(context.num_ranks)))
    assert isinstance(same_ranks, dist.ProcessGroup)
    assert get_buffer(context, same_ranks, 128) is not larger
    assert context.keep.pop(get_buffer).group_size == context.num_ranks


def test_groups_are_compared() -> None:
    get_world(3).run(buffer_is_kept_while_it_serves)


# Training: autograd functions that keep the handle


def functions_of(buffer: Any, num_experts: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Dispatch, whose gradient is a combine, and combine, whose gradient is a cached dispatch."""
    deep_ep = import_deep_ep()
    from deep_ep.utils import EventHandle, EventOverlap

    overlap = {"async_finish": True, "allocate_on_comm_stream": True}

    class Dispatch(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor) -> Any:
            per_rank, per_node, per_expert, in_rank, event = buffer.get_dispatch_layout(
                topk_idx, num_experts, previous_event=EventOverlap(EventHandle()), **overlap
            )
            rows, ids, weights, counts, handle, event = buffer.dispatch(
                x,
                topk_idx=topk_idx,
                topk_weights=topk_weights,
                num_tokens_per_rank=per_rank,
                num_tokens_per_rdma_rank=per_node,
                is_token_in_rank=in_rank,
                num_tokens_per_expert=per_expert,
                previous_event=event,
                **overlap,
            )
            event.current_stream_wait()
            ctx.save_for_backward(*handle)
            ctx.mark_non_differentiable(ids, *handle)
            return rows, ids, weights, torch.tensor(counts), *handle

        @staticmethod
        def backward(ctx: Any, rows: torch.Tensor, _: Any, weights: torch.Tensor, *others: Any) -> Any:
            assert type(ctx.saved_tensors) is tuple
            x, topk_weights, event = buffer.combine(
                rows.contiguous(),
                ctx.saved_tensors,
                topk_weights=weights.float(),
                previous_event=buffer.capture(),
                **overlap,
            )
            event.current_stream_wait()
            return x, None, topk_weights

    class Combine(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, rows: torch.Tensor, *handle: torch.Tensor) -> Any:
            x, _, event = buffer.combine(rows, handle, previous_event=deep_ep.Buffer.capture(), **overlap)
            event.current_stream_wait()
            ctx.save_for_backward(*handle)
            return x

        @staticmethod
        def backward(ctx: Any, x: torch.Tensor) -> Any:
            rows, _, _, _, _, event = buffer.dispatch(x.contiguous(), handle=ctx.saved_tensors)
            assert event.event is None
            return rows, *[None] * 6

    return Dispatch.apply, Combine.apply


def train(context: RankContext, move_saved: bool) -> tuple[torch.Tensor, ...]:
    deep_ep = import_deep_ep()
    given = inputs_of(CASE)[context.rank]
    assert given.topk_weights is not None
    assert given.topk_idx is not None
    device = tensor_device()
    ids = given.topk_idx.to(device)
    x, weights = (part.to(device).requires_grad_() for part in (given.x, given.topk_weights))
    with deep_ep.Buffer(context.group, NVL_BYTES, device=buffer_device()) as buffer:
        dispatch, combine = functions_of(buffer, CASE.num_experts)

        def step() -> torch.Tensor:
            rows, local_ids, row_weights, _, *handle = dispatch(x, ids, weights)
            here = row_weights.masked_fill(local_ids < 0, 0.0).sum(1, keepdim=True)
            result: torch.Tensor = combine(rows * rows * here * (context.rank + 1), *handle)
            return result

        if move_saved:
            with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
                combined = step()
        else:
            combined = step()
        combined.backward(torch.ones_like(combined))
    assert x.grad is not None
    assert weights.grad is not None
    return combined.detach().cpu(), x.grad.cpu(), weights.grad.cpu()


@pytest.mark.parametrize("move_saved", [False, True])
@pytest.mark.parametrize("place", [Place("cpu", 3).param(), Place("cuda", 3).param()])
def test_handles_survive_autograd(place: Place, move_saved: bool) -> None:
    by_rank = place.world().run(train, move_saved, timeout=180.0)
    for rank, (combined, x_grad, weights_grad) in enumerate(by_rank):
        given = inputs_of(CASE)[rank]
        assert given.topk_weights is not None
        assert given.topk_idx is not None
        x, weights = given.x.requires_grad_(), given.topk_weights.requires_grad_()
        factors = (given.topk_idx // CASE.local_experts + 1).where(given.topk_idx >= 0, 0)
        expected = x * x * (weights * factors).sum(1, keepdim=True)
        expected.backward(torch.ones_like(expected))
        torch.testing.assert_close(combined, expected.detach())
        torch.testing.assert_close(x_grad, x.grad)
        torch.testing.assert_close(weights_grad, weights.grad)


# Serving: normal calls, with arguments by name, beside the caller


def serve(context: RankContext, run_async: bool) -> None:
    deep_ep = import_deep_ep()
    given = inputs_of(CASE)[context.rank]
    arguments = {
        "group": context.group,
        "num_nvl_bytes": NVL_BYTES,
        "num_rdma_bytes": 0,
        "low_latency_mode": False,
        "num_qps_per_rank": 1,
        "explicitly_destroy": True,
    }
    buffer = deep_ep.Buffer(**arguments)
    config = deep_ep.Buffer.get_dispatch_config(context.num_ranks)
    assert deep_ep.Buffer.num_sms == config.num_sms == buffer.num_sms

    def previous_event(capture: Callable[[], Any]) -> Any:
        return capture() if run_async else None

    previous = previous_event(buffer.capture)
    per_rank, per_node, per_expert, in_rank, event = buffer.get_dispatch_layout(
        topk_idx=given.topk_idx,
        num_experts=CASE.num_experts,
        previous_event=previous,
        async_finish=False,
        allocate_on_comm_stream=False,
    )
    assert per_node is None
    assert event.event is None
    rows, ids, weights, counts, handle, event = buffer.dispatch(
        x=given.x,
        handle=None,
        num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=per_node,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        topk_idx=given.topk_idx,
        topk_weights=given.topk_weights,
        expert_alignment=1,
        config=config,
        previous_event=previous,
        async_finish=run_async,
        allocate_on_comm_stream=False,
    )
    assert (event.event is not None) == run_async
    with event:
        stream = buffer.get_comm_stream()
    expected = oracle.dispatch(inputs_of(CASE), context.rank, CASE.num_experts)
    assert oracle.same_bits(rows, expected.x)
    assert counts == expected.tokens_per_expert
    assert len(ids) == len(weights) == len(rows)
    combined, nothing, event = buffer.combine(
        x=rows,
        handle=handle,
        topk_weights=None,
        config=deep_ep.Buffer.get_combine_config(context.num_ranks),
        previous_event=previous_event(deep_ep.Buffer.capture),
        async_finish=run_async,
        allocate_on_comm_stream=False,
    )
    assert nothing is None
    assert (event.event is not None) == run_async
    event.current_stream_wait()
    torch.testing.assert_close(combined, given.x * in_rank.sum(1, keepdim=True))
    # What a client may do with a stream that it holds: here it must do nothing.
    with torch.cuda.stream(stream), torch.cpu.stream(stream):
        stream.wait_stream(torch.cpu.current_stream())
        assert torch.equal(buffer.combine(rows, handle)[0], combined)
    assert (buffer.rank, buffer.group_size) == (context.rank, context.num_ranks)
    assert buffer.runtime is not None
    buffer.destroy()


@pytest.mark.parametrize("run_async", [False, True])
def test_normal_calls_with_named_arguments(run_async: bool) -> None:
    get_world(3).run(serve, run_async)


# Decoding: low-latency calls with hooks, between normal ones

MAX_TOKENS, HIDDEN, NUM_EXPERTS, TOPK = 16, 256, 6, 2


def decode(context: RankContext) -> None:
    deep_ep = import_deep_ep()
    num_rdma_bytes = deep_ep.Buffer.get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank=MAX_TOKENS,
        hidden=HIDDEN,
        num_ranks=context.num_ranks,
        num_experts=NUM_EXPERTS,
    )
    buffer = deep_ep.Buffer(
        context.group,
        NVL_BYTES,
        num_rdma_bytes,
        low_latency_mode=True,
        num_qps_per_rank=NUM_EXPERTS / context.num_ranks,
        allow_nvlink_for_low_latency_mode=True,
        allow_mnnvl=False,
        explicitly_destroy=True,
        enable_shrink=True,
    )
    assert buffer.low_latency_mode
    chance = torch.Generator().manual_seed(context.rank)
    x = torch.randn((5 + context.rank, HIDDEN), generator=chance).bfloat16()
    weights, experts = torch.rand((len(x), NUM_EXPERTS), generator=chance).topk(TOPK)
    for step in range(3):
        rows, counts, handle, event, hook = buffer.low_latency_dispatch(
            x, experts, MAX_TOKENS, NUM_EXPERTS, use_fp8=False, async_finish=False, return_recv_hook=True
        )
        assert event.event is None
        hook()
        assert rows.shape == (NUM_EXPERTS // context.num_ranks, MAX_TOKENS * context.num_ranks, HIDDEN)
        total = counts.sum()
        dist.all_reduce(total, group=context.group)
        assert total == TOPK * sum(5 + rank for rank in range(context.num_ranks))
        out = torch.empty_like(x)
        combined, event, hook = buffer.low_latency_combine(
            rows,
            experts,
            weights,
            handle,
            async_finish=False,
            zero_copy=False,
            return_recv_hook=step > 0,
            out=out,
        )
        assert (hook is None) == (step == 0)
        if hook is not None:
            hook()
        assert combined.data_ptr() == out.data_ptr()
        torch.testing.assert_close(out, (x.float() * weights.sum(1, keepdim=True)).bfloat16())
        # Between steps: prefill with normal calls; or a fresh start, with what was lost written over.
        if step == 0:
            layout = buffer.get_dispatch_layout(experts, NUM_EXPERTS)
            buffer.dispatch(x, None, layout[0], layout[1], layout[3], layout[2], experts, weights)
            buffer.clean_low_latency_buffer(MAX_TOKENS, HIDDEN, NUM_EXPERTS)
        else:
            dist.barrier(group=context.group)
            buffer.get_local_buffer_tensor(dtype=torch.int8, use_rdma_buffer=True).zero_()
            dist.barrier(group=context.group)
            buffer.low_latency_clean_mask_buffer()
            mask = torch.ones(context.num_ranks, dtype=torch.int32)
            buffer.low_latency_query_mask_buffer(mask)
            assert mask.tolist() == [0] * context.num_ranks
    buffer.destroy()


def test_low_latency_calls_with_hooks() -> None:
    get_world(3).run(decode)


# Small things


def init_is_replaced(context: RankContext) -> None:
    """As those do who set an argument for a program that they cannot change."""
    deep_ep = import_deep_ep()
    original = deep_ep.Buffer.__init__

    def patched(self: Any, *arguments: Any, **named: Any) -> None:
        original(self, *arguments, **named | {"num_window_bytes": 0, "device": "cpu"})

    deep_ep.Buffer.__init__ = patched
    try:
        with deep_ep.Buffer(context.group, NVL_BYTES, 0, False, 1.5) as buffer:
            assert anyep.Buffer.__init__ is patched
            given = inputs_of(CASE)[context.rank]
            layout = buffer.get_dispatch_layout(given.topk_idx, CASE.num_experts)
            rows = buffer.dispatch(
                given.x,
                None,
                layout[0],
                layout[1],
                layout[3],
                layout[2],
                given.topk_idx,
                given.topk_weights,
            )[0]
            assert buffer.runtime.windows.block.offset_of(rows) is None
    finally:
        deep_ep.Buffer.__init__ = original


def test_init_can_be_replaced() -> None:
    get_world(3).run(init_is_replaced)


def events(context: RankContext) -> None:
    deep_ep = import_deep_ep()
    from deep_ep_cpp import EventHandle

    kept = torch.ones(3)
    event = deep_ep.EventOverlap(EventHandle(), extra_tensors=(kept,))
    assert event.extra_tensors[0] is kept
    event.current_stream_wait()
    event.event = None
    with event:
        pass
    event.current_stream_wait()
    capture = deep_ep.Buffer.capture
    with capture() as captured:
        assert captured.event is not None


def test_events() -> None:
    get_world(1).run(events)


def sms(context: RankContext) -> None:
    deep_ep = import_deep_ep()
    before = deep_ep.Buffer.num_sms
    try:
        deep_ep.Buffer.set_num_sms(8)
        assert deep_ep.Buffer.num_sms == 8
        assert deep_ep.Buffer.get_dispatch_config(2).num_sms == 8
        with deep_ep.Buffer(context.group, NVL_BYTES, device="cpu") as buffer:
            buffer.set_num_sms(4)
            layout = buffer.get_dispatch_layout(torch.tensor([[0]]), 1)
            rows = torch.ones(1, 16)
            handle = buffer.dispatch(rows, None, layout[0], layout[1], layout[3], layout[2])[4]
            assert handle[1].shape == (1, 2)
    finally:
        deep_ep.Buffer.set_num_sms(before)


def test_the_number_of_sms() -> None:
    get_world(1).run(sms)
