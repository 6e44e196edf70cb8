"""`anyep warmup`: compile all kernels for the CPU ahead, for example when a container image is built."""

from __future__ import annotations

import importlib
import json
import time
from typing import Annotated

import typer

from anyep.errors import NotSupported


def warmup(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON: folder, kernels, compiled, loaded, seconds.")
    ] = False,
) -> None:
    """Compile all kernels for the CPU now, so that no program has to wait for it."""
    started = time.perf_counter()
    # Imported here, since other commands do not need Numba; this imports everything that a Buffer uses.
    importlib.import_module("anyep.api.buffer")
    from anyep.backends.cpu.compilation import check_cache, compile_kernels

    check_cache()
    compilation = compile_kernels()
    seconds = time.perf_counter() - started
    if compilation.folder is None:
        raise NotSupported(f"compiled kernels could not be kept: {compilation.reason}")
    record = {
        "folder": str(compilation.folder),
        "kernels": compilation.num_kernels,
        "compiled": compilation.num_compiled,
        "loaded": compilation.num_kernels - compilation.num_compiled,
        "seconds": round(seconds, 3),
    }
    if as_json:
        print(json.dumps(record, indent=2))
    else:
        print(
            f"{record['kernels']} kernels are ready in {record['folder']}: {record['compiled']} compiled,"
            f" {record['loaded']} loaded, in {seconds:.1f} s"
        )
