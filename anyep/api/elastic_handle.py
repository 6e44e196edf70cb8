"""`EPHandle`: what a dispatch of `ElasticBuffer` knows about its rows. It is tensors and numbers, and can be
pickled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from anyep.events import EventHandle


@dataclass(eq=False)
class EPHandle:
    """The routing of a dispatch, for the calls that follow it.

    With an asynchronous dispatch the tensors are filled when its event has occurred.

    Attributes:
        do_expand: Whether rows are grouped by expert.
        num_experts: The experts of all ranks together.
        expert_alignment: Counts are rounded up to a multiple of this, and groups begin at one.
        num_max_tokens_per_rank: As passed to the dispatch.
        num_sms: The SMs of the dispatch.
        topk_idx: int64 [tokens, top-k], as passed to the dispatch.
        num_recv_tokens: The received rows; without CPU sync the most that are possible.
        num_expanded_tokens: The rows by expert with their padding; without CPU sync the most that are
            possible.
        num_recv_tokens_per_expert_list: The aligned count of each local expert; empty without CPU sync.
        psum_num_recv_tokens_per_scaleup_rank: int32 [ranks of a node]: inclusive prefix sums of the rows
            from each of them; the last is the number of rows.
        psum_num_recv_tokens_per_expert: int32 [local experts]: inclusive prefix sums of the aligned counts;
            in the expanded layout the end of each expert's rows, without their padding.
        num_unaligned_recv_tokens_per_expert: int32 [local experts]: the counts.
        recv_src_metadata: int32 [rows, 2 + top-k]: source rank * num_max_tokens_per_rank + source token;
            source rank * top-k + the last choice that is on this rank; in the expanded layout the row of each
            choice, else -1. Rows without a token are -1.
        dst_buffer_slot_idx: int32 [tokens, top-k]: the row of each choice's rank in which the token arrives,
            or -1.
        routing: What the calls of AnyEP use: tensors.
        recv_topk_idx: int64 [rows, top-k]: local experts, -1 for those of other ranks; of the compact layout,
            else without rows.
        order: int32 [tokens, ranks]: the ranks in the order in which a combine adds their rows.
        token_metadata_at_forward: None, like the next two: there for programs that read them.
        channel_linked_list: None.
        cached_recv_src_metadata_before_sort: None.
        filled: The event after which the tensors are filled; None: they are.
    """

    do_expand: bool
    num_experts: int
    expert_alignment: int
    num_max_tokens_per_rank: int
    num_sms: int
    topk_idx: torch.Tensor
    num_recv_tokens: int
    num_expanded_tokens: int
    num_recv_tokens_per_expert_list: list[int]
    psum_num_recv_tokens_per_scaleup_rank: torch.Tensor
    psum_num_recv_tokens_per_expert: torch.Tensor
    num_unaligned_recv_tokens_per_expert: torch.Tensor
    recv_src_metadata: torch.Tensor
    dst_buffer_slot_idx: torch.Tensor
    routing: tuple[torch.Tensor, ...]
    recv_topk_idx: torch.Tensor
    order: torch.Tensor
    token_metadata_at_forward: torch.Tensor | None = None
    channel_linked_list: torch.Tensor | None = None
    cached_recv_src_metadata_before_sort: torch.Tensor | None = None
    filled: EventHandle | None = None

    def wait(self) -> None:
        """Return when the tensors are filled; raise the error of the dispatch."""
        if self.filled is not None:
            # A stream that is captured may wait for events of its own graph only.
            if not self.filled.was_waited_for:
                self.filled.current_stream_wait()
            self.filled = None

    def __getstate__(self) -> dict[str, Any]:
        self.wait()
        return self.__dict__
