"""Arithmetic and types that every layer uses: no effects, and nothing that needs a device."""
