"""Published figures beside the model's predictions: the arithmetic behind `anyep plan --validate`."""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Iterable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, NamedTuple

from anyep.errors import InvalidCall, whole_number
from anyep.planning.machines import find_machine
from anyep.planning.times import COMBINE, DEFAULT_SMS, DISPATCH, LOW_LATENCY, NORMAL, Call, time_of
from anyep.sizes import CHANNELS_PER_SCALE, SCALE_BYTES

DATA: Final = ("published.csv", "deepep_v1_measured.csv")
MEASURED_LIBRARY: Final = "deepep-v1"
RANKS_PER_NODE: Final = 8
GROUP_LIMITED_SOURCES: Final = ("uccl", "deepep-v1")
"""Their gates choose among four groups of nodes where there are at least eight."""
GROUP_NODES: Final = 4
DTYPES: Final = ("fp8", "bf16")
RDMA_LOGICAL: Final = "rdma logical"
BASES: Final = ("", "logical", "nvlink", RDMA_LOGICAL)
"""Which bytes a rate counts; anyep/machines/figures/README.md has the meaning of each."""
MIN_GROUPED_NODES: Final = 8
MEASURED_COLUMNS: Final = (
    *("system", "nodes", "mode", "tokens", "hidden", "topk", "experts", "sms"),
    *("dispatch_us", "dispatch_notify_us", "combine_us", "combine_notify_us", "source"),
)
PUBLISHED_COLUMNS: Final = (
    *("source", "machine", "mode", "nodes", "ranks", "tokens", "hidden", "topk", "experts", "dispatch_dtype"),
    *("combine_dtype", "sms", "dispatch_us", "dispatch_gbs", "combine_us", "combine_gbs", "basis"),
)


class Figure(NamedTuple):
    """One published time."""

    source: str
    machine: str
    library: str
    call: Call
    published_us: float

    def record(self) -> dict[str, Any]:
        """The figure and its prediction, for programs; its error is relative, and positive if too long."""
        machine = find_machine(self.machine)
        times = time_of(self.call, machine.constants(self.library, self.call.mode))
        row: dict[str, Any] = {
            "source": self.source,
            "machine": self.machine,
            "mode": self.call.mode,
            "nodes": self.call.num_nodes,
            "ranks": self.call.num_ranks,
            "tokens": self.call.num_tokens,
            "what": self.call.what,
            "sms": self.call.num_sms if self.call.mode == NORMAL else None,
        }
        return row | {
            "published_us": round(self.published_us, 1),
            "predicted_us": round(times.total_us, 1),
            "error": round(times.total_us / self.published_us - 1, 4),
            "calibrated": machine.was_calibrated_on(row | {"library": self.library}),
            "bound": times.bound,
        }


def shipped_figures() -> list[Figure]:
    """Those of the package's data files."""
    folder = files("anyep") / "machines" / "figures"
    return [
        figure
        for name in DATA
        for figure in _figures(name, (folder / name).read_text(encoding="utf-8").splitlines())
    ]


def figures_of(path: Path) -> list[Figure]:
    """Those of a file with the columns of either shipped one."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text in UTF-8"
        raise InvalidCall(
            f"the figures {str(path)!r} cannot be read ({reason}): name a file with the columns of"
            f" {' or '.join(DATA)}"
        ) from error
    figures = list(_figures(str(path), text.splitlines()))
    if not figures:
        raise InvalidCall(f"{str(path)!r} has no figures: add lines with a time or a rate, or leave it out")
    return figures


def summary(records: Iterable[dict[str, Any]]) -> dict[str, float]:
    """How many records, the median of their errors' sizes, and the part of them within 25 %."""
    errors = [abs(record["error"]) for record in records]
    if not errors:
        return {"figures": 0, "median": 0.0, "within_25": 0.0}
    within = sum(error <= 0.25 for error in errors) / len(errors)
    return {"figures": len(errors), "median": statistics.median(errors), "within_25": within}


def _figures(name: str, lines: list[str]) -> Iterator[Figure]:
    reader = csv.DictReader(lines, restval="")
    try:
        yield from _figures_of_rows(name, reader)
    except csv.Error as error:
        raise InvalidCall(
            f"line {reader.line_num + 1} of {name!r} cannot be read as CSV ({error}): correct or remove it"
        ) from None


