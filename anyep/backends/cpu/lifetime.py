"""How the part of a Buffer that is on the CPU ends: after the calls that are under way."""

from __future__ import annotations

from typing import Protocol

from anyep.backends.cpu.stream import Stream
from anyep.backends.cpu.team import Team


class HostSide(Protocol):
    """What has to end on the host."""

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
        """Calls that are under way can always be waited for."""

    def close(self) -> None:
        """Finish the calls of both modes that are under way, and end the threads."""
        self._stream.close()
        self._team.close()

    def close_later(self) -> None:
        """Close after all calls, without waiting for them; they hold all that they need."""
        self._stream.close_after(self._control.close)

    @staticmethod
    def free_what_died() -> None:
        """Memory is given back where it dies."""
