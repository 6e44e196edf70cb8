"""Ids that are neither an expert nor -1 are refused with a sentence; once they were dropped silently."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.places import Place
from tests.support.wrong_ids import VALUES, check, refuse_in_low_latency_mode, refuse_in_normal_mode

TIMEOUT_S = 200.0
NODES: dict[str, Any] = {"ranks_per_node": 1}
LOOPBACK: dict[str, Any] = {"ranks_per_node": 1, "network": "loopback"}
CPU, SIMULATED = Place("cpu", 3), Place("simulated", 2)
SIMULATED_GROUP = pytest.mark.xdist_group("oracle of simulated-2")


def params(values: tuple[int, ...], names: tuple[str, ...]) -> list[Any]:
    """All values on one node, and one each elsewhere; on the simulated GPU in calls of a few names only. The
    rest is for `make test-all`."""
    quick = [CPU.param({}, value, (), name=f"{CPU}-{value}") for value in values]
    quick.append(CPU.param(NODES, values[0], (), name="nodes"))
    quick.append(CPU.param(LOOPBACK, values[1], (), name="loopback"))
    quick.append(SIMULATED.param({}, values[2], names, name=str(SIMULATED), marks=SIMULATED_GROUP))
    quick += [
        Place("cuda", size).param({}, value, (), name=f"cuda-{size}-{value}")
        for size in (2, 3, 8)
        for value in values
        if value != 6
    ]
    slow = [(CPU, NODES, value) for value in values[1:]] + [(CPU, LOOPBACK, value) for value in values[2:]]
    slow += [(SIMULATED, {}, value) for value in values[1:3]]
    return quick + [
        place.param(how, value, (), marks=pytest.mark.slow, name=f"{place}-{how}-{value}")
        for place, how, value in slow
    ]


@pytest.mark.parametrize(("place", "how", "value", "names"), params(VALUES, ("dispatch", "worst case")))
def test_normal_mode(place: Place, how: dict[str, Any], value: int, names: tuple[str, ...]) -> None:
    check(place, place.world().run(refuse_in_normal_mode, value, how, names, timeout=TIMEOUT_S), value)


@pytest.mark.parametrize(
    ("place", "how", "value", "names"), params(VALUES, ("dispatch with a hook", "asynchronous combine"))
)
def test_low_latency_mode(place: Place, how: dict[str, Any], value: int, names: tuple[str, ...]) -> None:
    check(place, place.world().run(refuse_in_low_latency_mode, value, how, names, timeout=TIMEOUT_S), value)
