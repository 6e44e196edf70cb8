"""Batches: kernels that are launched together, in a few microseconds of the host.

    send = Launch(send_to_windows, 32, {"TILE_TOKENS": 8}, (24,), (Input("x", torch.int32), table, 512))
    batch = Batch([send, wait], device=0)
    batch.run(Moment(stream.cuda_stream), {"x": x})

The arguments of a launch stay the same from call to call, except for its inputs: tensors and numbers that
are given by name. A batch is made once. A run stores the inputs where they belong, orders the stream after
earlier work, and launches the kernels, all in one call of compiled code. They are launched one after the
other, and from the third run on as one CUDA graph (`chain.py`) if there are several.

Kernels are compiled for the types of their arguments (`compiled.py`). Arguments are tensors, integers,
inputs, and groups of them: NamedTuples.
"""

from __future__ import annotations

import ctypes
import logging
import operator
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from triton import JITFunction

from anyep.backends.cpu.kernels import driver_calls as words
from anyep.backends.cuda import chain, driver
from anyep.backends.cuda.compiled import ALIGNMENT, TYPES, Leaf, Machine, compiled, number, pointer
from anyep.backends.cuda.moment import Moment
from anyep.backends.cuda.used_kernels import UsedKernels

log = logging.getLogger("anyep")
launches_as_graph: bool = True
"""Whether batches that are made from now on may be launched as graphs."""
RUNS_BEFORE_CHAIN: Final = 2
"""Most batches that are run twice are run many times."""

Recipes = tuple[tuple[Any, ...], ...]
"""What a batch is made of: functions that return a Launch, each with its arguments."""
OPTIONS: Final = {"enable_fp_fusion": False}
"""Every product and every sum is rounded, as on the CPU."""
MAX_BATCHES: Final = 1024
FUNCTIONS: Final = (
    "cuLaunchKernel",
    "cuEventRecord",
    "cuStreamWaitEvent",
    "cuCtxPushCurrent_v2",
    "cuCtxPopCurrent_v2",
)
"""The functions of the driver that a batch calls, in the order of its first words; those of chains follow."""


class Input(NamedTuple):
    """An argument that each call gives: a tensor that the kernel reads as `dtype`, or (None) a number."""

    name: str
    dtype: torch.dtype | None = None


Take = Callable[[Any], Sequence[Any]]
"""Finds the values of a batch's inputs, in their order, among those of a call."""
Launcher = Callable[[Moment, Any], bool]


class Launch(NamedTuple):
    """One kernel of a batch."""

    kernel: Any
    num_warps: int
    constants: Mapping[str, Any]
    """Compile-time values, which follow the arguments."""
    grid: tuple[int | Input, ...]
    arguments: tuple[Any, ...]


class Batch:
    """Launches that are run together, in their order, on the GPU with this index.

    `are_aligned` says of inputs that are tensors, by name, whether their addresses are multiples of 16; by
    default they are.
    """

    def __init__(
        self, launches: Sequence[Launch], device: int, are_aligned: Mapping[str, bool] | None = None
    ) -> None:
        self._launches = tuple(launches)
        self.names: tuple[str, ...] = tuple(dict.fromkeys(each.name for each in _inputs_of(self._launches)))
        """The inputs."""
        self.machines: Sequence[Machine] = ()
        """The machine code of its kernels."""
        self.launcher: Callable[[Take], Launcher] = partial(_interpreter, self._launches, self.names)
        """Makes what launches the kernels, with values among which `take` finds those of the inputs."""
        if all(isinstance(launch.kernel, JITFunction) for launch in launches):
            with driver.relaxed():
                self._loaded = _Loaded(self._launches, device, self.names, are_aligned or {})
            self.machines, self.launcher = self._loaded.machines, self._loaded.launcher
        self.run: Callable[[Moment, Mapping[str, Any]], bool] = self.launcher(values_of(self.names))
        """Launches the kernels with these values of the inputs; returns False, and launches nothing, if the
        batch was made for aligned addresses and one is not."""


