"""How ranks find each other: a torch process group, or an mpi4py communicator, as one small interface.

It is used when a Buffer is made, never on the path of a call.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anyep.errors import InvalidCall


@dataclass(frozen=True)
class Rendezvous:
    """`all_gather(thing)` gives the list of every rank's thing, in rank order."""

    rank: int
    num_ranks: int
    all_gather: Callable[[Any], list[Any]]


def rendezvous_of(group: Any, comm: Any) -> Rendezvous:
    """The rendezvous of a torch process group, or of an mpi4py communicator where there is no group."""
    if group is None and comm is None:
        raise InvalidCall(
            "neither a group nor a comm is given: pass a torch process group, such as dist.group.WORLD"
        )
    if group is None:
        for name in ("Get_rank", "Get_size", "allgather"):
            if not hasattr(comm, name):
                raise InvalidCall(f"comm is of type {type(comm).__name__}: pass an mpi4py communicator")
        return Rendezvous(comm.Get_rank(), comm.Get_size(), comm.allgather)
    import torch.distributed as dist

    if not isinstance(group, dist.ProcessGroup):
        raise InvalidCall(
            f"group is of type {type(group).__name__}: pass a torch process group of which"
            f" this rank is a member"
        )

    def all_gather(thing: Any) -> list[Any]:
        things: list[Any] = [None] * group.size()
        dist.all_gather_object(things, thing, group=group)
        return things

    return Rendezvous(group.rank(), group.size(), all_gather)


def host_identity() -> str:
    """The same for processes that run under one kernel, different on different hosts."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot}"
