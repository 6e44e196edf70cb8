"""The cases of `anyep bench --mode normal`: what AnyEP does, a plain copy, and the same job by Gloo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from anyep.api.buffer import Buffer
from anyep.backends import cpu
from anyep.cli import draw
from anyep.cli.bench_measure import Case, Crossing, Setup
from anyep.cli.bench_rival import AllToAll
from anyep.cli.gate import choose
from anyep.cli.ranks import Rank


def cases_of(rank: Rank, setup: Setup, tokens: int) -> list[Case]:
    """Every case at one number of tokens."""
    generator = torch.Generator().manual_seed(setup.seed + rank.rank)
    x = draw.normal(generator, tokens, setup.hidden).bfloat16()
    scores = draw.uniform(generator, tokens, setup.experts)
    topk_idx = choose(scores, setup.topk, setup.nodes)
    topk_weights = scores.gather(1, topk_idx)
    settings = setup.nodes.of_buffer(setup.row_bytes)
    by_window = Buffer(rank.group, device="cpu", **settings)
    by_ring = Buffer(rank.group, device="cpu", num_window_bytes=0, **settings)
    per_rank, per_node, per_expert, in_rank, _ = by_window.get_dispatch_layout(topk_idx, setup.experts)
    routing = {
        "num_tokens_per_rank": per_rank,
        "num_tokens_per_rdma_rank": per_node,
        "is_token_in_rank": in_rank,
        "num_tokens_per_expert": per_expert,
        "topk_idx": topk_idx,
        "topk_weights": topk_weights,
    }
    nothing = {
        "num_tokens_per_rank": torch.zeros_like(per_rank),
        "is_token_in_rank": in_rank[:0],
        "num_tokens_per_expert": torch.zeros_like(per_expert),
    }
    received, _, _, _, handle, _ = by_window.dispatch(x, **routing)  # type: ignore[arg-type]
    assert isinstance(received, torch.Tensor)
    assert handle is not None
    private = received.clone()
    row_bytes = setup.row_bytes
    num_rows = received.shape[0]
    num_bytes = num_rows * row_bytes
    target = cpu.OwnBlock("copy", max(num_bytes, 128))
    gloo = AllToAll(rank.group, x, in_rank)

    def copy() -> Any:
        cpu.copy_rows(target.address, private.data_ptr(), num_rows, row_bytes, 0)
        return target

    def pair(buffer: Buffer) -> Any:
        rows, _, _, _, new_handle, _ = buffer.dispatch(x, **routing)  # type: ignore[arg-type]
        return buffer.combine(rows, new_handle)  # type: ignore[arg-type]

    topology = setup.nodes.topology
    here = topology.ranks_on(topology.node_of(rank.rank))
    rows_elsewhere = int(per_rank.sum() - per_rank[list(here)].sum())

    def crossing(path: str, work: Callable[[], Any], copies: int) -> Crossing | None:
        if not copies or not setup.nodes.are_several:
            return None
        session = (by_ring if path == "ring" else by_window).runtime
        assert session is not None
        traffic = session.traffic
        before = traffic.bytes_between_nodes
        work()
        sent = traffic.bytes_between_nodes - before
        return Crossing(sent, copies * rows_elsewhere * row_bytes)

    def case(name: str, path: str, work: Callable[[], Any], copies: int = 1) -> Case:
        bound, crossed = ("copy",) * copies, crossing(path, work, copies)
        return Case(name, path, tokens, copies * num_bytes, work, bound, "gloo", crossed)

    def rival(name: str, path: str, work: Callable[[], Any]) -> Case:
        return Case(name, path, tokens, num_bytes, work)

    return [
        rival("copy", "copy", copy),
        case("layout", "local", lambda: by_window.get_dispatch_layout(topk_idx, setup.experts), 0),
        case("notify", "notify messages", lambda: by_window.dispatch(x[:0], **nothing), 0),  # type: ignore[arg-type]
        case("dispatch", "window", lambda: by_window.dispatch(x, **routing)),  # type: ignore[arg-type]
        case("dispatch", "ring", lambda: by_ring.dispatch(x, **routing)),  # type: ignore[arg-type]
        rival("dispatch", "gloo", gloo.dispatch),
        case("cached_dispatch", "window", lambda: by_window.dispatch(x, handle=handle)),
        case("cached_dispatch", "ring", lambda: by_ring.dispatch(x, handle=handle)),
        rival("cached_dispatch", "gloo", gloo.send_rows),
        case("combine", "window", lambda: by_window.combine(received, handle)),
        case("combine", "staged", lambda: by_window.combine(private, handle)),
        case("combine", "ring", lambda: by_ring.combine(private, handle)),
        rival("combine", "gloo", gloo.combine),
        case("pair", "window", lambda: pair(by_window), 2),
        case("pair", "ring", lambda: pair(by_ring), 2),
        rival("pair", "gloo", lambda: (gloo.dispatch(), gloo.combine())),
    ]
