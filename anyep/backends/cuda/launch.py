"""Launches kernels in a few microseconds.

    send = Launcher(send_to_windows, 32, {"TILE_TOKENS": 8, ...})
    send(stream, (num_programs,), Payload(x, ids, weights), send_head, num_tokens, ...)

A kernel is compiled once for the types of its arguments and for the values that it is specialized for
(`compiled.py`); a launch packs the arguments and calls the driver. Arguments are tensors, integers, or groups
of them: NamedTuples that the kernel takes as one argument.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from triton import JITFunction

from anyep.backends.cuda import driver
from anyep.backends.cuda.compiled import ALIGNMENT, Leaf, compiled, number, pointer

Flattener = Callable[..., tuple[tuple[int, ...], tuple[Any, ...], int]]
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

    __slots__ = ("bits", "group", "kinds", "pointers", "values")

    def __init__(self, group: tuple[Any, ...]) -> None:
        self.group = group
        self.values = tuple(member if isinstance(member, int) else member.data_ptr() for member in group)
        self.bits = _all_bits(group)
        self.kinds = tuple(member if isinstance(member, int) else member.dtype for member in group)
        """What a kernel is compiled for: types of pointers, and numbers."""
        self.pointers = tuple(member.dtype for member in group if not isinstance(member, int))
        """The same for a kernel that is compiled for any number."""


class Loaded(NamedTuple):
    """A kernel that is ready to be launched."""

    kernel: driver.Kernel
    own: Callable[[tuple[int, ...]], tuple[int, ...]]
    """Leaves out the values that were compiled in."""
    unused: tuple[int, ...]
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
        self._flatteners: dict[tuple[type, ...], Flattener] = {}
        self._loaded: dict[tuple[Any, ...], Loaded] = {}

    def __call__(self, stream: Any, grid: tuple[int, ...], *arguments: Any) -> None:
        """Launch on a stream."""
        if 0 in grid:
            return
        if self._is_interpreted:
            self._kernel[grid](*for_triton(arguments), **self._constants)
            return
        classes = tuple(map(type, arguments))
        flatten = self._flatteners.get(classes)
        if flatten is None:
            flatten = self._flatteners[classes] = flattener(arguments, self._is_free)
        values, key, bits = flatten(*arguments)
        if bits % ALIGNMENT:
            key += tuple(value % ALIGNMENT == 0 for value in values)
        loaded = self._loaded.get(key)
        if loaded is None:
            loaded = self._loaded[key] = self._load(arguments)
        loaded.kernel.launch(stream.cuda_stream, grid, loaded.own(values) + loaded.unused)

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
        kept = [place for place, is_compiled_in in enumerate(is_known) if not is_compiled_in]
        return Loaded(kernel, _picker(kept, len(is_known)), (0,) * machine.num_unused)

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


def flattener(arguments: tuple[Any, ...], is_free: Sequence[bool]) -> Flattener:
    """A function of arguments like these; it returns their values, what the kernel is compiled for, and all
    bits of their addresses. Its source is written for these arguments, which takes a third of the time of
    loops.

    >>> x = torch.zeros(2, dtype=torch.int32, device="cpu")
    >>> values, key, bits = flattener(((x, 7), 48), [False, True])((x, 7), 48)
    >>> values == (x.data_ptr(), 7, 48), key, bits == x.data_ptr()
    (True, (torch.int32, 7), True)
    """
    values, key, bits = [], [], ["0"]
    for index, (argument, free) in enumerate(zip(arguments, is_free, strict=False)):
        name = f"a{index}"
        if isinstance(argument, Fixed):
            values.append(f"*{name}.values")
            key.append(f"*{name}.{'pointers' if free else 'kinds'}")
            bits.append(f"{name}.bits")
            continue
        members = enumerate(argument) if isinstance(argument, tuple) else [(None, argument)]
        for place, member in members:
            part = name if place is None else f"{name}[{place}]"
            if isinstance(member, int):
                values.append(part)
                if not free:
                    key.append(part)
            else:
                address = f"p{len(values)}"
                values.append(f"({address} := {part}.data_ptr())")
                # Callers may pass any tensor for one that the kernel does not need: types are in the key.
                key.append(f"{part}.dtype")
                bits.append(address)
    names = ", ".join(f"a{index}" for index in range(len(arguments)))
    results = ("".join(f"{part}, " for part in parts) for parts in (values, key))
    source = f"lambda {names}: (({next(results)}), ({next(results)}), {' | '.join(bits)})"
    made: Flattener = eval(source)
    return made


def _picker(kept: list[int], count: int) -> Callable[[tuple[int, ...]], tuple[int, ...]]:
    """A function that returns some of `count` values, as a tuple.

    >>> _picker([0, 2], 3)((5, 6, 7)), _picker([1], 3)((5, 6, 7)), _picker([], 1)((5,))
    ((5, 7), (6,), ())
    """
    if len(kept) == count:
        return lambda values: values
    if len(kept) > 1:
        return operator.itemgetter(*kept)
    return lambda values: tuple(values[place] for place in kept)


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
