"""`anyep doctor`: what this machine can do, and what to do about what it can't.

A check is a function that returns findings. An exception in a check becomes a finding too, so a bare or
broken machine gets a full report.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Annotated, Final, Literal

import typer

from anyep import settings
from anyep.cli.units import format_bytes
from anyep.errors import InvalidCall, NotSupported
from anyep.machine import address_space_limit_bytes, container_limit_bytes, memory_bytes, num_cores
from anyep.nixl_packages import HOW_TO_INSTALL, find_nixl, installed_packages, load_nixl
from anyep.requirements import how_to_install, problem_with

State = Literal["ok", "missing", "note"]
COMMAND_TIMEOUT_S: Final = 20
SHM: Final = "/dev/shm"
SHM_TRIED_BYTES: Final = 16 * 2**20
SHM_USUAL_BYTES: Final = 2**30
WRITE_AS_PEER: Final = """
import mmap, os, sys
with mmap.mmap(os.open(sys.argv[1], os.O_RDWR), mmap.PAGESIZE) as memory:
    memory[:5] = b"hello"
"""
START_MPS: Final = (
    "`anyep demo --device cuda` and `anyep bench --device cuda` start their own. For your own jobs:\n"
    "   export CUDA_MPS_PIPE_DIRECTORY=$(mktemp -d)\n"
    "   export CUDA_MPS_LOG_DIRECTORY=$CUDA_MPS_PIPE_DIRECTORY\n"
    "   nvidia-cuda-mps-control -d              # then start the ranks from this shell\n"
    "   echo quit | nvidia-cuda-mps-control     # at the end, and when ranks say that devices are unavailable"
)


@dataclass(frozen=True)
class Finding:
    """One line of the report. `next_step` is empty if there is nothing to do."""

    name: str
    state: State
    detail: str
    next_step: str = ""


@dataclass(frozen=True)
class SettingFinding(Finding):
    """A line about a setting; the rest is for programs that read the report."""

    value: str | None = None
    """The value in the environment."""
    source: str = ""
    default: str = ""

    @classmethod
    def of(
        cls, name: str, value: str | None, default: str, state: State, detail: str, next_step: str = ""
    ) -> SettingFinding:
        source = "default" if value is None else "environment"
        return cls(name, state, detail, next_step, value, source, default)


@dataclass(frozen=True)
class TunedFinding(Finding):
    """A line about stored tile sizes; the rest is for programs that read the report."""

    file: str = ""
    gpu: str = ""
    ranks: int = 0
    ranks_on_gpu: int = 0
    dispatch_gain: float = 1.0
    combine_gain: float = 1.0
    recommended_sms: int = 0


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: a list of findings.")] = False,
) -> None:
    """Show what AnyEP can use on this machine, and how to get what is missing."""
    findings = examine_machine()
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        _print_report(findings)


def examine_machine() -> list[Finding]:
    """Every finding about this machine, in the order of the report. Never raises."""
    return findings_of(CHECKS)


def findings_of(checks: Iterable[tuple[str, Callable[[], Iterator[Finding]]]]) -> list[Finding]:
    """What checks find, in their order. Never raises."""
    findings: list[Finding] = []
    for name, check in checks:
        try:
            findings.extend(check())
        except Exception as error:
            reason = f"could not be examined: {type(error).__name__}: {error}"
            findings.append(Finding(name, "note", reason, "AnyEP may still work; report this if it doesn't"))
    return findings


def check_python() -> Iterator[Finding]:
    yield Finding("python", "ok", f"{sys.version.split()[0]} at {sys.executable}")


def check_cores() -> Iterator[Finding]:
    cores = num_cores()
    if cores > 1:
        yield Finding("cores", "ok", f"{cores} usable")
    else:
        yield Finding("cores", "note", "1 usable", "ranks will take turns: right results, no parallel speed")


def check_memory() -> Iterator[Finding]:
    available = memory_bytes("MemAvailable")
    detail = f"{format_bytes(available)} free of {format_bytes(memory_bytes('MemTotal'))}"
    limit = container_limit_bytes()
    if limit is not None:
        detail += f", this container is limited to {format_bytes(limit)}"
    addresses = address_space_limit_bytes()
    if addresses is not None:
        yield Finding(
            "address space",
            "note",
            f"limited to {format_bytes(addresses)} (ulimit -v)",
            "each rank maps the windows of all ranks, a quarter of the free memory: `ulimit -v unlimited`,"
            " or pass num_window_bytes to Buffer",
        )
    if min(available, limit or available) >= 4 * 2**30:
        yield Finding("memory", "ok", detail)
    else:
        yield Finding(
            "memory", "note", detail, "keep --ranks and num_nvl_bytes small; `anyep plan --memory` tells"
        )


def check_shared_memory() -> Iterator[Finding]:
    """Whether a file can be written to /dev/shm. AnyEP's own memory is memfd, which has its own line."""
    advice = (
        "on one host AnyEP does not need it, but between hosts NIXL does (unless UCX_TLS=^posix), and other"
        " libraries may: start the container with --shm-size=8g, or mount -t tmpfs tmpfs /dev/shm"
    )
    try:
        with tempfile.TemporaryFile(dir=SHM) as file:
            os.posix_fallocate(file.fileno(), 0, SHM_TRIED_BYTES)
        free = shutil.disk_usage(SHM).free
    except FileNotFoundError:
        yield Finding(SHM, "note", "not there", advice)
        return
    except OSError as error:
        reason = f"a file of {format_bytes(SHM_TRIED_BYTES)} cannot be written: {error.strerror}"
        yield Finding(SHM, "note", reason, advice)
        return
    if free >= SHM_USUAL_BYTES:
        yield Finding(SHM, "ok", f"{format_bytes(free)} free, and files can be written")
    else:
        yield Finding(SHM, "note", f"only {format_bytes(free)} free", advice)


