"""What `anyep selftest` finds out about a host: everything that `anyep doctor` says, and what matters between
GPUs and between hosts. Findings of state "missing" count as failures."""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from anyep.cli.doctor import Finding, examine_machine, findings_of
from anyep.cli.units import format_bytes
from anyep.nixl_packages import find_nixl, load_nixl

PACKAGES: Final = (
    *("anyep", "torch", "triton", "numba", "llvmlite", "numpy", "nixl", "nixl-cu12", "nixl-cu13"),
    *("nvidia-nccl-cu12", "nvidia-nccl-cu13", "nvidia-nvshmem-cu12", "nvidia-nvshmem-cu13"),
)
DMA_BUF_SUPPORTED: Final = 124
"""The attribute of a GPU (CU_DEVICE_ATTRIBUTE_...)."""
INFINIBAND: Final = Path("/sys/class/infiniband")
NETWORK: Final = Path("/sys/class/net")
UCX_PREFIX: Final = "libuct_"


def examine() -> list[Finding]:
    """Every finding about this host. Never raises."""
    return [*examine_machine(), *findings_of(CHECKS)]


def check_kernel() -> Iterator[Finding]:
    cpu = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    container = any(Path(file).exists() for file in ("/.dockerenv", "/run/.containerenv"))
    where = ", in a container" if container else ""
    yield Finding("system", "ok", f"Linux {platform.release()} {platform.machine()}{where}; {cpu}")


def check_packages() -> Iterator[Finding]:
    versions = []
    for package in PACKAGES:
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    yield Finding("packages", "ok", ", ".join(versions))


def check_nics() -> Iterator[Finding]:
    """RDMA devices and network interfaces, without their addresses."""
    adapters = [port for device in _entries(INFINIBAND) for port in _entries(device / "ports")]
    for port in adapters:
        state = _text(port / "state").partition(":")[2].strip() or "unknown state"
        detail = f"{_text(port / 'rate') or 'unknown rate'}, {_text(port / 'link_layer')}, {state}"
        name = f"{port.parent.parent.name}:{port.name}"
        advice = "" if state == "ACTIVE" else "nothing can be sent through it: see its cable and its driver"
        yield Finding("rdma", "ok" if state == "ACTIVE" else "note", f"{name}, {detail}", advice)
    if not adapters:
        yield Finding("rdma", "note", "no RDMA device", "rows between hosts go over TCP; one host needs none")
    for interface in _entries(NETWORK):
        state = _text(interface / "operstate")
        if interface.name == "lo" or state == "down":
            continue
        speed = _text(interface / "speed")
        at = f" at {int(speed) / 1000:g} Gb/s" if speed.isdigit() else ""
        yield Finding("network", "ok", f"{interface.name}, {state}{at}")


def check_gpudirect() -> Iterator[Finding]:
    """Whether a network adapter can read and write GPU memory: by nvidia-peermem, or by dma-buf."""
    import torch

    if not torch.cuda.is_available():
        yield Finding("gpudirect", "note", "there is no GPU", "nothing to do")
        return
    loaded = {line.split()[0] for line in Path("/proc/modules").read_text().splitlines() if line.strip()}
    ways = ["nvidia-peermem"] if loaded & {"nvidia_peermem", "nv_peer_mem"} else []
    if _has_dma_buf():
        ways.append("dma-buf")
    if ways:
        yield Finding("gpudirect", "ok", f"{' and '.join(ways)}: adapters can read and write GPU memory")
    else:
        yield Finding(
            "gpudirect",
            "note",
            "neither nvidia-peermem nor dma-buf: adapters cannot read GPU memory",
            "for RDMA from GPU memory: modprobe nvidia-peermem, or the open kernel modules of the driver",
        )


def _has_dma_buf() -> bool:
    import ctypes

    from anyep.backends.cuda import driver

    word = ctypes.c_int()
    ask = driver.function("cuDeviceGetAttribute", ctypes.POINTER(ctypes.c_int), ctypes.c_int, ctypes.c_int)
    return ask(ctypes.byref(word), DMA_BUF_SUPPORTED, 0) == 0 and word.value == 1


def check_locked_memory() -> Iterator[Finding]:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY:
        yield Finding("locked memory", "ok", "no limit (ulimit -l)")
    else:
        advice = "RDMA registers memory, which is locked: ulimit -l unlimited; needed on RDMA hardware only"
        yield Finding("locked memory", "note", f"at most {format_bytes(limit)} (ulimit -l)", advice)


def check_nixl_plugins() -> Iterator[Finding]:
    """The engines that NIXL has, and the transports that its UCX has."""
    try:
        import torch

        cuda = torch.version.cuda
    except ImportError:
        cuda = None
    if find_nixl(cuda) is None:
        yield Finding("nixl plugins", "note", "NIXL is not installed", "only several hosts need it")
        return
    package, api = load_nixl(cuda)
    agent = api.nixl_agent("anyep-selftest", api.nixl_agent_config(backends=[]))
    plugins = ", ".join(sorted(agent.get_plugin_list())) or "none"
    yield Finding("nixl plugins", "ok", f"{package}: {plugins}")
    folder = Path(str(importlib.import_module(package.name).__file__)).parent.parent
    libraries = folder.glob(f"{package.name}.libs/ucx/{UCX_PREFIX}*.so*")
    transports = sorted(
        {file.name.removeprefix(UCX_PREFIX).partition(".")[0].partition("-")[0] for file in libraries}
    )
    if transports:
        yield Finding("ucx transports", "ok", f"of {package}: {', '.join(transports)}")


CHECKS: Final[tuple[tuple[str, Callable[[], Iterator[Finding]]], ...]] = (
    ("system", check_kernel),
    ("packages", check_packages),
    ("network", check_nics),
    ("gpudirect", check_gpudirect),
    ("locked memory", check_locked_memory),
    ("nixl plugins", check_nixl_plugins),
)


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _text(file: Path) -> str:
    """The contents of a file of the kernel, or nothing if it cannot be read."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""
