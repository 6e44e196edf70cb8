"""When a rank's process has ended: also where nobody has reaped it, or where another one has its number."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest

from anyep.join.roll_call import Process


@pytest.fixture
def child() -> Iterator[tuple[Process, int]]:
    """A child as its peers know it, and a descriptor whose end lets it go on."""
    says, goes_on = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(goes_on[1])
        os.write(says[1], str(Process.this(0).start_time).encode())
        os.read(goes_on[0], 1)
        os._exit(0)
    start_time = int(os.read(says[0], 64))
    yield replace(Process.this(1), pid=pid, start_time=start_time), goes_on[1]
    os.waitpid(pid, 0)
    for descriptor in (*says, goes_on[0]):
        os.close(descriptor)


def test_a_child(child: tuple[Process, int]) -> None:
    process, goes_on = child
    assert not process.has_ended()
    assert replace(process, start_time=process.start_time + 1).has_ended()
    os.close(goes_on)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert process.has_ended()
