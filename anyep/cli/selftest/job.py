"""Whether a launcher has started this process as a rank of a job: torchrun, `anyep run`, or Slurm's srun."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

from anyep.errors import InvalidCall, NotSupported, whole_number

GROUP_TIMEOUT: Final = timedelta(minutes=10)
"""The longest that a rank may take longer than another one, for example to compile kernels."""
DEFAULT_PORT: Final = "29500"


@dataclass(frozen=True)
class Job:
    """This process as a rank of a job."""

    rank: int
    num_ranks: int
    local_rank: int
    address: str
    port: str


def job_of(environment: Mapping[str, str]) -> Job | None:
    """The job that this process is a rank of, or None.

    >>> job_of({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "5"})
    Job(rank=3, num_ranks=4, local_rank=1, address='a', port='5')
    >>> job_of({"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}), job_of({})
    (None, None)
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    elif _number(environment, "SLURM_STEP_NUM_TASKS", "1") > 1:
        # Of a step that srun has started; in the script of a batch job there is none.
        names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
    else:
        return None
    address = environment.get("MASTER_ADDR")
    if not address:
        raise InvalidCall(
            f"{names[1]} says that this is a rank of a job, but MASTER_ADDR is not set: unset {names[1]} if"
            " there is no job; ranks that srun starts need the name of the first host, as in"
            " export MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)"
        )
    rank, num_ranks, local_rank = (_number(environment, name, "0") for name in names)
    if rank >= num_ranks:
        raise InvalidCall(
            f"{names[0]} is {rank} and {names[1]} is {num_ranks}: ranks count from 0 to {names[1]} - 1;"
            " correct what starts the ranks"
        )
    port = str(_number(environment, "MASTER_PORT", DEFAULT_PORT))
    return Job(rank, num_ranks, local_rank, address, port)


def _number(environment: Mapping[str, str], name: str, otherwise: str) -> int:
    """The whole number in a launcher's variable."""
    text = environment.get(name, otherwise)
    if not text.strip().lstrip("-").isdecimal():
        raise InvalidCall(f"{name} is {text!r}: it must be a whole number; correct what starts the ranks")
    return whole_number(name, int(text), minimum=0)


@contextmanager
def joined(job: Job) -> Iterator[Any]:
    """The process group of all ranks of a job, over Gloo."""
    import torch.distributed as dist

    os.environ |= {
        "RANK": str(job.rank),
        "WORLD_SIZE": str(job.num_ranks),
        "MASTER_ADDR": job.address,
        "MASTER_PORT": job.port,
    }
    try:
        dist.init_process_group("gloo", timeout=GROUP_TIMEOUT)
    except (dist.DistError, ValueError) as error:
        raise NotSupported(
            f"rank {job.rank} of {job.num_ranks} cannot join the others at {job.address}:{job.port}"
            f" ({str(error).splitlines()[0]}): check MASTER_ADDR and MASTER_PORT, whether another program"
            " listens there, and whether all ranks were started"
        ) from error
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def new_store(job: Job) -> Any:
    """A store on the first rank of a job, at a free port, for further ranks that do not belong to the job."""
    import torch.distributed as dist

    return dist.TCPStore(job.address, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
