"""`deep_ep.utils.event`: where deep_ep has its events since version 2."""

from anyep import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
