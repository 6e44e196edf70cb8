"""Calls of the CUDA driver from compiled code: a batch of GPU kernels is launched in one call from Python.

Python would spend several microseconds on each call of the driver; compiled code spends almost none. A batch
is described by words in memory, which `anyep/backends/cuda/batch.py` writes: the functions of the driver,
where the batch's inputs belong, and its launches.
"""

from __future__ import annotations

from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from anyep.backends.cpu.kernels.compiler import inlined, kernel
from anyep.backends.cpu.kernels.memory import int64_at, uint32_at

# The words of a batch.
LAUNCH_KERNEL: Final = 0
"""The address of cuLaunchKernel; the next four words are those of the other functions."""
RECORD_EVENT: Final = 1
WAIT_FOR_EVENT: Final = 2
PUSH_CONTEXT: Final = 3
POP_CONTEXT: Final = 4
CONTEXT: Final = 5
"""The context of the batch's GPU: another one may be current."""
POPPED: Final = 6
"""Where the driver writes the context that it takes off the stack."""
NUM_INPUTS: Final = 7
NUM_PATCHES: Final = 8
NUM_LAUNCHES: Final = 9
LAUNCHES: Final = 10
"""The launches, LAUNCH_WORDS each; the patches follow, PATCH_WORDS each."""

# The words of a launch.
FUNCTION: Final = 0
GRID: Final = 1
"""Three words."""
THREADS: Final = 4
SHARED_BYTES: Final = 5
EXTRA: Final = 6
"""The address of the array by which the driver finds the packed arguments."""
LAUNCH_WORDS: Final = 7

# The words of a patch: the index of an input, the address where it belongs, and how it is stored there.
PATCH_WORDS: Final = 3
AS_32_BITS: Final = 0
AS_64_BITS: Final = 1
AS_ALIGNED_ADDRESS: Final = 2
"""As 64 bits, which must be a multiple of 16."""
ALIGNMENT: Final = 16

# The words of a batch's inputs.
STREAM: Final = 0
EVENT_BEFORE: Final = 1
"""An event to record on STREAM_BEFORE and to wait for; 0 for none."""
STREAM_BEFORE: Final = 2
ALSO_WAIT_FOR: Final = 3
"""Another event to wait for; 0 for none."""
EVENT_AFTER: Final = 4
"""An event to record after the kernels; 0 for none."""
STREAM_AFTER: Final = 5
"""A stream that waits for EVENT_AFTER; NO_STREAM for none, since 0 is CUDA's default stream."""
FIRST_INPUT: Final = 6
NO_STREAM: Final = -1

# What `run_batch` returns instead of an error of the driver, if it has launched nothing.
MISALIGNED: Final = -1
"""An address is not a multiple of 16."""
TOO_LARGE: Final = -2
"""A number does not fit the 32 bits that a kernel has for it."""
MAX_INT32: Final = 2**31 - 1


_I32, _I64 = ir.IntType(32), ir.IntType(64)


@intrinsic
def call_driver(typing_context: Any, address: Any, first: Any, second: Any, third: Any) -> Any:
    """A function of the driver with up to three arguments; it ignores those that it does not have."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address, *values = arguments
        function = ir.FunctionType(_I32, [_I64] * 3).as_pointer()
        return builder.sext(builder.call(builder.inttoptr(address, function), values), _I64)

    return types.int64(*(types.int64,) * 4), generate


@intrinsic
def _launch(
    typing_context: Any,
    address: Any,
    function: Any,
    x: Any,
    y: Any,
    z: Any,
    threads: Any,
    shared: Any,
    stream: Any,
    packed: Any,
) -> Any:
    """cuLaunchKernel with packed arguments."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address, function, x, y, z, threads, shared, stream, packed = arguments
        launch = ir.FunctionType(_I32, [_I64, *[_I32] * 7, *[_I64] * 3]).as_pointer()
        grid_x, grid_y, grid_z, num_threads, shared_bytes = (
            builder.trunc(value, _I32) for value in (x, y, z, threads, shared)
        )
        one = ir.Constant(_I32, 1)
        block = (num_threads, one, one)
        words = [function, grid_x, grid_y, grid_z, *block, shared_bytes, stream, ir.Constant(_I64, 0), packed]
        return builder.sext(builder.call(builder.inttoptr(address, launch), words), _I64)

    return types.int64(*(types.int64,) * 9), generate


