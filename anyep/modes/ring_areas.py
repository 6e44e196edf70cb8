"""The rings of normal-mode calls: as many rows as the config asks for, or as `num_nvl_bytes` holds."""

from __future__ import annotations

from anyep.layout import RingArea, nvl_rings, ring_rows_that_fit
from anyep.sizes import Config, TokenLayout

MAX_KNOWN_AREAS = 64


class RingAreas:
    """The rings within a node, in one rank's heap, where they begin at `start`."""

    def __init__(self, start: int, num_bytes: int, num_ranks: int, num_nodes: int = 1) -> None:
        self._start = start
        self._num_bytes = num_bytes
        self._num_ranks = num_ranks
        self._num_nodes = num_nodes
        self._areas: dict[tuple[int, int], tuple[Config, TokenLayout, RingArea]] = {}

    def area_for(self, config: Config, token: TokenLayout) -> RingArea:
        # Calls of one kind come with the very same config and layout, so their identity is key enough; an
        # entry keeps both alive.
        known = self._areas.get((id(config), id(token)))
        if known is not None:
            return known[2]
        wanted = self._area(config, token, config.num_max_nvl_chunked_recv_tokens)
        fitting = self._area(config, token, ring_rows_that_fit(wanted, self._num_bytes))
        if len(self._areas) >= MAX_KNOWN_AREAS:
            self._areas.clear()
        self._areas[id(config), id(token)] = (config, token, fitting)
        return fitting

    def _area(self, config: Config, token: TokenLayout, num_rows: int) -> RingArea:
        return nvl_rings(
            self._start, config.num_channels, self._num_ranks, self._num_nodes, num_rows, token.token_bytes
        )
