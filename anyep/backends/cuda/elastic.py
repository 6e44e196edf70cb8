"""What a GPU does for the elastic API beside the calls of normal mode: it makes expanded rows of compact ones
and back, in the order of the calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from anyep.backends.cuda import driver
from anyep.backends.cuda.batch import Batches, Recipes
from anyep.backends.cuda.expand_kernels import (
    ExpandKernels,
    inputs_of_moving,
    inputs_of_origins,
    inputs_of_placing,
)
from anyep.backends.cuda.gpu import Gpu
from anyep.backends.cuda.moment import Moment
from anyep.backends.expanded import ExpertPlaces, Origins, OriginTensors, RowTensors
from anyep.events import EventHandle

PROGRAMS_PER_SM: Final = 8


class GpuElasticOps:
    """Launches work on the caller's stream, or beside it on the communication stream.

    The host waits for nothing, so that calls can be captured in CUDA graphs.
    """

    def __init__(self, gpu: Gpu, batches: Batches, share_of_sms: int) -> None:
        """This rank has `share_of_sms` SMs of its GPU."""
        self._gpu = gpu
        self._batches = batches
        self._kernels = ExpandKernels(self._gpu.rounds_in_hardware)
        self._most_programs = PROGRAMS_PER_SM * share_of_sms
        self._captured: list[Callable[[], None]] = []
        """Work in the graph that is being captured."""
        self._running: list[tuple[EventHandle, Callable[[], None]]] = []
        """Asynchronous work, and the event after it: it holds tensors of the caller's stream."""

    def follow(
        self, work: Callable[[], None], previous: Sequence[Any], run_async: bool
    ) -> EventHandle | None:
        """Launch work after earlier calls, after the caller's earlier work, and after these events."""
        events = [event for event in previous if event is not None]
        stream = self._gpu.stream
        self._let_go()
        with torch.no_grad():
            if not run_async:
                # The caller's stream waits for the call before this work.
                for event in events:
                    event.current_stream_wait()
                work()
                return None
            # The memory of results may still be used by the caller's work.
            stream.begin(None)
            with self._gpu.on_communication_stream():
                for event in events:
                    event.current_stream_wait()
                work()
        end = stream.end(True)
        assert end is not None
        if stream.is_capturing():
            self._captured.append(work)
        else:
            self._running.append((end, work))
        return end

    def _let_go(self) -> None:
        """Drop the tensors of work that is done."""
        if self._gpu.stream.is_capturing():
            return
        self._captured.clear()
        if self._running:
            self._running = [(end, work) for end, work in self._running if not _has_come(end)]

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self._gpu.empty(shape, dtype)

    def tell_origins(self, origins: Origins, tensors: OriginTensors) -> None:
        """Fill the tensors. Ids that are no experts are passed over: other kernels report them."""
        kernels, num_ranks = self._kernels, origins.send_head.shape[1]
        recipes = (
            (kernels.tell_origins, num_ranks, tensors.kept_ids is None),
            (kernels.order_ranks, num_ranks),
        )
        self._run(recipes, inputs_of_origins(origins, tensors))

    def place(
        self,
        ids: torch.Tensor,
        received: torch.Tensor,
        alignment: int,
        places: ExpertPlaces,
        expands: bool,
    ) -> None:
        """Fill the places from the local ids of the received rows. If they are not expanded there are no
        positions, and `ends` are the inclusive prefix sums of the aligned counts."""
        kernels, sizes = self._kernels, (ids.shape[1], len(places.counts))
        counting = (kernels.count_tiles, *sizes), (kernels.add_tiles, *sizes)
        values = inputs_of_placing(_last(received), ids, places, alignment)
        self._run((*counting, (kernels.place_by_expert, *sizes, expands)), values)

    def expand(
        self,
        compact: RowTensors,
        received: torch.Tensor,
        places: ExpertPlaces,
        expanded: RowTensors,
        padded_to: int,
    ) -> None:
        """Write the copies of the received rows; if `padded_to` is the alignment of the groups, their padding
        becomes 0."""
        num_scales = compact.scales.shape[1] if compact.scales is not None else 0
        row_words = compact.x.shape[1] * compact.x.element_size() // 4
        sizes = places.positions.shape[1], len(places.counts), row_words
        recipe = (
            *(self._kernels.expand_rows, *sizes),
            *(compact.weights is not None, num_scales, padded_to > 1),
        )
        of_call = compact, expanded, max(padded_to, 1), self._most_programs
        self._run((recipe,), inputs_of_moving(_last(received), places, *of_call))

    def reduce(
        self, expanded: RowTensors, received: torch.Tensor, places: ExpertPlaces, compact: RowTensors
    ) -> None:
        """Add up the copies of the received rows, and gather their weights."""
        x, num_topk = expanded.x, places.positions.shape[1]
        recipe = (self._kernels.reduce_expanded, num_topk, x.shape[1], x.dtype, expanded.weights is not None)
        of_call = compact, expanded, 1, self._most_programs
        self._run((recipe,), inputs_of_moving(_last(received), places, *of_call))

    def _run(self, recipes: Recipes, values: dict[str, Any]) -> None:
        self._batches.run(recipes, Moment(self._gpu.stream.caller()), values)


def _has_come(event: EventHandle) -> bool:
    if event.moment is None:
        return True
    # Another thread may be capturing a graph.
    with driver.relaxed():
        return bool(event.moment.query())


def _last(received: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Where the number of received rows is."""
    return received, received.shape[0] - 1
