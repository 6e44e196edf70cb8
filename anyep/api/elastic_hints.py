"""The sizes that `ElasticBuffer` tells before there is one, for programs that compute with the numbers of
DeepEP V2, and how they take the ranks of a group to be divided into nodes."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

import torch

from anyep.core import elastic_sizes
from anyep.core.elastic_sizes import Domains
from anyep.errors import whole_number
from anyep.settings import RANKS_PER_NODE


def domains_of(group: Any, allow_hybrid_mode: bool = True) -> Domains:
    """The nodes of a group's ranks, as far as the environment tells: `ANYEP_RANKS_PER_NODE`, else
    `LOCAL_WORLD_SIZE`, else one node. No communication.

    Args:
        group: The process group of the ranks.
        allow_hybrid_mode: Whether rows cross once to each node.
    """
    num_ranks = group.size()
    per_node = RANKS_PER_NODE.choose().value or _local_world_size() or num_ranks
    if per_node > num_ranks or num_ranks % per_node:
        per_node = num_ranks
    return Domains.of(num_ranks // per_node, per_node, allow_hybrid_mode)


def _local_world_size() -> int:
    """Launchers such as torchrun tell how many ranks of a job are on each host."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(text) if text.isdigit() else 0


class SizeHints:
    """Static methods of `ElasticBuffer`; none communicates."""

    @staticmethod
    def get_buffer_size_hint(
        group: Any,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
    ) -> int:
        """The bytes that DeepEP V2 needs for these calls; an `ElasticBuffer` of so many has room for them.

        Args:
            group: The process group of the ranks.
            num_max_tokens_per_rank: The most tokens that a rank sends in a call.
            hidden: The values of a row.
            num_topk: The choices of a token; 0 is 32.
            use_fp8_dispatch: Whether dispatched rows have values of 1 byte.
            allow_hybrid_mode: As for the constructor, like the next one.
            allow_multiple_reduction: Whether sums are rounded on the way.
        """
        return elastic_sizes.buffer_bytes(
            domains_of(group, allow_hybrid_mode),
            whole_number("num_max_tokens_per_rank", num_max_tokens_per_rank, 1),
            whole_number("hidden", hidden, 1),
            whole_number("num_topk", num_topk, 0),
            use_fp8_dispatch,
            allow_multiple_reduction,
        )

    @staticmethod
    def get_engram_storage_size_hint(
        num_entries: int, hidden: int, num_max_tokens_per_rank: int, dtype: torch.dtype = torch.bfloat16
    ) -> tuple[int, int]:
        """DeepEP V2's bytes for a remote table, which AnyEP does not have: on the GPU, and on the host.

        Args:
            num_entries: The entries of a rank.
            hidden: The values of an entry.
            num_max_tokens_per_rank: The most entries that are fetched at once.
            dtype: The dtype of an entry.
        """
        return elastic_sizes.engram_bytes(num_entries, hidden, num_max_tokens_per_rank, dtype.itemsize)

    @staticmethod
    def get_pp_buffer_size_hint(num_max_tensor_bytes: int, num_max_inflight_tensors: int) -> int:
        """DeepEP V2's bytes for tensors to the next and the previous rank, which AnyEP does not send.

        Args:
            num_max_tensor_bytes: The bytes of the largest tensor.
            num_max_inflight_tensors: The tensors that are under way at once.
        """
        return elastic_sizes.pipeline_bytes(num_max_tensor_bytes, num_max_inflight_tensors)

    @staticmethod
    def get_agrs_num_max_session_bytes(
        group: Any, shapes: Sequence[int] | Sequence[Sequence[int]], dtype: torch.dtype
    ) -> int:
        """DeepEP V2's bytes for a session of all-gathers, which AnyEP does not have.

        Args:
            group: The process group of the ranks.
            shapes: The shape of a tensor, or the shapes of several.
            dtype: Their dtype.
        """
        several: list[Any] = [shapes] if all(isinstance(size, int) for size in shapes) else list(shapes)
        sizes = [math.prod(shape) * dtype.itemsize for shape in several]
        return elastic_sizes.gathered_bytes(group.size(), sizes)

    @staticmethod
    def get_agrs_buffer_size_hint(group: Any, num_max_session_bytes: int) -> int:
        """DeepEP V2's bytes of a buffer for such sessions.

        Args:
            group: The process group of the ranks.
            num_max_session_bytes: The bytes of the largest session.
        """
        return elastic_sizes.align(num_max_session_bytes, elastic_sizes.BUFFER_ALIGNMENT)