def check_memfd() -> Iterator[Finding]:
    """Whether another process can open this one's memory and write to it, as ranks do."""
    descriptor = os.memfd_create("anyep-doctor")
    try:
        os.ftruncate(descriptor, mmap.PAGESIZE)
        path = f"/proc/{os.getpid()}/fd/{descriptor}"
        peer = subprocess.run(
            [sys.executable, "-I", "-S", "-c", WRITE_AS_PEER, path],
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )
        with mmap.mmap(descriptor, mmap.PAGESIZE) as mine:
            shared = mine[:5] == b"hello"
    finally:
        os.close(descriptor)
    if shared:
        yield Finding("memfd", "ok", "another process can write to this one's memory")
    else:
        reason = (peer.stderr.strip().splitlines() or ["what it wrote did not arrive"])[-1]
        yield Finding(
            "memfd",
            "missing",
            f"another process cannot write to this one's memory: {reason}",
            "ranks open each other's memory through /proc: use a sandbox, and a user, that may do so",
        )


def check_pidfd() -> Iterator[Finding]:
    os.close(os.pidfd_open(os.getpid()))
    yield Finding("pidfd", "ok", "a killed rank is noticed at once")


def check_torch() -> Iterator[Finding]:
    install = how_to_install("torch")
    try:
        import torch
    except ImportError as error:
        yield Finding("torch", "missing", str(error), install)
        return
    if problem := problem_with("torch"):
        yield Finding("torch", "missing", problem, install)
        return
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    yield Finding("torch", "ok", f"{torch.__version__}, {cuda}")
    if torch.distributed.is_available() and torch.distributed.is_gloo_available():
        yield Finding("gloo", "ok", "process groups over TCP")
    else:
        yield Finding("gloo", "missing", "this torch has no Gloo", f"install another build: {install}")


def check_numba() -> Iterator[Finding]:
    try:
        import numba
    except ImportError as error:
        yield Finding("numba", "missing", str(error), how_to_install("numba"))
        return
    for package in ("numba", "numpy"):
        if problem := problem_with(package):
            yield Finding(package, "missing", problem, how_to_install(package))
            return
    yield Finding("numba", "ok", f"{numba.__version__}, compiles the kernels for CPUs")


