"""`Order` makes low-latency batches wait for those before them, captured ones in between or not."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from anyep.backends.cuda.moment import Moment
from anyep.backends.cuda.order import Order
from tests.support.depth import examples

COMMUNICATION_STREAM = 1
Launch = tuple[int, int]
"""The graph that a batch is captured in, 0 for none, and its stream."""


class Machine:
    """Streams and events: which batches are over when a batch starts."""

    def __init__(self) -> None:
        self.num_events = 0
        self.graph = 0
        self.over_on: dict[tuple[int, int], frozenset[int]] = {}
        """By graph and stream: the batches that later work there comes after."""
        self.over_at: dict[int, frozenset[int]] = {}
        """By event."""
        self.over_before: list[frozenset[int]] = []
        """By batch."""
        stream = SimpleNamespace(raw=COMMUNICATION_STREAM, raw_event=int, graph=lambda: self.graph)
        self.gpu: Any = SimpleNamespace(stream=stream, now=self.now)

    def now(self) -> int:
        self.num_events += 1
        return self.num_events

    def run(self, moment: Moment, values: Any) -> None:
        place = self.graph, moment.stream
        before = self.over_on.get(place, frozenset()) | self.over_at.get(moment.also_wait_for, frozenset())
        self.over_before.append(before)
        self.over_on[place] = before | {len(self.over_before) - 1}
        if moment.event_after:
            self.over_at[moment.event_after] = self.over_on[place]


def over_before(launches: Sequence[Launch]) -> list[frozenset[int]]:
    """The batches that are over when each of these starts."""
    machine = Machine()
    order, batch = Order(machine.gpu), machine
    for graph, stream in launches:
        machine.graph = graph
        order.run(batch, Moment(stream), {}, is_captured=graph != 0)  # type: ignore[arg-type]
    return machine.over_before


def test_a_captured_call_hides_no_earlier_one() -> None:
    assert over_before([(0, 2), (7, 3), (0, 4)])[2] == {0}


def test_a_launched_call_hides_no_captured_one() -> None:
    assert over_before([(7, 2), (0, 3), (7, 4)])[2] == {0}


@given(launches=st.lists(st.tuples(st.sampled_from([0, 0, 7]), st.integers(1, 4)), max_size=8))
@example(launches=[(0, 1), (0, 2), (0, 1)])
@examples(100, deep=1000)
def test_batches_run_in_the_order_of_their_launches(launches: list[Launch]) -> None:
    """Those outside of graphs after all that were launched there before, those of one graph likewise."""
    for index, before in enumerate(over_before(launches)):
        graph = launches[index][0]
        assert before == {other for other in range(index) if launches[other][0] == graph}
