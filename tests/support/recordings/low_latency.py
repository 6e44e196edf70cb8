"""Low-latency calls, as rounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from tests.support.recorder import Player, seed_of, values
from tests.support.recordings.normal import choices


@dataclass(frozen=True)
class LowLatency:
    """Slots of these sizes, a dispatch, and two combines with its handle."""

    name: str
    tokens: tuple[int, ...] = (5, 8, 0, 3, 1)
    max_tokens: int = 8
    hidden: int = 128
    num_topk: int = 2
    local_experts: int = 2
    routing: str = "uniform"
    travel: str = "bf16"
    """bf16, fp8, fp8 rounded or fp8 ue8m0."""
    use_logfmt: bool = False
    in_place: bool = False
    special_values: bool = False
    hold: bool = False
    clean: bool = True

    def play(self, player: Player) -> None:
        if self.clean:
            player.buffer.clean_low_latency_buffer(
                self.max_tokens, self.hidden, self.local_experts * player.num_ranks
            )
        ids, weights, finish = self.send(player)
        handle = finish()
        for number in range(2):
            self.send_back(player, f"combine {number}", ids, weights, handle)()

    def send(self, player: Player, hook: bool = False) -> Any:
        """Dispatch; the result finishes it."""
        tokens, how = self.tokens[player.rank % len(self.tokens)], self._how(player, hook)
        ids, weights = choices(self.name, self.routing, self.num_topk, self.local_experts, player, tokens)
        x = values(seed_of(self.name, "x", player.rank), tokens, self.hidden)
        if self.special_values and tokens:
            x[0, :6] = torch.tensor([torch.inf, -torch.inf, 0.0, -0.0, 3e38, 1e-40]).bfloat16()
            x[-1, 3] = torch.nan
        stats = torch.arange(self.local_experts, dtype=torch.int32, device=player.device)
        waits = torch.full((player.num_ranks,), 7, dtype=torch.int64, device=player.device)
        received, counts, handle, event, receive = player.buffer.low_latency_dispatch(
            player.flipped(player.there(x)),
            ids,
            self.max_tokens,
            self.local_experts * player.num_ranks,
            stats,
            waits,
            use_fp8=self.travel != "bf16",
            round_scale=self.travel in ("fp8 rounded", "fp8 ue8m0"),
            use_ue8m0=self.travel == "fp8 ue8m0",
            **how,
        )
        assert (receive is not None) == how["return_recv_hook"]
        assert (event.event is not None) == how["async_finish"]

        def finish() -> Any:
            event.current_stream_wait()
            if receive is not None:
                receive()
            self._note_received(player, received, counts, handle, stats, waits)
            return handle

        return ids, weights, finish

    def _how(self, player: Player, hook: bool) -> dict[str, bool]:
        by_hook = hook or player.variant.how == "hooks"
        return {
            "return_recv_hook": by_hook,
            "async_finish": player.variant.how == "beside" and not by_hook,
        }

    def _note_received(
        self, player: Player, received: Any, counts: Any, handle: Any, stats: Any, waits: Any
    ) -> None:
        src_info, layout_range, *sizes = handle
        data, scales = received if isinstance(received, tuple) else (received, None)
        used = [slice(0, count) for count in counts.tolist()]
        parts: dict[str, Any] = {
            "recv_x": torch.cat([data[local, rows] for local, rows in enumerate(used)]),
            "sizes": [list(data.shape), data.is_contiguous(), list(src_info.shape), *sizes],
            "recv_count": counts,
            "src_info": torch.cat([src_info[local, rows] for local, rows in enumerate(used)]),
            "layout_range": layout_range,
            "stats": stats,
            "waits": bool((waits >= 7).all()),
        }
        if scales is not None:
            parts["scales"] = torch.cat([scales[local, rows] for local, rows in enumerate(used)])
            parts["scales' sizes"] = [list(scales.shape), scales.stride(-2)]
        player.note(f"{self.name}: dispatch", **parts)
        if self.hold:
            player.held[f"{self.name}: recv_x"] = data[0, used[0]].view(torch.uint8)
            player.held[f"{self.name}: layout_range"] = layout_range

    def send_back(
        self, player: Player, what: str, ids: Any, weights: Any, handle: Any, hook: bool = False
    ) -> Callable[[], None]:
        """Combine; the result finishes it."""
        buffer, how = player.buffer, self._how(player, hook)
        zero_copy = player.variant.zero_copy and not self.use_logfmt and not hook
        shape = (self.local_experts, player.num_ranks * self.max_tokens, self.hidden)
        if zero_copy:
            x = buffer.get_next_low_latency_combine_buffer(handle)
            assert (x.shape, x.dtype) == (shape, torch.bfloat16)
        else:
            x = torch.full(shape, torch.nan, dtype=torch.bfloat16, device=player.device)
        counts = (handle[1] & 0xFFFFFFFF).sum(1).tolist()
        for local, count in enumerate(counts):
            seed = seed_of(self.name, what, player.rank, local)
            # With LogFMT some blocks are encoded, and some are not.
            rows = values(seed, count, self.hidden, dtype=torch.float32) * (0.1 if local % 2 else 1.0)
            if self.special_values and count:
                rows[0, :4] = torch.tensor([torch.nan, torch.inf, -0.0, 1e-40])
            x[local, :count] = player.there(rows.bfloat16())
        out = torch.empty(len(ids), self.hidden, dtype=torch.bfloat16, device=player.device)
        waits = torch.full((player.num_ranks,), 7, dtype=torch.int64, device=player.device)
        combined, event, receive = buffer.low_latency_combine(
            x,
            ids,
            weights,
            handle,
            use_logfmt=self.use_logfmt,
            zero_copy=zero_copy,
            out=out if self.in_place else None,
            combine_wait_recv_cost_stats=waits,
            **how,
        )

        def finish() -> None:
            event.current_stream_wait()
            if receive is not None:
                receive()
            player.note(
                f"{self.name}: {what}",
                combined_x=combined,
                is_out=combined is out,
                waits=bool((waits >= 7).all()),
            )
            if self.hold:
                player.held[f"{self.name}: {what}"] = combined

        return finish


@dataclass(frozen=True)
class InFlight:
    """Two dispatches are sent before one is received, then two combines; a third call is refused."""

    name: str
    order: tuple[int, int] = (0, 1)

    def play(self, player: Player) -> None:
        batches = [LowLatency(f"{self.name} {batch}", hidden=64) for batch in "ab"]
        player.buffer.clean_low_latency_buffer(8, 64, 2 * player.num_ranks)
        sent = [batch.send(player, hook=True) for batch in batches]
        player.attempt(f"{self.name}: a third", lambda: batches[0].send(player))
        player.attempt(
            f"{self.name}: clean", lambda: player.buffer.clean_low_latency_buffer(8, 64, 2 * player.num_ranks)
        )
        handles: dict[int, Any] = {}
        for number in self.order:
            handles[number] = sent[number][2]()
        back = [
            batch.send_back(player, "combine", *sent[number][:2], handles[number], hook=True)
            for number, batch in enumerate(batches)
        ]
        for number in reversed(self.order):
            back[number]()


@dataclass(frozen=True)
class Dropped:
    """Hooks that are dropped give their calls up; what follows is not disturbed."""

    name: str

    def play(self, player: Player) -> None:
        batch = LowLatency(self.name, hidden=64)
        player.buffer.clean_low_latency_buffer(8, 64, 2 * player.num_ranks)
        for _ in range(3):
            batch.send(player, hook=True)
        replace(batch, clean=False).play(player)


def call_once(batch: LowLatency, player: Player) -> None:
    """A dispatch, sent and received."""
    batch.send(player)[2]()


@dataclass(frozen=True)
class Masks:
    """The last rank is masked by hand, the others go on, and it is taken back."""

    name: str
    by_name: bool = False
    """Taken back by its number, or with all ranks that live."""

    def play(self, player: Player) -> None:
        masked, buffer = player.num_ranks - 1, player.buffer
        self._query(player, "before")
        player.barrier()
        if player.rank == 0:
            buffer.low_latency_update_mask_buffer(masked, mask=True)
        player.barrier()
        if player.rank != masked:
            LowLatency(f"{self.name}: without it", clean=False).play(player)
            self._query(player, "meanwhile")
        else:
            batch = LowLatency(f"{self.name}: masked", clean=False)
            for number in range(2):
                player.attempt(f"{self.name}: its call {number}", lambda: call_once(batch, player))
        player.barrier()
        if self.by_name:
            player.attempt(f"{self.name}: back", lambda: buffer.low_latency_update_mask_buffer(masked))
        else:
            player.attempt(f"{self.name}: back", buffer.low_latency_clean_mask_buffer)
        LowLatency(f"{self.name}: together", clean=False).play(player)
        self._query(player, "after")
        player.barrier()

    def _query(self, player: Player, when: str) -> None:
        status = torch.full((player.num_ranks,), 9, dtype=torch.int32, device=player.device)
        player.buffer.low_latency_query_mask_buffer(status)
        player.note(f"{self.name}: query {when}", status=status.tolist())
