"""`anyep plan --trace`: what a routing sends and loads, and with `--balance` what placing experts changes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np

from anyep.cli.memory_plan import Workload
from anyep.cli.plan_times import draw_to, range_text
from anyep.cli.units import format_bytes, parse_bytes
from anyep.core.traffic import LINKS, Amount
from anyep.errors import InvalidCall, whole_number
from anyep.planning import sent
from anyep.planning.balancing import (
    LowLatencyShape,
    Measured,
    Moved,
    Shape,
    in_place,
    measure,
    move,
    move_us,
    step_us,
)
from anyep.planning.counts import Array
from anyep.planning.machines import Machine
from anyep.planning.placement import Placement, place
from anyep.planning.times import COMBINE, DISPATCH, NORMAL, Call
from anyep.planning.traces import Trace
from anyep.sizes import get_dispatch_config
from anyep.topology import Topology, check_nodes

MOST_RANKS_IN_FULL: Final = 256
"""Up to as many ranks JSON has the bytes from each rank to each rank; beyond, from node to node."""
USUAL_INTERMEDIATE: Final = 2048
"""Of an expert's three matrices where --expert-bytes does not say how large an expert is."""


@dataclass(frozen=True)
class Balance:
    """What `--balance` asks for."""

    num_replicas: int | None
    num_groups: int
    expert_bytes: str | None
    compute_us: float


@dataclass(frozen=True)
class TraceAsked:
    """A trace, what its rows are, and where it runs."""

    trace: Trace
    workload: Workload
    machine: Machine | None
    library: str | None
    balance: Balance | None

    def __post_init__(self) -> None:
        check_nodes(self.trace.num_ranks, self._per_node, "--ranks-per-node")
        self.trace.check(self.workload.num_experts)
        in_place(self.workload.num_experts, self.trace.num_ranks)
        most = self.workload.low_latency_tokens
        tokens = round(max(int(each.max()) for each in self.trace.num_tokens) * self.trace.scale)
        if most is not None and tokens > most:
            raise InvalidCall(
                f"--low-latency-tokens is {most}, but a rank of the trace has {tokens} tokens: raise it, or"
                f" leave it out"
            )
        if self.machine is not None and self.library is not None:
            known = self.machine.libraries(NORMAL)
            if self.library not in known:
                raise InvalidCall(
                    f"{self.machine.file} has no constants of {self.library!r} for normal mode: choose one of"
                    f" {', '.join(known)}"
                )

    @property
    def _per_node(self) -> int:
        return min(self.trace.num_ranks, self.workload.ranks_per_node)

    @cached_property
    def topology(self) -> Topology:
        return Topology(self.trace.num_ranks, self._per_node)

    @property
    def shape(self) -> Shape:
        token = self.workload.token
        config = get_dispatch_config(self.trace.num_ranks, self.workload.num_sms)
        return Shape(
            sent.Rows(token.hidden_bytes, token.num_scales, self.trace.num_topk),
            sent.Rows(self.workload.hint_hidden_bytes),
            config.num_channels,
            self._low_latency,
        )

    @property
    def _low_latency(self) -> LowLatencyShape | None:
        workload = self.workload
        if workload.low_latency_tokens is None:
            return None
        token = workload.token
        return LowLatencyShape(
            workload.hidden, token.hidden_bytes, token.num_scales, workload.low_latency_tokens
        )

    @property
    def row_bytes(self) -> tuple[int, int]:
        token = self.workload.token
        return token.hidden_bytes + 4 * token.num_scales, self.workload.hint_hidden_bytes

    @property
    def constants(self) -> dict[str, float]:
        assert self.machine is not None
        return self.machine.constants(self.library or next(iter(self.machine.libraries(NORMAL)), ""), NORMAL)

    def times(self, measured: Measured) -> Array | None:
        """[step, dispatch or combine] in microseconds; None without a machine."""
        if self.machine is None:
            return None
        tokens = max(int(each.max()) for each in self.trace.num_tokens)
        topology, workload = self.topology, self.workload
        call = Call(
            NORMAL,
            DISPATCH,
            topology.num_nodes,
            topology.num_ranks,
            round(tokens * self.trace.scale),
            0,
            self.trace.num_topk,
            workload.num_experts,
            workload.num_sms,
        )
        return step_us(measured, call, self.constants, self.row_bytes)


