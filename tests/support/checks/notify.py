"""Checks of the kernels of notify messages and barriers against the CPU's; on a GPU, or in Triton's
interpreter ("cpu"). Each kernel's example is among them.

A kernel that waits for other ranks finds here what they have sent already, or has no time, or is told by
the abort flag. Only `let_ranks_wait` lets two of them wait for each other: that takes a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from anyep.backends import cpu
from anyep.backends.cuda import constants
from anyep.backends.cuda.device_control import DeviceControl
from anyep.backends.cuda.kernels import notify
from anyep.backends.cuda.kernels.groups import Counts, HostWords, Prefixes, Tables
from anyep.backends.cuda.pinned import pinned_words
from anyep.core import outcomes
from anyep.core.calls import Kind
from anyep.core.digests import channel_word, mixed
from anyep.core.headers import NUM_WORDS as HEADER_WORDS
from anyep.core.headers import REFUSED_BY_COUNTS, REFUSED_BY_IDS, Field, signature
from anyep.layout import ControlRegion, Window
from tests.support.checks import deeper
from tests.support.checks.launching import launch
from tests.support.checks.normal import (
    GUARD,
    Array,
    assert_same_words,
    changed,
    guarded,
    int64,
    power_of_two,
    state_of,
    there,
)
from tests.support.depth import IS_DEEP

TIMEOUT_NS = 20 * 10**9


@dataclass(frozen=True)
class Message:
    """What a rank says in a call: its header, and its counts by rank, by (rank, channel), and by expert."""

    header: Array
    by_rank: Array | None = None
    by_channel: Array | None = None
    by_expert: Array | None = None
    digests: Array | None = None
    """Of a handle."""

    def saying(self, **words: int) -> Message:
        header = self.header.copy()
        for name, value in words.items():
            header[Field[name]] = value
        return replace(self, header=header)

    def offering(self, *offers: tuple[int, int]) -> Message:
        message = self.saying(NUM_OFFERS=len(offers))
        message.header[Field.OFFERS : Field.OFFERS + 2 * len(offers)] = np.array(offers).reshape(-1)
        return message


def counted(header: Array, by_channel: Any, by_expert: Any, by_rank: Any = None) -> Message:
    channels = np.array(by_channel, np.int32)
    rows = channels.sum(1) if by_rank is None else np.array(by_rank)
    return Message(header, rows.astype(np.int32), channels, np.array(by_expert, np.int32))


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


class Call:
    """One call of rank `me`, whose peers have sent what they say already; but not those that are missing.

    The heaps of all ranks lie in this process. The number of the last call is 4.
    """

    last = 4

    def __init__(
        self,
        device: str,
        me: int,
        said: list[Message],
        missing: tuple[int, ...] = (),
        timeout_ns: int = TIMEOUT_NS,
    ) -> None:
        self.device, self.me, self.said = device, me, said
        self.num_ranks = len(said)
        self.region = ControlRegion(self.num_ranks, self.num_ranks)
        self.right = np.zeros((self.num_ranks, self.region.num_bytes), np.uint8)
        """The heaps when all notify messages lie there, by the CPU."""
        absent = [self._post(rank) for rank in (me, *missing)]
        for rank in range(self.num_ranks):
            if rank != me and rank not in missing:
                self._post(rank)
        heaps = self.right.copy()
        for places in absent:
            for peer, place in enumerate(places):
                heaps[peer, place] = 0
        self.heaps = there(heaps, device)
        self.store("status", self.last, me)
        self.report = pinned_words(constants.REPORTED_HEADERS + HEADER_WORDS * self.num_ranks)
        self.constants = int64(self._constants(timeout_ns), device)
        self.addresses = int64([heap.data_ptr() for heap in self.heaps], device)
        self.inboxes = self.addresses[me].repeat(self.num_ranks)
        self.state = state_of(device)
        self.places = guarded((self.num_ranks, constants.TARGET_WORDS), torch.int64, device)
        blocks = torch.arange(constants.MAX_WINDOW_BLOCKS) << 30
        self.bases = (4096 * (1 + torch.arange(self.num_ranks))[:, None] + blocks[None, :]).to(device)
        """Where windows would lie; nobody goes there."""
        self.digests = torch.zeros(2 * self.num_ranks, dtype=torch.int64, device=device)
        self.totals = pinned_words(constants.TOTAL_BY_EXPERT + 64)
        self.rows_of = pinned_words(self.num_ranks)
        self.blocks = {"NUM_RANKS": self.num_ranks, "RANK_BLOCK": power_of_two(self.num_ranks)}

    @property
    def number(self) -> int:
        return self.last + 1

    def _post(self, rank: int) -> list[slice]:
        """The notify messages of a rank, as the CPU writes them; where they lie at each rank."""
        message, mailbox = self.said[rank], self.region.blocks.mailbox
        at = mailbox.offset(rank, self.number % 2)
        header = message.header.copy()
        header[Field.CALL] = self.number
        counts = (message.by_rank, message.by_channel, message.by_expert)
        if message.by_rank is None:
            own = message.digests if message.digests is not None else np.zeros(2 * self.num_ranks, np.int64)
            counts = own.view(np.int32), np.zeros((self.num_ranks, 0), np.int32), np.zeros(0, np.int32)
        base, nobody = self.right.ctypes.data + at, np.zeros(1, np.int64)
        cpu.post_notify(
            base + self.right.strides[0] * np.arange(self.num_ranks),
            np.array([nobody.ctypes.data] * self.num_ranks),
            0,
            header,
            8 * HEADER_WORDS,
            1,
            *counts,
        )
        return [slice(at, at + mailbox.stride)] * self.num_ranks

    def _constants(self, timeout_ns: int) -> list[int]:
        """As a Buffer of this rank has them."""
        device_control = SimpleNamespace(
            region=self.region,
            rank=self.me,
            heap=SimpleNamespace(address=self.heaps[self.me].data_ptr()),
            control=SimpleNamespace(timeout_s=timeout_ns / 1e9),
            report=self.report,
            _at_host=0,
        )
        return DeviceControl._constants(device_control)  # type: ignore[arg-type]

    def _word(self, kind: str, rank: int, peer: int, word: int = 0) -> torch.Tensor:
        block = getattr(self.region.blocks, kind)
        at = block.offset(peer, self.number % 2 if kind == "mailbox" else 0) + 8 * word
        return self.heaps[rank, at : at + 8].view(torch.int64)

    def load(self, kind: str, rank: int, peer: int = 0, word: int = 0) -> int:
        """A word that `peer` wrote at a rank."""
        return int(self._word(kind, rank, peer, word))

    def store(self, kind: str, value: int, rank: int, peer: int = 0, word: int = 0) -> None:
        self._word(kind, rank, peer, word).fill_(value)

    def aborts(self) -> list[int]:
        return [self.load("abort", rank) for rank in range(self.num_ranks)]

    def given_up(self) -> list[list[int]]:
        """By rank: who has given up, as it was told."""
        ranks = range(self.num_ranks)
        return [[self.load("given_up", rank, peer) for peer in ranks] for rank in ranks]

    def prepare_exchange(
        self,
        routing: torch.Tensor | None = None,
        ticket: int = 0,
        is_combine: bool = False,
        is_refused: bool = False,
        topk_idx: torch.Tensor | None = None,
    ) -> tuple[Callable[[], None], list[torch.Tensor]]:
        """What launches the exchange of notify messages; and the prefix sums that it fills, if it does."""
        if self.said[self.me].digests is not None:
            self.digests.copy_(torch.from_numpy(self.said[self.me].digests))
        mine = self.said[self.me]
        header = pinned_words(HEADER_WORDS)
        header[:] = mine.header
        prefix = routing if routing is not None else self.state
        counts, sizes, filled = [self.state] * 2, (0, 0), []
        if mine.by_rank is not None and mine.by_channel is not None and mine.by_expert is not None:
            sizes = (mine.by_channel.shape[1], mine.by_expert.shape[0] // self.num_ranks)
            shapes = ((self.num_ranks,) * 2, mine.by_channel.shape, mine.by_channel.shape)
            filled = [guarded(shape, torch.int32, self.device) for shape in shapes]
            filled[1].copy_(torch.from_numpy(mine.by_channel))
            counts = [there(part, self.device) for part in (mine.by_rank, mine.by_expert)]

        def start() -> None:
            launch(
                *(notify.exchange_notify, self.device, 1),
                Tables(
                    *(self.constants, self.addresses, self.state, self.places, self.bases),
                    *(self.inboxes, self.addresses),
                ),
                Prefixes(*([*filled, self.digests] if filled else [prefix, *[self.state] * 2, self.digests])),
                Counts(*counts, topk_idx if topk_idx is not None else self.state, self.state),
                HostWords(
                    *(int(words.ctypes.data) for words in (header, self.totals, self.rows_of)), ticket=ticket
                ),
                *sizes,
                num_warps=1,
                **self.blocks,
                IS_COMBINE=is_combine,
                IS_REFUSED=is_refused,
                CHANNEL_BLOCK=power_of_two(sizes[0]) if sizes[0] else 0,
                EXPERT_BLOCK=power_of_two(sizes[1]) if sizes[1] else 0,
                RANKS_PER_NODE=self.num_ranks,
            )

        return start, filled

    def exchange(self, routing: torch.Tensor | None = None, **how: Any) -> list[torch.Tensor]:
        """Exchange notify messages; the prefix sums, where the notify messages have counts."""
        start, filled = self.prepare_exchange(routing, **how)
        start()
        synchronize(self.device)
        return [part.cpu() for part in filled]

    def start_barrier(self, flags_at: int, unless_rings: bool = False) -> None:
        launch(
            *(notify.barrier, self.device, 1, self.constants, self.addresses, self.state),
            num_warps=1,
            FLAGS_AT=flags_at,
            UNLESS_RINGS=unless_rings,
            **self.blocks,
            RANKS_PER_NODE=self.num_ranks,
        )

    def barrier(self, flags_at: int, outcome: int = 0, unless_rings: bool = False) -> int:
        """The barrier of this call, which had an outcome before; the outcome."""
        self.state[constants.NUMBER] = self.number
        self.state[constants.OUTCOME] = outcome
        self.start_barrier(flags_at, unless_rings)
        synchronize(self.device)
        return self.outcome

    @property
    def outcome(self) -> int:
        return int(self.state[constants.OUTCOME])

    def assert_reported(
        self, outcome: int, kind: Kind, times: int = 1, waited_for: int | None = None
    ) -> None:
        words = self.report
        assert words[constants.NUM_REPORTS] == times
        assert words[constants.REPORTED_OUTCOME] == outcome
        assert words[constants.REPORTED_NUMBER] == self.number
        assert words[constants.REPORTED_KIND] == kind
        assert waited_for is None or words[constants.REPORTED_WAIT] == waited_for


def dispatch_header(num_ranks: int, local_experts: int, num_channels: int, **more: int) -> Array:
    header = signature(
        row_bytes=64, dtype=1, num_experts=num_ranks * local_experts, num_channels=num_channels, **more
    )
    header[Field.KIND] = Kind.DISPATCH
    return header


def random_notify(
    num_ranks: int, num_channels: int, local_experts: int, seed: int, num_topk: int = 2, num_scales: int = 0
) -> list[Message]:
    """Of a dispatch: ranks with several offers and without any; with a worst case and without one."""
    random = np.random.default_rng(seed)
    header = dispatch_header(num_ranks, local_experts, num_channels, num_topk=num_topk, num_scales=num_scales)
    said = []
    for rank in range(num_ranks):
        by_channel = random.integers(0, 9, (num_ranks, num_channels))
        message = counted(header, by_channel, random.integers(0, 9, num_ranks * local_experts))
        sizes = random.integers(0, 20, int(random.integers(0, 9))) * 1024
        message = message.offering(*((128 * 100 * index, int(size)) for index, size in enumerate(sizes)))
        said.append(message.saying(RESULT_ROWS=1000 if rank % 3 == 2 else -1))
    return said


def matrix_of(said: list[Message]) -> Array:
    return np.stack([message.by_rank for message in said if message.by_rank is not None])


def check_notify_with_counts(device: str) -> None:
    """exchange_notify of a dispatch: its notify messages, prefix sums, places, totals."""
    for me, num_ranks, num_channels, local_experts in (
        (1, 2, 2, 1),
        (0, 3, 5, 4),
        (4, 5, 3, 2),
        (0, 1, 16, 9),
    ):
        said = random_notify(num_ranks, num_channels, local_experts, me, num_topk=me, num_scales=3 * me)
        call = Call(device, me, said)
        prefixes = call.exchange(ticket=77)
        mailbox = call.region.blocks.mailbox
        there_now = call.heaps.cpu().numpy()
        end = mailbox.offset(0, 1) + num_ranks * mailbox.stride
        assert (there_now[:, mailbox.start : end] == call.right[:, mailbox.start : end]).all()
        assert call.load("status", me) == call.number

        matrix, received = matrix_of(said), np.empty((num_ranks, num_channels), np.int32)
        by_expert = np.empty(local_experts, np.int64)
        at_me = call.right[me].ctypes.data
        boxes = [mailbox.offset(rank, call.number % 2) for rank in range(num_ranks)]
        cpu.read_counts(at_me + np.array(boxes), 8 * HEADER_WORDS, np.empty_like(matrix), received, by_expert)
        sent = said[me].by_channel
        assert sent is not None
        right = [np.empty(shape, np.int32) for shape in (matrix.shape, sent.shape, sent.shape)]
        nothing = np.empty((0, num_ranks), np.int32)
        cpu.fill_handle(me, matrix, sent, received, nothing, *right, nothing)
        for part, expected in zip(prefixes, right, strict=True):
            assert part.tolist() == expected.tolist()

        headers = np.stack([message.header for message in said])
        places = np.empty((num_ranks, 5), np.int64)
        offsets, num_rows = np.empty(num_ranks, np.int64), np.empty(num_ranks, np.int64)
        token = headers[0]
        window = Window(1, int(token[Field.ROW_BYTES]), int(token[Field.TOPK]), int(token[Field.SCALES]))
        bad = cpu.choose_windows(
            *(headers, matrix, int(Field.RESULT_ROWS), int(Field.NUM_OFFERS), int(Field.OFFERS)),
            *(np.array(window.sizes), call.bases[:, 0].cpu().numpy().copy(), num_rows, offsets, places),
        )
        assert bad == -1
        arriving = matrix.sum(0)
        rows = np.where(headers[:, Field.RESULT_ROWS] >= 0, headers[:, Field.RESULT_ROWS], arriving)
        assert call.places[:, :5].tolist() == places.tolist()
        assert call.places[:, constants.TARGET_ROWS].tolist() == rows.tolist()
        uses_rings = int((offsets < 0).any())
        expected_state = state_of(
            "cpu",
            NUMBER=call.number,
            NUM_ROWS=int(arriving[me]),
            USES_RINGS=uses_rings,
            WAITED_FOR=constants.MAILBOX_AT,
            KIND=Kind.DISPATCH,
        )
        assert call.state.tolist() == expected_state.tolist()
        first, all_wait = constants.TOTAL_BY_EXPERT, int((headers[:, Field.RESULT_ROWS] < 0).all())
        assert all_wait == (num_ranks < 3)
        assert call.totals[:first].tolist() == [77, 0, int(arriving[me]), uses_rings, 0, all_wait, 0, 0]
        assert call.totals[first : first + local_experts].tolist() == by_expert.tolist()
        assert call.rows_of.tolist() == rows.tolist()
        assert not call.report.any()
        assert not any(call.aborts())


def check_examples_of_notify(device: str) -> None:
    """What the docstrings of post_counts, read_counts, choose_windows and exchange_notify say."""
    header = dispatch_header(2, 2, 2)
    said = [
        counted(header, [[1, 2], [4, 0]], [9, 8, 7, 6], [3, 4]),
        counted(header, [[0, 0], [0, 0]], [0, 0, 0, 0]),
    ]
    call = Call(device, 0, said)
    call.exchange()
    at = call.region.blocks.mailbox.offset(0, 1) + 8 * HEADER_WORDS
    assert call.heaps[1, at : at + 24].view(torch.int32).tolist() == [3, 4, 4, 0, 7, 6]
    assert call.load("status", 0) == 5
    assert call.load("mailbox", 1, peer=0) == 5
    # Nobody offers a window; the host did not ask.
    assert call.state[constants.USES_RINGS] == 1
    assert call.totals[constants.TICKET] == 0

    header = dispatch_header(2, 1, 2)
    said = [
        counted(header, [[1, 1], [1, 0]], [0, 3], [2, 1]),
        counted(header, [[1, 0], [1, 2]], [0, 4], [1, 3]),
    ]
    call = Call(device, 1, said)
    rank_prefix, channel_prefix, recv_channel_prefix = call.exchange(ticket=1)
    assert rank_prefix.tolist() == [[2, 1], [3, 4]]
    assert channel_prefix.tolist() == [[1, 1], [1, 3]]
    assert recv_channel_prefix.tolist() == [[0, 1], [0, 1]]
    begun = sum(mixed(channel_word(channel, row)) for channel, row in ((0, 0), (1, 1)))
    assert_same_words(call.digests, [begun] * 4)
    assert call.rows_of.tolist() == [3, 4]
    assert call.totals[constants.TOTAL_BY_EXPERT] == 7

    for offers, places in (
        ([(0, 256), (512, 1024)], [4608, 4864, 4992, 4992, 4992, 3]),
        ([(0, 256)], [0, 0, 0, 0, 0, 3]),
        ([(0, 384)], [4096, 4352, 4480, 4480, 4480, 3]),
        # In the second block of windows.
        (
            [((1 << constants.WINDOW_BLOCK_BITS) + 128, 512)],
            [(1 << 30) + n for n in (4224, 4480, 4608, 4608, 4608)] + [3],
        ),
    ):
        message = counted(dispatch_header(1, 1, 1), [[3]], [3]).offering(*offers)
        call = Call(device, 0, [message])
        call.exchange()
        assert call.places.tolist() == [places]


NUM_WORDS = tl.constexpr(HEADER_WORDS)


@triton.jit
def ask_steps(tables: Tables, theirs, mine, late, answers):
    """What the small steps of `exchange_notify` say in the examples of their docstrings."""
    ranks = tl.arange(0, 2)
    there, here = notify.mailboxes(tables, 5, ranks, ranks < 2)
    tl.store(answers + ranks, there)
    tl.store(answers + 2 + ranks, here)
    words = tl.arange(0, NUM_WORDS)
    theirs_of_all = tl.load(theirs + ranks[:, None] * NUM_WORDS + words[None, :])
    mine_alone = tl.load(mine + words)
    nothing_late = tl.zeros((2,), tl.int32)
    tl.store(answers + 4 + ranks, notify.compare_headers(theirs_of_all, mine_alone, nothing_late))
    tl.store(answers + 6 + ranks, notify.compare_headers(theirs_of_all, mine_alone, tl.load(late + ranks)))


def check_steps_of_notify(device: str) -> None:
    here = int64([0] * constants.NUM_CONSTANTS, device)
    here[constants.RANK], here[constants.OWN_HEAP] = 1, 1000
    here[constants.MAILBOX_AT], here[constants.BOX_STRIDE], here[constants.NOTIFY_STRIDE] = 100, 200, 50
    heaps, answers = int64([0, 1000], device), int64([GUARD] * 8, device)
    inboxes = int64([1000, 1000], device)
    headers = torch.zeros(2, HEADER_WORDS, dtype=torch.int64)
    headers[:, Field.ROW_BYTES] = torch.tensor([64, 32])
    launch(
        *(ask_steps, device, 1, Tables(here, *[heaps] * 4, inboxes, heaps), headers.to(device)),
        *(headers[0].to(device), torch.tensor([outcomes.LATE, 0], dtype=torch.int32, device=device), answers),
        num_warps=1,
    )
    found = answers.view(-1, 2).tolist()
    assert found[:2] == [[350, 1350], [1300, 1350]]
    assert found[2:] == [[0, outcomes.DIFFERENT], [outcomes.LATE, 0]]


def cached_notify(**words: int) -> Message:
    header = signature(row_bytes=64, dtype=1, num_channels=2)
    header[Field.KIND] = Kind.CACHED_DISPATCH
    return Message(header).saying(RESULT_ROWS=5).offering((256, 4096)).saying(**words)


def routing_word(device: str, routing: Array) -> int:
    """The checksum that a notify message carries for a prefix matrix; nobody waits for it."""
    num_ranks = len(routing)
    absent = tuple(range(1, num_ranks))
    call = Call(device, 0, [cached_notify()] * num_ranks, absent, timeout_ns=-TIMEOUT_NS)
    call.exchange(there(routing, device))
    return call.load("mailbox", num_ranks - 1, peer=0, word=Field.ROUTING)


def check_notify_without_counts(device: str) -> None:
    """exchange_notify of a cached dispatch, which must go along one routing."""
    random = np.random.default_rng(2)
    for num_ranks in (2, 3, 5):
        prefix = random.integers(0, 9, (num_ranks, num_ranks)).cumsum(0).astype(np.int32)
        word = routing_word(device, prefix)
        assert word > 0
        others = [prefix.T.copy(), prefix + 1, changed(prefix, (num_ranks - 1, 0), 99)]
        others += [changed(prefix, (0, 1), prefix[0, 1] + step) for step in (1, -1, 256, 1 << 20)]
        words = [word, *(routing_word(device, other) for other in others)]
        assert len(set(words)) == len(words)
        said = [cached_notify(ROUTING=word)] * num_ranks
        call = Call(device, 1, said)
        call.exchange(there(prefix, device))
        assert call.outcome == 0
        assert (call.heaps.cpu().numpy()[:, 128:] == call.right[:, 128:]).all()
        # 5 rows of 64 bytes at 256 in each rank's window.
        for rank, places in enumerate(call.places.tolist()):
            first = 4096 * (1 + rank) + 256
            assert places == [first, first + 384, first + 512, first + 512, first + 512, 5]
        call = Call(device, 1, said)
        call.exchange(there(others[0], device))
        assert call.outcome == outcomes.outcome_of(outcomes.DIFFERENT, 0)
        call.assert_reported(call.outcome, Kind.CACHED_DISPATCH)
        reported = call.report[constants.REPORTED_HEADERS :].reshape(num_ranks, HEADER_WORDS)
        assert reported[:, Field.ROUTING].tolist() == [
            words[1] if rank == 1 else word for rank in range(num_ranks)
        ]


@deeper
def check_digests_in_notify(device: str) -> None:
    """exchange_notify of handles that tell different things of the same rows; all ranks hear which."""
    random = np.random.default_rng(4)
    # In the interpreter three ranks may do.
    for num_ranks in (1, 2, 3, 5) if IS_DEEP or device != "cpu" else (1, 2, 3):
        prefix = np.ones((num_ranks, num_ranks), np.int32)
        word = routing_word(device, prefix)
        sent = random.integers(-(2**63), 2**63 - 1, (num_ranks, num_ranks))
        own = [np.concatenate([sent[rank], sent[:, rank]]) for rank in range(num_ranks)]
        for kind in (Kind.CACHED_DISPATCH, Kind.COMBINE):
            said = [replace(cached_notify(KIND=kind, ROUTING=word), digests=digests) for digests in own]
            call = Call(device, num_ranks - 1, said)
            call.exchange(there(prefix, device), is_combine=kind == Kind.COMBINE)
            assert call.outcome == 0
            assert not call.report.any()
            assert (call.heaps.cpu().numpy()[:, 128:] == call.right[:, 128:]).all()
            for wrong in range(num_ranks):
                at = int(random.integers(2 * num_ranks))
                sender, receiver = (wrong, at) if at < num_ranks else (at - num_ranks, wrong)
                others = [*said]
                others[wrong] = replace(said[wrong], digests=changed(own[wrong], at, own[wrong][at] ^ 1))
                for me in range(num_ranks):
                    call = Call(device, me, others)
                    call.exchange(there(prefix, device), is_combine=kind == Kind.COMBINE)
                    assert call.outcome == outcomes.outcome_of(outcomes.DIFFERENT, sender)
                    call.assert_reported(call.outcome, kind)
                    right = constants.wrong_word(constants.OTHER_ROUTING, sender * num_ranks + receiver)
                    assert call.report[constants.REPORTED_WRONG] == right
                    # What else is different comes first.
                    call = Call(
                        device, me, [message.saying(DTYPE=9 + (message is others[0])) for message in others]
                    )
                    call.exchange(there(prefix, device), is_combine=kind == Kind.COMBINE)
                    assert (call.report[constants.REPORTED_WRONG] == 0) == (num_ranks > 1)
    # The example of first_other_rows.
    own = [np.array(words, np.int64) for words in ([1, 2, 1, 3], [3, 4, 9, 4])]
    prefix = np.ones((2, 2), np.int32)
    message = cached_notify(ROUTING=routing_word(device, prefix))
    call = Call(device, 1, [replace(message, digests=digests) for digests in own])
    call.exchange(there(prefix, device))
    assert call.report[constants.REPORTED_WRONG] == constants.wrong_word(constants.OTHER_ROUTING, 1)


def check_notify_of_a_combine(device: str) -> None:
    """exchange_notify of a combine: where each rank's rows and weights lie."""
    prefix = np.array([[2, 1], [3, 4]], np.int32)
    word = routing_word(device, prefix)
    block, nowhere = 2 << constants.WINDOW_BLOCK_BITS, [0, 0]
    # By rank: offsets of rows and weights; where they lie; whether rings are used.
    for said_by, places, uses_rings in (
        (((0, 128), (256, 0)), ([4096, 4224], [8448, 8192]), 0),
        (((block + 512, 0), (0, block)), ([(2 << 30) + 4608, 4096], [8192, (2 << 30) + 8192]), 0),
        (((-1, -1), (0, -1)), (nowhere, [8192, 0]), 1),
    ):
        said = [
            cached_notify(KIND=Kind.COMBINE, ROUTING=word, RESULT_ROWS=6 + rank).saying(
                X_OFFSET=x, WEIGHTS_OFFSET=weights
            )
            for rank, (x, weights) in enumerate(said_by)
        ]
        call = Call(device, 0, said)
        call.exchange(there(prefix, device), is_combine=True)
        assert call.outcome == 0
        assert call.places[:, [0, 3, 5]].tolist() == [[*found, 6 + rank] for rank, found in enumerate(places)]
        assert (call.places[:, [1, 2, 4]] == GUARD).all()
        assert int(call.state[constants.USES_RINGS]) == uses_rings


