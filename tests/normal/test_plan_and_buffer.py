"""What `anyep plan` accepts, a Buffer accepts: both refuse with the same sentence."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from anyep import Config, InvalidCall
from anyep.api.buffer import Buffer
from tests.support.cases import buffer_for
from tests.support.commands import anyep
from tests.support.world import RankContext, get_world

RANKS = 3


def sentence_of(call: Any) -> str:
    try:
        call()
    except InvalidCall as error:
        return str(error)
    return "nothing was refused"


def refuse(context: RankContext, what: str) -> str:
    """The sentence that a Buffer says to a layout, a dispatch or its own making."""
    buffer = buffer_for(context, None)
    ids = torch.zeros(2, 2, dtype=torch.int64)

    def low_latency(hidden: int) -> None:
        latency = Buffer(context.group, 0, 1 << 20, low_latency_mode=True, device="cpu")
        rows = torch.zeros(2, hidden, dtype=torch.bfloat16)
        try:
            latency.low_latency_dispatch(rows, ids, 4, RANKS, use_fp8=True)
        finally:
            latency.destroy()

    def dispatch(**others: Any) -> None:
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, RANKS)
        given = {
            "x": torch.zeros(2, 32, dtype=torch.bfloat16),
            "num_tokens_per_rank": per_rank,
            "is_token_in_rank": in_rank,
            "num_tokens_per_expert": per_expert,
        }
        buffer.dispatch(**(given | others))

    return sentence_of(
        {
            "experts": lambda: buffer.get_dispatch_layout(ids, 256),
            "no experts": lambda: buffer.get_dispatch_layout(ids, 0),
            "local experts": lambda: buffer.get_dispatch_layout(ids, RANKS * 1025),
            "top-k": lambda: buffer.get_dispatch_layout(torch.zeros(2, 129, dtype=torch.int64), RANKS),
            "no top-k": lambda: buffer.get_dispatch_layout(torch.zeros(2, 0, dtype=torch.int64), RANKS),
            "odd SMs": lambda: Config(7),
            "SMs": lambda: dispatch(config=Config(258)),
            "row bytes": lambda: dispatch(x=torch.zeros(2, 4, dtype=torch.bfloat16)),
            "fp8": lambda: low_latency(192),
            "nodes": lambda: Buffer(context.group, 1 << 20, 1 << 20, device="cpu", ranks_per_node=2),
            "empty nodes": lambda: Buffer(context.group, 1 << 20, 1 << 20, device="cpu", ranks_per_node=0),
        }[what]
    )


# What a Buffer refuses, the options that say the same to the planner, and the argument that an option is for.
SAME_IN_BOTH: dict[str, tuple[str, str, str]] = {
    "experts": ("--experts 256", "", ""),
    "no experts": ("--experts 0", "num_experts", "--experts"),
    "local experts": (f"--experts {RANKS * 1025}", "", ""),
    "top-k": ("--experts 3000 --topk 129", "topk_idx has", "--topk asks for"),
    "no top-k": ("--experts 3000 --topk 0", "topk_idx has", "--topk asks for"),
    "odd SMs": ("--num-sms 7", "num_sms", "--num-sms"),
    "SMs": ("--num-sms 258", "num_sms", "--num-sms"),
    "row bytes": ("--experts 30 --hidden 4", "", ""),
    "fp8": ("--experts 30 --dtype fp8 --low-latency-tokens 4 --hidden 192", "hidden is", "--hidden is"),
    "nodes": ("--experts 30 --ranks-per-node 2", "ranks_per_node", "--ranks-per-node"),
    "empty nodes": ("--experts 30 --ranks-per-node 0", "ranks_per_node", "--ranks-per-node"),
}


@pytest.mark.parametrize("what", SAME_IN_BOTH)
def test_both_refuse_with_the_same_sentence(what: str) -> None:
    options, argument, option = SAME_IN_BOTH[what]
    (said,) = set(get_world(RANKS).run(refuse, what))
    finished = anyep("plan", "--ranks", str(RANKS), *options.split())
    assert (finished.returncode, finished.stdout) == (2, "")
    assert finished.stderr == f"anyep: {said.replace(argument, option)}\n"


def test_low_latency_mode_takes_bf16_rows_only() -> None:
    finished = anyep("plan", "--dtype", "fp32", "--low-latency-tokens", "8")
    assert finished.returncode == 2
    assert "--dtype is 'fp32', but low-latency calls take bf16 rows" in finished.stderr


@pytest.mark.parametrize("ranks", ["3", "8,12"])
def test_one_refused_number_of_ranks_is_enough(ranks: str) -> None:
    finished = anyep("plan", "--ranks", ranks, "--experts", "256", "--ranks-per-node", "4", "--json")
    assert (finished.returncode, finished.stdout) == (2, "")
    assert "do not divide over" in finished.stderr


def test_the_planner_still_needs_no_torch() -> None:
    script = (
        "import sys; sys.argv = ['anyep', 'plan', '--ranks', '3', '--experts', '256']\n"
        "from anyep.cli.main import main\n"
        "try:\n    main()\n"
        "except SystemExit as end:\n    sys.exit(10 + (end.code or 0) + ('torch' in sys.modules))\n"
    )
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    assert finished.returncode == 12
