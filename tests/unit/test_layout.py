"""The map of a heap: nothing overlaps, everything is aligned, sums are the formulas, hints suffice."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyep import Config, InvalidCall, layout
from anyep.layout import (
    ControlBlock,
    ControlRegion,
    LowLatencySlots,
    Region,
    RingArea,
    Window,
    low_latency_heap,
    normal_heap,
    nvl_rings,
    rdma_rings,
    ring_rows_that_fit,
)
from anyep.sizes import LowLatencySizes, TokenLayout, align
from tests.support.strategies import configs

MIB = 2**20
tokens = st.builds(
    TokenLayout, st.integers(1, 64).map(lambda n: 16 * n), st.integers(0, 128), st.integers(0, 128)
)


def assert_disjoint(regions: list[Region]) -> None:
    ordered = sorted(regions, key=lambda region: region.offset)
    for left, right in pairwise(ordered):
        assert left.end <= right.offset, (left, right)
    assert all(region.num_bytes > 0 for region in regions)


@given(configs(max_channels=6), st.integers(1, 40), st.integers(1, 12), tokens)
def test_normal_heap(config: Config, num_ranks: int, per_node: int, token: TokenLayout) -> None:
    heap = normal_heap(config, num_ranks, per_node, token)
    regions = list(heap.regions())
    assert_disjoint(regions)
    node_ranks, nodes = min(num_ranks, per_node), -(-num_ranks // per_node)
    channels = config.num_channels
    # What the formulas say.
    row_bytes = config.num_max_nvl_chunked_recv_tokens * token.token_bytes
    assert heap.nvl.num_bytes == channels * node_ranks * (row_bytes + 8 * nodes + 4 + 4)
    assert heap.nvl.num_bytes == sum(region.num_bytes for region in regions if region.area == "nvl")
    row_bytes = config.num_max_rdma_chunked_recv_tokens * token.token_bytes
    assert [area.name for area in heap.rdma] == (["rdma receive", "rdma send"] if nodes > 1 else [])
    for area in heap.rdma:
        assert area.num_bytes == channels * nodes * (row_bytes + 72 + 8 + 8)
        assert area.num_bytes == sum(region.num_bytes for region in regions if region.area == area.name)
    # Aligned.
    for area in (heap.nvl, *heap.rdma):
        assert area.start % 128 == 0
        assert all(region.offset % 16 == 0 for region in area.regions() if region.kind == "data")
        data, fields = (
            [r for r in area.regions() if (r.kind == "data") == wanted] for wanted in (True, False)
        )
        assert max(region.end for region in data) <= min(region.offset for region in fields)
        assert area.end == max(region.end for region in area.regions())
    assert heap.end == max(region.end for region in regions)
    # The hints suffice, for the largest data that the tokens' bytes can be.
    nvl_hint = config.get_nvl_buffer_size_hint(token.hidden_bytes, num_ranks, ranks_per_node=per_node)
    rdma_hint = config.get_rdma_buffer_size_hint(token.hidden_bytes, num_ranks, ranks_per_node=per_node)
    assert heap.nvl.num_bytes <= nvl_hint
    if heap.rdma:
        assert heap.rdma[-1].end - heap.rdma[0].start <= rdma_hint


def test_ring_order_is_channel_then_peer() -> None:
    area = RingArea("nvl", 0, 2, 2, 3, 32, (("head", 4), ("tail", 4)))
    assert [area.rows_offset(c, p) for c in range(2) for p in range(2)] == [0, 96, 192, 288]
    assert [area.control_offset(c, p) for c in range(2) for p in range(2)] == [384, 392, 400, 408]
    assert area.num_bytes == 416
    assert list(area.regions())[1] == Region("nvl", "data", 96, 96, channel=0, peer=1)
    assert list(area.regions())[-1] == Region("nvl", "tail", 412, 4, channel=1, peer=1)


def test_fields_of_the_classic_layout() -> None:
    assert nvl_rings(0, 1, 1, 3, 2, 16).control_fields == (
        ("prefix start", 12),
        ("prefix end", 12),
        ("head", 4),
        ("tail", 4),
    )
    assert rdma_rings("rdma", 0, 1, 2, 2, 16).control_fields == (("meta", 72), ("head", 8), ("tail", 8))


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 60), st.integers(1, 20), st.integers(0, 20_000))
def test_rings_shrink_to_what_fits(channels: int, peers: int, rows: int, words: int, area_bytes: int) -> None:
    def ring(num_rows: int) -> int:
        return nvl_rings(0, channels, peers, 1, num_rows, 16 * words).num_bytes

    fitting = ring_rows_that_fit(nvl_rings(0, channels, peers, 1, rows, 16 * words), area_bytes)
    assert 0 <= fitting <= rows
    assert fitting == 0 or ring(fitting) <= area_bytes
    assert fitting == rows or ring(fitting + 1) > area_bytes


@given(st.integers(0, 40), st.integers(1, 9), st.integers(0, 9), st.integers(0, 9))
def test_a_window_holds_its_results_side_by_side(rows: int, words: int, topk: int, scales: int) -> None:
    window = Window(rows, 16 * words, topk, scales)
    assert window.sizes == (
        rows * 16 * words,
        rows * 4,
        rows * 8 * topk,
        rows * 4 * topk,
        rows * 4 * scales,
    )
    end = 0
    for offset, size in zip(window.offsets, window.sizes, strict=True):
        assert offset == end
        end = align(offset + size, 128)
    assert window.num_bytes == end


def test_a_control_block_by_hand() -> None:
    block = ControlBlock("mailbox", start=4096, num_bytes=200, num_peers=2, num_sets=2)
    assert block.stride == 256
    assert [block.offset(peer, box) for box in (0, 1) for peer in (0, 1)] == [4096, 4352, 4608, 4864]
    assert block.offset(1) == 4352
    assert block.end == 5120


def test_vectors_of_the_ring_areas() -> None:
    assert rdma_rings("rdma", 0, 10, 2, 1024, 1024).num_bytes == 20_973_280
    assert nvl_rings(0, 10, 8, 2, 1024, 1024).num_bytes == 83_888_000


@given(
    st.integers(1, 9),
    st.integers(1, 40).map(lambda n: 8 * n),
    st.integers(1, 9),
    st.integers(1, 9),
    st.integers(1, 9),
)
def test_low_latency_heap(
    num_tokens: int, hidden: int, local_experts: int, num_ranks: int, per_node: int
) -> None:
    sizes = LowLatencySizes(num_tokens, hidden, local_experts * num_ranks)
    heap = low_latency_heap(sizes, num_ranks, per_node)
    slots = heap.slots
    regions = list(slots.regions())
    assert_disjoint(list(heap.regions()))
    assert [(region.kind, region.slot_set) for region in regions] == [
        (kind, slot_set) for kind in ("send", "receive", "signal") for slot_set in (0, 1)
    ]
    assert slots.start % 128 == 0
    assert all(region.offset % 16 == 0 for region in regions)
    assert sum(region.num_bytes for region in regions) == 2 * (
        sizes.send_bytes + sizes.recv_bytes + sizes.signal_bytes
    )
    assert slots.end == max(region.end for region in regions)
    assert slots.end - slots.start <= sizes.total_bytes
    # The slots of a set fill its receive region exactly, in the order expert, source, token.
    for slot_set in (0, 1):
        offsets = [
            slots.slot_offset(slot_set, expert, source, token)
            for expert in range(local_experts)
            for source in range(num_ranks)
            for token in range(num_tokens)
        ]
        receive = regions[2 + slot_set]
        assert offsets == list(range(receive.offset, receive.end, slots.message_bytes))
        assert all(offset % 16 == 0 for offset in offsets)


@given(st.integers(1, 3000))
def test_low_latency_hint_suffices_for_every_number_of_experts(num_experts: int) -> None:
    sizes = LowLatencySizes(1, 8, num_experts)
    slots = LowLatencySlots(0, sizes, 1)
    assert slots.end <= sizes.total_bytes


def test_a_slot_by_hand() -> None:
    slots = LowLatencySlots(128, LowLatencySizes(num_max_tokens=4, hidden=8, num_experts=4), num_ranks=2)
    assert slots.num_local_experts == 2
    assert slots.message_bytes == 32
    assert slots.send_offset(0) == 128
    assert slots.rows_per_expert == 2 * 4
    assert slots.send_offset(1) == 128 + 4 * 4 * 32
    assert slots.row_offset(1, 3) == slots.send_offset(1) + 3 * 32
    assert slots.recv_offset(0) == 128 + 2 * 512
    assert slots.slot_offset(0, 1, 0, 3) == slots.recv_offset(0) + 11 * 32
    assert slots.slot_offset(1, 0, 0, 0) == slots.recv_offset(0) + 512
    assert slots.signal_offset(0) == 128 + 4 * 512
    assert slots.signal_offset(1) == slots.signal_offset(0) + 16


@given(st.integers(1, 200), st.integers(1, 64))
def test_control_region(num_ranks: int, per_node: int) -> None:
    control = ControlRegion(num_ranks, per_node)
    regions = list(control.regions())
    assert_disjoint(regions)
    assert all(region.offset % 128 == 0 for region in regions)
    assert control.num_bytes % 128 == 0
    assert control.num_bytes == align(max(region.end for region in regions), 128)
    messages = [region for region in regions if region.kind == "mailbox"]
    assert [(message.slot_set, message.peer) for message in messages] == [
        (box, rank) for box in (0, 1) for rank in range(num_ranks)
    ]
    # A notify message holds its header, rows of two count matrices, the channels' and every local expert's
    # counts; or what a handle says: two digests for every rank and node, three counts for every rank.
    assert control.notify_bytes % 128 == 0
    num_nodes = -(-num_ranks // per_node)
    by_handle = 16 * (num_ranks + num_nodes) + 12 * num_ranks
    used_bytes = 256 + max(8 * num_ranks + 4 * 128 + 4 * 1024, by_handle)
    assert used_bytes <= control.notify_bytes < used_bytes + 128


def test_control_region_in_full() -> None:
    assert (layout.NOTIFY_HEADER_BYTES, layout.NUM_MAX_CHANNELS, layout.STATUS_BYTES) == (256, 128, 8192)
    # Two ranks on one node, block by block: (kind, bytes per peer, peers, sets).
    found: dict[str, list[tuple[int | None, int | None, int]]] = {}
    for region in ControlRegion(2, 2).regions():
        found.setdefault(region.kind, []).append((region.slot_set, region.peer, region.num_bytes))
    expected = {
        "status": (8192, 1, 1),
        "wake-up count": (8, 1, 1),
        "abort flag": (16, 1, 1),
        "sleepers": (8, 1, 1),
        "doorbell": (8, 1, 1),
        "mailbox": (4992, 2, 2),
        "window arrival": (8, 2, 1),
        "window pulled": (8, 2, 1),
        "ring tail": (1024, 2, 1),
        "ring head": (1024, 2, 1),
        "network tail": (1024, 1, 1),
        "network head": (1024, 1, 1),
        "network counts": (128 * 4 * 3, 1, 2),
        "completion record": (64 + 8192, 2, 2),
        "low-latency packed": (8, 2, 2),
        "mask": (16, 2, 1),
        "given up": (8, 2, 1),
        "rejoin request": (64 + 16, 2, 2),
    }
    assert list(found) == list(expected)
    for kind, (num_bytes, peers, sets) in expected.items():
        assert found[kind] == [(s, p, num_bytes) for s in range(sets) for p in range(peers)]


def test_control_region_is_a_few_mib() -> None:
    assert ControlRegion(8, 8).num_bytes < MIB
    assert ControlRegion(64, 64).num_bytes < 4 * MIB
    assert ControlRegion(160, 8).num_bytes < 6 * MIB


def test_control_region_does_not_depend_on_the_config() -> None:
    small = normal_heap(Config(2, 1, 2, 1, 2), 8, 8, TokenLayout(16))
    large = normal_heap(Config(40, 6, 256, 6, 128), 8, 8, TokenLayout(14336, 0, 8))
    assert list(small.control.regions()) == list(large.control.regions())
    assert small.nvl.start == large.nvl.start


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: ControlRegion(0, 1), "num_ranks is 0: it must be at least 1"),
        (lambda: ControlRegion(1, 0), "ranks_per_node is 0: it must be at least 1"),
        (
            lambda: LowLatencySlots(0, LowLatencySizes(1, 8, 5), 2),
            "5 experts do not divide over 2 ranks: every rank holds the same number of experts;"
            " choose a multiple of 2, such as 6",
        ),
    ],
)
def test_layout_refuses(call, sentence: str) -> None:
    with pytest.raises(InvalidCall) as caught:
        call()
    assert str(caught.value) == sentence


def test_sms_that_a_call_can_use() -> None:
    assert [layout.check_num_sms("num_sms", count) for count in (2, 256)] == [2, 256]
    with pytest.raises(InvalidCall, match="--sms is 3: it must be even"):
        layout.check_num_sms("--sms", 3)
