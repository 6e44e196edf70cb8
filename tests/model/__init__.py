"""Explicit-state models of the protocols, and the explorer that checks them."""
