"""Programs of the docs that need a GPU; tests/examples runs the others."""

from __future__ import annotations

from pathlib import Path

from tests.support.gpu import NEEDS_GPU
from tests.support.scripts import code_of, launch_script

pytestmark = NEEDS_GPU

NAMES = """
import torch, torch.distributed as dist
from anyep import Buffer
local_rank, num_nvl_bytes = 0, 1 << 24
"""
END = """
print(buffer)
buffer.destroy()
dist.destroy_process_group()
"""


def test_a_graph(tmp_path: Path) -> None:
    script = tmp_path / "graph.py"
    script.write_text(code_of("docs/howto/cuda-graphs.md"))
    finished = launch_script(script, num_ranks=1)
    assert finished.returncode == 0, finished.stderr
    assert "rank 0 replayed a dispatch and a combine" in finished.stdout


def test_a_buffer_on_a_gpu(tmp_path: Path) -> None:
    script = tmp_path / "gpus.py"
    script.write_text(NAMES + code_of("docs/gpus.md") + END)
    finished = launch_script(script, num_ranks=1)
    assert finished.returncode == 0, finished.stderr
    assert "rank 0 of 1 on cuda" in finished.stdout
