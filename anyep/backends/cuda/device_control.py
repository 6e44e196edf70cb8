"""One rank's side of the control plane in GPU memory: the tables that kernels read, notify, barrier.

Notify messages, flags and call numbers lie in the GPUs' heaps, and only kernels access them. A kernel that
has waited for a while also reads the host's control region, where the host writes whether a rank is gone: no
other kernel could tell it, because the caller's stream waits for this one.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import time
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
import torch

from anyep.backends.base import Control
from anyep.backends.cuda import constants
from anyep.backends.cuda.batch import Batches
from anyep.backends.cuda.control_kernels import ControlKernels
from anyep.backends.cuda.gpu import Gpu
from anyep.backends.cuda.heap import SymmetricBlock
from anyep.backends.cuda.host_heap import HostBlock
from anyep.backends.cuda.kernels.groups import Tables
from anyep.backends.cuda.pinned import Headers
from anyep.core.calls import Array
from anyep.core.headers import NUM_WORDS, Field, signature
from anyep.core.relay import RelayPlan
from anyep.layout import ControlRegion
from anyep.sizes import NUM_MAX_LOCAL_EXPERTS
from anyep.topology import Topology

SPIN_S: Final = 200e-6
NAP_S: Final = 50e-6
LOOK_S: Final = 0.2
HOST_ABORT: Final = 8
"""Offset in bytes from the abort flag: in the host's region, of the host's own abort flag for kernels; in the
heap, of the address of that flag."""
KIND: Final = int(Field.KIND)
log = logging.getLogger("anyep")


class DeviceControl:
    """The tables of one rank. `heap` is this rank's connected heap; its control region is all zeros."""

    def __init__(
        self, gpu: Gpu, control: Control, region: ControlRegion, heap: SymmetricBlock | HostBlock
    ) -> None:
        self.gpu = gpu
        self.control = control
        self.region = region
        self.rank, self.num_ranks = control.rank, control.num_ranks
        self.topology = Topology(self.num_ranks, region.ranks_per_node)
        self.heap = heap
        self.heaps = gpu.table(self.heap.addresses)
        self.inboxes = gpu.table([self.heap.address] * self.num_ranks)
        self.net_rows = gpu.table(self._net_rows())
        self.state = gpu.table([0] * constants.NUM_STATES)
        self.targets = gpu.table([0] * (constants.TARGET_WORDS * self.num_ranks))
        """The addresses of each rank's results, or of its rows for a combine, in this call."""
        self.bases = gpu.table([0] * (constants.MAX_WINDOW_BLOCKS * self.num_ranks))
        self.report = gpu.words(constants.REPORTED_HEADERS + NUM_WORDS * self.num_ranks)
        self.totals = gpu.words(constants.TOTAL_BY_EXPERT + NUM_MAX_LOCAL_EXPERTS)
        self.rows_of = gpu.words(self.num_ranks)
        """How many rows each rank receives in the last dispatch with counts."""
        self.headers = Headers(NUM_WORDS, gpu.words, gpu.now)
        self.abort = heap.address + region.blocks.abort.start
        self._own_given_up = heap.tensor(region.blocks.given_up.offset(self.rank), (1,), torch.int64)
        self._one = gpu.table([1])
        self._ticket = 0
        self.batches = Batches(gpu.index, f"{self.num_ranks} ranks {gpu.architecture}")
        """The kernels of all calls. Nothing that makes a recipe may refer to it: neither would be freed."""
        self._at_host = 0
        try:
            self._show_host_to_kernels(control.regions[self.rank])
            self.constants = gpu.table(self._constants())
            self.kernels = ControlKernels(
                self.rank,
                self.topology,
                Tables(
                    *(self.constants, self.heaps, self.state, self.targets, self.bases),
                    *(self.inboxes, self.net_rows),
                ),
                int(self.totals.ctypes.data),
                int(self.rows_of.ctypes.data),
            )
            self.batches.load_earlier()
        except BaseException:
            self.close()
            raise

    def _show_host_to_kernels(self, region: int) -> None:
        """Let kernels read this rank's control region in the host's memory, if the GPU supports it."""
        if not self.gpu.let_kernels_read(region, self.region.num_bytes):
            log.warning(
                "the kernels of rank %d cannot read the host's memory: when a rank is killed, fails, is"
                " interrupted or destroys its Buffer, they wait until their time is up (ANYEP_TIMEOUT_S)",
                self.rank,
            )
            return
        self._at_host = region
        host_abort_at = self.region.blocks.abort.start + HOST_ABORT
        address = torch.tensor([region + host_abort_at], dtype=torch.int64, device="cpu")
        self.heap.tensor(host_abort_at, (1,), torch.int64).copy_(address)

    def _net_rows(self) -> list[int]:
        """By node: the heap of this rank's relay there, which has a ring for each node; this node's is for
        rows from here."""
        plan = RelayPlan(self.topology, self.rank)
        return [word for relay in plan.relays for word in (self.heap.addresses[relay], plan.node)]

    def _constants(self) -> list[int]:
        region = self.region
        mailbox, tail = region.blocks.mailbox, region.blocks.ring_tail
        words = [0] * constants.NUM_CONSTANTS
        words[constants.RANK] = self.rank
        words[constants.OWN_HEAP] = self.heap.address
        words[constants.AT_HOST] = self._at_host
        words[constants.TIMEOUT_NS] = int(self.control.timeout_s * 1e9)
        words[constants.ABORT_AT] = region.blocks.abort.start
        # A rank's status is in the host's region; its block in a GPU's heap is free for this number.
        words[constants.NUMBER_AT] = region.blocks.status.start
        words[constants.MAILBOX_AT] = mailbox.start
        words[constants.BOX_STRIDE] = mailbox.offset(0, 1) - mailbox.start
        words[constants.NOTIFY_STRIDE] = mailbox.stride
        words[constants.ARRIVED_AT] = region.blocks.arrival.start
        words[constants.PULLED_AT] = region.blocks.pulled.start
        words[constants.FLAG_STRIDE] = region.blocks.pulled.stride
        words[constants.GIVEN_UP_AT] = region.blocks.given_up.start
        words[constants.REPORT] = int(self.report.ctypes.data)
        words[constants.TAIL_AT] = tail.start
        words[constants.HEAD_AT] = region.blocks.ring_head.start
        words[constants.RING_STRIDE] = tail.stride
        words[constants.NETWORK_TAIL_AT] = region.blocks.network_tail.start
        words[constants.NETWORK_HEAD_AT] = region.blocks.network_head.start
        words[constants.NETWORK_STRIDE] = region.blocks.network_tail.stride
        counts = region.blocks.network_counts
        words[constants.NETWORK_COUNTS_AT] = counts.start
        words[constants.NETWORK_COUNTS_STRIDE] = counts.stride
        words[constants.NETWORK_COUNTS_SET_STRIDE] = counts.offset(0, 1) - counts.start
        return words

    def set_window_bases(self, addresses: Sequence[Sequence[int]]) -> None:
        """Give kernels the addresses of every rank's blocks of windows, by block and rank."""
        table = np.zeros((self.num_ranks, constants.MAX_WINDOW_BLOCKS), np.int64)
        for block, by_rank in enumerate(addresses):
            table[:, block] = by_rank
        self.bases.copy_(torch.from_numpy(table.reshape(-1)))

    # Notify messages

    def keep_header(self, header: Array, kind: int) -> int:
        """Store the header of this rank's message; return where a kernel finds it."""
        header[KIND] = kind
        return self.headers.keep(header, self.gpu.stream.is_capturing())

    def next_ticket(self) -> int:
        """A number by which the host recognizes the totals of a call."""
        self._ticket += 1
        return self._ticket

    def place_in_new_block(self, offset: int, row_bytes: int, num_topk: int) -> None:
        """Give every receiver without a window a window at this offset, in a block that was just added."""
        values = {"offset": offset, "row_bytes": row_bytes, "block_topk": num_topk}
        self.batches.run(((self.kernels.place_in_new_block,),), self.gpu.stream.moment(False, False), values)

    def refuse(self, kind: int, text: int) -> None:
        """Send a notify message that refuses this rank's call; `text` is where the reason is written."""
        header = signature()
        header[Field.REFUSED] = 1 + text
        values = {"message": self.keep_header(header, kind), "ticket": 0}
        self.batches.run(((self.kernels.exchange_refusals,),), self.gpu.stream.moment(True, True), values)

    def wait_for_totals(self, ticket: int) -> Array:
        """Wait until the notify messages of a dispatch have told how many rows this rank receives. The
        kernel always writes either the totals or an outcome."""
        words = self.totals
        began = looked = time.monotonic()
        while words[constants.TICKET] != ticket:
            now = time.monotonic()
            if now - began > SPIN_S:
                time.sleep(NAP_S)
            if now - looked > LOOK_S:
                looked = now
                self.gpu.look_for_errors()
        found: Array = words
        return found

    # What kernels left

    def word_at(self, offset: int) -> int:
        """Read a word of this rank's heap."""
        return int(self.heap.tensor(offset, (1,), torch.int64))

    def flag_of(self, rank: int, flags: int, number: int) -> int:
        """Read a rank's flag; `flags` is the device constant that holds the offset of such flags."""
        words = self._constants()
        if flags == constants.MAILBOX_AT:
            box = words[constants.BOX_STRIDE] * (number % 2)
            return self.word_at(words[flags] + box + rank * words[constants.NOTIFY_STRIDE])
        if flags == constants.NETWORK_TAIL_AT:
            node = self.topology.node_of(rank)
            return self.word_at(words[flags] + node * words[constants.NETWORK_STRIDE])
        stride = words[constants.RING_STRIDE if flags == constants.TAIL_AT else constants.FLAG_STRIDE]
        # These flags are those of the ranks of this node.
        return self.word_at(words[flags] + self.topology.nvl_rank_of(rank) * stride)

    def writers_of(self, flags: int) -> range:
        """The ranks that write such flags."""
        if flags == constants.MAILBOX_AT:
            return range(self.num_ranks)
        return self.topology.ranks_on(self.topology.node_of(self.rank))

    def aborting_rank(self) -> int:
        """The rank that raised this rank's abort flag."""
        return max(0, self.word_at(self.region.blocks.abort.start) - 1)

    # The end

    def close(self) -> None:
        """End the kernels' access to the host's memory; no kernel may be running any more."""
        region, self._at_host = self._at_host, 0
        if region:
            self.gpu.let_no_kernel_read(region)

    def give_up(self) -> None:
        """Tell the kernels of all ranks to stop waiting for this rank."""
        self._say_gone(self.rank, self.control.regions)

    def take_no_more_part(self) -> None:
        """Give up, and keep this rank's own kernels out of further calls, because graphs can still be
        replayed. The GPU cannot be told while a graph is captured."""
        self.give_up()
        # A GPU that has itself failed runs nothing any more. This is a copy, not a kernel: to load a kernel,
        # CUDA might wait for running ones.
        with contextlib.suppress(RuntimeError):
            if not self.gpu.stream.is_capturing():
                with self.gpu.on_communication_stream():
                    self._own_given_up.copy_(self._one, non_blocking=True)
                self.gpu.stream.end(False)

    def forget(self, rank: int) -> None:
        """Tell this rank's kernels to stop waiting for a rank that is gone."""
        self._say_gone(rank, [self.control.regions[self.rank]])

    def _say_gone(self, rank: int, regions: Iterable[int]) -> None:
        """Tell the kernels that read these host control regions that a rank is gone."""
        given_up_at = self.region.blocks.given_up.offset(rank)
        host_abort_at = self.region.blocks.abort.start + HOST_ABORT
        for region in regions:
            ctypes.c_int64.from_address(region + given_up_at).value = 1
            ctypes.c_int64.from_address(region + host_abort_at).value = 1 + rank