class _Loaded:
    """The machine code of a batch, and the words that describe it."""

    def __init__(
        self,
        launches: Sequence[Launch],
        device: int,
        names: Sequence[str],
        are_aligned: Mapping[str, bool],
    ) -> None:
        self._names = tuple(names)
        self._name = "+".join(launch.kernel.fn.__name__ for launch in launches)
        self._kernels = [_Kernel(launch, device, are_aligned) for launch in launches]
        self.machines = [kernel.machine for kernel in self._kernels]
        num_patches = sum(map(_Kernel.num_patches, self._kernels))
        self._words = np.zeros(
            words.LAUNCHES + words.LAUNCH_WORDS * len(launches) + words.PATCH_WORDS * num_patches, np.int64
        )
        self._address = int(self._words.ctypes.data)
        self._context = driver.context_of(device)
        self._chain: chain.Chain | None = None
        may_be_graph = launches_as_graph and len(launches) > 1 and chain.is_possible()
        self._words[: words.LAUNCHES] = [
            *map(driver.address_of, FUNCTIONS),
            *(map(driver.address_of, chain.LAUNCHING) if may_be_graph else (0, 0, 0)),
            self._context,
            *(0, 0, 0, RUNS_BEFORE_CHAIN if may_be_graph else 0),
            *(len(names), num_patches, len(launches)),
        ]
        patches: list[int] = []
        for index, kernel in enumerate(self._kernels):
            at = words.LAUNCHES + words.LAUNCH_WORDS * index
            self._words[at : at + words.LAUNCH_WORDS] = kernel.words
            for name, address, how in kernel.patches(self._address + 8 * (at + words.GRID)):
                patches += (names.index(name), address, how, index)
        self._patches_at = words.LAUNCHES + words.LAUNCH_WORDS * len(launches)
        self._words[self._patches_at :] = patches
        layout = struct.Struct(f"@{words.FIRST_INPUT + len(names)}q")
        self._pack = layout.pack_into
        self._inputs = ctypes.create_string_buffer(layout.size)
        self._inputs_address = ctypes.addressof(self._inputs)
        self._lock = threading.Lock()
        # Bound here: it is compiled when a Buffer is made.
        from anyep.backends.cpu import run_batch

        self._run: Callable[[int, int], int] = run_batch

    def launcher(self, take: Take) -> Launcher:
        """What launches the kernels; bound to all that it needs, since it runs in every call."""
        pack, inputs, lock, launch = self._pack, self._inputs, self._lock, self._run
        words_at, inputs_at = self._address, self._inputs_address

        def run(moment: Moment, values: Any) -> bool:
            found = [value if value.__class__ is int else value.data_ptr() for value in take(values)]
            # Other threads run during the call: the packed inputs are this thread's until it returns.
            with lock:
                pack(inputs, 0, *moment, *found)
                status = launch(words_at, inputs_at)
                return not status or self._after(status, moment, found)

        return run

    def _after(self, status: int, moment: Moment, found: Sequence[int]) -> bool:
        """What `run` returns after a status that is not 0."""
        if status == words.CHAIN_IS_DUE:
            self._make_chain(moment[0])
            return True
        if status == words.MISALIGNED:
            return False
        if status == words.TOO_LARGE:
            numbers = dict(zip(self._names, found, strict=True))
            raise OverflowError(f"{self._name}: one of {numbers} is a number of more than 32 bits")
        driver.check(status, self._name)
        return True

    def _make_chain(self, stream: int) -> None:
        launches = self._words[words.LAUNCHES : self._patches_at].reshape(-1, words.LAUNCH_WORDS)
        try:
            self._chain = chain.Chain(launches, self._context, stream)
        except RuntimeError as error:
            # Everything was launched, and later runs launch the kernels one by one.
            log.info("%s is not launched as a graph: %s", self._name, error)
        else:
            self._words[words.CHAIN] = self._chain.address


