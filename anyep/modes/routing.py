"""What one dispatch knew about the routing: the handle of normal mode on one node, and its checks."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from anyep.errors import InvalidCall

Array = np.ndarray[Any, Any]
NUM_TENSORS: Final = 6


@dataclass(frozen=True)
class IntranodeHandle:
    """The six tensors of a handle, in their order; see `tensors`."""

    rank_prefix_matrix: torch.Tensor
    channel_prefix_matrix: torch.Tensor
    recv_channel_prefix_matrix: torch.Tensor
    recv_src_idx: torch.Tensor
    is_token_in_rank: torch.Tensor
    send_head: torch.Tensor

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The flat tuple that clients keep."""
        return (
            self.rank_prefix_matrix,
            self.channel_prefix_matrix,
            self.recv_channel_prefix_matrix,
            self.recv_src_idx,
            self.is_token_in_rank,
            self.send_head,
        )

    @property
    def num_tokens(self) -> int:
        return self.send_head.shape[0]

    @property
    def num_recv_rows(self) -> int:
        return self.recv_src_idx.shape[0]

    @property
    def num_channels(self) -> int:
        return self.channel_prefix_matrix.shape[1]

    @property
    def checksum(self) -> int:
        """The same on all ranks of one dispatch, and hardly ever the same for two routings."""
        return zlib.crc32(self.rank_prefix_matrix.numpy())

    def count_matrix(self) -> Array:
        """Rows from each rank to each rank."""
        return np.diff(self.rank_prefix_matrix.numpy(), axis=0, prepend=np.int32(0))

    def rows_by_lane(self, rank: int) -> Array:
        """(first row, rows) of what this rank received, for [peer * channels + channel].

        With 2 rows from peer 0 (1 in channel 0, 1 in channel 1) and 1 row from peer 1 (in channel 1):
        [[0, 1], [1, 1], [2, 0], [2, 1]].
        """
        starts = self.recv_channel_prefix_matrix.numpy()
        ends_by_peer = self.rank_prefix_matrix.numpy()[:, rank]
        first_by_peer = np.concatenate([np.zeros(1, np.int32), ends_by_peer[:-1]])
        first = first_by_peer[:, None] + starts
        end = np.concatenate([first[:, 1:], ends_by_peer[:, None]], axis=1)
        return np.stack([first, end - first], axis=-1).reshape(-1, 2).astype(np.int32)


WHAT_DOES_NOT_FIT: Final = {
    1: "rank_prefix_matrix must not fall along its columns",
    2: "recv_src_idx has fewer rows than rank_prefix_matrix says",
    3: "send_head does not number this rank's rows as rank_prefix_matrix says",
    4: "is_token_in_rank and send_head differ",
    5: "channel_prefix_matrix does not count the rows of send_head",
    6: "recv_channel_prefix_matrix leaves the rows that rank_prefix_matrix says",
}


def checked_handle(backend: Any, handle: Any, rank: int, num_ranks: int) -> IntranodeHandle:
    """A client's tuple as a handle, judged by its contents."""
    if not isinstance(handle, tuple | list) or len(handle) != NUM_TENSORS:
        raise InvalidCall(f"the handle must be the tuple of {NUM_TENSORS} tensors that dispatch returned")
    if not all(isinstance(part, torch.Tensor) for part in handle):
        raise InvalidCall("the handle must hold tensors only, as dispatch returned it")
    parts = IntranodeHandle(*(_plain(part) for part in handle))
    if any(part.dim() == 0 for part in parts.tensors()):
        raise InvalidCall("the handle holds a tensor without dimensions: pass it as dispatch returned it")
    num_tokens, num_channels = parts.send_head.shape[0], parts.channel_prefix_matrix.shape[-1]
    for name, part, dtype, shape in (
        ("rank_prefix_matrix", parts.rank_prefix_matrix, torch.int32, (num_ranks, num_ranks)),
        ("channel_prefix_matrix", parts.channel_prefix_matrix, torch.int32, (num_ranks, num_channels)),
        (
            "recv_channel_prefix_matrix",
            parts.recv_channel_prefix_matrix,
            torch.int32,
            (num_ranks, num_channels),
        ),
        ("recv_src_idx", parts.recv_src_idx, torch.int32, tuple(parts.recv_src_idx.shape[:1])),
        ("is_token_in_rank", parts.is_token_in_rank, torch.bool, (num_tokens, num_ranks)),
        ("send_head", parts.send_head, torch.int32, (num_tokens, num_ranks)),
    ):
        if part.dtype != dtype or tuple(part.shape) != shape or not part.is_cpu:
            raise InvalidCall(
                f"the handle's {name} is {_describe(part)}: on {num_ranks} ranks it must be {dtype} {list(shape)}"
                f" on the CPU; is the handle from another Buffer?"
            )
    code = backend.check_handle(
        rank,
        parts.rank_prefix_matrix.numpy(),
        parts.channel_prefix_matrix.numpy(),
        parts.recv_channel_prefix_matrix.numpy(),
        parts.num_recv_rows,
        parts.is_token_in_rank.numpy(),
        parts.send_head.numpy(),
    )
    if code:
        raise InvalidCall(f"the handle does not fit together: {WHAT_DOES_NOT_FIT[code]}")
    return parts


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach() if tensor.requires_grad else tensor
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def _describe(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"
