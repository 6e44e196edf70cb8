"""GPUs for the commands that start ranks: how many there are, and how to share one.

Neither the command nor the server that its ranks are forked from opens a GPU: a forked rank could not use a
GPU context of its parent. Each rank takes its own GPU, after it has received the environment of the service
by which several ranks share a GPU.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Final

from anyep.cli.interrupts import raise_from_here_on
from anyep.errors import InvalidCall, NotSupported

DEVICES: Final = ("cpu", "cuda")


@dataclass(frozen=True)
class Placement:
    """Where ranks run: on `num_gpus` GPUs in turn, or on the CPU if that is 0; and their environment.

    >>> Placement(num_gpus=2).ranks_on_a_gpu(5), [Placement(num_gpus=2).gpu_of(rank) for rank in range(5)]
    (3, [0, 1, 0, 1, 0])
    """

    num_gpus: int = 0
    environment: dict[str, str] = field(default_factory=dict)

    def gpu_of(self, rank: int) -> int:
        return rank % self.num_gpus

    def ranks_on_a_gpu(self, num_ranks: int) -> int:
        """The number of ranks on the GPU with the most ranks."""
        return -(-num_ranks // self.num_gpus)


ON_THE_CPU: Final = Placement()


def in_words(num_gpus: int) -> str:
    return "one GPU" if num_gpus == 1 else f"{num_gpus} GPUs"


def check_device(device: str) -> None:
    if device not in DEVICES:
        raise InvalidCall(f"--device is {device!r}: choose {' or '.join(DEVICES)}")


def count_gpus(otherwise: str = "leave --device out to run on the CPU, and see `anyep doctor`") -> int:
    """The GPUs that ranks can use, at least one; `otherwise` tells what to do where there is none."""
    try:
        import torch
    except ImportError as error:
        raise NotSupported(f"{error}: `anyep doctor` tells what to install") from None
    # Uses the driver's management library, which does not open a GPU.
    num_gpus = torch.cuda.device_count()
    if not num_gpus:
        why = "torch sees none" if torch.version.cuda else "this torch is a build for CPUs only"
        raise NotSupported(f"there is no GPU to use: {why}; {otherwise}")
    from importlib.util import find_spec

    if find_spec("triton") is None:
        raise NotSupported("GPUs need Triton, which is not installed: pip install triton")
    return num_gpus


@contextmanager
def placed(device: str, num_ranks: int) -> Iterator[Placement]:
    """Where `num_ranks` ranks run on this device; in this context, ranks on one GPU run concurrently."""
    if device == "cpu":
        yield ON_THE_CPU
        return
    num_gpus = count_gpus()
    raise_from_here_on()
    with ExitStack() as stack:
        environment: dict[str, str] = {}
        if num_ranks > num_gpus:
            from anyep.backends.cuda.mps import MultiProcessService, connections_for_ranks

            try:
                # A service that the user has already started works as well.
                if not MultiProcessService.is_running():
                    environment = stack.enter_context(MultiProcessService())
                per_gpu = -(-num_ranks // num_gpus)
                environment = environment | connections_for_ranks(os.environ, per_gpu)
            except NotSupported as reason:
                _warn_of_turns(num_ranks, num_gpus, str(reason))
        yield Placement(num_gpus, environment)


def _warn_of_turns(num_ranks: int, num_gpus: int, reason: str) -> None:
    print(
        f"anyep: {num_ranks} ranks share {in_words(num_gpus)} without NVIDIA's multi-process service"
        f" ({reason}). They take turns: results are right, but whenever one waits for another, that takes a"
        " few milliseconds for each of them instead of microseconds",
        file=sys.stderr,
        flush=True,
    )


def take_gpu(gpu: int, rank: int) -> None:
    """Select this rank's GPU. The environment must be complete: the driver reads it here."""
    import torch

    try:
        torch.cuda.set_device(gpu)
        torch.zeros(1, dtype=torch.uint8, device="cuda")
    except RuntimeError as error:
        connections = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
        raise NotSupported(
            f"rank {rank} cannot use GPU {gpu}: {str(error).splitlines()[0]}. See whether others use it"
            " (nvidia-smi); a multi-process service that an earlier job has broken must be ended:"
            " echo quit | nvidia-cuda-mps-control"
            + f"; CUDA_DEVICE_MAX_CONNECTIONS={connections} may be too much for all ranks"
            * bool(connections)
        ) from error
    # The single-process reference sums in full float32, and some containers change this setting.
    torch.set_float32_matmul_precision("highest")