def check_notify_that_differ(device: str) -> None:
    """exchange_notify where a rank called something else, refuses, or would get too many rows."""
    said = random_notify(3, 2, 2, 8)
    different = [outcomes.outcome_of(outcomes.DIFFERENT, rank) for rank in range(3)]
    for me, words, outcome in (
        (0, ({}, {}, {"ROW_BYTES": 128}), different[2]),
        (2, ({}, {}, {"ROW_BYTES": 128}), different[0]),
        (0, ({}, {"KIND": Kind.COMBINE}, {"DTYPE": 2}), different[1]),
        (1, ({}, {}, {"REFUSED": 2}), different[2]),
        (1, ({"RING_ROWS": 3}, {}, {"REFUSED": 1}), different[0]),
        # Who refused knows it, and so do those who refused as well.
        (0, ({"REFUSED": 1},) * 3, different[0]),
        (1, ({}, {}, {"RESULT_ROWS": 0}), outcomes.outcome_of(outcomes.TOO_MANY, 2)),
        (2, ({"RESULT_ROWS": 1}, {}, {"RESULT_ROWS": 0}), outcomes.outcome_of(outcomes.TOO_MANY, 0)),
        (2, ({"RESULT_ROWS": 1}, {"SCALES": 1}, {}), outcomes.outcome_of(outcomes.TOO_MANY, 0)),
        (2, ({"TOPK": 9}, {"RESULT_ROWS": 1}, {}), different[0]),
    ):
        notify_of_ranks = [message.saying(**more) for message, more in zip(said, words, strict=True)]
        call = Call(device, me, notify_of_ranks)
        call.exchange(ticket=9)
        assert call.outcome == outcome
        assert call.totals[: constants.TOTAL_ROWS].tolist() == [9, outcome]
        call.assert_reported(outcome, notify_of_ranks[me].header[Field.KIND])
        reported = call.report[constants.REPORTED_HEADERS :].reshape(3, HEADER_WORDS)
        expected = np.stack([message.header for message in notify_of_ranks])
        expected[:, Field.CALL] = call.number
        assert (reported == expected).all()
        assert not any(call.aborts()), "all ranks find the same, and go on"
    arriving = int(matrix_of(said).sum(0)[1])
    for limit, outcome in ((arriving, 0), (arriving - 1, outcomes.outcome_of(outcomes.TOO_MANY, 1))):
        call = Call(device, 0, [said[0], said[1].saying(RESULT_ROWS=limit), said[2]])
        call.exchange()
        assert call.outcome == outcome


