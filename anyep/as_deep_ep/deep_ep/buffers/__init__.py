"""`deep_ep.buffers`: where deep_ep has its classes since version 2."""
