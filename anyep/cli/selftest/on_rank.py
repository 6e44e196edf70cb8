"""What a rank of `anyep selftest` does: goes through the plan, and agrees with the others on each result."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

import torch.distributed as dist

from anyep import settings
from anyep.api.buffer import Buffer
from anyep.cli.ranks import Rank
from anyep.cli.selftest import low_latency, normal, timing
from anyep.cli.selftest.machine import examine
from anyep.cli.selftest.plan import (
    LL_HIDDEN,
    LL_MAX_TOKENS,
    LowLatencyCase,
    NormalCase,
    Place,
    Plan,
    places_of,
)
from anyep.cli.selftest.report import Check, Host, State, Timing, advice_about, private_names
from anyep.errors import BufferBroken, NotSupported, PeerLost, WaitTimeout
from anyep.machine import host_identity
from anyep.nixl_packages import find_nixl

T = TypeVar("T")
TIMEOUT_S: Final = {"cpu": "60", "cuda": "300"}
"""A rank whose kernels are still being compiled for a GPU is waited for."""
LARGEST_ROW_BYTES: Final = 2 * timing.HIDDEN
NOT_RUN: Final = "an earlier check of this place failed while its ranks called each other"


class RankOfTest:
    """One rank of a test: its group, and where its results go."""

    def __init__(self, rank: Rank, plan: Plan) -> None:
        self.rank = rank
        self.plan = plan
        self._timeout_s = settings.TIMEOUT_S.text
        """What the user has set."""
        self._has_windows = True
        """Whether Buffers on GPUs have windows, where they choose their heap."""

    def everyone(self, thing: T) -> list[T]:
        """What every rank passes, in rank order."""
        things: list[Any] = [None] * self.rank.num_ranks
        dist.all_gather_object(things, thing, group=self.rank.group)
        return things

    def examine_hosts(self) -> list[Host]:
        """What the first rank of each host finds out about it."""
        identities = self.everyone(host_identity())
        hosts = list(dict.fromkeys(identities))
        own = hosts.index(identities[self.rank.rank])
        found = None
        if identities.index(identities[self.rank.rank]) == self.rank.rank:
            ranks = [rank for rank, identity in enumerate(identities) if identity == hosts[own]]
            found = Host(ranks, examine(), private_names(own))
        return [host for host in self.everyone(found) if host is not None]

    def test(self, device: str) -> None:
        """All cases and timings of a device; results go to `report` of the rank, as they come."""
        os.environ[settings.TIMEOUT_S.name] = self._timeout_s or TIMEOUT_S[device]
        hosts = len(set(self.everyone(host_identity())))
        for place in places_of(self.plan, device, self.rank.num_ranks, hosts):
            reason = self._why_not(place)
            if reason:
                self.rank.report(Check("normal mode", "all cases", str(place), "skipped", reason))
                continue
            self._test_normal(place)
            self._test_low_latency(place)

    def _why_not(self, place: Place) -> str:
        """Why nothing can be tested in a place; empty if it can."""
        needs_network = place.nodes.network == "nixl" or place.hosts > 1
        if place.nodes.are_several and needs_network and place.device == "cuda":
            return "nodes of GPUs are connected by memory only, so far"
        if place.nodes.are_several and needs_network and None in self.everyone(find_nixl(None)):
            return "NIXL is not installed on all hosts"
        return ""

    def _test_normal(self, place: Place) -> None:
        cases = self.plan.normal_cases(place.device)
        # Between nodes on GPUs rows go to windows only.
        windows_only = place.device == "cuda" and place.nodes.are_several
        if windows_only and not self._has_windows:
            reason = "ranks on these GPUs share memory of the host, where there are no windows"
            self.rank.report(Check("normal mode", "all cases", str(place), "skipped", reason))
            return
        for uses_rings in (False,) if windows_only else (False, True):
            these = [case for case in cases if case.uses_rings == uses_rings]
            new_buffer = partial(self._normal_buffer, place, uses_rings)
            run = partial(self._run_normal, place)
            ends = None if uses_rings else timing.time_normal
            self._go_through("normal mode", place, these, new_buffer, run, ends)

    def _test_low_latency(self, place: Place) -> None:
        cases = self.plan.low_latency_cases()
        run = partial(self._run_low_latency, place)
        self._go_through(
            "low-latency mode",
            place,
            cases,
            partial(self._low_latency_buffer, place),
            run,
            timing.time_low_latency,
        )

    def _run_normal(self, place: Place, buffer: Buffer, case: NormalCase) -> None:
        normal.run_case(buffer, case, place, self.plan.seed)

    def _run_low_latency(self, place: Place, buffer: Buffer, case: LowLatencyCase) -> None:
        low_latency.run_case(buffer, case, place, self.plan.seed)

    def _normal_buffer(self, place: Place, uses_rings: bool) -> Buffer:
        num_window_bytes = 0 if uses_rings else None
        sizes = place.nodes.of_buffer(LARGEST_ROW_BYTES)
        buffer = Buffer(
            self.rank.group,
            device=place.device,
            num_window_bytes=num_window_bytes,
            heap=place.heap,
            **sizes,
        )
        assert buffer.runtime is not None
        if place.heap is None:
            self._has_windows = not buffer.runtime.is_heap_on_host
        return buffer

    def _low_latency_buffer(self, place: Place) -> Buffer:
        num_ranks = self.rank.num_ranks
        experts = low_latency.LOCAL_EXPERTS * num_ranks
        slots = Buffer.get_low_latency_rdma_size_hint(LL_MAX_TOKENS, LL_HIDDEN, num_ranks, experts)
        return Buffer(
            self.rank.group,
            0,
            slots,
            low_latency_mode=True,
            device=place.device,
            heap=place.heap,
            **place.nodes.place,
        )

    def _go_through(
        self,
        group: str,
        place: Place,
        cases: Sequence[Any],
        new_buffer: Callable[[], Buffer],
        run: Callable[[Buffer, Any], None],
        measure: Callable[[Buffer, Plan, Place], list[Timing]] | None,
    ) -> None:
        """Run cases on one Buffer; after an error between ranks, which breaks it, on a new one."""
        stack = ExitStack()
        buffer: Buffer | None = None
        for case in cases:
            self.rank.report(f"{place}: {group}, {case.name}")
            began = time.monotonic()
            error: Exception | None = None
            try:
                if buffer is None:
                    buffer = stack.enter_context(new_buffer())
                run(buffer, case)
            except Exception as caught:
                error = caught
                # Tells the peers, which may be waiting for this rank.
                stack.__exit__(type(caught), caught, caught.__traceback__)
            check = self._agreed(Check(group, case.name, str(place), "passed"), error, began)
            self.rank.report(check)
            if check.state != "passed":
                stack.close()
                stack, buffer = ExitStack(), None
        self._measure(stack, group, place, buffer, measure)

    def _measure(
        self,
        stack: ExitStack,
        group: str,
        place: Place,
        buffer: Buffer | None,
        measure: Callable[[Buffer, Plan, Place], list[Timing]] | None,
    ) -> None:
        with stack:
            if measure is None:
                return
            if buffer is None:
                self.rank.report(Check(group, "timings", str(place), "skipped", NOT_RUN))
                return
            self.rank.report(f"{place}: {group}, timings")
            for timed in measure(buffer, self.plan, place):
                self.rank.report(timed)

    def _agreed(self, check: Check, error: Exception | None, began: float) -> Check:
        """The result of all ranks: it failed if it failed on one of them, and the reason is that of the rank
        whose error is not about another one."""
        outcomes = self.everyone(None if error is None else _Failure.of(error))
        seconds = round(time.monotonic() - began, 3)
        failed = [(rank, failure) for rank, failure in enumerate(outcomes) if failure is not None]
        if not failed:
            return replace(check, seconds=seconds)
        rank, first = min(failed, key=lambda item: (item[1].is_about_peer, item[0]))
        reason = f"rank {rank}: {first.reason} ({len(failed)} of {len(outcomes)} ranks failed)"
        state: State = "skipped" if all(failure.is_limit for _, failure in failed) else "failed"
        return replace(check, state=state, reason=reason, seconds=seconds, advice=first.advice)


class _Failure(NamedTuple):
    """What a rank tells the others about its error."""

    reason: str
    advice: str
    is_about_peer: bool
    is_limit: bool
    """Whether AnyEP cannot do this on any machine yet: it says so."""

    @classmethod
    def of(cls, error: Exception) -> _Failure:
        return cls(
            f"{type(error).__name__}: {error}",
            advice_about(error),
            isinstance(error, PeerLost | WaitTimeout | BufferBroken),
            isinstance(error, NotSupported) and " so far" in str(error),
        )


def test_on_rank(rank: Rank, plan: Plan, device: str, examines: bool) -> None:
    """The main function of a rank that `anyep selftest` has started itself."""
    of_test = RankOfTest(rank, plan)
    if examines:
        rank.report(of_test.examine_hosts())
    of_test.test(device)
