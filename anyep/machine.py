"""The memory and cores of this machine that this process may use."""

from __future__ import annotations

import mmap
import os
import resource
import socket
from pathlib import Path


def memory_bytes(field: str) -> int:
    """A field of /proc/meminfo, such as MemTotal or MemAvailable, in bytes."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, amount = line.partition(":")
        if name == field:
            return int(amount.split()[0]) * 1024
    raise LookupError(f"/proc/meminfo has no {field}")


def container_limit_bytes() -> int | None:
    """The memory limit of this container, or None if there is none."""
    try:
        text = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def free_memory_bytes() -> int:
    """Memory that can still be allocated."""
    limit = container_limit_bytes()
    available = memory_bytes("MemAvailable")
    if limit is None:
        return available
    try:
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):
        used = 0
    return max(0, min(available, limit - used))


def address_space_limit_bytes() -> int | None:
    """The most bytes that this process may map (`ulimit -v`), or None if there is no limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY else limit


def memory_limits_in_words() -> str:
    """The limits that a mapping of this process may have hit, as a sentence."""
    found = []
    limit = address_space_limit_bytes()
    if limit is not None:
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
        found.append(f"its address space is limited to {limit:,} bytes (ulimit -v), {mapped:,} are mapped")
    container = container_limit_bytes()
    if container is not None:
        found.append(f"its container is limited to {container:,} bytes")
    return "; ".join(found) or "no limit is set (ulimit -v, container), so the machine has no more"


def num_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def host_identity() -> str:
    """A name that is the same for processes under one kernel, and different on different hosts."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot}"
