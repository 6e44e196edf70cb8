"""`deep_ep.buffer`: where deep_ep defines its `Buffer`."""

from anyep import Buffer, Config, EventHandle, EventOverlap

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap"]
