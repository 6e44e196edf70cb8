"""What the CPU does for the elastic API beside the calls of normal mode: it makes expanded rows of compact
ones and back, in the order of the calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from anyep.backends.cpu.expander import Expander
from anyep.backends.cpu.memory import WarmMemory
from anyep.backends.cpu.origins import tell_origins
from anyep.backends.cpu.stream import Stream
from anyep.backends.expanded import ExpertPlaces, Origins, OriginTensors, RowTensors
from anyep.events import EventHandle


class CpuElasticOps:
    """Runs work in the caller's thread, or beside it in the thread of the stream."""

    def __init__(self, stream: Stream, expander: Expander, memory: WarmMemory) -> None:
        self._stream = stream
        self._expander = expander
        self._memory = memory

    def follow(
        self, work: Callable[[], None], previous: Sequence[Any], run_async: bool
    ) -> EventHandle | None:
        events = [event for event in previous if event is not None]

        def after_events() -> None:
            for event in events:
                event.current_stream_wait()
            # The stream's thread has grad mode on, whatever the caller's thread has.
            with torch.no_grad():
                work()

        if run_async:
            return self._stream.submit(after_events)
        self._stream.run(after_events)
        return None

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self._memory.empty(shape, dtype)

    def tell_origins(self, origins: Origins, tensors: OriginTensors) -> None:
        tell_origins(origins, tensors)

    def place(
        self,
        ids: torch.Tensor,
        received: torch.Tensor,
        alignment: int,
        places: ExpertPlaces,
        expands: bool,
    ) -> None:
        fill = self._expander.place if expands else self._expander.count
        fill(ids, _num_rows(received, ids), alignment, places)

    def expand(
        self,
        compact: RowTensors,
        received: torch.Tensor,
        places: ExpertPlaces,
        expanded: RowTensors,
        padded_to: int,
    ) -> None:
        self._expander.expand(compact, _num_rows(received, compact.x), places, expanded, padded_to)

    def reduce(
        self, expanded: RowTensors, received: torch.Tensor, places: ExpertPlaces, compact: RowTensors
    ) -> None:
        self._expander.reduce(expanded, _num_rows(received, compact.x), places, compact)


def _num_rows(received: torch.Tensor, rows: torch.Tensor) -> int:
    """The received rows, at most those that there are: users hold these tensors."""
    return min(max(int(received[-1]), 0), rows.shape[0])