def check_notify_of_wrong_counts(device: str) -> None:
    """exchange_notify after place_tokens has found a contradiction; all ranks hear of it."""
    said = random_notify(2, 2, 2, 8)
    call = Call(device, 1, said)
    wrong = constants.wrong_word(constants.WRONG_EXPERT_COUNT, 3)
    call.state[constants.IS_WRONG] = wrong
    call.exchange(ticket=3)
    assert call.outcome == outcomes.outcome_of(outcomes.DIFFERENT, 0)
    assert call.state[constants.IS_WRONG] == 0, "the next call may be right"
    assert call.load("mailbox", 0, peer=1, word=Field.REFUSED) == REFUSED_BY_COUNTS
    assert call.report[constants.REPORTED_WRONG] == wrong
    call = Call(device, 1, said)
    call.state[constants.IS_WRONG] = constants.wrong_word(constants.WRONG_ID, 5)
    call.exchange(ticket=3, topk_idx=int64([0, 1, 2, 3, -1, -77], device))
    assert call.load("mailbox", 0, peer=1, word=Field.REFUSED) == REFUSED_BY_IDS
    assert call.report[constants.REPORTED_WRONG] == constants.wrong_word(constants.WRONG_ID, 5)
    assert call.report[constants.REPORTED_VALUE] == -77
    call = Call(device, 0, [said[0], said[1].saying(REFUSED=REFUSED_BY_COUNTS)])
    call.exchange(ticket=3)
    assert call.outcome == outcomes.outcome_of(outcomes.DIFFERENT, 1)
    assert call.report[constants.REPORTED_WRONG] == 0


