"""What a handle of the elastic API says beside its routing: where received rows come from, where the choices
of tokens went, and in which order a combine adds."""

from __future__ import annotations

import torch

from anyep.backends.expanded import Origins, OriginTensors


def tell_origins(origins: Origins, tensors: OriginTensors) -> None:
    """Fill the tensors."""
    ids, num_ranks = origins.recv_topk_idx, origins.rank_prefix.shape[0]
    tensors.received.copy_(origins.rank_prefix[:, origins.rank])
    if tensors.kept_ids is not None:
        tensors.kept_ids.copy_(ids)
    tensors.metadata[:, 2:] = -1
    most = origins.num_max_tokens_per_rank
    fill_metadata(tensors.metadata, origins.recv_src_idx, ids, tensors.received, most)
    sent = origins.topk_idx
    tensors.slots.copy_(rows_at_owners(sent, origins.send_head, origins.num_experts))
    tensors.order.copy_(order_of_ranks(sent, origins.num_experts, num_ranks))


def fill_metadata(
    metadata: torch.Tensor,
    recv_src_idx: torch.Tensor,
    recv_topk_idx: torch.Tensor,
    psum_by_rank: torch.Tensor,
    num_max_tokens_per_rank: int,
) -> None:
    """Fill the first two columns of `EPHandle.recv_src_metadata`.

    >>> ids = torch.tensor([[0, -1], [1, 0], [-1, -1]], device="cpu")
    >>> ends = torch.tensor([1, 2], dtype=torch.int32, device="cpu")
    >>> tokens = torch.tensor([3, 1, 9], dtype=torch.int32, device="cpu")
    >>> metadata = torch.empty((3, 4), dtype=torch.int32, device="cpu")
    >>> fill_metadata(metadata, tokens, ids, ends, 5)
    >>> metadata[:, :2].tolist()
    [[3, 0], [6, 3], [-1, -1]]
    """
    num_rows, num_topk = recv_topk_idx.shape
    rows = torch.arange(num_rows, dtype=torch.int32, device=recv_topk_idx.device)
    ranks = torch.searchsorted(psum_by_rank, rows, right=True, out_int32=True)
    is_received = rows < psum_by_rank[-1]
    last = last_choices(recv_topk_idx)
    metadata[:, 0] = torch.where(is_received, ranks * num_max_tokens_per_rank + recv_src_idx, -1)
    metadata[:, 1] = torch.where(is_received, ranks * num_topk + last, -1)


def last_choices(ids: torch.Tensor) -> torch.Tensor:
    """The last column of each row that is not -1; -1 if there is none.

    >>> last_choices(torch.tensor([[4, -1], [-1, -1], [0, 7]], device="cpu")).tolist()
    [0, -1, 1]
    """
    columns = torch.arange(ids.shape[1], dtype=torch.int32, device=ids.device)
    return torch.where(ids >= 0, columns, -1).amax(dim=1).to(torch.int32)


def order_of_ranks(topk_idx: torch.Tensor, num_experts: int, num_ranks: int) -> torch.Tensor:
    """The ranks of each token in the order of its last choice on each; ranks without one come first.

    >>> ids = torch.tensor([[5, 0, 4, -1]], device="cpu")
    >>> order_of_ranks(ids, num_experts=6, num_ranks=3).tolist()
    [[1, 0, 2]]
    """
    num_tokens, num_topk = topk_idx.shape
    per_rank = num_experts // num_ranks
    last = torch.full((num_tokens, num_ranks + 1), -1, dtype=torch.int32, device=topk_idx.device)
    owners = torch.where(topk_idx >= 0, topk_idx // per_rank, num_ranks)
    for choice in range(num_topk):
        last.scatter_(1, owners[:, choice : choice + 1], choice)
    return last[:, :num_ranks].argsort(dim=1, stable=True).to(torch.int32)


def rows_at_owners(topk_idx: torch.Tensor, send_head: torch.Tensor, num_experts: int) -> torch.Tensor:
    """`EPHandle.dst_buffer_slot_idx`.

    >>> ids = torch.tensor([[3, -1, 0]], device="cpu")
    >>> heads = torch.tensor([[7, 9]], dtype=torch.int32, device="cpu")
    >>> rows_at_owners(ids, heads, num_experts=4).tolist()
    [[9, -1, 7]]
    """
    per_rank = num_experts // send_head.shape[1]
    rows = send_head.gather(1, topk_idx.clamp(min=0) // per_rank)
    return torch.where(topk_idx >= 0, rows, -1)
