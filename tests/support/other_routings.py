"""Two routings with the same counts, and ranks that pass handles of either: for every device and topology.

Two tokens of one channel of one rank change places: the counts by rank, channel and node stay the same;
which tokens go there does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

from anyep import Config
from anyep.api.buffer import Buffer
from anyep.errors import Disagreement
from tests.support.places import tensor_device
from tests.support.world import RankContext

HIDDEN = 32
NUM_TOPK = 2


@dataclass(frozen=True)
class Mix:
    """Tokens of all ranks, and which ranks pass the second dispatch's handle to a call."""

    num_ranks: int
    num_tokens: int
    num_channels: int
    swapped: tuple[int, int, int]
    """A rank, and two of its tokens, of the same channel."""
    others: frozenset[int]
    is_combine: bool
    run_async: bool
    seed: int

    @property
    def config(self) -> Config:
        return Config(2 * self.num_channels, 2, 12, 1, 4)

    def ids(self, rank: int, is_second: bool) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed * 100 + rank)
        ids = torch.randint(-1, self.num_ranks, (self.num_tokens, NUM_TOPK), generator=generator)
        swapped, one, other = self.swapped
        if swapped == rank:
            # One of them goes to another rank.
            ids[one] = torch.tensor([(rank + 1) % self.num_ranks, -1])
            ids[other] = torch.tensor([(rank + 2 * (self.seed % 2)) % self.num_ranks, -1])
            if is_second:
                ids[[one, other]] = ids[[other, one]]
        return ids


@st.composite
def mixes(draw: st.DrawFn, num_ranks: int) -> Mix:
    """Any ranks pass the other handle, none or all of them, the rank with other tokens or its peers."""
    num_tokens, num_channels = draw(st.integers(2, 12)), draw(st.integers(1, 3))
    per_channel = -(-num_tokens // num_channels)
    pairs = [
        (one, other)
        for one in range(num_tokens)
        for other in range(one)
        if one // per_channel == other // per_channel
    ]
    if not pairs:
        num_channels, pairs = 1, [(1, 0)]
    return Mix(
        num_ranks,
        num_tokens,
        num_channels,
        (draw(st.integers(0, num_ranks - 1)), *draw(st.sampled_from(pairs))),
        draw(st.frozensets(st.integers(0, num_ranks - 1), max_size=num_ranks)),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.integers(0, 1000)),
    )


def rows_like(mix: Mix, rank: int, scale: float = 1.0) -> torch.Tensor:
    # On the device from the start: a graph that is captured cannot copy there.
    numbers = torch.arange(mix.num_tokens * HIDDEN, dtype=torch.int64, device=tensor_device())
    return ((numbers.view(mix.num_tokens, HIDDEN) % 13 + rank) * scale).bfloat16()


def first_dispatch(buffer: Buffer, mix: Mix, rank: int, is_second: bool) -> Any:
    ids = mix.ids(rank, is_second).to(tensor_device())
    per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, mix.num_ranks)
    rows, *_, handle, _ = buffer.dispatch(
        rows_like(mix, rank),
        num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=per_node,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        topk_idx=ids,
        topk_weights=torch.ones(ids.shape, device=ids.device),
        config=mix.config,
    )
    return rows, handle, in_rank


def call(buffer: Buffer, mix: Mix, rank: int, rows: Any, handle: Any) -> torch.Tensor:
    """A cached dispatch or a combine; its result."""
    overlap = {"async_finish": mix.run_async}
    if mix.is_combine:
        out, _, event = buffer.combine(rows, handle, config=mix.config, **overlap)
    else:
        x = rows_like(mix, rank, 0.5)
        out, *_, event = buffer.dispatch(x, handle=handle, config=mix.config, **overlap)  # type: ignore
    event.current_stream_wait()
    return out


def outcome(buffer: Buffer, mix: Mix, rank: int, rows: Any, handle: Any) -> str:
    """What is raised, by this call or, on a GPU, at the next contact."""
    try:
        call(buffer, mix, rank, rows, handle)
        if buffer.runtime.device_control is not None:
            if tensor_device() == "cuda":
                torch.cuda.synchronize()
            first_dispatch(buffer, mix, rank, False)
    except Disagreement as error:
        return str(error)
    return ""


def mix_handles(context: RankContext, buffer: Buffer, mix: Mix) -> tuple[str, bool]:
    """What a call with mixed handles raises; and whether all handles, and copies of them, work afterwards."""
    rank = context.rank
    first = first_dispatch(buffer, mix, rank, False)
    second = first_dispatch(buffer, mix, rank, True)
    rows, handle, _ = second if rank in mix.others else first
    message = outcome(buffer, mix, rank, rows, handle)

    are_right = True
    for rows, handle, in_rank in (first, second, first):
        copies = tuple(part.clone() for part in handle)
        one_copied = (*handle[:-1], handle[-1].clone())
        kinds = (handle, copies, one_copied, saved(handle))
        # Each rank another kind at a time.
        each = (*kinds[rank % 4 :], *kinds[: rank % 4])
        results = [call(buffer, mix, rank, rows, parts) for parts in each]
        are_right &= all(torch.equal(result, results[0]) for result in results)
        if mix.is_combine:
            expected = rows_like(mix, rank).float() * in_rank.sum(1, keepdim=True)
            are_right &= torch.equal(results[0], expected.bfloat16())
        else:
            are_right &= torch.equal(results[0], rows * 0.5)
    return message, are_right


def saved(handle: Any) -> Any:
    """What autograd gives back of a handle."""

    class Keep(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, *parts: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(*parts)
            return x * 1

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> Any:  # type: ignore[override]
            found.append(ctx.saved_tensors)
            return gradients[0], *[None] * len(handle)

    found: list[Any] = []
    x = torch.ones(1, requires_grad=True)
    Keep.apply(x, *handle).backward()  # type: ignore[no-untyped-call]
    return found[0]


def is_mixed(mix: Mix, ranks_per_node: int | None = None) -> bool:
    """Whether some rank knows something of another one's rows that is not in that one's handle.

    On one node a rank knows the tokens of the rows that it gets. Between nodes it knows who else on its node
    gets each of them, and a relay knows who gets each of the tokens that it relays.
    """
    ranks, per_node = range(mix.num_ranks), ranks_per_node or 1

    def passes(rank: int) -> bool:
        return rank in mix.others

    def wanted_by(source: int, is_second: bool) -> torch.Tensor:
        ids = mix.ids(source, is_second)
        return torch.stack([(ids == rank).any(1) for rank in ranks], dim=1)

    for source in ranks:
        one, other = wanted_by(source, False), wanted_by(source, True)
        for peer in ranks:
            first = peer // per_node * per_node
            here = slice(first, first + per_node)
            if passes(source) == passes(peer):
                continue
            if ranks_per_node is None:
                differ = not torch.equal(one[:, peer], other[:, peer])
            else:
                differ = not torch.equal(one[one[:, peer], here], other[other[:, peer], here])
                if peer % per_node == source % per_node:
                    in_node = one[:, here].any(1), other[:, here].any(1)
                    differ |= not torch.equal(one[in_node[0], here], other[in_node[1], here])
            if differ:
                return True
    return False


def check_answers(mix: Mix, answers: list[tuple[str, bool]], ranks_per_node: int | None = None) -> None:
    """All ranks raise the same, or none does; and all can go on."""
    messages = {message for message, _ in answers}
    assert len(messages) == 1
    (message,) = messages
    if is_mixed(mix, ranks_per_node):
        assert "about the routing in the handle: " in message
        assert " rank " in message
    else:
        assert not message
    assert all(are_right for _, are_right in answers)
