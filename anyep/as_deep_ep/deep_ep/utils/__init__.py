"""`deep_ep.utils`: events, and what programs that test and measure deep_ep import from here."""

from anyep import Config, EventHandle, EventOverlap

__all__ = ["Config", "EventHandle", "EventOverlap"]
