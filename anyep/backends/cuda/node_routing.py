"""The routing of a dispatch between nodes on a GPU: the tensors of its handle, and the checks of a user's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch

from anyep.backends.cuda.routing import known_digests_of_any, remember_digests
from anyep.errors import InvalidCall
from anyep.sizes import SOURCE_META_BYTES
from anyep.topology import Topology

NUM_TENSORS: Final = 10


class NodeRouting(NamedTuple):
    """The ten tensors of a handle between nodes, as on the CPU, and its digests where they are known."""

    is_token_in_rank: torch.Tensor
    rdma_channel_prefix_matrix: torch.Tensor
    gbl_channel_prefix_matrix: torch.Tensor
    recv_rdma_channel_prefix_matrix: torch.Tensor
    recv_rdma_rank_prefix_sum: torch.Tensor
    recv_gbl_channel_prefix_matrix: torch.Tensor
    recv_gbl_rank_prefix_sum: torch.Tensor
    recv_src_meta: torch.Tensor
    send_rdma_head: torch.Tensor
    send_nvl_head: torch.Tensor
    digests: torch.Tensor | None = None
    """Those of what went to each rank, then of what came from each rank; not part of the handle."""

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The flat tuple that users keep. Its digests can be looked up as long as its tensors are not
        changed."""
        parts = self[:NUM_TENSORS]
        remember_digests(parts, self.digests)
        return parts

    @property
    def num_tokens(self) -> int:
        return self.is_token_in_rank.shape[0]

    @property
    def num_recv_rows(self) -> int:
        return self.recv_src_meta.shape[0]

    @property
    def num_channels(self) -> int:
        return self.gbl_channel_prefix_matrix.shape[1]


def new_node_routing(
    empty: Callable[[tuple[int, ...], torch.dtype], torch.Tensor],
    num_tokens: int,
    num_channels: int,
    topology: Topology,
) -> NodeRouting:
    """A routing that kernels will fill, in memory that `empty` allocates; without room for rows yet."""
    nodes, ranks = topology.num_nodes, topology.num_ranks
    by_node, by_rank = (nodes, num_channels), (ranks, num_channels)
    head = empty((num_tokens, nodes), torch.int32)
    return NodeRouting(
        empty((num_tokens, ranks), torch.bool),
        empty(by_node, torch.int32),
        empty(by_rank, torch.int32),
        empty(by_node, torch.int32),
        empty((nodes,), torch.int32),
        empty(by_rank, torch.int32),
        empty((ranks,), torch.int32),
        head,
        head,
        head,
        empty((2 * ranks,), torch.int64),
    )


def checked_node_handle(handle: Any, topology: Topology, device: torch.device) -> NodeRouting:
    """Check the types and shapes of a user's handle; kernels compare its values with those of the peers."""
    if not isinstance(handle, tuple | list) or len(handle) != NUM_TENSORS:
        raise InvalidCall(
            f"the handle must be the tuple of {NUM_TENSORS} tensors that dispatch returned between nodes"
        )
    for part in handle:
        if not isinstance(part, torch.Tensor) or part.dim() == 0:
            raise InvalidCall("the handle must hold tensors only, as dispatch returned it")
    parts = tuple(part if part.is_contiguous() else part.contiguous() for part in handle)
    routing = NodeRouting(*parts)._replace(digests=known_digests_of_any(parts))
    ranks, nodes = topology.num_ranks, topology.num_nodes
    num_tokens, channels = parts[0].shape[0], max(1, parts[2].shape[-1])
    for name, part, dtype, shape in zip(
        NodeRouting._fields,
        parts,
        (torch.bool, *[torch.int32] * 6, torch.uint8, torch.int32, torch.int32),
        (
            *((num_tokens, ranks), (nodes, channels), (ranks, channels), (nodes, channels), (nodes,)),
            *((ranks, channels), (ranks,), (parts[7].shape[0], SOURCE_META_BYTES), (num_tokens, nodes)),
            (parts[9].shape[0], topology.ranks_per_node),
        ),
        strict=False,
    ):
        if part.dtype != dtype or tuple(part.shape) != shape or part.device != device:
            raise InvalidCall(
                f"the handle's {name} is {part.dtype} {list(part.shape)} on {part.device}:"
                f" it must be {dtype} {list(shape)} on {device};"
                f" is the handle from another Buffer?"
            )
    return routing


def checked_node_counts(per_node: Any, topology: Topology) -> torch.Tensor:
    """Check the type and shape of a user's counts by node; a kernel checks the values."""
    if not isinstance(per_node, torch.Tensor) or per_node.dtype != torch.int32:
        raise InvalidCall("num_tokens_per_rdma_rank must be the int32 tensor of get_dispatch_layout")
    if tuple(per_node.shape) != (topology.num_nodes,):
        raise InvalidCall(
            f"num_tokens_per_rdma_rank has shape {list(per_node.shape)}: it must be [{topology.num_nodes}]"
        )
    return per_node.contiguous()
