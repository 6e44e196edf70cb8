"""How the ranks of a Buffer connect their GPUs, after their hosts have connected: each allocates its memory
and opens its peers'; errors reach all ranks.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Final

import torch
import torch.distributed as dist

from anyep.backends.cuda import constants
from anyep.backends.cuda.device_control import DeviceControl
from anyep.backends.cuda.gpu import Gpu
from anyep.backends.cuda.heap import SymmetricBlock
from anyep.backends.cuda.host_heap import HostBlock
from anyep.backends.cuda.mps import MultiProcessService
from anyep.backends.cuda.windows import GpuWindows
from anyep.connection import (
    SHARE_OF_FREE_MEMORY,
    Connection,
    made_on_all_ranks,
    on_all_ranks,
    rdma_parts,
)
from anyep.control.plane import ControlPlane
from anyep.control.reports import Reports
from anyep.core.calls import Call
from anyep.errors import NotSupported
from anyep.join.rendezvous import Rendezvous
from anyep.machine import free_memory_bytes
from anyep.settings import HEAP
from anyep.sizes import align

FIRST_WINDOW_BYTES: Final = 64 << 20
BLOCK_BYTES: Final = 2 << 20
log = logging.getLogger("anyep")


def share_of_sms(num_sms: int, num_ranks: int) -> int:
    """How many programs each of `num_ranks` ranks can have on a GPU at once: an even number, at least two.

    >>> share_of_sms(132, 8), share_of_sms(132, 3), share_of_sms(132, 1)
    (16, 44, 132)
    """
    return max(2, num_sms // num_ranks // 2 * 2)


class GpuConnection:
    """The memory of all ranks' GPUs, opened here."""

    def __init__(
        self,
        gpu: Gpu,
        group: Any,
        rendezvous: Rendezvous,
        connection: Connection,
        control: ControlPlane,
    ) -> None:
        options = connection.options
        self._gpu = gpu
        self._group = group
        self._rendezvous = rendezvous
        self._timeout_s = options.timeout_s
        if group is None:
            raise NotSupported(
                "a Buffer on GPUs needs a torch process group, Gloo's is enough: pass group instead of comm"
            )
        # On all ranks, since a rank's memory is free only after its peers have closed it, too.
        on_all_ranks(rendezvous, gpu.do_postponed)
        gpus_of_ranks = on_all_ranks(rendezvous, lambda: (gpu.identity, gpu.num_sms, gpu.free_memory_bytes()))
        ranks_by_gpu = Counter(identity for identity, _, _ in gpus_of_ranks)
        self.ranks_on_gpu = ranks_by_gpu[gpu.identity]
        self.share_of_sms = share_of_sms(gpu.num_sms, self.ranks_on_gpu)
        self.least_share_of_sms = min(
            share_of_sms(num_sms, ranks_by_gpu[identity]) for identity, num_sms, _ in gpus_of_ranks
        )
        """The minimum over all ranks, on whatever GPU: the same on each of them."""
        # The same on all ranks, because each rank decides by it on its own whether windows grow.
        least_free = min(free for _, _, free in gpus_of_ranks)
        share = least_free // SHARE_OF_FREE_MEMORY // max(ranks_by_gpu.values())
        self.is_on_host = self._is_heap_on_host(options.heap, list(ranks_by_gpu))
        """Whether the heap is in memory of the host. There are no windows then: rings move rows to the host
        and from there at the same time."""
        self._most_window_bytes = share if options.num_window_bytes is None else options.num_window_bytes
        first_bytes = min(FIRST_WINDOW_BYTES, share) // BLOCK_BYTES * BLOCK_BYTES
        if options.num_window_bytes is not None:
            first_bytes = options.num_window_bytes
        if self.is_on_host:
            first_bytes = self._most_window_bytes = 0
        self.heap = self._new_heap(
            connection.region.num_bytes
            + options.num_nvl_bytes
            + options.num_rdma_bytes * rdma_parts(options, connection.topology),
            connection.region.num_bytes,
        )
        self.windows = GpuWindows(gpu)
        self._begun = ExitStack()

        def start_reports() -> Reports:
            device_control = DeviceControl(gpu, control, connection.region, self.heap)
            self._begun.callback(device_control.close)
            reports = Reports(device_control, control)
            self._begun.callback(reports.close)
            return reports

        try:
            self.reports = made_on_all_ranks(rendezvous, start_reports)
            self.device_control = self.reports.device_control
            if first_bytes:
                self._add_windows(first_bytes)
            self._warn_without_service()
        except BaseException:
            self.close()
            raise

    def _is_heap_on_host(self, heap: str, identities: Sequence[str]) -> bool:
        """Where the heaps of all ranks are, given what the user asked for: the same on all of them."""
        if heap == "host":
            return True
        reasons = on_all_ranks(self._rendezvous, lambda: self._gpu.why_not_shared(identities))
        why = next(filter(None, reasons), "")
        if why and heap == "device":
            raise NotSupported(
                f"heap is 'device', but {why}: pass heap='host' ({HEAP.name}=host), or leave it out"
            )
        if why and self._rendezvous.rank == 0:
            log.warning("rows go through memory of the host, because %s", why)
        return bool(why)

    def _warn_without_service(self) -> None:
        """Warn about the cost if ranks share a GPU without NVIDIA's multi-process service."""
        if self.ranks_on_gpu > 1 and self._rendezvous.rank == 0 and not MultiProcessService.is_running():
            log.warning(
                "%d ranks share a GPU without NVIDIA's multi-process service: they take turns of some"
                " milliseconds, and who waits for another rank waits for the turns of all (8 ranks on an"
                " H200: 33 ms for a call that takes 1 ms with the service); `anyep doctor` tells how to"
                " start it",
                self.ranks_on_gpu,
            )

    def close(self) -> None:
        """Release what was allocated for a Buffer that could not be made."""
        try:
            self._gpu.synchronize_device()
        finally:
            self._begun.close()

    def grow(self, call: Call, num_bytes: int) -> int | None:
        """Add windows for `num_bytes` bytes, together with all ranks. Returns where they begin.

        Every rank comes to the same decision: None where that would be more than allowed. The hosts wait in a
        barrier first, since the group's own calls may wait much too long for a rank that has failed.
        """
        total = self.windows.num_bytes
        wanted = max(2 * num_bytes, total)
        for new_bytes in (align(wanted, BLOCK_BYTES), align(num_bytes, BLOCK_BYTES)):
            fits = total + new_bytes <= self._most_window_bytes
            if fits and self.windows.num_blocks < constants.MAX_WINDOW_BLOCKS:
                self.reports.barrier_of_hosts(call, self.windows.num_blocks + 1)
                self._rendezvous.say_what("the windows of the Buffer grew")
                return self._add_windows(new_bytes)
        return None

    def _add_windows(self, num_bytes: int) -> int:
        first = self.windows.add(self._new_block(num_bytes, 0))
        on_all_ranks(self._rendezvous, lambda: self.device_control.set_window_bases(self.windows.addresses()))
        return first

    def _new_heap(self, num_bytes: int, num_zeros: int) -> SymmetricBlock | HostBlock:
        return (
            self._new_block_on_host(num_bytes) if self.is_on_host else self._new_block(num_bytes, num_zeros)
        )

    def _new_block_on_host(self, num_bytes: int) -> HostBlock:
        """Memory of the host, for this rank, opened by all ranks. It takes the memory at once."""
        rendezvous = self._rendezvous

        def check() -> None:
            total, free = num_bytes * rendezvous.num_ranks, free_memory_bytes()
            if total > free:
                raise NotSupported(
                    f"heaps in memory of the host take {total:,} bytes, {num_bytes:,} for each of"
                    f" {rendezvous.num_ranks} ranks, and {free:,} are free: pass Buffer smaller num_nvl_bytes"
                    " and num_rdma_bytes, which `anyep plan` tells"
                )

        # Before any rank takes its part.
        on_all_ranks(rendezvous, check)
        block = made_on_all_ranks(rendezvous, lambda: HostBlock(self._gpu, num_bytes, rendezvous.rank))
        shared = on_all_ranks(rendezvous, block.share)
        on_all_ranks(rendezvous, lambda: block.connect(shared))
        block.close()
        return block

    def _new_block(self, num_bytes: int, num_zeros: int) -> SymmetricBlock:
        """Memory of this rank, opened by all ranks; its first `num_zeros` bytes are zeros."""

        def make() -> SymmetricBlock:
            block = self._gpu.new_block(num_bytes)
            if num_zeros:
                block.tensor(0, (num_zeros,), torch.uint8).zero_()
                self._gpu.synchronize_device()
            return block

        block = made_on_all_ranks(self._rendezvous, make)

        def connect() -> None:
            # Torch waits for the others in the store, and does not check whether they are still alive.
            with self._rendezvous.deadline(self._timeout_s):
                try:
                    block.connect(self._group)
                except dist.DistError:
                    raise
                except RuntimeError as error:
                    raise NotSupported(
                        f"the memory of other ranks' GPUs cannot be opened ({error}): where GPUs cannot reach"
                        f" each other's memory, pass heap='host' ({HEAP.name}=host)"
                    ) from error

        on_all_ranks(self._rendezvous, connect)
        return block
