"""Engines that put bytes and signals into the memory of ranks on other hosts.

An engine is a class with the methods of `NixlEngine`; the modes use no other methods.
"""

from anyep.transport.nixl import NixlEngine

__all__ = ["NixlEngine"]
