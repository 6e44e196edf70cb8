"""Processes that end without `destroy()`: with their own exit codes, soon, silently; their peers are told."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.endings import CODES, Ended, Ending, EndingServer

SOON_S = 15.0
"""An ending takes a second at most, on a machine that is busy several times that. The waits that it must not
wait for take 100 s, and those of Gloo longer."""
COMPLAINTS = ("terminate called", "Fatal Python error", "Exception ignored", "in thread anyep", "Segmentation")


@pytest.fixture(scope="module")
def server() -> Iterator[EndingServer]:
    with EndingServer() as started:
        yield started


def check_endings(ending: Ending, ranks: list[Ended]) -> None:
    """That every rank has ended as its program wanted."""
    code = CODES[ending.how] if ending.thread == "main" or ending.how == "exit" else 0
    for rank, ended in enumerate(ranks):
        assert ended.code == code, (rank, ended)
        assert 0 <= ended.seconds < SOON_S, (rank, ended)
        assert not [words for words in COMPLAINTS if words in ended.output], (rank, ended)
        # What its program raises is told once, by Python; AnyEP adds nothing.
        assert ended.output.count("Traceback") == (ending.how == "exception"), (rank, ended)
        assert not ended.left_behind, (rank, ended)


ENDINGS = [
    Ending("never called"),
    Ending("idle"),
    Ending("idle", leave_group=False),
    Ending("idle", how="exit"),
    Ending("idle", how="exception"),
    Ending("idle", held_by="cycle"),
    Ending("idle", held_by="nothing"),
    Ending("idle", thread="another"),
    Ending("idle", thread="another", how="exception"),
    Ending("destroyed", how="exit"),
    Ending("unheard"),
    Ending("unheard", how="exit", leave_group=False),
    Ending("unheard", how="exception", held_by="nothing"),
    Ending("unheard", held_by="nothing"),
    Ending("unheard", held_by="cycle"),
    Ending("unheard", thread="another", how="exception", held_by="nothing"),
    Ending("in vain"),
    Ending("in vain", how="exit", held_by="nothing"),
    Ending("in vain", how="exception", held_by="cycle", leave_group=False),
    Ending("in vain", thread="another", how="exception"),
    Ending("broken", how="exit"),
    Ending("broken", how="exception", held_by="nothing"),
    Ending("several", how="exit"),
    Ending("several", held_by="nothing", leave_group=False),
    Ending("hook held"),
    Ending("hook held", how="exit", held_by="nothing"),
    Ending("in a call", thread="daemon", how="exit"),
]


@pytest.mark.parametrize("ending", ENDINGS, ids=str)
def test_a_process_that_ends(server: EndingServer, ending: Ending) -> None:
    check_endings(ending, server.run(ending, "cpu", 2))


@pytest.mark.parametrize("state", ["goes on", "in a team"])
def test_a_thread_goes_on_when_the_main_thread_has_ended(server: EndingServer, state: str) -> None:
    """A program is over when its last thread is that is no daemon: until then its Buffers work."""
    ending = Ending(state, thread="unjoined", how="exit")
    ranks = server.run(ending, "cpu", 2)
    assert [ended.said for ended in ranks] == [["went on"]] * 2, ranks
    check_endings(ending, ranks)


@pytest.mark.parametrize(
    "ending",
    [Ending("waited for"), Ending("waited for", held_by="cycle"), Ending("waited for over a network")],
    ids=str,
)
def test_who_waits_for_a_rank_that_has_ended(server: EndingServer, ending: Ending) -> None:
    ranks = server.run(ending, "cpu", 3)
    check_endings(ending, ranks)
    for rank in (1, 2):
        pattern = (
            r"PeerLost: rank 0 \(pid \d+\) is gone: its process ended without destroy\(\),"
            rf" while rank {rank} waited for its letter in dispatch"
        )
        assert re.match(pattern, ranks[rank].said[0]), ranks


@pytest.mark.parametrize(
    "ending",
    [
        Ending("over a network"),
        Ending("over a network", how="exit", leave_group=False),
        Ending("over a network", how="exception", held_by="nothing"),
        Ending("over a network", held_by="cycle", thread="another"),
    ],
    ids=str,
)
def test_a_process_that_ends_between_nodes(server: EndingServer, ending: Ending) -> None:
    pytest.importorskip("nixl_cu12")
    check_endings(ending, server.run(ending, "cpu", 2))
