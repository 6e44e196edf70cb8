"""Memory ordering and sleeping: the only module that accesses flags.

A writer stores its data first, then calls `store_release`; a reader calls `load_acquire` before it reads the
data. Addresses are plain int64 numbers, also those of memory that other processes write. A rank that waits
for long sleeps on a futex: for counters of several peers it sets a wake-up count, and the peer that advances
the last of them wakes it; for rings it sleeps on its doorbell.

    one process:       copy rows; store_release(flag, 7)
    another process:   load_acquire(flag) == 7, then the rows are there
"""

from __future__ import annotations

import platform
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from anyep.backends.cpu.kernels.compiler import inlined

sched_yield = types.ExternalFunction("sched_yield", types.int32())
_syscall = types.ExternalFunction("syscall", types.int64(*[types.int64] * 7))
_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), 0)
"""The number of the futex system call; 0 if it is not known for this architecture."""
FUTEX_WAIT = 0
FUTEX_WAKE = 1
SLEEP_NS = 2_000_000
NUM_YIELDS = 20
MAX_POLLS = NUM_YIELDS + 2
"""Unsuccessful polls after which a kernel returns to its caller: a few milliseconds."""
LOW_BIT_COUNT = 32
LOW_BITS = (1 << LOW_BIT_COUNT) - 1
MAX_RANKS = 1 << 31
_clock_gettime = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.int64))
CLOCK_MONOTONIC = 1
usleep = types.ExternalFunction("usleep", types.int32(types.uint32))
_PAUSE = {"x86_64": ("llvm.x86.sse2.pause", ()), "aarch64": ("llvm.aarch64.hint", (1,))}.get(
    platform.machine()
)


def _pointer(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, ir.IntType(64).as_pointer())


@intrinsic
def load_acquire(typing_context: Any, address: Any) -> Any:
    """Load the 64-bit number at `address`; everything its writer stored before it is visible from here on."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(_pointer(builder, arguments[0]), "acquire", 8)

    return types.int64(types.int64), generate


@intrinsic
def store_release(typing_context: Any, address: Any, value: Any) -> Any:
    """Store a 64-bit number; a process that acquires it also reads everything stored before it."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store_atomic(arguments[1], _pointer(builder, arguments[0]), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def pause(typing_context: Any) -> Any:
    """Tell the core that this is a spin loop."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if _PAUSE is not None:
            name, numbers = _PAUSE
            kind = ir.FunctionType(ir.VoidType(), [ir.IntType(32)] * len(numbers))
            function = builder.module.declare_intrinsic(name, (), kind)
            builder.call(function, [ir.Constant(ir.IntType(32), number) for number in numbers])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def add(typing_context: Any, address: Any, value: Any) -> Any:
    """Add to a 64-bit number, sequentially consistent with all adds and fences; returns the old value."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.atomic_rmw("add", _pointer(builder, arguments[0]), arguments[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def fence(typing_context: Any) -> Any:
    """Make all earlier stores visible to every process before any later load."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@inlined
def _futex_wake(address):
    _syscall(_FUTEX, address, FUTEX_WAKE, 2**31 - 1, 0, 0, 0)


@inlined
def _futex_wait(address, seen):
    """Sleep until woken, for `SLEEP_NS` at most; return at once if the word no longer equals `seen`."""
    timeout = np.empty(2, np.int64)
    timeout[0] = 0
    timeout[1] = SLEEP_NS
    # The kernel compares the low 32 bits, which on these machines lie at the word's address.
    _syscall(_FUTEX, address, FUTEX_WAIT, seen & LOW_BITS, timeout.ctypes.data, 0, 0)


@inlined
def ring_bell(doorbell, sleepers):
    """Tell a rank that something it may be waiting for has arrived; the add is also a fence.

    `sleepers` counts the rank's sleeping threads. Either this call reads a count that includes them, or they
    read the doorbell's new value before they sleep.
    """
    add(doorbell, 1)
    if _FUTEX and load_acquire(sleepers) > 0:
        _futex_wake(doorbell)


@inlined
def sleep_on(address, seen, sleepers):
    """Sleep until the doorbell at `address` is rung; return at once if it no longer equals `seen`."""
    if _FUTEX:
        add(sleepers, 1)
        fence()
        if load_acquire(address) == seen:
            _futex_wait(address, seen)
        add(sleepers, -1)
    else:
        usleep(types.uint32(100))


@inlined
def request_wake_up(wake_up, topic, num_missing):
    """Ask to be woken after `num_missing` more counters of a topic; poll once more before sleeping.

    Either the peers that advance the counters read the wake-up count, or that poll finds their counters.
    """
    store_release(wake_up, topic << LOW_BIT_COUNT | num_missing)
    fence()


@inlined
def count_down(wake_up, topic):
    """Wake the waiter if this was its last outstanding counter; call it after the counter and a fence."""
    value = load_acquire(wake_up)
    if (
        value >> LOW_BIT_COUNT == topic
        and value & LOW_BITS > 0
        and add(wake_up, -1) & LOW_BITS == 1
        and _FUTEX != 0
    ):
        _futex_wake(wake_up)


@inlined
def sleep_until_woken(wake_up):
    """Sleep until the wake-up count reaches 0, for `SLEEP_NS` at most, then clear it."""
    if _FUTEX:
        remaining = load_acquire(wake_up) & LOW_BITS
        # Two peers at once may have counted it down below 0.
        if 0 < remaining < MAX_RANKS:
            _futex_wait(wake_up, remaining)
    else:
        usleep(types.uint32(100))
    store_release(wake_up, 0)


@inlined
def back_off(num_polls, num_spins, address, seen, sleepers):
    """Wait a little after the `num_polls`-th unsuccessful poll: spin at first, then sleep on the doorbell.

    Spinning is for ranks that have a core each. If ranks outnumber cores, the peer that is waited for must
    get to run, so `num_spins` is 0.
    """
    if num_polls < num_spins:
        pause()
    elif num_polls < num_spins + NUM_YIELDS:
        sched_yield()
    else:
        sleep_on(address, seen, sleepers)


@inlined
def monotonic_ns():
    """Read the clock of `time.monotonic_ns`."""
    now = np.empty(2, np.int64)
    _clock_gettime(types.int32(CLOCK_MONOTONIC), now.ctypes.data)
    return now[0] * 1_000_000_000 + now[1]
