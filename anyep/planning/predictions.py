"""What `anyep plan --machine` predicts: the time of a call, what bounds it, its rates, and how sure it is.

    question = Question(find_machine("H800 CX7"), "deepep-v1", call)
    predict(question).us        # (1955.0, 1955.0): a number; two different ends are a range

A range stands where the data do not say enough: more nodes than any figure has, or constants that were not
measured on this machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from anyep.planning.machines import Machine
from anyep.planning.times import DISPATCH, NORMAL, Call, Load, Times, shared_constants, time_of

MOST_NODES: Final = 8
"""No published figure has more."""
SHARED_NETWORK: Final = 0.5
"""Of its rate, where more nodes share switches: what an oversubscription of two to one leaves."""
PEER_NODE_US: Final = 1.0
"""For each node beyond those, what counts and completions may take longer: about one more message to it."""
SURE: Final = 1.15
"""Ends of a range that are nearer to each other are one number: the model is not surer than that."""
ENOUGH: Final = 1.05
"""As many times as long as with the most SMs may a call with "enough" SMs take."""
SM_STEPS: Final = range(4, 66, 2)
Range = tuple[float, float]


class Question(NamedTuple):
    """A call on a machine by a library; `compute_us` is what is computed at the same time."""

    machine: Machine
    library: str
    call: Call
    compute_us: float = 0.0
    load: Load | None = None
    """Of a routing; without one, experts are drawn uniformly."""

    @property
    def constants(self) -> dict[str, float]:
        return self.machine.constants(self.library, self.call.mode)


class Overlap(NamedTuple):
    """A call beside a computation of its own length."""

    compute_us: float
    """As long as the computation takes with the SMs that the call leaves to it."""
    exposed_us: Range
    """By how much both together take longer than the computation on all SMs."""


class Prediction(NamedTuple):
    times: Times
    bound: str
    """The part that takes longest; on CPUs, whose ranks copy in memory, that is "memory"."""
    us: Range
    doubts: tuple[str, ...]
    """Why it is a range; empty where it is a number."""
    logical_gbs: Range
    physical_gbs: Range
    launch_us: float
    notify_us: float
    """Counts, or the latency of the network: part of the time between nodes."""
    host_sync_us: Range | None
    """A dispatch whose number of rows the host must know takes this longer; None where nothing is known."""
    enough_sms: int | None
    overlap: Overlap | None

    @property
    def is_range(self) -> bool:
        return bool(self.doubts)

    def record(self) -> dict[str, Any]:
        """For programs: a time that is only known as a range is null, and `range_us` has its ends."""
        low, high = (round(us, 1) for us in self.us)
        times = self.times
        parts = {
            "launch": self.launch_us,
            "notify": self.notify_us,
            "sms": times.sms_us,
            "nvlink": times.nvlink_us,
            "network": times.network_us,
        }
        overlap = self.overlap
        return {
            "predicted_us": None if self.is_range else low,
            "range_us": [low, high],
            "doubts": list(self.doubts),
            "bound": self.bound,
            "parts_us": {name: round(us, 2) for name, us in parts.items()},
            "logical_gbs": _rounded(self.logical_gbs),
            "physical_gbs": _rounded(self.physical_gbs),
            "host_sync_us": _rounded(self.host_sync_us) if self.host_sync_us else None,
            "enough_sms": self.enough_sms,
            "overlap": {
                "compute_us": round(overlap.compute_us, 1),
                "exposed_us": _rounded(overlap.exposed_us),
            }
            if overlap
            else None,
        }


def predict(question: Question) -> Prediction:
    """The time of the slowest rank, and everything that follows from it."""
    call = question.call
    constants = shared_constants(call, question.constants)
    times = time_of(call, question.constants, question.load)
    us, doubts = _range(question, times)
    start = constants.get(f"{call.what}_start_us", 0.0)
    logical, physical = counted_bytes(call)
    host = _host_sync(question)
    has_sms = call.mode == NORMAL and not constants.get("without_sms")
    return Prediction(
        times,
        "memory" if constants.get("without_sms") and times.bound == "NVLink" else times.bound,
        us,
        doubts,
        _rates(logical, us),
        _rates(physical, us),
        start,
        times.start_us - start,
        host,
        enough_sms(question) if has_sms else None,
        _overlap(question, us) if question.compute_us else None,
    )


def counted_bytes(call: Call) -> tuple[float, float]:
    """Logical and physical bytes of one rank.

    Between nodes, normal mode counts a token once per node, with the own node (logical) or without it
    (physical). Elsewhere rows count, with those for the own rank (on one node) or the own node (low latency),
    or without them.

    >>> call = Call("normal", "dispatch", 2, 16, 100, 10, 8, 16)
    >>> [round(each) for each in counted_bytes(call)]
    [2000, 1000]
    """
    reach = call.reach
    if call.mode == NORMAL and call.num_nodes > 1:
        sizes = call.num_tokens * call.row_bytes
        return sizes * reach.nodes, sizes * reach.other_nodes
    places = call.num_nodes if call.num_nodes > 1 else call.num_ranks
    return call.received_bytes, call.received_bytes * (places - 1) / places


def enough_sms(question: Question) -> int:
    """The fewest SMs with which a call takes at most 5 % longer than with the most."""
    call, constants = question.call, question.constants
    most = SM_STEPS[-1]
    shortest = time_of(call._replace(num_sms=most), constants, question.load).total_us
    return next(
        sms
        for sms in SM_STEPS
        if time_of(call._replace(num_sms=sms), constants, question.load).total_us <= ENOUGH * shortest
    )


def _range(question: Question, times: Times) -> tuple[Range, tuple[str, ...]]:
    call = question.call
    best, worst = question.machine.limits(question.library, call.mode)
    worst_times = time_of(call, worst, question.load)
    low, high = time_of(call, best, question.load).total_us, worst_times.total_us
    doubts = []
    if high > SURE * low:
        doubts.append(
            f"constants in anyep/machines/{question.machine.file} were not measured there"
            if "/" not in question.machine.file
            else f"constants in {question.machine.file} are given as ranges"
        )
    if call.num_nodes > MOST_NODES:
        congested = time_of(call, _congested(worst, call), question.load).total_us
        if congested > SURE * low:
            doubts.append(
                f"no figure has more than {MOST_NODES} nodes: shared switches may leave half of the network's"
                f" rate"
            )
            high = congested
    if not doubts:
        return (times.total_us, times.total_us), ()
    return (low, high), tuple(doubts)


def _congested(constants: Mapping[str, float], call: Call) -> dict[str, float]:
    more_us = PEER_NODE_US * (call.num_nodes - MOST_NODES)
    changed = dict(constants)
    changed["network_gbs"] = constants["network_gbs"] * SHARED_NETWORK
    changed[f"{call.what}_start_us"] = constants[f"{call.what}_start_us"] + more_us
    return changed


def _host_sync(question: Question) -> Range | None:
    call = question.call
    if call.mode != NORMAL or call.what != DISPATCH or "host_sync_us" not in question.constants:
        return None
    best, worst = (
        shared_constants(call, constants)
        for constants in question.machine.limits(question.library, call.mode)
    )
    return best["host_sync_us"], worst["host_sync_us"]


def _overlap(question: Question, us: Range) -> Overlap:
    """In normal mode a call takes SMs from the computation; a low-latency call with a hook takes none."""
    call, total = question.call, question.machine.total_sms
    compute_us = question.compute_us
    if call.mode == NORMAL and total is not None:
        compute_us *= total / (total - call.num_sms)
    low, high = (max(compute_us, each) - question.compute_us for each in us)
    return Overlap(compute_us, (low, high))


def _rates(num_bytes: float, us: Range) -> Range:
    """GB/s at the longest and at the shortest time."""
    return num_bytes / us[1] / 1e3, num_bytes / us[0] / 1e3


def _rounded(pair: Range) -> list[float]:
    return [round(each, 1) for each in pair]
