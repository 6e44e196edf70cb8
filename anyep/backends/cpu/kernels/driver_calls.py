"""Calls of the CUDA driver from compiled code: a batch of GPU kernels is launched in one call from Python.

Python would spend several microseconds on each call of the driver; compiled code spends almost none. A batch
is described by words in memory, which `anyep/backends/cuda/batch.py` writes: the functions of the driver,
where the batch's inputs belong, and its launches. Words that `anyep/backends/cuda/chain.py` writes describe
graphs of its kernels.
"""

from __future__ import annotations

from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from anyep.backends.cpu.kernels.compiler import inlined, kernel
from anyep.backends.cpu.kernels.memory import int32_at, int64_at, uint32_at

# The words of a batch.
LAUNCH_KERNEL: Final = 0
"""The address of cuLaunchKernel; the next words are those of the other functions."""
RECORD_EVENT: Final = 1
WAIT_FOR_EVENT: Final = 2
PUSH_CONTEXT: Final = 3
POP_CONTEXT: Final = 4
IS_CAPTURING: Final = 5
SET_NODE: Final = 6
LAUNCH_GRAPH: Final = 7
CONTEXT: Final = 8
"""The context of the batch's GPU: another one may be current."""
POPPED: Final = 9
"""Where the driver writes the context that it takes off the stack."""
CAPTURE_STATUS: Final = 10
"""Where the driver writes 32 bits: whether a stream is captured into a graph; 0 if it is not."""
CHAIN: Final = 11
"""The address of the words of the batch's chain; 0 for none."""
RUNS_UNTIL_CHAIN: Final = 12
"""How many more runs there are until a chain is made; 0 if none is to be made."""
NUM_INPUTS: Final = 13
NUM_PATCHES: Final = 14
NUM_LAUNCHES: Final = 15
LAUNCHES: Final = 16
"""The launches, LAUNCH_WORDS each; the patches follow, PATCH_WORDS each."""

# The words of a launch.
FUNCTION: Final = 0
GRID: Final = 1
"""Three words."""
THREADS: Final = 4
SHARED_BYTES: Final = 5
EXTRA: Final = 6
"""The address of the array by which the driver finds the packed arguments."""
VERSION: Final = 7
"""How many times an argument or the grid has changed."""
LAUNCH_WORDS: Final = 8

# The words of a patch: the index of an input, the address where it belongs, how it is stored there, and the
# index of the launch that it is for.
PATCH_WORDS: Final = 4
AS_32_BITS: Final = 0
AS_64_BITS: Final = 1
AS_ALIGNED_ADDRESS: Final = 2
"""As 64 bits, which must be a multiple of 16."""
ALIGNMENT: Final = 16

# The words of a chain: the nodes of a graph, in the order of the launches; and executable instances of it.
NEXT_INSTANCE: Final = 0
"""The index of the instance that the next run launches."""
NODES: Final = 1
"""The nodes, NODE_WORDS each: the node as the driver knows it, and its parameters in the driver's format."""
NODE_WORDS: Final = 10
GRID_BYTE: Final = 8
"""Where the grid is in the parameters: three numbers of 32 bits."""
NUM_INSTANCES: Final = 4
"""The instances follow: each as the driver knows it, then the versions of the launches that it has."""

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
CHAIN_IS_DUE: Final = -3
"""Returned instead of 0 when everything was launched: it is time to make a chain."""
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
def _take_inputs(patches, launches, inputs):
    """Store the inputs where they belong; returns 0, MISALIGNED or TOO_LARGE."""
    for at in range(0, len(patches), PATCH_WORDS):
        value, how = inputs[FIRST_INPUT + patches[at]], patches[at + 2]
        version = LAUNCH_WORDS * patches[at + 3] + VERSION
        if how == AS_32_BITS:
            if value > MAX_INT32 or value < -MAX_INT32 - 1:
                return TOO_LARGE
            narrow = int32_at(patches[at + 1], 1)
            if narrow[0] != value:
                narrow[0] = value
                launches[version] += 1
        else:
            if how == AS_ALIGNED_ADDRESS and value % ALIGNMENT:
                return MISALIGNED
            wide = int64_at(patches[at + 1], 1)
            if wide[0] != value:
                wide[0] = value
                launches[version] += 1
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
def _fits_a_graph(batch, launches, stream, status_address):
    """Whether a batch can be launched as a graph now: each of its kernels has programs, and its stream is not
    captured into another graph."""
    for at in range(0, len(launches), LAUNCH_WORDS):
        if launches[at + GRID] * launches[at + GRID + 1] * launches[at + GRID + 2] == 0:
            return False
    # The default stream gives an error while another stream is captured.
    if call_driver(batch[IS_CAPTURING], stream, status_address, 0):
        return False
    return int32_at(status_address, 1)[0] == 0


