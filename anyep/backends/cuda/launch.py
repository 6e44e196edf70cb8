"""Launches kernels in a few microseconds: what Triton checks in every launch is checked once.

    send = Launcher(send_to_windows, 32, {"TILE_TOKENS": 8, ...})
    send(stream, (num_programs,), x, places, ...)

Two launches with the same compile-time values differ only in what may differ: pointers are multiples of 16
bytes, and numbers that a kernel was compiled for are part of the key. Where Triton's inner interface is not
the one that we know, its outer one does the work.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from triton import JITFunction


class Launcher:
    """One kernel with one set of compile-time values, which follow its other arguments."""

    def __init__(
        self, kernel: Any, num_warps: int, constants: Mapping[str, Any], fuses_products: bool = False
    ) -> None:
        self._kernel = kernel
        names = list(kernel.arg_names)
        self._constants = dict(constants)
        self._constant_values = tuple(constants[name] for name in names if name in constants)
        self._options = {"num_warps": num_warps, "enable_fp_fusion": fuses_products}
        is_compiled = isinstance(kernel, JITFunction)
        self._is_interpreted = not is_compiled
        # Numbers that Triton compiles in if they are 1 or multiples of 16.
        self._specialised = (
            [
                index
                for index, parameter in enumerate(kernel.params)
                if not parameter.is_constexpr and not parameter.do_not_specialize
            ]
            if is_compiled
            else []
        )
        self._compiled: dict[tuple[Any, ...], Any] = {}

    def __call__(self, stream: Any, grid: tuple[int, ...], *arguments: Any) -> None:
        """Launch on a stream."""
        if 0 in grid:
            return
        if self._is_interpreted:
            self._kernel[grid](*arguments, **self._constants)
            return
        key = tuple(
            arguments[index] if arguments[index].__class__ is int else arguments[index] is None
            for index in self._specialised
        )
        compiled = self._compiled.get(key)
        if compiled is None:
            with torch.cuda.stream(stream):
                compiled = self._kernel[grid](*arguments, **self._constants, **self._options)
            self._compiled[key] = _direct_launch_of(compiled)
            return
        if compiled is _NOT_KNOWN:
            with torch.cuda.stream(stream):
                self._kernel[grid](*arguments, **self._constants, **self._options)
            return
        compiled.run(
            grid[0],
            grid[1] if len(grid) > 1 else 1,
            grid[2] if len(grid) > 2 else 1,
            stream.cuda_stream,
            compiled.function,
            compiled.packed_metadata,
            None,
            None,
            None,
            *arguments,
            *self._constant_values,
        )


_NOT_KNOWN = object()


def _direct_launch_of(compiled: Any) -> Any:
    """A compiled kernel whose `run` we know how to call; `_NOT_KNOWN` if this Triton has another one."""
    with contextlib.suppress(Exception):
        import triton

        major, minor = (int(part) for part in triton.__version__.split(".")[:2])
        if (major, minor) in ((3, 5), (3, 6), (3, 7)) and hasattr(compiled, "packed_metadata"):
            return compiled
    return _NOT_KNOWN
