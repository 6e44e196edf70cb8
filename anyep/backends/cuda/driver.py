"""The CUDA driver, called through ctypes: loads compiled kernels.

    context = context_of(device=0)
    function = load(cubin, "send_to_windows", context, shared_bytes=0)

Neither a C compiler nor an interface of Triton is needed for this. Kernels are launched from compiled code
(`anyep/backends/cpu/kernels/driver_calls.py`).
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, Final

THREADS_PER_WARP: Final = 32
SHARED_BYTES_WITHOUT_OPT_IN: Final = 48 * 1024
MAX_DYNAMIC_SHARED_BYTES: Final = 8
"""The attribute of a function that allows it more shared memory (CU_FUNC_ATTRIBUTE_...)."""
PARAMETERS_AT: Final = 1
SIZE_AT: Final = 2
END: Final = 0
"""The words of a launch's `extra` array (CU_LAUNCH_PARAM_...)."""
RELAXED: Final = 2
"""The mode of a thread whose other work cannot harm the graph that is captured."""


def packed_arguments(packed: Any, size: ctypes.c_size_t) -> Any:
    """The array by which a launch finds its packed arguments; all three must live as long as it is used."""
    addresses = (ctypes.addressof(packed), SIZE_AT, ctypes.addressof(size))
    return (ctypes.c_void_p * 5)(PARAMETERS_AT, *addresses, END)


@cache
def context_of(device: int) -> int:
    """The context of a GPU, which torch uses, too."""
    context = ctypes.c_void_p()
    check(_library().cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "cuDevicePrimaryCtxRetain")
    return int(context.value or 0)


def load(cubin: bytes, name: str, context: int, shared_bytes: int) -> int:
    """Load a kernel on the GPU of a context, for the rest of the process. Returns its function."""
    library = _library()
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    with current(context):
        check(library.cuModuleLoadData(ctypes.byref(module), cubin), name)
        check(library.cuModuleGetFunction(ctypes.byref(function), module, name.encode()), name)
        if shared_bytes > SHARED_BYTES_WITHOUT_OPT_IN:
            check(library.cuFuncSetAttribute(function, MAX_DYNAMIC_SHARED_BYTES, shared_bytes), name)
        # CUDA loads a function when it is first needed, and would wait for running kernels then.
        load_now = getattr(library, "cuFuncLoad", None)
        if load_now is not None:
            check(load_now(function), name)
    return int(function.value or 0)


@contextlib.contextmanager
def current(context: int) -> Iterator[None]:
    """Make a context of the driver the current one: another GPU's may be this thread's, or none."""
    library = _library()
    check(library.cuCtxPushCurrent_v2(ctypes.c_void_p(context)), "cuCtxPushCurrent")
    try:
        yield
    finally:
        library.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))


def address_of(name: str) -> int:
    """The address of a function of the driver."""
    return int(ctypes.cast(getattr(_library(), name), ctypes.c_void_p).value or 0)


def attribute(number: int, device: int) -> int:
    """An attribute of a GPU (CU_DEVICE_ATTRIBUTE_...)."""
    value, handle = ctypes.c_int(), ctypes.c_int()
    check(_library().cuDeviceGet(ctypes.byref(handle), device), "cuDeviceGet")
    check(_library().cuDeviceGetAttribute(ctypes.byref(value), number, handle), "cuDeviceGetAttribute")
    return int(value.value)


def function(name: str, *types: Any) -> Callable[..., int]:
    """A function of the driver with arguments of these types; AttributeError if it does not have one."""
    return ctypes.CFUNCTYPE(ctypes.c_int, *types)(address_of(name))


@contextlib.contextmanager
def relaxed() -> Iterator[None]:
    """A context in which this thread may allocate memory and load kernels while it captures a graph."""
    mode = ctypes.c_int(RELAXED)
    exchange: Any = None
    with contextlib.suppress(OSError, AttributeError):
        exchange = _library().cuThreadExchangeStreamCaptureMode
        exchange(ctypes.byref(mode))
    try:
        yield
    finally:
        if exchange is not None:
            exchange(ctypes.byref(mode))


def relax_this_thread() -> None:
    """Allow this thread to wait for events without harm to graphs that other threads capture."""
    relaxed_mode = ctypes.c_int(RELAXED)
    with contextlib.suppress(OSError, AttributeError):
        _library().cuThreadExchangeStreamCaptureMode(ctypes.byref(relaxed_mode))


def check(status: int, name: str) -> None:
    """Raise if a call of the driver failed."""
    if status:
        text = ctypes.c_char_p()
        _library().cuGetErrorString(status, ctypes.byref(text))
        reason = (text.value or b"unknown error").decode()
        raise RuntimeError(f"CUDA error {status} in {name}: {reason}")


@cache
def _library() -> Any:
    library = ctypes.CDLL("libcuda.so.1")
    library.cuInit(0)
    return library