def check_notify_that_refuse(device: str) -> None:
    """exchange_notify of a rank that refuses its own call: no counts, no checksum, no report."""
    header = signature()
    header[Field.KIND] = Kind.COMBINE
    mine = Message(header).saying(REFUSED=2)
    call = Call(device, 0, [mine, cached_notify(KIND=Kind.COMBINE, ROUTING=5)])
    call.exchange(is_refused=True)
    assert call.load("mailbox", 1, peer=0, word=Field.REFUSED) == 2
    assert call.load("mailbox", 1, peer=0, word=Field.ROUTING) == 0
    assert call.load("status", 0) == call.number
    assert call.outcome
    assert not call.report.any()


def check_notify_that_do_not_come(device: str) -> None:
    """exchange_notify that waits in vain: until its deadline, or until it is told."""
    said = random_notify(3, 2, 2, 8)
    for me, missing, outcome in (
        (0, (1,), outcomes.outcome_of(outcomes.LATE, 1)),
        (2, (0, 1), outcomes.outcome_of(outcomes.LATE, 0)),
    ):
        call = Call(device, me, said, missing, timeout_ns=10**6)
        call.exchange(ticket=5)
        assert call.outcome == outcome
        assert call.totals[: constants.TOTAL_ROWS].tolist() == [5, outcome], "the host hears of it"
        call.assert_reported(outcome, Kind.DISPATCH, waited_for=constants.MAILBOX_AT)
        assert call.aborts() == [me + 1] * 3, "nobody should wait for one who has given up"
        assert call.given_up() == [[int(rank == me) for rank in range(3)]] * 3
    call = Call(device, 1, said, (2,))
    call.store("abort", 1, rank=1)
    call.exchange()
    assert call.outcome == outcomes.outcome_of(outcomes.STOPPED, 2)
    assert call.aborts() == [2, 1, 2], "its own says which rank has stopped it"
    # A rank that has all notify messages goes on even if its abort flag is raised.
    call = Call(device, 1, said)
    call.store("abort", 1, rank=1)
    call.exchange()
    assert call.outcome == 0
    assert call.aborts() == [0, 1, 0]
    # While one notify message is missing the others are not judged, in any order of arrival.
    for words in ({"ROW_BYTES": 128}, {"REFUSED": 1}, {"RESULT_ROWS": 0}):
        call = Call(device, 2, [said[0].saying(**words), *said[1:]], (1,), timeout_ns=10**6)
        call.exchange()
        assert call.outcome == outcomes.outcome_of(outcomes.LATE, 1)


