"""How the ranks of a Buffer connect: each makes its memory and opens its peers'; errors reach all ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final, TypeVar

from anyep.backends import cpu
from anyep.backends.cpu.heap import Block, BlockAddress, OwnBlock
from anyep.errors import AnyEPError, InvalidCall, NotSupported
from anyep.join.agreement import RankValue, check_agreement
from anyep.join.rendezvous import Rendezvous
from anyep.layout import ControlRegion
from anyep.machine import address_space_limit_bytes, free_memory_bytes, host_identity
from anyep.settings import ARGUMENT, DEVICE, NETWORK, TIMEOUT_S, Chosen
from anyep.topology import Topology, topology_of_hosts
from anyep.transport.base import Engine
from anyep.transport.nixl import NixlEngine
from anyep.transport.remote import Transport

SHARE_OF_FREE_MEMORY: Final = 4
PAGE_BYTES: Final = 4096
NIXL: Final = "nixl"
LOOPBACK: Final = "loopback"
NETWORKS: Final = (NIXL, LOOPBACK)
ELASTIC: Final = "ElasticBuffer"
T = TypeVar("T")


@dataclass(frozen=True)
class Options:
    """What the user asked for; it must be the same on every rank."""

    device: str
    num_nvl_bytes: int
    num_rdma_bytes: int
    low_latency_mode: bool
    enable_shrink: bool
    ranks_per_node: int | None
    num_window_bytes: int | None
    network: str | None = None
    heap: str = "auto"
    """Where ranks on GPUs keep what they share; one of `settings.HEAPS`."""
    timeout_s: float = TIMEOUT_S.default
    api: str = "Buffer"
    """The class that was made; messages name it."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """The source of each option that a setting can give, by name; it may differ between ranks."""

    def chosen(self, name: str) -> Chosen[Any]:
        """One option with its source."""
        return Chosen(getattr(self, name), self.sources.get(name, ARGUMENT), name)

    def values(self) -> dict[str, RankValue]:
        """Each option by name, with its source."""
        return {
            option.name: RankValue.of(self.chosen(option.name))
            for option in fields(self)
            if option.name != "sources"
        }


@dataclass(frozen=True)
class Connection:
    """The memory of all ranks that can be mapped here."""

    options: Options
    topology: Topology
    region: ControlRegion
    heaps: list[Block]
    """The heaps of all ranks."""
    windows: dict[int, Block]
    """The windows of the ranks of this rank's node."""
    pids: list[int]
    num_result_bytes: int
    """The bytes that this rank may keep for results that no peer writes to."""
    transport: Transport | None = None
    """The transport to ranks whose memory cannot be mapped here; their heaps are outboxes."""
    hosts: tuple[int, ...] = ()
    """If there is a transport, the host of each rank; virtual nodes count as hosts where it connects them."""


