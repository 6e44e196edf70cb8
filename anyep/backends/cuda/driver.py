"""The CUDA driver, called through ctypes: loads compiled kernels and launches them.

    kernel = load(cubin, "send_to_windows", 0, num_warps=32, shared_bytes=0, parameters=Struct("@qi"))
    kernel.launch(stream.cuda_stream, (24,), [address, number])

Neither a C compiler nor an interface of Triton is needed for this.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Sequence
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
INVALID_CONTEXT: Final = 201


class Kernel:
    """A kernel that is loaded on the current GPU."""

    def __init__(
        self,
        name: str,
        function: int,
        context: int,
        num_warps: int,
        shared_bytes: int,
        parameters: struct.Struct,
    ) -> None:
        self.name = name
        self._function = function
        self._context = context
        self._threads = num_warps * THREADS_PER_WARP
        self._shared_bytes = shared_bytes
        self._pack = parameters.pack_into
        self._launch: Any = _library().cuLaunchKernel
        self._packed = ctypes.create_string_buffer(max(1, parameters.size))
        self._size = ctypes.c_size_t(parameters.size)
        addresses = (ctypes.addressof(self._packed), SIZE_AT, ctypes.addressof(self._size))
        self._extra = (ctypes.c_void_p * 5)(PARAMETERS_AT, *addresses, END)
        self._extra_at = ctypes.addressof(self._extra)
        self._lock = threading.Lock()

    def launch(self, stream: int, grid: tuple[int, ...], values: Sequence[int]) -> None:
        """Launch on a stream, with these values of the kernel's parameters."""
        # ctypes lets other threads run during the call: the packed values are this thread's until it returns.
        with self._lock:
            self._pack(self._packed, 0, *values)
            status = self._call(stream, grid)
            if status == INVALID_CONTEXT:
                # This thread has not used CUDA before.
                check(_library().cuCtxSetCurrent(ctypes.c_void_p(self._context)), self.name)
                status = self._call(stream, grid)
        if status:
            check(status, self.name)

    def _call(self, stream: int, grid: tuple[int, ...]) -> int:
        status: int = self._launch(
            self._function,
            grid[0],
            grid[1] if len(grid) > 1 else 1,
            grid[2] if len(grid) > 2 else 1,
            self._threads,
            1,
            1,
            self._shared_bytes,
            stream,
            None,
            self._extra_at,
        )
        return status


def load(
    cubin: bytes, name: str, device: int, num_warps: int, shared_bytes: int, parameters: struct.Struct
) -> Kernel:
    """Load a kernel on a GPU, which is the current one, and keep it for the rest of the process. `parameters`
    is the layout of its parameters, that of a C struct."""
    library = _library()
    context, module, function = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    check(library.cuCtxGetCurrent(ctypes.byref(context)), name)
    if not context.value:
        # This thread has not used CUDA before; torch uses the primary context.
        check(library.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), name)
        check(library.cuCtxSetCurrent(context), name)
    check(library.cuModuleLoadData(ctypes.byref(module), cubin), name)
    check(library.cuModuleGetFunction(ctypes.byref(function), module, name.encode()), name)
    if shared_bytes > SHARED_BYTES_WITHOUT_OPT_IN:
        check(library.cuFuncSetAttribute(function, MAX_DYNAMIC_SHARED_BYTES, shared_bytes), name)
    # CUDA loads a function when it is first needed, and would wait for running kernels then.
    load_now = getattr(library, "cuFuncLoad", None)
    if load_now is not None:
        check(load_now(function), name)
    addresses = int(function.value or 0), int(context.value or 0)
    return Kernel(name, *addresses, num_warps, shared_bytes, parameters)


def check(status: int, name: str) -> None:
    """Raise if a call of the driver failed."""
    if status:
        text = ctypes.c_char_p()
        _library().cuGetErrorString(status, ctypes.byref(text))
        reason = (text.value or b"unknown error").decode()
        raise RuntimeError(f"CUDA error {status} in kernel {name}: {reason}")


@cache
def _library() -> Any:
    library = ctypes.CDLL("libcuda.so.1")
    library.cuInit(0)
    number, pointer = ctypes.c_uint, ctypes.c_void_p
    library.cuLaunchKernel.argtypes = [pointer, *[number] * 7, pointer, pointer, pointer]
    return library
