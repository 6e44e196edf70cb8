"""Plain access to memory by address: copies and typed views."""

from __future__ import annotations

from typing import Any

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
_uint16_pointer = _pointer_to(types.uint16)
_uint32_pointer = _pointer_to(types.uint32)


@inlined
def int64_at(address, count):  # type: ignore[no-untyped-def]
    """`count` int64 numbers at `address`, as an array."""
    return carray(_int64_pointer(address), count)


@inlined
def int32_at(address, count):  # type: ignore[no-untyped-def]
    """`count` int32 numbers at `address`, as an array."""
    return carray(_int32_pointer(address), count)


@inlined
def uint32_at(address, count):  # type: ignore[no-untyped-def]
    """`count` uint32 numbers at `address`, as an array."""
    return carray(_uint32_pointer(address), count)


@inlined
def float32_at(address, count):  # type: ignore[no-untyped-def]
    """`count` float32 numbers at `address`, as an array."""
    return carray(_float32_pointer(address), count)


@inlined
def uint16_at(address, count):  # type: ignore[no-untyped-def]
    """`count` uint16 numbers at `address`, as an array."""
    return carray(_uint16_pointer(address), count)
