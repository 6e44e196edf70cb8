"""Error messages about ranks that disagree, are masked, or gave up, for all devices.

`anyep.control.blame` has the messages about ranks that are stuck or lost, and finds these ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from anyep.core.calls import FUNCTIONS, Array, Call, name_of_call
from anyep.core.headers import Field
from anyep.errors import AnyEPError, BufferBroken, Disagreement, InvalidCall, Masked, PeerLost

DERIVED_FIELDS: Final = frozenset({Field.RING_ROWS})
"""These fields always differ if the rows or the channels do, and then explain nothing."""


def disagreement(
    rank: int,
    call: Call,
    headers: Array,
    reason_of: Callable[[int], str],
    signature_words: Mapping[Any, str],
    for_people: Callable[[int, Any], str],
) -> Disagreement:
    """The difference between the headers of messages or records; every rank finds the same one.

    `signature_words` names the fields, the most informative first; `for_people` formats a field of a header;
    `reason_of` returns why a rank refused its call. A rank without a header has 0 as its call number.
    """
    ranks = np.flatnonzero(headers[:, Field.CALL])
    refusing = [int(other) for other in ranks if headers[other, Field.REFUSED]]
    if refusing:
        function = FUNCTIONS[int(headers[refusing[0], Field.KIND])]
        return Disagreement(
            f"rank {refusing[0]} refused its {function} ({name_of_call(call.number)}),"
            f" so rank {rank} cannot go on with its {FUNCTIONS[call.kind]}: {reason_of(refusing[0])}"
        )
    different: dict[int, str] = {}
    for field, name in signature_words.items():
        ranks_by_value: dict[str, list[int]] = {}
        for other in ranks:
            ranks_by_value.setdefault(for_people(field, headers[other]), []).append(int(other))
        if len(ranks_by_value) > 1:
            values = "; ".join(f"{value} on {listed(those)}" for value, those in ranks_by_value.items())
            different[int(field)] = f"about {name}: {values}"
    if not different:
        raise AssertionError("headers that differ agree in every field")
    if Field.KIND in different:
        # Other functions have other fields: only the kind can be compared.
        causes = [different[Field.KIND]]
    else:
        causes = [text for field, text in different.items() if field not in DERIVED_FIELDS]
    listing = ", and ".join(causes or different.values())
    return Disagreement(f"the ranks disagree in {name_of_call(call.number)} {listing}")


def other_routing(call: Call, difference: str) -> Disagreement:
    """The error for handles of different dispatches."""
    return Disagreement(
        f"the ranks disagree in {name_of_call(call.number)} about the routing in the handle: {difference}"
    )


def other_rows(sender: int, receiver: int) -> str:
    """The difference between the handles of two ranks, in the rows from one to the other."""
    return (
        f"the rows that rank {sender} sent to rank {receiver} are of other tokens, or in other channels, in"
        f" the handle of rank {sender} than in that of rank {receiver}; pass the handles of one dispatch on"
        f" all ranks"
    )


def refused_by_kernel(rank: int, call: Call, reason: str, own_rank: int | None = None) -> Disagreement:
    """The error for a call that a kernel of a rank refused."""
    consequence = f", so rank {own_rank} cannot go on with it" if own_rank is not None else ""
    return Disagreement(f"rank {rank} refused its {call}{consequence}: {reason}")


def broken(error: AnyEPError, api: str) -> BufferBroken:
    """The error for a call after a failure."""
    return BufferBroken(f"this {api} is broken since an earlier call: {error}")


def gave_up_before(rank: int, call: Call) -> BufferBroken:
    """The error for a call whose kernels took no part, since this rank had failed before."""
    return BufferBroken(
        f"rank {rank} gave up in an earlier call, and took no part in {call}: make a new Buffer"
    )


def too_many_rows(rank: int, limit: int, arriving: int | None, relays: bool = False) -> InvalidCall:
    """The error for a receiver without room for all arriving rows; a kernel does not report how many, nor
    whether a rank that also `relays` rows would relay too many."""
    what = f"{arriving} rows would arrive there" if arriving is not None else "more rows would arrive there"
    which = ""
    if relays:
        what, which = f"{what}, or it would relay more", " at any rank of the node"
    return InvalidCall(
        f"num_worst_tokens is {limit} on rank {rank}, but {what}:"
        f" nothing was sent; pass at least the largest number of rows that can arrive{which}"
    )


def no_window(call: Call, rank: int | None) -> InvalidCall:
    """The error for rows that can go to windows only; None for a rank that is not known."""
    return InvalidCall(
        f"{'a rank' if rank is None else f'rank {rank}'} has no window for its rows in {call}: between nodes"
        f" rows on GPUs go to windows only, and nothing was sent; pass a larger num_window_bytes, or free"
        f" results of earlier dispatches (there are no windows with heap='host')"
    )


def masked_out(rank: int) -> Masked:
    """The error on a rank that the others have masked."""
    return Masked(
        f"the other ranks go on without rank {rank}: it did not answer in time, or was masked by a"
        f" call; all of them together can take it back by"
        f" low_latency_update_mask_buffer({rank}, mask=False)"
    )


def cut_off(rank: int, masked: Sequence[int], reason: str) -> PeerLost:
    """The error on a rank that cannot know whether those that it does not reach go on without it."""
    why = f" ({reason})" if reason else ""
    return PeerLost(
        f"rank {rank} cannot go on without {listed(masked)}: they may be going on without this host, since"
        f" the ranks that are left are not on most of the hosts, nor on half of them with rank 0's; make a"
        f" new Buffer, of the ranks that reach each other{why}"
    )


def listed(ranks: Sequence[int]) -> str:
    """
    >>> listed([3]), listed([0, 2])
    ('rank 3', 'ranks 0, 2')
    """
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
