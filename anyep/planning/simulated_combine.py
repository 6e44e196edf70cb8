"""A combine in virtual time: the way back of a dispatch, whose experts' outputs lie in windows.

    result = simulate_combine(units, shape, speeds)

The state machine is that of a combine by windows (`Combine` in `tests/model/relay.py`): a relay *sends* the
sum of a token's rows on its node into the ring at the token's source, while that has room; a source *adds* up
its tokens in order, each once the sums of all nodes are there. Rows move in chunks of consecutive tokens, and
each step takes time; a test replays runs with chunks of one token in the model.

Every rank has a worker for each channel, which sums rows for other nodes and adds up own tokens. It reads
rows over NVLink. Sums of other nodes take it no time: the rate of relays was fitted to the rows alone.
"""

from __future__ import annotations

from anyep.planning.virtual_time import Ranks, Result, Shape, Speeds, Trouble, Units

SUMMED, ARRIVED, ADDED, CREDITED = range(4)


def simulate_combine(
    units: Units,
    shape: Shape,
    speeds: Speeds,
    trouble: Trouble | None = None,
    watch: int = 0,
    with_steps: bool = False,
) -> Result:
    """Run one combine to its end, or until nothing can move; the units are those of its dispatch."""
    return _Combine(units, shape, speeds, trouble or Trouble(), watch, with_steps).result()


class _Combine(Ranks):
    """One combine. A lane's ring for another node holds the sums from its relay there."""

    def __init__(
        self, units: Units, shape: Shape, speeds: Speeds, trouble: Trouble, watch: int, with_steps: bool
    ) -> None:
        super().__init__(units, shape, speeds, trouble, watch, with_steps)
        # Relays: by lane and the node of the source
        self.sent = [0] * (self.lanes * self.nodes)
        self.in_ring = [0] * (self.lanes * self.nodes)
        self.worker_is_free = [True] * self.lanes
        self.next_sent = [lane // self.channels // self.per_node for lane in range(self.lanes)]
        # Sources
        self.unit_at = self._units_by_chunk()
        self.arrived: list[set[int]] = [set() for _ in range(self.lanes)]
        self.next_added = [0] * self.lanes

    def _units_by_chunk(self) -> list[dict[int, list[tuple[int, int]]]]:
        """[lane]: for each chunk, (node, unit) of its rows on all nodes that have some."""
        by_lane: list[dict[int, list[tuple[int, int]]]] = [{} for _ in range(self.lanes)]
        for number, units in enumerate(self.units.lists):
            lane, node = divmod(number, self.nodes)
            for unit in units:
                by_lane[lane].setdefault(self.units.chunk[unit], []).append((node, unit))
        return by_lane

    def result(self) -> Result:
        self.now = self.begin_us()
        for lane in range(self.lanes):
            self._go_on(lane)
        self.run((self._summed, self._arrive, self._added, self._credited))
        return self.report(self._stuck())

    def _go_on(self, lane: int) -> None:
        """Begin what a free worker can do: own tokens first, whose rings others wait for."""
        if self.worker_is_free[lane] and not self._begin_to_add(lane):
            self._try_send(lane)

    def _try_send(self, lane: int) -> None:
        """Begin to sum the next unit of a source on another node whose ring has room."""
        rank = lane // self.channels
        own, waiting = rank // self.per_node, False
        for step in range(self.nodes):
            node = (self.next_sent[lane] + step) % self.nodes
            if node == own:
                continue
            at = lane * self.nodes + node
            units = self.units.lists[self._relay_lane(lane, node) * self.nodes + own]
            if self.sent[at] == len(units):
                continue
            unit = units[self.sent[at]]
            tokens = self.units.tokens[unit]
            if self.in_ring[at] + tokens > self.shape.net_rows:
                waiting = True
                continue
            self.sent[at] += 1
            self.in_ring[at] += tokens
            self.next_sent[lane] = node + 1
            self.worker_is_free[lane] = False
            self._unblock("relay", lane)
            there = self._read(rank, unit)
            took = sum(self.units.rows[unit]) * self.relay_us[rank] * next(self.chance)
            self._work("relay", rank, self.now, self.now + took)
            self._note(rank, "send", self.units.source[unit])
            self._post(max(there, self.now + took), SUMMED, lane, node, unit)
            return
        self._block("relay", lane, waiting)

    def _read(self, rank: int, unit: int) -> float:
        """When all rows of a unit have come from the ranks of this node."""
        first, there = rank - rank % self.per_node, self.now
        for index, rows in enumerate(self.units.rows[unit]):
            if rows:
                there = max(there, self._over_nvlink(first + index, rank, rows))
        return there

    def _summed(self, lane: int, node: int, unit: int) -> None:
        """The NIC takes the sums; their source has them after the wire."""
        self.worker_is_free[lane] = True
        rank, source = lane // self.channels, self.units.source[unit]
        there = self._over_network(rank, source, self.units.tokens[unit])
        self._post(there, ARRIVED, self._relay_lane(lane, node), rank // self.per_node, unit)
        self._go_on(lane)

    def _arrive(self, lane: int, node: int, unit: int) -> None:
        self.arrived[lane].add(unit)
        self._go_on(lane)

    def _begin_to_add(self, lane: int) -> bool:
        """Begin to add up the next chunk of own tokens, if all sums are there."""
        chunk = self.next_added[lane]
        if chunk == self.units.num_chunks[lane]:
            return False
        rank = lane // self.channels
        own, took, there = rank // self.per_node, 0.0, self.now
        parts = self.unit_at[lane].get(chunk, [])
        if any(node != own and unit not in self.arrived[lane] for node, unit in parts):
            return False
        for node, unit in parts:
            if node == own:
                took += sum(self.units.rows[unit]) * self.relay_us[rank]
                there = self._read(rank, unit)
        self.worker_is_free[lane] = False
        self._unblock("relay", lane)
        took *= next(self.chance)
        if parts:
            self._work("receive", rank, self.now, self.now + took)
        self._post(max(there, self.now + took), ADDED, lane, chunk, 0)
        return True

    def _added(self, lane: int, chunk: int, _: int) -> None:
        """The rings of this chunk's sums have room again."""
        rank = lane // self.channels
        own = rank // self.per_node
        for node, unit in self.unit_at[lane].get(chunk, []):
            if node != own:
                self.arrived[lane].remove(unit)
                later = self.now + self.speeds.network_latency_us
                self._post(later, CREDITED, self._relay_lane(lane, node), own, unit)
        if chunk in self.unit_at[lane]:
            self.finished[rank] = max(self.finished[rank], self.now)
        self.worker_is_free[lane] = True
        self.next_added[lane] = chunk + 1
        self._note(rank, "add", rank)
        self._go_on(lane)

    def _credited(self, lane: int, node: int, unit: int) -> None:
        self.in_ring[lane * self.nodes + node] -= self.units.tokens[unit]
        self._go_on(lane)

    def _stuck(self) -> tuple[str, ...]:
        """What the lanes that are not finished wait for."""
        return tuple(
            f"rank {lane // self.channels}, channel {lane % self.channels}, waits for the sums of its chunk"
            f" {self.next_added[lane]}"
            for lane in range(self.lanes)
            if self.next_added[lane] < self.units.num_chunks[lane]
        )
