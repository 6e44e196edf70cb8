"""What programs that were written for version 2 of deep_ep do with it, each in a few lines, on AnyEP under
that name: training with autograd functions of their own, and serving without CPU sync."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist

import anyep
from tests.support.world import RankContext, get_world

NUM_EXPERTS, HIDDEN, TOPK, TOKENS = 8, 32, 3, 12
SIGNATURES = {
    "__init__": "self, group, num_bytes=None, num_cpu_bytes=0, num_max_tokens_per_rank=0, hidden=0,"
    " num_topk=0, use_fp8_dispatch=False, deterministic=False, allow_hybrid_mode=True,"
    " allow_multiple_reduction=True, prefer_overlap_with_compute=True, sl_idx=3, num_allocated_qps=0,"
    " num_cpu_timeout_secs=300,"
    " num_gpu_timeout_secs=100, explicitly_destroy=False",
    "get_buffer_size_hint": "group, num_max_tokens_per_rank, hidden, num_topk=0, use_fp8_dispatch=False,"
    " allow_hybrid_mode=True, allow_multiple_reduction=True",
    "get_theoretical_num_sms": "self, num_experts, num_topk, num_scaleout_topk=0, rdma_gbs=0, nvlink_gbs=0,"
    " sm_read_gbs=200, sm_write_gbs=50",
    "get_theoretical_num_qps": "self, num_sms",
    "dispatch": "self, x, topk_idx=None, topk_weights=None, cumulative_local_expert_recv_stats=None,"
    " num_experts=None, num_max_tokens_per_rank=None, expert_alignment=None, num_sms=0, num_qps=0,"
    " previous_event=None, previous_event_before_epilogue=None, async_with_compute_stream=False,"
    " allocate_on_comm_stream=False, handle=None, do_handle_copy=True, do_cpu_sync=None, do_expand=False,"
    " do_zero_padding=False, use_tma_aligned_col_major_sf=False",
    "combine": "self, x, handle, topk_weights=None, bias=None, num_sms=0, num_qps=0, previous_event=None,"
    " previous_event_before_epilogue=None, async_with_compute_stream=False, allocate_on_comm_stream=False",
    "barrier": "self, use_comm_stream=True, with_cpu_sync=False, sequential=True",
    "capture": "",
    "destroy": "self",
    "get_comm_stream": "self",
    "get_engram_storage_size_hint": "num_entries, hidden, num_max_tokens_per_rank, dtype=torch.bfloat16",
    "get_pp_buffer_size_hint": "num_max_tensor_bytes, num_max_inflight_tensors",
    "get_agrs_num_max_session_bytes": "group, shapes, dtype",
    "get_agrs_buffer_size_hint": "group, num_max_session_bytes",
}
"""AnyEP's own arguments of the constructor are by keyword only, and come after these."""


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name: str) -> None:
    parameters = inspect.signature(getattr(anyep.ElasticBuffer, name)).parameters.values()
    plain = [part.replace(annotation=part.empty) for part in parameters if part.kind is not part.KEYWORD_ONLY]
    assert ", ".join(map(str, plain)) == SIGNATURES[name]


def routing_of(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    random = torch.Generator(device="cpu").manual_seed(rank)
    scores = torch.rand((TOKENS, NUM_EXPERTS), generator=random, device="cpu")
    weights, experts = scores.topk(TOPK, dim=1)
    return torch.randn((TOKENS, HIDDEN), generator=random, device="cpu"), experts, weights


# Training


class Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, topk_idx: Any, topk_weights: Any, buffer: Any) -> Any:
        recv_x, _, recv_weights, handle, event = buffer.dispatch(
            x=x,
            topk_idx=topk_idx,
            topk_weights=topk_weights,
            num_experts=NUM_EXPERTS,
            num_max_tokens_per_rank=TOKENS,
            expert_alignment=8,
            do_expand=True,
            do_zero_padding=True,
            do_cpu_sync=True,
            previous_event=buffer.capture(),
            async_with_compute_stream=True,
            allocate_on_comm_stream=True,
        )
        if event.event is not None:
            event.current_stream_wait()
        ctx.buffer, ctx.handle = buffer, handle
        return recv_x, recv_weights, handle

    @staticmethod
    def backward(ctx: Any, grad_x: Any, grad_weights: Any, _: Any) -> Any:
        grad, grad_topk_weights, event = ctx.buffer.combine(
            x=grad_x.contiguous(), handle=ctx.handle, topk_weights=grad_weights, num_sms=ctx.handle.num_sms
        )
        assert event.event is None
        return grad, None, grad_topk_weights, None


class Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, handle: Any, buffer: Any) -> Any:
        ctx.buffer, ctx.handle = buffer, handle
        combined, _, _ = buffer.combine(x=x, handle=handle)
        return combined

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        handle = ctx.handle
        grad_x, _, _, same, _ = ctx.buffer.dispatch(
            x=grad.contiguous(),
            handle=handle,
            num_sms=handle.num_sms,
            do_cpu_sync=False,
            do_expand=handle.do_expand,
            do_zero_padding=True,
        )
        assert same is handle
        return grad_x, None, None


def train(context: RankContext) -> None:
    """Weighted identities: the sum of a token's weights times the token, and its gradients."""
    from deep_ep import ElasticBuffer

    num_bytes = ElasticBuffer.get_buffer_size_hint(context.group, TOKENS, HIDDEN, TOPK)
    buffer = ElasticBuffer(context.group, num_bytes=num_bytes, explicitly_destroy=True)
    assert buffer.num_bytes == num_bytes
    x, experts, weights = routing_of(context.rank)
    x.requires_grad_()
    weights.requires_grad_()
    recv_x, recv_weights, handle = Dispatch.apply(x, experts, weights, buffer)
    assert sum(handle.num_recv_tokens_per_expert_list) == len(recv_x)
    combined = Combine.apply(recv_x * recv_weights[:, None], handle, buffer)
    dense = x.detach() * weights.detach().sum(1, keepdim=True)
    torch.testing.assert_close(combined.detach(), dense)
    combined.square().sum().backward()
    assert x.grad is not None
    assert weights.grad is not None
    torch.testing.assert_close(x.grad, 2 * dense * weights.detach().sum(1, keepdim=True))
    by_weight = (2 * dense * x.detach()).sum(1, keepdim=True).expand_as(weights)
    torch.testing.assert_close(weights.grad, by_weight)
    buffer.destroy()
    assert buffer.runtime is None


def in_drop_in(context: RankContext, work: Any) -> None:
    """The device is chosen by the environment, as programs cannot pass it."""
    loaded = set(sys.modules)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("ANYEP_DEVICE", "cpu")
        patched.setattr(sys, "path", [*sys.path])
        anyep.install_as_deep_ep()
        try:
            work(context)
        finally:
            for name in set(sys.modules) - loaded:
                if name.startswith("deep_ep"):
                    del sys.modules[name]


def test_training() -> None:
    get_world(4).run(in_drop_in, train)


# Serving


def serve(context: RankContext) -> None:
    """Two micro-batches in flight, without CPU sync: counts are read from the handle's tensors."""
    from deep_ep.buffers.elastic import ElasticBuffer, get_logical_domain_size

    assert get_logical_domain_size(context.group) == (1, context.num_ranks)
    buffer = ElasticBuffer(
        group=context.group,
        num_max_tokens_per_rank=TOKENS,
        hidden=HIDDEN,
        num_topk=TOPK,
        use_fp8_dispatch=True,
    )
    x, experts, weights = routing_of(context.rank)
    in_flight = []
    for part in (slice(0, 5), slice(5, TOKENS)):
        rows, ids, row_weights, handle, event = buffer.dispatch(
            x=x[part].bfloat16(),
            topk_idx=experts[part],
            topk_weights=weights[part],
            num_experts=NUM_EXPERTS,
            do_cpu_sync=False,
            do_handle_copy=False,
            async_with_compute_stream=True,
        )
        in_flight.append((part, rows, ids, row_weights, handle, event))
    for part, rows, ids, row_weights, handle, event in in_flight:
        event.current_stream_wait()
        assert not handle.num_recv_tokens_per_expert_list
        num_rows = int(handle.psum_num_recv_tokens_per_scaleup_rank[-1])
        assert len(rows) == handle.num_recv_tokens == TOKENS * context.num_ranks
        counts = torch.diff(handle.psum_num_recv_tokens_per_expert, prepend=torch.zeros(1))
        assert counts.tolist() == [(ids[:num_rows] == e).sum() for e in range(len(counts))]
        outputs = rows * torch.where(ids >= 0, row_weights, 0.0).sum(1, keepdim=True)
        outputs[num_rows:] = float("nan")
        combined, _, _ = buffer.combine(x=outputs.bfloat16(), handle=handle)
        dense = x[part] * weights[part].sum(1, keepdim=True)
        torch.testing.assert_close(combined.float(), dense, rtol=0.05, atol=0.05)
    dist.barrier(context.group)


def test_serving() -> None:
    get_world(4).run(in_drop_in, serve)
