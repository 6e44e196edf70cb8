"""Launches kernels in a few microseconds.

    send = Launcher(send_to_windows, 32, {"TILE_TOKENS": 8, ...})
    send(stream, (num_programs,), Payload(x, ids, weights), send_head, num_tokens, ...)

A kernel is compiled once for the types of its arguments and for the values that it is specialized for
(`compiled.py`); a launch packs the arguments and calls the driver. Arguments are tensors, integers, or groups
of them: NamedTuples that the kernel takes as one argument.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

import torch
from triton import JITFunction

from anyep.backends.cuda import driver
from anyep.backends.cuda.compiled import ALIGNMENT, Leaf, compiled, number, pointer

OPTIONS: Final = {"enable_fp_fusion": False}
"""Every product and every sum is rounded, as on the CPU."""


class Seen:
    """A tensor that a kernel reads as values of another type. It is cheaper to make than a torch view."""

    __slots__ = ("dtype", "tensor")

    def __init__(self, tensor: torch.Tensor, dtype: torch.dtype) -> None:
        self.tensor = tensor
        self.dtype = dtype

    def data_ptr(self) -> int:
        return self.tensor.data_ptr()


class Fixed:
    """A group whose members stay the same, prepared once for all launches."""

    __slots__ = ("bits", "group", "kinds", "values")

    def __init__(self, group: tuple[Any, ...]) -> None:
        self.group = group
        self.values = [member if isinstance(member, int) else member.data_ptr() for member in group]
        self.bits = _all_bits(group)
        self.kinds = tuple(member if isinstance(member, int) else member.dtype for member in group)


class Loaded(NamedTuple):
    """A kernel that is ready to be launched."""

    kernel: driver.Kernel
    known: list[int]
    """The places of values that were compiled in, last first."""
    unused: list[int]
    """The values of parameters after the kernel's own."""


class Launcher:
    """One kernel with one set of compile-time values, which follow its other arguments."""

    def __init__(self, kernel: Any, num_warps: int, constants: Mapping[str, Any]) -> None:
        self._kernel = kernel
        self._constants = dict(constants)
        self._num_warps = num_warps
        self._is_interpreted = not isinstance(kernel, JITFunction)
        self._is_free: list[bool] = []
        """By argument: whether the kernel is compiled for any value of its integers."""
        if not self._is_interpreted:
            self._is_free = [bool(param.do_not_specialize) for param in kernel.params]
        self._loaded: dict[tuple[Any, ...], Loaded] = {}

    def __call__(self, stream: Any, grid: tuple[int, ...], *arguments: Any) -> None:
        """Launch on a stream."""
        if 0 in grid:
            return
        if self._is_interpreted:
            self._kernel[grid](*for_triton(arguments), **self._constants)
            return
        values: list[int] = []
        key: list[Any] = []
        bits = 0
        for argument, is_free in zip(arguments, self._is_free, strict=False):
            if argument.__class__ is Fixed:
                values += argument.values
                key.append(argument.kinds)
                bits |= argument.bits
                continue
            for member in argument if isinstance(argument, tuple) else (argument,):
                if member.__class__ is int:
                    values.append(member)
                    if not is_free:
                        key.append(member)
                else:
                    address = member.data_ptr()
                    values.append(address)
                    bits |= address
                    # Callers may pass any tensor for one that the kernel does not need: types are in the key.
                    key.append(member.dtype)
        if bits % ALIGNMENT:
            key.append(tuple(value % ALIGNMENT == 0 for value in values))
        loaded = self._loaded.get(tuple(key))
        if loaded is None:
            loaded = self._loaded[tuple(key)] = self._load(arguments)
        for place in loaded.known:
            del values[place]
        values += loaded.unused
        loaded.kernel.launch(stream.cuda_stream, grid, values)

    def _load(self, arguments: tuple[Any, ...]) -> Loaded:
        leaves = self.leaves(arguments)
        major, minor = torch.cuda.get_device_capability()
        machine = compiled(
            self._kernel,
            leaves,
            self._constants,
            {"num_warps": self._num_warps, **OPTIONS},
            10 * major + minor,
        )
        kernel = driver.load(
            machine.cubin,
            machine.name,
            torch.cuda.current_device(),
            self._num_warps,
            machine.shared_bytes,
            machine.parameters,
        )
        is_known = [
            leaf.kind == "constexpr" and not self._kernel.params[index].annotation_type
            for index, leaf in _leaves_of(leaves)
        ]
        # Last first, so that each can be deleted at its place.
        known = [place for place in reversed(range(len(is_known))) if is_known[place]]
        return Loaded(kernel, known, [0] * machine.num_unused)

    def leaves(self, arguments: tuple[Any, ...]) -> list[Leaf | tuple[Leaf, ...]]:
        """What the compiler needs to know about the arguments."""
        made: list[Leaf | tuple[Leaf, ...]] = []
        for argument, is_free in zip(arguments, self._is_free, strict=False):
            group = argument.group if isinstance(argument, Fixed) else argument
            if isinstance(group, tuple):
                kind: Any = type(group)
                made.append(kind(*(_leaf(member, is_free, True) for member in group)))
            else:
                made.append(_leaf(group, is_free, False))
        return made


def _leaf(member: Any, is_free: bool, is_in_group: bool) -> Leaf:
    if isinstance(member, int):
        return number(member, is_free, is_in_group)
    return pointer(member.dtype, member.data_ptr())


def _leaves_of(leaves: list[Leaf | tuple[Leaf, ...]]) -> Iterator[tuple[int, Leaf]]:
    """All leaves in order, each with the index of its argument."""
    for index, argument in enumerate(leaves):
        if isinstance(argument, Leaf):
            yield index, argument
        else:
            yield from ((index, leaf) for leaf in argument)


def _all_bits(group: tuple[Any, ...]) -> int:
    """Bits that are set in any address of a group."""
    bits = 0
    for member in group:
        if not isinstance(member, int):
            bits |= member.data_ptr()
    return bits


def for_triton(arguments: tuple[Any, ...]) -> list[Any]:
    """The arguments as Triton's own launches take them: tensors, numbers and NamedTuples."""
    return [_for_triton(argument) for argument in arguments]


def _for_triton(argument: Any) -> Any:
    if isinstance(argument, Fixed):
        argument = argument.group
    if isinstance(argument, tuple):
        kind: Any = type(argument)
        return kind(*(_for_triton(member) for member in argument))
    return argument.tensor.view(argument.dtype) if isinstance(argument, Seen) else argument
