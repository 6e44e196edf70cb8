"""Many pairs of dispatch and combine between nodes, one after the other on the same Buffers: routings, sizes,
configs and paths change from pair to pair, ranks are late at random, results are held by some ranks only.

ANYEP_SOAK_PAIRS is the number of pairs for each topology; ANYEP_SOAK_SEED draws others.
"""

from __future__ import annotations

import os
import random
import time
from collections import deque
from typing import Any

import pytest
import torch

from anyep import Config
from tests.support.cases import ROUTINGS, ROW_DTYPES, Case, buffer_for, check_case, delays
from tests.support.namespaces import TwoHosts
from tests.support.world import RankContext, get_world

NUM_PAIRS = int(os.environ.get("ANYEP_SOAK_PAIRS", "150"))
SEED = int(os.environ.get("ANYEP_SOAK_SEED", "1"))
SECONDS_PER_PAIR = 2
WINDOW_BYTES = (None, 0, 1 << 13, 1 << 15)
"""Automatic; rings alone; windows that hold few results, and those of few ranks."""


def random_case(chance: random.Random, nodes: int, per_node: int) -> Case:
    """Any case; every second one has rings of two or three rows, between nodes, within them, or both."""
    dtype = chance.choice(list(ROW_DTYPES))
    ranks = nodes * per_node
    nvl_send, rdma_send = (
        chance.choice([1, 1, chance.randint(1, 6)]),
        chance.choice([1, 1, chance.randint(1, 4)]),
    )
    nvl_rows = chance.choice([nvl_send + 1, chance.randint(nvl_send + 1, 20)])
    rdma_rows = chance.choice([2 * rdma_send, chance.randint(2 * rdma_send, 20)])
    return Case(
        tokens=tuple(chance.choice([0, 1, chance.randint(0, 40)]) for _ in range(ranks)),
        hidden=chance.choice([16, 48, 272]),
        dtype=dtype,
        num_topk=chance.randint(1, 8),
        local_experts=chance.randint(1, 4),
        routing=chance.choice(ROUTINGS),
        send_topk=chance.random() < 0.7,
        num_scales=chance.randint(0, 4) if ROW_DTYPES[dtype].itemsize == 1 else 0,
        worst=chance.random() < 0.3,
        num_biases=chance.randint(0, 2),
        combine_weights=chance.random() < 0.5,
        combine_from_window=chance.random() < 0.5,
        config=Config(2 * chance.randint(1, 4), nvl_send, nvl_rows, rdma_send, rdma_rows),
        num_window_bytes=chance.choice(WINDOW_BYTES),
        run_async=chance.random() < 0.3,
        delay_seed=chance.choice([None, None, chance.randint(0, 10**6)]),
        ranks_per_node=per_node,
        seed=chance.randint(0, 10**6),
    )


def hold_a_window(buffer: Any, case: Case) -> torch.Tensor:
    """A result of a dispatch to oneself: while it lives, its window is not free."""
    topk_idx = torch.full((4, 1), buffer.rank * case.local_experts)
    per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, case.num_experts)
    recv = buffer.dispatch(torch.zeros(4, 512), None, per_rank, per_node, in_rank, per_expert)[0]
    assert isinstance(recv, torch.Tensor)
    return recv


def soak(
    context: RankContext, nodes: int, per_node: int, num_pairs: int, seed: int, network: str | None = None
) -> float:
    """All ranks draw the same cases; what they hold, each decides for itself. The seconds it took."""
    chance, own_chance = random.Random(seed), random.Random(seed * 100 + context.rank)
    held: deque[torch.Tensor] = deque(maxlen=3)
    started = time.monotonic()
    for number in range(num_pairs):
        case = random_case(chance, nodes, per_node)
        buffer = buffer_for(context, case.num_window_bytes, ranks_per_node=per_node, network=network)
        if number % 10 == 0:
            result = hold_a_window(buffer, case)
            if own_chance.random() < 0.5:
                held.append(result)
            del result
        if own_chance.random() < 0.05:
            held.clear()
        conversation = buffer.runtime.conversation
        conversation.between_steps = (
            None if case.delay_seed is None else delays(case.delay_seed, context.rank)
        )
        try:
            check_case(context, case, buffer)
        except BaseException as error:
            error.add_note(f"pair {number} of seed {seed}: {case}")
            raise
        finally:
            conversation.between_steps = None
    return time.monotonic() - started


@pytest.mark.timeout(100 + SECONDS_PER_PAIR * NUM_PAIRS)
@pytest.mark.parametrize(("nodes", "per_node"), [(2, 2), (4, 2)])
def test_soak(nodes: int, per_node: int) -> None:
    num_ranks = nodes * per_node
    seconds = get_world(num_ranks).run(
        soak, nodes, per_node, NUM_PAIRS, SEED, timeout=60 + SECONDS_PER_PAIR * NUM_PAIRS
    )
    print(f"{NUM_PAIRS} pairs between {nodes} nodes of {per_node} ranks in {max(seconds):.1f} s")


@pytest.mark.timeout(100 + SECONDS_PER_PAIR * NUM_PAIRS)
def test_soak_between_hosts() -> None:
    with TwoHosts(ranks_per_host=2) as hosts:
        seconds = hosts.run(soak, 2, 2, NUM_PAIRS, SEED, "nixl", timeout=60 + SECONDS_PER_PAIR * NUM_PAIRS)
    print(f"{NUM_PAIRS} pairs between two hosts of 2 ranks in {max(seconds):.1f} s")
