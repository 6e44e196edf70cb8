"""Commands by which kernels of a GPU ask the host to put bytes into the memory of another host.

A command is a few words in memory of the host: copy these bytes there, then raise a counter there. It
tells all that the proxy needs to know, so the proxy knows nothing of calls, and a graph that is replayed
writes its commands anew. Every writer, a program of a kernel, has a ring of its own:

    writer 0   | command 5 | command 6 | command 3 | command 4 |       taken: 3
    writer 1   |     -     |     -     |     -     |     -     |       taken: 0

Command n lies in entry (n - 1) % num_entries. Its number is stored last: an entry whose number is
what the reader expects next is complete. The reader publishes how many it has taken, and the writer does not
reuse an entry before that.
"""

from __future__ import annotations

from typing import Final, NamedTuple

NUMBER: Final = 0
"""1, 2, 3 and so on in each ring."""
PEER: Final = 1
SOURCE: Final = 2
"""The address here of what is put."""
PLACE: Final = 3
"""Where it goes: an offset in a region of the peer's memory (anyep/transport/base.py)."""
NUM_BYTES: Final = 4
"""0 for a command that only raises a counter."""
COUNTER_AT: Final = 5
"""The offset of the counter at the peer, or NO_COUNTER."""
COUNTER: Final = 6
"""What the counter is raised to, after the bytes."""
NUM_WORDS: Final = 8
"""An entry is a line of the host's cache."""
NO_COUNTER: Final = -1
FIELDS: Final = COUNTER - NUMBER
"""The words of a command that the reader copies: all but its number."""
TAKEN_WORDS: Final = 16
"""From one writer's taken count to the next one's: they are polled, so they share no line."""


class CommandSizes(NamedTuple):
    """How many writers there are, and the entries in the ring of each.

    >>> sizes = CommandSizes(num_writers=2, num_entries=4)
    >>> sizes.ring_words, sizes.num_words, sizes.most_commands
    (64, 96, 8)
    """

    num_writers: int
    num_entries: int

    @property
    def ring_words(self) -> int:
        """The words of all rings, which lie one after the other."""
        return self.num_writers * self.num_entries * NUM_WORDS

    @property
    def num_words(self) -> int:
        """The words of all rings, and of the taken counts that follow."""
        return self.ring_words + self.num_writers * TAKEN_WORDS

    @property
    def most_commands(self) -> int:
        """How many can be there at once."""
        return self.num_writers * self.num_entries
