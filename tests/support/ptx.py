"""Compiles Triton kernels for sm_90 on a machine without a GPU; what was compiled is in Triton's cache."""

from __future__ import annotations

import inspect
import re
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from anyep.backends.cuda.compiled import Leaf, Machine, compile_now, compiled_by_triton


def ptx_of(
    kernel: Any,
    types: dict[str, str],
    constants: dict[str, Any],
    options: dict[str, Any],
    stage: str = "ptx",
) -> str:
    """The PTX of a kernel, or an earlier `stage`; arguments whose type is not given are i32. The members of
    groups have types of their own ("x"), or by group ("out.x"). Pointers are aligned to 16 bytes, and so are
    the integers that a kernel is specialized for: as for the sizes of real calls."""
    arguments = [param for param in kernel.params if param.name not in constants]
    leaves = [_leaves(kernel, param, types) for param in arguments]
    text: str = compiled_by_triton(kernel, leaves, constants, options, 90).asm[stage]
    return text


def machine_code_of(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], options: dict[str, Any]
) -> Machine:
    """The machine code of a kernel, as it is loaded on a GPU."""
    arguments = [param for param in kernel.params if param.name not in constants]
    leaves = [_leaves(kernel, param, types) for param in arguments]
    return compile_now(kernel, leaves, constants, options, 90)


def _leaves(kernel: Any, param: Any, types: dict[str, str]) -> Any:
    annotation = inspect.signature(kernel.fn).parameters[param.name].annotation
    group = kernel.fn.__globals__.get(annotation)
    if not hasattr(group, "_fields"):
        return _leaf(types.get(param.name, "i32"), param.do_not_specialize)
    number = "i64" if param.do_not_specialize else "i32"
    kinds = [types.get(f"{param.name}.{name}", types.get(name, number)) for name in group._fields]
    return group(*(_leaf(kind, param.do_not_specialize) for kind in kinds))


def _leaf(kind: str, is_free: bool) -> Leaf:
    return Leaf(kind, kind.startswith("*") or not is_free)


def spilled_bytes(ptx: str) -> int:
    """What a thread keeps in memory because it has not enough registers, once the PTX is machine code."""
    from triton import knobs

    with TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        # Triton brings it along: it makes the machine code on a machine with a GPU.
        command = [knobs.nvidia.ptxas.path, "-v", "--gpu-name=sm_90a", source, "-o", source.with_suffix(".o")]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return sum(int(count) for count in re.findall(r"(\d+) bytes spill", printed))
