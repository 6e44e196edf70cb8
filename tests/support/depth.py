"""How deep tests go: `make test` draws few examples of each property, `make test-all` many (DEEP_TESTS=1).

    @examples(15, deep=200)
    @given(cases(num_ranks=4))
    def test_any_case(case: Case) -> None: ...

Tests that are only for `make test-all` (long, or about rare sizes) carry the marker `slow`.
"""

from __future__ import annotations

import os
from typing import Final

from hypothesis import HealthCheck, Phase, settings

IS_DEEP: Final = os.environ.get("DEEP_TESTS") == "1"
SHRINKS: Final = os.environ.get("SHRINK_EXAMPLES") != "0"
"""Whether the smallest example that fails is looked for. On a GPU, whose time is short, any one will do."""


def examples(quick: int, *, deep: int) -> settings:
    """The settings of a property: how many examples it draws, without a limit on the time of each."""
    return settings(
        max_examples=deep if IS_DEEP else quick,
        deadline=None,
        phases=[phase for phase in Phase if SHRINKS or phase not in (Phase.shrink, Phase.explain)],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
