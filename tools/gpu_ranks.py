"""Starts ranks of a tool that share the GPUs of this machine, and collects what they print."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, os.environ.get("ANYEP_MEASURED_SOURCE", str(Path(__file__).resolve().parent.parent)))

from anyep.errors import AnyEPError as AnyEPError

SOURCE = "ANYEP_MEASURED_SOURCE"
"""Names the folder of the copy of the repository that ranks import anyep from; by default this one."""


def outputs_of(
    script: str, num_ranks: int, arguments: Sequence[Any], variables: Mapping[str, str] | None = None
) -> list[bytes]:
    """Run a script with `--rank`, `--ranks`, `--store` and these arguments on every rank; returns what the
    ranks have printed. `variables` are added to the environment."""
    from anyep.cli.gpus import placed

    with placed("cuda", num_ranks) as placement, tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, script, "--ranks", str(num_ranks), "--store", f"{folder}/store"]
        command += map(str, arguments)
        environment = {**os.environ, **placement.environment, **(variables or {})}
        ranks = [
            subprocess.Popen([*command, "--rank", str(rank)], env=environment, stdout=subprocess.PIPE)
            for rank in range(num_ranks)
        ]
        outputs = [rank.communicate()[0] for rank in ranks]
        if any(rank.returncode for rank in ranks):
            raise AnyEPError("a rank has failed, see above")
    return outputs


def join(rank: int, num_ranks: int, store: str) -> Any:
    """Take part in a Gloo group of all ranks, on the first GPU."""
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=num_ranks)
    return dist.group.WORLD