@inlined
def _take_inputs(patches, inputs):
    """Store the inputs where they belong; returns 0, MISALIGNED or TOO_LARGE."""
    for at in range(0, len(patches), PATCH_WORDS):
        value, how = inputs[FIRST_INPUT + patches[at]], patches[at + 2]
        if how == AS_32_BITS:
            if value > MAX_INT32 or value < -MAX_INT32 - 1:
                return TOO_LARGE
            uint32_at(patches[at + 1], 1)[0] = value
        else:
            if how == AS_ALIGNED_ADDRESS and value % ALIGNMENT:
                return MISALIGNED
            int64_at(patches[at + 1], 1)[0] = value
    return 0


@inlined
def _wait_for_others(batch, inputs):
    """Make the stream wait for the work before the batch; returns an error of the driver, or 0."""
    status = 0
    if inputs[EVENT_BEFORE]:
        status = call_driver(batch[RECORD_EVENT], inputs[EVENT_BEFORE], inputs[STREAM_BEFORE], 0)
        if status == 0:
            status = call_driver(batch[WAIT_FOR_EVENT], inputs[STREAM], inputs[EVENT_BEFORE], 0)
    if status == 0 and inputs[ALSO_WAIT_FOR]:
        status = call_driver(batch[WAIT_FOR_EVENT], inputs[STREAM], inputs[ALSO_WAIT_FOR], 0)
    return status


@inlined
def _launch_all(function, launches, stream):
    """Launch kernels in their order, but none without programs; returns an error of the driver, or 0."""
    for at in range(0, len(launches), LAUNCH_WORDS):
        x, y, z = launches[at + GRID], launches[at + GRID + 1], launches[at + GRID + 2]
        if x * y * z == 0:
            continue
        status = _launch(
            function,
            launches[at + FUNCTION],
            x,
            y,
            z,
            launches[at + THREADS],
            launches[at + SHARED_BYTES],
            stream,
            launches[at + EXTRA],
        )
        if status:
            return status
    return 0


@inlined
def _let_others_wait(batch, inputs):
    """Record the event after the batch, make a stream wait for it; returns an error of the driver, or 0."""
    if inputs[EVENT_AFTER] == 0:
        return 0
    status = call_driver(batch[RECORD_EVENT], inputs[EVENT_AFTER], inputs[STREAM], 0)
    if status == 0 and inputs[STREAM_AFTER] != NO_STREAM:
        status = call_driver(batch[WAIT_FOR_EVENT], inputs[STREAM_AFTER], inputs[EVENT_AFTER], 0)
    return status


@inlined
def _run(batch, launches, inputs):
    """Wait for others, launch, let others wait; returns an error of the driver, or 0."""
    status = _wait_for_others(batch, inputs)
    if status == 0:
        status = _launch_all(batch[LAUNCH_KERNEL], launches, inputs[STREAM])
    if status == 0:
        status = _let_others_wait(batch, inputs)
    return status


@kernel("int64(int64, int64)")
def run_batch(batch_address, inputs_address):
    """Launch a batch with these inputs; returns 0, an error of the driver, MISALIGNED or TOO_LARGE.

    Example:
        With the inputs [stream 7, event 5, stream 3, 0, event 6, stream 3, 40] and one kernel whose first
        argument is the input: event 5 is recorded on stream 3, stream 7 waits for it, the argument becomes
        40, the kernel is launched on stream 7, event 6 is recorded there, and stream 3 waits for it.
    """
    batch = int64_at(batch_address, LAUNCHES)
    inputs = int64_at(inputs_address, FIRST_INPUT + batch[NUM_INPUTS])
    launches_at = batch_address + 8 * LAUNCHES
    launches = int64_at(launches_at, LAUNCH_WORDS * batch[NUM_LAUNCHES])
    patches = int64_at(launches_at + 8 * len(launches), PATCH_WORDS * batch[NUM_PATCHES])
    status = _take_inputs(patches, inputs)
    if status == 0:
        # A stream of 0 is the default one of the current context.
        status = call_driver(batch[PUSH_CONTEXT], batch[CONTEXT], 0, 0)
        if status == 0:
            status = _run(batch, launches, inputs)
            call_driver(batch[POP_CONTEXT], batch_address + 8 * POPPED, 0, 0)
    return status
