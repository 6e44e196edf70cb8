"""How ranks talk on GPUs: the waits are in the kernels, and the host hears later what went wrong.

What people and processes need to know of each other (who is dead, who failed and why, why a call was refused)
goes through the hosts' shared memory, as on the CPU: that is the `Conversation`. Letters, flags and call
numbers are in the GPUs' memory, and only kernels touch them. A kernel that has waited for a while looks into
the host's memory, too, whether a rank is gone: no other kernel could tell it, as long as the caller's stream
waits for this one.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import numpy as np
import torch

from anyep import outcomes
from anyep.backends.cuda import facts
from anyep.backends.cuda.kernels import letters as kernels
from anyep.backends.cuda.launch import Launcher
from anyep.backends.cuda.pinned import Headers
from anyep.backends.cuda.tiles import block_of
from anyep.errors import AnyEPError, BufferBroken, Disagreement, InvalidCall, no_expert
from anyep.headers import REFUSED_BY_COUNTS, REFUSED_BY_IDS, Field
from anyep.layout import NUM_MAX_CHANNELS, ControlRegion
from anyep.modes.conversation import Array, Call, Conversation, Stall, Topic
from anyep.modes.letters import NUM_WORDS, SIGNATURE_WORDS, signature, word_for_people
from anyep.modes.routing import other_rows
from anyep.modes.status import Phase, name_of_call
from anyep.modes.watch import Watch
from anyep.sizes import NUM_MAX_LOCAL_EXPERTS

SPIN_S: Final = 200e-6
NAP_S: Final = 50e-6
LOOK_S: Final = 0.2
NUM_ADDRESSES: Final = 5
SAID: Final = 8
"""Bytes after the alarm: in the host's region what it says to kernels, in the heap the address of that."""
KIND: Final = int(Field.KIND)
WAITS: Final = {
    facts.MAILBOX_AT: ("letter", Phase.NOTIFY),
    facts.ARRIVED_AT: ("rows", Phase.RECEIVE),
    facts.PULLED_AT: ("acknowledgement", Phase.ACKNOWLEDGE),
    facts.TAIL_AT: ("rows, or room in its ring,", Phase.RINGS),
}
FAILURES: Final = (outcomes.LATE, outcomes.STOPPED, outcomes.OUT)
"""After these the ranks are not at one any more."""
ErrorOf = Callable[[Call, int, int], AnyEPError]
log = logging.getLogger("anyep")