class _Kernel:
    """One launch of a batch, loaded: the words that describe it, and its packed arguments."""

    def __init__(self, launch: Launch, device: int, are_aligned: Mapping[str, bool]) -> None:
        leaves = leaves_of(launch, are_aligned)
        major, minor = torch.cuda.get_device_capability(device)
        machine = self.machine = _machine(launch, leaves, 10 * major + minor)
        function = _loaded(machine.cubin, machine.name, driver.context_of(device), machine.shared_bytes)
        self._packed = ctypes.create_string_buffer(max(1, machine.parameters.size))
        self._size = ctypes.c_size_t(machine.parameters.size)
        self._extra = driver.packed_arguments(self._packed, self._size)
        self._grid = launch.grid
        grid = [1 if isinstance(extent, Input) else extent for extent in (*launch.grid, 1, 1)[:3]]
        threads = launch.num_warps * driver.THREADS_PER_WARP
        self.words = [function, *grid, threads, machine.shared_bytes, ctypes.addressof(self._extra), 0]
        """As `run_batch` reads them."""
        self._in_arguments = list(self._pack(launch, leaves, machine.parameters.format))

    def num_patches(self) -> int:
        return len(self._in_arguments) + sum(isinstance(extent, Input) for extent in self._grid)

    def patches(self, grid_address: int) -> Iterator[tuple[str, int, int]]:
        """Of each input: its name, the address where it belongs, and how it is stored."""
        for place, extent in enumerate(self._grid):
            if isinstance(extent, Input):
                yield extent.name, grid_address + 8 * place, words.AS_64_BITS
        yield from self._in_arguments

    def _pack(self, launch: Launch, leaves: Sequence[Any], parameters: str) -> Iterator[tuple[str, int, int]]:
        """Store the arguments that stay the same; yields the patches of the others."""
        packed_at, offset, codes = ctypes.addressof(self._packed), 0, iter(parameters[1:])
        for argument, (leaf, is_compiled_in) in zip(
            _members_of(launch.arguments), _flat_leaves(launch.kernel, leaves), strict=True
        ):
            if is_compiled_in:
                continue
            code = next(codes)
            size = struct.calcsize(code)
            offset = -(-offset // size) * size
            if not isinstance(argument, Input):
                value = argument if isinstance(argument, int) else argument.data_ptr()
                struct.pack_into(code, self._packed, offset, value)
            elif code == "i":
                yield argument.name, packed_at + offset, words.AS_32_BITS
            else:
                is_checked = argument.dtype is not None and leaf.is_aligned
                how = words.AS_ALIGNED_ADDRESS if is_checked else words.AS_64_BITS
                yield argument.name, packed_at + offset, how
            offset += size


_machines: dict[Any, Machine] = {}
"""The machine code of this process."""


def _machine(launch: Launch, leaves: Sequence[Any], capability: int) -> Machine:
    """The machine code of a kernel; it is read or compiled once."""
    options = {"num_warps": launch.num_warps, **OPTIONS}
    # A group of arguments has a type of its own, which equality of tuples does not compare. Kernels are known
    # by their identity: Triton hashes them by their sources.
    kinds = tuple((type(leaf), *leaf) for leaf in leaves)
    key = (id(launch.kernel), kinds, tuple(launch.constants.items()), launch.num_warps, capability)
    machine = _machines.get(key)
    if machine is None:
        machine = _machines[key] = compiled(launch.kernel, leaves, launch.constants, options, capability)
    return machine


@cache
def _loaded(cubin: bytes, name: str, context: int, shared_bytes: int) -> int:
    """The function of a kernel; the same code is loaded once."""
    return driver.load(cubin, name, context, shared_bytes)


class Batches:
    """The batches of a Buffer. A batch is known by its recipes: functions that return a Launch, each with its
    arguments. What Buffers of this `kind` have used is loaded before it is needed.

    batches.run(((send, sizes), (barrier, ARRIVED)), moment, {"x": x})
    """

    def __init__(self, device: int, kind: str) -> None:
        self._device = device
        self._known: dict[Any, Batch] = {}
        self._used = UsedKernels(kind)

    def load_earlier(self) -> None:
        """Load the kernels that Buffers of this kind used in earlier processes."""
        for machine in self._used.earlier():
            try:
                _loaded(machine.cubin, machine.name, driver.context_of(self._device), machine.shared_bytes)
            except RuntimeError as error:
                # A call that needs it will say so.
                log.info("%s cannot be loaded: %s", machine.file, error)

    def run(self, recipes: Recipes, moment: Moment, values: Mapping[str, Any]) -> None:
        batch = self.made(recipes)
        if not batch.run(moment, values):
            self.run_unaligned(batch, recipes, moment, values)

    def run_unaligned(
        self, batch: Batch, recipes: Recipes, moment: Moment, values: Mapping[str, Any]
    ) -> None:
        """Run kernels that do not expect of these addresses what this batch of the recipes expects."""
        are_aligned = {
            name: values[name] if isinstance(values[name], int) else values[name].data_ptr()
            for name in batch.names
        }
        are_aligned = {name: value % ALIGNMENT == 0 for name, value in are_aligned.items()}
        key = (recipes, tuple(are_aligned.items()))
        if not (self._known.get(key) or self._add(key, recipes, are_aligned)).run(moment, values):
            raise AssertionError(f"no batch takes the addresses of {list(batch.names)}")

    def made(self, recipes: Recipes) -> Batch:
        """The batch of these recipes, for aligned addresses."""
        return self._known.get(recipes) or self._add(recipes, recipes, {})

    def _add(self, key: Any, recipes: Recipes, are_aligned: Mapping[str, bool]) -> Batch:
        if len(self._known) >= MAX_BATCHES:
            # The oldest one.
            del self._known[next(iter(self._known))]
        batch = Batch([recipe(*arguments) for recipe, *arguments in recipes], self._device, are_aligned)
        for machine in batch.machines:
            self._used.add(machine)
        self._known[key] = batch
        return batch


class Prepared:
    """Recipes that are run often: their batch is looked up once, when it is first run.

    both = Prepared(batches, recipes)
    both.run(moment, {"x": x})

    With `order`, calls pass a tuple of values, whose names are given once; names that are no inputs do not
    matter.

    both = Prepared(batches, recipes, ("x", "out"))
    both.run(moment, (x, out))
    """

    __slots__ = ("_batches", "_launch", "_order", "_recipes")

    def __init__(self, batches: Batches, recipes: Recipes, order: Sequence[str] | None = None) -> None:
        self._batches = batches
        self._recipes = recipes
        self._order = order
        self._launch: Launcher | None = None

    def run(self, moment: Moment, values: Any) -> None:
        if not (self._launch or self._launcher())(moment, values):
            named = values if self._order is None else dict(zip(self._order, values, strict=True))
            self._batches.run_unaligned(self._batches.made(self._recipes), self._recipes, moment, named)

    def _launcher(self) -> Launcher:
        batch = self._batches.made(self._recipes)
        self._launch = batch.run
        if self._order is not None:
            self._launch = batch.launcher(values_at([self._order.index(name) for name in batch.names]))
        return self._launch


def leaves_of(launch: Launch, are_aligned: Mapping[str, bool]) -> list[Leaf | tuple[Leaf, ...]]:
    """What the compiler needs to know about the arguments of a launch."""
    made: list[Leaf | tuple[Leaf, ...]] = []
    for argument, parameter in zip(launch.arguments, launch.kernel.params, strict=False):
        is_free = bool(parameter.do_not_specialize)
        if isinstance(argument, tuple) and not isinstance(argument, Input):
            kind: Any = type(argument)
            made.append(kind(*(_leaf(member, is_free, True, are_aligned) for member in argument)))
        else:
            made.append(_leaf(argument, is_free, False, are_aligned))
    return made


def _leaf(member: Any, is_free: bool, is_in_group: bool, are_aligned: Mapping[str, bool]) -> Leaf:
    if isinstance(member, int):
        return number(member, is_free, is_in_group)
    if not isinstance(member, Input):
        return pointer(member.dtype, member.data_ptr())
    if member.dtype is not None:
        return Leaf(TYPES[member.dtype], are_aligned.get(member.name, True))
    if not is_free:
        raise TypeError(f"{member.name} differs from call to call, but the kernel is compiled for its value")
    return number(0, True, is_in_group)


def _flat_leaves(kernel: Any, leaves: Sequence[Any]) -> Iterator[tuple[Leaf, bool]]:
    """All leaves in order, each with whether its value is part of the machine code."""
    for index, argument in enumerate(leaves):
        is_annotated = bool(kernel.params[index].annotation_type)
        for leaf in (argument,) if isinstance(argument, Leaf) else argument:
            yield leaf, leaf.kind == "constexpr" and not is_annotated


def _members_of(arguments: Sequence[Any]) -> Iterator[Any]:
    """The arguments, with the members of groups in their places."""
    for argument in arguments:
        if isinstance(argument, tuple) and not isinstance(argument, Input):
            yield from argument
        else:
            yield argument


def _inputs_of(launches: Sequence[Launch]) -> Iterator[Input]:
    for launch in launches:
        for argument in (*launch.grid, *_members_of(launch.arguments)):
            if isinstance(argument, Input):
                yield argument


def values_of(names: Sequence[str]) -> Callable[[Mapping[str, Any]], Sequence[Any]]:
    """What looks up the values of these names.

    >>> values_of(["x", "out"])({"x": 1, "out": 2, "more": 3}), values_of(["x"])({"x": 1})
    ((1, 2), (1,))
    """
    if len(names) > 1:
        return operator.itemgetter(*names)
    return lambda values: tuple(values[name] for name in names)


def values_at(places: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """What looks up the values at these places.

    >>> values_at([2, 0])("abc"), values_at([1])("abc"), values_at([])("abc")
    (('c', 'a'), ('b',), ())
    """
    if len(places) > 1:
        return operator.itemgetter(*places)
    return lambda values: tuple(values[place] for place in places)


def _interpreter(launches: Sequence[Launch], names: Sequence[str], take: Take) -> Launcher:
    """What runs kernels in Triton's interpreter."""

    def run(moment: Moment, values: Any) -> bool:
        named = dict(zip(names, take(values), strict=True))
        for launch in launches:
            interpret(launch, named)
        return True

    return run


def interpret(launch: Launch, values: Mapping[str, Any]) -> None:
    """Run a kernel in Triton's interpreter."""
    grid = tuple(values[extent.name] if isinstance(extent, Input) else extent for extent in launch.grid)
    launch.kernel[grid](*(_for_triton(argument, values) for argument in launch.arguments), **launch.constants)


def _for_triton(argument: Any, values: Mapping[str, Any]) -> Any:
    if isinstance(argument, Input):
        value = values[argument.name]
        return value if argument.dtype is None else value.view(argument.dtype)
    if isinstance(argument, tuple):
        kind: Any = type(argument)
        return kind(*(_for_triton(member, values) for member in argument))
    return argument
