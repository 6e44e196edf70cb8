"""Pointers to what lies at addresses: kernels find addresses in tables, and compute others from them."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def words_at(addresses):
    """Pointers to words of 64 bits."""
    return addresses.to(tl.pointer_type(tl.int64))


@triton.jit
def int32_at(addresses):
    """Pointers to words of 32 bits."""
    return addresses.to(tl.pointer_type(tl.int32))


@triton.jit
def float32_at(addresses):
    """Pointers to numbers of 32 bits."""
    return addresses.to(tl.pointer_type(tl.float32))


@triton.jit
def row_words_at(addresses):
    """Pointers to the words of 32 bits of rows, which begin at multiples of 16 bytes."""
    # The compiler cannot know the alignment: the addresses were loaded from a table. A hint about the
    # result of a call, such as `int32_at`, is lost when the call is inlined.
    return tl.multiple_of(addresses.to(tl.pointer_type(tl.int32)), 16)