def connect(rendezvous: Rendezvous, check: Callable[[], Options]) -> Connection:
    """Allocate this rank's memory and open its peers'. An error on one rank is raised on all."""

    def compiled() -> tuple[Options, str]:
        options = check()
        # Compiling may take seconds: do it before the first step of all ranks together, never in a call.
        cpu.compile_kernels(*_kernels_for(options))
        return options, host_identity()

    options = on_all_ranks(rendezvous, compiled)
    check_agreement([other.values() for other, _ in options])
    own = options[rendezvous.rank][0]
    hosts = [host for _, host in options]
    topology = chosen_topology(hosts, own.chosen("ranks_per_node"))
    if topology.num_nodes > 1 and own.device != "cpu":
        _check_nodes_of_gpus(topology, hosts, own)
    if topology.num_nodes > 1 and own.device == "cpu":
        on_all_ranks(rendezvous, lambda: cpu.compile_kernels(cpu.Group.NODES))
    remote = _remote_ranks(topology, hosts, rendezvous.rank, own.network)
    share = _memory_share_bytes(hosts.count(hosts[rendezvous.rank]))
    region = ControlRegion(topology.num_ranks, topology.ranks_per_node)
    made: list[OwnBlock] = []

    def make() -> tuple[int, BlockAddress, BlockAddress]:
        num_row_bytes = own.num_nvl_bytes + own.num_rdma_bytes * rdma_parts(own, topology)
        # Sparse: it takes memory only as windows are used.
        num_window_bytes = share if own.num_window_bytes is None else own.num_window_bytes
        if own.device != "cpu":
            # The rows are in the memory of GPUs.
            num_row_bytes = num_window_bytes = 0
        heap = cpu.OwnBlock("heap", region.num_bytes + num_row_bytes, rendezvous.rank)
        made.append(heap)
        windows = cpu.OwnBlock("windows", num_window_bytes, rendezvous.rank)
        made.append(windows)
        return os.getpid(), heap.share(), windows.share()

    try:
        shared = on_all_ranks(rendezvous, make)
        heaps, windows = _open_all(rendezvous, topology, made, shared, remote)
    finally:
        # All ranks have opened all blocks, or none will: the descriptors are no longer needed.
        for block in made:
            block.close()
    transport = None
    if topology.num_nodes > 1 and (own.network == NIXL or len(set(hosts)) > 1):
        transport = _connect_transport(rendezvous, region, heaps, remote)
    pids = [pid for pid, _, _ in shared]
    num_result_bytes = share
    if own.num_window_bytes is not None and address_space_limit_bytes() is not None:
        # Where address space is limited, a user who asks for small windows wants other results small, too.
        num_result_bytes = min(share, own.num_window_bytes)
    all_heaps = [heaps[rank] for rank in range(topology.num_ranks)]
    apart: tuple[int, ...] = ()
    if transport is not None:
        is_by_node = own.network == NIXL
        apart = tuple(
            topology.node_of(rank) if is_by_node else hosts.index(host) for rank, host in enumerate(hosts)
        )
    return Connection(own, topology, region, all_heaps, windows, pids, num_result_bytes, transport, apart)


def _check_nodes_of_gpus(topology: Topology, hosts: list[str], options: Options) -> None:
    """Refuse nodes that ranks on GPUs cannot form so far: they are connected by memory only."""
    nodes = f"{topology.num_nodes} nodes of {topology.ranks_per_node} ranks: on GPUs"
    if len(set(hosts)) > 1:
        raise NotSupported(
            f"{nodes} AnyEP works on one host so far: use ranks of one host, or pass device='cpu'"
            f" ({DEVICE.name}=cpu)"
        )
    if options.network == NIXL:
        raise NotSupported(
            f"{nodes} nodes are connected by memory only, so far: leave out network ({NETWORK.name}), or pass"
            f" device='cpu' ({DEVICE.name}=cpu)"
        )


def _kernels_for(options: Options) -> list[cpu.Group]:
    """The groups of kernels that these ranks will call, as far as that is known before they connect."""
    if options.device != "cpu":
        return [cpu.Group.CONTROL, cpu.Group.GPU]
    needed = [cpu.Group.CONTROL, cpu.Group.NORMAL]
    if options.api == ELASTIC:
        needed.append(cpu.Group.EXPANDED)
    return [*needed, cpu.Group.LOW_LATENCY] if options.low_latency_mode else needed


def chosen_topology(hosts: list[str], ranks_per_node: Chosen[int | None]) -> Topology:
    """The topology of ranks on these hosts; an error names the variable that the value comes from."""
    try:
        return topology_of_hosts(hosts, ranks_per_node.value)
    except InvalidCall as error:
        raise ranks_per_node.explain(error) from None


def _remote_ranks(topology: Topology, hosts: list[str], rank: int, network: str | None) -> list[int]:
    """The ranks of other nodes that are on other hosts, or all ranks of other nodes if the user says so."""
    if network == LOOPBACK and len(set(hosts)) > 1:
        raise InvalidCall(
            f"network is {LOOPBACK!r}, but the ranks are on {len(set(hosts))} hosts: leave it out, or pass"
            f" network={NIXL!r} ({NETWORK.name}={NIXL})"
        )
    node = topology.node_of(rank)
    return [
        other
        for other in range(topology.num_ranks)
        if topology.node_of(other) != node and (network == NIXL or hosts[other] != hosts[rank])
    ]


