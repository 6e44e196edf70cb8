"""Normal mode between virtual nodes of GPUs, without a GPU: what goes wrong, and what ranks hear of it.

Results are compared in `tests/normal/test_oracle.py`.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.support.node_scenarios import NUM_RANKS, SCENARIOS
from tests.support.places import Place

FOUR = Place("simulated", NUM_RANKS, num_nodes=2)
pytestmark = [
    pytest.mark.skipif(
        find_spec("triton") is None, reason="Triton is not installed: pip install anyep[cuda]"
    ),
    pytest.mark.xdist_group(f"oracle of {FOUR.device}-{FOUR.num_ranks}"),
]
OFTEN = (
    "wrong counts by node",
    "a combine with a handle of another dispatch",
    "a combine with another part 4 of a handle",
    "a combine with another part 9 of a handle",
    "more rows to relay than the worst case allows",
    "small windows",
)
"""What differs most; the others in `make test-all`."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in OFTEN else [pytest.mark.slow]) for name in SCENARIOS]
)
def test_wrong_calls(name: str) -> None:
    SCENARIOS[name].check(FOUR.world())
