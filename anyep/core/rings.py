"""The rings of normal-mode calls: as many rows as the config requests, or as fit the Buffer's bytes.

`NodeRings` are the rings within a node. `NetworkRings` are those between nodes; half of the RDMA bytes is for
rows that arrive, half for rows that an engine takes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np

from anyep.core.calls import Array
from anyep.core.headers import NETWORK_ROWS_SHIFT
from anyep.errors import InvalidCall
from anyep.layout import RingArea, nvl_rings, rdma_rings, ring_rows_that_fit
from anyep.sizes import NUM_BUFFER_ALIGNMENT_BYTES, Config, TokenLayout, align
from anyep.topology import Topology

MAX_KNOWN_AREAS: Final = 64
MIN_RING_ROWS: Final = 2


class NodeRings:
    """The rings within a node, in one rank's heap, where they begin at `start`."""

    def __init__(self, start: int, num_bytes: int, num_ranks: int, num_nodes: int = 1) -> None:
        self.num_bytes = num_bytes
        self._start = start
        self._num_ranks = num_ranks
        self._num_nodes = num_nodes
        self._areas: dict[tuple[int, int], tuple[Config, TokenLayout, RingArea]] = {}

    def area_for(self, config: Config, token: TokenLayout) -> RingArea:
        # Calls of the same sizes pass identical config and layout objects, so their ids are a sufficient
        # key; an entry keeps both alive.
        known = self._areas.get((id(config), id(token)))
        if known is not None:
            return known[2]
        wanted = self._area(config, token, config.num_max_nvl_chunked_recv_tokens)
        fitting = self._area(config, token, ring_rows_that_fit(wanted, self.num_bytes))
        if len(self._areas) >= MAX_KNOWN_AREAS:
            self._areas.clear()
        self._areas[id(config), id(token)] = (config, token, fitting)
        return fitting

    def _area(self, config: Config, token: TokenLayout, num_rows: int) -> RingArea:
        return nvl_rings(
            self._start, config.num_channels, self._num_ranks, self._num_nodes, num_rows, token.token_bytes
        )

    def check(self, config: Config, token: TokenLayout) -> None:
        """Refuse a call whose rows do not fit the NVL bytes."""
        area = self.area_for(config, token)
        if area.num_rows < MIN_RING_ROWS:
            raise InvalidCall(
                f"num_nvl_bytes is {self.num_bytes}, too small for rings of {MIN_RING_ROWS} rows: this call"
                f" needs at least {least_bytes(area)} bytes; Config.get_nvl_buffer_size_hint tells a good"
                f" size"
            )


class NetworkRings:
    """The rings between nodes, in one rank's heap, where they begin at `start`."""

    def __init__(self, start: int, num_bytes: int, topology: Topology) -> None:
        self.num_bytes = num_bytes
        self.half_bytes = num_bytes // 2 // NUM_BUFFER_ALIGNMENT_BYTES * NUM_BUFFER_ALIGNMENT_BYTES
        self._start = start
        self._topology = topology
        self._areas: dict[tuple[Config, TokenLayout], RingArea] = {}

    def area_for(self, config: Config, token: TokenLayout) -> RingArea:
        known = self._areas.get((config, token))
        if known is None:
            wanted = self._wanted(config, token)
            known = replace(wanted, num_rows=ring_rows_that_fit(wanted, self.half_bytes))
            if len(self._areas) >= MAX_KNOWN_AREAS:
                self._areas.clear()
            self._areas[config, token] = known
        return known

    def _wanted(self, config: Config, token: TokenLayout) -> RingArea:
        return rdma_rings(
            "rdma receive",
            self._start,
            config.num_channels,
            self._topology.num_nodes,
            config.num_max_rdma_chunked_recv_tokens,
            token.token_bytes,
        )

    def check(self, config: Config, token: TokenLayout) -> None:
        """Refuse a call whose rows do not fit the RDMA bytes."""
        area = self.area_for(config, token)
        if area.num_rows < MIN_RING_ROWS:
            raise InvalidCall(
                f"num_rdma_bytes is {self.num_bytes}, too small for rings of {MIN_RING_ROWS} rows"
                f" between {self._topology.num_nodes} nodes: this call needs at least"
                f" {2 * least_bytes(area)} bytes;"
                f" Config.get_rdma_buffer_size_hint(..., ranks_per_node={self._topology.ranks_per_node})"
                f" tells a good size"
            )


class Rings:
    """All rings of a Buffer in normal mode; on one node there are no rings between nodes."""

    def __init__(self, node: NodeRings, network: NetworkRings | None = None) -> None:
        self.node = node
        self.network = network
        self._last: tuple[Config, TokenLayout, int] | None = None
        """What was last accepted, and its word in headers: most calls are like the one before."""

    def check(self, config: Config, token: TokenLayout) -> None:
        """Refuse a call whose rows do not fit the bytes of the Buffer."""
        last = self._last
        if last is not None and last[0] is config and last[1] is token:
            return
        if self.network is not None:
            self.network.check(config, token)
        self.node.check(config, token)
        self._last = config, token, self._header_word(config, token)

    def header_word(self, config: Config, token: TokenLayout) -> int:
        """The rows of both kinds of rings, as encoded in the header of a notify message."""
        last = self._last
        if last is not None and last[0] is config and last[1] is token:
            return last[2]
        return self._header_word(config, token)

    def _header_word(self, config: Config, token: TokenLayout) -> int:
        word = self.node.area_for(config, token).num_rows
        if self.network is not None:
            word |= self.network.area_for(config, token).num_rows << NETWORK_ROWS_SHIFT
        return word


def least_bytes(area: RingArea) -> int:
    """The fewest bytes that rings like these need."""
    per_ring = area.token_bytes * MIN_RING_ROWS + area.control_bytes
    return align(area.num_channels * area.num_peers * per_ring, NUM_BUFFER_ALIGNMENT_BYTES)


def part_offsets(token: TokenLayout) -> Array:
    """Where source meta, scales, ids and weights lie in a row of a ring, and the bytes of such a row."""
    parts = token.parts()
    offsets = np.cumsum(list(parts.values()))
    return np.array([*offsets[:4], token.token_bytes], np.int64)
