"""The report of `anyep selftest`: what was checked, and what came out; names and addresses are replaced."""

from __future__ import annotations

import getpass
import ipaddress
import os
import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from anyep.cli.doctor import Finding
from anyep.errors import InvalidCall, NotSupported, PeerLost, WaitTimeout

FORMAT: Final = 1
"""Of the JSON; larger if keys change their meaning."""
ISSUES: Final = "https://github.com/anyep/anyep/issues"
State = Literal["passed", "failed", "skipped"]
VARIABLES: Final = re.compile(
    r"ANYEP_\w+|UCX_\w+|NIXL_LOG_LEVEL|CUDA_(VISIBLE_DEVICES|DEVICE_MAX_CONNECTIONS|MPS_ACTIVE_THREAD_PERCENTAGE)"
    r"|GLOO_SOCKET_IFNAME|OMP_NUM_THREADS|TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES|NUMBA_NUM_THREADS"
    r"|WORLD_SIZE|LOCAL_WORLD_SIZE|SLURM_STEP_NUM_(TASKS|NODES)"
)
"""The variables of the environment that the report shows: those that change what AnyEP does, no others."""


@dataclass(frozen=True)
class Check:
    """One thing that was tested: where, how it ended, why it failed or was skipped, and what to do."""

    group: str
    name: str
    place: str
    state: State
    reason: str = ""
    seconds: float = 0.0
    advice: str = ""


@dataclass(frozen=True)
class Timing:
    """The median time of a call on the slowest rank, and bytes that a rank received, on average."""

    call: str
    place: str
    tokens: int
    hidden: int
    median_s: float
    num_bytes: int

    @property
    def gbps(self) -> float:
        return self.num_bytes / self.median_s / 1e9 if self.median_s > 0 else 0.0


@dataclass(frozen=True)
class Host:
    """One host: its ranks, and what its first rank found out."""

    ranks: list[int]
    findings: list[Finding]
    private: dict[str, str] = field(default_factory=dict)
    """Names that a report does not show, and what stands for them."""


@dataclass
class Report:
    """Everything that a test has found."""

    version: str
    options: dict[str, Any]
    variables: dict[str, str]
    hosts: list[Host] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    timings: list[Timing] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def problems(self) -> list[Finding]:
        return [finding for host in self.hosts for finding in host.findings if finding.state == "missing"]

    @property
    def is_ok(self) -> bool:
        return not self.problems and all(check.state != "failed" for check in self.checks)

    def as_json(self, with_names: bool) -> dict[str, Any]:
        """The report as plain data; private names are replaced unless `with_names`."""
        record = {
            "format": FORMAT,
            "anyep": self.version,
            "ok": self.is_ok,
            "seconds": round(self.seconds, 1),
            "options": self.options,
            "variables": self.variables,
            "hosts": [
                {"ranks": host.ranks, "findings": [asdict(finding) for finding in host.findings]}
                for host in self.hosts
            ],
            "checks": [asdict(check) for check in self.checks],
            "timings": [asdict(timing) | {"gbps": timing.gbps} for timing in self.timings],
        }
        if with_names:
            return record
        private = {name: stands for host in self.hosts for name, stands in host.private.items()}
        replaced: dict[str, Any] = without(private, record)
        return replaced


def advice_about(error: BaseException | None) -> str:
    """What to do about an error that a check ended with."""
    if isinstance(error, PeerLost):
        return "see how that process ended: its own output, and `dmesg` for one that ran out of memory"
    if isinstance(error, WaitTimeout):
        return "run it once more on an idle machine; between hosts, see UCX_NET_DEVICES and the firewall"
    if isinstance(error, NotSupported | InvalidCall):
        return "the reason says what is missing"
    return f"send this report to {ISSUES}"


def listed_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that a report shows.

    >>> listed_variables({"UCX_TLS": "tcp", "ANYEP_TIMEOUT_S": "5", "MASTER_ADDR": "10.0.0.1", "KEY": "x"})
    {'ANYEP_TIMEOUT_S': '5', 'UCX_TLS': 'tcp'}
    """
    return {name: environment[name] for name in sorted(environment) if VARIABLES.fullmatch(name)}


def private_names(number: int) -> dict[str, str]:
    """What tells who and where host `number` is: its name, its addresses, the user, the home folder."""
    names = {}
    for name in {socket.gethostname(), os.uname().nodename}:
        names[name] = f"host{number}"
        names[name.partition(".")[0]] = f"host{number}"
    for address in (*_own_addresses(), os.environ.get("MASTER_ADDR", "")):
        names[address] = "address"
    home = os.environ.get("HOME", "")
    if home not in ("", "/"):
        names[home] = "~"
    with suppress(KeyError, OSError):
        names[getpass.getuser()] = "user"
    return {name: stands for name, stands in names.items() if _is_private(name)}


def _is_private(name: str) -> bool:
    """Not what is the same on most machines, or too short to be told from other words."""
    if len(name) < 3 or name in ("root", "user", "localhost", "/root"):
        return False
    try:
        return not ipaddress.ip_address(name).is_loopback
    except ValueError:
        return True


def _own_addresses() -> Iterable[str]:
    """The IP addresses of this host's interfaces, as the kernel lists them."""
    with suppress(OSError):
        table = Path("/proc/net/fib_trie").read_text()
        yield from re.findall(r"\|-- (\S+)\n\s+/32 host LOCAL", table)
    with suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            yield str(ipaddress.ip_address(int(line.split()[0], 16)))


def without(private: Mapping[str, str], thing: Any) -> Any:
    """The same data with private names replaced in all texts, the longest names first.

    >>> names = {"gpu7": "host0", "/home/ann": "~", "ann": "user"}
    >>> without(names, ["on gpu7", {"file": "/home/ann/x"}, "annex"])
    ['on host0', {'file': '~/x'}, 'annex']
    """
    if isinstance(thing, str):
        for name in sorted(private, key=len, reverse=True):
            thing = re.sub(rf"(?<![\w.]){re.escape(name)}(?!\w)", private[name], thing)
        return thing
    if isinstance(thing, Mapping):
        return {key: without(private, value) for key, value in thing.items()}
    if isinstance(thing, Sequence):
        return [without(private, value) for value in thing]
    return thing
