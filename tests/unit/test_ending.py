"""The order in which the parts of a process end, at the real end of one."""

from __future__ import annotations

from tests.support.programs import run_program

PROGRAM = """
from anyep import ending

class Worker(ending.Part):
    looks_left = 5

    def is_working(self):
        self.looks_left -= 1
        return self.looks_left > 0

    def stop_at_end(self, last_error):
        print("stopped", "early" if self.looks_left > 0 else "when it was done", repr(last_error))

    def join_at_end(self, until):
        print("joined")

worker = Worker()
ending.register(worker)
print("ends")
"""


def test_calls_under_way_may_finish_before_they_are_stopped() -> None:
    finished = run_program("-c", PROGRAM, finalizes=True)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.splitlines() == ["ends", "stopped when it was done ''", "joined"]
