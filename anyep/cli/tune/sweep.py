"""The sweep of `anyep tune`, on each rank: tries tiles in Buffers, together with all other ranks.

Trial tiles reach the Buffers of this process through `tuned.trial`, never through the file: a sweep that is
ended leaves no trace. All ranks see the times of all, so they decide alike.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist

from anyep.api.buffer import Buffer
from anyep.backends.cuda import tuned
from anyep.backends.cuda.tiles import tiles_for
from anyep.backends.cuda.tuned import Trial
from anyep.cli.bench.clock import WARM_UP, Case, CudaClock, WrongResult, check, equals
from anyep.cli.bench.normal import SWEPT_SMS, Traffic, first_dispatch, new_buffer
from anyep.cli.bench.records import Label
from anyep.cli.gpus import Placement
from anyep.cli.ranks import Rank
from anyep.cli.tune.candidates import (
    KERNELS,
    ROUNDS,
    Choice,
    Tried,
    choose,
    finalists,
    in_words,
    trials,
)
from anyep.cli.tune.records import Found, Job
from anyep.cli.units import format_rate
from anyep.errors import AnyEPError, PeerLost

NUM_WINDOWS: Final = 8
"""Results held at once: the rows that combine reads, those of a few calls, and those of a graph."""
MAX_REASON: Final = 200
Seconds = dict[str, list[float]]
"""Of each run, by kernel."""


class Failure(NamedTuple):
    """Why a rank could not use a tile."""

    reason: str
    is_wrong: bool
    """Whether a result was wrong."""
    is_lost: bool
    """Whether the reason is another rank's."""

    @classmethod
    def of(cls, error: Exception) -> Failure:
        first_line = (str(error).strip().splitlines() or [""])[0]
        name = "" if isinstance(error, AnyEPError) else f"{type(error).__name__}: "
        return cls(
            f"{name}{first_line}"[:MAX_REASON], isinstance(error, WrongResult), isinstance(error, PeerLost)
        )


class _Unusable(Exception):
    """Some rank could not use the tiles: all leave their Buffers."""


def tune_on_rank(rank: Rank, job: Job, num_gpus: int) -> Found:
    """The whole sweep; every rank returns the same."""
    return Sweep(rank, job, num_gpus).run()


