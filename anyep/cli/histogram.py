"""Histograms of latencies: buckets in equal ratios, and bars for a terminal. Pure arithmetic and text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

NUM_BUCKETS: Final = 12
EIGHTHS: Final = ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")


@dataclass(frozen=True)
class Bucket:
    """The number of times from `from_s` to `to_s`, exclusive; the last bucket includes `to_s`."""

    from_s: float
    to_s: float
    count: int


@dataclass(frozen=True)
class Latency:
    """The distribution of many times of one operation."""

    p50_s: float
    p99_s: float
    samples: int
    histogram: list[Bucket]


def latency_of(seconds: Sequence[float]) -> Latency:
    return Latency(percentile(seconds, 0.5), percentile(seconds, 0.99), len(seconds), buckets_of(seconds))


def percentile(values: Sequence[float], share: float) -> float:
    """The value that a share `share` of all values does not exceed.

    >>> percentile([3.0, 1.0, 2.0], 0.99), percentile([3.0, 1.0, 2.0], 0.5)
    (3.0, 2.0)
    """
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def buckets_of(seconds: Sequence[float], num_buckets: int = NUM_BUCKETS) -> list[Bucket]:
    """Buckets from the smallest value to the largest, with widths that grow by a constant factor.

    Latencies have a long tail: this shows both the bulk and the tail.

    >>> [(bucket.from_s, bucket.to_s, bucket.count) for bucket in buckets_of([1.0, 1.5, 2.0, 3.0, 16.0], 4)]
    [(1.0, 2.0, 2), (2.0, 4.0, 2), (4.0, 8.0, 0), (8.0, 16.0, 1)]
    """
    least, most = min(seconds), max(seconds)
    if least == most:
        return [Bucket(least, most, len(seconds))]
    inner = [least * (most / least) ** (index / num_buckets) for index in range(1, num_buckets)]
    edges = [least, *inner, most]
    counts = [0] * num_buckets
    for value in seconds:
        counts[sum(edge <= value for edge in inner)] += 1
    return list(map(Bucket, edges[:-1], edges[1:], counts))


def bar(count: int, most: int, width: int) -> str:
    """A bar for `count` out of `most`, in eighths of a character; always visible if `count` is not 0.

    >>> bar(4, 8, 5), bar(1, 1000, 5), bar(0, 8, 5)
    ('██▌', '▏', '')
    """
    eighths = max(1, round(8 * width * count / most)) if count else 0
    return "█" * (eighths // 8) + EIGHTHS[eighths % 8]


def marks_of(latency: Latency) -> list[str]:
    """For each bucket, the percentiles that lie in it.

    >>> marks_of(latency_of([1.0, 1.0, 4.0]))[0], marks_of(latency_of([1.0, 1.0, 4.0]))[-1]
    ('p50', 'p99')
    """
    last = len(latency.histogram) - 1
    marks = []
    for index, bucket in enumerate(latency.histogram):
        inside = [
            name
            for name, value in (("p50", latency.p50_s), ("p99", latency.p99_s))
            if bucket.from_s <= value and (value < bucket.to_s or index == last)
        ]
        marks.append(", ".join(inside))
    return marks
