"""Launches the kernels that move rows in normal mode: into windows and out of them, or through rings.

rows = RowKernels(device_control, rings, tiles, share_of_sms)
rows.send_to_windows(payload, routing, config, experts_per_rank, all_or_none=False)
"""

from __future__ import annotations

from typing import Final

import torch

from anyep.backends.base import CombineInput, Payload, Results
from anyep.backends.cuda.device_control import DeviceControl
from anyep.backends.cuda.kernels import groups, rings, sums, windows
from anyep.backends.cuda.launch import Fixed, Launcher, Seen
from anyep.backends.cuda.plans import Plan, Plans
from anyep.backends.cuda.routing import GpuRouting
from anyep.backends.cuda.tiles import CHUNK_TOKENS, Tiles, at_most, block_of
from anyep.core.rings import Rings, part_offsets
from anyep.sizes import Config, TokenLayout

DTYPE_CODES: Final = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}


class RowKernels:
    """The kernels of one rank that move rows; it has `share_of_sms` SMs of its GPU."""

    def __init__(
        self,
        device_control: DeviceControl,
        all_rings: Rings,
        tiles: Tiles,
        share_of_sms: int,
    ) -> None:
        self._device_control = device_control
        self._rank, self._num_ranks = device_control.rank, device_control.num_ranks
        self._rings = all_rings
        self._tiles = tiles
        self._share_of_sms = share_of_sms
        self._plans = Plans()
        self._no_scales = Fixed(groups.Scales(device_control.state, 0, 0, 0))

    def num_programs(self, config: Config) -> int:
        """How many programs move the rows of a call: no more than can be resident beside those of the other
        ranks. Programs would wait forever for one that is not resident."""
        return min(config.num_sms, self._share_of_sms)

    def send_to_windows(
        self, payload: Payload, routing: GpuRouting, config: Config, experts_per_rank: int, all_or_none: bool
    ) -> None:
        """Send each row to the windows of its receivers; with `all_or_none`, only if all have one."""
        token = payload.token

        def new_plan() -> Plan:
            tile = self._tiles.dispatch.fitting(token.hidden_bytes // 4)
            launch = self._device_control.launcher(
                windows.send_to_windows,
                tile.warps,
                NUM_RECEIVERS=self._num_ranks,
                RECEIVER_BLOCK=self._device_control.rank_block,
                SCALE_BLOCK=block_of(token.num_scales),
                TOPK_BLOCK=block_of(token.num_topk),
                TILE_TOKENS=tile.tokens,
                TILE_WORDS=tile.words,
                CHUNK_TOKENS=CHUNK_TOKENS,
                ALL_OR_NONE=all_or_none,
            )
            return Plan(token, config, launch, (self.num_programs(config),))

        send = self._plans.get(("send", all_or_none), token, config, new_plan)
        send.launch(
            self._device_control.gpu.stream.stream,
            send.grid,
            *self._carried(payload),
            routing.send_head,
            self._device_control.tables,
            payload.num_tokens,
            token.hidden_bytes // 4,
            token.num_topk,
            experts_per_rank,
        )

    def send_through_rings(
        self,
        payload: Payload,
        routing: GpuRouting,
        results: Results,
        config: Config,
        experts_per_rank: int,
    ) -> None:
        """Send rows to receivers without a window, and receive rows if this rank has none. The kernel does
        nothing if all ranks have windows."""
        token = payload.token

        def new_plan() -> Plan:
            tile, area = self._tiles.ring_dispatch, self._rings.node.area_for(config, token)
            launch = self._device_control.launcher(
                rings.dispatch_through_rings,
                tile.warps,
                NUM_RANKS=self._num_ranks,
                RANK_BLOCK=self._device_control.rank_block,
                SCALE_BLOCK=block_of(token.num_scales),
                TOPK_BLOCK=block_of(token.num_topk),
                TILE_TOKENS=at_most(tile.tokens, area.num_rows),
                TILE_WORDS=tile.words,
                STAGES=tile.stages,
            )
            return self._ring_plan(token, config, launch)

        ring = self._plans.get("dispatch rings", token, config, new_plan)
        parts = (results.x, results.source, results.topk_idx, results.topk_weights, results.scales)
        addresses = [part.data_ptr() if part is not None else 0 for part in parts]
        ring.launch(
            self._device_control.gpu.stream.stream,
            ring.grid,
            *self._carried(payload),
            routing.send_head,
            self._device_control.tables,
            self._device_control.keep_addresses(addresses),
            prefixes_of(routing, self._device_control.state),
            *ring.fixed,
            payload.num_tokens,
            token.hidden_bytes // 4,
            experts_per_rank,
        )

    def _ring_plan(self, token: TokenLayout, config: Config, launch: Launcher) -> Plan:
        area = self._rings.node.area_for(config, token)
        rows = groups.RingArea(area.start, area.num_rows, area.token_bytes, config.num_channels)
        grid = (self.num_programs(config),)
        return Plan(token, config, launch, grid, (Fixed(rows), Fixed(_beside(token))))

    def _carried(self, payload: Payload) -> tuple[groups.Payload, groups.Scales | Fixed]:
        """What a dispatch sends, as its kernels take it."""
        nothing, scales = self._device_control.state, payload.scales
        ids = payload.topk_idx if payload.topk_idx is not None else nothing
        weights = payload.topk_weights if payload.topk_weights is not None else nothing
        rows = groups.Payload(_words(payload.x), ids, weights)
        if scales is None:
            return rows, self._no_scales
        strides = scales.stride()
        return rows, groups.Scales(Seen(scales, torch.int32), payload.token.num_scales, *strides)

    def pull_and_sum(
        self, combined: CombineInput, out: torch.Tensor, out_weights: torch.Tensor | None
    ) -> None:
        """Sum the rows of each token where they lie; the kernel does nothing if some come through rings."""
        x, routing, _, biases, config = combined
        token, state = combined.token, self._device_control.state

        def new_plan() -> Plan:
            tile = self._tiles.combine
            launch = self._device_control.launcher(
                sums.pull_and_sum,
                tile.warps,
                DTYPE=DTYPE_CODES[x.dtype],
                NUM_BIASES=len(biases),
                NUM_RANKS=self._num_ranks,
                RANK_BLOCK=self._device_control.rank_block,
                TOPK_BLOCK=block_of(token.num_topk),
                TILE_TOKENS=tile.tokens,
                TILE_VALUES=tile.values,
                CHUNK_TOKENS=CHUNK_TOKENS,
                IN_HARDWARE=self._device_control.gpu.rounds_in_hardware,
            )
            return Plan(token, config, launch, (self.num_programs(config),))

        pull = self._plans.get(("sum", x.dtype, len(biases)), token, config, new_plan)
        pull.launch(
            self._device_control.gpu.stream.stream,
            pull.grid,
            _sums(out, out_weights, state),
            _biases(biases, state),
            routing.send_head,
            self._device_control.tables,
            x.data_ptr(),
            self._rank,
            routing.num_tokens,
            x.shape[1],
            token.num_topk,
        )

    def combine_through_rings(
        self, combined: CombineInput, out: torch.Tensor, out_weights: torch.Tensor | None
    ) -> None:
        """Sum rows if some of them are not in windows; the kernel does nothing if all are."""
        x, routing, weights, biases, config = combined
        token, state = combined.token, self._device_control.state

        def new_plan() -> Plan:
            area = self._rings.node.area_for(config, token)
            tile, tile_values = self._tiles.ring_combine
            launch = self._device_control.launcher(
                rings.combine_through_rings,
                tile.warps,
                DTYPE=DTYPE_CODES[x.dtype],
                NUM_BIASES=len(biases),
                NUM_RANKS=self._num_ranks,
                RANK_BLOCK=self._device_control.rank_block,
                TOPK_BLOCK=block_of(token.num_topk),
                TILE_TOKENS=at_most(tile.tokens, area.num_rows),
                TILE_WORDS=tile.words,
                STAGES=tile.stages,
                TILE_VALUES=tile_values,
                IN_HARDWARE=self._device_control.gpu.rounds_in_hardware,
            )
            return self._ring_plan(token, config, launch)

        ring = self._plans.get(("combine rings", x.dtype, len(biases)), token, config, new_plan)
        ring.launch(
            self._device_control.gpu.stream.stream,
            ring.grid,
            groups.Outputs(_words(x), weights if weights is not None else state),
            _sums(out, out_weights, state),
            _biases(biases, state),
            routing.send_head,
            self._device_control.tables,
            prefixes_of(routing, state),
            *ring.fixed,
            routing.num_tokens,
            x.shape[1],
        )


def prefixes_of(routing: GpuRouting, digests: torch.Tensor) -> groups.Prefixes:
    """The prefix sums of a routing, as kernels take them."""
    return groups.Prefixes(
        routing.rank_prefix_matrix,
        routing.channel_prefix_matrix,
        routing.recv_channel_prefix_matrix,
        digests,
    )


def _beside(token: TokenLayout) -> groups.Beside:
    """Where metadata, scales, ids and weights lie in a place of a ring."""
    meta_at, scales_at, ids_at, weights_at, _ = part_offsets(token).tolist()
    return groups.Beside(meta_at, scales_at, ids_at, weights_at, token.num_scales, token.num_topk)


def _sums(out: torch.Tensor, out_weights: torch.Tensor | None, nothing: torch.Tensor) -> groups.Sums:
    return groups.Sums(_bits(out), out_weights if out_weights is not None else nothing)


def _biases(biases: tuple[torch.Tensor, ...], nothing: torch.Tensor) -> groups.Biases:
    first, second = (*(_bits(bias) for bias in biases), nothing, nothing)[:2]
    return groups.Biases(first, second)


def _words(x: torch.Tensor) -> Seen:
    """Rows as words of 4 bytes."""
    return Seen(x, torch.int32)


def _bits(x: torch.Tensor) -> Seen:
    """Values as kernels read them: 16-bit values as their bits."""
    return Seen(x, torch.uint16 if x.element_size() == 2 else x.dtype)
