"""Processes that end without `destroy()`: with their own exit codes, soon, silently; their peers are told."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from tests.support.endings import CODES, Ended, Ending, EndingServer
from tests.support.gpu import NEEDS_GPU, service_variables

pytestmark = pytest.mark.xdist_group("endings")
SOON_S = 45.0
"""An ending takes a second at most, on a machine that is busy several times that. The waits that it must not
wait for take 100 s, and those of Gloo longer."""
GONE = r"is gone: its process ended without destroy\(\)"
COMPLAINTS = (
    "terminate called",
    "Fatal Python error",
    "Exception ignored",
    "in thread anyep",
    "Segmentation",
)


@pytest.fixture(scope="module")
def simulated_gpu() -> Iterator[EndingServer]:
    if find_spec("triton") is None:
        pytest.skip("triton is not installed: pip install 'anyep[cuda]'")
    with EndingServer("simulated") as started:
        yield started


@pytest.fixture(scope="module")
def gpu() -> Iterator[EndingServer]:
    with EndingServer("cuda", service_variables()) as started:
        yield started


@pytest.fixture(scope="module")
def server() -> Iterator[EndingServer]:
    with EndingServer("cpu") as started:
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


SLOW = pytest.mark.slow
FEW_ENDINGS = [
    Ending("never called"),
    Ending("idle"),
    Ending("idle", how="exit"),
    Ending("idle", how="exception", held_by="cycle"),
    Ending("idle", thread="another", how="exception"),
    Ending("destroyed", how="exit"),
    Ending("unheard", how="exit", leave_group=False),
    Ending("unheard", how="exception", held_by="nothing"),
    Ending("in vain"),
    Ending("broken", how="exit"),
    Ending("several", held_by="nothing", leave_group=False),
    Ending("in a block", how="exit", leave_group=False),
    Ending("hook held"),
    Ending("in a call", thread="daemon", how="exit"),
]
MORE_ENDINGS = [
    Ending("idle", leave_group=False),
    Ending("idle", how="exception"),
    Ending("idle", held_by="cycle"),
    Ending("idle", held_by="nothing"),
    Ending("idle", thread="another"),
    Ending("unheard"),
    Ending("unheard", held_by="nothing"),
    Ending("unheard", held_by="cycle"),
    Ending("unheard", thread="another", how="exception", held_by="nothing"),
    Ending("in vain", how="exit", held_by="nothing"),
    Ending("in vain", how="exception", held_by="cycle", leave_group=False),
    Ending("in vain", thread="another", how="exception"),
    Ending("broken", how="exception", held_by="nothing"),
    Ending("several", how="exit"),
    Ending("hook held", how="exit", held_by="nothing"),
]
ENDINGS = [*FEW_ENDINGS, *MORE_ENDINGS]


def params(endings: Iterable[Ending], few: Iterable[Ending]) -> list[Any]:
    """Parameters for these endings; all but the few are marked slow."""
    return [
        pytest.param(ending, marks=[] if ending in list(few) else SLOW, id=str(ending)) for ending in endings
    ]


@pytest.mark.parametrize("ending", params(ENDINGS, FEW_ENDINGS))
def test_a_process_that_ends(server: EndingServer, ending: Ending) -> None:
    check_endings(ending, server.run(ending, 2))


NEEDS_NO_STREAM = ("never called", "idle", "destroyed", "broken", "hook held")
"""States that the simulated GPU can be in, where a kernel is over when it has been launched."""
ENDINGS_ON_GPU = [ending for ending in ENDINGS if ending.state not in ("in a call",)]


FEW_ON_A_SIMULATED_GPU = [
    Ending("idle", how="exception", held_by="cycle"),
    Ending("broken", how="exit"),
    Ending("hook held"),
    Ending("closing", how="exit"),
]


@pytest.mark.parametrize(
    "ending",
    params(
        [*(ending for ending in ENDINGS if ending.state in NEEDS_NO_STREAM), FEW_ON_A_SIMULATED_GPU[-1]],
        FEW_ON_A_SIMULATED_GPU,
    ),
)
def test_a_process_that_ends_on_a_simulated_gpu(simulated_gpu: EndingServer, ending: Ending) -> None:
    check_endings(ending, simulated_gpu.run(ending, 2))


@pytest.mark.parametrize(
    "ending", [pytest.param(ending, marks=NEEDS_GPU) for ending in ENDINGS_ON_GPU], ids=str
)
def test_a_process_that_ends_on_a_gpu(gpu: EndingServer, ending: Ending) -> None:
    check_endings(ending, gpu.run(ending, 4))


def check_who_reads_at_the_end(server: EndingServer, num_ranks: int) -> None:
    """A call under way at the end is finished if its peers come soon. Else they hear why not. What they read
    is never wrong."""
    ending = Ending("read at the end")
    for _ in range(3):
        ranks = server.run(ending, num_ranks)
        check_endings(ending, ranks)
        said = [ended.said[0] for ended in ranks[1:]]
        if said == ["right"] * (num_ranks - 1):
            return
        # The machine is very busy.
        assert all(re.match(rf"right|PeerLost: rank 0 .*{GONE}", words) for words in said), ranks
    raise AssertionError(f"calls under way were never finished: {ranks}")


def test_a_call_under_way_at_the_end(server: EndingServer) -> None:
    check_who_reads_at_the_end(server, 3)


@pytest.mark.parametrize("num_ranks", [pytest.param(4, marks=NEEDS_GPU)])
def test_a_call_under_way_at_the_end_on_a_gpu(gpu: EndingServer, num_ranks: int) -> None:
    check_who_reads_at_the_end(gpu, num_ranks)


@pytest.mark.parametrize("state", ["goes on", "in a team"])
def test_a_thread_goes_on_when_the_main_thread_has_ended(server: EndingServer, state: str) -> None:
    """A program is over when its last thread that is not a daemon has ended; until then its Buffers work."""
    ending = Ending(state, thread="unjoined", how="exit")
    ranks = server.run(ending, 2)
    assert [ended.said for ended in ranks] == [["went on"]] * 2, ranks
    check_endings(ending, ranks)


def check_who_waits(server: EndingServer, ending: Ending) -> None:
    ranks = server.run(ending, 3)
    check_endings(ending, ranks)
    for rank in (1, 2):
        waiting = f"while rank {rank} waited for its notify message in dispatch"
        pattern = rf"PeerLost: rank 0 \(pid \d+\) {GONE}, {waiting}"
        assert re.match(pattern, ranks[rank].said[0]), ranks


@pytest.mark.parametrize(
    "ending",
    params(
        [Ending("waited for"), Ending("waited for", held_by="cycle"), Ending("waited for over a network")],
        [Ending("waited for", held_by="cycle"), Ending("waited for over a network")],
    ),
)
def test_who_waits_for_a_rank_that_has_ended(server: EndingServer, ending: Ending) -> None:
    if "network" in ending.state:
        pytest.importorskip("nixl_cu12")
    check_who_waits(server, ending)


def test_who_waits_for_a_rank_that_has_ended_on_a_simulated_gpu(simulated_gpu: EndingServer) -> None:
    check_who_waits(simulated_gpu, Ending("waited for"))


@pytest.mark.parametrize(
    "ending", [pytest.param(Ending("waited for", held_by="cycle"), marks=NEEDS_GPU)], ids=str
)
def test_who_waits_for_a_rank_that_has_ended_on_a_gpu(gpu: EndingServer, ending: Ending) -> None:
    check_who_waits(gpu, ending)


@pytest.mark.parametrize(
    "ending",
    params(
        [
            Ending("over a network"),
            Ending("over a network", how="exit", leave_group=False),
            Ending("over a network", how="exception", held_by="nothing"),
            Ending("over a network", held_by="cycle", thread="another"),
        ],
        [Ending("over a network", how="exit", leave_group=False)],
    ),
)
def test_a_process_that_ends_between_nodes(server: EndingServer, ending: Ending) -> None:
    pytest.importorskip("nixl_cu12")
    check_endings(ending, server.run(ending, 2))
