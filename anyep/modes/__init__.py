"""The protocol of each mode, written once for every backend."""