@dataclass(frozen=True)
class Balanced:
    """A placement, and what it changes on steps that it was not made from, if there are several."""

    placement: Placement
    before: Measured
    after: Measured
    moved: Moved
    before_us: float | None
    """Mean time of a step: dispatch, combine, and the experts of the busiest rank if their time is given."""
    after_us: float | None
    move_us: float | None
    steps_used: int
    steps_judged: int

    @property
    def pays_after(self) -> int | None:
        """Steps after which moving the experts has paid; None if it never does, or no machine is given."""
        if self.before_us is None or self.after_us is None or self.move_us is None:
            return None
        saved = self.before_us - self.after_us
        return None if saved <= 0 else max(1, int(np.ceil(self.move_us / saved)))


def show_trace(asked: TraceAsked, as_json: bool, plot_file: Path | None) -> None:
    """Count, draw and print."""
    measured = measure(asked.trace, _as_given(asked), asked.topology, asked.shape)
    balanced = None if asked.balance is None else _balance(asked, asked.balance)
    if plot_file is not None:
        draw_to("the plot", plot_file, lambda path: _draw(asked, measured, balanced, path))
    if as_json:
        print(json.dumps(_record(asked, measured, balanced), indent=2))
    else:
        _print(asked, measured, balanced)


def _as_given(asked: TraceAsked) -> Placement:
    return in_place(asked.workload.num_experts, asked.trace.num_ranks)


def _balance(asked: TraceAsked, balance: Balance) -> Balanced:
    """Place experts by the first half of the steps, and judge by the others."""
    trace, topology = asked.trace, asked.topology
    half = len(trace.steps) // 2
    used = trace._replace(steps=trace.steps[: half or 1], num_tokens=trace.num_tokens[: half or 1])
    judged = trace._replace(steps=trace.steps[half:], num_tokens=trace.num_tokens[half:])
    experts, ranks = asked.workload.num_experts, trace.num_ranks
    num_replicas = experts + ranks if balance.num_replicas is None else balance.num_replicas
    given = _as_given(asked)
    load = measure(used, given, topology, asked.shape).expert_load
    placement = place(load, num_replicas, topology.num_nodes, ranks, balance.num_groups)
    before = measure(judged, given, topology, asked.shape)
    after = measure(judged, placement, topology, asked.shape)
    moved = move(given, placement, topology, _expert_bytes(asked.workload, balance))

    def mean_us(measured: Measured) -> float | None:
        us = asked.times(measured)
        return None if us is None else float(us.sum(axis=1).mean()) + balance.compute_us * measured.imbalance

    cost = move_us(moved, asked.constants) if asked.machine is not None else None
    return Balanced(
        placement,
        before,
        after,
        moved,
        mean_us(before),
        mean_us(after),
        cost,
        len(used.steps),
        len(judged.steps),
    )


def _expert_bytes(workload: Workload, balance: Balance) -> int:
    if balance.expert_bytes is not None:
        return parse_bytes("--expert-bytes", balance.expert_bytes)
    element_bytes = workload.token.hidden_bytes // workload.hidden
    return 3 * workload.hidden * USUAL_INTERMEDIATE * element_bytes


# For programs


def _record(asked: TraceAsked, measured: Measured, balanced: Balanced | None) -> dict[str, Any]:
    trace, topology = asked.trace, asked.topology
    times = asked.times(measured)
    return {
        "ranks": trace.num_ranks,
        "nodes": topology.num_nodes,
        "experts": asked.workload.num_experts,
        "topk": trace.num_topk,
        "steps": len(trace.steps),
        "tokens": [[int(count) for count in counts] for counts in trace.num_tokens],
        "scale": trace.scale,
        "calls": {name: _call_record(measured, call) for name, call in _calls(measured)},
        "load": _load_record(measured),
        "times": None if times is None else _times_record(asked, times),
        "balance": None if balanced is None else _balance_record(balanced),
    }


