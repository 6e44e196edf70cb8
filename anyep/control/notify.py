"""How error messages show the header of a notify message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from anyep.core.calls import Kind
from anyep.core.headers import DTYPES, NETWORK_ROWS_SHIFT, WIDE_DTYPES, Field
from anyep.core.terms import Terms

# In the order in which they explain a disagreement: later differences may follow from earlier ones.
SIGNATURE_WORDS: Final = {
    Field.KIND: "the function called",
    Field.DTYPE: "the dtype",
    Field.ROW_BYTES: "the hidden size",
    Field.TOPK: "top-k",
    Field.SCALES: "the number of scales per token",
    Field.EXPERTS: "the number of experts",
    Field.CHANNELS: "the number of channels (num_sms // 2)",
    Field.RING_ROWS: "the rows of a ring (config, num_nvl_bytes or num_rdma_bytes)",
    Field.ROUTING: "the routing in the handle",
}
DISPATCH_WORDS: Final = {**SIGNATURE_WORDS, Field.ROUTING: "the terms of the dispatch"}
"""The same for a dispatch without a handle."""


def words_of(kind: int) -> dict[Field, str]:
    """What ranks that disagree about a call of this kind are told."""
    return DISPATCH_WORDS if kind == Kind.DISPATCH else SIGNATURE_WORDS


def word_for_people(field: int, header: Sequence[int]) -> str:
    """A word of a header's signature, as error messages show it.

    >>> import torch
    >>> from anyep.core.headers import dtype_word, signature
    >>> header = signature(row_bytes=256, dtype=dtype_word(torch.bfloat16))
    >>> word_for_people(Field.DTYPE, header), word_for_people(Field.ROW_BYTES, header)
    ('bfloat16', '128')
    """
    word = int(header[field])
    if field == Field.KIND:
        return Kind(word).name.lower().replace("_", " ") if word in list(Kind) else str(word)
    if field == Field.ROUTING:
        is_first = int(header[Field.KIND]) == Kind.DISPATCH
        return str(Terms.of_word(word)) if is_first else f"checksum {word:08x}"
    if field == Field.DTYPE:
        return DTYPES[word]
    if field == Field.ROW_BYTES:
        # Rows of the same hidden size differ in bytes only if their dtypes do; the dtype is reported then.
        return str(word // WIDE_DTYPES.get(DTYPES[int(header[Field.DTYPE])], 1))
    if field == Field.RING_ROWS and word >> NETWORK_ROWS_SHIFT:
        return f"{word % (1 << NETWORK_ROWS_SHIFT)} and {word >> NETWORK_ROWS_SHIFT} between nodes"
    return str(word)