class GpuTalk:
    """One rank's side of the talk in the GPUs' memory: `heap` is its own, connected, its control zeros."""

    def __init__(self, gpu: Any, conversation: Conversation, control: ControlRegion, heap: Any) -> None:
        self.gpu = gpu
        self.conversation = conversation
        self.control = control
        self.rank, self.num_ranks = conversation.rank, conversation.num_ranks
        self.rank_block = block_of(self.num_ranks)
        self.heap = heap
        self.heaps = gpu.table(self.heap.addresses)
        self.state = gpu.table([0] * facts.NUM_STATES)
        self.places = gpu.table([0] * (facts.PLACE_WORDS * self.num_ranks))
        self.bases = gpu.table([0] * (facts.MAX_WINDOW_BLOCKS * self.num_ranks))
        self.report = gpu.words(facts.REPORTED_HEADERS + NUM_WORDS * self.num_ranks)
        self.totals = gpu.words(facts.TOTAL_BY_EXPERT + NUM_MAX_LOCAL_EXPERTS)
        self.rows_of = gpu.words(self.num_ranks)
        """What the letters of the last dispatch with counts said: the rows that come to each rank."""
        self.headers = Headers(NUM_WORDS, gpu.words, gpu.now)
        self._addresses = Headers(NUM_ADDRESSES, gpu.words, gpu.now)
        self.alarm = heap.address + control.block("alarm").start
        self._own_given_up = heap.tensor(control.block("given up").offset(self.rank), (1,), torch.int64)
        self._one = gpu.table([1])
        self.patience_ns = int(conversation.timeout_s * 1e9)
        self._ticket = 0
        self._blocks = {"NUM_RANKS": self.num_ranks, "RANK_BLOCK": self.rank_block}
        self._launchers: dict[tuple[Any, ...], Launcher] = {}
        self._exchanges: dict[tuple[bool, bool, tuple[int, int]], Launcher] = {}
        self._meetings: dict[tuple[int, bool], Launcher] = {}
        self._totals_address = int(self.totals.ctypes.data)
        self._rows_of_address = int(self.rows_of.ctypes.data)
        self._reports: list[tuple[Array, weakref.WeakMethod[ErrorOf]]] = []
        self.add_report(self.report, self._error_of)
        conversation.on_failure = self.take_no_more_part
        self._watch = Watch(conversation.pids_of_peers, self.forget)
        self._at_host = 0
        try:
            self._show_host_to_kernels(conversation.regions[self.rank])
            self.facts = gpu.table(self._facts())
        except BaseException:
            self.close()
            raise

    def _show_host_to_kernels(self, region: int) -> None:
        """Let kernels read this rank's control region in the host's memory, where they can."""
        if not self.gpu.let_kernels_read(region, self.control.num_bytes):
            log.warning(
                "the kernels of rank %d cannot read the host's memory: when a rank is killed, fails, is"
                " interrupted or destroys its Buffer, they wait until their time is up (ANYEP_TIMEOUT_S)",
                self.rank,
            )
            return
        self._at_host = region
        said_at = self.control.block("alarm").start + SAID
        address = torch.tensor([region + said_at], dtype=torch.int64, device="cpu")
        self.heap.tensor(said_at, (1,), torch.int64).copy_(address)

    def _facts(self) -> list[int]:
        control = self.control
        mailbox, tail = control.block("mailbox"), control.block("ring tail")
        words = [0] * facts.NUM_FACTS
        words[facts.RANK] = self.rank
        words[facts.OWN_HEAP] = self.heap.address
        words[facts.AT_HOST] = self._at_host
        words[facts.PATIENCE_NS] = int(self.conversation.timeout_s * 1e9)
        words[facts.ALARM_AT] = control.block("alarm").start
        # The heap of a GPU has no use for the block of a rank's status: the host's has it.
        words[facts.NUMBER_AT] = control.block("status").start
        words[facts.MAILBOX_AT] = mailbox.start
        words[facts.BOX_STRIDE] = mailbox.offset(0, 1) - mailbox.start
        words[facts.LETTER_STRIDE] = mailbox.stride
        words[facts.ARRIVED_AT] = control.block("window arrival").start
        words[facts.PULLED_AT] = control.block("window pulled").start
        words[facts.FLAG_STRIDE] = control.block("window pulled").stride
        words[facts.GIVEN_UP_AT] = control.block("given up").start
        words[facts.REPORT] = int(self.report.ctypes.data)
        words[facts.TAIL_AT] = tail.start
        words[facts.HEAD_AT] = control.block("ring head").start
        words[facts.RING_STRIDE] = tail.stride
        return words

    def launcher(self, kernel: Any, num_warps: int, **constants: Any) -> Launcher:
        """The kernel with these compile-time values."""
        # Triton hashes a kernel by its source.
        key = (id(kernel), num_warps, *constants.values())
        launcher = self._launchers.get(key)
        if launcher is None:
            launcher = Launcher(kernel, num_warps, constants)
            self._launchers[key] = launcher
        return launcher

    def set_window_bases(self, addresses: Sequence[Sequence[int]]) -> None:
        """Tell the kernels where every rank's blocks of windows lie, by block and rank."""
        table = np.zeros((self.num_ranks, facts.MAX_WINDOW_BLOCKS), np.int64)
        for block, by_rank in enumerate(addresses):
            table[:, block] = by_rank
        self.bases.copy_(torch.from_numpy(table.reshape(-1)))

    def keep_addresses(self, addresses: Sequence[int]) -> int:
        """Where a kernel finds some addresses that are too many to be arguments."""
        return self._addresses.keep(addresses, self.gpu.stream.is_capturing())

    # Letters

    def exchange(
        self, header: Array, kind: int, routing: torch.Tensor, digests: torch.Tensor, is_combine: bool
    ) -> None:
        """Letters without counts: all ranks go along the same routing."""
        nothing = self.state
        self._exchange(header, kind, (routing, digests, *(nothing,) * 5), 0, (0, 0), is_combine, False)

    def exchange_counts(
        self,
        header: Array,
        kind: int,
        routing: tuple[torch.Tensor, torch.Tensor],
        topk_idx: torch.Tensor | None,
        counts: tuple[torch.Tensor, torch.Tensor],
        prefixes: tuple[torch.Tensor, torch.Tensor],
        sizes: tuple[int, int],
        host_waits: bool,
    ) -> int:
        """Letters with counts by rank, expert and (in the first of the prefix sums) channel, which fill the
        prefix sums and the routing (prefix sums by rank, and digests); `sizes`: how many channels, and
        experts per rank. The host may wait for the ticket."""
        ticket = 0
        if host_waits:
            self._ticket += 1
            ticket = self._ticket
        ids = topk_idx if topk_idx is not None else self.state
        tables = (*routing, ids, *counts, *prefixes)
        self._exchange(header, kind, tables, ticket, sizes, False, False)
        return ticket

    def _exchange(
        self,
        header: Array,
        kind: int,
        tables: tuple[torch.Tensor, ...],
        ticket: int,
        sizes: tuple[int, int],
        is_combine: bool,
        is_refused: bool,
    ) -> None:
        header[KIND] = kind
        num_channels, local_experts = sizes
        launch = self._exchanges.get((is_combine, is_refused, sizes))
        if launch is None:
            launch = self.launcher(
                kernels.exchange_letters,
                1,
                **self._blocks,
                IS_COMBINE=is_combine,
                IS_REFUSED=is_refused,
                CHANNEL_BLOCK=_block(num_channels, NUM_MAX_CHANNELS),
                EXPERT_BLOCK=_block(local_experts, NUM_MAX_LOCAL_EXPERTS),
            )
            self._exchanges[is_combine, is_refused, sizes] = launch
        launch(
            self.gpu.stream.stream,
            (1,),
            self.facts,
            self.heaps,
            self.bases,
            self.state,
            self.places,
            self.headers.keep(header, self.gpu.stream.is_capturing()),
            *tables,
            self._totals_address,
            self._rows_of_address,
            ticket,
            num_channels,
            local_experts,
        )

    def place_in_new_block(self, offset: int, row_bytes: int, num_topk: int, num_scales: int) -> None:
        """Give every receiver without a window one at this offset, where a block has just been added."""
        launch = self.launcher(kernels.place_in_new_block, 1, **self._blocks)
        launch(
            self.gpu.stream.stream,
            (1,),
            self.bases,
            self.state,
            self.places,
            offset,
            row_bytes,
            num_topk,
            num_scales,
        )

    def meet(self, flags_at: int, unless_rings: bool = False) -> None:
        """Let every rank's part of the call be done before any rank goes on."""
        launch = self._meetings.get((flags_at, unless_rings))
        if launch is None:
            kind = {"FLAGS_AT": flags_at, "UNLESS_RINGS": unless_rings}
            launch = self._meetings[flags_at, unless_rings] = Launcher(kernels.meet, 1, kind | self._blocks)
        launch(self.gpu.stream.stream, (1,), self.facts, self.heaps, self.state)

    def refuse(self, call: Call, error: AnyEPError) -> None:
        """Tell the peers that this rank's call was wrong; they raise instead of waiting."""
        if self.gpu.stream.is_capturing():
            return
        text = call.number % 2
        self.conversation.say_refusal(text, str(error))
        header = signature()
        header[Field.REFUSED] = 1 + text
        self.gpu.stream.begin(None)
        self._exchange(header, call.kind, (self.state,) * 7, 0, (0, 0), False, True)
        self.gpu.stream.end(False)

    def meet_hosts(self, call: Call, number: int) -> None:
        """Let all hosts come to a number, which grows from meeting to meeting, before any goes on; raise if
        one of them has failed, also if it did so after it had come."""
        conversation, block = self.conversation, self.control.block("window arrival")
        what = "word that it adds windows"
        conversation.enter(call, Phase.NOTIFY)
        conversation.announce(conversation.peer_counters(block), Topic.ROWS, number)
        own = conversation.own_counters(block)
        conversation.wait_for_counters(call, Phase.NOTIFY, own, Topic.ROWS, what, expected=number)
        gone = conversation.gone()
        if gone:
            stall = Stall([min(gone)], what, number, number)
            raise conversation.lost(call, min(gone), stall, Phase.NOTIFY.name.lower())

    def wait_for_totals(self, call: Call, ticket: int) -> Array:
        """Wait until the letters of a dispatch tell how many rows come; they always do, or say why not."""
        words = self.totals
        began = looked = time.monotonic()
        while words[facts.TICKET] != ticket:
            now = time.monotonic()
            if now - began > SPIN_S:
                time.sleep(NAP_S)
            if now - looked > LOOK_S:
                looked = now
                self.gpu.look_for_errors()
        if words[facts.TOTAL_OUTCOME]:
            # Kernels of the call may still write memory that is free now, and that the caller gets next.
            self.gpu.stream.end(False)
            self.raise_reported()
        found: Array = words
        return found

    # What went wrong

    def raise_reported(self) -> None:
        """Raise what a kernel found wrong since the last time that somebody looked."""
        error = self.reported()
        try:
            if error is not None:
                raise error
        finally:
            # Its traceback holds this frame, and with it those of all callers.
            del error

    def reported(self) -> AnyEPError | None:
        """What a kernel found wrong since the last time; if it was a failure, it is raised."""
        return self.read_report(self.report, self._error_of)

    def add_report(self, report: Array, error_of: ErrorOf) -> None:
        """Kernels write this one, too: it may tell why this rank has given up."""
        # Weakly: whoever can explain a report holds this object.
        self._reports.append((report, weakref.WeakMethod(error_of)))

    def read_report(self, report: Array, error_of: ErrorOf) -> AnyEPError | None:
        """What a report says, if it is new, as an error of (call, code, rank); a failure is raised."""
        # While a graph is captured, what explains it cannot be read out of the GPU's memory.
        if report[facts.NUM_REPORTS] == report[facts.NUM_READ] or self.gpu.stream.is_capturing():
            return None
        outcome = int(report[facts.REPORTED_OUTCOME])
        call = Call(int(report[facts.REPORTED_NUMBER]), int(report[facts.REPORTED_KIND]))
        try:
            if outcomes.code_of(outcome) == outcomes.OUT:
                self._raise_what_came_before()
                error: AnyEPError = BufferBroken(
                    f"rank {self.rank} gave up in an earlier call, and took no part in {call}:"
                    f" make a new Buffer"
                )
            else:
                error = error_of(call, outcomes.code_of(outcome), outcomes.rank_of(outcome))
        finally:
            report[facts.NUM_READ] = report[facts.NUM_REPORTS]
        if outcomes.code_of(outcome) not in FAILURES:
            return error
        self.conversation.fail(call, error)
        try:
            raise error
        finally:
            del error

    def _raise_what_came_before(self) -> None:
        """Raise why this rank has given up, if a report tells it that nobody has read yet."""
        for report, weakly in self._reports:
            error_of = weakly()
            code = outcomes.code_of(int(report[facts.REPORTED_OUTCOME]))
            if error_of is not None and code in FAILURES and code != outcomes.OUT:
                self.read_report(report, error_of)

    def _error_of(self, call: Call, code: int, rank: int) -> AnyEPError:
        if code == outcomes.DIFFERENT:
            return self._disagreement(call)
        if code == outcomes.TOO_MANY:
            limit = int(self._reported_headers()[rank, Field.RESULT_ROWS])
            return InvalidCall(
                f"num_worst_tokens is {limit} on rank {rank}, but more rows would arrive there:"
                f" nothing was sent; pass at least the largest number of rows that can arrive"
            )
        if code == outcomes.BAD_HANDLE:
            return InvalidCall(
                f"the handle of {call} does not fit together: it names rows that rank {rank} does not have"
            )
        flags = int(self.report[facts.REPORTED_WAIT])
        what, phase = WAITS[flags]
        seen = [self._flag_of(peer, flags, call.number) for peer in range(self.num_ranks)]
        # A ring's counter counts rows, of all calls: one more at least was waited for.
        if flags == facts.TAIL_AT:
            stall = Stall([rank], what, seen[rank], seen[rank] + 1)
        else:
            missing = still_missing(seen, call.number, rank)
            stall = Stall(missing, what, seen[missing[0]], call.number)
        return self.end_of_wait(call, code, stall, phase.name.lower())

    def end_of_wait(self, call: Call, code: int, stall: Stall, phase: str) -> AnyEPError:
        """What to raise for a wait that was in vain: it took too long, or a rank is gone or has given up."""
        if code == outcomes.LATE:
            return self.conversation.too_late(call, stall, phase)
        gone = self.conversation.gone()
        if gone:
            # If all have come since, somebody else was the reason.
            waited_for = stall.peers if stall.seen != stall.expected else []
            others = gone - set(stall.peers)
            who = next((peer for peer in waited_for if peer in gone), min(others or gone))
        else:
            alarm = int(self.heap.tensor(self._facts()[facts.ALARM_AT], (1,), torch.int64))
            who = max(0, alarm - 1)
        return self.conversation.lost(call, who, stall, phase)

    def _flag_of(self, rank: int, flags: int, number: int) -> int:
        """What a rank's flag holds that was waited for."""
        words = self._facts()
        stride = words[facts.LETTER_STRIDE if flags == facts.MAILBOX_AT else facts.FLAG_STRIDE]
        if flags == facts.TAIL_AT:
            stride = words[facts.RING_STRIDE]
        box = words[facts.BOX_STRIDE] * (number % 2) if flags == facts.MAILBOX_AT else 0
        return int(self.heap.tensor(words[flags] + box + rank * stride, (1,), torch.int64))

    def _reported_headers(self) -> Array:
        headers: Array = self.report[facts.REPORTED_HEADERS :].reshape(self.num_ranks, NUM_WORDS)
        return headers

    def _disagreement(self, call: Call) -> AnyEPError:
        headers = self._reported_headers()
        wrong = int(self.report[facts.REPORTED_WRONG])
        how, where = facts.how_and_where(wrong)
        if how == facts.WRONG_ID:
            mine = headers[self.rank]
            token, column = divmod(where, int(mine[Field.TOPK]))
            return no_expert(token, column, int(self.report[facts.REPORTED_VALUE]), int(mine[Field.EXPERTS]))
        if how == facts.OTHER_ROUTING:
            return Disagreement(
                f"the ranks disagree in {name_of_call(call.number)} about the routing in the handle:"
                f" {other_rows(*divmod(where, self.num_ranks))}"
            )
        if wrong:
            return InvalidCall(contradiction(wrong, self.num_ranks))
        refused = headers[:, Field.REFUSED]
        if (refused == REFUSED_BY_IDS).any():
            rank = int(np.flatnonzero(refused == REFUSED_BY_IDS)[0])
            return Disagreement(f"rank {rank} refused its {call}: its topk_idx has an id that is no expert")
        if (refused == REFUSED_BY_COUNTS).any():
            rank = int(np.flatnonzero(refused == REFUSED_BY_COUNTS)[0])
            return Disagreement(
                f"rank {rank} refused its {call}: its counts contradict its choices of experts"
            )
        text = max(0, int(refused.max()) - 1)
        return self.conversation.disagreement(call, headers, text, SIGNATURE_WORDS, word_for_people)

    # The end

    def stop_watching(self) -> None:
        """Kernels hear no more of peers that die."""
        self._watch.close()

    def close(self) -> None:
        """Stop watching the peers, and let no kernel read the host's memory: none may run any more."""
        self.stop_watching()
        region, self._at_host = self._at_host, 0
        if region:
            self.gpu.let_no_kernel_read(region)

    def give_up(self) -> None:
        """Let no kernel of any rank wait for this rank any more."""
        self._say_gone(self.rank, self.conversation.regions)

    def take_no_more_part(self) -> None:
        """Give up, and let this rank's own kernels take no part in calls: graphs can still be replayed. While
        one is captured the GPU cannot be told."""
        self.give_up()
        # A GPU that has failed itself runs nothing any more. A copy: to load a kernel for it, CUDA might wait
        # for those that run.
        with contextlib.suppress(RuntimeError):
            if not self.gpu.stream.is_capturing():
                with self.gpu.on_communication_stream():
                    self._own_given_up.copy_(self._one, non_blocking=True)
                self.gpu.stream.end(False)

    def forget(self, rank: int) -> None:
        """Let no kernel here wait for a rank that is gone."""
        self._say_gone(rank, [self.conversation.regions[self.rank]])

    def _say_gone(self, rank: int, regions: Iterable[int]) -> None:
        """Tell the kernels that look into these regions of hosts."""
        given_up_at = self.control.block("given up").offset(rank)
        said_at = self.control.block("alarm").start + SAID
        for region in regions:
            ctypes.c_int64.from_address(region + given_up_at).value = 1
            ctypes.c_int64.from_address(region + said_at).value = 1 + rank


