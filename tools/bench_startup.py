"""How long AnyEP takes to start: medians over fresh processes. `make bench`; --json prints a list."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time

REPEATS = 5
CASES = {
    "python itself": ["-c", "pass"],
    "import anyep": ["-c", "import anyep"],
    "anyep plan --json": ["-m", "anyep", "plan", "--json"],
    "anyep plan": ["-m", "anyep", "plan"],
    "anyep doctor": ["-m", "anyep", "doctor"],
}


def median_seconds(arguments: list[str]) -> float:
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


records = [{"case": name, "median_s": median_seconds(arguments)} for name, arguments in CASES.items()]
if "--json" in sys.argv:
    print(json.dumps(records, indent=2))
else:
    print(f"medians of {REPEATS} fresh processes, Python {sys.version.split()[0]}")
    for record in records:
        print(f"  {record['case']:<20} {record['median_s']:.3f} s")
