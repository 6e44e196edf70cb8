"""A CUDA driver that records what it is asked to do, for machines without a GPU.

    with recording_driver() as driver:
        Batch([...]).run(Moment(7), {...})
    driver.calls == [Launched("copy_for_peers", (24, 1, 1), 128, 0, 7, b"..."), Recorded(event, stream), ...]

Kernels are compiled for an H100 and never run. Each call returns 0, or what `driver.statuses` says. Graphs
are recorded as the kernels that they launch, with the arguments that their instance has.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch

POINTER, NUMBER = ctypes.c_void_p, ctypes.c_uint
FIRST_FUNCTION = 1000
FIRST_NODE = 2000
FIRST_GRAPH = 3000
FIRST_INSTANCE = 4000
CONTEXT = 77
OUT = ctypes.POINTER(POINTER)
IMPLICIT = 906
"""What CUDA answers to questions about the default stream while another stream is captured."""


class Launched(NamedTuple):
    """A kernel on a stream, with its packed arguments."""

    kernel: str
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int
    stream: int
    packed: bytes


class Recorded(NamedTuple):
    """An event was recorded on a stream."""

    event: int
    stream: int


class Waits(NamedTuple):
    """A stream waits for an event."""

    stream: int
    event: int


class NodeSet(NamedTuple):
    """The node of an index, in the instance of an index, was given new arguments."""

    instance: int
    node: int


class GraphLaunched(NamedTuple):
    """An instance of a graph was launched on a stream."""

    instance: int
    stream: int
    kernels: tuple[Launched, ...]
    """As if each had been launched on this stream."""


Call = Launched | Recorded | Waits | NodeSet | GraphLaunched


class RecordingDriver:
    """The functions of the driver that AnyEP calls."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.statuses: dict[int, int] = {}
        """What the call of an index returns instead of 0."""
        self.context = 0
        """The current one."""
        self.capturing: dict[int, int] = {}
        """The streams that are captured, with their status; IMPLICIT is an error instead."""
        self.loaded: list[str] = []
        """The kernels that were loaded."""
        self.refusals: dict[str, int] = {}
        """What functions that load kernels or make graphs return instead of 0, by name."""
        self.graphs: dict[int, list[Launched]] = {}
        """The nodes of each graph that is alive."""
        self.instances: dict[int, tuple[int, list[Launched]]] = {}
        """The graph of each instance that is alive, and the nodes as they are now."""
        self.uploads: list[tuple[int, int]] = []
        """Each instance that was uploaded, and the stream."""
        self._num_graphs = self._num_instances = 0
        self._names: list[str] = []
        launch_types = (POINTER, *[NUMBER] * 7, POINTER, POINTER, POINTER)
        self.cuLaunchKernel = ctypes.CFUNCTYPE(ctypes.c_int, *launch_types)(self._launch)
        self.cuEventRecord = ctypes.CFUNCTYPE(ctypes.c_int, POINTER, POINTER)(self._record)
        self.cuCtxPushCurrent_v2 = ctypes.CFUNCTYPE(ctypes.c_int, POINTER)(self._push)
        self.cuCtxPopCurrent_v2 = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(POINTER))(self._pop)
        self.cuStreamWaitEvent = ctypes.CFUNCTYPE(ctypes.c_int, POINTER, POINTER, NUMBER)(self._wait)
        graphs = {
            "cuStreamIsCapturing": (self._is_capturing, POINTER, ctypes.POINTER(ctypes.c_int)),
            "cuGraphCreate": (self._create, OUT, NUMBER),
            "cuGraphAddKernelNode_v2": (self._add, OUT, POINTER, OUT, ctypes.c_size_t, POINTER),
            "cuGraphInstantiateWithFlags": (self._instantiate, OUT, POINTER, ctypes.c_uint64),
            "cuGraphUpload": (self._upload, POINTER, POINTER),
            "cuGraphExecKernelNodeSetParams_v2": (self._set_node, POINTER, POINTER, POINTER),
            "cuGraphLaunch": (self._launch_graph, POINTER, POINTER),
            "cuGraphExecDestroy": (self._destroy_instance, POINTER),
            "cuGraphDestroy": (self._destroy, POINTER),
        }
        for name, (method, *types) in graphs.items():
            setattr(self, name, ctypes.CFUNCTYPE(ctypes.c_int, *types)(method))

    @property
    def kernels(self) -> list[str]:
        """The names of the kernels that were launched."""
        return [launched.kernel for launched in self.launched]

    @property
    def launched(self) -> list[Launched]:
        """The kernels that were launched, one by one or by graphs."""
        found: list[Launched] = []
        for call in self.calls:
            if isinstance(call, Launched):
                found.append(call)
            elif isinstance(call, GraphLaunched):
                found += call.kernels
        return found

    def _answer(self, call: Call) -> int:
        assert self.context == CONTEXT
        self.calls.append(call)
        return self.statuses.pop(len(self.calls) - 1, 0)

    def _launch(self, *arguments: Any) -> int:
        function, x, y, z, threads, _, _, shared_bytes, stream, _, extra = arguments
        return self._answer(self._kernel(function, (x, y, z), threads, shared_bytes, stream or 0, extra))

    def _kernel(
        self, function: int, grid: tuple[int, int, int], threads: int, shared: int, stream: int, extra: int
    ) -> Launched:
        assert all(grid), "each dimension of a grid"
        words = (ctypes.c_void_p * 5).from_address(extra)
        assert (words[0], words[2], words[4]) == (1, 2, None), "the array of CU_LAUNCH_PARAM_..."
        num_bytes = ctypes.c_size_t.from_address(words[3] or 0).value
        packed = ctypes.string_at(words[1] or 0, num_bytes)
        return Launched(self._names[function - FIRST_FUNCTION], grid, threads, shared, stream, packed)

    def _record(self, event: int, stream: int | None) -> int:
        return self._answer(Recorded(event, stream or 0))

    def _wait(self, stream: int | None, event: int, flags: int) -> int:
        assert flags == 0
        return self._answer(Waits(stream or 0, event))

    # Graphs

    def _node(self, parameters: int) -> Launched:
        """A kernel as CUDA_KERNEL_NODE_PARAMS_v2 describes it."""
        layout = struct.Struct("@Q7I4xQQQQ")
        function, x, y, z, threads, block_y, block_z, shared_bytes, *pointers = layout.unpack(
            ctypes.string_at(parameters, layout.size)
        )
        arguments, extra, kernel, context = pointers
        assert (block_y, block_z, arguments, kernel, context) == (1, 1, 0, 0, CONTEXT)
        return self._kernel(function, (x, y, z), threads, shared_bytes, 0, extra)

    def _is_capturing(self, stream: int | None, status: Any) -> int:
        assert self.context == CONTEXT
        found = self.capturing.get(stream or 0, 0)
        if found == IMPLICIT:
            return IMPLICIT
        status[0] = found
        return 0

    def _create(self, graph: Any, flags: int) -> int:
        assert flags == 0
        self._num_graphs += 1
        graph[0] = FIRST_GRAPH + self._num_graphs - 1
        self.graphs[graph[0]] = []
        return self.refusals.get("cuGraphCreate", 0)

    def _add(self, node: Any, graph: int, before: Any, num_before: int, parameters: int) -> int:
        nodes = self.graphs[graph]
        assert [before[index] for index in range(num_before)] == [FIRST_NODE + len(nodes) - 1][: len(nodes)]
        node[0] = FIRST_NODE + len(nodes)
        nodes.append(self._node(parameters))
        return self.refusals.get("cuGraphAddKernelNode_v2", 0)

    def _instantiate(self, instance: Any, graph: int, flags: int) -> int:
        assert flags == 0
        if "cuGraphInstantiateWithFlags" in self.refusals and self.instances:
            return self.refusals["cuGraphInstantiateWithFlags"]
        self._num_instances += 1
        instance[0] = FIRST_INSTANCE + self._num_instances - 1
        self.instances[instance[0]] = (graph, list(self.graphs[graph]))
        return 0

    def _upload(self, instance: int, stream: int | None) -> int:
        assert self.context == CONTEXT
        assert not self.capturing.get(stream or 0)
        self.uploads.append((instance - FIRST_INSTANCE, stream or 0))
        return self.refusals.get("cuGraphUpload", 0)

    def _set_node(self, instance: int, node: int, parameters: int) -> int:
        graph, nodes = self.instances[instance]
        assert graph in self.graphs, "the nodes of a graph that is gone"
        status = self._answer(NodeSet(instance - FIRST_INSTANCE, node - FIRST_NODE))
        if status == 0:
            nodes[node - FIRST_NODE] = self._node(parameters)
        return status

    def _launch_graph(self, instance: int, stream: int | None) -> int:
        assert not self.capturing.get(stream or 0), "a graph in a graph"
        kernels = tuple(node._replace(stream=stream or 0) for node in self.instances[instance][1])
        return self._answer(GraphLaunched(instance - FIRST_INSTANCE, stream or 0, kernels))

    def _destroy_instance(self, instance: int) -> int:
        del self.instances[instance]
        return 0

    def _destroy(self, graph: int) -> int:
        del self.graphs[graph]
        return 0

    # What loads kernels

    def cuDevicePrimaryCtxRetain(self, context: Any, device: int) -> int:  # noqa: N802
        context._obj.value = CONTEXT
        return 0

    def _push(self, context: int) -> int:
        assert self.context == 0
        self.context = context
        return 0

    def _pop(self, popped: Any) -> int:
        popped[0], self.context = self.context, 0
        return 0

    def cuModuleLoadData(self, module: Any, cubin: bytes) -> int:  # noqa: N802
        assert self.context == CONTEXT
        if "cuModuleLoadData" in self.refusals:
            return self.refusals["cuModuleLoadData"]
        assert cubin.startswith(b"\x7fELF")
        return 0

    def cuModuleGetFunction(self, function: Any, module: Any, name: bytes) -> int:  # noqa: N802
        function._obj.value = FIRST_FUNCTION + len(self._names)
        self._names.append(name.decode())
        self.loaded.append(name.decode())
        return 0

    def cuFuncSetAttribute(self, function: Any, attribute: int, value: int) -> int:  # noqa: N802
        return 0

    def cuGetErrorString(self, status: int, text: Any) -> int:  # noqa: N802
        text._obj.value = b"what went wrong"
        return 0


@contextmanager
def recording_driver() -> Iterator[RecordingDriver]:
    """Kernels of this process are compiled for an H100, and launched by a driver that records."""
    from anyep.backends.cuda import batch, driver

    recorder = RecordingDriver()
    for known in (batch._loaded, driver.context_of):
        known.cache_clear()
    with (
        mock.patch.object(driver, "_library", return_value=recorder),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)),
        mock.patch.object(torch.cuda, "current_device", return_value=0),
    ):
        yield recorder
    for known in (batch._loaded, driver.context_of):
        known.cache_clear()
