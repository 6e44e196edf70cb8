"""`anyep selftest`: the options, who starts the ranks, and the exit code."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from anyep.cli import options
from anyep.cli.bench.measure import ProgressLine
from anyep.cli.checks import check_file, write_text
from anyep.cli.gpus import ON_THE_CPU, Placement, check_device, count_gpus, placed
from anyep.cli.nodes import NETWORKS, ONE_NODE, Nodes, count_ranks
from anyep.cli.ranks import Rank, run_ranks
from anyep.cli.selftest.job import Job, job_of, joined, new_store
from anyep.cli.selftest.killing import Outcome, StoreAddress, Trial, lose_a_rank
from anyep.cli.selftest.plan import Plan
from anyep.cli.selftest.report import Check, Host, Report, Timing, listed_variables
from anyep.errors import AnyEPError, InvalidCall, NotSupported, whole_number
from anyep.launch.forked import StoreFile
from anyep.settings import NETWORK
from anyep.topology import check_nodes
from anyep.version import __version__

USUAL_RANKS: Final = 4
REPORT: Final = "the report"
KILL: Final = "a rank is killed"
RANKS: Final = "ranks"
TO_THE_END: Final = "all ranks go through the whole test"
KILL_ADVICE: Final = "a lost rank would not be noticed in time: send this report to the maintainers"


def selftest(
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer cases: half a minute instead of two.")
    ] = False,
    device: Annotated[
        str | None,
        typer.Option(metavar="cpu|cuda", help="Default: cpu, and then cuda if all hosts have GPUs."),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(help="Ranks to start here; default: 4, or one for each GPU. A launcher starts its own."),
    ] = None,
    nodes: options.Nodes = None,
    ranks_per_node: options.RanksPerNode = None,
    network: options.Network = None,
    seed: Annotated[int, typer.Option(help="Seed of the data and the routing.")] = 0,
    json_file: Annotated[
        str | None, typer.Option("--json", help="Write the report to this file, too; - for stdout only.")
    ] = None,
    with_hostnames: Annotated[
        bool,
        typer.Option("--with-hostnames", help="Keep names of hosts and users, addresses and home folders."),
    ] = False,
) -> None:
    """Check this machine, or all hosts of a job, and write a report that can be sent to the maintainers."""
    if device is not None:
        check_device(device)
    if json_file not in (None, "-"):
        check_file(REPORT, Path(str(json_file)))
    job = job_of(os.environ)
    if job is not None and ranks is not None:
        raise InvalidCall("--ranks is for ranks that anyep starts: leave it out under a launcher")
    counted = job.num_ranks if job is not None else ranks
    virtual = _virtual_nodes(counted, nodes, ranks_per_node, network)
    plan = Plan(quick, seed, virtual)
    options_given = {"quick": quick, "device": device, "seed": seed, "nodes": asdict(virtual)}
    report = Report(__version__, options_given, listed_variables(os.environ))
    began = time.monotonic()
    collector = _Collector(report, sys.stderr.isatty() and (job is None or job.rank == 0))
    if job is None:
        _test_here(plan, counted, device, collector)
    else:
        _test_in_job(job, plan, device, collector)
    report.seconds = time.monotonic() - began
    if job is None or job.rank == 0:
        _show(report, json_file, with_hostnames)
    if not report.is_ok:
        raise typer.Exit(1)


def _virtual_nodes(
    ranks: int | None, nodes: int | None, ranks_per_node: int | None, network: str | None
) -> Nodes:
    if ranks is not None:
        whole_number("--ranks", ranks, minimum=1)
    if network is not None and network not in NETWORKS:
        raise InvalidCall(f"--network is {network!r}: choose one of {', '.join(NETWORKS)}")
    if nodes is None and ranks_per_node is None:
        if network is not None:
            raise InvalidCall("--network is for several nodes: add --nodes 2, or leave it out")
        return ONE_NODE
    counts = count_ranks(ranks, nodes, ranks_per_node, USUAL_RANKS)
    check_nodes(math.prod(counts), counts[1], "--ranks-per-node")
    return Nodes(*counts, network=network or "auto")


class _Collector:
    """Takes what ranks report: results, and what they are doing."""

    def __init__(self, report: Report, shows_progress: bool) -> None:
        self.report = report
        self._shows_progress = shows_progress
        self._progress = ProgressLine(shows_progress)

    def __enter__(self) -> _Collector:
        self._progress.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.__exit__(*error)

    @property
    def on_compile(self) -> Callable[[str], None] | None:
        return self._progress.show if self._shows_progress else None

    def take(self, rank: int, thing: Any) -> None:
        """What a rank has reported; all ranks report the same results."""
        if rank != 0:
            return
        if isinstance(thing, str):
            self._progress.show(thing)
        elif isinstance(thing, Check):
            self.report.checks.append(thing)
        elif isinstance(thing, Timing):
            self.report.timings.append(thing)
        else:
            hosts: list[Host] = thing
            self.report.hosts.extend(hosts)


def _devices(device: str | None, has_gpus: bool) -> list[str]:
    if device is not None:
        return [device]
    return ["cpu", "cuda"] if has_gpus else ["cpu"]


def _has_gpus() -> bool:
    try:
        return count_gpus() > 0
    except NotSupported:
        return False


# On this machine


def _test_here(plan: Plan, ranks: int | None, device: str | None, collector: _Collector) -> None:
    """Start ranks for every device, and for every rank that is killed."""
    from anyep.cli.selftest.on_rank import test_on_rank

    with collector:
        for index, one in enumerate(_devices(device, _has_gpus())):
            num_ranks = ranks or _usual_ranks(one, plan)
            with placed(one, num_ranks) as placement:
                collector.take(0, f"starting {num_ranks} ranks on {one}")
                try:
                    run_ranks(
                        num_ranks,
                        test_on_rank,
                        plan,
                        one,
                        index == 0,
                        on_report=collector.take,
                        on_compile=collector.on_compile,
                        placement=placement,
                    )
                except AnyEPError as error:
                    where = f"{one}, {num_ranks} ranks"
                    reason = f"{type(error).__name__}: {error}"
                    collector.take(0, Check(RANKS, TO_THE_END, where, "failed", reason))
                _kill_here(plan, one, num_ranks, placement, collector)


def _usual_ranks(device: str, plan: Plan) -> int:
    if plan.nodes.are_several:
        return plan.nodes.num_ranks
    num_gpus = count_gpus() if device == "cuda" else 1
    return num_gpus if num_gpus > 1 else USUAL_RANKS


def _kill_here(plan: Plan, device: str, num_ranks: int, placement: Placement, collector: _Collector) -> None:
    _skip_trials_of_one_rank(device, num_ranks, collector)
    for trial in _trials(plan, device, num_ranks, hosts=1):
        collector.take(0, f"{device}: {KILL} in {trial.mode}")
        with StoreFile() as place:
            store_at = StoreAddress(file=place.path)
            outcomes = lose_a_rank(trial, range(num_ranks), store_at, placement, lambda text: [text])
        collector.take(0, _result_of(trial, outcomes))


def _skip_trials_of_one_rank(device: str, num_ranks: int, collector: _Collector) -> None:
    if num_ranks == 1:
        reason, advice = "no other rank would notice it", "start more ranks to check it"
        collector.take(
            0, Check(KILL, "the others name it", f"{device}, 1 rank", "skipped", reason, advice=advice)
        )


def _trials(plan: Plan, device: str, num_ranks: int, hosts: int) -> list[Trial]:
    """The ranks to kill: in normal mode, and where there are masks also in low-latency mode."""
    if num_ranks < 2:
        return []
    trials = [Trial("normal mode", device, num_ranks, plan.nodes.place)]
    if _has_masks(plan.nodes, device, hosts):
        trials.append(Trial("low-latency mode", device, num_ranks, plan.nodes.place))
    return trials


def _has_masks(nodes: Nodes, device: str, hosts: int) -> bool:
    """Whether low-latency mode can go on without a rank: on one node, or on nodes that memory connects."""
    if hosts > 1 or not nodes.are_several:
        return hosts == 1
    return device == "cpu" and NETWORK.choose(nodes.place["network"]).value != "nixl"


def _result_of(trial: Trial, outcomes: dict[int, Outcome]) -> Check:
    what = "the others name it" if trial.mode == "normal mode" else "calls with masks go on"
    name, where = f"{trial.mode}: {what}", f"{trial.device}, {trial.num_ranks} ranks"
    seconds = round(max((outcome.seconds for outcome in outcomes.values()), default=0.0), 3)
    problems = [outcome.problem for outcome in outcomes.values() if outcome.problem]
    if problems:
        return Check(KILL, name, where, "failed", problems[0], seconds, KILL_ADVICE)
    return Check(KILL, name, where, "passed", seconds=seconds)


# As a rank of a job


def _test_in_job(job: Job, plan: Plan, device: str | None, collector: _Collector) -> None:
    """What one rank of a job does; the first one has the report."""
    import torch

    torch.set_num_threads(1)
    with joined(job) as group, collector:
        try:
            _go_through(job, plan, device, group, collector)
        except Exception as error:
            # The process group ends the waits for a rank that has died.
            reason = f"rank {job.rank}: {type(error).__name__}: {error}"
            where, advice = f"{job.num_ranks} ranks", "see what the ranks print, and how they ended"
            collector.take(0, Check(RANKS, TO_THE_END, where, "failed", reason, advice=advice))


def _go_through(job: Job, plan: Plan, device: str | None, group: Any, collector: _Collector) -> None:
    from anyep.cli.selftest.on_rank import RankOfTest

    # On all ranks: each of them needs to know whether anything has failed.
    of_test = RankOfTest(Rank(job.rank, job.num_ranks, group, partial(collector.take, 0)), plan)
    has_gpus = device != "cpu" and all(of_test.everyone(_has_gpus()))
    hosts = of_test.examine_hosts()
    collector.take(0, hosts)
    for one in _devices(device, has_gpus):
        placement = _own_placement(job, one)
        of_test.test(one)
        _skip_trials_of_one_rank(one, job.num_ranks, collector)
        for trial in _trials(plan, one, job.num_ranks, len(hosts)):
            collector.take(0, f"{one}: {KILL} in {trial.mode}")
            collector.take(0, _result_of(trial, _kill_in_job(job, trial, placement, of_test.everyone)))


def _own_placement(job: Job, device: str) -> Placement:
    """The GPU of a rank; those of a host are taken in turn."""
    if device == "cpu":
        return ON_THE_CPU
    from anyep.cli.gpus import take_gpu

    placement = Placement(count_gpus())
    take_gpu(placement.gpu_of(job.local_rank), job.rank)
    return placement


def _kill_in_job(
    job: Job, trial: Trial, placement: Placement, everyone: Callable[[Any], Sequence[Any]]
) -> dict[int, Outcome]:
    """Each rank starts one process, which is a rank of the trial."""
    store = new_store(job) if job.rank == 0 else None
    port = everyone(store.port if store is not None else 0)[0]
    store_at = StoreAddress(host=job.address, port=port)
    own = lose_a_rank(trial, [job.rank], store_at, placement, lambda text: list(everyone(text)))
    return {rank: outcome for of_rank in everyone(own) for rank, outcome in of_rank.items()}


def _show(report: Report, json_file: str | None, with_hostnames: bool) -> None:
    record = report.as_json(with_hostnames)
    text = json.dumps(record, indent=2)
    if json_file == "-":
        print(text)
        return
    from anyep.cli.selftest.table import print_report

    print_report(record, json_file)
    if json_file is not None:
        write_text(REPORT, json_file, text)
