"""Memory that cannot be mapped: every rank hears which rank could not map what, why, and what to do."""

from __future__ import annotations

import mmap
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from anyep import AnyEPError
from anyep.api.buffer import Buffer
from anyep.machine import free_memory_bytes
from tests.support.cases import NVL_BYTES, Case, check_case
from tests.support.world import RankContext, get_world

WINDOW = 1 << 29
LIMITED = 1
"""The rank whose address space is limited."""
ADVICE = ("num_window_bytes (0 works", "num_nvl_bytes", "ulimit -v unlimited")


@contextmanager
def limited(num_more_bytes: int) -> Iterator[int]:
    """Let this process map so many bytes more; the limit."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_AS, (mapped + num_more_bytes, before[1]))
    try:
        yield mapped + num_more_bytes
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def make_under_a_limit(context: RankContext, num_more_bytes: int, num_window_bytes: int | None) -> str:
    """One rank may not map all of it. Then it may, and all make a Buffer that works."""

    def make(num_window_bytes: int | None) -> Buffer:
        return Buffer(context.group, NVL_BYTES, device="cpu", num_window_bytes=num_window_bytes)

    limit = num_more_bytes if context.rank == LIMITED else 1 << 50
    message = "nothing was raised"
    with limited(limit):
        try:
            make(num_window_bytes).destroy()
        except AnyEPError as error:
            message = f"{type(error).__name__}: {error}"
    with make(1 << 20) as buffer:
        check_case(context, Case(tokens=(3,) * context.num_ranks), buffer)
    return message


@pytest.mark.parametrize(
    ("num_more_bytes", "num_window_bytes", "what"),
    [
        (WINDOW // 2, WINDOW, "536,870,912 bytes for its windows"),
        (WINDOW + WINDOW // 2, WINDOW, "536,870,912 bytes for the windows of rank 0"),
        (2 * WINDOW + WINDOW // 2, WINDOW, "536,870,912 bytes for results"),
        (1 << 26, None, "[0-9,]+ bytes for its windows"),
    ],
)
def test_address_space_that_is_limited(num_more_bytes: int, num_window_bytes: int | None, what: str) -> None:
    if free_memory_bytes() < 8 * WINDOW:
        pytest.skip("results get a quarter of the free memory: there must be enough of it")
    messages = get_world(2).run(make_under_a_limit, num_more_bytes, num_window_bytes)
    reason = (
        rf"rank 1 could not map {what} \(Cannot allocate memory\): its address space is limited to [0-9,]+"
        r" bytes \(ulimit -v\), [0-9,]+ are mapped"
    )
    assert re.match(f"NotSupported: {reason}", messages[1]), messages[1]
    assert re.match(f"NotSupported: rank 1 could not make its Buffer: {reason}", messages[0]), messages[0]
    assert all(words in message for words in ADVICE for message in messages)


def work_under_a_limit(context: RankContext) -> None:
    with limited(1 << 28), Buffer(context.group, NVL_BYTES, device="cpu", num_window_bytes=0) as buffer:
        check_case(context, Case(tokens=(3,) * context.num_ranks), buffer)


def test_the_advice_helps() -> None:
    get_world(2).run(work_under_a_limit)


def ask_for_too_much(context: RankContext) -> str:
    try:
        Buffer(context.group, NVL_BYTES, device="cpu", num_window_bytes=1 << 62)
    except AnyEPError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def test_more_than_any_machine_has() -> None:
    for rank, message in enumerate(get_world(2).run(ask_for_too_much)):
        assert message.startswith(
            f"NotSupported: rank {rank} could not map 4,611,686,018,427,387,904 bytes for"
        )
