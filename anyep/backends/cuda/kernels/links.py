"""What one rank tells another with a word: a message is complete, a flag is up, rows were sent or taken.

    close_messages(tables, there, number, ranks, is_told)     # every peer finds `number` in its mailbox
    advance_tails(tables, rings.ours, sent, nodes, is_sent)    # rows lie in the rings to the relays on nodes

A word for rank r is stored relative to `heaps[r]`, which is laid out like r's control region, and a word of
rank r is read relative to `inboxes[r]`. Words between ranks that may be on different nodes are stored by the
functions of this module and by no others: one function for each event.
"""

from __future__ import annotations

import triton

from anyep.backends.cuda.kernels.atomics import store_release
from anyep.backends.cuda.kernels.pointers import words_at


@triton.jit
def close_messages(tables, messages, number, ranks, is_told):
    """Store the number of a call into its notify messages to some ranks, after everything else in them."""
    store_release(words_at(messages), number, is_told)


@triton.jit
def raise_flags(heaps, flags, value, ranks, is_told):
    """Raise a flag at some ranks."""
    store_release(words_at(flags), value, is_told)


@triton.jit
def advance_tails(tables, tails, sent, nodes, is_sent):
    """Tell the relays on some nodes that rows up to `sent` lie in their rings."""
    store_release(tails, sent, is_sent)


@triton.jit
def advance_heads(tables, heads, taken, nodes, is_taken):
    """Tell the relays on some nodes that the rows up to `taken` were taken out of the rings from them."""
    store_release(heads, taken, is_taken)
