"""GB/s of this machine's links, as its own tools report them: `nvidia-smi nvlink --status` and `ibstat`.

A rate that no tool reports is 0.
"""

from __future__ import annotations

import functools
import re
import subprocess
from typing import Final

NIC_NAME: Final = "mlx5_0"
USABLE_SHARE: Final = 0.9
"""What a program gets of the rates that NVLink's lines have."""
FAST_ATOMICS: Final = "MT4131"
"""The type of adapter whose remote atomics are fast."""
COMMAND_TIMEOUT_S: Final = 10.0


@functools.cache
def nvlink_gbs(share: float = USABLE_SHARE) -> float:
    """The rate of all of the first GPU's links together, times a share of it."""
    return share * nvlink_gbs_of(_output_of("nvidia-smi", "nvlink", "--status"))


@functools.cache
def rdma_gbs(nic_name: str = NIC_NAME) -> float:
    """The rate of a network adapter."""
    return rdma_gbs_of(_output_of("ibstat"), nic_name)


@functools.cache
def has_fast_atomics(nic_name: str = NIC_NAME) -> bool:
    """Whether an adapter is of the type whose remote atomics are fast."""
    return _field_of_adapter(_output_of("ibstat"), nic_name, "CA type") == FAST_ATOMICS


def nvlink_gbs_of(status: str) -> float:
    """The sum of the first GPU's lines; 0 if there are none.

    >>> nvlink_gbs_of("GPU 0: H100\\n Link 0: 26.5 GB/s\\n Link 1: 26.5 GB/s\\nGPU 1: H100\\n Link 0: 9 GB/s")
    53.0
    >>> nvlink_gbs_of("no links")
    0
    """
    first = re.split(r"^GPU \d+:", status, flags=re.MULTILINE)[1:2]
    return sum(float(rate) for rate in re.findall(r"Link \d+: *([\d.]+) GB/s", "".join(first)))


def rdma_gbs_of(status: str, nic_name: str) -> float:
    """The rate of an adapter's port, which `ibstat` tells in Gbit/s; 0 if there is no such adapter.

    >>> rdma_gbs_of("CA 'mlx5_0'\\n CA type: MT4129\\n Port 1:\\n  Rate: 400\\nCA 'mlx5_1'\\n", "mlx5_0")
    50.0
    >>> rdma_gbs_of("", "mlx5_0")
    0.0
    """
    rate = _field_of_adapter(status, nic_name, "Rate")
    return int(rate) / 8 if rate.isdigit() else 0.0


def _field_of_adapter(status: str, nic_name: str, field: str) -> str:
    found = ""
    for part in re.split(r"^CA ", status, flags=re.MULTILINE):
        if part.startswith(f"'{nic_name}'") and (match := re.search(rf"{field}: *(\S+)", part)):
            found = match[1]
    return found


def _output_of(*command: str) -> str:
    """The output of a command; empty if it is missing, fails or hangs."""
    try:
        finished = subprocess.run(
            command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return finished.stdout
