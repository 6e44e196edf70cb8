"""Results of asynchronous calls that are not complete yet: a later call that reads one on the host waits."""

from __future__ import annotations

from typing import Any

import torch

from anyep.events import EventHandle


class Unfilled:
    """Tensors that calls under way will fill, by address, with the events after which they are filled."""

    def __init__(self) -> None:
        self._events: dict[int, EventHandle] = {}

    def add(self, tensor: torch.Tensor, event: EventHandle) -> None:
        """Remember that a tensor is not filled before an event."""
        if event.finished is None:
            # On a GPU a kernel reads it, in stream order.
            return
        self._events = {at: other for at, other in self._events.items() if not other.is_finished}
        self._events[tensor.data_ptr()] = event

    def wait_for(self, tensor: Any) -> None:
        """Return when a tensor is filled; an argument of another type is refused elsewhere."""
        if self._events and isinstance(tensor, torch.Tensor):
            event = self._events.pop(tensor.data_ptr(), None)
            if event is not None:
                event.current_stream_wait()

    def wait_for_handle(self, handle: Any, part: int) -> None:
        """Return when a handle is filled; one part of it stands for all."""
        if self._events and isinstance(handle, tuple | list) and len(handle) > part:
            self.wait_for(handle[part])
