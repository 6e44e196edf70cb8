"""What the planner says that calls send is what they send: every pair of ranks, every kind of byte."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given

from anyep.core.traffic import Sent
from anyep.planning import sent as planned
from anyep.planning.counts import Counts, count_choices
from anyep.topology import Topology
from tests.support import cases, low_latency_cases, strategies
from tests.support.depth import examples
from tests.support.low_latency_cases import in_process_of
from tests.support.places import Place
from tests.support.world import RankContext

PLACES = [(Place("cpu", 4), 10), (Place("cpu", 4, num_nodes=2), 10), (Place("cpu", 3, num_nodes=3), 3)]
HOSTS = (Place("cpu", 4, num_nodes=2, hosts=True), 2)
WORDS = ("rows", "payload_bytes", "beside_bytes", "message_bytes")


def in_places(deep: int) -> Any:
    chosen = [place.param(quick, deep, marks=in_process_of(place)) for place, quick in [*PLACES, HOSTS]]
    return pytest.mark.parametrize(("place", "quick", "deep"), chosen)


def words_of(sent: Sent) -> list[list[int]]:
    return [getattr(sent, word).tolist() for word in WORDS]


def topology_of(case: Any) -> Topology:
    return Topology(case.num_ranks, case.ranks_per_node or case.num_ranks)


def counts_of(case: cases.Case | low_latency_cases.Case, choices: list[torch.Tensor]) -> Counts:
    """The counts of all ranks' choices; shorter ranks have tokens without experts."""
    padded = np.full((case.num_ranks, max(case.tokens), case.num_topk), -1, np.int64)
    for rank, topk_idx in enumerate(choices):
        padded[rank, : len(topk_idx)] = topk_idx
    return count_choices(padded, topology_of(case), case.num_experts)


def check(measured: list[Any], calls: list[planned.CallTraffic]) -> None:
    for index, call in enumerate(calls):
        for word in WORDS:
            matrix = [ranks[index][WORDS.index(word)] for ranks in measured]
            assert np.array_equal(matrix, getattr(call, word)), (index, word)


def normal_calls(context: RankContext, case: cases.Case) -> list[list[list[int]]]:
    """What this rank sends in a dispatch, a cached dispatch and a combine."""
    buffer = cases.buffer_for(
        context, case.num_window_bytes, ranks_per_node=case.ranks_per_node, network=case.network
    )
    inputs = cases.inputs_of(case)[context.rank]
    topk_idx = cases._routing_of(case, context.rank)
    per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, case.num_experts)
    rows = inputs.x if inputs.scales is None else (inputs.x, inputs.scales)
    traffic = buffer.runtime.traffic
    found = [traffic.normal.copy()]
    received, _, weights, _, handle, _ = buffer.dispatch(
        rows,
        num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=per_node,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        topk_idx=inputs.topk_idx,
        topk_weights=inputs.topk_weights,
        config=case.config,
    )
    found.append(traffic.normal.copy())
    buffer.dispatch(rows, handle=handle, config=case.config)
    found.append(traffic.normal.copy())
    received = received[0] if isinstance(received, tuple) else received
    outputs = torch.ones(received.shape, dtype=torch.bfloat16)
    buffer.combine(outputs, handle, weights if case.combine_weights else None, config=case.config)
    found.append(traffic.normal.copy())
    return [words_of(after - before) for before, after in pairwise(found)]


@in_places(deep=150)
def test_normal_mode(place: Place, quick: int, deep: int) -> None:
    @examples(quick, deep=deep)
    @given(strategies.cases_at(place))
    def check_one(case: cases.Case) -> None:
        # All windows or none: how many rows fit into little memory is not the planner's question.
        case = replace(case, num_window_bytes=0 if case.num_window_bytes is not None else None)
        measured = place.world().run(normal_calls, case)
        choices = [cases._routing_of(case, rank) for rank in range(case.num_ranks)]
        counts = counts_of(case, choices)
        row_bytes = case.hidden * cases.ROW_DTYPES[case.dtype].itemsize
        with_ids = planned.Rows(row_bytes, case.num_scales, case.num_topk if case.send_topk else 0)
        weights = case.num_topk if case.combine_weights and case.send_topk else 0
        by_window = case.num_window_bytes is None
        check(
            measured,
            [
                planned.dispatch(counts, with_ids, case.config.num_channels, by_window=by_window),
                planned.cached_dispatch(counts, with_ids._replace(num_topk=0), by_window=by_window),
                planned.combine(counts, planned.Rows(2 * case.hidden, 0, weights), by_window=by_window),
            ],
        )

    check_one()


def low_latency_calls(context: RankContext, case: low_latency_cases.Case) -> list[list[list[int]]]:
    """What this rank sends in a dispatch and a combine."""
    buffer = low_latency_cases.buffer_for(context, ranks_per_node=case.ranks_per_node, network=case.network)
    buffer.clean_low_latency_buffer(case.max_tokens, case.hidden, case.num_experts)
    inputs = low_latency_cases.inputs_of(case)[context.rank]
    traffic = buffer.runtime.traffic
    found = [traffic.low_latency.copy()]
    received, _, handle, _, hook = buffer.low_latency_dispatch(
        inputs.x,
        inputs.topk_idx,
        case.max_tokens,
        case.num_experts,
        use_fp8=case.travel != "bf16",
        round_scale=case.travel in ("fp8 rounded", "fp8 ue8m0"),
        use_ue8m0=case.travel == "fp8 ue8m0",
    )
    assert hook is None
    found.append(traffic.low_latency.copy())
    received = received[0] if isinstance(received, tuple) else received
    outputs = torch.ones(received.shape, dtype=torch.bfloat16)
    buffer.low_latency_combine(outputs, inputs.topk_idx, inputs.topk_weights, handle)
    found.append(traffic.low_latency.copy())
    return [words_of(after - before) for before, after in pairwise(found)]


@in_places(deep=100)
def test_low_latency_mode(place: Place, quick: int, deep: int) -> None:
    # Virtual nodes share memory, so their ranks read rows in place.
    hosts = Topology(place.num_ranks, place.num_ranks // (place.num_nodes if place.hosts else 1))

    @examples(quick, deep=deep)
    @given(strategies.low_latency_cases(place.num_ranks))
    def check_one(drawn: low_latency_cases.Case) -> None:
        case = replace(drawn, use_logfmt=False).at(place)
        measured = place.world().run(low_latency_calls, case)
        choices = [given.topk_idx for given in low_latency_cases.inputs_of(case)]
        counts = counts_of(case, choices)
        scales = {"bf16": 0, "fp8 ue8m0": case.hidden // 512}.get(case.travel, case.hidden // 128)
        payload = case.hidden * (2 if case.travel == "bf16" else 1)
        check(
            measured,
            [
                planned.low_latency_dispatch(counts, payload, scales, case.max_tokens, hosts),
                planned.low_latency_combine(counts, case.hidden, case.max_tokens, hosts),
            ],
        )

    check_one()
