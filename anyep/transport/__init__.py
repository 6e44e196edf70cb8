"""Engines that put bytes and signals into the memory of ranks on other hosts.

`base.py` says what an engine is; the modes never see one.
"""

from anyep.transport.nixl import NixlEngine

__all__ = ["NixlEngine"]
