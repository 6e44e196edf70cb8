"""`ElasticBuffer` between two hosts: network namespaces, over NIXL."""

from __future__ import annotations

import pytest

from tests.support.elastic_cases import ElasticCase, check_case
from tests.support.places import Place

HOSTS = Place("cpu", 4, num_nodes=2, hosts=True)
CASES = {
    "compact": ElasticCase((7, 5, 6, 4), num_topk=6, missing=0.1, num_biases=1, num_nodes=2),
    "expanded": ElasticCase(
        (7, 0, 6, 4), num_topk=8, local_experts=3, alignment=4, pads=True, expands=True, num_nodes=2
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("place", [HOSTS.param()])
@pytest.mark.parametrize("name", CASES)
def test_between_hosts(place: Place, name: str) -> None:
    place.world().run(check_case, CASES[name])
