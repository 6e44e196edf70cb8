"""The multi-process service runs as long as it is needed, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from anyep.backends.cuda.mps import MultiProcessService
from tests.support.mps import processes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not MultiProcessService.is_installed(), reason="there is no NVIDIA MPS here"),
]


def wait_until_gone(folder: Path) -> None:
    deadline = time.monotonic() + 20
    while (processes(folder) or folder.exists()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not processes(folder)
    assert not folder.exists()


USE_THE_GPU = "import torch; print(torch.ones(3, device='cuda').sum().item())"


def test_it_runs_and_ends() -> None:
    with MultiProcessService() as environment:
        folder = Path(environment["CUDA_MPS_PIPE_DIRECTORY"])
        finished = subprocess.run(
            [sys.executable, "-c", USE_THE_GPU],
            env=os.environ | environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        assert finished.stdout == "3.0\n"
        assert len(processes(folder)) == 2  # the control and the server
    wait_until_gone(folder)


def test_it_ends_with_a_killed_parent() -> None:
    code = (
        "import os, time, sys, subprocess\n"
        "from anyep.backends.cuda.mps import MultiProcessService\n"
        "with MultiProcessService() as environment:\n"
        "    environment = os.environ | environment\n"
        f"    subprocess.run([sys.executable, '-c', {USE_THE_GPU!r}], env=environment, check=True)\n"
        "    print(environment['CUDA_MPS_PIPE_DIRECTORY'], flush=True)\n"
        "    time.sleep(100)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "3.0\n"
        folder = Path(parent.stdout.readline().strip())
        assert folder.is_dir()
        assert len(processes(folder)) == 2
        parent.send_signal(signal.SIGKILL)
    wait_until_gone(folder)