def check_triton() -> Iterator[Finding]:
    version = _installed("triton")
    if version:
        detail = f"{version}, compiles the kernels for GPUs; the driver loads them"
        yield Finding("triton", "ok", f"{detail}, and no C compiler is needed")
    elif _list_gpus():
        yield Finding("triton", "missing", "not installed; the GPU here needs it", "pip install triton")
    else:
        yield Finding("triton", "note", "not installed; only GPUs need it", "pip install triton")


def check_gpus() -> Iterator[Finding]:
    gpus = _list_gpus()
    if not gpus:
        yield Finding("gpu", "note", "none found", "everything works on the CPU: pass device='cpu' to Buffer")
        return
    for gpu in gpus:
        yield Finding("gpu", "ok", gpu)
    import torch

    if not torch.version.cuda:
        yield Finding(
            "gpu in torch",
            "missing",
            f"torch {torch.__version__} is a build for CPUs only",
            f"{how_to_install('torch')} from an index with CUDA builds; or pass device='cpu' to Buffer",
        )
        return
    if not torch.cuda.is_available():
        yield Finding(
            "gpu in torch",
            "missing",
            f"torch, built for CUDA {torch.version.cuda}, cannot use them",
            "see CUDA_VISIBLE_DEVICES, and whether the driver is new enough; or pass device='cpu' to Buffer",
        )
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        yield Finding(
            "gpu in torch",
            "ok",
            f"cuda:{index}, CUDA {torch.version.cuda},"
            f" compute capability {properties.major}.{properties.minor},"
            f" {properties.multi_processor_count} SMs",
        )
    if torch.cuda.device_count() > 1:
        yield from _check_links()
    yield from check_heap()


@functools.cache
def _list_gpus() -> tuple[str, ...]:
    """A line about each GPU, as reported by the driver, or by torch if nothing else is available."""
    listing = _output_of(
        "nvidia-smi", "--query-gpu=index,name,memory.total,driver_version", "--format=csv,noheader"
    )
    gpus = tuple(line.strip() for line in (listing or "").splitlines() if line.strip())
    if gpus:
        return gpus
    try:
        import torch
    except ImportError:
        return ()
    return tuple(
        f"{index}, {torch.cuda.get_device_name(index)}" for index in range(torch.cuda.device_count())
    )


def _check_links() -> Iterator[Finding]:
    import torch

    count = torch.cuda.device_count()
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    apart = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    links = _output_of("nvidia-smi", "nvlink", "--status") or ""
    fabric = "NVLink" if "GB/s" in links else "PCIe"
    if apart:
        yield Finding(
            "gpu links",
            "note",
            f"{fabric}; GPUs {apart[0][0]} and {apart[0][1]} cannot reach each other's memory",
            "nothing to do: rows of ranks on them go through memory of the host (see `heap`)",
        )
    else:
        yield Finding("gpu links", "ok", f"{fabric}; every GPU reaches every other's memory")


def check_heap() -> Iterator[Finding]:
    """Where ranks on the GPUs that torch sees would keep what they share."""
    import torch

    from anyep.backends.cuda import reach

    try:
        wanted = settings.HEAP.choose().value
    except InvalidCall:
        return  # the check of the settings reports it
    indices = range(torch.cuda.device_count())
    identities = [str(torch.cuda.get_device_properties(index).uuid) for index in indices]
    why = next(filter(None, (reach.why_not_shared(index, identities) for index in indices)), "")
    name = settings.HEAP.name
    if wanted == "host":
        other = f"could not share their own, because {why}" if why else "could share their own as well"
        yield Finding("heap", "ok", f"memory of the host, as {name} says; ranks on these GPUs {other}")
    elif why and wanted == "device":
        detail = f"{name} is device, but {why}: a Buffer of ranks on all GPUs raises NotSupported"
        yield Finding("heap", "note", detail, f"unset {name}, or set it to host")
    elif why:
        detail = f"ranks on all GPUs share memory of the host, because {why}; every row crosses PCIe twice"
        yield Finding("heap", "note", detail, "nothing to do; docs/gpus.md tells what differs")
    else:
        yield Finding("heap", "ok", "ranks share memory of the GPUs, each of which reaches every other one's")


