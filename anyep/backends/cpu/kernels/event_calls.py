"""Events of streams, recorded and waited for by compiled code: torch takes several times as long."""

from __future__ import annotations

from typing import Final

from anyep.backends.cpu.kernels.compiler import kernel
from anyep.backends.cpu.kernels.driver_calls import NO_STREAM, call_driver
from anyep.backends.cpu.kernels.memory import int64_at

# The words that describe the driver: addresses of functions, a context, and where a context is written that
# is taken off the stack.
RECORD_EVENT: Final = 0
WAIT_FOR_EVENT: Final = 1
PUSH_CONTEXT: Final = 2
POP_CONTEXT: Final = 3
CONTEXT: Final = 4
POPPED: Final = 5
NUM_WORDS: Final = 6


@kernel("int64(int64, int64, int64, int64)")
def record_and_wait(driver_address, event, recorded_on, waiting):
    """Record an event on a stream, and let another stream wait for it; NO_STREAM leaves either out. Returns
    an error of the driver, or 0.

    Example:
        With event 5 and the streams 3 and 7, event 5 is recorded on stream 3, and stream 7 waits for it.
        With NO_STREAM instead of 3, stream 7 waits for what event 5 was recorded after.
    """
    driver = int64_at(driver_address, NUM_WORDS)
    # A stream of 0 is the default one of the current context.
    status = call_driver(driver[PUSH_CONTEXT], driver[CONTEXT], 0, 0)
    if status:
        return status
    if recorded_on != NO_STREAM:
        status = call_driver(driver[RECORD_EVENT], event, recorded_on, 0)
    if status == 0 and waiting != NO_STREAM:
        status = call_driver(driver[WAIT_FOR_EVENT], waiting, event, 0)
    call_driver(driver[POP_CONTEXT], driver_address + 8 * POPPED, 0, 0)
    return status
