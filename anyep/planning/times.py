"""How long a dispatch or combine takes, from the rows it moves and the constants of a machine.

    call = Call("normal", "dispatch", num_nodes=4, num_ranks=32, num_tokens=4096, row_bytes=7392, ...)
    time_of(call, find_machine("H800 CX7").constants("deepep-v1", "normal")).total_us

The parts of a call run at once; the slowest decides, and the others slow it down a little (`slowest_of`).
docs/planning-accuracy.md compares the results with published figures.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final, NamedTuple

from anyep.errors import InvalidCall
from anyep.planning.expectation import Reach, largest

SOFTNESS: Final = 6.0
"""How sharply the slowest part decides: two equal parts take 2 ** (1 / 6) = 1.12 times as long."""
NORMAL: Final = "normal"
LOW_LATENCY: Final = "ll"
DISPATCH: Final = "dispatch"
COMBINE: Final = "combine"
DEFAULT_SMS: Final = 24


class Call(NamedTuple):
    """One call on every rank."""

    mode: str
    what: str
    num_nodes: int
    num_ranks: int
    num_tokens: int
    row_bytes: int
    num_topk: int
    num_experts: int
    num_sms: int = DEFAULT_SMS
    num_group_nodes: int | None = None

    @property
    def reach(self) -> Reach:
        return Reach(self.num_ranks, self.num_nodes, self.num_experts, self.num_topk, self.num_group_nodes)

    @property
    def received_bytes(self) -> float:
        """Of one rank's rows: once per rank in normal mode, once per expert in low-latency mode."""
        rows = self.reach.ranks if self.mode == NORMAL else self.num_topk
        return self.num_tokens * rows * self.row_bytes


class Load(NamedTuple):
    """The rows of the most loaded rank and link; expectations, or counted from a routing."""

    near_rows: float
    """Rows that a rank sends or receives within its node, those for itself included."""
    far_rows: float
    """Rows that cross to other nodes at a rank."""


def expected_load(call: Call, once_per_node: bool = False) -> Load:
    """The load where no routing is given. In low-latency mode rows cross for each choice, unless
    `once_per_node`: then a token crosses once for each node, and goes on to its experts from there."""
    reach, ranks, tokens = call.reach, call.num_ranks, call.num_tokens
    if call.mode == NORMAL:
        return Load(largest(tokens * reach.ranks, ranks), largest(tokens * reach.other_nodes, ranks))
    choices = tokens * call.num_topk
    far_rows = choices * (call.num_nodes - 1) / call.num_nodes
    near_rows = choices - far_rows
    if once_per_node:
        far_rows, near_rows = tokens * reach.other_nodes, choices
    return Load(largest(near_rows, ranks), largest(far_rows, ranks))


class Times(NamedTuple):
    """The parts of a call in microseconds; those that a call does not have are 0."""

    start_us: float
    """Launch, counts and latency: what a call without tokens takes."""
    sms_us: float
    """Copies and, with several nodes, relays."""
    nvlink_us: float
    network_us: float
    total_us: float

    @property
    def bound(self) -> str:
        """The part that takes longest."""
        parts = {"start": self.start_us, "SMs": self.sms_us, "NVLink": self.nvlink_us}
        parts["network"] = self.network_us
        return max(parts, key=lambda name: parts[name])


def slowest_of(times: list[float], softness: float = SOFTNESS) -> float:
    """The largest time, and a little more where others are near it; with a softness of 1 the sum.

    >>> round(slowest_of([3.0, 1.0]), 3), round(slowest_of([3.0, 3.0]), 2), slowest_of([3.0, 1.0], softness=1)
    (3.001, 3.37, 4.0)
    """
    longest = max(times)
    if not longest:
        return 0.0
    return float(longest * sum((time / longest) ** softness for time in times) ** (1 / softness))


def time_of(call: Call, constants: Mapping[str, float], load: Load | None = None) -> Times:
    """The time of the slowest rank; `constants` are those of the machine, library and mode. `load` is that of
    a routing; without one, experts are drawn uniformly."""
    if load is None:
        load = expected_load(call, bool(constants.get("once_per_node")))
    model = _normal if call.mode == NORMAL else _low_latency
    return model(call, shared_constants(call, constants), load)


def shared_constants(call: Call, constants: Mapping[str, float]) -> Mapping[str, float]:
    """The constants of a rank where those of a node share `places`, its cores or GPUs."""
    share = call.num_ranks / call.num_nodes / constants.get("places", math.inf)
    if share <= 1:
        return constants
    shared = dict(constants)
    for name in constants:
        if name.endswith("_us"):
            shared[name] *= share
        elif name.endswith(("nvlink_gbs", "cached_gbs", "gbs_per_sm")):
            shared[name] /= share
    return shared


def _normal(call: Call, constants: Mapping[str, float], load: Load) -> Times:
    what = call.what
    several = call.num_nodes > 1
    near_bytes = load.near_rows * call.row_bytes
    sms_us = 0.0
    if not constants.get("without_sms"):
        sm_gbs = constant(constants, f"{what}_relay_gbs_per_sm" if several else f"{what}_gbs_per_sm")
        sms_us = _us(near_bytes, sm_gbs * call.num_sms)
    nvlink_us = _nvlink_us(near_bytes, what, constants)
    start_us = constant(constants, f"{what}_start_us")
    fill_us = constants.get(f"{what}_fill_us", 0.0)
    network_us = 0.0
    if several:
        start_us += constants.get("notify_us", 0.0)
        network_us = _us(load.far_rows * call.row_bytes, constant(constants, "network_gbs"))
    near_us = slowest_of([sms_us, nvlink_us])
    body_us = slowest_of([near_us, network_us], constants.get("softness", SOFTNESS))
    # The pipeline fills while the first rows are on their way; a call with few rows ends before that.
    filling_us = fill_us * body_us / (fill_us + body_us) if body_us else 0.0
    return Times(start_us, sms_us, nvlink_us, network_us, start_us + filling_us + body_us)


def _low_latency(call: Call, constants: Mapping[str, float], load: Load) -> Times:
    what = call.what
    nvlink_us = _nvlink_us(load.near_rows * call.row_bytes, what, constants)
    start_us = constant(constants, f"{what}_start_us")
    network_us = 0.0
    if call.num_nodes > 1:
        start_us += constant(constants, f"{what}_hop_us")
        network_us = slowest_of(
            [
                _us(load.far_rows * call.row_bytes, constant(constants, "network_gbs")),
                load.far_rows * constants.get("message_us", 0.0),
            ]
        )
    body_us = slowest_of([nvlink_us, network_us], constants.get("softness", SOFTNESS))
    return Times(start_us, 0.0, nvlink_us, network_us, start_us + body_us)


def constant(constants: Mapping[str, float], name: str) -> float:
    if name not in constants:
        raise InvalidCall(
            f"the machine has no constant {name!r}: add it to its file, with where it comes from, or choose a"
            f" mode and number of nodes that the file covers"
        )
    return constants[name]


def _nvlink_us(num_bytes: float, what: str, constants: Mapping[str, float]) -> float:
    """On CPUs, the first bytes may be faster than the others: those that caches hold."""
    cached = min(num_bytes, constants.get(f"{what}_cached_bytes", 0.0))
    cached_us = _us(cached, constant(constants, f"{what}_cached_gbs")) if cached else 0.0
    return cached_us + _us(num_bytes - cached, constant(constants, f"{what}_nvlink_gbs"))


def _us(num_bytes: float, gbs: float) -> float:
    return num_bytes / gbs / 1e3
