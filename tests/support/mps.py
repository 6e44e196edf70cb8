"""NVIDIA's multi-process service, as it is found on a machine: its folders and processes."""

from __future__ import annotations

import tempfile
from pathlib import Path

from anyep.backends.cuda.mps import FOLDER_PREFIX


def folders(where: Path | None = None) -> set[Path]:
    """Of the services that AnyEP has started, in the folder for temporary files or in another one."""
    return set((where or Path(tempfile.gettempdir())).glob(f"{FOLDER_PREFIX}*"))


def processes(folder: Path) -> set[str]:
    """The ids and command lines of the processes of services in this folder, or below it."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
            variables = (process / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        is_wanted = any(
            variable.decode(errors="replace").startswith(f"CUDA_MPS_PIPE_DIRECTORY={folder}")
            for variable in variables
        )
        if b"nvidia-cuda-mps" in words[0] and is_wanted:
            found.add(f"{process.name} {b' '.join(words).decode()}")
    return found
