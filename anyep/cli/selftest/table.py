"""The report of `anyep selftest` as text, printed from the same data as the JSON."""

from __future__ import annotations

from typing import Any, Final

from anyep.cli.console import console_for_results
from anyep.cli.selftest.report import ISSUES
from anyep.cli.units import format_bytes, format_rate, format_seconds

STYLES: Final = {
    "passed": "green",
    "failed": "bold red",
    "skipped": "yellow",
    "ok": "green",
    "missing": "bold red",
    "note": "yellow",
}


def print_report(record: dict[str, Any], json_file: str | None) -> None:
    """Print the hosts, the checks, the times, and the result."""
    console = console_for_results()
    for number, host in enumerate(record["hosts"]):
        console.print(f"host {number}, {_ranks(host['ranks'])}", style="bold")
        console.print(_findings(host["findings"]))
    console.print("checks", style="bold")
    console.print(_checks(record["checks"]))
    if record["timings"]:
        console.print("times of tokens x hidden size (coarse; `anyep bench` measures)", style="bold")
        console.print(_timings(record["timings"]))
    if record["variables"]:
        listed = ", ".join(f"{name}={value}" for name, value in record["variables"].items())
        console.print(f"variables: {listed}", soft_wrap=True)
    console.print(_verdict(record), style="green" if record["ok"] else "bold red", soft_wrap=True)
    if not record["ok"]:
        with_it = f" with {json_file}" if json_file else "; --json FILE writes it as a file"
        console.print(f"to report this: {ISSUES}{with_it}", soft_wrap=True)


def _ranks(ranks: list[int]) -> str:
    """
    >>> _ranks([0]), _ranks([4, 5, 6, 7])
    ('rank 0', 'ranks 4 to 7')
    """
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"


def _verdict(record: dict[str, Any]) -> str:
    """One sentence about the result.

    >>> _verdict({"hosts": [], "checks": [{"state": "passed"}], "ok": True, "anyep": "1.0", "seconds": 3.2})
    'AnyEP 1.0 works here: 1 check passed, 0 skipped, 0 failed, in 3 s'
    """
    states = [check["state"] for check in record["checks"]]
    passed, skipped, failed = (states.count(state) for state in ("passed", "skipped", "failed"))
    works = "works here" if record["ok"] else "does not work as it should here"
    missing = sum(finding["state"] == "missing" for host in record["hosts"] for finding in host["findings"])
    lacks = f", {missing} missing on the hosts" if missing else ""
    plural = "check" if passed == 1 else "checks"
    counts = f"{passed} {plural} passed, {skipped} skipped, {failed} failed{lacks}"
    return f"AnyEP {record['anyep']} {works}: {counts}, in {record['seconds']:.0f} s"


def _grid() -> Any:
    from rich.table import Table

    return Table(box=None, show_header=False, padding=(0, 2, 0, 0))


def _findings(findings: list[dict[str, Any]]) -> Any:
    from rich.text import Text

    table = _grid()
    for finding in findings:
        detail = Text(finding["detail"])
        # In a report what to do about a note is of less interest: `anyep doctor` has it.
        if finding["state"] == "missing":
            detail.append(f"\n-> {finding['next_step']}", style="cyan")
        table.add_row(Text(finding["state"], style=STYLES[finding["state"]]), finding["name"], detail)
    return table


def _checks(checks: list[dict[str, Any]]) -> Any:
    """A line for those of a group that passed in one place, and one for each of the others."""
    from rich.text import Text

    table = _grid()
    passed: dict[tuple[str, str], list[str]] = {}
    for check in checks:
        if check["state"] == "passed":
            passed.setdefault((check["place"], check["group"]), []).append(check["name"])
    for (place, group), names in passed.items():
        table.add_row(
            Text("passed", style=STYLES["passed"]), place, group, f"{len(names)}: {'; '.join(names)}"
        )
    for check in checks:
        if check["state"] == "passed":
            continue
        detail = Text(f"{check['name']}: {check['reason']}")
        if check["advice"]:
            detail.append(f"\n-> {check['advice']}", style="cyan")
        state = Text(check["state"], style=STYLES[check["state"]])
        table.add_row(state, check["place"], check["group"], detail)
    return table


def _timings(timings: list[dict[str, Any]]) -> Any:
    table = _grid()
    for timing in timings:
        table.add_row(
            timing["place"],
            timing["call"],
            f"{timing['tokens']} x {timing['hidden']}",
            format_seconds(timing["median_s"]),
            format_bytes(timing["num_bytes"]),
            f"{format_rate(timing['gbps'])} GB/s",
        )
    return table
