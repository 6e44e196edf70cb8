"""The verbs of memory ordering: the only module that touches a flag.

Data first, then `store_release`; `load_acquire` before reading data. Addresses are plain int64 numbers, also of
memory that other processes write.

    with one process:   copy rows; store_release(flag, 7)
    with another one:   load_acquire(flag) == 7, then the rows are there
"""

from __future__ import annotations

import platform
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from anyep.backends.cpu.kernels.compiler import inlined

_sched_yield = types.ExternalFunction("sched_yield", types.int32())
_usleep = types.ExternalFunction("usleep", types.int32(types.uint32))
_PAUSE = {"x86_64": ("llvm.x86.sse2.pause", ()), "aarch64": ("llvm.aarch64.hint", (1,))}.get(
    platform.machine()
)


def _pointer(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, ir.IntType(64).as_pointer())


@intrinsic
def load_acquire(typing_context: Any, address: Any) -> Any:
    """The 64-bit number at `address`; what its writer stored before it is visible from here on."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(_pointer(builder, arguments[0]), "acquire", 8)

    return types.int64(types.int64), generate


@intrinsic
def store_release(typing_context: Any, address: Any, value: Any) -> Any:
    """Store a 64-bit number; whoever acquires it sees everything stored before."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store_atomic(arguments[1], _pointer(builder, arguments[0]), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def pause(typing_context: Any) -> Any:
    """Tell the core that this is a waiting loop."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if _PAUSE is not None:
            name, numbers = _PAUSE
            kind = ir.FunctionType(ir.VoidType(), [ir.IntType(32)] * len(numbers))
            function = builder.module.declare_intrinsic(name, (), kind)
            builder.call(function, [ir.Constant(ir.IntType(32), number) for number in numbers])
        return context.get_dummy_value()

    return types.void(), generate


NUM_PAUSES = 16
NUM_YIELDS = 2000
NUM_SLEEPS = 20
SLEEP_US = 100
PATIENCE = NUM_PAUSES + NUM_YIELDS + NUM_SLEEPS
"""Polls without progress after which a kernel returns to its caller: a few milliseconds."""


@inlined
def back_off(num_polls: int) -> None:
    """Wait a little after the `num_polls`-th poll in vain: pause, then yield the core, then sleep.

    Ranks may outnumber cores, so whoever is waited for must get to run.
    """
    if num_polls < NUM_PAUSES:
        pause()
    elif num_polls < NUM_PAUSES + NUM_YIELDS:
        _sched_yield()
    else:
        _usleep(types.uint32(SLEEP_US))