def check_mps() -> Iterator[Finding]:
    """Whether several ranks on one GPU can work side by side: NVIDIA's multi-process service."""
    if not _list_gpus():
        yield Finding("mps", "note", "there is no GPU that ranks could share", "nothing to do")
        return
    from anyep.backends.cuda.mps import MultiProcessService

    turns = (
        "several ranks on one GPU would take turns, a few milliseconds for each of them whenever one waits"
        " for another instead of microseconds; one rank per GPU needs no service"
    )
    variable = "CUDA_MPS_PIPE_DIRECTORY"
    folder = os.environ.get("CUDA_MPS_PIPE_DIRECTORY")
    if not MultiProcessService.is_installed():
        yield Finding(
            "mps",
            "note",
            f"nvidia-cuda-mps-control is not on the path: {turns}",
            "it comes with NVIDIA's driver; a container may need it mounted (with nvidia-cuda-mps-server)",
        )
    elif MultiProcessService.is_running():
        where = f"in {folder} ({variable})" if folder else f"in its usual folder ({variable} is not set)"
        yield Finding("mps", "ok", f"runs {where}: several ranks on one GPU work side by side")
    else:
        where = f", though {variable} is {folder}" if folder else f", and {variable} is not set"
        yield Finding("mps", "note", f"installed, but not running{where}: {turns}", START_MPS)


def check_connections() -> Iterator[Finding]:
    """Whether copies run beside streams that wait, where ranks share a GPU."""
    if not _list_gpus():
        return
    from anyep.backends.cuda.mps import CONNECTIONS, CONNECTIONS_OF_A_GPU, problem_with_connections

    problem = problem_with_connections(os.environ)
    if problem is None:
        given = os.environ["CUDA_DEVICE_MAX_CONNECTIONS"]
        yield Finding("connections", "ok", f"{CONNECTIONS} is {given}")
        return
    yield Finding(
        "connections",
        "note",
        problem,
        "`anyep run`, `anyep demo` and `anyep bench` set it for ranks that share a GPU, unless it is set"
        f" already; for your own jobs with the service: export {CONNECTIONS}=8, or what is left of"
        f" {CONNECTIONS_OF_A_GPU} for each rank on a GPU."
        " With one rank per GPU there is nothing to do",
    )


def check_tuned() -> Iterator[Finding]:
    """Whether Buffers on GPUs use tile sizes that `anyep tune` has stored."""
    from anyep.backends.cache_folder import Unusable
    from anyep.backends.cuda import tuned

    try:
        file, raw = tuned.path(), tuned.raw_entries()
    except Unusable as reason:
        yield Finding("tuned", "note", f"not used: {reason}", tuned.WHAT_TO_DO)
        return
    if not raw:
        try_it = "; `anyep tune` measures whether others are faster here" if _list_gpus() else ""
        yield Finding("tuned", "ok", f"Buffers on GPUs use the built-in tile sizes{try_it}")
        return
    for entry in raw:
        try:
            found = tuned.Entry.from_json(entry)
        except tuned.Invalid as reason:
            yield Finding("tuned", "note", f"an entry of {file} is not used: {reason}", tuned.WHAT_TO_DO)
            continue
        is_here = any(found.key.gpu in gpu.split(", ") for gpu in _list_gpus())
        gains = found.dispatch_rates.gain, found.combine_rates.gain
        words = [
            f"{kernel} {gain:.2f}x as fast" if tile else f"{kernel} as built in"
            for kernel, tile, gain in zip(
                ("dispatch", "combine"), (found.dispatch, found.combine), gains, strict=True
            )
        ]
        used = f"used for {found.key}" if is_here else f"not used, there is no such GPU here: {found.key}"
        yield TunedFinding(
            "tuned",
            "ok",
            f"{used}: {', '.join(words)}; {found.recommended_sms} SMs per rank are enough ({file})",
            "",
            str(file),
            *found.key,
            *gains,
            found.recommended_sms,
        )


