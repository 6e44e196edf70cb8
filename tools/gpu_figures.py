"""The figures of docs/gpu-runs.md: `anyep bench --device cuda` at the usual sizes, in several rounds.

    python tools/gpu_figures.py [--rounds 5] [--seconds 540] [--folder FOLDER] [--only "2 x 24"]

The sizes take turns in every round, so that a slow minute of the machine does not count against one size
alone. A run that would not end in time is left out. The records of every run go to the folder; the table,
in Markdown, has for each case the median over the rounds and the range.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

NORMAL, LOW_LATENCY = ("--mode", "normal"), ("--mode", "low-latency")
SIZES: Final[Mapping[str, tuple[str, ...]]] = {
    "2 x 24": (*NORMAL, "--ranks", "2", "--sms", "24"),
    "4 x 24": (*NORMAL, "--ranks", "4", "--sms", "24"),
    "8 x 16": (*NORMAL, "--ranks", "8", "--sms", "16"),
    "low latency, 8": (*LOW_LATENCY, "--ranks", "8", "--tokens", "128"),
}
REPEATS: Final = 7
REPOSITORY: Final = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Figure:
    """One case at one size: its values in all rounds."""

    size: str
    case: str
    path: str
    tokens: int
    gbps: tuple[float, ...]
    microseconds: tuple[float, ...]
    host_microseconds: tuple[float, ...]


def figures_of(rounds: Iterable[tuple[str, Sequence[Mapping[str, Any]]]]) -> list[Figure]:
    """The figures of runs, each given by the name of its size and its records, in the order of the first run.

    >>> record = {"case": "combine", "path": "window", "tokens": 1, "gbps": 2.0, "median_s": 3e-6}
    >>> (figure,) = figures_of([("2 x 24", [record]), ("2 x 24", [{**record, "gbps": 4.0, "host_s": 1e-5}])])
    >>> figure.gbps, figure.host_microseconds
    ((2.0, 4.0), (10.0,))
    """
    found: dict[tuple[str, str, str, int], list[Mapping[str, Any]]] = {}
    for size, records in rounds:
        for record in records:
            key = size, str(record["case"]), str(record["path"]), int(record["tokens"])
            found.setdefault(key, []).append(record)
    return [
        Figure(
            *key,
            tuple(float(record["gbps"]) for record in records),
            tuple(1e6 * record["median_s"] for record in records),
            tuple(1e6 * record["host_s"] for record in records if record.get("host_s")),
        )
        for key, records in found.items()
    ]


def table_of(figures: Sequence[Figure]) -> str:
    """A table in Markdown.

    >>> print(table_of([Figure("2 x 24", "combine", "window", 4096, (900.0, 920.0), (61.0, 60.0), ())]))
    | size | case | path | tokens | rounds | us | GB/s per rank | host, us |
    |---|---|---|---|---|---|---|---|
    | 2 x 24 | combine | window | 4096 | 2 | 60.5 (60.0 - 61.0) | 910 (900 - 920) | - |
    """
    lines = ["| size | case | path | tokens | rounds | us | GB/s per rank | host, us |", "|---" * 8 + "|"]
    for figure in figures:
        us, rate = spread(figure.microseconds, 1), spread(figure.gbps, 0)
        host = spread(figure.host_microseconds, 0)
        name = f"{figure.size} | {figure.case} | {figure.path} | {figure.tokens} | {len(figure.gbps)}"
        lines.append(f"| {name} | {us} | {rate} | {host} |")
    return "\n".join(lines)


def spread(values: Sequence[float], digits: int) -> str:
    """The median of values, and their range.

    >>> spread([3.0, 1.0, 2.0], 0), spread([1.25], 1), spread([], 0)
    ('2 (1 - 3)', '1.2', '-')
    """
    if not values:
        return "-"
    middle = f"{statistics.median(values):.{digits}f}"
    if len(values) == 1:
        return middle
    return f"{middle} ({min(values):.{digits}f} - {max(values):.{digits}f})"


def run(size: str, file: Path, seconds: float) -> str:
    """Run the bench at one size; returns what went wrong, or nothing."""
    command = [sys.executable, "-m", "anyep", "bench", "--device", "cuda", *SIZES[size]]
    command += ["--repeats", str(REPEATS), "--json", str(file.resolve())]
    try:
        done = subprocess.run(
            command, cwd=REPOSITORY, capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return f"was stopped after {seconds:.0f} s"
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["failed"])[-1]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="rounds of all sizes; medians are shown")
    parser.add_argument("--seconds", type=float, default=540, help="begin no run that would end later")
    parser.add_argument("--folder", type=Path, help="for the records of every run (default: a temporary one)")
    parser.add_argument("--only", choices=SIZES, action="append", help="this size; may be given again")
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error(f"--rounds is {arguments.rounds}: at least 1 is needed")
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="anyep-gpu-figures."))
    folder.mkdir(parents=True, exist_ok=True)
    began, longest, failures = time.monotonic(), 0.0, 0
    rounds: list[tuple[str, Any]] = []
    for number in range(arguments.rounds):
        for size in arguments.only or SIZES:
            started = time.monotonic()
            left = arguments.seconds - (started - began)
            if left < longest:
                continue
            file = folder / f"{size.replace(' ', '-').replace(',', '')}-{number}.json"
            problem = run(size, file, left)
            took = time.monotonic() - started
            longest = max(longest, took)
            print(f"round {number + 1}, {size}: {problem or f'{took:.0f} s'}", flush=True)
            if problem:
                failures += 1
            else:
                rounds.append((size, json.loads(file.read_text())))
    print(f"\n{table_of(figures_of(rounds))}\n\nrecords: {folder}")
    return 1 if failures or not rounds else 0


if __name__ == "__main__":
    sys.exit(main())
