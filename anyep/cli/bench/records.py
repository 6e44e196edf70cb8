"""What `anyep bench` measures and reports: setup, labels, times, records. Nothing here needs torch."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import count, takewhile
from typing import Any, Final, Literal, NamedTuple

from anyep.cli.histogram import percentile
from anyep.cli.nodes import ONE_NODE, Nodes, limit_in_words

ENOUGH: Final = 0.8
"""Share of the best rate at which a number of SMs counts as enough."""
ONLY_ACROSS_NODES: Final = frozenset(
    [
        "nodes",
        "ranks_per_node",
        "topk_nodes",
        "network",
        "bytes_between_nodes",
        "all_to_all_bytes_between_nodes",
    ]
)
"""The keys that a record of one node leaves out in JSON."""
ONLY_ON_GPUS: Final = frozenset(["device", "gpu", "heap", "sms", "p99_s", "host_s", "swept", "enough"])
"""The keys that a record of the CPU leaves out in JSON; all but `swept`, if it belongs to a sweep."""
Sweep = Literal["sms", "tokens"]
"""What a sweep varies."""
SWEEPS: Final[tuple[Sweep, ...]] = ("sms", "tokens")
STEP_OF_TOKENS: Final = 4
"""From one number of tokens of a sweep to the next, as a factor."""


@dataclass(frozen=True)
class Setup:
    """What is measured."""

    mode: str
    ranks: int
    tokens: int
    hidden: int
    experts: int
    topk: int
    repeats: int
    seed: int
    device: str = "cpu"
    sms: int | None = None
    sweep_sms: bool = False
    nodes: Nodes = ONE_NODE
    against: str = ""
    """A library with the same API whose calls are measured too."""
    sweep_tokens: bool = False
    api: str = "buffer"
    """The class whose calls are measured."""
    heap: str = "auto"
    """Where ranks on GPUs keep what they share."""

    @property
    def is_on_host(self) -> bool:
        """Whether ranks on GPUs share memory of the host: then all rows go through rings."""
        return self.device == "cuda" and self.heap == "host"

    @property
    def row_bytes(self) -> int:
        return 2 * self.hidden

    @property
    def numbers_of_tokens(self) -> tuple[int, ...]:
        """Tokens per rank, as requested; then one, which shows the latency."""
        return (self.tokens, 1) if self.tokens > 1 else (self.tokens,)

    @property
    def swept_tokens(self) -> tuple[int, ...]:
        """The numbers of tokens of the sweep: powers of four, then the number requested.

        >>> Setup("normal", 8, 100, 7168, 64, 8, 15, 0, sweep_tokens=True).swept_tokens
        (1, 4, 16, 64, 100)
        """
        if not self.sweep_tokens:
            return ()
        powers = (STEP_OF_TOKENS**exponent for exponent in count())
        return (*takewhile(lambda power: power < self.tokens, powers), self.tokens)


class Crossing(NamedTuple):
    """Bytes that a rank sends to other nodes; and in a plain all-to-all, with one row per receiving rank."""

    num_bytes: int
    all_to_all_bytes: int


@dataclass(frozen=True)
class Label:
    """Describes a case: the bytes of rows that this rank receives, and the cases it is compared with.

    Its bounds are paths of plain copies, whose times add up. Its rivals are the paths of alternatives without
    AnyEP, and begin with their names. A case that is not `listed` is measured for comparison only. A case of
    a sweep says which one.
    """

    case: str
    path: str
    tokens: int
    num_bytes: int
    sms: int | None = None
    bounds: tuple[str, ...] = ()
    rivals: tuple[str, ...] = ()
    crossing: Crossing | None = None
    is_listed: bool = True
    sweep: Sweep | None = None


@dataclass(frozen=True)
class Timing:
    """One case on one rank: its repeats as (start, end) in seconds, on a clock that all ranks share.

    A rank that can only measure durations starts them all at 0. On a GPU, `host` is the time that the host
    takes to launch a call, by repeat; a call that waits for peers on the host includes that.
    """

    label: Label
    spans: list[tuple[float, float]]
    host: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class RankReport:
    """The results of one rank; where it ran and how times were taken, in words."""

    timings: list[Timing]
    place: str
    method: str
    gpu: str = ""


@dataclass(frozen=True)
class Record:
    """One line of the table: bytes and rate are those that a rank receives, on average.

    Across nodes, bytes between nodes are those that a rank sends there, on average. On GPUs the median may be
    that of single calls; then there is a p99 too; and `host_s` is the time that a call takes its host, if
    calls are launched one by one. A record of a sweep says what was `swept`; in that of SMs, the one with the
    fewest that are fast enough is `enough`.
    """

    case: str
    path: str
    ranks: int
    tokens: int
    hidden: int
    bytes: int
    median_s: float
    gbps: float
    of_copy: float | None
    vs: dict[str, float]
    nodes: int = 1
    ranks_per_node: int = 1
    topk_nodes: int = 1
    network: str = "auto"
    bytes_between_nodes: int | None = None
    all_to_all_bytes_between_nodes: int | None = None
    device: str = "cpu"
    gpu: str = ""
    heap: str = "auto"
    sms: int | None = None
    p99_s: float | None = None
    host_s: float | None = None
    swept: Sweep | None = None
    enough: bool = False

    def as_json(self) -> dict[str, Any]:
        """The keys that apply to where it was measured."""
        left_out: frozenset[str] = frozenset() if self.nodes > 1 else ONLY_ACROSS_NODES
        left_out |= frozenset() if self.device == "cuda" else ONLY_ON_GPUS
        left_out -= {"swept"} if self.swept else set()
        return {key: value for key, value in asdict(self).items() if key not in left_out}


@dataclass(frozen=True)
class Report:
    """A description of the measurement; the records in the order of the table; further notes."""

    description: str
    records: Sequence[Record]
    note: str = ""

    @property
    def cases(self) -> list[Record]:
        return [record for record in self.records if not record.swept]

    def swept(self, sweep: Sweep) -> list[Record]:
        return [record for record in self.records if record.swept == sweep]


def lines_of(records: Sequence[Record]) -> dict[str, list[Record]]:
    """The records of a sweep by case and path; "graph" is left out: on GPUs, all are in graphs."""
    lines: dict[str, list[Record]] = {}
    for record in records:
        lines.setdefault(f"{record.case} {record.path.removesuffix(', graph')}", []).append(record)
    return lines


def description_of(setup: Setup, first: RankReport) -> str:
    calls = "ElasticBuffer" if setup.api == "elastic" else f"{setup.mode} mode"
    heap = ", heaps in memory of the host" if setup.is_on_host else ""
    return (
        f"{calls}, {setup.ranks} ranks{first.place}{heap}, {setup.tokens} tokens per rank,"
        f" hidden {setup.hidden} bf16, top-{setup.topk} of {setup.experts} experts"
        f"{limit_in_words(setup.nodes.num_nodes, setup.nodes.topk_nodes)}; {first.method}"
    )


def durations_of(timings: Sequence[Timing]) -> list[float]:
    """The seconds of each repeat of a case: from when the last rank started to when the last one was done.

    >>> label = Label("copy", "bf16", 1, 0)
    >>> durations_of([Timing(label, [(0.0, 3.0)]), Timing(label, [(1.0, 2.5)])])
    [2.0]
    """
    return [
        max(end for _, end in spans) - max(start for start, _ in spans)
        for spans in zip(*(timing.spans for timing in timings), strict=True)
    ]


def medians_of(
    by_rank: Sequence[Sequence[Timing]], sweep: Sweep | None = None
) -> dict[tuple[str, str, int], float]:
    """Seconds of each case, by its name, path and tokens: of a sweep's cases, or of those outside sweeps."""
    return {
        (timings[0].label.case, timings[0].label.path, timings[0].label.tokens): statistics.median(
            durations_of(timings)
        )
        for timings in zip(*by_rank, strict=True)
        if timings[0].label.sweep == sweep
    }


