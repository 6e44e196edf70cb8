"""The arithmetic of DeepEP V2's hints: the numbers that programs know, and what holds for all."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyep.core import elastic_sizes as sizes
from anyep.core.elastic_sizes import Domains, Rates
from anyep.errors import InvalidCall
from tests.support.depth import examples

NODES_OF_8 = [(1, 8), (2, 8), (4, 8), (8, 8)]


@pytest.mark.parametrize(
    ("nodes", "is_hybrid", "arguments", "num_bytes"),
    [
        ((1, 8), True, (8192, 7168, 8), 947_912_704),
        ((1, 8), True, (8192, 7168, 8, True), 943_718_400),
        ((1, 8), False, (8192, 7168, 8, True), 943_718_400),
        ((1, 8), True, (8192, 7168), 966_787_072),
        ((1, 8), True, (8192, 7168, 32), 966_787_072),
        ((1, 8), True, (128, 7168, 8, True), 16_777_216),
        ((2, 8), True, (4096, 7168, 8, True), 1_218_445_312),
        ((2, 8), False, (4096, 7168, 8, True), 1_415_577_600),
        ((2, 8), True, (4096, 7168, 8, True, False), 2_654_994_432),
        ((4, 8), True, (4096, 7168, 8), 2_434_793_472),
        ((2, 4), False, (4096, 7168, 8, False, False), 4_246_732_800),
        ((1, 1), True, (1, 256, 1), 2_097_152),
    ],
)
def test_known_buffers(
    nodes: tuple[int, int], is_hybrid: bool, arguments: tuple[Any, ...], num_bytes: int
) -> None:
    assert sizes.buffer_bytes(Domains.of(*nodes, is_hybrid), *arguments) == num_bytes


@pytest.mark.parametrize(
    ("nodes", "nvlink_gbs", "num_sms"),
    [
        *zip(NODES_OF_8, [430.3] * 4, [14, 12, 6, 4], strict=True),
        ((1, 8), 860.6, 26),
        ((1, 1), 430.3, 132),
    ],
)
def test_known_sms(nodes: tuple[int, int], nvlink_gbs: float, num_sms: int) -> None:
    rates = Rates(rdma=50, nvlink=nvlink_gbs)
    assert sizes.theoretical_num_sms(Domains.of(*nodes), 256, 8, 132, rates) == num_sms
    alone = sizes.theoretical_num_sms(Domains.of(*nodes), 256, 8, 132, rates, False)
    assert alone == max(64, num_sms)
    assert sizes.theoretical_num_sms(Domains.of(*nodes), 256, 8, 2, rates, False) == 2


def test_links_of_unknown_rates() -> None:
    """The reference divides by 0."""
    for nodes, num_sms in zip(NODES_OF_8, [14, 12, 6, 4], strict=True):
        assert sizes.theoretical_num_sms(Domains.of(*nodes), 256, 8, 132, Rates()) == num_sms
    # Without hybrid mode NVLink is the bound, however slow the network is.
    direct = Domains.of(2, 8, False)
    slow, fast = (sizes.theoretical_num_sms(direct, 256, 8, 132, Rates(rdma=rate)) for rate in (1, 900))
    assert slow == fast


def test_queue_pairs() -> None:
    hybrid, direct = Domains.of(2, 8), Domains.of(2, 8, False)
    assert [sizes.theoretical_num_qps(hybrid, num_sms) for num_sms in (4, 8, 12)] == [65, 129, 129]
    assert [sizes.theoretical_num_qps(hybrid, num_sms, 200) for num_sms in (8, 12, 14)] == [129, 193, 200]
    assert [sizes.theoretical_num_qps(direct, num_sms) for num_sms in (4, 9, 64)] == [4, 9, 9]
    assert sizes.theoretical_num_qps(direct, 64, 8) == 8


def test_other_hints() -> None:
    assert sizes.engram_bytes(524_288, 128, 512, 2) == (2 << 20, 128 << 20)
    assert sizes.engram_bytes(1, 1, 65_537, 1) == (4 << 20, 2 << 20)
    assert sizes.pipeline_bytes(4096 * 7168 * 2, 4) == 896 << 20
    assert sizes.pipeline_bytes(1, 1) == 2 << 20
    assert sizes.gathered_bytes(8, []) == 0
    assert sizes.gathered_bytes(2, [17, 16]) == 64 + 32


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sizes.buffer_bytes(Domains.of(1, 8), 0, 7168), "num_max_tokens_per_rank=0 is less than 1"),
        (lambda: sizes.buffer_bytes(Domains.of(1, 8), 1, 0), "hidden=0 is less than 1"),
        (lambda: sizes.buffer_bytes(Domains.of(1, 8), 1, 16, -1), "num_topk=-1 is less than 0"),
        (lambda: num_sms(num_topk=0), "num_topk=0 is not between 1 and num_experts=256"),
        (lambda: num_sms(num_topk=257), "num_topk=257 is not between"),
        (lambda: num_sms(num_experts=12), "num_experts=12 is not a multiple of the 8 ranks"),
        (lambda: num_sms(rates=Rates(sm_read=0)), "the rates of links and SMs are positive"),
        (lambda: num_sms(rates=Rates(nvlink=-1)), "the rates of links and SMs are positive"),
    ],
)
def test_wrong_sizes(call: Any, message: str) -> None:
    with pytest.raises(InvalidCall, match=message):
        call()


def num_sms(num_experts: int = 256, num_topk: int = 8, rates: Rates = Rates()) -> int:  # noqa: B008
    return sizes.theoretical_num_sms(Domains.of(1, 8), num_experts, num_topk, 132, rates)


domains = st.builds(Domains.of, st.integers(1, 16), st.sampled_from([1, 2, 4, 8]), st.booleans())


@examples(100, deep=2000)
@given(
    domains, st.integers(1, 10_000), st.integers(1, 8192), st.integers(1, 64), st.booleans(), st.booleans()
)
def test_buffers_hold_the_results(
    of_ranks: Domains, num_tokens: int, hidden: int, num_topk: int, is_fp8: bool, sums_on_the_way: bool
) -> None:
    arguments = (num_tokens, hidden, num_topk, is_fp8, sums_on_the_way)
    num_bytes = sizes.buffer_bytes(of_ranks, *arguments)
    assert num_bytes % (2 << 20) == 0
    assert num_bytes >= of_ranks.num_ranks * num_tokens * hidden * (1 if is_fp8 else 2)
    assert num_bytes <= sizes.buffer_bytes(of_ranks, num_tokens + 1, *arguments[1:])
    # In narrower rows the scales of FP8 take more than its values save.
    if hidden >= 128 or not is_fp8:
        assert num_bytes <= sizes.buffer_bytes(of_ranks, num_tokens, hidden, num_topk, False, False)


rates = st.builds(Rates, *[st.just(0.0) | st.floats(0.01, 1e4)] * 2, *[st.floats(0.01, 1e4)] * 2)


@examples(100, deep=2000)
@given(domains, st.integers(1, 64), st.integers(1, 64), st.integers(2, 160), rates, st.booleans())
def test_every_number_of_sms_is_possible(
    of_ranks: Domains, local_experts: int, num_topk: int, num_device_sms: int, of_links: Rates, overlaps: bool
) -> None:
    num_experts = local_experts * of_ranks.num_ranks
    sms = sizes.theoretical_num_sms(
        of_ranks, num_experts, min(num_topk, num_experts), num_device_sms, of_links, overlaps
    )
    assert sms == num_device_sms or (4 <= sms < num_device_sms and sms % 2 == 0)


@examples(50, deep=500)
@given(st.integers(0, 7), st.integers(1, 8))
def test_groups_hit(log_groups: int, num_topk: int) -> None:
    """Against all choices of 8 experts, for small numbers; and more groups are hit by more choices."""
    num_experts = 128
    hits = [sizes.groups_hit(2**log_groups, num_experts, topk) for topk in range(1, num_topk + 1)]
    assert hits[0] == pytest.approx(1)
    assert all(fewer <= more <= min(2**log_groups, num_topk) + 1e-9 for fewer, more in pairwise(hits))


def test_groups_hit_by_counting() -> None:
    """Of 6 experts in 3 groups, 3 of 15 pairs lie in one group."""
    assert sizes.groups_hit(3, 6, 2) == pytest.approx((3 * 1 + 12 * 2) / 15)


@examples(100, deep=2000)
@given(st.integers(0, 1000), st.integers(1, 16), st.integers(1, 40), st.integers(1, 300), st.data())
def test_expanded_rows_are_enough(
    num_received: int, num_topk: int, num_experts: int, alignment: int, data: st.DataObject
) -> None:
    """However the copies are spread over the experts."""
    copies = data.draw(st.integers(0, num_received * min(num_topk, num_experts)))
    cuts = sorted(
        data.draw(st.lists(st.integers(0, copies), min_size=num_experts - 1, max_size=num_experts - 1))
    )
    counts = [end - start for start, end in pairwise([0, *cuts, copies])]
    needed = sum(math.ceil(count / alignment) * alignment for count in counts)
    assert needed <= sizes.expanded_rows(num_received, num_topk, num_experts, alignment)
