"""The engine between hosts alone: two ranks over loopback, and two ranks on each of two hosts."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import pytest
import torch
import torch.distributed as dist

from anyep.backends.cpu.heap import OwnBlock, PrivateBlock
from anyep.backends.cpu.kernels.signals import raise_words
from anyep.errors import InvalidCall, PeerLost
from anyep.nixl_packages import NAMES, find_nixl
from anyep.transport import NixlEngine
from anyep.transport.base import MemoryKind, place
from tests.support.namespaces import TwoHosts
from tests.support.patience import scaled
from tests.support.places import Place
from tests.support.programs import run_program
from tests.support.world import RankContext, RankDied, World

pytestmark = pytest.mark.skipif(
    find_nixl(torch.version.cuda) is None,
    reason="NIXL is not installed: pip install 'anyep[network]'",
)

MAX_WAIT_S: Final = 20.0
CLOSE_S: Final = 2.0
NUM_SLOTS: Final = 6
SLOT_BYTES: Final = 300_000
WORDS_BYTES: Final = 4096
"""In front of a heap: words of 64 bits that signals raise, 16 for each sender."""


class Side:
    """A rank's engine, its memory, and the ranks on the other host."""

    def __init__(self, context: RankContext) -> None:
        os.environ.setdefault("UCX_TLS", "tcp,self")
        os.environ.setdefault("UCX_NET_DEVICES", "lo")
        self.rank, num_ranks = context.rank, context.num_ranks
        half = num_ranks // 2
        self.peers = [rank for rank in range(num_ranks) if rank // half != self.rank // half]
        self.heap = OwnBlock("test", WORDS_BYTES + num_ranks * NUM_SLOTS * SLOT_BYTES)
        self.stage = PrivateBlock(num_ranks * NUM_SLOTS * SLOT_BYTES)
        self.words = self.heap.array(0, WORDS_BYTES // 8)
        self.engine = NixlEngine(self.rank, self.heap)
        self.engine.register(self.stage.address, self.stage.num_bytes)
        everyone: list[Any] = [None] * num_ranks
        dist.all_gather_object(everyone, self.engine.describe(), group=context.group)
        self.engine.connect({peer: everyone[peer] for peer in self.peers})

    def word(self, sender: int, index: int) -> int:
        """The offset of a word that a sender raises; the same in every heap."""
        return 8 * (16 * sender + index)

    def seen(self, sender: int, index: int) -> int:
        return int(self.words[16 * sender + index])

    def slot(self, sender: int, number: int) -> int:
        """The offset in a heap where a sender's message of this number goes."""
        return WORDS_BYTES + (sender * NUM_SLOTS + number % NUM_SLOTS) * SLOT_BYTES

    def wait(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + MAX_WAIT_S
        while not condition():
            if not self.engine.poll():
                os.sched_yield()
            assert time.monotonic() < deadline, f"rank {self.rank} waited in vain"

    def wait_for(self, index: int, value: int) -> None:
        """Until every peer has raised this word of its own here."""
        self.wait(lambda: all(self.seen(peer, index) >= value for peer in self.peers))

    def close(self) -> None:
        started = time.monotonic()
        self.engine.close()
        assert time.monotonic() - started < scaled(CLOSE_S)
        self.engine.close()
        assert not self.engine.poll()
        with pytest.raises(InvalidCall, match="the engine is closed"):
            self.engine.put(self.peers[0], [], [(0, 1)])


def connect(context: RankContext) -> None:
    context.keep["side"] = Side(context)


def disconnect(context: RankContext) -> None:
    side = context.keep.pop("side", None)
    if side is not None:
        side.close()


def check_puts(context: RankContext) -> None:
    """Scattered and adjacent pieces of the heap and of other memory, with several signals."""
    side: Side = context.keep["side"]
    engine = side.engine
    stage = side.stage.array(0, 3000, np.uint8)
    stage[:] = np.arange(3000) % 251
    stage += np.uint8(side.rank)
    for peer in side.peers:
        start = side.slot(side.rank, 0)
        pieces = [
            (side.stage.address, start, 1000),
            (side.stage.address + 1000, start + 1000, 1000),
            (side.stage.address + 2900, start + 5000, 100),
            (side.stage.address, start, 0),
        ]
        signals = [(side.word(side.rank, 0), 7), (side.word(side.rank, 1), 2**62)]
        assert engine.put(peer, pieces, signals) == 1
        assert (engine.bytes_put[peer], engine.num_puts[peer]) == (2100, 1)
    side.wait_for(0, 7)
    for peer in side.peers:
        assert side.seen(peer, 1) == 2**62
        expected = np.arange(3000) % 251 + peer
        arrived = side.heap.array(side.slot(peer, 0), 5100, np.uint8)
        assert (arrived[:2000] == expected[:2000]).all()
        assert (arrived[2000:5000] == 0).all()
        assert (arrived[5000:] == expected[2900:]).all()
        side.wait(lambda peer=peer: engine.is_idle(peer))
        assert engine.num_done(peer) == 1


class WithoutGpu:
    """NIXL's agent, which is told that the memory of a GPU is memory of the host, as it is here."""

    def __init__(self, agent: Any) -> None:
        self._agent = agent

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)

    def register_memory(self, region: Any, kind: str) -> Any:
        assert kind in ("DRAM", "VRAM")
        return self._agent.register_memory(region, "DRAM")

    def get_xfer_descs(self, region: Any, kind: str) -> Any:
        assert kind in ("DRAM", "VRAM")
        return self._agent.get_xfer_descs(region, "DRAM")


def check_regions(context: RankContext) -> None:
    """Puts into memory that is exposed besides the heap; rows of a GPU travel apart from other bytes."""
    rank, num_ranks = context.rank, context.num_ranks
    peer = (rank + num_ranks // 2) % num_ranks
    heap, rows, more = OwnBlock("test", 4096), OwnBlock("rows", 1 << 20), OwnBlock("more", 4096)
    engine = NixlEngine(rank, heap)
    engine._agent = WithoutGpu(engine._agent)
    regions = [
        engine.expose(rows.address, rows.num_bytes, MemoryKind.GPU),
        engine.expose(more.address, more.num_bytes),
    ]
    assert regions == [1, 2]
    everyone: list[Any] = [None] * num_ranks
    dist.all_gather_object(everyone, engine.describe(), group=context.group)
    engine.connect({peer: everyone[peer]})
    rows.array(0, 1 << 19, np.uint8)[:] = 1 + rank
    heap.array(1024, 100, np.uint8)[:] = 11 + rank
    pieces = [
        (rows.address, place(1, 1 << 19), 1 << 19),
        (heap.address + 1024, 2048, 100),
        (heap.address + 1024, place(2, 8), 100),
    ]
    engine.put(peer, pieces, [(0, 5)])
    assert (engine.bytes_put[peer], engine.num_puts[peer]) == ((1 << 19) + 200, 2)
    # Small, but not in a notification, which the host would have to copy to the GPU.
    engine.put(peer, [(rows.address, place(1, 1 << 19), 64)], [(8, 6)])
    deadline = time.monotonic() + MAX_WAIT_S
    while heap.array(8, 1)[0] != 6 or not engine.is_idle(peer):
        engine.poll()
        assert time.monotonic() < deadline
    assert heap.array(0, 1)[0] == 5
    assert (rows.array(1 << 19, 1 << 19, np.uint8) == 1 + peer).all()
    assert (heap.array(2048, 100, np.uint8) == 11 + peer).all()
    assert (more.array(8, 100, np.uint8) == 11 + peer).all()
    for at, problem in (
        (place(3, 0), f"rank {peer} has no memory 3: it has exposed 3"),
        (place(2, 4090), f"8 bytes at 4090 are not in memory 2 of rank {peer}"),
    ):
        with pytest.raises(InvalidCall, match=problem):
            engine.put(peer, [(heap.address, at, 8)])
    dist.barrier(group=context.group)
    engine.close()


def check_signals_only_grow(context: RankContext) -> None:
    side: Side = context.keep["side"]
    offset = side.word(side.rank, 2)
    for peer in side.peers:
        tickets = [side.engine.put(peer, [], [(offset, value)]) for value in (9, 4)]
        tickets.append(side.engine.put(peer, [], [(side.word(side.rank, 3), 1)]))
        assert tickets == list(range(tickets[0], tickets[0] + 3))
    side.wait_for(3, 1)
    assert [side.seen(peer, 2) for peer in side.peers] == [9] * len(side.peers)


def check_words(context: RankContext) -> None:
    """What ranks say reaches those it is said to, and nothing else does."""
    side: Side = context.keep["side"]
    assert side.engine.heard() == []
    before = time.monotonic()
    for peer in side.peers:
        side.engine.say(peer, f"{side.rank} to {peer}".encode())
        side.engine.say(peer, b"")
    heard: list[tuple[int, bytes]] = []

    def all_heard() -> bool:
        heard.extend(side.engine.heard())
        return len(heard) == 2 * len(side.peers)

    side.wait(all_heard)
    expected = [(peer, words) for peer in side.peers for words in (b"", f"{peer} to {side.rank}".encode())]
    assert sorted(heard) == sorted(expected)
    assert all(before <= side.engine.last_heard(peer) <= time.monotonic() for peer in side.peers)


def check_bad_puts(context: RankContext) -> None:
    side: Side = context.keep["side"]
    size = side.heap.num_bytes
    for pieces, signals in (
        ([(side.stage.address, size - 8, 9)], []),
        ([(side.stage.address, -1, 1)], []),
        ([], [(size - 7, 1)]),
    ):
        with pytest.raises(InvalidCall, match=f"rank {side.peers[0]}"):
            side.engine.put(side.peers[0], pieces, signals)
    with pytest.raises(InvalidCall, match="register that memory first"):
        side.engine.put(side.peers[0], [(side.stage.address - 1, 0, 2)])
    assert side.engine.is_idle(side.peers[0])


def content_of(sender: int, receiver: int, number: int) -> np.ndarray[Any, Any]:
    """A message: most are small, some large, and some empty."""
    random = np.random.default_rng((sender, receiver, number))
    size = random.choice([0, random.integers(1, 200), random.integers(1, SLOT_BYTES)], p=[0.2, 0.5, 0.3])
    return random.integers(0, 256, size, np.uint8)


def check_order(context: RankContext, num_messages: int, seed: int) -> int:
    """Many puts both ways at once, with sleeps. Everything must be there when its signal is seen.

    Word 4 counts a sender's messages, word 5 is the same number from the next put, which has no pieces, and
    word 6 says how many messages were checked, so that their slots may be filled again. What a put came from
    is overwritten as soon as its ticket says so.
    """
    side: Side = context.keep["side"]
    engine = side.engine
    chance = random.Random(seed + side.rank)
    sent = dict.fromkeys(side.peers, 0)
    checked = dict.fromkeys(side.peers, 0)
    tickets: dict[int, dict[int, int]] = {peer: {} for peer in side.peers}

    def send(peer: int) -> None:
        number = sent[peer] + 1
        if number - NUM_SLOTS > side.seen(peer, 6) or number > num_messages:
            return
        if engine.num_done(peer) < tickets[peer].get(number % NUM_SLOTS, 0):
            return
        content = content_of(side.rank, peer, number)
        place = (peer * NUM_SLOTS + number % NUM_SLOTS) * SLOT_BYTES
        side.stage.array(place, SLOT_BYTES, np.uint8)[:] = 255
        side.stage.array(place, content.size, np.uint8)[:] = content
        start, half = side.slot(side.rank, number), content.size // 2
        # Not in order, so that they are not joined.
        pieces = [
            (side.stage.address + place + half, start + half, content.size - half),
            (side.stage.address + place, start, half),
        ]
        with_signal = chance.random() < 0.5
        message = [(side.word(side.rank, 4), number)]
        ticket = engine.put(peer, pieces, message if with_signal else [])
        engine.put(peer, [], [*([] if with_signal else message), (side.word(side.rank, 5), number)])
        tickets[peer][number % NUM_SLOTS] = ticket
        sent[peer] = number

    def check(peer: int) -> None:
        follower = side.seen(peer, 5)
        come = side.seen(peer, 4)
        assert come >= follower
        for number in range(checked[peer] + 1, come + 1):
            expected = content_of(peer, side.rank, number)
            arrived = side.heap.array(side.slot(peer, number), expected.size, np.uint8)
            assert (arrived == expected).all(), f"message {number} from rank {peer}"
        if come > checked[peer]:
            checked[peer] = come
            engine.put(peer, [], [(side.word(side.rank, 6), come)])

    deadline = time.monotonic() + MAX_WAIT_S
    while min(*sent.values(), *checked.values(), num_messages) < num_messages:
        assert time.monotonic() < deadline, f"rank {side.rank}: sent {sent}, checked {checked}"
        for peer in side.peers:
            send(peer)
            check(peer)
        if chance.random() < 0.02:
            time.sleep(chance.random() * 0.01)
        if not engine.poll():
            os.sched_yield()
    side.wait(lambda: all(side.seen(peer, 6) == num_messages for peer in side.peers))
    side.wait(lambda: all(engine.is_idle(peer) for peer in side.peers))
    return sum(engine.bytes_put.values())


def lose_a_peer(context: RankContext, victim: int) -> dict[int, str]:
    """One rank is killed. Those who send to it get to know, and still reach the others."""
    side: Side = context.keep["side"]
    side.engine.put(side.peers[0], [], [(side.word(side.rank, 7), 1)])
    dist.barrier(group=context.group)
    if side.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    others = [peer for peer in side.peers if peer != victim]
    if victim in side.peers:
        deadline = time.monotonic() + MAX_WAIT_S

        def put_until_it_fails() -> None:
            while time.monotonic() < deadline:
                side.engine.put(victim, [(side.stage.address, side.slot(side.rank, 0), 1000)])
                side.engine.poll()
                time.sleep(0.01)

        with pytest.raises(PeerLost, match=f"rank {victim} is out of reach"):
            put_until_it_fails()
        with pytest.raises(PeerLost, match=f"rank {victim} is out of reach"):
            side.engine.put(victim, [], [(0, 1)])
        side.engine.say(victim, b"anyone there?")
    for peer in others:
        side.engine.put(
            peer, [(side.stage.address, side.slot(side.rank, 0), 1000)], [(side.word(side.rank, 8), 1)]
        )
    for peer in others:
        side.wait(lambda peer=peer: side.seen(peer, 8) == 1)
        side.wait(lambda peer=peer: side.engine.is_idle(peer))
    lost = dict(side.engine.lost)
    side.close()
    return lost


def notice_silence(context: RankContext, seconds: float) -> list[float]:
    """After the link was cut: puts and words go nowhere. How old the last news are, by peer."""
    side: Side = context.keep["side"]
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for peer in side.peers:
            if side.engine.is_idle(peer):
                side.engine.put(peer, [(side.stage.address, side.slot(side.rank, 0), SLOT_BYTES)], [(0, 1)])
            side.engine.say(peer, b"hello?")
        side.engine.poll()
        time.sleep(0.01)
    assert side.engine.lost == {}
    return [time.monotonic() - side.engine.last_heard(peer) for peer in side.peers]


LOOPBACK = Place("cpu", 2)
HOSTS = Place("cpu", 4, num_nodes=2, hosts=True)
BOTH = [
    LOOPBACK.param(marks=pytest.mark.xdist_group("hosts"), name="loopback"),
    HOSTS.param(name="two hosts"),
]


@pytest.fixture(scope="module", params=BOTH)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    world = request.param.world()
    world.run(connect)
    yield world
    world.run(disconnect)


def test_pieces_and_signals_arrive(world: World) -> None:
    world.run(check_puts)


def test_regions(world: World) -> None:
    world.run(check_regions)


def test_signals_only_grow(world: World) -> None:
    world.run(check_signals_only_grow)


def test_words_are_heard(world: World) -> None:
    world.run(check_words)


def test_puts_from_or_to_other_memory_are_refused(world: World) -> None:
    world.run(check_bad_puts)


def test_order_holds_under_load(world: World) -> None:
    started = time.monotonic()
    num_bytes = sum(world.run(check_order, 400, 1))
    print(f"{num_bytes / 1e6:.0f} MB in {time.monotonic() - started:.1f} s, all checked")


@pytest.mark.parametrize("place", BOTH)
def test_a_killed_peer_is_lost(place: Place) -> None:
    world, victim = place.world(), place.num_ranks - 1
    world.run(connect)
    answers = world.gather(lose_a_peer, victim)
    world.revive()
    assert isinstance(answers[victim], RankDied)
    assert "RemoteDisconnect" in answers[0][victim]
    assert [list(lost) for lost in answers[:victim]] == [[victim], [victim], []][:victim]


@pytest.mark.parametrize("place", [HOSTS.param()])
def test_a_cut_link_is_silence(place: Place) -> None:
    hosts = place.world()
    assert isinstance(hosts, TwoHosts)
    hosts.run(connect)
    hosts.run(check_puts)
    hosts.cut()
    for ages in hosts.run(notice_silence, 1.0):
        assert min(ages) > 0.9
    hosts.run(disconnect)
    hosts.mend()
    hosts.restart()


def test_words_are_raised_in_order() -> None:
    """The example of the kernel's description."""
    words = np.array([5, 0], np.int64)
    offsets, values = np.array([0, 8, 8], np.int64), np.array([4, 1, 2], np.int64)
    assert raise_words(words.ctypes.data, offsets, values) == 2
    assert words.tolist() == [5, 2]


def in_a_new_process(code: str) -> subprocess.CompletedProcess[str]:
    setup = "from anyep.backends.cpu.heap import OwnBlock; from anyep.transport import NixlEngine\n"
    return run_program("-c", setup + code, finalizes=True)


def test_an_engine_is_silent() -> None:
    finished = in_a_new_process(
        "engine = NixlEngine(0, OwnBlock('test', 64)); engine.describe(); engine.close()"
    )
    assert (finished.returncode, finished.stdout, finished.stderr) == (0, "", "")


def test_without_nixl_there_is_advice() -> None:
    finished = in_a_new_process(
        f"import sys; sys.modules.update(dict.fromkeys({NAMES})); NixlEngine(0, OwnBlock('test', 64))"
    )
    last_line = finished.stderr.splitlines()[-1]
    assert last_line.startswith("anyep.errors.NotSupported: ")
    assert "pip install 'anyep[network]'" in last_line
