"""Runs checks of Triton kernels in Triton's interpreter, which needs no GPU.

A function that was decorated under `TRITON_INTERPRET=1` cannot be compiled any more, so the interpreter has a
process of its own. A module of checks has a tuple CHECKS of functions that take a device ("cpu" here) and
raise if something is wrong; `outcomes_of(module)` runs them all and says what each raised.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import subprocess
import sys
import time
import traceback
from types import SimpleNamespace
from typing import Any

import numpy as np

MARKER = "outcomes: "


def outcomes_of(module: str) -> dict[str, str]:
    """The traceback of each check of a module, by its name; nothing if it passed."""
    finished = subprocess.run(
        [sys.executable, "-m", __name__, module],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    lines = [line for line in finished.stdout.splitlines() if line.startswith(MARKER)]
    if finished.returncode or not lines:
        raise RuntimeError(f"the interpreter's process ended with {finished.returncode}:\n{finished.stderr}")
    outcomes: dict[str, str] = json.loads(lines[-1].removeprefix(MARKER))
    return outcomes


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
        result = np.array([0], np.int32), tl.int32
        if "%globaltimer" in assembly:
            result = np.array([time.monotonic_ns()], np.int64), tl.int64
        else:
            assert assembly.startswith("st.release.sys.global.u64 [$1], $2;")
            address, value = (int(value.data.item()) for value in values)
            ctypes.c_int64.from_address(address).value = value
        handle = interpreter.TensorHandle(*result)
        return SimpleNamespace(get_result=lambda _: handle)

    interpreter.InterpreterBuilder.create_inline_asm = run_assembly


def prepare() -> None:
    let_tensors_be_bounds_of_ranges()
    understand_assembly()


def main() -> None:
    prepare()
    from anyep.backends.cpu import compile_kernels

    # Checks compare with them.
    compile_kernels()
    outcomes = {}
    for check in importlib.import_module(sys.argv[1]).CHECKS:
        try:
            check("cpu")
            outcomes[check.__name__] = ""
        except Exception:
            outcomes[check.__name__] = traceback.format_exc()
    print(MARKER + json.dumps(outcomes))


if __name__ == "__main__":
    main()
