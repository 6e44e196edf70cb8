"""A pair of dispatch and combine, as a round; and the choices of experts that all rounds use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch

from anyep import Config
from tests.support.recorder import Player, seed_of, uniform, values

CONFIG: Final = Config(4, 2, 5, 2, 6)
"""Given in every call: without one, a GPU has as many channels as its share of SMs."""
FLOATS: Final = (torch.bfloat16, torch.float16, torch.float32)
MANY: Final = (7, 3, 0, 5, 1, 4)


def choices(name: str, routing: str, num_topk: int, local_experts: int, player: Player, tokens: int) -> Any:
    """The experts of this rank's tokens, and their weights."""
    seed, num_experts = seed_of(name, "ids", player.rank), local_experts * player.num_ranks
    first, last = player.rank * local_experts, (player.rank + 1) * local_experts
    scores = uniform(seed, tokens, num_experts)
    if routing == "own rank":
        scores[:, first:last] += 1
    if routing == "skewed":
        scores *= torch.arange(num_experts, 0, -1, dtype=torch.float32) / num_experts
    if routing == "repeated" or num_topk > num_experts:
        # An expert may come twice.
        ids = (uniform(seed + 1, tokens, num_topk) * num_experts).long()
    else:
        ids = scores.argsort(dim=1, descending=True, stable=True)[:, :num_topk].contiguous()
    if routing == "one rank":
        ids = torch.where(ids < local_experts, ids, -1)
    if routing == "some missing":
        ids = torch.where(uniform(seed + 2, tokens, num_topk) < 0.5, ids, -1)
    if routing == "none":
        ids = torch.full_like(ids, -1)
    return player.there(ids), player.there(uniform(seed + 3, tokens, num_topk))


