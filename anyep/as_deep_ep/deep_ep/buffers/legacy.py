"""`deep_ep.buffers.legacy`: `Buffer`, which version 2 keeps."""

from anyep import Buffer, Config, EventHandle, EventOverlap

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap"]
