"""Masks: the ranks that calls go on without, and the requests that unmask ranks."""

from __future__ import annotations

from anyep.backends.cpu.kernels.atomics import count_down, fence, load_acquire, store_release
from anyep.backends.cpu.kernels.compiler import kernel
from anyep.backends.cpu.kernels.memory import int64_at


@kernel("int64(int64, int64, boolean[::1], int64[::1], boolean[::1], boolean[::1])")
def adopt_masks(words, writer_stride, far, generations, masked, changed):
    """Adopt the newest generation of each rank that any writer stored here; returns how many ranks changed.

    Word r of writer w is the generation in which w knows r to be masked. The fence orders all earlier reads
    before these: a rank that calls this at the end of a call knows whether rows may have been overwritten.
    What writers write that are far, on other hosts, does not count once they are masked: they may have found
    this rank out of reach at the same time.

    Example:
        With generations [0, 2] and the words [0, 3] and [0, 1] (of two writers), rank 1 is masked in
        generation 3, and changed is [False, True].
    """
    fence()
    num_ranks = generations.shape[0]
    num_changed = 0
    for rank in range(num_ranks):
        newest = 0
        for writer in range(num_ranks):
            if not (far[writer] and masked[writer]):
                newest = max(newest, load_acquire(words + writer * writer_stride + 8 * rank))
        changed[rank] = newest > generations[rank]
        if changed[rank]:
            generations[rank] = newest
            masked[rank] = True
            num_changed += 1
    return num_changed


@kernel("void(int64[::1], int64[::1], int64, int64[::1])")
def post_requests(requests, wake_ups, topic, words):
    """Write a request to every peer; its first word, an even number, is one less while the rest is written.

    Example:
        With words [4, 7] a peer that reads 4 also finds 7.
    """
    for index in range(requests.shape[0]):
        store_release(requests[index], words[0] - 1)
    fence()
    for index in range(requests.shape[0]):
        place = int64_at(requests[index], words.shape[0])
        for word in range(1, words.shape[0]):
            place[word] = words[word]
        store_release(requests[index], words[0])
    fence()
    for index in range(requests.shape[0]):
        count_down(wake_ups[index], topic)


@kernel("void(int64[::1], int64[:,::1])")
def read_requests(requests, words):
    """Copy the request of every peer (row p comes from peer p); the first word of a request that is still
    being written is 0.

    Example:
        With the requests [4, 7] and [3, 9] the rows begin with 4, 7 and with 0.
    """
    for peer in range(requests.shape[0]):
        first = load_acquire(requests[peer])
        place = int64_at(requests[peer], words.shape[1])
        for word in range(words.shape[1]):
            words[peer, word] = place[word]
        fence()
        is_whole = first % 2 == 0 and load_acquire(requests[peer]) == first
        words[peer, 0] = first if is_whole else 0