def _connect_transport(
    rendezvous: Rendezvous, region: ControlRegion, heaps: dict[int, Block], remote: list[int]
) -> Transport:
    """Connect to the remote ranks; outboxes take the places of their heaps. Every rank has remote ranks."""
    engines: list[Engine] = []
    own_heap = heaps[rendezvous.rank]

    def start() -> bytes:
        engine = NixlEngine(rendezvous.rank, own_heap)
        engines.append(engine)
        for rank in remote:
            heaps[rank] = cpu.PrivateBlock(region.num_bytes, f"the outbox for rank {rank}", rendezvous.rank)
            engine.register(heaps[rank].address, heaps[rank].num_bytes)
        return engine.describe()

    try:
        described = on_all_ranks(rendezvous, start)
        on_all_ranks(rendezvous, lambda: engines[0].connect({rank: described[rank] for rank in remote}))
    except BaseException:
        for engine in engines:
            engine.close()
        raise
    return Transport(engines[0], own_heap, {rank: heaps[rank] for rank in remote})


def rdma_parts(options: Options, topology: Topology) -> int:
    """How many times a heap contains the RDMA bytes: for low-latency calls, for their lists over a transport
    (on the CPU, where unused parts take no memory), and for rings between nodes."""
    if not options.low_latency_mode or topology.num_nodes == 1:
        return 1
    return 3 if options.device == "cpu" else 2


def _open_all(
    rendezvous: Rendezvous,
    topology: Topology,
    made: list[OwnBlock],
    shared: list[tuple[int, BlockAddress, BlockAddress]],
    remote: list[int],
) -> tuple[dict[int, Block], dict[int, Block]]:
    """The heaps of all ranks that are not remote, and the windows of this node's ranks."""
    own, (own_heap, own_windows) = rendezvous.rank, made
    heaps: dict[int, Block] = {}
    windows: dict[int, Block] = {}

    def open_blocks() -> None:
        for rank, (_, heap, window) in enumerate(shared):
            if rank in remote:
                continue
            heaps[rank] = own_heap if rank == own else cpu.open_block(heap, rank, own)
            if topology.node_of(rank) == topology.node_of(own):
                windows[rank] = own_windows if rank == own else cpu.open_block(window, rank, own)

    on_all_ranks(rendezvous, open_blocks)
    return heaps, windows


def _memory_share_bytes(ranks_on_host: int) -> int:
    """A quarter of the free memory, shared among the ranks of the machine."""
    share = free_memory_bytes() // SHARE_OF_FREE_MEMORY // ranks_on_host
    return share // PAGE_BYTES * PAGE_BYTES


def on_all_ranks(rendezvous: Rendezvous, work: Callable[[], T]) -> list[T]:
    """Do something on every rank and gather the results; if it raises on one rank, every rank raises."""
    error: AnyEPError | None = None
    result: T | None = None
    rendezvous.arrive()
    try:
        result = work()
    except AnyEPError as caught:
        error = caught
    except Exception as caught:
        error = NotSupported(f"{type(caught).__name__}: {caught}")
        error.__cause__ = caught
    except BaseException as caught:
        rendezvous.give_up(caught)
        raise
    outcomes = rendezvous.all_gather((result, error))
    try:
        if error is not None:
            raise error
    finally:
        # Its traceback holds this frame, and thereby the frames of all callers.
        del error
    for rank, (_, other_error) in enumerate(outcomes):
        if other_error is not None:
            kind = InvalidCall if isinstance(other_error, InvalidCall) else NotSupported
            raise kind(f"rank {rank} could not make its Buffer: {other_error}")
    return [outcome for outcome, _ in outcomes]


def made_on_all_ranks(rendezvous: Rendezvous, make: Callable[[], T]) -> T:
    """What `make` returns on this rank, if it succeeds on every rank; if one fails, every rank raises."""
    made: list[T] = []
    on_all_ranks(rendezvous, lambda: made.append(make()))
    return made[0]