def check_symmetric_memory() -> Iterator[Finding]:
    if importlib.util.find_spec("torch.distributed._symmetric_memory") is None:
        yield Finding("symmetric memory", "missing", "this torch has none", how_to_install("torch"))
        return
    import torch

    if not torch.cuda.is_available():
        yield Finding("symmetric memory", "note", "in torch", "nothing to do: it serves GPUs only")
    else:
        yield Finding("symmetric memory", "ok", "GPU heaps can be shared between ranks")


def check_nvshmem() -> Iterator[Finding]:
    for package in ("nvidia-nvshmem-cu13", "nvidia-nvshmem-cu12"):
        version = _installed(package)
        if version:
            yield Finding("nvshmem", "ok", f"{package} {version}")
            return
    yield Finding("nvshmem", "note", "not installed", "nothing to do: AnyEP does not need it")


def check_nixl() -> Iterator[Finding]:
    try:
        import torch

        cuda = torch.version.cuda
    except Exception:
        # The check of torch reports the problem in its own line.
        cuda = None
    if find_nixl(cuda) is None:
        yield Finding("nixl", "note", "not installed; needed between hosts only", HOW_TO_INSTALL)
        return
    # Some of its messages about a machine only matter for transfers.
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
    try:
        used, _ = load_nixl(cuda)
    except NotSupported as error:
        yield Finding("nixl", "note", str(error), "nothing to do on one host: only several hosts need NIXL")
        return
    others = [str(package) for package in installed_packages(cuda) if package != used]
    also = f"; also installed, not used: {', '.join(others)}" if others else ""
    yield Finding("nixl", "ok", f"{used} is used, puts bytes into other hosts' memory{also}")


def check_settings() -> Iterator[Finding]:
    """Every variable of the environment that AnyEP reads, and those that look like one but are none."""
    for setting in settings.SETTINGS:
        described = (setting.name, setting.text, setting.default_in_words)
        try:
            chosen = setting.choose()
        except InvalidCall as error:
            yield SettingFinding.of(*described, "note", str(error), "correct it, or unset it")
            continue
        if chosen.source == settings.DEFAULT:
            detail = f"{setting.default_in_words} (default)"
        else:
            detail = f"{setting.text} (from the environment; default: {setting.default_in_words})"
        yield SettingFinding.of(*described, "ok", f"{setting.meaning}: {detail}")
    for variable, nearest in settings.unknown_variables():
        advice = f"is {nearest} meant?" if nearest else "docs/settings.md lists the settings"
        yield Finding(variable, "note", "is set, but AnyEP has no such setting", advice)


CHECKS: Final[tuple[tuple[str, Callable[[], Iterator[Finding]]], ...]] = (
    ("python", check_python),
    ("cores", check_cores),
    ("memory", check_memory),
    ("/dev/shm", check_shared_memory),
    ("memfd", check_memfd),
    ("pidfd", check_pidfd),
    ("torch", check_torch),
    ("numba", check_numba),
    ("triton", check_triton),
    ("gpu", check_gpus),
    ("mps", check_mps),
    ("connections", check_connections),
    ("tuned", check_tuned),
    ("symmetric memory", check_symmetric_memory),
    ("nvshmem", check_nvshmem),
    ("nixl", check_nixl),
    ("settings", check_settings),
)


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _output_of(*command: str) -> str | None:
    """The output of a command, or None if it is missing, fails or hangs."""
    try:
        finished = subprocess.run(
            command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return finished.stdout


def _print_report(findings: list[Finding]) -> None:
    from rich.table import Table
    from rich.text import Text

    from anyep.cli.console import console_for_results

    styles: dict[State, str] = {"ok": "green", "missing": "bold red", "note": "yellow"}
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for finding in findings:
        detail = Text(finding.detail)
        if finding.next_step:
            detail.append(f"\n-> {finding.next_step}", style="cyan")
        table.add_row(Text(finding.state, style=styles[finding.state]), finding.name, detail)
    console = console_for_results()
    console.print(table)
    missing = [finding.name for finding in findings if finding.state == "missing"]
    if missing:
        console.print(f"AnyEP needs what is missing here: {', '.join(missing)}")
    else:
        console.print("AnyEP can run on this machine")
