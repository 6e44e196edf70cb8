"""Normal mode between virtual nodes of GPUs, without a GPU: many calls, windows, and what goes wrong.

Results are compared in `tests/normal/test_oracle.py`.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.support.cases import Case, check_case
from tests.support.gpu_pairs import soak
from tests.support.node_scenarios import NUM_RANKS, SCENARIOS, new_node_buffer
from tests.support.places import Place
from tests.support.world import RankContext

FOUR = Place("simulated", NUM_RANKS, num_nodes=2)
pytestmark = [
    pytest.mark.skipif(
        find_spec("triton") is None, reason="Triton is not installed: pip install anyep[cuda]"
    ),
    pytest.mark.xdist_group(f"oracle of {FOUR.device}-{FOUR.num_ranks}"),
]
OFTEN = (
    "wrong counts by node",
    "a combine with another part 4 of a handle",
    "more rows to relay than the worst case allows",
)
"""What differs most; the others in `make test-all`."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in OFTEN else [pytest.mark.slow]) for name in SCENARIOS]
)
def test_wrong_calls(name: str) -> None:
    SCENARIOS[name].check(FOUR.world())


@pytest.mark.slow
def test_soak() -> None:
    """Pairs of all kinds on one Buffer; windows are used again, and rings go around."""
    FOUR.world().run(soak, 40, 1 << 20, 1, 2, timeout=250.0)


def dispatch_more_and_more(context: RankContext) -> list[int]:
    """Calls that need more and more; the windows that there are after each."""
    from anyep import gpu_connection

    usual = gpu_connection.FIRST_WINDOW_BYTES, gpu_connection.BLOCK_BYTES
    gpu_connection.FIRST_WINDOW_BYTES, gpu_connection.BLOCK_BYTES = 4096, 4096  # type: ignore[misc]
    try:
        buffer = new_node_buffer(context)
        num_bytes = []
        for tokens in (2, 40, 5):
            case = Case((tokens,) * NUM_RANKS, hidden=128, routing="one rank", combine_weights=True).at(FOUR)
            check_case(context, case, buffer)
            num_bytes.append(buffer.runtime.windows.num_bytes)
        buffer.destroy()
    finally:
        gpu_connection.FIRST_WINDOW_BYTES, gpu_connection.BLOCK_BYTES = usual  # type: ignore[misc]
    return num_bytes


@pytest.mark.slow
def test_windows_grow() -> None:
    first, *others = FOUR.world().run(dispatch_more_and_more)
    assert others == [first] * (NUM_RANKS - 1)
    # There is room for three times the rows from the beginning.
    assert 4096 < first[0] < first[1] == first[2]