def _calls(measured: Measured) -> list[tuple[str, sent.CallTraffic]]:
    """All calls that were counted, by name."""
    of_mode = [(f"low-latency {what}", call) for what, call in measured.low_latency.items()]
    return [(DISPATCH, measured.dispatch), (COMBINE, measured.combine), *of_mode]


def _call_record(measured: Measured, call: sent.CallTraffic) -> dict[str, Any]:
    """All steps together, to the byte; of sampled ones what all tokens would send."""
    links = {link: {**amount._asdict(), "bytes": amount.num_bytes} for link, amount in call.by_link().items()}
    ranks = measured.topology.num_ranks
    in_full = ranks <= MOST_RANKS_IN_FULL
    return {
        "by_link": links,
        "sent_by_rank": {link: each.tolist() for link, each in call.by_rank().items()},
        "received_by_rank": {link: each.tolist() for link, each in call.received_by_rank().items()},
        "rows": call.rows.tolist() if in_full else None,
        "bytes": call.bytes.tolist() if in_full else None,
        "bytes_between_nodes": by_node(call.bytes, measured.topology).tolist(),
    }


def _load_record(measured: Measured) -> dict[str, Any]:
    return {
        "expert": measured.expert_load.tolist(),
        "rank": measured.rank_load.tolist(),
        "node": measured.node_load.tolist(),
        "received": measured.received.tolist(),
        "imbalance": round(measured.imbalance, 4),
    }


def _times_record(asked: TraceAsked, times: Array) -> dict[str, Any]:
    assert asked.machine is not None
    return {
        "machine": asked.machine.names[0],
        "dispatch_us": times[:, 0].round(1).tolist(),
        "combine_us": times[:, 1].round(1).tolist(),
    }


def _balance_record(balanced: Balanced) -> dict[str, Any]:
    def side(measured: Measured, us: float | None) -> dict[str, Any]:
        return {
            "imbalance": round(measured.imbalance, 4),
            "rank": measured.rank_load.tolist(),
            "dispatch": {
                link: amount.num_bytes for link, amount in measured.per_step(measured.dispatch).items()
            },
            "combine": {
                link: amount.num_bytes for link, amount in measured.per_step(measured.combine).items()
            },
            "step_us": None if us is None else round(us, 1),
        }

    return {
        "experts": balanced.placement.experts.tolist(),
        "before": side(balanced.before, balanced.before_us),
        "after": side(balanced.after, balanced.after_us),
        "moved": balanced.moved._asdict(),
        "move_us": None if balanced.move_us is None else round(balanced.move_us, 1),
        "pays_after_steps": balanced.pays_after,
        "steps_used": balanced.steps_used,
        "steps_judged": balanced.steps_judged,
    }


def by_node(by_rank: Array, topology: Topology) -> Array:
    """[node, node] sums of [rank, rank].

    >>> by_node(np.array([[1, 2], [3, 4]]), Topology(2, 1)).tolist()
    [[1, 2], [3, 4]]
    """
    nodes, per_node = topology.num_nodes, topology.ranks_per_node
    summed: Array = by_rank.reshape(nodes, per_node, nodes, per_node).sum(axis=(1, 3))
    return summed


# For people


def _draw(asked: TraceAsked, measured: Measured, balanced: Balanced | None, path: Path) -> None:
    from anyep.cli.plan_heat import draw_heat

    draw_heat(asked, measured, balanced, path)


def _print(asked: TraceAsked, measured: Measured, balanced: Balanced | None) -> None:
    from rich import box
    from rich.table import Table

    from anyep.cli.console import console_for_results

    console = console_for_results()
    trace, topology = asked.trace, asked.topology
    tokens = float(np.mean([counts.mean() for counts in trace.num_tokens])) * trace.scale
    console.print(
        f"[bold]{len(trace.steps)} steps[/bold] of {trace.num_ranks} ranks on {topology.num_nodes} nodes:"
        f" {tokens:,.0f} tokens per rank, top-{trace.num_topk} of {asked.workload.num_experts} experts"
    )
    table = Table(box=box.SIMPLE_HEAD, title="sent per step, all ranks together", title_justify="left")
    for number, heading in enumerate(("call", "link", "rows", "data", "beside", "messages", "busiest rank")):
        table.add_column(heading, justify="left" if number < 2 else "right")
    for name, call in _calls(measured):
        for cells in _link_cells(measured, call):
            table.add_row(name, *cells)
    console.print(table)
    for line in _load_lines(measured):
        console.print(line)
    times = asked.times(measured)
    if times is not None:
        for number, what in enumerate((DISPATCH, COMBINE)):
            us = times[:, number]
            console.print(f"{what} on {asked.machine.names[0] if asked.machine else ''}: {_steps_text(us)}")
    if balanced is not None:
        for line in _balance_lines(balanced, asked):
            console.print(line)