def check_notify_after_giving_up(device: str) -> None:
    """exchange_notify of a rank that has waited in vain before: its last notify message stays for those who
    wait."""
    routing = there(np.ones((3, 3), np.int32), device)
    kinds: tuple[tuple[list[Message], dict[str, Any]], ...] = (
        (random_notify(3, 2, 2, 8), {"ticket": 7}),
        ([cached_notify()] * 3, {"routing": routing}),
        ([cached_notify(KIND=Kind.COMBINE)] * 3, {"routing": routing, "is_combine": True}),
        ([cached_notify(REFUSED=1)] * 3, {"is_refused": True}),
    )
    for said, how in kinds:
        call = Call(device, 1, said, (2,), timeout_ns=10**6)
        call.exchange(**how)
        assert call.outcome == outcomes.outcome_of(outcomes.LATE, 2)
        call.assert_reported(call.outcome, said[1].header[Field.KIND], waited_for=constants.MAILBOX_AT)
        heaps = call.heaps.clone()
        call.last += 2
        for peer in range(3):
            call.store("mailbox", call.number, rank=1, peer=peer)
        call.report[constants.NUM_READ] = call.report[constants.NUM_REPORTS]
        for _ in range(2):
            call.exchange(**how)
            assert call.outcome == outcomes.outcome_of(outcomes.OUT, 1)
            if "ticket" in how:
                assert call.totals[: constants.TOTAL_ROWS].tolist() == [how["ticket"], call.outcome]
            assert call.barrier(constants.ARRIVED_AT, call.outcome) == call.outcome
        assert call.load("status", 1) == call.number, "calls are counted all the same"
        for peer in (0, 2):
            assert (call.heaps[peer] == heaps[peer]).all()
        assert call.report[constants.NUM_REPORTS] == 2


