"""Compiles a Triton kernel for a given GPU: the types of its arguments in, machine code out.

Types are Triton's: "*i32" for a pointer, "i32", "i64". A kernel is specialized for integers that are 1, or
multiples of 16, unless it declares otherwise (`do_not_specialize`), and for pointers to multiples of 16
bytes. Groups of arguments are NamedTuples, declared by the annotations of the kernel. What was compiled is
kept in the user's cache folder, by the sources of the kernels and the version of Triton.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import re
import struct
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from anyep.backends.cache_folder import Folder, Unusable, hash_of_files, open_folder
from anyep.backends.cuda import tuned
from anyep.progress import QUIET_S

log = logging.getLogger("anyep")
NUM_LOCKS: Final = 64

INT32: Final = range(-(2**31), 2**31)
ALIGNMENT: Final = 16
TYPES: Final = {
    torch.bool: "*i1",
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.uint16: "*u16",
    torch.int16: "*i16",
    torch.uint32: "*u32",
    torch.int32: "*i32",
    torch.uint64: "*u64",
    torch.int64: "*i64",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.float8_e4m3fn: "*fp8e4nv",
}
PARAMETER: Final = re.compile(r"\.param\s+\.[a-z]*(\d+)")


class Leaf(NamedTuple):
    """One argument, or one member of a group, as the compiler needs it."""

    kind: str
    """Its type; "constexpr" if it is known to be 1."""
    is_aligned: bool
    """Whether it is known to be a multiple of 16."""


class Machine(NamedTuple):
    """A compiled kernel."""

    name: str
    cubin: bytes
    shared_bytes: int
    parameters: struct.Struct
    num_unused: int
    """The parameters after the kernel's own, which it does not use."""
    file: str = ""
    """Where it is kept in the cache folder; empty if it is not."""
    identity: str = ""
    """What it was compiled from and for."""


def pointer(dtype: torch.dtype, address: int) -> Leaf:
    return Leaf(TYPES[dtype], address % ALIGNMENT == 0)


def number(value: int, is_free: bool, is_in_group: bool) -> Leaf:
    """An integer. One that the kernel is not specialized for (`is_free`) has 64 bits in a group, and 32 bits
    outside.

    >>> number(48, False, False), number(1, False, False)
    (Leaf(kind='i32', is_aligned=True), Leaf(kind='constexpr', is_aligned=False))
    >>> number(48, True, False), number(48, True, True)
    (Leaf(kind='i32', is_aligned=False), Leaf(kind='i64', is_aligned=False))
    """
    if is_free:
        return Leaf("i64" if is_in_group else "i32", False)
    if value == 1:
        return Leaf("constexpr", False)
    return Leaf("i32" if value in INT32 else "i64", value % ALIGNMENT == 0)


def compiled(
    kernel: Any,
    leaves: Sequence[Leaf | tuple[Leaf, ...]],
    constants: Mapping[str, Any],
    options: Mapping[str, Any],
    capability: int,
) -> Machine:
    """The machine code of a kernel for GPUs of a compute capability (90 for an H100), from the user's cache
    if it is there. One process at a time compiles a kernel; others wait for it. `leaves` are the kernel's
    arguments before its constants; a group is a NamedTuple of leaves."""
    kept_in = folder()
    if kept_in is None:
        return compile_now(kernel, leaves, constants, options, capability)
    parts = (kernel.cache_key, leaves, sorted(constants.items()), sorted(options.items()), capability)
    identity = repr((*parts, triton_version()))
    digest = hashlib.sha256(identity.encode()).hexdigest()
    file = f"{kernel.fn.__name__}.{digest[:24]}"
    machine = read(kept_in, file, identity)
    if machine is None:
        with kept_in.locked(_wait_silently, f"lock-{int(digest, 16) % NUM_LOCKS}"):
            machine = read(kept_in, file, identity)
            if machine is None:
                machine = compile_now(kernel, leaves, constants, options, capability)
                with contextlib.suppress(Unusable):
                    kept_in.write(file, identity, _encoded(machine))
                    machine = machine._replace(file=file, identity=identity)
    return machine


def read(kept_in: Folder, file: str, identity: str) -> Machine | None:
    """Machine code that a process has kept."""
    payload = kept_in.read(file, identity)
    return _decoded(payload)._replace(file=file, identity=identity) if payload is not None else None


@cache
def folder() -> Folder | None:
    """Where machine code is kept; None if that is not possible."""
    try:
        key = hash_of_files(sorted((Path(__file__).parent / "kernels").glob("*.py")))
        found = open_folder(hashlib.sha256(f"cuda {key} {triton_version()}".encode()).hexdigest()[:32])
        with found.locked(_wait_silently):
            found.prune()
        return found
    except (Unusable, OSError) as error:
        log.warning("kernels are compiled by every process, because they cannot be kept: %s", error)
        return None


