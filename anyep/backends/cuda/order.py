"""Runs the kernels of low-latency calls in the order in which the host launches them."""

from __future__ import annotations

import threading
from typing import Any, Final

from anyep.backends.cuda.batch import Prepared
from anyep.backends.cuda.gpu import Gpu
from anyep.backends.cuda.moment import Moment

UNKNOWN_GRAPH: Final = -1


class Order:
    """Makes batches run in the order in which the host launches them, whatever their streams."""

    def __init__(self, gpu: Gpu) -> None:
        self._stream = gpu.stream
        self.done = gpu.now()
        """An event after the last batch outside of graphs."""
        self._done_in_graph = gpu.now()
        self._raw_done = gpu.stream.raw_event(self.done)
        self._raw_done_in_graph = gpu.stream.raw_event(self._done_in_graph)
        self._last_stream: int = gpu.stream.raw
        """That of the last batch outside of graphs."""
        self._last_in_graph: tuple[int, int] = (UNKNOWN_GRAPH, gpu.stream.raw)
        """The graph that the last captured batch belongs to, and its stream."""
        self._lock = threading.Lock()

    def run(self, batch: Prepared, moment: Moment, values: Any, is_captured: bool) -> None:
        """Run a batch after everything that was launched before; an event follows it, for which the stream
        waits that waits for the end of `moment`. `is_captured`: in the graph that is being captured."""
        stream, event_before, stream_before, _, _, stream_after = moment
        with self._lock:
            if is_captured:
                self._run_captured(batch, moment, values)
                return
            # Whatever was captured meanwhile: a graph does not wait for what ran before it.
            done = self._raw_done
            also = done if stream != self._last_stream else 0
            batch.run(Moment(stream, event_before, stream_before, also, done, stream_after), values)
            self._last_stream = stream

    def _run_captured(self, batch: Prepared, moment: Moment, values: Any) -> None:
        graph, stream = self._stream.graph() or UNKNOWN_GRAPH, moment.stream
        # A graph can only wait for its own work; the caller orders its replays.
        last_graph, last_stream = self._last_in_graph
        is_elsewhere = graph == last_graph != UNKNOWN_GRAPH and stream != last_stream
        done = self._raw_done_in_graph
        also = done if is_elsewhere else 0
        batch.run(moment._replace(also_wait_for=also, event_after=done), values)
        self._last_in_graph = graph, stream
