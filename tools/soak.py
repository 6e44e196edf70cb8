"""Repeats dispatch and combine, in both modes and between virtual nodes, for as long as asked: `make soak`.

    python tools/soak.py --minutes 10 [--seed 1] [--ranks 2,3,4,8]

All that may vary varies. Every case is drawn from a seed that is printed when it fails: shapes, routings,
dtypes, rings down to two rows, windows that are held or dropped, calls in line and beside the caller, random
sleeps between the protocol's steps.
All results are compared with the dense reference, bit for bit.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from anyep import Config
from tests.support import low_latency_cases
from tests.support.cases import (
    COMBINE_FROM,
    ROUTINGS,
    ROW_DTYPES,
    Case,
    buffer_for,
    check_case,
    delays,
    inputs_of,
)
from tests.support.node_soak import soak_between_nodes
from tests.support.world import RankContext, get_world

CASES_PER_ROUND = 20


def random_case(chance: random.Random, num_ranks: int) -> Case:
    dtype = chance.choice(list(ROW_DTYPES))
    send_chunk = chance.randint(1, 8)
    return Case(
        tokens=tuple(chance.choice([0, 1, chance.randint(0, 60)]) for _ in range(num_ranks)),
        hidden=chance.choice([16, 64, 272, 2048]),
        dtype=dtype,
        num_topk=chance.randint(1, 8),
        local_experts=chance.randint(1, 8),
        routing=chance.choice(ROUTINGS),
        send_topk=chance.random() < 0.7,
        num_scales=chance.randint(0, 16) if ROW_DTYPES[dtype].itemsize == 1 else 0,
        strided_scales=chance.random() < 0.5,
        alignment=chance.randint(1, 8),
        worst=chance.random() < 0.3,
        num_biases=chance.randint(0, 2),
        combine_weights=chance.random() < 0.5,
        combine_from=chance.choice(COMBINE_FROM),
        config=Config(2 * chance.randint(1, 10), send_chunk, chance.randint(send_chunk + 1, 40)),
        num_window_bytes=chance.choice([None, None, 0, 1 << 14, 1 << 18]),
        run_async=chance.random() < 0.5,
        delay_seed=chance.choice([None, None, None, chance.randint(0, 10**6)]),
        seed=chance.randint(0, 10**6),
    )


def random_low_latency_case(chance: random.Random, num_ranks: int) -> low_latency_cases.Case:
    most = chance.randint(1, 40)
    use_logfmt = chance.random() < 0.3
    case = low_latency_cases.Case(
        tokens=tuple(chance.choice([0, most, chance.randint(0, most)]) for _ in range(num_ranks)),
        max_tokens=most,
        num_topk=chance.randint(1, 8),
        local_experts=chance.randint(1, 6),
        routing=chance.choice(ROUTINGS),
        travel=chance.choice(low_latency_cases.FORMATS),
        use_logfmt=use_logfmt,
        zero_copy=not use_logfmt and chance.random() < 0.4,
        in_place=chance.random() < 0.5,
        how=chance.choice(["in line", "async", "hook"]),
        combines=chance.randint(1, 3),
        delay_seed=chance.choice([None, None, None, chance.randint(0, 10**6)]),
        seed=chance.randint(0, 10**6),
    )
    return replace(case, hidden=case.hidden_multiple * chance.randint(1, 2))


def run_low_latency_round(context: RankContext, cases: list[low_latency_cases.Case]) -> None:
    """Each case several times in a row, so that calls follow each other closely."""
    for case in cases:
        for again in range(4):
            low_latency_cases.run_case(context, replace(case, seed=case.seed + again), clean=again == 0)


def run_round(context: RankContext, cases: list[Case], seed: int) -> None:
    """A round of cases on one rank; some results are kept over many calls and must not change."""
    chance = random.Random(seed)
    held: list[tuple[Any, Any]] = context.keep.setdefault("held", [])
    for case in cases:
        buffer = buffer_for(context, case.num_window_bytes)
        assert buffer.runtime is not None
        control = buffer.runtime.control
        control.between_steps = None if case.delay_seed is None else delays(case.delay_seed, context.rank)
        check_case(context, case, buffer)
        control.between_steps = None
        if chance.random() < 0.3:
            given = inputs_of(Case(tokens=(20,) * context.num_ranks, seed=case.seed))[context.rank]
            assert given.topk_idx is not None
            per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(
                given.topk_idx, 2 * context.num_ranks
            )
            rows = buffer.dispatch(given.x, None, per_rank, None, in_rank, per_expert)[0]
            assert isinstance(rows, torch.Tensor)
            held.append((rows, rows.clone()))
        while len(held) > 8 or (held and chance.random() < 0.2):
            held.pop(chance.randrange(len(held)))
        for rows, copy in held:
            assert rows.equal(copy), "a result that was held has changed"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--ranks", default="1,2,3,4,8")
    arguments = parser.parse_args()
    counts = [int(part) for part in arguments.ranks.split(",")]
    print(f"soak: seed {arguments.seed}, {arguments.minutes:g} minutes, ranks {arguments.ranks}", flush=True)
    started = time.monotonic()
    num_cases = num_rounds = 0
    while time.monotonic() - started < 60 * arguments.minutes:
        round_seed = arguments.seed + num_rounds
        chance = random.Random(round_seed)
        # Long enough with one number of ranks for windows to be held over many calls.
        num_ranks = counts[num_rounds // 10 % len(counts)]
        cases = [random_case(chance, num_ranks) for _ in range(CASES_PER_ROUND)]
        others = [random_low_latency_case(chance, num_ranks) for _ in range(CASES_PER_ROUND // 2)]
        try:
            get_world(num_ranks).run(run_round, cases, round_seed, timeout=300)
            get_world(num_ranks).run(run_low_latency_round, others, timeout=300)
            if num_ranks > 1:
                per_node = chance.choice([size for size in range(1, num_ranks) if num_ranks % size == 0])
                nodes = (num_ranks // per_node, per_node)
                get_world(num_ranks).run(soak_between_nodes, *nodes, CASES_PER_ROUND, round_seed, timeout=300)
                num_cases += CASES_PER_ROUND
        except BaseException:
            print(f"soak: FAILED in round {num_rounds}, seed {round_seed}, {num_ranks} ranks", flush=True)
            raise
        num_cases += len(cases) + 4 * len(others)
        num_rounds += 1
        if num_rounds % 10 == 0:
            elapsed = time.monotonic() - started
            print(f"soak: {num_cases} cases right after {elapsed:.0f} s ({num_ranks} ranks)", flush=True)
    print(f"soak: {num_cases} cases, all right, in {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