class Sweep:
    """A sweep of one rank."""

    def __init__(self, rank: Rank, job: Job, num_gpus: int) -> None:
        self._rank = rank
        self._setup = setup = job.setup
        self._clock = CudaClock(rank, setup, num_gpus)
        self._ranks_on_gpu = Placement(num_gpus).ranks_on_a_gpu(setup.ranks)
        self._sms = self._clock.sms or Buffer.num_sms
        self._traffic = traffic = Traffic(rank, setup, setup.tokens)
        self._is_right = dict(
            zip(KERNELS, (equals(traffic.rows), equals(traffic.combined(setup.ranks))), strict=True)
        )
        builtin = tiles_for(setup.ranks, has_windows=True)
        self._trials = trials(builtin, setup.row_bytes // 4, job.most_candidates)
        self._builtin = self._trials[0]
        self._num_bytes = statistics.mean(self._all(traffic.num_bytes))
        with tuned.trial(self._builtin), self._new_buffer(self._sms) as buffer:
            self._handle = first_dispatch(buffer, setup, traffic).handle

    def run(self) -> Found:
        tried = self._screen()
        choices, builtin_seconds = self._final(tried)
        return Found(
            tuple(sorted(set(self._all(self._gpu_name())))),
            self._ranks_on_gpu,
            self._sms,
            self._num_bytes,
            tried,
            choices,
            builtin_seconds,
            self._rates_by_sms(choices),
        )

    def _gpu_name(self) -> str:
        return str(torch.cuda.get_device_properties(torch.cuda.current_device()).name)

    def _screen(self) -> list[Tried]:
        """Every tile by itself; the built-in ones come first and again last."""
        tried: list[Tried] = []
        order = [*self._trials, self._builtin]
        for index, trial in enumerate(order):
            self._rank.report(f"candidate {index + 1} of {len(order)}{self._best_so_far(tried)}")
            is_builtin = trial is self._builtin
            for kernel, outcome in self._outcomes(trial).items():
                tile = getattr(trial, kernel)
                if is_builtin or tile != getattr(self._builtin, kernel):
                    seconds, problem = ([], outcome) if isinstance(outcome, str) else (outcome, "")
                    tried.append(Tried(kernel, tile, is_builtin, seconds, problem))
        return [each for kernel in KERNELS for each in tried if each.kernel == kernel]

    def _outcomes(self, trial: Trial) -> dict[str, list[float] | str]:
        """Seconds with each of these tiles, or why it does not run. If not both run, each is tried beside the
        built-in tile of the other kernel."""
        together = self._measured(trial)
        if not isinstance(together, str):
            return {**together}
        found: dict[str, list[float] | str] = {}
        for kernel in KERNELS:
            alone = self._builtin._replace(**{kernel: getattr(trial, kernel)})
            if alone == trial:
                found[kernel] = together
            elif alone != self._builtin:
                seconds = self._measured(alone)
                found[kernel] = seconds if isinstance(seconds, str) else seconds[kernel]
        return found

    def _best_so_far(self, tried: Sequence[Tried]) -> str:
        """In words; empty before the first one."""
        best = {
            kernel: min(each.median for each in tried if each.kernel == kernel and not each.problem)
            for kernel in KERNELS
            if tried
        }
        words = [
            f"{kernel} {format_rate(self._num_bytes / seconds / 1e9)}" for kernel, seconds in best.items()
        ]
        return f"; best so far: {', '.join(words)} GB/s per rank" if words else ""

    def _final(self, tried: Sequence[Tried]) -> tuple[dict[str, Choice], dict[str, float]]:
        """The fastest tiles beside the built-in one, in rounds."""
        best = {kernel: finalists([each for each in tried if each.kernel == kernel]) for kernel in KERNELS}
        num_pairs = max(map(len, best.values()))
        if not num_pairs:
            builtin = [each for each in tried if each.is_builtin]
            return (
                {kernel: Choice(None, 1.0) for kernel in KERNELS},
                {
                    kernel: statistics.median(
                        [seconds for each in builtin if each.kernel == kernel for seconds in each.seconds]
                    )
                    for kernel in KERNELS
                },
            )
        pairs = [self._builtin]
        for index in range(num_pairs):
            tiles = {kernel: best[kernel][index] for kernel in KERNELS if index < len(best[kernel])}
            pairs.append(self._builtin._replace(**tiles))  # type: ignore[arg-type]
        by_pair: list[list[dict[str, float]]] = [[] for _ in pairs]
        for round_ in range(ROUNDS):
            order = list(range(len(pairs)))
            for step, index in enumerate(order if round_ % 2 == 0 else reversed(order)):
                at = f"round {round_ + 1} of {ROUNDS}, {step + 1} of {len(pairs)}"
                self._rank.report(f"the fastest candidates beside the built-in tiles: {at}")
                seconds = self._measured_or_raise(pairs[index])
                by_pair[index].append({kernel: statistics.median(seconds[kernel]) for kernel in KERNELS})
        choices, builtin_seconds = {}, {}
        for kernel in KERNELS:
            by_round = [[seconds[kernel] for seconds in rounds] for rounds in by_pair]
            builtin_seconds[kernel] = statistics.median(by_round[0])
            choices[kernel] = choose(best[kernel], by_round[0], by_round[1 : 1 + len(best[kernel])])
        return choices, builtin_seconds

    def _rates_by_sms(self, choices: dict[str, Choice]) -> dict[str, dict[int, float]]:
        """GB/s with the chosen tiles and each number of SMs that a rank can have."""
        tiles = {kernel: choice.tile for kernel, choice in choices.items() if choice.tile}
        chosen = self._builtin._replace(**tiles)  # type: ignore[arg-type]
        rates: dict[str, dict[int, float]] = {kernel: {} for kernel in KERNELS}
        for sms in [sms for sms in SWEPT_SMS if sms <= self._clock.most_sms] or [self._sms]:
            self._rank.report(f"the chosen tiles with {sms} SMs per rank")
            seconds = self._measured_or_raise(chosen, sms)
            for kernel in KERNELS:
                rates[kernel][sms] = self._num_bytes / statistics.median(seconds[kernel]) / 1e9
        return rates

    def _measured_or_raise(self, trial: Trial, sms: int | None = None) -> Seconds:
        found = self._measured(trial, sms)
        if isinstance(found, str):
            raise AnyEPError(found)
        return found

    def _measured(self, trial: Trial, sms: int | None = None) -> Seconds | str:
        """The slowest rank's seconds per call, by run; or why these tiles do not run.

        Ranks first call both kernels and check the results, which shows whether the tiles run, and tell each
        other. They take times only if that is so on all of them.
        """
        failures: list[Failure | None] | None = None
        failure: Failure | None = None
        with tuned.trial(trial):
            try:
                with self._new_buffer(sms or self._sms) as buffer:
                    cases = self._cases(buffer, trial, sms)
                    wrong = [error for case in cases.values() for error in self._wrong_results(case)]
                    failures = self._all(Failure.of(wrong[0]) if wrong else None)
                    if any(failures):
                        raise _Unusable
                    return {kernel: self._slowest(case) for kernel, case in cases.items()}
            except _Unusable:
                pass
            except Exception as error:
                if failures is not None or trial == self._builtin:
                    raise
                failure = Failure.of(error)
        if failures is None:
            failures = self._all(failure)
        return _reason_of([each for each in failures if each is not None])

    def _wrong_results(self, case: Case) -> Iterator[WrongResult]:
        """Call a case a few times. All calls are made: peers take part in them, and must not take the end of
        this rank for a wrong result of their own."""
        for _ in range(WARM_UP):
            try:
                check(self._rank, case, case.work())
            except WrongResult as error:
                yield error

    def _cases(self, buffer: Buffer, trial: Trial, sms: int | None) -> dict[str, Case]:
        """A dispatch by handle and a combine of the rows where they lie, as graphs."""
        traffic = self._traffic
        # Another number of SMs has other channels, and so other handles.
        handle = self._handle if sms is None else first_dispatch(buffer, self._setup, traffic).handle
        received = buffer.dispatch(traffic.x, handle=handle)[0]
        assert isinstance(received, torch.Tensor)
        work: dict[str, Callable[[], Any]] = {
            "dispatch": lambda: buffer.dispatch(traffic.x, handle=handle),
            "combine": lambda: buffer.combine(received, handle),
        }
        label = Label("", "", traffic.num_tokens, traffic.num_bytes, sms or self._sms)
        return {
            kernel: Case(
                replace(label, case=kernel, path=f"window, {in_words(getattr(trial, kernel))}"),
                work[kernel],
                self._is_right[kernel],
                in_graph=True,
            )
            for kernel in KERNELS
        }

    def _new_buffer(self, sms: int) -> Buffer:
        return new_buffer(self._rank, self._setup, sms, self._traffic.window_bytes(NUM_WINDOWS))

    def _slowest(self, case: Case) -> list[float]:
        seconds, _ = self._clock.seconds_of(case)
        return [max(times) for times in zip(*self._all(seconds), strict=True)]

    def _all(self, thing: Any) -> list[Any]:
        """What each rank has to say."""
        things: list[Any] = [None] * self._rank.num_ranks
        dist.all_gather_object(things, thing, group=self._rank.group)
        return things


def _reason_of(failures: Sequence[Failure]) -> str:
    """Why some ranks could not use the tiles; raises on all ranks if a result was wrong."""
    for failure in failures:
        if not failure.is_wrong and not failure.is_lost:
            # Results of other ranks may be wrong because of it.
            return failure.reason
    for failure in failures:
        if failure.is_wrong:
            raise WrongResult(failure.reason)
    return failures[0].reason
