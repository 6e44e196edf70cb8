"""Chains: the kernels of a batch as CUDA graphs, so that one call of the driver launches all of them.

    launches[:, GRID] = ...                                # as `run_batch` reads them, LAUNCH_WORDS each
    chain = Chain(launches, context_of(0), stream=7)
    words[CHAIN] = chain.address                           # from now on `run_batch` launches the graphs

A chain has several instances of one graph, which runs launch in turn: most of the time the next one is not in
flight. `run_batch` gives an instance those arguments that have changed since it was last launched. Launches
of the same instance run one after the other, whatever their streams, in the order of the host's calls.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from typing import Any, Final

import numpy as np

from anyep.backends.cpu.kernels import driver_calls as words
from anyep.backends.cuda import driver

Array = np.ndarray[Any, Any]
LAUNCHING: Final = ("cuStreamIsCapturing", "cuGraphExecKernelNodeSetParams_v2", "cuGraphLaunch")
"""The functions of the driver that `run_batch` calls, in the order of the words of a batch."""
POINTER: Final = ctypes.c_void_p
MAKING: Final = {
    "cuGraphCreate": (POINTER, ctypes.c_uint),
    "cuGraphAddKernelNode_v2": (POINTER, POINTER, POINTER, ctypes.c_size_t, POINTER),
    "cuGraphInstantiateWithFlags": (POINTER, POINTER, ctypes.c_ulonglong),
    "cuGraphExecDestroy": (POINTER,),
    "cuGraphDestroy": (POINTER,),
}
"""Those by which a chain is made, with the types of their arguments."""
UPLOAD: Final = "cuGraphUpload"


class Parameters(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = (
        ("function", POINTER),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("pointers_to_arguments", POINTER),
        ("extra", POINTER),
        ("kernel", POINTER),
        ("context", POINTER),
    )


def is_possible() -> bool:
    """Whether the driver has the functions."""
    try:
        return all(map(driver.address_of, (*LAUNCHING, *MAKING)))
    except AttributeError:
        return False


class Chain:
    """Graphs of these launches, with the arguments and the grids that they have now; no grid may be empty.

    Raises RuntimeError if the driver cannot make them. `stream` is one of the GPU that is not captured.
    """

    def __init__(self, launches: Array, context: int, stream: int) -> None:
        num_launches = len(launches)
        instances, instance_words = words.NODES + words.NODE_WORDS * num_launches, 1 + num_launches
        self._words = np.zeros(instances + instance_words * words.NUM_INSTANCES, np.int64)
        self.address = int(self._words.ctypes.data)
        """The words, as `run_batch` reads them."""
        nodes = self._words[words.NODES : instances].reshape(num_launches, words.NODE_WORDS)
        with driver.relaxed(), driver.current(context):
            made, previous = _Graphs(context), 0
            # At the end of the process, the driver frees the graphs, and may be gone already.
            weakref.finalize(self, made.destroy).atexit = False
            for launch, node in zip(launches, nodes, strict=True):
                parameters = Parameters.from_address(node[1:].ctypes.data)
                parameters.function, parameters.extra = int(launch[words.FUNCTION]), int(launch[words.EXTRA])
                parameters.grid[:] = launch[words.GRID : words.GRID + 3].tolist()
                parameters.block[:] = int(launch[words.THREADS]), 1, 1
                parameters.shared_bytes, parameters.context = int(launch[words.SHARED_BYTES]), context
                previous = node[0] = made.add(parameters, previous)
            for instance in self._words[instances:].reshape(words.NUM_INSTANCES, instance_words):
                instance[0] = made.instantiate(stream)
                instance[1:] = launches[:, words.VERSION]


class _Graphs:
    """A graph whose nodes follow one another, and its instances. Its nodes name those of the instances, so it
    lives as long as they do."""

    def __init__(self, context: int) -> None:
        self._functions = {name: driver.function(name, *types) for name, types in MAKING.items()}
        self._context = context
        self._process = os.getpid()
        self._instances: list[int] = []
        graph = POINTER()
        self._call("cuGraphCreate", ctypes.byref(graph), 0)
        self._graph = graph.value or 0

    def add(self, parameters: Parameters, previous: int) -> int:
        """Add a kernel after the previous node (0 for none); returns its node."""
        node, before = POINTER(), POINTER(previous)
        num_before = 1 if previous else 0
        arguments = (
            ctypes.byref(node),
            self._graph,
            ctypes.byref(before),
            num_before,
            ctypes.byref(parameters),
        )
        self._call("cuGraphAddKernelNode_v2", *arguments)
        return node.value or 0

    def instantiate(self, stream: int) -> int:
        """A new instance; the GPU has it before the next work of the stream begins."""
        instance = POINTER()
        self._call("cuGraphInstantiateWithFlags", ctypes.byref(instance), self._graph, 0)
        self._instances.append(instance.value or 0)
        try:
            upload = driver.function(UPLOAD, POINTER, POINTER)
        except AttributeError:
            # The first launch uploads it.
            return self._instances[-1]
        driver.check(upload(self._instances[-1], stream), UPLOAD)
        return self._instances[-1]

    def destroy(self) -> None:
        """Free everything; instances in flight are freed by the driver when they have run."""
        # A child of this process has no GPU.
        if os.getpid() != self._process:
            return
        with driver.relaxed(), driver.current(self._context):
            for instance in self._instances:
                self._functions["cuGraphExecDestroy"](instance)
            self._functions["cuGraphDestroy"](self._graph)

    def _call(self, name: str, *arguments: Any) -> None:
        driver.check(self._functions[name](*arguments), name)