def check_a_call_left_out(device: str) -> None:
    """Flags that are further on than the call: their ranks have given it up."""
    said = random_notify(3, 2, 2, 8)
    call = Call(device, 0, said)
    call.store("mailbox", call.number + 2, rank=0, peer=1)
    call.exchange()
    assert call.outcome == outcomes.outcome_of(outcomes.STOPPED, 1)
    assert call.aborts() == [1, 1, 1]
    # The example of why_not_there.
    for abort, outcome in ((2, outcomes.STOPPED), (0, outcomes.LATE)):
        call = plain_call(device, 0, 3, timeout_ns=0)
        call.store("abort", abort, rank=0)
        for peer, flag in enumerate((5, 4, 6)):
            call.store("arrival", flag, rank=0, peer=peer)
        assert call.barrier(constants.ARRIVED_AT) == outcomes.outcome_of(outcome, 1)
    call = plain_call(device, 0, 3)
    for peer, flag in enumerate((5, 5, 6)):
        call.store("arrival", flag, rank=0, peer=peer)
    assert call.barrier(constants.ARRIVED_AT) == outcomes.outcome_of(outcomes.STOPPED, 2)


def check_reports(device: str) -> None:
    """A report waits until it is read; a call makes one at most."""
    said = random_notify(2, 2, 2, 8)
    call = Call(device, 0, [said[0], said[1].saying(TOPK=9)])
    call.report[constants.NUM_REPORTS], call.report[constants.NUM_READ] = 6, 5
    before = call.report.copy()
    call.exchange()
    assert call.outcome
    assert (call.report == before).all()
    call.report[constants.NUM_READ] = 6
    # The same call: it tried to report.
    call.barrier(constants.ARRIVED_AT, call.outcome)
    assert (call.report[:1] == before[:1]).all()
    call.state[constants.IS_REPORTED] = 0
    call.barrier(constants.ARRIVED_AT, call.outcome)
    call.assert_reported(call.outcome, Kind.DISPATCH, times=7)


