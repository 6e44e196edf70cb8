"""What the tensors of a handle of the elastic API say, on every backend.

A check takes a backend: "numba" stands for the CPU; or the device of Triton's kernels ("cpu": interpreted).
"""

from __future__ import annotations

import torch

from anyep.backends.cpu.origins import tell_origins
from anyep.backends.expanded import Origins, OriginTensors
from tests.support.checks.expand import GUARD, gpu_ops


def tensors_on(device: str, origins: Origins, expands: bool) -> OriginTensors:
    num_tokens, num_ranks = origins.send_head.shape
    num_rows, num_topk = origins.recv_topk_idx.shape
    shapes = [(num_ranks,), (num_rows, 2 + num_topk), (num_tokens, num_topk), (num_tokens, num_ranks)]
    words = (torch.full(shape, GUARD, dtype=torch.int32, device=device) for shape in shapes)
    kept_ids = torch.full((num_rows, num_topk), GUARD, dtype=torch.int64, device=device)
    return OriginTensors(*words, None if expands else kept_ids)


def told(backend: str, origins: Origins, expands: bool = False) -> OriginTensors:
    if backend == "numba":
        tensors = tensors_on("cpu", origins, expands)
        tell_origins(origins, tensors)
        return tensors
    there = (part.to(backend) if isinstance(part, torch.Tensor) else part for part in origins)
    tensors = tensors_on(backend, origins, expands)
    gpu_ops(backend).tell_origins(Origins(*there), tensors)
    return OriginTensors(*(part.cpu() if part is not None else None for part in tensors))


def int32(rows: list[list[int]]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32, device="cpu")


def check_examples(backend: str) -> None:
    """Those of the docstrings."""
    no_tokens = torch.zeros(0, 2, dtype=torch.int32, device="cpu")
    here = Origins(
        *(int32([[0, 1], [5, 2]]), int32([[3, 1, 9]])[0], no_tokens, no_tokens.long()),
        *(torch.tensor([[0, -1], [1, 0], [-1, -1]], device="cpu"), 1, 6, 5),
    )
    found = told(backend, here)
    assert found.received.tolist() == [1, 2]
    assert found.metadata.tolist() == [[3, 0, -1, -1], [6, 3, -1, -1], [-1, -1, -1, -1]]
    assert found.kept_ids is not None
    assert torch.equal(found.kept_ids, here.recv_topk_idx)
    no_rows = torch.zeros(0, 4, dtype=torch.int64, device="cpu")
    sent = Origins(
        *(int32([[0] * 3] * 3), int32([[]])[0], int32([[7, -1, 9]])),
        *(torch.tensor([[5, 0, 4, -1]], device="cpu"), no_rows, 0, 6, 5),
    )
    found = told(backend, sent)
    assert found.order.tolist() == [[1, 0, 2]]
    assert found.slots.tolist() == [[9, 7, 9, -1]]


def check_origins(backend: str) -> None:
    """Any rank of any number of ranks; rows that nobody sent; with ids that are no experts on a GPU."""
    for num_ranks, num_tokens, num_topk, local_experts, expands in (
        (1, 5, 3, 4, False),
        (3, 41, 4, 2, True),
        (8, 300, 6, 5, False),
        (70, 30, 9, 1, False),
    ):
        random = torch.Generator(device="cpu").manual_seed(num_ranks)
        num_experts, most = num_ranks * local_experts, 1000
        scores = torch.rand((num_tokens, num_experts), generator=random, device="cpu")
        ids = scores.topk(min(num_topk, num_experts), dim=1).indices
        ids = torch.where(torch.rand(ids.shape, generator=random, device="cpu") < 0.3, -1, ids)
        by_rank = torch.randint(0, 9, (num_ranks, num_ranks), generator=random, device="cpu")
        rank, rank_prefix = num_ranks // 2, by_rank.cumsum(0).int()
        num_received = int(rank_prefix[-1, rank])
        room = num_received + 7
        choices = (room, ids.shape[1])
        local = torch.randint(-1, local_experts, choices, generator=random, device="cpu")
        local[:, 0] = local[:, 0].clamp(min=0)
        local[num_received:] = -1
        sources = torch.randint(0, most, (room,), generator=random, device="cpu").int()
        heads = torch.randint(0, 99, (num_tokens, num_ranks), generator=random, device="cpu").int()
        origins = Origins(rank_prefix, sources, heads, ids, local, rank, num_experts, most)
        found = told(backend, origins, expands)
        ranks = torch.repeat_interleave(torch.arange(num_ranks, device="cpu"), by_rank[:, rank])
        columns = torch.arange(ids.shape[1], device="cpu")
        last = torch.where(local >= 0, columns, -1).amax(1)[:num_received]
        assert torch.equal(found.received, rank_prefix[:, rank])
        right = torch.stack([ranks * most + sources[:num_received], ranks * ids.shape[1] + last], dim=1)
        assert torch.equal(found.metadata[:num_received, :2], right.int())
        assert bool((found.metadata[num_received:, :2] == -1).all())
        if not expands:
            assert bool((found.metadata[:, 2:] == -1).all())
            assert found.kept_ids is not None
            assert torch.equal(found.kept_ids, local)
        for token, experts in enumerate(ids.tolist()):
            owners = [expert // local_experts if expert >= 0 else -1 for expert in experts]
            last_of = {owner: choice for choice, owner in enumerate(owners)}
            order = sorted(range(num_ranks), key=lambda rank: (last_of.get(rank, -1), rank))
            assert found.order[token].tolist() == order
            slots = [int(heads[token, owner]) if owner >= 0 else -1 for owner in owners]
            assert found.slots[token].tolist() == slots


def check_ids_that_are_no_experts(device: str) -> None:
    """Kernels pass over them: nobody has looked at them before."""
    nothing = torch.zeros(0, 2, dtype=torch.int64, device="cpu")
    ids = torch.tensor([[4, 1], [-7, 2**40]], device="cpu")
    heads = int32([[5, 6], [7, 8]])
    found = told(device, Origins(int32([[0, 0], [0, 0]]), int32([[]])[0], heads, ids, nothing, 0, 4, 10))
    assert found.slots.tolist() == [[-1, 5], [-1, -1]]
    assert found.order.tolist() == [[1, 0], [0, 1]]
