"""Launches of normal mode that are prepared once: which kernel with which compile-time values, how many
programs, and the arguments that stay the same from call to call.

    send = plans.get("send", token, config, new_plan)      # `new_plan` runs in the first call only
    send.launch(stream, send.grid, ...)
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Final, NamedTuple

from anyep.backends.cuda.launch import Fixed, Launcher
from anyep.sizes import Config, TokenLayout

MAX_PLANS: Final = 256


class Plan(NamedTuple):
    """A prepared launch."""

    token: TokenLayout
    config: Config
    launch: Launcher
    grid: tuple[int, ...]
    fixed: tuple[Fixed, ...] = ()
    """Arguments that stay the same."""


class Plans:
    """The plans of a Buffer, by the launch, the layout of a row and the config."""

    def __init__(self) -> None:
        self._plans: dict[tuple[Hashable, int, int], Plan] = {}
        self._by_value: dict[tuple[Hashable, TokenLayout, Config], Plan] = {}

    def get(self, kind: Hashable, token: TokenLayout, config: Config, new_plan: Callable[[], Plan]) -> Plan:
        """The plan of a launch; the first call makes it."""
        # Most calls of the same sizes pass identical objects, so their ids are looked up first; a plan keeps
        # both alive. A config that was made for one call is looked up by its value.
        plan = self._plans.get((kind, id(token), id(config)))
        if plan is None:
            plan = self._by_value.get((kind, token, config))
        if plan is None:
            if len(self._by_value) >= MAX_PLANS:
                self._plans.clear()
                self._by_value.clear()
            plan = self._by_value[kind, token, config] = new_plan()
            self._plans[kind, id(token), id(config)] = plan
        return plan
