"""Plain access to memory by address: copies and typed views."""

from __future__ import annotations

import platform
from typing import Any

from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from anyep.backends.cpu.kernels.compiler import inlined


@intrinsic
def copy_bytes(typing_context: Any, destination: Any, source: Any, num_bytes: Any) -> Any:
    """memcpy between two addresses."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        byte_pointer = cgutils.voidptr_t
        to, of, count = arguments
        cgutils.raw_memcpy(
            builder, builder.inttoptr(to, byte_pointer), builder.inttoptr(of, byte_pointer), count, itemsize=1
        )
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic
def fill_with_zeros(typing_context: Any, destination: Any, num_bytes: Any) -> Any:
    """memset to 0."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        to, count = arguments
        cgutils.memset(builder, builder.inttoptr(to, cgutils.voidptr_t), count, 0)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


_WORD = ir.VectorType(ir.IntType(32), 4)
_WORD_BYTES = 16
_WORDS_AT_ONCE = 8


@intrinsic
def _stream_words(typing_context: Any, destination: Any, source: Any) -> Any:
    """Copy 8 words of 16 bytes, bypassing the caches."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        to = builder.inttoptr(arguments[0], _WORD.as_pointer())
        of = builder.inttoptr(arguments[1], _WORD.as_pointer())
        one = ir.Constant(ir.IntType(32), 1)
        mark = builder.module.add_metadata([one])
        places = [ir.Constant(ir.IntType(64), index) for index in range(_WORDS_AT_ONCE)]
        words = [builder.load(builder.gep(of, [place]), align=1) for place in places]
        for place, word in zip(places, words, strict=True):
            builder.store(word, builder.gep(to, [place]), align=_WORD_BYTES).set_metadata("nontemporal", mark)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@inlined
def copy_row(destination, source, num_bytes, streaming):
    """Copy a row (16-byte aligned at its destination); with `streaming` the stores bypass the caches.

    An ordinary store first reads the cache line that it overwrites, which is wasted for rows that no process
    reads soon. After streaming stores, call `drain_stores` before storing their flag.
    """
    if streaming:
        step = _WORD_BYTES * _WORDS_AT_ONCE
        whole = num_bytes // step * step
        for offset in range(0, whole, step):
            _stream_words(destination + offset, source + offset)
        copy_bytes(destination + whole, source + whole, num_bytes - whole)
    else:
        copy_bytes(destination, source, num_bytes)


@intrinsic
def drain_stores(typing_context: Any) -> Any:
    """Make streaming stores take effect before any later store."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if platform.machine() == "x86_64":
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(builder.module.declare_intrinsic("llvm.x86.sse.sfence", (), kind), [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def stack_bytes(typing_context: Any, num_bytes: Any) -> Any:
    """The address of memory for as long as the function that asks for it runs; never ask in a loop."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        memory = builder.alloca(ir.IntType(8), size=arguments[0])
        memory.align = _WORD_BYTES
        return builder.ptrtoint(memory, ir.IntType(64))

    return types.int64(types.int64), generate


def _pointer_to(element: Any) -> Any:
    @intrinsic
    def as_pointer(typing_context: Any, address: Any) -> Any:
        pointer = types.CPointer(element)

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(pointer))

        return pointer(types.int64), generate

    return as_pointer


_int64_pointer = _pointer_to(types.int64)
_int32_pointer = _pointer_to(types.int32)
_float32_pointer = _pointer_to(types.float32)
_uint8_pointer = _pointer_to(types.uint8)
_uint16_pointer = _pointer_to(types.uint16)
_uint32_pointer = _pointer_to(types.uint32)


@inlined
def int64_at(address, count):
    """`count` int64 numbers at `address`, as an array."""
    return carray(_int64_pointer(address), count)


@inlined
def int32_at(address, count):
    """`count` int32 numbers at `address`, as an array."""
    return carray(_int32_pointer(address), count)


@inlined
def uint32_at(address, count):
    """`count` uint32 numbers at `address`, as an array."""
    return carray(_uint32_pointer(address), count)


@inlined
def float32_at(address, count):
    """`count` float32 numbers at `address`, as an array."""
    return carray(_float32_pointer(address), count)


@inlined
def uint16_at(address, count):
    """`count` uint16 numbers at `address`, as an array."""
    return carray(_uint16_pointer(address), count)


@inlined
def uint8_at(address, count):
    """`count` bytes at `address`, as an array."""
    return carray(_uint8_pointer(address), count)