def _link_cells(measured: Measured, call: sent.CallTraffic) -> Iterator[list[str]]:
    amounts, by_rank = measured.per_step(call), call.by_rank()
    for link in LINKS:
        amount, of_ranks = amounts[link], by_rank[link]
        if amount == Amount(0, 0, 0, 0):
            continue
        busiest = int(of_ranks.argmax())
        ratio = of_ranks[busiest] / of_ranks.mean()
        parts = (amount.payload_bytes, amount.beside_bytes, amount.message_bytes)
        sizes = [format_bytes(size) for size in parts]
        yield [link, f"{amount.rows:,}", *sizes, f"{busiest}: {ratio:.2f} x mean"]


def _load_lines(measured: Measured) -> Iterator[str]:
    for name, load in (
        ("rows received by a rank", measured.received),
        ("rows computed by a rank", measured.rank_load),
        ("rows computed by a node", measured.node_load),
        ("rows of an expert", measured.expert_load),
    ):
        mean = load.mean()
        busiest = int(load.argmax())
        if len(load) > 1:
            yield (
                f"{name}: {mean:,.0f} on average; most at {busiest}, {load[busiest]:,.0f}"
                f" ({load[busiest] / max(mean, 1e-9):.2f} x)"
            )


def _steps_text(us: Array) -> str:
    middle = f"{us.mean():.0f} us"
    return middle if len(us) == 1 else f"{middle} on average, {range_text((us.min(), us.max()))} us by step"


def _balance_lines(balanced: Balanced, asked: TraceAsked) -> Iterator[str]:
    before, after, moved = balanced.before, balanced.after, balanced.moved
    steps = (
        "the same step"
        if balanced.steps_used + balanced.steps_judged > len(asked.trace.steps)
        else f"{balanced.steps_judged} other steps"
    )
    yield (
        f"[bold]balanced[/bold] by {balanced.steps_used} steps, judged by {steps}:"
        f" {len(balanced.placement.experts)} places, the busiest rank computes {before.imbalance:.2f} ->"
        f" {after.imbalance:.2f} x the mean"
    )
    for name in (DISPATCH, COMBINE):
        pairs = [each.per_step(getattr(each, name)) for each in (before, after)]
        changes = [
            f"{link} {format_bytes(pairs[0][link].num_bytes)} -> {format_bytes(pairs[1][link].num_bytes)}"
            for link in LINKS
            if pairs[0][link].num_bytes
        ]
        yield f"  {name} per step: {', '.join(changes)}"
    total = moved.within_bytes + moved.between_bytes
    yield (
        f"  moving {moved.num_experts} experts: {format_bytes(total)}, {format_bytes(moved.between_bytes)} of"
        f" them between nodes"
    )
    if balanced.before_us is None or balanced.after_us is None or balanced.move_us is None:
        yield "  times: name a machine with --machine"
        return
    pays = balanced.pays_after
    yield (
        f"  a step {balanced.before_us:.0f} -> {balanced.after_us:.0f} us; moving takes"
        f" {balanced.move_us:.0f} us: {'it never pays' if pays is None else f'it pays after {pays} steps'}"
    )


def check_balance(balance: Balance) -> None:
    """Refuse what `--balance` cannot use."""
    if not 0 <= balance.compute_us < float("inf"):
        raise InvalidCall(f"--compute-us is {balance.compute_us:g}: it must be a time, 0 or more")
    whole_number("--groups", balance.num_groups, minimum=1)
    if balance.num_replicas is not None:
        whole_number("--replicas", balance.num_replicas, minimum=1)
