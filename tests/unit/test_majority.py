"""Of ranks that do not reach each other, at most one group goes on."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from anyep.core.majority import has_majority


@given(st.lists(st.integers(1, 3), min_size=1, max_size=6), st.data())
def test_two_groups_never_go_on(ranks_of_hosts: list[int], data: st.DataObject) -> None:
    hosts = [host for host, num_ranks in enumerate(ranks_of_hosts) for _ in range(num_ranks)]
    # A partition is between hosts; each side may have lost more ranks.
    side = [data.draw(st.booleans()) for _ in ranks_of_hosts]
    dead = [data.draw(st.booleans()) for _ in hosts]
    groups = [
        [is_dead or side[host] != here for host, is_dead in zip(hosts, dead, strict=True)]
        for here in (True, False)
    ]
    assert not all(has_majority(hosts, masked) for masked in groups)


@given(st.lists(st.integers(1, 3), min_size=1, max_size=6), st.data())
def test_of_hosts_in_reach_one_group_goes_on(ranks_of_hosts: list[int], data: st.DataObject) -> None:
    hosts = [host for host, num_ranks in enumerate(ranks_of_hosts) for _ in range(num_ranks)]
    side = [data.draw(st.booleans()) for _ in ranks_of_hosts]
    groups = [[side[host] != here for host in hosts] for here in (True, False)]
    assert any(has_majority(hosts, masked) for masked in groups)
