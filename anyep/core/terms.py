"""What the ranks of a dispatch must agree on beside its rows, as one word of the notify message."""

from __future__ import annotations

from typing import NamedTuple


class Terms(NamedTuple):
    """The terms of a dispatch of the elastic API; those of `Buffer.dispatch` are all 0."""

    num_max_tokens_per_rank: int
    has_weights: bool

    @property
    def word(self) -> int:
        """
        >>> Terms(64, has_weights=True).word
        129
        """
        return 2 * self.num_max_tokens_per_rank + int(self.has_weights)

    @staticmethod
    def of_word(word: int) -> Terms:
        """
        >>> Terms.of_word(129)
        Terms(num_max_tokens_per_rank=64, has_weights=True)
        """
        return Terms(word >> 1, bool(word & 1))

    def __str__(self) -> str:
        """
        >>> print(Terms(64, has_weights=False), Terms(0, has_weights=False), sep="; ")
        num_max_tokens_per_rank=64 without topk_weights; those of Buffer
        """
        if not self.num_max_tokens_per_rank:
            return "those of Buffer"
        weights = "with" if self.has_weights else "without"
        return f"num_max_tokens_per_rank={self.num_max_tokens_per_rank} {weights} topk_weights"
