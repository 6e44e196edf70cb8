"""`deep_ep.utils.comm`: the communicator of NCCL behind a group. AnyEP itself uses none."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from anyep import NotSupported


class NCCLCommHandle:
    """A communicator that torch owns."""

    def __init__(self, nccl_comm: int, managed: bool) -> None:
        self.nccl_comm = nccl_comm
        self.managed = managed
        """Whether it ends with this handle; those of torch do not."""

    def get(self) -> int:
        """The communicator's address."""
        return self.nccl_comm


def get_nccl_comm_handle(group: dist.ProcessGroup, force_new_comm: bool = False) -> NCCLCommHandle:
    """The communicator that torch has made for a group on this rank's GPU."""
    if force_new_comm:
        raise NotSupported(
            "AnyEP makes no communicators of NCCL: call get_nccl_comm_handle without force_new_comm, or make"
            " one with NCCL itself"
        )
    backend: Any = None
    if "nccl" in dist.get_backend_config(group):
        backend = group._get_backend(torch.device("cuda"))
    address = backend._comm_ptr() if hasattr(backend, "_comm_ptr") else 0
    if not address:
        raise NotSupported(
            "this group has no communicator of NCCL: make it with backend='nccl' and device_id, or run a"
            " collective on GPU tensors first"
        )
    return NCCLCommHandle(address, managed=False)


def destroy_all_managed_nccl_comm() -> None:
    """Destroy the communicators that were made here: there are none, as they are all torch's."""
