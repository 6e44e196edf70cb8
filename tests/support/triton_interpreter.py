"""Runs checks of Triton kernels in Triton's interpreter, which needs no GPU.

    run_interpreted(check_sums, "cpu")

A function that was decorated under `TRITON_INTERPRET=1` cannot be compiled any more, so the interpreter has a
process of its own. It is forked from the server that ranks come from, with the first check, and lives as long
as they do. A check is a function of a module that can be imported; it raises if something is wrong.
"""

from __future__ import annotations

import ctypes
import importlib
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.support.world import RankContext, World, shared_world


def run_interpreted(check: Callable[..., Any], *arguments: Any) -> Any:
    """What `check(*arguments)` returns in the interpreter's process."""
    world = shared_world("Triton's interpreter", lambda: World(1, become_interpreter))
    return world.run(_call, check, arguments, timeout=240.0)[0]


def _call(_: RankContext, check: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    return check(*arguments)


def become_interpreter(_: int) -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    prepare()
    from anyep.backends.cpu import compile_kernels

    # Checks compare with them.
    compile_kernels()


def let_tensors_be_bounds_of_ranges() -> None:
    """Triton 3.6 makes an int of an array with one element, which NumPy 2.4 refuses."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    patch = interpreter._patch_lang_tensor

    def patch_and_mend(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_and_mend


def understand_assembly() -> None:
    """The inline assembly that our kernels have: to read the GPU's clock, and to tell the host something."""
    import triton.language as tl

    interpreter = importlib.import_module("triton.runtime.interpreter")

    def run_assembly(_: Any, assembly: str, __: str, values: list[Any], *___: Any) -> Any:
        words = [value.data for value in values]
        result = np.zeros(words[0].shape if words else 1, np.int32), tl.int32
        if "%globaltimer" in assembly:
            # Kernels look at the clock while they wait for another rank, which needs the core.
            time.sleep(0.001)
            result = np.array([time.monotonic_ns()], np.int64), tl.int64
        elif "ld.acquire.sys.global.u64 $0, [$1];" in assembly:
            result = words[0].copy(), tl.int64
            for index, (address, is_read) in enumerate(zip(*(word.flat for word in words), strict=True)):
                result[0].flat[index] = int64_at(address).value if is_read else 0
        else:
            assert "st.release.sys.global.u64 [$1], $2;" in assembly
            if len(words) == 2:
                words.append(np.ones_like(words[0]))
            for address, value, is_written in zip(*(word.flat for word in words), strict=True):
                if is_written:
                    int64_at(address).value = value
        handle = interpreter.TensorHandle(*result)
        return SimpleNamespace(get_result=lambda _: handle)

    def int64_at(address: Any) -> ctypes.c_int64:
        return ctypes.c_int64.from_address(int(address))

    interpreter.InterpreterBuilder.create_inline_asm = run_assembly


def forget_compiled_triton() -> None:
    """Let Triton be imported again: torch has done so, and Triton's own functions were decorated then."""
    for name in [name for name in sys.modules if name.split(".")[0] == "triton"]:
        if not name.startswith("triton._C"):
            del sys.modules[name]


def change_the_language_once() -> None:
    """Patch triton.language once instead of at every call.

    The interpreter changes hundreds of functions with every call of a kernel, and of every function that a
    kernel calls. In a process that only interprets, once is enough: all modules of the language at once, as
    what was changed for one of them must not be changed again for another.
    """
    import triton.language as tl

    interpreter = importlib.import_module("triton.runtime.interpreter")
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    stays = SimpleNamespace(restore=lambda: None)
    interpreter._patch_lang = lambda function: stays


def remember_types() -> None:
    """The interpreter makes a table of all types whenever it wants to know one of them."""
    import triton.language as tl

    interpreter = importlib.import_module("triton.runtime.interpreter")
    look_up = interpreter._get_np_dtype
    known: dict[Any, Any] = {}

    def remember(dtype: Any) -> Any:
        element = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
        if isinstance(element, tl.pointer_type):
            return look_up(dtype)
        if element not in known:
            known[element] = look_up(element)
        return known[element]

    interpreter._get_np_dtype = remember


def remember_shapes() -> None:
    """Every result of an operation has a type and a shape, made of many small objects; few are different."""
    import triton.language.core as core

    shapes: dict[Any, Any] = {}
    blocks: dict[Any, Any] = {}
    make_block = core.block_type.__init__

    def init_tensor(self: Any, handle: Any, kind: Any) -> None:
        lengths = tuple(kind.shape) if kind.is_block() else ()
        if lengths not in shapes:
            count = core.constexpr(math.prod(lengths))
            shapes[lengths] = count, core.tuple([core.constexpr(length) for length in lengths])
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.numel, self.shape = shapes[lengths]

    def init_block(self: Any, element: Any, shape: Any) -> None:
        key = element.name, tuple(getattr(length, "value", length) for length in shape)
        if key in blocks:
            self.__dict__.update(blocks[key], element_ty=element)
        else:
            make_block(self, element, shape)
            blocks[key] = dict(self.__dict__)

    core.tensor.__init__ = init_tensor
    core.block_type.__init__ = init_block


def copy_no_arguments() -> None:
    """Arguments are in memory that the interpreter can read. What it would do to copy them from and to a GPU
    leaves cycles, which keep tensors alive until garbage is collected."""
    executor = importlib.import_module("triton.runtime.interpreter").GridExecutor
    executor._init_args_hst = lambda self, arguments, options: (arguments, options)
    executor._restore_args_dev = lambda self, *_: None


def look_for_no_overflow() -> None:
    """Turn off the overflow check, which repeats every integer sum in 64 bits."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    interpreter.interpreter_builder.options = replace(
        interpreter.interpreter_builder.options, sanitize_overflow=False
    )


def prepare() -> None:
    forget_compiled_triton()
    let_tensors_be_bounds_of_ranges()
    understand_assembly()
    change_the_language_once()
    copy_no_arguments()
    remember_types()
    remember_shapes()
