"""Many pairs of dispatch and combine between nodes, one after the other on the same Buffers: routings, sizes,
configs and paths change from pair to pair, ranks are late at random, results are held by some ranks only.
"""

from __future__ import annotations

import random
import time
from collections import deque
from typing import Any

import torch

from anyep import Config
from tests.support.cases import COMBINE_FROM, ROUTINGS, ROW_DTYPES, Case, buffer_for, check_case, delays
from tests.support.world import RankContext

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
        combine_from=chance.choice(COMBINE_FROM),
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


def soak_between_nodes(
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
        control = buffer.runtime.control
        control.between_steps = None if case.delay_seed is None else delays(case.delay_seed, context.rank)
        try:
            check_case(context, case, buffer)
        except BaseException as error:
            error.add_note(f"pair {number} of seed {seed}: {case}")
            raise
        finally:
            control.between_steps = None
    return time.monotonic() - started
