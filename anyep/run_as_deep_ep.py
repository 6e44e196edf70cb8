"""Run a program that was written for deep_ep on AnyEP, unchanged:

    python -m anyep.run_as_deep_ep script.py ...
    python -m anyep.run_as_deep_ep -m some.module ...
    torchrun --nproc-per-node 4 -m anyep.run_as_deep_ep script.py ...

The program gets its own arguments, and is `__main__`; Python processes that it starts find AnyEP as deep_ep,
too.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from anyep.deep_ep_modules import FOLDER, install_as_deep_ep
from anyep.errors import NotSupported

USAGE = "usage: python -m anyep.run_as_deep_ep [--replace] script.py [arguments], or -m module [arguments]"


def main(arguments: list[str]) -> None:
    replace = arguments[:1] == ["--replace"]
    program = arguments[replace:]
    is_module = program[:1] == ["-m"]
    program = program[is_module:]
    if not program or (program[0].startswith("-") and not is_module):
        raise SystemExit(USAGE)
    if not is_module and not Path(program[0]).exists():
        raise SystemExit(f"there is no {program[0]}; {USAGE}")
    try:
        install_as_deep_ep(replace=replace)
    except NotSupported as error:
        raise SystemExit(str(error)) from None
    others = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(FOLDER), *([others] if others else [])])
    sys.argv = program
    if is_module:
        runpy.run_module(program[0], run_name="__main__", alter_sys=True)
    else:
        # Python put this module's folder, or the current one, where a script expects its own folder.
        sys.path.remove(str(FOLDER))
        sys.path[:1] = [str(Path(program[0]).resolve().parent), str(FOLDER)]
        runpy.run_path(program[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
