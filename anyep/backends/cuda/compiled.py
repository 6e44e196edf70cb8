"""Compiles a Triton kernel for a given GPU: the types of its arguments in, machine code out.

Types are Triton's: "*i32" for a pointer, "i32", "i64". A kernel is specialized for integers that are 1, or
multiples of 16, unless it declares otherwise (`do_not_specialize`), and for pointers to multiples of 16
bytes. Groups of arguments are NamedTuples, declared by the annotations of the kernel. Triton keeps what was
compiled in its cache on disk.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch

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
    ptx: str
    shared_bytes: int
    parameters: struct.Struct
    num_unused: int
    """The parameters after the kernel's own, which it does not use."""


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
    """Compile for GPUs of a compute capability (90 for an H100). `leaves` are the kernel's arguments before
    its constants; a group is a NamedTuple of leaves."""
    from triton import compile as compile_for
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature: dict[str, Any] = dict.fromkeys(kernel.arg_names, "constexpr")
    known: dict[Any, Any] = dict(constants)
    aligned: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, (name, argument) in enumerate(zip(_names(kernel, constants), leaves, strict=True)):
        # A leaf has the type of the kernel's annotation, if there is one.
        forced = kernel.params[index].annotation_type or None
        signature[name] = _kinds(argument, forced)
        for path, leaf in _paths(argument, index):
            if leaf.kind == "constexpr" and not forced:
                known[path] = 1
            elif leaf.is_aligned:
                aligned[path] = [["tt.divisibility", ALIGNMENT]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=known, attrs=aligned)
    made = compile_for(source, target=GPUTarget("cuda", capability, 32), options=dict(options))
    ptx: str = made.asm["ptx"]
    widths = _parameter_widths(ptx)
    num_own = sum(
        leaf.kind != "constexpr" or bool(kernel.params[index].annotation_type)
        for index, argument in enumerate(leaves)
        for _, leaf in _paths(argument, index)
    )
    return Machine(
        made.metadata.name,
        made.asm["cubin"],
        ptx,
        made.metadata.shared,
        struct.Struct("@" + "".join("q" if width == 64 else "i" for width in widths)),
        len(widths) - num_own,
    )


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
