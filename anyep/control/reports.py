"""Errors of kernels: turns the report of a GPU, which its host did not wait for, into the error that the CPU
would raise.

A kernel that finds an error writes a report into memory of the host. The next call of the host reads it.
`Reports` explains it, watches the processes of the peers, and tells the kernels which ranks are gone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Final

import numpy as np

from anyep.backends.cuda import constants
from anyep.backends.cuda.device_control import DeviceControl
from anyep.control.liveness import Watch
from anyep.control.notify import word_for_people, words_of
from anyep.control.plane import ControlPlane
from anyep.core import diagnosis, outcomes
from anyep.core.calls import Array, Call, Phase, Stall, Topic
from anyep.core.headers import NUM_WORDS, REFUSED_BY_COUNTS, REFUSED_BY_IDS, Field
from anyep.core.outcomes import still_missing
from anyep.errors import AnyEPError, InvalidCall, expert_twice, no_expert
from anyep.layout import NUM_MAILBOXES

WAITS: Final = {
    constants.MAILBOX_AT: ("notify message", Phase.NOTIFY),
    constants.ARRIVED_AT: ("rows", Phase.RECEIVE),
    constants.PULLED_AT: ("acknowledgement", Phase.ACKNOWLEDGE),
    constants.TAIL_AT: ("rows, or room in its ring,", Phase.RINGS),
    constants.NETWORK_TAIL_AT: ("rows, or room in its ring,", Phase.RINGS),
}
FAILURES: Final = (outcomes.LATE, outcomes.STOPPED, outcomes.OUT)
"""After these the ranks are not in step any more."""
ErrorOf = Callable[[Call, int, int], AnyEPError]


class Reports:
    """Reads the reports of the kernels of one rank."""

    def __init__(self, device_control: DeviceControl, control: ControlPlane) -> None:
        self.device_control = device_control
        self.control = control
        self.rank, self.num_ranks = control.rank, control.num_ranks
        self._report = device_control.report
        self._words = self._report.data
        """The same, for a look that takes less time."""
        self._reports: list[tuple[Array, weakref.WeakMethod[ErrorOf]]] = []
        self.add(self._report, self._error_of)
        control.on_failure = device_control.take_no_more_part
        self._watch = Watch(control.pids_of_peers, device_control.forget)

    def add(self, report: Array, error_of: ErrorOf) -> None:
        """Add another report that kernels write: it may say why this rank has given up."""
        # Weakly: the object that explains a report holds this one.
        self._reports.append((report, weakref.WeakMethod(error_of)))

    def refuse(self, call: Call, error: AnyEPError) -> None:
        """Tell the peers that this rank's call was wrong; they raise instead of waiting."""
        if self.device_control.gpu.stream.is_capturing():
            return
        text = call.number % NUM_MAILBOXES
        self.control.publish_refusal(text, str(error))
        self.device_control.refuse(call.kind, text)

    def barrier_of_hosts(self, call: Call, number: int) -> None:
        """Return when all hosts have reached a number, which grows from barrier to barrier; raise if one of
        them has failed, even if it failed after it had arrived."""
        # In a host's region nothing else uses these words: low-latency calls on GPUs have theirs in the heap.
        control, block = self.control, self.device_control.region.blocks.packed
        what = "word that it adds windows"
        control.enter(call, Phase.NOTIFY)
        control.signal(control.peer_counters(block), Topic.ROWS, number)
        own = control.own_counters(block)
        control.wait_for_counters(call, Phase.NOTIFY, own, Topic.ROWS, what, expected=number)
        gone = control.blame.gone()
        if gone:
            stall = Stall([min(gone)], what, number, number)
            raise control.blame.lost(call, min(gone), stall, Phase.NOTIFY.name.lower())

    # Reading

    def raise_reported(self) -> None:
        """Raise the error that a kernel has reported since the last check."""
        error = self.reported()
        try:
            if error is not None:
                raise error
        finally:
            # Its traceback holds this frame, and thereby the frames of all callers.
            del error

    @property
    def has_news(self) -> bool:
        """Whether a kernel has reported something that was not read yet."""
        return bool(self._words[constants.NUM_REPORTS] != self._words[constants.NUM_READ])

    def reported(self) -> AnyEPError | None:
        """The error that a kernel has reported since the last check; a failure is raised instead."""
        return self.read(self._report, self._error_of)

    def read(self, report: Array, error_of: ErrorOf) -> AnyEPError | None:
        """The error that a new report describes, by `error_of` (call, code, rank); a failure is raised."""
        # While a graph is captured, the data that explains a report cannot be read from the GPU's memory.
        is_read = report[constants.NUM_REPORTS] == report[constants.NUM_READ]
        if is_read or self.device_control.gpu.stream.is_capturing():
            return None
        outcome = int(report[constants.REPORTED_OUTCOME])
        call = Call(int(report[constants.REPORTED_NUMBER]), int(report[constants.REPORTED_KIND]))
        try:
            if outcomes.code_of(outcome) == outcomes.OUT:
                self._raise_what_came_before()
                error: AnyEPError = diagnosis.gave_up_before(self.rank, call)
            else:
                error = error_of(call, outcomes.code_of(outcome), outcomes.rank_of(outcome))
        finally:
            report[constants.NUM_READ] = report[constants.NUM_REPORTS]
        if outcomes.code_of(outcome) not in FAILURES:
            return error
        self.control.fail(call, error)
        try:
            raise error
        finally:
            del error

    def _raise_what_came_before(self) -> None:
        """Raise the reason why this rank has given up, if an unread report has it."""
        for report, weakly in self._reports:
            error_of = weakly()
            code = outcomes.code_of(int(report[constants.REPORTED_OUTCOME]))
            if error_of is not None and code in FAILURES and code != outcomes.OUT:
                self.read(report, error_of)

    # Explaining

    def _error_of(self, call: Call, code: int, rank: int) -> AnyEPError:
        if code == outcomes.DIFFERENT:
            return self._disagreement(call)
        if code == outcomes.TOO_MANY:
            limit = int(self._headers()[rank, Field.RESULT_ROWS])
            relays = self.device_control.topology.num_nodes > 1
            return diagnosis.too_many_rows(rank, limit, None, relays)
        if code == outcomes.NO_WINDOW:
            return diagnosis.no_window(call, rank)
        if code == outcomes.BAD_HANDLE:
            return InvalidCall(
                f"the handle of {call} does not fit together: it names rows that rank {rank} does not have"
            )
        flags = int(self._report[constants.REPORTED_WAIT])
        what, phase = WAITS[flags]
        # A ring's counter counts the rows of all calls: the wait was for at least one more.
        if phase is Phase.RINGS:
            seen = self.device_control.flag_of(rank, flags, call.number)
            stall = Stall([rank], what, seen, seen + 1)
        else:
            peers = self.device_control.writers_of(flags)
            flags_of = [self.device_control.flag_of(peer, flags, call.number) for peer in peers]
            missing = still_missing(flags_of, call.number, rank - peers[0])
            ranks = [peers[index] for index in missing]
            stall = Stall(ranks, what, flags_of[missing[0]], call.number)
        return self.end_of_wait(call, code, stall, phase.name.lower())

    def end_of_wait(self, call: Call, code: int, stall: Stall, phase: str) -> AnyEPError:
        """The error for a failed wait: it took too long, or a rank is gone or has given up."""
        blame = self.control.blame
        if code == outcomes.LATE:
            return blame.too_late(call, stall, phase)
        gone = blame.gone()
        if gone:
            # If all have arrived since, another rank was the reason.
            waited_for = stall.peers if stall.seen != stall.expected else []
            others = gone - set(stall.peers)
            who = next((peer for peer in waited_for if peer in gone), min(others or gone))
        else:
            who = self.device_control.aborting_rank()
        return blame.lost(call, who, stall, phase)

    def _headers(self) -> Array:
        headers: Array = self._report[constants.REPORTED_HEADERS :].reshape(self.num_ranks, NUM_WORDS)
        return headers

    def _disagreement(self, call: Call) -> AnyEPError:
        headers = self._headers()
        wrong = int(self._report[constants.REPORTED_WRONG])
        how, where = constants.how_and_where(wrong)
        if how == constants.WRONG_ID:
            mine = headers[self.rank]
            token, column = divmod(where, int(mine[Field.TOPK]))
            value = int(self._report[constants.REPORTED_VALUE])
            num_experts = int(mine[Field.EXPERTS])
            is_expert = 0 <= value < num_experts
            return expert_twice(token, value) if is_expert else no_expert(token, column, value, num_experts)
        if how == constants.OTHER_ROUTING:
            return diagnosis.other_routing(call, diagnosis.other_rows(*divmod(where, self.num_ranks)))
        if wrong:
            return InvalidCall(contradiction(wrong, self.num_ranks))
        refused = headers[:, Field.REFUSED]
        reason_of_ids = "its topk_idx has an id that is no expert"
        if headers[self.rank, Field.ROUTING]:
            reason_of_ids += ", or an expert twice for a token"
        for code, reason in (
            (REFUSED_BY_IDS, reason_of_ids),
            (REFUSED_BY_COUNTS, "its counts contradict its choices of experts"),
        ):
            if (refused == code).any():
                return diagnosis.refused_by_kernel(int(np.flatnonzero(refused == code)[0]), call, reason)
        text = max(0, int(refused.max()) - 1)
        return self.control.disagreement(call, headers, text, words_of(call.kind), word_for_people)

    # The end

    def stop_watching(self) -> None:
        """Stop telling kernels about peers that die."""
        self._watch.close()

    def close(self) -> None:
        """Stop watching the peers, and end the kernels' access to the host's memory; none may be running."""
        self.stop_watching()
        self.device_control.close()


def contradiction(wrong: int, num_ranks: int) -> str:
    """What is wrong with a caller's counts, as found by `place_tokens`.

    >>> contradiction(constants.wrong_word(constants.WRONG_EXPERT_COUNT, 7), 2)
    'num_tokens_per_expert and topk_idx disagree about expert 7: pass both from one get_dispatch_layout'
    """
    how, where = constants.how_and_where(wrong)
    if how == constants.WRONG_NODE_COUNT:
        problem = f"num_tokens_per_rdma_rank and is_token_in_rank disagree about node {where}"
    elif how == constants.WRONG_RANK_COUNT:
        problem = f"num_tokens_per_rank and is_token_in_rank disagree about rank {where}"
    elif how == constants.WRONG_EXPERT_COUNT:
        problem = f"num_tokens_per_expert and topk_idx disagree about expert {where}"
    else:
        token, rank = divmod(where, num_ranks)
        problem = f"topk_idx and is_token_in_rank disagree whether token {token} goes to rank {rank}"
    return f"{problem}: pass both from one get_dispatch_layout"
