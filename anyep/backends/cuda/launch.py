"""Launches kernels in a few microseconds: Triton's checks of every launch are made once.

    send = Launcher(send_to_windows, 32, {"TILE_TOKENS": 8, ...})
    send(stream, (num_programs,), x, places, ...)

Direct launches reuse a compiled kernel: the numbers and types that it was compiled for are part of the key,
and all tensors begin at multiples of 16 bytes. If some tensors do not, or if Triton's internal interface is
not a known one, the launch goes through Triton's public interface.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, Final

import torch
import triton
from triton import JITFunction

KNOWN_VERSIONS: Final = ("3.6",)


class Seen:
    """A tensor that a kernel reads as values of another type. It is cheaper to make than a torch view."""

    __slots__ = ("dtype", "tensor")

    def __init__(self, tensor: torch.Tensor, dtype: torch.dtype) -> None:
        self.tensor = tensor
        self.dtype = dtype

    def data_ptr(self) -> int:
        return self.tensor.data_ptr()


class Launcher:
    """One kernel with one set of compile-time values, which follow its other arguments."""

    def __init__(self, kernel: Any, num_warps: int, constants: Mapping[str, Any]) -> None:
        self._kernel = kernel
        self._constants = dict(constants)
        self._constant_values = tuple(constants[name] for name in kernel.arg_names if name in constants)
        self._options = {"num_warps": num_warps, "enable_fp_fusion": False}
        self._is_interpreted = not isinstance(kernel, JITFunction)
        self._numbers: list[int] | None = None
        """The indices of integer arguments that Triton specializes for if they are 1 or multiples of 16."""
        self._compiled: dict[tuple[Any, ...], Any] = {}

    def __call__(self, stream: Any, grid: tuple[int, ...], *arguments: Any) -> None:
        """Launch on a stream."""
        if 0 in grid:
            return
        if self._is_interpreted:
            self._kernel[grid](*_tensors(arguments), **self._constants)
            return
        if self._numbers is None:
            self._numbers = [
                index
                for index, argument in enumerate(arguments)
                if isinstance(argument, int) and not self._kernel.params[index].do_not_specialize
            ]
        addresses: list[int] = []
        types: list[torch.dtype] = []
        bits = 0
        for argument in arguments:
            if argument.__class__ is int:
                addresses.append(argument)
            else:
                address = argument.data_ptr()
                bits |= address
                addresses.append(address)
                # Callers may pass any tensor for one that the kernel does not need, so types are in the key.
                types.append(argument.dtype)
        is_aligned = bits % 16 == 0
        key = (*[arguments[index] for index in self._numbers], *types)
        launch = self._compiled.get(key)
        if launch is not None and is_aligned:
            launch(stream, grid, addresses, self._constant_values)
            return
        with torch.cuda.stream(stream):
            compiled = self._kernel[grid](*_tensors(arguments), **self._constants, **self._options)
        if is_aligned:
            launch = _direct_launch(compiled)
            if launch is not None:
                self._compiled[key] = launch


def _tensors(arguments: tuple[Any, ...]) -> list[Any]:
    return [
        argument.tensor.view(argument.dtype) if isinstance(argument, Seen) else argument
        for argument in arguments
    ]


def _direct_launch(compiled: Any) -> Any:
    """A function that launches a compiled kernel; None if Triton's internal interface is not a known one."""
    with contextlib.suppress(AttributeError):
        launcher = compiled.run
        needs_scratch = launcher.global_scratch_size or launcher.profile_scratch_size
        if triton.__version__.startswith(KNOWN_VERSIONS) and not needs_scratch:
            run, function, metadata = launcher.launch, compiled.function, compiled.packed_metadata
            cooperative, dependent = launcher.launch_cooperative_grid, launcher.launch_pdl

            def launch(
                stream: Any, grid: tuple[int, ...], addresses: list[Any], constants: tuple[Any, ...]
            ) -> None:
                # Triton passes an address on unchanged; for a tensor it would query the driver.
                run(
                    grid[0],
                    grid[1] if len(grid) > 1 else 1,
                    grid[2] if len(grid) > 2 else 1,
                    stream.cuda_stream,
                    function,
                    cooperative,
                    dependent,
                    None,
                    None,
                    metadata,
                    None,
                    None,
                    None,
                    *addresses,
                    *constants,
                )

            return launch
    return None
