"""AnyEP moves the tokens of Mixture-of-Experts models to the ranks that hold their experts, and back.

Importing this package is cheap: it loads no torch, no Numba and touches no GPU.
"""

from __future__ import annotations

import sys

if sys.platform != "linux":
    raise ImportError(
        f"AnyEP runs on Linux only, and this is {sys.platform!r}: it shares memory between processes with"
        " memfd and pidfd. Use a Linux machine, a Linux container or virtual machine, or WSL 2 on Windows."
    )

from anyep.errors import (
    AnyEPError,
    BufferBroken,
    Disagreement,
    InvalidCall,
    NotSupported,
    PeerLost,
    WaitTimeout,
)
from anyep.sizes import Config
from anyep.version import __version__

__all__ = [
    "AnyEPError",
    "BufferBroken",
    "Config",
    "Disagreement",
    "InvalidCall",
    "NotSupported",
    "PeerLost",
    "WaitTimeout",
    "__version__",
]
