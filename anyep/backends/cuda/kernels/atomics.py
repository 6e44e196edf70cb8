"""Memory ordering on the GPU: the only module that touches a flag.

Store data first, then call `release_max`; call `wait_for_all` before reading data. Flags are 64-bit words in
GPU memory that the programs of other ranks access too (scope `sys`). The words that the host waits for are in
host memory, written by `tell_host`. The words by which the host informs a waiting kernel are there, too:
`is_time_to_ask`, `abort_of_host`. All warps of a program synchronize before each release
(`tl.debug_barrier`), since up to Triton 3.8 the stores of other warps would not be ordered before it.
"""

from __future__ import annotations

import triton
import triton.language as tl

ASKS_HOST_AFTER_NS = tl.constexpr(100_000)


@triton.jit
def release_max(flags, value, mask):
    """Raise flags to `value`; a program that acquires it sees everything that this program stored before."""
    tl.debug_barrier()
    tl.atomic_max(flags, value, mask=mask, sem="release", scope="sys")


@triton.jit
def tell_host(word, value):
    """Store a value in host memory; a host that finds it there sees all that this program stored before.

    No atomic operation is used: not every GPU supports them on memory that is not its own.
    """
    tl.debug_barrier()
    tl.inline_asm_elementwise(
        "st.release.sys.global.u64 [$1], $2; mov.u32 $0, 0;",
        "=r,l,l",
        [word.to(tl.int64), value.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def load_acquire(flags, mask):
    """Load flags; everything that their writers stored before is visible from here on.

    This is an add of 0: the compiler would move a plain load out of a loop.
    """
    return tl.atomic_add(flags, 0, mask=mask, sem="acquire", scope="sys")


@triton.jit
def nanoseconds():
    """The GPU's clock."""
    return tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
    )


@triton.jit
def is_aborted(abort):
    """Whether this rank was told to stop waiting; `abort` is the address of the abort flag, 0 until then."""
    return tl.atomic_add(abort.to(tl.pointer_type(tl.int64)), 0, sem="acquire", scope="sys") != 0


@triton.jit
def is_time_to_ask(now, start):
    """Whether to ask the host, whose memory is far away: after 0.1 ms of waiting, in an eighth of the time.

    Example:
        After a start at 0, it is not time at 98,304 ns, which is too early, nor at 110,592 (27 pieces of
        4096), but it is at 131,072 (32 pieces).
    """
    return (now > start + ASKS_HOST_AFTER_NS) & ((now >> 12) % 8 == 0)


@triton.jit
def abort_of_host(abort, is_time):
    """The host's word about the ranks, if it is time to ask: 1 + the rank that is gone, or 0.

    Only a kernel could raise the abort flag itself, and where ranks share a GPU, no other kernel of this
    process runs while the caller's stream waits for this kernel's stream. The word after the abort flag is
    the address of the host's word, or 0.

    Example:
        If the host's word is 2 (rank 1 is gone), the result is 2.
    """
    there = tl.load(abort.to(tl.pointer_type(tl.int64)) + 1, mask=is_time, other=0)
    is_asked = is_time & (there != 0)
    return tl.load(there.to(tl.pointer_type(tl.int64)), mask=is_asked, other=0, volatile=True)


@triton.jit
def raise_abort(abort, flag):
    """Raise this rank's abort flag to `flag`, if that is not 0. Only for programs of one warp."""
    if flag != 0:
        release_max(abort.to(tl.pointer_type(tl.int64)), flag, flag != 0)


@triton.jit
def wait_for_all(flags, mask, expected, timeout_ns, abort):
    """Spin until all flags have reached `expected`, the timeout has passed, or the abort flag is raised.

    Returns the values of the flags at that time. Only for programs of one warp: each warp reads its own
    clock. A rank may raise the abort flag because all flags arrived and it has left, so the flags are read
    once more at the end.
    """
    start = nanoseconds()
    seen = tl.where(mask, load_acquire(flags, mask), expected)
    is_waiting = tl.min(seen, axis=0) < expected
    while is_waiting:
        now = nanoseconds()
        # Relaxed, and before the flags: then all loads are in flight at once.
        raised = tl.atomic_add(abort.to(tl.pointer_type(tl.int64)), 0, sem="relaxed", scope="sys")
        flag = abort_of_host(abort, is_time_to_ask(now, start))
        seen = tl.where(mask, load_acquire(flags, mask), expected)
        raise_abort(abort, flag)
        is_waiting = (tl.min(seen, axis=0) < expected) & (raised == 0) & (now < start + timeout_ns)
    if tl.min(seen, axis=0) < expected:
        is_aborted(abort)
        seen = tl.where(mask, load_acquire(flags, mask), expected)
    tl.debug_barrier()
    return seen
