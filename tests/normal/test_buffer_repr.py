"""`repr(buffer)`: one line that tells whose Buffer it is, where, how large, and in which state."""

from __future__ import annotations

import os

import pytest

from anyep.api.buffer import Buffer
from tests.support.world import RankContext, World, get_world


@pytest.fixture
def world() -> World:
    return get_world(2)


def through_its_life(context: RankContext) -> list[str]:
    buffer = Buffer(context.group, 1 << 20, device="cpu")
    seen = [repr(buffer)]
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, repr(buffer).encode())
        os._exit(0)
    os.waitpid(child, 0)
    seen.append(os.read(reader, 1000).decode())
    control = buffer.runtime.control
    call = control.begin(1)
    control.fail(call, ValueError("spilled\ncoffee"))
    control.fail(call, ValueError("a later one"))
    seen.append(repr(buffer))
    buffer.destroy()
    return [*seen, repr(buffer)]


def test_every_state(world: World) -> None:
    pids = world.pids
    for rank, seen in enumerate(world.run(through_its_life)):
        start = f"<Buffer of rank {rank} of 2 on cpu, on 1 node; "
        start += "1,048,576 NVL bytes, 0 RDMA bytes; normal mode; "
        states = (
            "working",
            f"inherited from process {pids[rank]} by a forked child, which cannot use it",
            "broken: AnyEPError: dispatch (call 1) ended by ValueError: spilled coffee",
            "destroyed",
        )
        assert seen == [f"{start}{state}>" for state in states]


def with_everything(context: RankContext) -> list[str]:
    num_bytes = Buffer.get_low_latency_rdma_size_hint(8, 128, 2, 2)
    with Buffer(
        context.group, 1 << 20, num_bytes, low_latency_mode=True, enable_shrink=True, device="cpu"
    ) as buffer:
        masks = repr(buffer)
    with Buffer(context.group, 1 << 20, 1 << 20, device="cpu", ranks_per_node=1) as buffer:
        return [masks, repr(buffer)]


def test_modes_and_nodes(world: World) -> None:
    masks, nodes = world.run(with_everything)[0]
    assert masks.endswith("RDMA bytes; normal and low-latency modes with masks; working>")
    assert nodes.startswith("<Buffer of rank 0 of 2 on cpu, on 2 nodes; 1,048,576 NVL bytes, 1,048,576 RDMA")


def not_made(context: RankContext) -> list[str]:
    buffer = Buffer.__new__(Buffer)
    seen = [repr(buffer)]
    try:
        Buffer.__init__(buffer, context.group, "many", device="cpu")  # type: ignore[arg-type]
    except ValueError:
        seen.append(repr(buffer))
    return seen


def test_what_was_not_made(world: World) -> None:
    for seen in world.run(not_made):
        assert len(seen) == 2
        assert all(text.startswith("<Buffer that was not made, at 0x") for text in seen)
