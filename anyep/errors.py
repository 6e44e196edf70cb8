"""The exceptions of AnyEP, and the checks that raise the simplest of them.

Every exception is an `AnyEPError` with one sentence that says what is wrong and what to do. All of them
can be pickled, so that a launcher can carry them from a rank to its parent.
"""

from __future__ import annotations

import operator

TYPE_CHECKING = False  # that of typing, which `import anyep` need not wait for
if TYPE_CHECKING:
    from typing import SupportsIndex


class AnyEPError(Exception):
    """The base of every exception that AnyEP raises on purpose."""


class InvalidCall(AnyEPError, ValueError):
    """An argument is wrong; nothing was sent."""


class Disagreement(AnyEPError):
    """The ranks called different functions, or the same function with different things."""


class PeerLost(AnyEPError):
    """Another rank failed, died, or is out of reach."""


class Masked(PeerLost):
    """The other ranks go on without this one; they can take it back."""


class WaitTimeout(AnyEPError, TimeoutError):
    """A wait passed its deadline."""


class BufferBroken(AnyEPError):
    """The Buffer was used after it failed or was destroyed."""


class NotSupported(AnyEPError):
    """This machine, or this installation, cannot do what was asked."""


class Outdated(NotSupported, ImportError):
    """A package that AnyEP needs is too old. Also an ImportError: it is raised by imports."""


def whole_number(name: str, value: SupportsIndex, minimum: int) -> int:
    """`value` as an int of at least `minimum`, or an `InvalidCall` that names it.

    >>> whole_number("ranks", 8, minimum=1)
    8
    >>> whole_number("ranks", 0, minimum=1)
    Traceback (most recent call last):
    anyep.errors.InvalidCall: ranks is 0: it must be at least 1
    """
    try:
        number = operator.index(value)
    except TypeError:
        raise InvalidCall(f"{name} is {value!r}: it must be a whole number") from None
    if number < minimum:
        raise InvalidCall(f"{name} is {number}: it must be at least {minimum}")
    return number


def expert_twice(token: int, expert: int) -> InvalidCall:
    """What to raise for an expert that a token names twice, where that is not allowed.

    >>> expert_twice(token=3, expert=7)
    InvalidCall('topk_idx has expert 7 twice for token 3: the experts of a token must be distinct')
    """
    return InvalidCall(
        f"topk_idx has expert {expert} twice for token {token}: the experts of a token must be distinct"
    )


def no_expert(token: int, column: int, value: int, num_experts: int) -> InvalidCall:
    """What to raise for an id that is neither an expert nor -1.

    >>> no_expert(token=3, column=1, value=300, num_experts=256)
    InvalidCall('topk_idx is 300 for token 3 in column 1: it must be 0 to 255, or -1 for no expert')
    """
    return InvalidCall(
        f"topk_idx is {value} for token {token} in column {column}: it must be 0 to {num_experts - 1}, or -1"
        f" for no expert"
    )
