"""Checks that all ranks have the same values; the error says which rank has which value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from anyep.errors import Disagreement
from anyep.settings import ARGUMENT, DEFAULT, Chosen, format_bytes

_IN_WORDS: Final = {"num_window_bytes": "auto", "ranks_per_node": "all ranks of a host"}
"""What a value of None means."""


class RankValue(NamedTuple):
    """One value of a rank, and its source: an argument, a variable, a default."""

    value: Any
    source: str = ARGUMENT

    @classmethod
    def of(cls, chosen: Chosen[Any]) -> RankValue:
        return cls(chosen.value, chosen.source)


def check_agreement(values_by_rank: Sequence[Mapping[str, RankValue]]) -> None:
    """Raise `Disagreement` about the first value that differs between ranks, with the source of each.

    >>> check_agreement([{"a": RankValue(2, "ANYEP_A")}, {"a": RankValue(1)}, {"a": RankValue(1)}])
    Traceback (most recent call last):
    anyep.errors.Disagreement: the ranks disagree about a: 2 on rank 0 (ANYEP_A); 1 on ranks 1, 2 (argument)
    """
    for name in values_by_rank[0]:
        values = [by_name[name] for by_name in values_by_rank]
        if all(one.value == values[0].value for one in values):
            continue
        ranks_of: dict[tuple[str, str], list[int]] = {}
        for rank, one in enumerate(values):
            ranks_of.setdefault((_value(name, one.value), one.source), []).append(rank)
        has_variables = any(one.source not in (ARGUMENT, DEFAULT) for one in values)
        listing = "; ".join(
            f"{value} on {_ranks(ranks)}{f' ({source})' if has_variables else ''}"
            for (value, source), ranks in ranks_of.items()
        )
        raise Disagreement(f"the ranks disagree about {name}: {listing}")


def _value(name: str, value: Any) -> str:
    if value is None:
        return _IN_WORDS.get(name, "none")
    if name.endswith("_bytes"):
        return format_bytes(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _ranks(ranks: Sequence[int]) -> str:
    """
    >>> _ranks([3]), _ranks([0, 2])
    ('rank 3', 'ranks 0, 2')
    """
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