def _figures_of_rows(name: str, reader: csv.DictReader[str]) -> Iterator[Figure]:
    columns = set(reader.fieldnames or [])
    if columns >= set(MEASURED_COLUMNS):
        read = _measured
    elif columns >= set(PUBLISHED_COLUMNS):
        read = _published
    else:
        missing = sorted(set(PUBLISHED_COLUMNS if "machine" in columns else MEASURED_COLUMNS) - columns)
        raise InvalidCall(
            f"{name!r} lacks the columns {', '.join(missing)}: use those of {' or '.join(DATA)}"
        )
    for row in reader:
        try:
            figures = list(read(row))
        except ValueError as error:
            raise InvalidCall(
                f"line {reader.line_num} of {name!r} is no figure ({error}): correct or remove it"
            ) from None
        yield from figures


def _measured(row: dict[str, str]) -> Iterator[Figure]:
    nodes = _count(row, "nodes")
    for what in (DISPATCH, COMBINE):
        if row[f"{what}_us"]:
            notify = f"{what}_notify_us"
            notify_us = _amount(row, notify, or_zero=True) if row[notify] else 0.0
            call = _call(row, what, nodes * RANKS_PER_NODE, "fp8" if what == DISPATCH else "bf16", None)
            time_us = _amount(row, f"{what}_us") + notify_us
            yield _checked(Figure(row["source"], row["system"], MEASURED_LIBRARY, call, time_us))


def _published(row: dict[str, str]) -> Iterator[Figure]:
    nodes = _count(row, "nodes")
    is_grouped = (
        row["source"] in GROUP_LIMITED_SOURCES and row["mode"] == NORMAL and nodes >= MIN_GROUPED_NODES
    )
    for what in (DISPATCH, COMBINE):
        dtype = row[f"{what}_dtype"] or ("fp8" if what == DISPATCH else "bf16")
        if dtype not in DTYPES:
            raise ValueError(f"{what}_dtype is {dtype!r}, not {' or '.join(DTYPES)}")
        call = _call(row, what, _count(row, "ranks"), dtype, GROUP_NODES if is_grouped else None)
        if row[f"{what}_us"]:
            time_us = _amount(row, f"{what}_us")
        elif row[f"{what}_gbs"]:
            time_us = _counted_bytes(call, row["basis"]) / _amount(row, f"{what}_gbs") / 1e3
        else:
            continue
        yield _checked(Figure(row["source"], row["machine"], row["source"], call, time_us))


def _call(row: dict[str, str], what: str, ranks: int, dtype: str, group_nodes: int | None) -> Call:
    if row["mode"] not in (NORMAL, LOW_LATENCY):
        raise ValueError(f"mode is {row['mode']!r}, not {NORMAL} or {LOW_LATENCY}")
    hidden = _count(row, "hidden")
    row_bytes = hidden + SCALE_BYTES * -(-hidden // CHANNELS_PER_SCALE) if dtype == "fp8" else 2 * hidden
    nodes, tokens, topk, experts = (_count(row, name) for name in ("nodes", "tokens", "topk", "experts"))
    allowed = experts * min(group_nodes or nodes, nodes) // nodes
    if ranks % nodes or experts < ranks or topk > allowed:
        raise ValueError(
            f"{ranks} ranks, {nodes} nodes, {experts} experts and top-{topk} do not fit together"
        )
    sms = _count(row, "sms") if row["sms"] else DEFAULT_SMS
    return Call(row["mode"], what, nodes, ranks, tokens, row_bytes, topk, experts, sms, group_nodes)


def _counted_bytes(call: Call, basis: str) -> float:
    """The bytes that a published rate counts."""
    if basis not in BASES:
        raise ValueError(f"basis is {basis!r}, not one of {', '.join(filter(None, BASES))}")
    if basis == RDMA_LOGICAL:
        return call.num_tokens * call.reach.nodes * call.row_bytes
    return call.received_bytes


def _count(row: dict[str, str], column: str) -> int:
    try:
        return whole_number(column, int(row[column]), minimum=1)
    except InvalidCall:
        raise
    except ValueError:
        raise ValueError(f"{column} is {row[column]!r}, not a whole number") from None


def _amount(row: dict[str, str], column: str, or_zero: bool = False) -> float:
    """A time or rate."""
    try:
        amount = float(row[column])
    except ValueError:
        amount = math.nan
    if not 0 <= amount < math.inf or (amount == 0 and not or_zero):
        raise ValueError(
            f"{column} is {row[column]!r}, not a number {'of at least' if or_zero else 'above'} 0"
        )
    return amount


def _checked(figure: Figure) -> Figure:
    find_machine(figure.machine).constants(figure.library, figure.call.mode)
    return figure
