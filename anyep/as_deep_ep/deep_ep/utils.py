"""`deep_ep.utils`: where deep_ep has its events."""

from anyep import Config, EventHandle, EventOverlap

__all__ = ["Config", "EventHandle", "EventOverlap"]
