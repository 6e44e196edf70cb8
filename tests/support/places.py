"""Where a case runs: on which device, and on which nodes. One test runs in many places.

    PLACES = [Place("cpu", 4), Place("cpu", 4, num_nodes=2), Place("simulated", 2), Place("cuda", 8)]

    @pytest.mark.parametrize("place", [place.param() for place in PLACES])
    def test_it(place: Place) -> None:
        place.world().run(function, case)

Devices are "cpu", "cuda" (ranks that share GPU 0; marked `gpu`) and "simulated": Buffers with device "cuda"
whose kernels run in Triton's interpreter on CPU tensors. Nodes are virtual, unless they are `hosts`: network
namespaces that TCP joins, with NIXL.

A place's ranks are a pool that all tests share. On a rank, `buffer_device()` is the device of its Buffers and
`tensor_device()` that of its tensors.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any, Literal

import pytest
import torch

from tests.support.world import World, shared_world

Device = Literal["cpu", "simulated", "cuda"]
SIMULATED_TIMEOUT_S = "100"
CUDA_TIMEOUT_S = "300"
"""A rank whose kernels are still being compiled is waited for."""
_device: Device = "cpu"


@dataclass(frozen=True)
class Place:
    """Ranks on a device, on one node or several."""

    device: Device
    num_ranks: int
    num_nodes: int = 1
    hosts: bool = False
    other_defaults: bool = False
    """Whether torch's default dtype is bfloat16, and its default device "meta", or "cuda" on a GPU."""
    heap: str = ""
    """Where Buffers on GPUs keep what ranks share, if the place decides."""

    def __str__(self) -> str:
        nodes = "" if self.num_nodes == 1 else f"-{self.num_nodes}{'hosts' if self.hosts else 'nodes'}"
        heap = f"-{self.heap}" if self.heap else ""
        return f"{self.device}-{self.num_ranks}{nodes}{'-defaults' if self.other_defaults else ''}{heap}"

    @property
    def ranks_per_node(self) -> int | None:
        """The argument of a Buffer: None for one node."""
        return None if self.num_nodes == 1 else self.num_ranks // self.num_nodes

    @property
    def network(self) -> str | None:
        """The argument of a Buffer."""
        return "nixl" if self.hosts else None

    def param(self, *more: Any, marks: Any = (), value: Any = None, name: str = "") -> Any:
        """For `parametrize`, with the marks that the place needs: the place, or another value."""
        needed = [*marks] if isinstance(marks, (list, tuple)) else [marks]
        if self.device == "cuda":
            needed += [
                pytest.mark.gpu,
                pytest.mark.skipif(
                    not torch.cuda.is_available(), reason="there is no GPU that torch can use"
                ),
            ]
        if self.hosts and not any(getattr(mark, "name", "") == "xdist_group" for mark in needed):
            needed.append(pytest.mark.xdist_group("hosts"))
        if self.device != "cpu":
            needed.append(pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed"))
        return pytest.param(self if value is None else value, *more, marks=needed, id=name or str(self))

    def world(self) -> World:
        """The ranks of this place that all tests share; virtual nodes use those of one node."""
        key = (self.device, self.num_ranks, self.hosts, self.heap)
        return shared_world((*key, "other defaults") if self.other_defaults else key, self.new_world)

    def new_world(self) -> World:
        """Ranks of this place's own, for a test that breaks them."""
        if self.hosts:
            from tests.support.namespaces import TwoHosts

            assert self.num_nodes == 2
            return TwoHosts(self.num_ranks // 2)
        return World(self.num_ranks, self._prepare())

    def _prepare(self) -> Callable[[int], None] | None:
        if self.device == "cpu" and not self.other_defaults:
            return None
        variables = {}
        if self.device == "cuda":
            from tests.support.gpu import service_variables

            variables = service_variables()
        return partial(_become, self, variables)


def _become(place: Place, variables: dict[str, str], rank: int) -> None:
    """What makes a process a rank of a place; even its process group is made under other defaults."""
    if place.heap:
        os.environ["ANYEP_HEAP"] = place.heap
    if place.device == "simulated":
        become_simulated(rank)
    elif place.device == "cuda":
        become_cuda(variables, rank)
    if place.other_defaults:
        torch.set_default_device("cuda" if place.device == "cuda" else "meta")
        torch.set_default_dtype(torch.bfloat16)


def become_simulated(rank: int) -> None:
    """From here on device "cuda" is the simulated GPU of this rank, with CPU tensors."""
    # Only in a rank: kernels that a process loads after this can only be interpreted.
    from tests.support.simulated_gpu import use_simulated_gpu

    global _device  # noqa: PLW0603
    _device = "simulated"
    os.environ.setdefault("ANYEP_TIMEOUT_S", SIMULATED_TIMEOUT_S)
    use_simulated_gpu()
    # Fill new memory with NaN and the like, so that reads of unwritten memory show in the results. Not
    # earlier, because it loads Triton.
    torch.use_deterministic_algorithms(True, warn_only=True)


def become_cuda(variables: dict[str, str], rank: int) -> None:
    """A rank on GPU 0, by way of NVIDIA's multi-process service."""
    global _device  # noqa: PLW0603
    _device = "cuda"
    os.environ.setdefault("ANYEP_TIMEOUT_S", CUDA_TIMEOUT_S)
    os.environ.update(variables)
    torch.cuda.set_device(0)
    torch.use_deterministic_algorithms(True, warn_only=True)


def buffer_device() -> str:
    """On a rank: the device that its Buffers are given."""
    return "cpu" if _device == "cpu" else "cuda"


def tensor_device() -> str:
    """On a rank: the device of its tensors."""
    return "cuda" if _device == "cuda" else "cpu"
