"""What a dispatch says in its letter: its signature, and where in this rank's windows its rows may go."""

from __future__ import annotations

from typing import Any

from anyep.headers import MAX_OFFERS
from anyep.modes.conversation import Array
from anyep.modes.letters import NUM_OFFERS, OFFERS, RESULT_ROWS, dtype_word, signature


def dispatch_header(payload: Any, num_experts: int, num_channels: int, ring_rows: int) -> Array:
    """The header of a dispatch's letter, without an offer yet."""
    token = payload.token
    return signature(
        row_bytes=token.hidden_bytes,
        dtype=dtype_word(payload.x.dtype),
        num_topk=token.num_topk,
        num_scales=token.num_scales,
        num_experts=num_experts,
        num_channels=num_channels,
        ring_rows=ring_rows,
    )


def offer_what_is_free(header: Array, windows: Any) -> None:
    """Offer all free windows; the receiver's rows will tell how much is needed."""
    offers = windows.offers(MAX_OFFERS)
    header[NUM_OFFERS] = len(offers)
    for index, (offset, num_bytes) in enumerate(offers):
        header[OFFERS + 2 * index] = offset
        header[OFFERS + 2 * index + 1] = num_bytes


def offer_exactly(header: Array, windows: Any, payload: Any, num_rows: int) -> int:
    """Take a window now, where the number of rows is known, and offer just that; -1 if there is none."""
    num_bytes = max(payload.window(num_rows).num_bytes, 128)
    offset: int | None = windows.allocate(num_bytes)
    header[RESULT_ROWS] = num_rows
    if offset is None:
        return -1
    header[NUM_OFFERS] = 1
    header[OFFERS] = offset
    header[OFFERS + 1] = num_bytes
    return offset