@dataclass(frozen=True)
class Normal:
    """A layout, a dispatch, another one by handle, and a combine."""

    name: str
    tokens: tuple[int, ...] = MANY
    """Of rank r it is the r-th, and they repeat."""
    hidden: int = 32
    dtype: torch.dtype = torch.bfloat16
    num_scales: int = 0
    scales: str = "row-major"
    """row-major, column-major or int32."""
    num_topk: int = 2
    local_experts: int = 2
    routing: str = "uniform"
    send_topk: bool = True
    alignment: int = 1
    worst: bool = False
    num_biases: int = 0
    combine_weights: bool = False
    staged: bool = False
    """Combine from memory of the caller, not from where the rows were received."""
    copies: bool = False
    """Once more with copies of the handle."""
    hold: bool = False
    config: Config | None = CONFIG
    internode: bool = False

    def play(self, player: Player) -> None:
        buffer, tokens = player.buffer, self.tokens[player.rank % len(self.tokens)]
        ids, weights = choices(self.name, self.routing, self.num_topk, self.local_experts, player, tokens)
        x = self._rows(player, "x", tokens, self.dtype)
        player.flipped(x if isinstance(x, torch.Tensor) else x[0])
        beside = player.variant.how == "beside"
        how: dict[str, Any] = {"async_finish": beside}
        if beside:
            how |= {"previous_event": buffer.capture(), "allocate_on_comm_stream": True}
        layout = buffer.get_dispatch_layout(ids, self.local_experts * player.num_ranks, **how)
        per_rank, per_node, per_expert, in_rank, event = layout
        assert (event.event is not None) == beside
        if beside:
            how["previous_event"] = event
        dispatch = buffer.internode_dispatch if self.internode else buffer.dispatch
        received = dispatch(
            x,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=ids if self.send_topk else None,
            topk_weights=weights if self.send_topk else None,
            expert_alignment=self.alignment,
            num_worst_tokens=100 if self.worst else 0,
            config=self.config,
            **how,
        )
        handle, event = received[-2:]
        assert handle is not None
        assert (event.event is not None) == beside
        event.current_stream_wait()
        player.note(
            f"{self.name}: layout",
            per_rank=per_rank,
            per_node=per_node,
            per_expert=per_expert,
            in_rank=in_rank,
        )
        num_rows = num_received(player, handle)
        rows = self._note_dispatch(player, received, num_rows)
        if beside:
            how["previous_event"] = event
        self._again(player, "again", x, handle, num_rows, how)
        self._combine(player, "combine", rows, handle, num_rows, how, self.staged)
        if self.copies:
            copy = tuple(part.clone() for part in handle)
            if beside:
                # The copies are made on this stream, after the last event.
                how["previous_event"] = buffer.capture()
            self._again(player, "again by a copy", x, copy, num_rows, how)
            self._combine(player, "combine by a copy", rows, copy, num_rows, how, True)

    def _rows(self, player: Player, what: str, num_rows: int, dtype: torch.dtype) -> Any:
        seed = seed_of(self.name, what, player.rank)
        rows = player.there(values(seed, num_rows, self.hidden, dtype=dtype))
        if not self.num_scales or what != "x":
            return rows
        scales = uniform(seed + 1, num_rows, self.num_scales)
        if self.scales == "int32":
            scales = (scales * 2**31).to(torch.int32)
        if self.scales == "column-major":
            return rows, player.there(scales.t().contiguous()).t()
        return rows, player.there(scales)

    def _note_dispatch(self, player: Player, received: Any, num_rows: int) -> torch.Tensor:
        rows, ids, weights, counts, handle, _ = received
        x, scales = rows if isinstance(rows, tuple) else (rows, None)
        parts: dict[str, Any] = {
            "recv_x": x[:num_rows],
            "sizes": [list(x.shape), x.is_contiguous()],
            "recv_topk_idx": ids,
            "recv_topk_weights": None if weights is None else weights[:num_rows],
            "counts": counts,
        }
        if scales is not None:
            parts |= {"scales": scales[:num_rows], "scales are contiguous": scales.is_contiguous()}
        player.note(f"{self.name}: dispatch", **parts)
        player.note(f"{self.name}: handle", **parts_of_handle(handle, num_rows))
        if self.hold:
            player.held |= {f"{self.name}: handle, part {part}": handle[part] for part in range(2)}
            if self.staged:
                player.held[f"{self.name}: recv_x"] = x[:num_rows]
        assert isinstance(x, torch.Tensor)
        return x

    def _again(self, player: Player, what: str, x: Any, handle: Any, num_rows: int, how: Any) -> None:
        dispatch = player.buffer.internode_dispatch if self.internode else player.buffer.dispatch
        rows, *nothing, event = dispatch(x, handle=handle, config=self.config, **how)
        assert nothing == [None] * 4
        event.current_stream_wait()
        x, scales = rows if isinstance(rows, tuple) else (rows, None)
        player.note(
            f"{self.name}: {what}",
            recv_x=x[:num_rows],
            scales=None if scales is None else scales[:num_rows],
        )
        if self.hold:
            player.held[f"{self.name}: {what}"] = x[:num_rows]

    def _combine(
        self, player: Player, what: str, rows: Any, handle: Any, num_rows: int, how: Any, staged: bool
    ) -> None:
        dtype = self.dtype if self.dtype in FLOATS else torch.bfloat16
        outputs = self._rows(player, what, num_rows, dtype)
        if staged or rows.dtype != dtype:
            rows = torch.zeros(rows.shape, dtype=dtype, device=player.device)
        rows[:num_rows] = outputs
        seed, tokens = seed_of(self.name, what, "bias", player.rank), handle_tokens(handle)
        weights = None
        if self.combine_weights:
            weights = torch.zeros(len(rows), 3, device=player.device)
            weights[:num_rows] = player.there(uniform(seed + 5, num_rows, 3))
        biases = [
            player.there(values(seed + number, tokens, self.hidden, dtype=dtype))
            for number in range(self.num_biases)
        ]
        if player.variant.how == "beside":
            how = {"previous_event": player.buffer.capture(), "async_finish": True}
        combine = player.buffer.internode_combine if self.internode else player.buffer.combine
        combined, combined_weights, event = combine(
            rows,
            handle,
            topk_weights=weights,
            bias=None if not biases else biases[0] if len(biases) == 1 else (biases[0], biases[1]),
            config=self.config,
            **how,
        )
        event.current_stream_wait()
        player.note(
            f"{self.name}: {what}",
            combined_x=combined,
            is_contiguous=combined.is_contiguous(),
            combined_topk_weights=combined_weights,
        )
        if self.hold:
            player.held[f"{self.name}: {what}"] = combined


def num_received(player: Player, handle: Any) -> int:
    """The rows of a dispatch that are defined; with num_worst_tokens there are more."""
    return int(handle[0][-1, player.rank]) if len(handle) == 6 else int(handle[-4][-1])


def handle_tokens(handle: Any) -> int:
    return len(handle[4]) if len(handle) == 6 else len(handle[0])


def parts_of_handle(handle: Any, num_rows: int) -> dict[str, Any]:
    """All tensors, and of those with room for more rows the ones in use."""
    used = list(handle)
    if len(handle) == 6:
        used[3] = handle[3][:num_rows]
    else:
        used[7], used[9] = handle[7][:num_rows], handle[9][: int(handle[4][-1])]
    return {str(number): part for number, part in enumerate(used)}