def triton_version() -> str:
    import triton

    return str(triton.__version__)


def _wait_silently(holder: int) -> None:
    """Another process compiles the same kernel, which takes seconds."""


def _encoded(machine: Machine) -> bytes:
    header = (machine.name, machine.shared_bytes, machine.parameters.format, machine.num_unused)
    return json.dumps(header).encode() + b"\n" + machine.cubin


def _decoded(payload: bytes) -> Machine:
    header, _, cubin = payload.partition(b"\n")
    name, shared_bytes, parameters, num_unused = json.loads(header)
    return Machine(name, cubin, shared_bytes, struct.Struct(parameters), num_unused)


def compile_now(
    kernel: Any,
    leaves: Sequence[Leaf | tuple[Leaf, ...]],
    constants: Mapping[str, Any],
    options: Mapping[str, Any],
    capability: int,
) -> Machine:
    """Compile a kernel, which takes seconds."""
    _progress.show(kernel.fn.__name__)
    made = compiled_by_triton(kernel, leaves, constants, options, capability)
    widths = _parameter_widths(made.asm["ptx"])
    num_own = sum(
        leaf.kind != "constexpr" or bool(kernel.params[index].annotation_type)
        for index, argument in enumerate(leaves)
        for _, leaf in _paths(argument, index)
    )
    return Machine(
        made.metadata.name,
        made.asm["cubin"],
        made.metadata.shared,
        struct.Struct("@" + "".join("q" if width == 64 else "i" for width in widths)),
        len(widths) - num_own,
    )


PAUSE_S: Final = 10.0
"""Compilations this far apart have nothing to do with each other."""


class _Progress:
    """Says on stderr which kernels this process compiles, once that takes long."""

    def __init__(self) -> None:
        self._began = self._last = -PAUSE_S

    def show(self, kernel: str) -> None:
        now = time.monotonic()
        if now - self._last > PAUSE_S:
            self._began = now
        self._last = now
        # A sweep over many tiles shows its own progress.
        if now - self._began > QUIET_S and not tuned.is_trial():
            # Without a reader, nobody misses the line.
            with contextlib.suppress(OSError, ValueError):
                print(f"AnyEP: compiling the GPU kernel {kernel}, once per version", file=sys.stderr)


_progress = _Progress()


def compiled_by_triton(
    kernel: Any,
    leaves: Sequence[Leaf | tuple[Leaf, ...]],
    constants: Mapping[str, Any],
    options: Mapping[str, Any],
    capability: int,
) -> Any:
    """What Triton makes of a kernel: PTX and machine code."""
    from triton import compile as compile_for
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature: dict[str, Any] = dict.fromkeys(kernel.arg_names, "constexpr")
    known: dict[Any, Any] = dict(constants)
    aligned: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, (name, argument) in enumerate(zip(_names(kernel, constants), leaves, strict=True)):
        # An argument has the type of the kernel's annotation, if there is one.
        forced = kernel.params[index].annotation_type or None
        signature[name] = _kinds(argument, forced)
        for path, leaf in _paths(argument, index):
            if leaf.kind == "constexpr" and not forced:
                known[path] = 1
            elif leaf.is_aligned:
                aligned[path] = [["tt.divisibility", ALIGNMENT]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=known, attrs=aligned)
    return compile_for(source, target=GPUTarget("cuda", capability, 32), options=dict(options))


def _names(kernel: Any, constants: Mapping[str, Any]) -> list[str]:
    """The arguments that are no constants; they come first."""
    return [param.name for param in kernel.params if not param.is_constexpr and param.name not in constants]


def _kinds(argument: Leaf | tuple[Leaf, ...], forced: str | None) -> Any:
    if isinstance(argument, Leaf):
        return forced or argument.kind
    group: Any = type(argument)
    return group(*(leaf.kind for leaf in argument))


def _paths(argument: Leaf | tuple[Leaf, ...], index: int) -> Iterator[tuple[tuple[int, ...], Leaf]]:
    """The places of leaves in the signature, as Triton names them."""
    if isinstance(argument, Leaf):
        yield (index,), argument
    else:
        for place, leaf in enumerate(argument):
            yield (index, place), leaf


def _parameter_widths(ptx: str) -> list[int]:
    """The bits of each parameter of a kernel.

    >>> _parameter_widths(".entry f(.param .u64 .ptr .global .align 1 f_0, .param .u32 f_1) .reqntid 32")
    [64, 32]
    """
    entry = ptx[ptx.index(".entry") :]
    return [int(width) for width in PARAMETER.findall(entry[: entry.index(")")])]
