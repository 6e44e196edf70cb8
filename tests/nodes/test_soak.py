"""A soak between nodes; `make soak` goes on for as long as asked.

ANYEP_SOAK_PAIRS is the number of pairs for each place; ANYEP_SOAK_SEED draws others.
"""

from __future__ import annotations

import os

import pytest

from tests.support.node_soak import soak_between_nodes
from tests.support.places import Place

NUM_PAIRS = int(os.environ.get("ANYEP_SOAK_PAIRS", "150"))
SEED = int(os.environ.get("ANYEP_SOAK_SEED", "1"))
SECONDS_PER_PAIR = 2
PLACES = [
    Place("cpu", 4, num_nodes=2),
    Place("cpu", 8, num_nodes=4),
    Place("cpu", 4, num_nodes=2, hosts=True),
]


@pytest.mark.slow
@pytest.mark.timeout(100 + SECONDS_PER_PAIR * NUM_PAIRS)
@pytest.mark.parametrize("place", [place.param() for place in PLACES])
def test_soak(place: Place) -> None:
    nodes = (place.num_nodes, place.num_ranks // place.num_nodes)
    how = (*nodes, NUM_PAIRS, SEED, place.network)
    seconds = place.world().run(soak_between_nodes, *how, timeout=60 + SECONDS_PER_PAIR * NUM_PAIRS)
    print(f"{NUM_PAIRS} pairs at {place} in {max(seconds):.1f} s")
