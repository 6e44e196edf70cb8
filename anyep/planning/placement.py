"""Where experts and their replicas go, so that ranks have even loads: greedy, and by node for limited gates.

    placement = place(load, num_replicas=288, num_nodes=4, num_ranks=32)
    placement.experts[9]        # the expert that place 9 has: the first place of rank 1, at 9 places per rank

Loops run over experts and places, never over tokens.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np

from anyep.errors import InvalidCall
from anyep.planning.counts import Array


class Placement(NamedTuple):
    """Experts in places; each rank has as many places as the others, one after the other."""

    experts: Array
    """[place]: the expert there."""
    places: Array
    """[expert, replica]: the places of an expert, in ascending order; -1 beyond its replicas."""
    num_places: Array
    """[expert]: how many places an expert has, at least 1."""


def place(load: Array, num_replicas: int, num_nodes: int, num_ranks: int, num_groups: int = 1) -> Placement:
    """Place one layer's experts by their load.

    First the experts with the highest load per replica get the further replicas; then the heaviest replicas
    go to the least loaded ranks that have room. If the groups of experts divide over the nodes, whole groups
    go to nodes first, and both happens within each node.
    """
    _check(load, num_replicas, num_nodes, num_ranks, num_groups)
    is_by_node = num_groups > 1 and num_groups % num_nodes == 0
    parts = num_nodes if is_by_node else 1
    groups = num_groups if is_by_node else 1
    by_group = load.reshape(groups, -1)
    nodes = pack(by_group.sum(axis=1), parts)
    experts = np.empty(num_replicas, np.int64)
    per_part, ranks_per_part = num_replicas // parts, num_ranks // parts
    numbers = np.arange(len(load)).reshape(groups, -1)
    for part in range(parts):
        mine = numbers[nodes == part].reshape(-1)
        replicas = np.repeat(np.arange(len(mine)), replicate(load[mine], per_part))
        share = (load[mine] / np.bincount(replicas, minlength=len(mine)))[replicas]
        ranks = pack(share, ranks_per_part, same=replicas)
        # Within a rank, places are in the order of experts.
        order = np.lexsort((mine[replicas], ranks))
        experts[part * per_part : (part + 1) * per_part] = mine[replicas][order]
    return placement_of(experts, len(load))


def placement_of(experts: Array, num_experts: int) -> Placement:
    """The placement with these experts in its places.

    >>> placement_of(np.array([0, 1, 1]), 2).places.tolist()
    [[0, -1], [1, 2]]
    """
    num_places = np.bincount(experts, minlength=num_experts)
    places = np.full((num_experts, int(num_places.max())), -1, np.int64)
    order = np.argsort(experts, kind="stable")
    first = np.cumsum(num_places) - num_places
    places[experts[order], np.arange(len(experts)) - first[experts[order]]] = order
    return Placement(experts, places, num_places)


def replicate(load: Array, num_replicas: int) -> Array:
    """The replicas of each expert: one; each further one goes to the expert with the most load per replica.

    >>> replicate(np.array([90.0, 20.0, 40.0]), 5).tolist()
    [3, 1, 1]
    """
    counts = np.ones(len(load), np.int64)
    heap = [(-float(each), expert) for expert, each in enumerate(load)]
    heapq.heapify(heap)
    for _ in range(num_replicas - len(load)):
        expert = heap[0][1]
        counts[expert] += 1
        heapq.heapreplace(heap, (-float(load[expert]) / int(counts[expert]), expert))
    return counts


def pack(load: Array, num_bins: int, same: Array | None = None) -> Array:
    """The bin of each item: the heaviest first, into the lightest bin with room; bins get equally many items.

    Items with the same number in `same`, replicas of an expert, go to different bins where that is possible.

    >>> pack(np.array([5.0, 4.0, 3.0, 1.0]), 2).tolist()
    [0, 1, 1, 0]
    """
    room = len(load) // num_bins
    bins = np.empty(len(load), np.int64)
    loads, counts = np.zeros(num_bins), np.zeros(num_bins, np.int64)
    holders: dict[int, set[int]] = {}
    for item in np.argsort(-load, kind="stable"):
        costs = np.where(counts < room, loads, np.inf)
        taken = holders.setdefault(int(same[item]), set()) if same is not None else set()
        if taken:
            without = costs.copy()
            without[list(taken)] = np.inf
            costs = without if np.isfinite(without).any() else costs
        chosen = int(np.argmin(costs))
        bins[item] = chosen
        loads[chosen] += load[item]
        counts[chosen] += 1
        taken.add(chosen)
    return bins


def _check(load: Array, num_replicas: int, num_nodes: int, num_ranks: int, num_groups: int) -> None:
    experts = len(load)
    if not experts or not np.isfinite(load).all() or (load < 0).any():
        raise InvalidCall("load must be one finite number of at least 0 for each expert")
    for name, count in (("num_nodes", num_nodes), ("num_ranks", num_ranks), ("num_groups", num_groups)):
        if count < 1:
            raise InvalidCall(f"{name} is {count}: it must be at least 1")
    if num_replicas < experts:
        raise InvalidCall(f"num_replicas is {num_replicas}, but there are {experts} experts: each needs one")
    if num_replicas % num_ranks:
        raise InvalidCall(
            f"num_replicas is {num_replicas}, which {num_ranks} ranks cannot share: make it a multiple"
        )
    if num_ranks % num_nodes:
        raise InvalidCall(
            f"num_ranks is {num_ranks}, which {num_nodes} nodes cannot share: make it a multiple"
        )
    if experts % num_groups:
        raise InvalidCall(f"{experts} experts cannot be {num_groups} groups: make num_groups a divisor")
