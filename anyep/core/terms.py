"""What the ranks of a dispatch must agree on beside its rows, as one word of the notify message."""

from __future__ import annotations

from typing import Final, NamedTuple

ALIGNMENT_BITS: Final = 24
NUM_FLAGS: Final = 3
MAX_ALIGNMENT: Final = (1 << ALIGNMENT_BITS) - 1


class Terms(NamedTuple):
    """The terms of a dispatch of the elastic API; those of `Buffer.dispatch` are all 0."""

    num_max_tokens_per_rank: int
    has_weights: bool
    alignment: int = 1
    waits: bool = True
    """With CPU sync."""
    expands: bool = False

    @property
    def word(self) -> int:
        """
        >>> Terms(64, has_weights=True).word == (64 << 27) + (1 << 3) + 3
        True
        """
        flags = self.has_weights + 2 * self.waits + 4 * self.expands
        return ((self.num_max_tokens_per_rank << ALIGNMENT_BITS) + self.alignment << NUM_FLAGS) + flags

    @staticmethod
    def of_word(word: int) -> Terms:
        """
        >>> Terms.of_word(Terms(2**31, True, 128, False, True).word)
        Terms(num_max_tokens_per_rank=2147483648, has_weights=True, alignment=128, waits=False, expands=True)
        """
        numbers = word >> NUM_FLAGS
        return Terms(
            numbers >> ALIGNMENT_BITS,
            bool(word & 1),
            numbers & MAX_ALIGNMENT,
            bool(word & 2),
            bool(word & 4),
        )

    def __str__(self) -> str:
        """
        >>> print(Terms(64, has_weights=False))
        num_max_tokens_per_rank=64, expert_alignment=1, do_cpu_sync=True, do_expand=False, no topk_weights
        >>> print(Terms.of_word(0))
        those of Buffer
        """
        if not self.num_max_tokens_per_rank:
            return "those of Buffer"
        return (
            f"num_max_tokens_per_rank={self.num_max_tokens_per_rank}, expert_alignment={self.alignment},"
            f" do_cpu_sync={self.waits}, do_expand={self.expands},"
            f" {'with' if self.has_weights else 'no'} topk_weights"
        )
