"""Compiles Triton kernels for sm_90 on a machine without a GPU; what was compiled is in Triton's cache."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any


def ptx_of(kernel: Any, types: dict[str, str], constants: dict[str, Any], options: dict[str, Any]) -> str:
    """The PTX of a kernel; arguments whose type is not given are i32. Pointers are aligned to 16 bytes, and
    so are integers: as for the sizes of real calls."""
    from triton import compile as compile_for
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names
    }
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, kind in enumerate(signature.values())
        if kind != "constexpr"
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    text: str = compile_for(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    return text


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
