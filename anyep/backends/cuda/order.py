"""Runs the kernels of low-latency calls in the order in which the host launches them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final

from anyep.backends.cuda.gpu import Gpu

UNKNOWN_GRAPH: Final = -1
Launch = Callable[[Any], None]


class Order:
    """Makes kernels run in the order in which the host launches them, whatever their streams."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self.done = gpu.now()
        """An event after the last launch outside of graphs."""
        self._done_in_graph = gpu.now()
        self._last: tuple[int, Any] = (0, gpu.stream.stream)
        """The graph that the last launch was captured in, 0 for none, and its stream."""
        self._lock = threading.Lock()

    def run(self, stream: Any, launch: Launch) -> None:
        """Launch kernels on a stream, after everything that was launched before."""
        with self._lock:
            graph = 0
            if self._gpu.stream.is_capturing():
                graph = self._gpu.stream.graph() or UNKNOWN_GRAPH
            last_graph, last_stream = self._last
            done = self._done_in_graph if graph else self.done
            # A graph can only wait for its own work; the caller orders its replays.
            if graph == last_graph != UNKNOWN_GRAPH and stream != last_stream:
                stream.wait_event(done)
            launch(stream)
            done.record(stream)
            self._last = (graph, stream)