def still_missing(seen: Sequence[int], expected: int, reported: int) -> list[int]:
    """Whom to name for a wait that was in vain. A kernel reports the first rank that was not there; but that
    may have come since, as others that were only late, and have failed for the same reason as this one.

    >>> still_missing([7, 6, 5, 7], expected=7, reported=0)
    [1, 2]
    >>> still_missing([7, 7], expected=7, reported=0)
    [0]
    """
    return [rank for rank, flag in enumerate(seen) if flag < expected] or [reported]


def contradiction(wrong: int, num_ranks: int) -> str:
    """What is wrong with a caller's counts, as `place_tokens` found it.

    >>> contradiction(facts.wrong_word(facts.WRONG_EXPERT_COUNT, 7), 2)
    'num_tokens_per_expert and topk_idx disagree about expert 7: pass both from one get_dispatch_layout'
    """
    how, where = facts.how_and_where(wrong)
    if how == facts.WRONG_RANK_COUNT:
        problem = f"num_tokens_per_rank and is_token_in_rank disagree about rank {where}"
    elif how == facts.WRONG_EXPERT_COUNT:
        problem = f"num_tokens_per_expert and topk_idx disagree about expert {where}"
    else:
        token, rank = divmod(where, num_ranks)
        problem = f"topk_idx and is_token_in_rank disagree whether token {token} goes to rank {rank}"
    return f"{problem}: pass both from one get_dispatch_layout"


def _block(count: int, most: int) -> int:
    """A power of two that holds so many, 0 for none; few different ones, as each is compiled for."""
    if count == 0:
        return 0
    return 16 if count <= 16 else min(1 << (count - 1).bit_length(), 1 << (most - 1).bit_length())