def records_of(setup: Setup, by_rank: Sequence[RankReport]) -> list[Record]:
    """The records of all ranks together, in the order of the table; those of sweeps come last."""
    all_timings = [report.timings for report in by_rank]
    # A sweep over tokens has copies of its own; the number of SMs makes no difference to a copy.
    medians: dict[Sweep | None, dict[tuple[str, str, int], float]] = {
        None: (outside := medians_of(all_timings)),
        "sms": outside,
        "tokens": medians_of(all_timings, "tokens"),
    }
    records = [
        _record_of(setup, by_rank[0].gpu, timings, medians[timings[0].label.sweep])
        for timings in zip(*all_timings, strict=True)
        if timings[0].label.is_listed
    ]
    # Records of one case are adjacent, whatever the order of measurement; in a sweep, those of one line.
    backwards = list(reversed(list(enumerate(records))))
    cases = {record.case: place for place, record in backwards}
    lines = {(record.case, record.path): place for place, record in backwards}

    def place_of(record: Record) -> tuple[int, int, int]:
        if record.swept:
            return 1 + SWEEPS.index(record.swept), lines[record.case, record.path], record.tokens
        return 0, -record.tokens, cases[record.case]

    return _mark_enough(sorted(records, key=place_of))


def _record_of(
    setup: Setup, gpu: str, timings: Sequence[Timing], medians: Mapping[tuple[str, str, int], float]
) -> Record:
    label, seconds = timings[0].label, durations_of(timings)
    median = statistics.median(seconds)
    received = statistics.mean(timing.label.num_bytes for timing in timings)
    bound = sum(medians["copy", copy, label.tokens] for copy in label.bounds)
    rivals = {rival: medians.get((label.case, rival, label.tokens)) for rival in label.rivals}
    has_percentiles = (setup.device, setup.mode) == ("cuda", "low-latency")
    sent, plain = _crossed(timings)
    return Record(
        case=label.case,
        path=label.path,
        ranks=setup.ranks,
        tokens=label.tokens,
        hidden=setup.hidden,
        bytes=round(received),
        median_s=median,
        gbps=received / median / 1e9,
        of_copy=bound / median if bound and received else None,
        vs={rival.split()[0]: seconds / median for rival, seconds in rivals.items() if seconds},
        nodes=setup.nodes.num_nodes,
        ranks_per_node=setup.nodes.ranks_per_node,
        topk_nodes=setup.nodes.topk_nodes,
        network=setup.nodes.network,
        bytes_between_nodes=sent,
        all_to_all_bytes_between_nodes=plain,
        device=setup.device,
        gpu=gpu,
        heap=setup.heap,
        sms=label.sms,
        p99_s=percentile(seconds, 0.99) if has_percentiles else None,
        host_s=_host_seconds(timings),
        swept=label.sweep,
    )


