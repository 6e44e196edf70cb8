"""Whether GPUs reach each other's memory: decides where a Buffer's heap is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import torch

from anyep.backends.cuda import driver

MAPS_MEMORY: Final = 102
"""The attribute of a GPU whose memory can be mapped (CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_...)."""
SHARES_MEMORY: Final = 103
"""The attribute of one whose memory other processes can open (..._HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_...)."""


def why_not_shared(index: int, identities: Iterable[str]) -> str:
    """Why a GPU of this process cannot use the memory of the GPUs with these identities, or they not its
    own; empty if CUDA names no reason. CUDA cannot be asked about GPUs that this process does not see."""
    for attribute in (MAPS_MEMORY, SHARES_MEMORY):
        if not driver.attribute(attribute, index):
            return f"the memory of GPU {index} cannot be shared with other processes on this system"
    for peer in sorted(_visible(identities)):
        if peer != index and not can_reach_both_ways(index, peer):
            return f"GPU {index} and GPU {peer} cannot reach each other's memory"
    return ""


def can_reach_both_ways(index: int, peer: int) -> bool:
    can_reach = torch.cuda.can_device_access_peer
    return bool(can_reach(index, peer) and can_reach(peer, index))


def _visible(identities: Iterable[str]) -> Iterator[int]:
    """The indices of the GPUs with these identities that this process sees."""
    wanted = set(identities)
    for index in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(index).uuid) in wanted:
            yield index
