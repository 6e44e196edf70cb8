"""Memory ordering on the GPU: the only module that touches a flag.

Store data first, then call `store_release`; call `wait_for_all` before reading data. Flags are 64-bit words
that the programs of other ranks access too (scope `sys`). They lie in memory of the GPU, or of the host: no
flag is changed by an atomic operation, which not every GPU supports on memory that is not its own. So each
flag has one writer, whose values only grow; there are three exceptions:

- `given_up`: all writers store 1.
- The abort flag: each writer stores a rank, plus one, and any of them will do: it is 0 until the first store,
  and never again.
- Masks: a rank's own row is written by its calls and by `mask_rank` beside them, but the generations that
  one rank stores in one round are equal.

The words that the host waits for are in host memory, written by `tell_host`. The words by which the host
informs a waiting kernel are there, too: `is_time_to_ask`, `abort_of_host`. All warps of a program synchronize
before each release (`tl.debug_barrier`), since the stores of other warps would not be ordered before it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import num_threads
from triton.runtime import JITFunction

ASKS_HOST_AFTER_NS = tl.constexpr(100_000)
USES_ATOMICS = tl.constexpr(False)
"""Whether flags are read and raised by atomic operations after all, to compare the times: only in memory of
the GPU."""


@triton.jit
def _alone(words, COPIES: tl.constexpr):
    """The words as a column, and as many columns of copies."""
    num_words: tl.constexpr = words.numel
    if num_words > 1:
        # A reshape to two dimensions would keep the layout of the words, in which threads may share them.
        words = tl.reshape(words, (num_words,))[:, None]
    return tl.broadcast_to(words, (num_words, COPIES))


IS_COMPILED = tl.constexpr(isinstance(_alone, JITFunction))


@triton.jit
def _by_one_thread(words, mask):
    """Spread words over the threads of the program, so that each word has a thread of its own.

    Returns the words with copies beside them, and whether a word is to be used: the first copy, if `mask`
    holds. Otherwise several threads would have the same word, and each would load it, or store it.

    Example:
        With 8 threads and the words [a, b], the masks [1, 0] give [[1, 0, 0, 0], [0, 0, 0, 0]].
    """
    num_words: tl.constexpr = words.numel
    copies: tl.constexpr = max(1, num_threads() // num_words) if IS_COMPILED else 1
    is_used = _alone(mask, copies) & (tl.arange(0, copies) == 0)[None, :]
    return _alone(words.to(tl.int64), copies), is_used.to(tl.int32)


@triton.jit
def store_release(flags, value, mask):
    """Store `value` in flags; a program that acquires it sees everything that this program stored before."""
    tl.debug_barrier()
    if USES_ATOMICS:
        tl.atomic_max(flags, value, mask=mask, sem="release", scope="sys")
    else:
        addresses, is_used = _by_one_thread(flags, mask)
        values = value + tl.zeros(flags.shape, tl.int64)
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $3, 0; mov.u32 $0, 0; @p st.release.sys.global.u64 [$1], $2; }",
            "=&r,l,l,r",
            [addresses, _alone(values, addresses.shape[1]), is_used],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def tell_host(word, value):
    """Store a value in host memory; a host that finds it there sees all that this program stored before."""
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
    """Load a vector of flags; everything that their writers stored before is visible from here on.

    A flag whose mask does not hold is read as 0. The compiler would move a plain load out of a loop.

    Example:
        With the flags [5, 6, 7], and a mask for the first and the third, the result is [5, 0, 7].
    """
    if USES_ATOMICS:
        found = tl.atomic_add(flags, 0, mask=mask, sem="acquire", scope="sys")
    else:
        addresses, is_used = _by_one_thread(flags, mask)
        words = tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $2, 0; mov.u64 $0, 0; @p ld.acquire.sys.global.u64 $0, [$1]; }",
            "=&l,l,r",
            [addresses, is_used],
            dtype=tl.int64,
            is_pure=False,
            pack=1,
        )
        found = tl.reshape(tl.sum(words, axis=1), flags.shape)
        # What one thread has acquired, all have.
        tl.debug_barrier()
    return found


@triton.jit
def load_one(flag):
    """Load one flag like `load_acquire`: one thread reads it for all.

    This is an add of 0, which is compiled to a load.
    """
    return tl.atomic_add(flag, 0, sem="acquire", scope="sys")


@triton.jit
def nanoseconds():
    """The GPU's clock."""
    return tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
    )


@triton.jit
def is_aborted(abort):
    """Whether this rank was told to stop waiting; `abort` is the address of the abort flag, 0 until then."""
    return load_one(abort.to(tl.pointer_type(tl.int64))) != 0


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
        store_release(abort.to(tl.pointer_type(tl.int64)), flag, flag != 0)


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
