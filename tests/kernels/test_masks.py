"""The kernels of masks and requests do what the examples in their docstrings say."""

from __future__ import annotations

import numpy as np
import pytest

from anyep.backends.cpu.kernels import masks
from tests.support.arrays import Array


def adopt(
    of_writers: list[list[int]],
    generations: Array,
    masked: Array,
    changed: Array,
    far: tuple[int, ...] = (),
) -> int:
    """What a rank finds where each writer has written a generation of each rank; some writers are far."""
    is_far = np.zeros(len(of_writers), np.bool_)
    is_far[list(far)] = True
    words = np.zeros((len(of_writers), 16), np.int64)
    words[:, : len(of_writers[0])] = of_writers
    return int(masks.adopt_masks(words.ctypes.data, words.strides[0], is_far, generations, masked, changed))


def test_adopt_masks() -> None:
    generations = np.array([0, 2])
    masked, changed = np.zeros(2, np.bool_), np.ones(2, np.bool_)
    words = [[0, 3], [0, 1]]
    assert adopt(words, generations, masked, changed) == 1
    assert generations.tolist() == [0, 3]
    assert masked.tolist() == [False, True]
    assert changed.tolist() == [False, True]
    # The same words again are nothing new.
    assert adopt(words, generations, masked, changed) == 0
    assert changed.tolist() == [False, False]


@pytest.mark.parametrize(("far", "expected"), [((1,), [False, True]), ((), [True, True])])
def test_what_a_masked_rank_of_another_host_says(far: tuple[int, ...], expected: list[bool]) -> None:
    generations = np.zeros(2, np.int64)
    masked, changed = np.zeros(2, np.bool_), np.zeros(2, np.bool_)
    assert adopt([[0, 1], [0, 0]], generations, masked, changed, far) == 1
    adopt([[0, 1], [1, 0]], generations, masked, changed, far)
    assert masked.tolist() == expected


@pytest.mark.parametrize(
    ("of_writers", "generation", "expected"),
    [
        ([0, 0], 0, (0, False)),  # nobody has said anything
        ([0, 1], 0, (1, True)),  # the first time
        ([1, 0], 2, (2, False)),  # an old word, after round 1 took it back
        ([1, 3], 2, (3, True)),  # masked again after round 1
        ([3, 7], 1, (7, True)),  # news of several rounds at once
    ],
)
def test_generations(of_writers: list[int], generation: int, expected: tuple[int, bool]) -> None:
    generations, masked = np.array([generation, 0]), np.array([generation % 2 == 1, False])
    adopt([[word, 0] for word in of_writers], generations, masked, np.zeros(2, np.bool_))
    assert (int(generations[0]), bool(masked[0])) == expected


def test_offers() -> None:
    places = np.zeros((2, 2), np.int64)
    addresses = places.ctypes.data + places.strides[0] * np.arange(2)
    wake_ups = np.array([9 << 32 | 2, 8 << 32 | 2])
    masks.post_requests(addresses, wake_ups.ctypes.data + 8 * np.arange(2), 9, np.array([4, 7]))
    assert places.tolist() == [[4, 7], [4, 7]]
    assert wake_ups.tolist() == [9 << 32 | 1, 8 << 32 | 2]
    places[1] = [3, 9]  # being written
    words = np.ones((2, 2), np.int64)
    masks.read_requests(addresses, words)
    assert words[0].tolist() == [4, 7]
    assert words[1, 0] == 0
