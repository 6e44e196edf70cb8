"""Ends the part of a Buffer that is on the CPU, after the calls that are under way."""

from __future__ import annotations

from typing import Protocol

from anyep.backends.cpu.stream import Stream
from anyep.backends.cpu.team import Team


class HostSide(Protocol):
    """The part of the host that has to be ended."""

    def stop(self) -> None: ...
    def close(self) -> None: ...


class CpuLifetime:
    """Ends the threads of one rank."""

    def __init__(self, control: HostSide, stream: Stream, team: Team) -> None:
        self._control = control
        self._stream = stream
        self._team = team

    @property
    def is_idle(self) -> bool:
        return self._stream.is_idle

    def stop(self) -> None:
        """End the waits of calls that are still under way."""
        self._control.stop()

    def check_can_close(self) -> None:
        """Do nothing: it is always possible to wait for the calls under way."""

    def close(self) -> None:
        """Finish the calls of both modes that are under way, and end the threads."""
        self._stream.close()
        self._team.close()

    def close_later(self) -> None:
        """Close after all calls, without waiting for them; they keep what they need alive."""
        self._stream.close_after(self._control.close)

    @staticmethod
    def free_what_died() -> None:
        """Do nothing: memory is released with its owner."""
