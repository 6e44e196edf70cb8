"""What a rank has sent: rows and bytes to every rank, in each mode, by kind of byte.

    before = buffer.runtime.traffic.copy()
    ...
    sent = buffer.runtime.traffic - before
    sent.normal.payload_bytes[3]                 # the data of rows, to rank 3
    sent.low_latency.by_link()["between nodes"]

"Sent" means moved from this rank's memory to the other rank's: also where the other rank reads it from here.
A row that a relay passes on is sent twice, by its source and by the relay. Counters (tails, heads, arrivals)
are not counted, since how often they are stored depends on timing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from anyep.core.calls import Array
from anyep.topology import Topology

SAME_RANK: Final = "same rank"
WITHIN_NODE: Final = "within the node"
BETWEEN_NODES: Final = "between nodes"
LINKS: Final = (SAME_RANK, WITHIN_NODE, BETWEEN_NODES)


class Amount(NamedTuple):
    """Rows, the bytes of their data, the bytes beside it (source, scales, ids, weights, padding), and the
    bytes of messages (notify messages, counts, completion records, lists of tokens)."""

    rows: int
    payload_bytes: int
    beside_bytes: int
    message_bytes: int

    @property
    def num_bytes(self) -> int:
        return self.payload_bytes + self.beside_bytes + self.message_bytes


def link_between(topology: Topology, source: int, destination: int) -> str:
    """What joins two ranks.

    >>> [link_between(Topology(4, 2), 0, rank) for rank in (0, 1, 2)]
    ['same rank', 'within the node', 'between nodes']
    """
    if source == destination:
        return SAME_RANK
    is_near = source // topology.ranks_per_node == destination // topology.ranks_per_node
    return WITHIN_NODE if is_near else BETWEEN_NODES


class Sent:
    """What one rank has sent in one mode: an `Amount` for every rank, as four arrays.

    >>> sent = Sent(Topology(4, 2), rank=0)
    >>> sent.add_rows([1, 2], 3, payload_bytes=100, beside_bytes=20)
    >>> sent.by_link()["between nodes"]
    Amount(rows=3, payload_bytes=300, beside_bytes=60, message_bytes=0)
    """

    def __init__(self, topology: Topology, rank: int, words: Array | None = None) -> None:
        self.topology = topology
        self.rank = rank
        self.words: Array = np.zeros((4, topology.num_ranks), np.int64) if words is None else words
        """[4, ranks]: the words of an `Amount` for every rank, to which kernels add."""
        self._bytes_to_all = 0

    @property
    def rows(self) -> Array:
        words: Array = self.words[0]
        return words

    @property
    def payload_bytes(self) -> Array:
        words: Array = self.words[1]
        return words

    @property
    def beside_bytes(self) -> Array:
        words: Array = self.words[2]
        return words

    @property
    def message_bytes(self) -> Array:
        words: Array = self._totals()[3]
        return words

    def _totals(self) -> Array:
        """A copy of the words, with the messages to all ranks."""
        totals = self.words.copy()
        totals[3] += self._bytes_to_all
        return totals

    def add_rows(self, ranks: object, counts: object, payload_bytes: int, beside_bytes: Array | int) -> None:
        """Count rows to some ranks (an index or a list of them), and the bytes of each row."""
        counts = np.asarray(counts, np.int64)
        self.words[0, ranks] += counts  # type: ignore[index]
        self.words[1, ranks] += counts * payload_bytes  # type: ignore[index]
        self.words[2, ranks] += counts * beside_bytes  # type: ignore[index]

    def add_message(self, ranks: object, num_bytes: object) -> None:
        """Count bytes of messages to some ranks."""
        self.words[3, ranks] += num_bytes  # type: ignore[index]

    def add_message_to_all(self, num_bytes: int) -> None:
        """Count bytes of a message to every rank. Every call sends one, so this adds a single number."""
        self._bytes_to_all += num_bytes

    def by_link(self) -> dict[str, Amount]:
        """The sums over the ranks that are reached by each kind of link."""
        links = np.array(
            [LINKS.index(link_between(self.topology, self.rank, rank)) for rank in range(len(self.rows))]
        )
        totals = self._totals()
        return {
            link: Amount(*(int(words[links == number].sum()) for words in totals))
            for number, link in enumerate(LINKS)
        }

    def copy(self) -> Sent:
        return Sent(self.topology, self.rank, self._totals())

    def __sub__(self, earlier: Sent) -> Sent:
        return Sent(self.topology, self.rank, self._totals() - earlier._totals())


@dataclass
class Traffic:
    """What this rank has sent since its Buffer was made. Ranks on a CPU count; those on a GPU do not yet."""

    normal: Sent
    low_latency: Sent

    @classmethod
    def of(cls, topology: Topology, rank: int) -> Traffic:
        """Nothing yet."""
        return cls(Sent(topology, rank), Sent(topology, rank))

    def copy(self) -> Traffic:
        return Traffic(self.normal.copy(), self.low_latency.copy())

    def __sub__(self, earlier: Traffic) -> Traffic:
        return Traffic(self.normal - earlier.normal, self.low_latency - earlier.low_latency)

    # Sums over normal mode

    @property
    def rows_within_node(self) -> int:
        """Rows to ranks of this node, this one included."""
        return self._sum(0, WITHIN_NODE, SAME_RANK)

    @property
    def bytes_within_node(self) -> int:
        """The data of those rows."""
        return self._sum(1, WITHIN_NODE, SAME_RANK)

    @property
    def rows_between_nodes(self) -> int:
        return self._sum(0, BETWEEN_NODES)

    @property
    def bytes_between_nodes(self) -> int:
        """Those rows with everything beside them."""
        return self._sum(1, BETWEEN_NODES) + self._sum(2, BETWEEN_NODES)

    def _sum(self, word: int, *links: str) -> int:
        by_link = self.normal.by_link()
        return sum(by_link[link][word] for link in links)
