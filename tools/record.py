"""Replays the recorded calls and prints what differs, or records them anew (tests/support/recorder.py).

    python tools/record.py [--only dtypes] [--mode normal] [--device cpu] [--json]
    python tools/record.py --write [--only dtypes] [--times 5] [--busy 4]

Comparing, it exits 1 if anything differs, and leaves out what this machine does not have. Recording, it plays
each recording several times beside busy processes, and writes nothing if two of them differ.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import pytest
import torch

from tests.support.recorder import Calls, Replay, differences, load, place_of, store
from tests.support.recordings import RECORDINGS, replays
from tests.support.world import RankErrors

MODES = ("normal", "low_latency")


def wanted_replays(options: argparse.Namespace) -> Iterator[Replay]:
    for mode in MODES:
        for replay in replays(mode):
            if is_wanted(options, replay.recording.name, mode) and options.device in (
                None,
                replay.place.device,
            ):
                yield replay


def is_wanted(options: argparse.Namespace, name: str, mode: str) -> bool:
    return options.only in name and options.mode in (None, mode)


def why_not(replay: Replay) -> str | None:
    """Why this machine cannot replay it, as far as that is known before."""
    if replay.place.device == "cuda" and not torch.cuda.is_available():
        return "there is no GPU that torch can use"
    if replay.place.device != "cpu" and find_spec("triton") is None:
        return "triton is not installed"
    return None


def compare(options: argparse.Namespace) -> int:
    """Replay everything, several times if asked to."""
    found: dict[str, list[str]] = {}
    left_out: dict[str, str] = {}
    for replay in list(wanted_replays(options)):
        name, reason = f"{replay.recording.mode}/{replay}", why_not(replay)
        try:
            if reason is None:
                found[name] = [line for _ in range(options.times or 1) for line in replay.differences()]
        except pytest.skip.Exception as skipped:
            reason = str(skipped)
        except RankErrors as error:
            found[name] = str(error).splitlines()
        if reason is not None:
            left_out[name] = reason
        if options.json:
            continue
        if reason is not None:
            print(f"{name}: left out, {reason}", flush=True)
        else:
            print(f"{name}: {'differs' if found[name] else 'as recorded'}", flush=True)
            print(*(f"    {line}\n" for line in found[name]), sep="", end="", flush=True)
    differing = {name: lines for name, lines in found.items() if lines}
    if options.json:
        print(json.dumps({"replayed": list(found), "left_out": left_out, "differs": differing}, indent=2))
    else:
        print(f"{len(found)} replayed, {len(differing)} differ, {len(left_out)} left out")
    return 1 if differing else 0


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    started = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def record(options: argparse.Namespace) -> int:
    """As many times as asked for; what differs is not written."""
    refused = 0
    for recording in RECORDINGS.values():
        if not is_wanted(options, recording.name, recording.mode):
            continue
        shapes: dict[str, Calls] = {}
        unequal: list[str] = []
        with busy_processes(options.busy):
            for shape in recording.shapes:
                place = place_of(recording.devices[0], shape)
                replay = Replay(recording, shape, place, recording.variants[0])
                shapes[shape] = replay.run()
                for _ in range((options.times or 5) - 1):
                    unequal += (f"{replay}: {line}" for line in differences(shapes[shape], replay.run()))
        if unequal:
            print(f"{recording.path.name}: not written, since two runs differ", *unequal, sep="\n    ")
            refused += 1
            continue
        before = load(recording) if recording.path.exists() else {}
        store(recording, shapes)
        print(f"{recording.path.name}: {len(shapes)} shapes", flush=True)
        for shape in dict.fromkeys([*before, *shapes]):
            for line in differences(before.get(shape, {}), shapes.get(shape, {})):
                if before:
                    print(f"    {shape}: {line}")
    return 1 if refused else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default="", help="recordings whose names contain this")
    parser.add_argument("--mode", choices=MODES)
    parser.add_argument("--device", choices=("cpu", "simulated", "cuda"), help="where to replay")
    parser.add_argument("--write", action="store_true", help="record anew")
    parser.add_argument("--times", type=int, help="how often: 5 times to record, once to compare")
    parser.add_argument("--busy", type=int, default=4, help="busy processes beside a recording")
    parser.add_argument("--json", action="store_true", help="what differs, as JSON")
    options = parser.parse_args()
    if options.times is not None and options.times < 1:
        parser.error(f"--times must be at least 1, not {options.times}")
    if options.busy < 0:
        parser.error(f"--busy must not be negative, not {options.busy}")
    if options.write and (options.device or options.json):
        parser.error("--device and --json are for comparing, not for --write")
    if not any(is_wanted(options, recording.name, recording.mode) for recording in RECORDINGS.values()):
        names = ", ".join(r.name for r in RECORDINGS.values() if options.mode in (None, r.mode))
        parser.error(f"no recording has {options.only!r} in its name; there are {names}")
    return record(options) if options.write else compare(options)


if __name__ == "__main__":
    sys.exit(main())
