"""The routing of one dispatch: the handle of normal mode on one node, and its checks."""

from __future__ import annotations

import zlib
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from anyep.backends import cpu
from anyep.core.calls import Array
from anyep.core.diagnosis import other_rows
from anyep.errors import InvalidCall

NUM_TENSORS: Final = 6
NO_DIGESTS: Final = np.zeros(0, np.int64)


class NodeHandle(NamedTuple):
    """The six parts of a handle, in their order, as arrays over the memory of its tensors."""

    rank_prefix_matrix: Array
    channel_prefix_matrix: Array
    recv_channel_prefix_matrix: Array
    recv_src_idx: Array
    is_token_in_rank: Array
    send_head: Array
    digests: Array = NO_DIGESTS
    """Not part of the handle: digests of the rows to each rank, then of those from each rank; set once the
    parts are known to be consistent."""

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The flat tuple that clients keep."""
        return (
            torch.from_numpy(self.rank_prefix_matrix),
            torch.from_numpy(self.channel_prefix_matrix),
            torch.from_numpy(self.recv_channel_prefix_matrix),
            torch.from_numpy(self.recv_src_idx),
            torch.from_numpy(self.is_token_in_rank),
            torch.from_numpy(self.send_head),
        )

    @property
    def sources(self) -> Array:
        """The origin of each received row."""
        return self.recv_src_idx

    def num_rows_for(self, rank: int) -> int:
        """The number of rows that this rank received; the handle may have room for more."""
        return int(self.rank_prefix_matrix[-1, rank])

    @property
    def num_tokens(self) -> int:
        return int(self.send_head.shape[0])

    @property
    def num_recv_rows(self) -> int:
        return int(self.recv_src_idx.shape[0])

    @property
    def num_channels(self) -> int:
        return int(self.channel_prefix_matrix.shape[1])

    @property
    def checksum(self) -> int:
        """A checksum that is equal on all ranks of one dispatch, and almost never for different counts."""
        return zlib.crc32(self.rank_prefix_matrix.data)

    @property
    def digest_words(self) -> Array:
        """The digests that this rank sends to all others, as words of 4 bytes."""
        return self.digests.view(np.int32)

    def count_matrix(self) -> Array:
        """Rows from each rank to each rank."""
        return np.diff(self.rank_prefix_matrix, axis=0, prepend=np.int32(0))

    def rows_by_lane(self, rank: int) -> Array:
        """(first row, number of rows) that this rank received, for [peer * channels + channel].

        With 2 rows from peer 0 (1 in channel 0, 1 in channel 1) and 1 row from peer 1 (in channel 1):
        [[0, 1], [1, 1], [2, 0], [2, 1]].
        """
        ends_by_peer = self.rank_prefix_matrix[:, rank]
        first_by_peer = np.concatenate([np.zeros(1, np.int32), ends_by_peer[:-1]])
        first = first_by_peer[:, None] + self.recv_channel_prefix_matrix
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


def checked_routing(handle: Any, rank: int, num_ranks: int) -> NodeHandle:
    """Check a client's handle, including its contents."""
    if not isinstance(handle, tuple | list) or len(handle) != NUM_TENSORS:
        raise InvalidCall(f"the handle must be the tuple of {NUM_TENSORS} tensors that dispatch returned")
    for part in handle:
        if not isinstance(part, torch.Tensor) or part.dim() == 0:
            raise InvalidCall("the handle must hold tensors only, as dispatch returned it")
    rank_prefix, channel_prefix, recv_channel_prefix, source, in_rank, send_head = handle
    num_tokens, num_channels = send_head.shape[0], max(1, channel_prefix.shape[-1])
    routing = NodeHandle(
        array_of("rank_prefix_matrix", rank_prefix, torch.int32, (num_ranks, num_ranks)),
        array_of("channel_prefix_matrix", channel_prefix, torch.int32, (num_ranks, num_channels)),
        array_of("recv_channel_prefix_matrix", recv_channel_prefix, torch.int32, (num_ranks, num_channels)),
        array_of("recv_src_idx", source, torch.int32, (source.shape[0],)),
        array_of("is_token_in_rank", in_rank, torch.bool, (num_tokens, num_ranks)),
        array_of("send_head", send_head, torch.int32, (num_tokens, num_ranks)),
    )
    return with_digests(routing, rank)


def with_digests(routing: NodeHandle, rank: int) -> NodeHandle:
    """The routing with its digests. A routing with inconsistent parts is refused: with it a kernel could
    access memory outside of its rows."""
    digests = np.empty(2 * len(routing.rank_prefix_matrix), np.int64)
    code = cpu.check_handle(
        rank,
        routing.rank_prefix_matrix,
        routing.channel_prefix_matrix,
        routing.recv_channel_prefix_matrix,
        routing.recv_src_idx,
        routing.is_token_in_rank,
        routing.send_head,
        digests,
    )
    if code:
        raise InvalidCall(f"the handle does not fit together: {WHAT_DOES_NOT_FIT[code]}")
    # This runs in every call, and `_replace` takes longer.
    return NodeHandle(*routing[:NUM_TENSORS], digests)


def difference_between(digests: Array) -> str:
    """The first rows in which handles differ, or ""; row r has the digests of rank r's handle."""
    pair = cpu.first_difference_of_digests(digests.view(np.int64))
    return other_rows(*divmod(pair, len(digests))) if pair >= 0 else ""


def array_of(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Array:
    """A part of a client's handle, as an array over its memory."""
    if tensor.dtype != dtype or tuple(tensor.shape) != shape or not tensor.is_cpu:
        raise InvalidCall(
            f"the handle's {name} is {tensor.dtype} {list(tensor.shape)} on {tensor.device}:"
            f" it must be {dtype} {list(shape)} on the CPU; is the handle from another Buffer?"
        )
    if tensor.requires_grad:
        tensor = tensor.detach()
    array: Array = tensor.numpy() if tensor.is_contiguous() else tensor.contiguous().numpy()
    return array
