"""Which ranks may go on without others that they do not reach: never two groups, each without the other."""

from __future__ import annotations

from collections.abc import Sequence


def has_majority(hosts: Sequence[int], masked: Sequence[bool]) -> bool:
    """Whether the ranks that are not masked are on more than half of the hosts, or on half with rank 0's.

    Args:
        hosts: The host of each rank.
        masked: Whether each rank is masked.

    >>> has_majority([0, 0, 1, 1], [False, True, True, True])
    True
    >>> has_majority([0, 0, 1, 1], [True, True, False, False])
    False
    >>> has_majority([0, 1, 2], [True, False, False]), has_majority([0, 1, 2], [False, True, True])
    (True, False)
    """
    left = {host for host, is_masked in zip(hosts, masked, strict=True) if not is_masked}
    twice, all_hosts = 2 * len(left), len(set(hosts))
    return twice > all_hosts or (twice == all_hosts and hosts[0] in left)