def _host_seconds(timings: Sequence[Timing]) -> float | None:
    """The host's time per call: the slowest rank's in each repeat, and the median of these.

    >>> label = Label("combine", "window", 1, 0)
    >>> _host_seconds([Timing(label, [], [3.0, 1.0, 2.0]), Timing(label, [], [1.0, 1.0, 5.0])])
    3.0
    """
    slowest = [max(times) for times in zip(*(timing.host for timing in timings), strict=True)]
    return statistics.median(slowest) if slowest else None


def _crossed(timings: Sequence[Timing]) -> tuple[int | None, int | None]:
    """Bytes to other nodes, of AnyEP and of a plain all-to-all: the means over the ranks."""
    crossings = [timing.label.crossing for timing in timings if timing.label.crossing is not None]
    if not crossings:
        return None, None
    sent, plain = (round(statistics.mean(numbers)) for numbers in zip(*crossings, strict=True))
    return sent, plain


def _mark_enough(records: list[Record]) -> list[Record]:
    rates: dict[str, dict[int, float]] = {}
    for record in records:
        if record.swept == "sms":
            rates.setdefault(record.case, {})[record.sms or 0] = record.gbps
    enough = {("sms", case, fewest_sms(of_case)) for case, of_case in rates.items()}
    return [replace(record, enough=(record.swept, record.case, record.sms) in enough) for record in records]


def fewest_sms(rates: Mapping[int, float]) -> int:
    """The fewest SMs that reach 80 % of the best rate.

    >>> fewest_sms({4: 205.0, 8: 392.0, 16: 701.0, 24: 912.0, 32: 1004.0})
    24
    """
    return min(sms for sms, rate in rates.items() if rate >= ENOUGH * max(rates.values()))
