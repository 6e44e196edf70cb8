"""How the CPU's kernels are declared: without the GIL, with explicit types, compiled when a Buffer is made.

    @kernel("void(int64[::1], int64)")         # or groups of arguments: "void(RingStack, int64)"
    def fill(values, number):
        ...

    compile_kernels()        # anyep.backends.cpu.compilation: loads from the cache what is there
    fill(array, 7)

Importing a module of kernels compiles nothing. A kernel that is called before it is compiled raises
TypeError: nothing compiles in the middle of a call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import numba

from anyep.backends.cpu.kernels.groups import GROUP_TYPES

PACKAGE: Final = __name__.rpartition(".")[0]
_OPTIONS: Final = {"nogil": True, "boundscheck": False, "error_model": "numpy"}


class Group(StrEnum):
    """Kernels that are needed together."""

    CONTROL = "control"
    """Every Buffer uses these, on GPUs too."""
    NORMAL = "normal"
    NODES = "nodes"
    """Normal mode between nodes needs these in addition to those of normal mode."""
    LOW_LATENCY = "low_latency"
    EXPANDED = "expanded"
    """Buffers that group rows by expert need these in addition to those of normal mode."""
    GPU = "gpu"
    """Buffers on GPUs need these in addition to those that every Buffer uses."""
    PROXY = "proxy"
    """Buffers on GPUs whose ranks cannot all reach each other's memory need these in addition."""
    CASTS = "casts"
    """Only tests call these directly: they show what other kernels do with a row."""


_GROUP_OF_MODULE: Final = {
    "counting": Group.NORMAL,
    "sums": Group.NORMAL,
    "windows": Group.NORMAL,
    "rings": Group.NORMAL,
    "node_handles": Group.NODES,
    "relay_dispatch": Group.NODES,
    "relay_combine": Group.NODES,
    "signals": Group.NODES,
    "slots": Group.LOW_LATENCY,
    "commands": Group.PROXY,
    "expand": Group.EXPANDED,
    "driver_calls": Group.GPU,
    "event_calls": Group.GPU,
    "casts": Group.CASTS,
}
"""A module that is not listed belongs to the group that every Buffer uses."""


@dataclass(frozen=True)
class Kernel:
    """A kernel and the only types that it is compiled for."""

    dispatcher: Any
    signature: str
    group: Group

    @property
    def types(self) -> Any:
        """The types of its result and arguments, as Numba takes them."""
        return eval(self.signature, {**vars(numba.types), **GROUP_TYPES})

    @property
    def module(self) -> str:
        """The name of the module that defines it."""
        return str(self.dispatcher.py_func.__module__)

    @property
    def name(self) -> str:
        """Its module and its own name, without the package."""
        return f"{self.module.rpartition('.')[2]}.{self.dispatcher.py_func.__qualname__}"

    @property
    def is_compiled(self) -> bool:
        """Whether it can be called."""
        return bool(self.dispatcher.overloads)


KERNELS: Final[list[Kernel]] = []
"""Every kernel of the modules that are imported, in the order of their definitions."""


def kernel(signature: str, group: Group | None = None) -> Callable[[Callable[..., Any]], Any]:
    """Declare a kernel that will be compiled for exactly these types.

    `group` says which kernels it is needed with; by default it is the group of the kernel's module.
    """

    def declare(function: Callable[..., Any]) -> Any:
        dispatcher = numba.njit(no_cfunc_wrapper=True, **_OPTIONS)(function)
        # Otherwise a call would compile it for the types of that call.
        dispatcher._can_compile = False
        module = function.__module__.rpartition(".")[2]
        of_module = _GROUP_OF_MODULE.get(module, Group.CONTROL)
        KERNELS.append(Kernel(dispatcher, signature, of_module if group is None else group))
        return dispatcher

    return declare


class _Inlined:
    """A helper of kernels. It has none of the wrappers with which Python or C would call a compiled function:
    these take longer to compile than most helpers."""

    def __init__(self, function: Callable[..., Any]) -> None:
        declare = numba.njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, inline="never", **_OPTIONS)
        # The type, by which Numba knows it, holds only a weak reference.
        self._dispatcher = declare(function)
        self._numba_type_ = numba.types.Dispatcher(self._dispatcher)
        functools.update_wrapper(self, function)

    def __call__(self, *_arguments: Any) -> Any:
        raise TypeError(f"{self.__qualname__} can be called by kernels only")


def inlined(function: Callable[..., Any]) -> Any:
    """Make a helper that kernels call; it is compiled with them."""
    return _Inlined(function)