def plain_call(device: str, me: int, num_ranks: int, timeout_ns: int = TIMEOUT_NS) -> Call:
    call = Call(device, me, random_notify(num_ranks, 1, 1, 0), timeout_ns=timeout_ns)
    call.state[constants.KIND] = Kind.COMBINE
    return call


def check_barrier(device: str) -> None:
    """barrier: flags at all peers, a wait for theirs."""
    for fact, kind in ((constants.ARRIVED_AT, "arrival"), (constants.PULLED_AT, "pulled")):
        # The example: flags [5, 4], no time.
        call = plain_call(device, 0, 2, timeout_ns=0)
        call.store(kind, 4, rank=0, peer=1)
        assert call.barrier(fact) == 1 + 16 * 1
        assert [call.load(kind, 0), call.load(kind, 1)] == [5, 5]
        call.assert_reported(17, Kind.COMBINE, waited_for=fact)
        assert call.aborts() == [1, 1]
        for num_ranks in (1, 3, 5):
            call = plain_call(device, num_ranks // 2, num_ranks)
            for peer in range(num_ranks):
                call.store(kind, call.number, rank=call.me, peer=peer)
            assert call.barrier(fact) == 0
            flags = [call.load(kind, rank, peer=call.me) for rank in range(num_ranks)]
            assert flags == [call.number] * num_ranks
            assert not call.report.any()
            assert not any(call.aborts())
    call = plain_call(device, 0, 2)
    call.store("abort", 2, rank=0)
    assert call.barrier(constants.ARRIVED_AT) == outcomes.outcome_of(outcomes.STOPPED, 1)


def check_barrier_unless_rings(device: str) -> None:
    """barrier of a call that may have sent nothing yet, as some rows go through rings: then nobody waits."""
    for uses_rings, flag in ((1, 0), (0, 5)):
        call = plain_call(device, 0, 2)
        call.state[constants.USES_RINGS] = uses_rings
        call.store("arrival", flag, rank=0, peer=1)
        assert call.barrier(constants.ARRIVED_AT, unless_rings=True) == 0
        assert call.load("arrival", 1) == flag


def check_barrier_after_trouble(device: str) -> None:
    """barrier of a call that went wrong: everywhere, then nobody waits; or here alone, then the others do."""
    for code in (outcomes.LATE, outcomes.DIFFERENT, outcomes.STOPPED, outcomes.TOO_MANY):
        call = plain_call(device, 0, 2)
        outcome = outcomes.outcome_of(code, 1)
        assert call.barrier(constants.ARRIVED_AT, outcome) == outcome
        assert call.load("arrival", 1) == 0
        assert call.report[constants.REPORTED_OUTCOME] == outcome
        gives_up = code in (outcomes.LATE, outcomes.STOPPED)
        assert call.aborts() == [gives_up] * 2
        assert call.given_up() == [[gives_up, 0]] * 2
    call = plain_call(device, 0, 2)
    call.store("pulled", call.number, rank=0, peer=1)
    outcome = outcomes.outcome_of(outcomes.BAD_HANDLE, 1)
    call.state[constants.BAD_ROWS] = outcome
    assert call.barrier(constants.PULLED_AT) == outcome
    assert call.load("pulled", 1) == call.number
    assert call.report[constants.REPORTED_OUTCOME] == outcome
    assert not any(call.aborts())


def check_what_the_host_says(device: str) -> None:
    """Who waits long enough is told by the host, too: abort_of_host and raise_abort."""
    said = random_notify(3, 2, 2, 8)
    # The example: the host says 2, since rank 1 is gone.
    call = Call(device, 0, said, (1,))
    host = pinned_words(1)
    call.store("abort", int(host.ctypes.data), rank=0, word=1)
    host[0] = 2
    call.exchange()
    assert call.outcome == outcomes.outcome_of(outcomes.STOPPED, 1)
    assert call.aborts() == [2, 1, 1], "by the host here; everywhere else this rank gives up"
    call.assert_reported(call.outcome, Kind.DISPATCH, waited_for=constants.MAILBOX_AT)
    call = plain_call(device, 2, 3)
    call.store("abort", int(host.ctypes.data), rank=2, word=1)
    call.store("arrival", call.number, rank=2, peer=0)
    assert call.barrier(constants.ARRIVED_AT) == outcomes.outcome_of(outcomes.STOPPED, 1)
    # It is not asked as long as all goes well, nor if it says nothing.
    call = Call(device, 0, said)
    call.store("abort", 1, rank=0, word=1)
    call.exchange()
    assert call.outcome == 0
    host[0] = 0
    call = Call(device, 0, said, (1,), timeout_ns=10**6)
    call.store("abort", int(host.ctypes.data), rank=0, word=1)
    call.exchange()
    assert call.outcome == outcomes.outcome_of(outcomes.LATE, 1)
    assert host[0] == 0


def check_new_block(device: str) -> None:
    """place_in_new_block: windows for those who have none."""
    call = plain_call(device, 0, 3)
    has_window = [GUARD] * 5 + [9]
    call.places.copy_(int64([[0, 0, 0, 0, 0, 3], has_window, [0, 0, 0, 0, 0, 0]]))
    call.state[constants.USES_RINGS] = 1
    launch(
        *(notify.place_in_new_block, device, 1, call.bases, call.state, call.places),
        *((1 << constants.WINDOW_BLOCK_BITS) + 256, 64, 2),
        num_warps=1,
        **call.blocks,
        SOURCE_BYTES=4,
    )
    window = Window(3, 64, 2, 1)
    first, last = (int(call.bases[rank, 1]) + 256 for rank in (0, 2))
    assert call.places.tolist() == [
        [*(first + offset for offset in window.offsets), 3],
        has_window,
        [last] * 5 + [0],
    ]
    assert call.state[constants.USES_RINGS] == 0


def let_ranks_wait(device: str) -> None:
    """Two ranks, each on a stream, exchange notify messages and wait in a barrier; on a GPU only."""
    header = dispatch_header(2, 2, 3)
    random = np.random.default_rng(1)
    said = [
        counted(header, random.integers(0, 9, (2, 3)), random.integers(0, 9, 4)).offering((256, 1 << 20))
        for _ in range(2)
    ]
    streams = [torch.cuda.Stream() for _ in range(2)]  # type: ignore[no-untyped-call]
    # To load a kernel may have to wait for running ones: here those without time come first.
    for timeout_ns in (-TIMEOUT_NS, TIMEOUT_NS):
        calls = [Call(device, me, said, (0, 1), timeout_ns) for me in range(2)]
        for call in calls:
            # The same heaps for both.
            call.heaps, call.addresses = calls[0].heaps, calls[0].addresses
            call.constants[constants.OWN_HEAP] = call.addresses[call.me]
            call.inboxes = call.addresses[call.me].repeat(call.num_ranks)
            call.store("status", call.last, call.me)
        # While one waits for the other there is nothing that the host may wait for.
        prepared = [call.prepare_exchange()[0] for call in calls]
        synchronize(device)
        for _ in range(5):
            for call, start, stream in zip(calls, prepared, streams, strict=True):
                with torch.cuda.stream(stream):
                    start()
                    call.start_barrier(constants.ARRIVED_AT)
        synchronize(device)
    assert [call.outcome for call in calls] == [0, 0]
    assert [call.load("arrival", call.me, 1 - call.me) for call in calls] == [9, 9]
    assert [call.load("status", call.me) for call in calls] == [9, 9]
    assert [int(call.state[constants.NUM_ROWS]) for call in calls] == matrix_of(said).sum(0).tolist()