@inlined
def _launch_chain(batch, launches, stream):
    """Launch the kernels as a graph, the next instance of it, after giving it what has changed since its last
    launch; returns an error of the driver, or 0."""
    num_launches = batch[NUM_LAUNCHES]
    instances, instance_words = NODES + NODE_WORDS * num_launches, 1 + num_launches
    chain = int64_at(batch[CHAIN], instances + instance_words * NUM_INSTANCES)
    at = instances + instance_words * chain[NEXT_INSTANCE]
    chain[NEXT_INSTANCE] = (chain[NEXT_INSTANCE] + 1) % NUM_INSTANCES
    for index in range(num_launches):
        launch, node = LAUNCH_WORDS * index, NODES + NODE_WORDS * index
        if chain[at + 1 + index] == launches[launch + VERSION]:
            continue
        parameters = batch[CHAIN] + 8 * (node + 1)
        grid = uint32_at(parameters + GRID_BYTE, 3)
        for axis in range(3):
            grid[axis] = launches[launch + GRID + axis]
        status = call_driver(batch[SET_NODE], chain[at], chain[node], parameters)
        if status:
            return status
        chain[at + 1 + index] = launches[launch + VERSION]
    return call_driver(batch[LAUNCH_GRAPH], chain[at], stream, 0)


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
def _run(batch, launches, inputs, status_address):
    """Wait for others, launch, let others wait; returns an error of the driver, CHAIN_IS_DUE or 0."""
    status = _wait_for_others(batch, inputs)
    if status:
        return status
    # Asked after the waits: a stream that waits for an event of a captured stream is captured, too.
    is_whole = (batch[CHAIN] != 0 or batch[RUNS_UNTIL_CHAIN] > 0) and _fits_a_graph(
        batch, launches, inputs[STREAM], status_address
    )
    if is_whole and batch[CHAIN] != 0:
        status = _launch_chain(batch, launches, inputs[STREAM])
    else:
        status = _launch_all(batch[LAUNCH_KERNEL], launches, inputs[STREAM])
    if status == 0:
        status = _let_others_wait(batch, inputs)
    if status == 0 and is_whole and batch[RUNS_UNTIL_CHAIN] > 0:
        batch[RUNS_UNTIL_CHAIN] -= 1
        if batch[RUNS_UNTIL_CHAIN] == 0:
            return CHAIN_IS_DUE
    return status


@kernel("int64(int64, int64)")
def run_batch(batch_address, inputs_address):
    """Launch a batch with these inputs; returns 0, CHAIN_IS_DUE, an error of the driver, MISALIGNED or
    TOO_LARGE.

    Example:
        With the inputs [stream 7, event 5, stream 3, 0, event 6, stream 3, 40] and one kernel whose first
        argument is the input: event 5 is recorded on stream 3, stream 7 waits for it, the argument becomes
        40, the kernel is launched on stream 7, event 6 is recorded there, and stream 3 waits for it.

        With two kernels, of which only the first one has the input, and a chain that is launched for the
        first time, with 39 as its argument: event 5 is recorded, stream 7 waits for it, node 0 of instance 0
        is given the argument 40, instance 0 is launched on stream 7, event 6 is recorded there, and stream 3
        waits for it. The next run with 40 does the same with instance 1.
    """
    batch = int64_at(batch_address, LAUNCHES)
    inputs = int64_at(inputs_address, FIRST_INPUT + batch[NUM_INPUTS])
    launches_at = batch_address + 8 * LAUNCHES
    launches = int64_at(launches_at, LAUNCH_WORDS * batch[NUM_LAUNCHES])
    patches = int64_at(launches_at + 8 * len(launches), PATCH_WORDS * batch[NUM_PATCHES])
    status = _take_inputs(patches, launches, inputs)
    if status == 0:
        # A stream of 0 is the default one of the current context.
        status = call_driver(batch[PUSH_CONTEXT], batch[CONTEXT], 0, 0)
        if status == 0:
            status = _run(batch, launches, inputs, batch_address + 8 * CAPTURE_STATUS)
            call_driver(batch[POP_CONTEXT], batch_address + 8 * POPPED, 0, 0)
    return status
