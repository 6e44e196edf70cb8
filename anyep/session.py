"""A session, which owns everything of one Buffer: heaps, control plane, transport and modes.

Every step of its construction succeeds on all ranks or on none. An API is a facade over a session: it checks
arguments, calls the session's modes and returns its own tuples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

from anyep.backends import cpu
from anyep.backends.base import Heap, Windows
from anyep.backends.cpu.between_nodes import BetweenNodes, CallRings, Proxy
from anyep.backends.cpu.elastic import CpuElasticOps
from anyep.backends.cpu.expander import Expander
from anyep.backends.cpu.lifetime import CpuLifetime
from anyep.backends.cpu.memory import WarmMemory
from anyep.backends.cpu.ops_low_latency import CpuLowLatencyOps
from anyep.backends.cpu.ops_normal import CpuNormalOps, Way
from anyep.backends.cpu.rows import RowMover
from anyep.backends.cpu.within_node import WithinNode
from anyep.backends.expanded import ElasticOps
from anyep.connection import Connection, Options, connect, made_on_all_ranks, rdma_parts
from anyep.control.plane import ControlPlane
from anyep.core.calls import Call
from anyep.core.relay import RelayPlan
from anyep.core.rings import NetworkRings, NodeRings, Rings
from anyep.core.traffic import Traffic
from anyep.errors import AnyEPError, InvalidCall
from anyep.join.rendezvous import Rendezvous
from anyep.layout import ControlRegion
from anyep.machine import num_cores
from anyep.modes.low_latency import LowLatencyMode
from anyep.modes.masks import Masks
from anyep.modes.normal import NormalMode
from anyep.transport.low_latency import LowLatencyTransport
from anyep.transport.proxy import RingProxy
from anyep.transport.remote import Transport

if TYPE_CHECKING:
    from anyep.backends.cuda.device_control import DeviceControl
    from anyep.gpu_connection import GpuConnection

NUM_SPINS: Final = 2000


class Lifetime(Protocol):
    """Ends the part of a session that is on a device."""

    @property
    def free_what_died(self) -> Callable[[], None]: ...
    @property
    def is_idle(self) -> bool: ...
    def stop(self) -> None: ...
    def check_can_close(self) -> None: ...
    def close(self) -> None: ...
    def close_later(self) -> None: ...


class Session:
    """Owns everything of one rank's Buffer."""

    normal: NormalMode[Any, Any]
    """Its types are those of the device, which is known at run time only."""
    heap: Heap
    """This rank's heap on its device."""
    elastic: ElasticOps
    """For the elastic API."""
    communication_stream: Any = None
    """The CUDA stream of calls on a GPU."""
    is_heap_on_host: bool = False
    """Whether ranks on GPUs share memory of the host."""
    device_control: DeviceControl | None = None
    """The tables in GPU memory, of a rank on a GPU."""

    def __init__(self, group: Any, rendezvous: Rendezvous, check_options: Callable[[], Options]) -> None:
        self.low_latency: LowLatencyMode | None = None
        self.lifetime: Lifetime | None = None
        connection = connect(rendezvous, check_options)
        self.options = connection.options
        self.topology = connection.topology
        self.traffic = Traffic.of(self.topology, rendezvous.rank)
        """What this rank has sent."""
        self.region: ControlRegion = connection.region
        self.control = ControlPlane(
            rendezvous,
            connection.region,
            connection.heaps,
            connection.pids,
            connection.options.timeout_s,
            self.traffic,
            # With a core for every rank, polling at once pays off; else the awaited rank needs the core.
            NUM_SPINS if rendezvous.num_ranks <= num_cores() else 0,
            connection.transport,
            connection.options.api,
        )
        try:
            if self.options.device == "cuda":
                self._start_on_gpu(group, rendezvous, connection)
            else:
                made_on_all_ranks(rendezvous, partial(self._start_on_cpu, connection))
        except BaseException:
            if self.lifetime is not None:
                # Another rank failed to make its modes.
                self.close()
            else:
                self.control.close()
            # The traceback holds this frame; what was mapped has to go all the same.
            del connection
            self.__dict__.clear()
            raise

    @property
    def windows(self) -> Windows:
        return self.normal.windows

    def _rings(self) -> Rings:
        options, topology = self.options, self.topology
        node = NodeRings(
            self.region.num_bytes, options.num_nvl_bytes, topology.ranks_per_node, topology.num_nodes
        )
        if topology.num_nodes == 1:
            return Rings(node)
        parts = rdma_parts(options, topology)
        start = self.region.num_bytes + options.num_nvl_bytes + (parts - 1) * options.num_rdma_bytes
        return Rings(node, NetworkRings(start, options.num_rdma_bytes, topology))

    def _start_on_cpu(self, connection: Connection) -> None:
        control, options = self.control, self.options
        memory = WarmMemory(cpu.PrivateBlock(connection.num_result_bytes, "results", control.rank))
        stream, team = cpu.Stream(), cpu.Team(max(1, num_cores() // control.num_ranks))
        rings = self._rings()
        mover = RowMover(
            control, self.region, self.topology, connection.heaps, connection.windows, rings, team
        )
        self.heap = connection.heaps[control.rank]
        self.normal = NormalMode(
            control, CpuNormalOps(mover, self._way(mover, connection.transport), stream, memory), rings
        )
        self.elastic = CpuElasticOps(stream, Expander(team), memory)
        if options.low_latency_mode:
            start = self.region.num_bytes + options.num_nvl_bytes
            masks = Masks(control, self.region, hosts=connection.hosts)
            remote = None
            if connection.transport is not None:
                remote = LowLatencyTransport(
                    connection.transport,
                    self.region,
                    control.rank,
                    self.heap.address,
                    self.traffic.low_latency,
                    masks.masked,
                )
            low_latency_ops = CpuLowLatencyOps(
                control,
                self.region,
                connection.heaps,
                start + options.num_rdma_bytes,
                masks,
                options.enable_shrink,
                stream,
                team,
                memory,
                remote,
            )
            self.low_latency = LowLatencyMode(control, low_latency_ops, masks, start, options.num_rdma_bytes)
        self.lifetime = CpuLifetime(control, stream, team)

    def _way(self, mover: RowMover, transport: Transport | None) -> Way[Any]:
        """How rows travel: within a node, or between nodes."""
        if self.topology.num_nodes == 1:
            return WithinNode(mover)
        plan = RelayPlan(self.topology, mover.rank)
        if transport is None:
            return BetweenNodes(mover, plan)
        return BetweenNodes(mover, plan, transport.ranks, _proxies(transport, self.region, plan.node))

    def _start_on_gpu(self, group: Any, rendezvous: Rendezvous, connection: Connection) -> None:
        # Imported here, since machines without a GPU need no Triton.
        from anyep.backends.cuda.gpu import Gpu
        from anyep.gpu_connection import GpuConnection

        gpu_connection = GpuConnection(
            made_on_all_ranks(rendezvous, Gpu), group, rendezvous, connection, self.control
        )
        self.heap, self.is_heap_on_host = gpu_connection.heap, gpu_connection.is_on_host
        self.device_control = gpu_connection.device_control
        try:
            made_on_all_ranks(rendezvous, partial(self._make_gpu_modes, gpu_connection))
        except BaseException:
            self.lifetime = self.low_latency = None
            gpu_connection.close()
            raise

    def _make_gpu_modes(self, gpu_connection: GpuConnection) -> None:
        from anyep.backends.cuda.elastic import GpuElasticOps
        from anyep.backends.cuda.lifetime import GpuLifetime
        from anyep.backends.cuda.ops_normal import GpuNormalOps

        options = self.options
        low_latency = None
        if options.low_latency_mode:
            from anyep.backends.cuda.ops_low_latency import GpuLowLatencyOps

            low_latency = GpuLowLatencyOps(
                gpu_connection.device_control,
                gpu_connection.reports,
                self.control,
                gpu_connection.ranks_on_gpu,
                options.enable_shrink,
            )
            masks = Masks(self.control, self.region, low_latency.kernel_masks)
            start = self.region.num_bytes + options.num_nvl_bytes
            self.low_latency = LowLatencyMode(self.control, low_latency, masks, start, options.num_rdma_bytes)
        rings = self._rings()
        ops = GpuNormalOps(
            gpu_connection.device_control,
            gpu_connection.reports,
            gpu_connection.windows,
            gpu_connection.grow,
            gpu_connection,
            rings,
        )
        self.normal = NormalMode(self.control, ops, rings)
        control = gpu_connection.device_control
        self.elastic = GpuElasticOps(control.gpu, control.batches, gpu_connection.share_of_sms)
        self.communication_stream = ops.stream
        self.lifetime = GpuLifetime(
            gpu_connection.device_control,
            gpu_connection.reports,
            self.control,
            low_latency,
            memory=(ops, gpu_connection.windows),
        )

    def before_low_latency(self, run_async: bool) -> None:
        """Raise errors of earlier calls, of both modes, before a low-latency call."""
        assert self.low_latency is not None
        self.normal.ops.before(run_async)
        self.low_latency.listen()

    def is_quiet(self) -> bool:
        """Whether low-latency calls may be repeated: nothing has gone wrong in either mode, nothing follows
        the phases of calls, and no graph is captured."""
        return self.low_latency is not None and self.low_latency.ops.is_quiet() and self.normal.ops.is_quiet()

    def refuse(self, call: Call, error: BaseException, tell: Callable[[Call, AnyEPError], None]) -> None:
        """The arguments of a call are wrong: notify the peers before this rank raises the error."""
        if not isinstance(error, Exception):
            self.control.fail(call, error)
            return
        reason = error if isinstance(error, AnyEPError) else InvalidCall(f"{type(error).__name__}: {error}")
        try:
            tell(call, reason)
        except BaseException as worse:
            self.control.fail(call, worse)
            raise

    # The end

    @property
    def is_idle(self) -> bool:
        """Whether no call is under way, as far as that can be determined."""
        assert self.lifetime is not None
        return self.lifetime.is_idle

    def leave(self, error: BaseException) -> None:
        """Report the exception that ends this rank's use of the session, and end the calls under way."""
        assert self.lifetime is not None
        self.control.leave(error)
        self.lifetime.stop()

    def check_can_close(self) -> None:
        """Raise if the session cannot be closed now."""
        assert self.lifetime is not None
        self.lifetime.check_can_close()

    def close(self) -> Callable[[], None]:
        """Finish the calls that are under way, and release what the session holds.

        Returns a function that frees memory whose lifetime ends with the session; call it afterwards.
        """
        assert self.lifetime is not None
        lifetime, self.lifetime = self.lifetime, None
        try:
            lifetime.close()
        finally:
            self.control.close()
        return lifetime.free_what_died

    def close_later(self) -> None:
        """Close after all calls, without waiting for them."""
        assert self.lifetime is not None
        self.lifetime.close_later()


def _proxies(
    transport: Transport, region: ControlRegion, own_node: int
) -> Callable[[Mapping[int, int], CallRings], Proxy]:
    """Makes the proxy of a call."""

    def new_proxy(remote: Mapping[int, int], rings: CallRings) -> Proxy:
        return RingProxy(transport, region, own_node, remote, rings)

    return new_proxy
