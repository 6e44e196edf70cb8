"""Bytes, times and rates in human-readable form."""

from __future__ import annotations

from typing import Final

from anyep.errors import InvalidCall
from anyep.settings import number_of_bytes

PAGE_BYTES: Final = 4096
"""A smaller number cannot be an intended amount of memory: its unit is missing."""


def parse_bytes(option: str, text: str) -> int:
    """The bytes that an option gives: "80GiB", "24 GB", "1.5TiB", or a plain number of at least a page.

    >>> parse_bytes("--memory", "80GiB"), parse_bytes("--memory", "1.5 MB"), parse_bytes("--memory", "4096")
    (85899345920, 1500000, 4096)
    """
    try:
        num_bytes = int(number_of_bytes(text))
    except ValueError:
        raise InvalidCall(
            f"{option} is {text!r}, which is no amount of memory: write it like 80GiB or 24GB"
        ) from None
    if num_bytes < PAGE_BYTES:
        example = f"{text.strip(' BbIiKk')}GiB" if num_bytes else "80GiB"
        raise InvalidCall(
            f"{option} is {text!r}, which is {num_bytes} bytes, less than a page of memory ({PAGE_BYTES}):"
            f" write it with its unit, like {example}"
        )
    return num_bytes


def format_bytes(num_bytes: int) -> str:
    """Bytes in the largest unit in which the number is at least 1.

    >>> format_bytes(335709824), format_bytes(1024), format_bytes(1023)
    ('320.2 MiB', '1.0 KiB', '1023 B')
    """
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes} B"


def format_seconds(seconds: float) -> str:
    """A short time, in milliseconds or microseconds.

    >>> format_seconds(0.01234), format_seconds(0.00034), format_seconds(0.0000076)
    ('12.34 ms', '340 us', '7.6 us')
    """
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.2f} ms"
    return f"{seconds * 1e6:.0f} us" if seconds >= 1e-4 else f"{seconds * 1e6:.1f} us"


def format_rate(gbps: float) -> str:
    """A rate in GB/s, without its unit.

    >>> format_rate(1039.4), format_rate(3.456)
    ('1039', '3.46')
    """
    return f"{gbps:.0f}" if gbps >= 100 else f"{gbps:.2f}"
