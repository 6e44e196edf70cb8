"""`deep_ep.utils.envs`: what test programs call before anything else, and the rates of links."""

from __future__ import annotations

import os
import random
import sys
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist

from anyep.link_rates import NIC_NAME, USABLE_SHARE, has_fast_atomics, nvlink_gbs, rdma_gbs
from anyep.settings import DEVICE


@dataclass
class _Job:
    """What this process was told."""

    local_rank: int = 0
    local_seed: int = 0
    global_seed: int = 0


_JOB: Final = _Job()


def init_dist(local_rank: int, num_local_ranks: int, seed: int = 0) -> tuple[int, int, dist.ProcessGroup]:
    """Join the job: returns rank, number of ranks and a group of all ranks.

    The environment tells `MASTER_ADDR` (127.0.0.1), `MASTER_PORT` (8361), and in `WORLD_SIZE` (1) and `RANK`
    (0) the number of nodes and this node's. New tensors are bfloat16, and on the GPU where Buffers are, too.
    The group is NCCL's where each rank has a GPU of its own, else Gloo's.
    """
    _JOB.local_rank = local_rank
    device = _device_of(local_rank)
    has_own_gpu = device.type == "cuda" and num_local_ranks <= torch.cuda.device_count()
    num_ranks = num_local_ranks * int(os.environ.get("WORLD_SIZE", "1"))
    address, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), os.environ.get("MASTER_PORT", "8361")
    dist.init_process_group(
        "nccl" if has_own_gpu else "gloo",
        init_method=f"tcp://{address}:{port}",
        world_size=num_ranks,
        rank=num_local_ranks * int(os.environ.get("RANK", "0")) + local_rank,
        device_id=device if has_own_gpu else None,
    )
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device(device.type)
    init_seed(seed)
    group = dist.new_group(list(range(num_ranks)))
    assert isinstance(group, dist.ProcessGroup)
    return dist.get_rank(), num_ranks, group


def _device_of(local_rank: int) -> torch.device:
    """The CPU, or this rank's GPU, which becomes the current one. Ranks share GPUs if there are fewer."""
    chosen = DEVICE.choose().value or ("cuda" if torch.cuda.is_available() else "cpu")
    if not chosen.startswith("cuda"):
        return torch.device("cpu")
    index = local_rank % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def init_seed(global_seed: int) -> None:
    """Seed torch and `random` with the sum of a seed and the rank."""
    _JOB.global_seed, _JOB.local_seed = global_seed, global_seed + dist.get_rank()
    torch.manual_seed(_JOB.local_seed)
    random.seed(_JOB.local_seed)


def get_global_seed() -> int:
    """The seed that all ranks share."""
    return _JOB.global_seed


def get_local_seed() -> int:
    """The seed of this rank."""
    return _JOB.local_seed


def dist_print(s: str = "", once_in_node: bool = False) -> None:
    """Print on every rank, or on the first one of each node, and wait for all ranks."""
    if not once_in_node or _JOB.local_rank == 0:
        # In one write, since ranks share a terminal.
        sys.stdout.write(f"{s}\n")
        sys.stdout.flush()
    dist.barrier()


def get_nvlink_gbs(factor: float = USABLE_SHARE) -> float:
    """The rate of the first GPU's NVLink in GB/s, times a factor; 0 if nvidia-smi reports none."""
    return nvlink_gbs(factor)


def get_rdma_gbs(nic_name: str = "") -> float:
    """The rate of a network adapter (`EP_NIC_NAME`, mlx5_0) in GB/s; 0 if ibstat reports none."""
    return rdma_gbs(nic_name or _default_nic())


def check_fast_rdma_atomic_support(nic_name: str = "") -> bool:
    """Whether an adapter is of the type whose remote atomics are fast."""
    return has_fast_atomics(nic_name or _default_nic())


def _default_nic() -> str:
    return os.environ.get("EP_NIC_NAME", NIC_NAME)
