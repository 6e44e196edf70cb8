"""The parts of a training program that pages of the docs show, put together and run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.programs import ROOT
from tests.support.scripts import run_script

MODEL = """
import sys
import torch, torch.distributed as dist
from torch import nn
import anyep
from anyep.nn import ExpertParallelMoE, FeedForward, TopKGate

dist.init_process_group("gloo")
group, num_ranks, hidden, num_experts, step = dist.group.WORLD, dist.get_world_size(), 64, 4, 3
path = sys.argv[1]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        gate = TopKGate(hidden, num_experts, topk=2, device="cpu", dtype=torch.float32)
        experts = [FeedForward(hidden, 32, device="cpu", dtype=torch.float32) for _ in range(4 // num_ranks)]
        layer = ExpertParallelMoE(gate, experts, group, device="cpu")
        self.blocks = nn.ModuleList([nn.Linear(hidden, hidden, device="cpu"), layer])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def loss_of(model, tokens):
    return model(tokens).square().mean()


model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
micro_batches = [torch.randn(6, hidden, device="cpu", dtype=torch.float32) for _ in range(2)]
"""
END = """
print(f"rank {dist.get_rank()} is done")
dist.barrier()
dist.destroy_process_group()
"""
SHARDED_STEP = "loss_of(model, micro_batches[0]).backward()\noptimizer.step()\n"
LAYER = """
layer = model.blocks[1]
x = micro_batches[0]
loss = loss_of(model, x)
"""
SAVED = """
path = f"{path}/{dist.get_rank()}.pt"
torch.save(model, path)
"""


def blocks_of(page: str, containing: str = "") -> list[str]:
    text = (ROOT / page).read_text()
    return [block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if containing in block]


def check(tmp_path: Path, program: str) -> None:
    script = tmp_path / "recipe.py"
    script.write_text(MODEL + program + END)
    finished = run_script(script, str(tmp_path), num_ranks=2)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.count("is done") == 2


def test_a_step_and_a_checkpoint(tmp_path: Path) -> None:
    step, _, checkpoint = blocks_of("docs/training.md")
    check(tmp_path, step + checkpoint + "assert state['step'] == 3\n")


@pytest.mark.slow
def test_fsdp(tmp_path: Path) -> None:
    _, sharded, _ = blocks_of("docs/training.md")
    check(tmp_path, sharded + SHARDED_STEP)


def test_losses_and_a_model_that_is_loaded_again(tmp_path: Path) -> None:
    (losses,) = blocks_of("docs/howto/balanced-experts.md")
    (loaded,) = blocks_of("docs/layers.md", "torch.load(path")
    check(tmp_path, LAYER + losses + "loss.backward()\n" + SAVED + loaded + "loss_of(model, x).backward()\n")
