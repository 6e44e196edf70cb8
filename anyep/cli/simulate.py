"""`anyep simulate`: a dispatch or combine in virtual time, with small rings, slow ranks or links, jitter."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from anyep.cli import options, plan_options
from anyep.cli.memory_plan import Workload
from anyep.cli.plan_times import TimesAsked, draw_to
from anyep.errors import InvalidCall, whole_number
from anyep.planning.machines import find_machine
from anyep.planning.simulated_combine import simulate_combine
from anyep.planning.simulation import simulate
from anyep.planning.times import COMBINE, DISPATCH, NORMAL, Call, constant, time_of
from anyep.planning.traces import draw_trace
from anyep.planning.virtual_time import Result, Shape, Speeds, Trouble, units_of
from anyep.sizes import NUM_DEFAULT_SMS, NUM_MAX_NVL_PEERS, get_combine_config, get_dispatch_config
from anyep.topology import Topology

SMS_PER_CHANNEL: Final = 2
MOST_RANKS: Final = 512
MOST_TOKENS: Final = 1 << 20
"""A run of more would take minutes, and gigabytes."""
WAYS: Final = {
    DISPATCH: {
        "pack": "into the NIC's ring",
        "network": "by the NIC",
        "relay": "to the ranks",
        "receive": "out of rings",
    },
    COMBINE: {"network": "by the NIC", "relay": "into sums for other nodes", "receive": "into own tokens"},
}


@dataclass(frozen=True)
class Scenario:
    """One call, its rings, and what is wrong with it."""

    call: Call
    shape: Shape
    speeds: Speeds
    trouble: Trouble
    watch: int
    launch_us: float
    formula_us: float
    name: str


def simulate_command(
    machine: plan_options.MachineName = None,
    library: plan_options.Library = None,
    ranks: Annotated[int, typer.Option(help="Number of ranks.")] = 64,
    hidden: plan_options.Hidden = 7168,
    dtype: plan_options.Dtype = "bf16",
    tokens: plan_options.Tokens = 4096,
    topk: options.Topk = 8,
    experts: plan_options.Experts = 256,
    num_sms: plan_options.NumSms = NUM_DEFAULT_SMS,
    ranks_per_node: plan_options.RanksPerNode = NUM_MAX_NVL_PEERS,
    skew: Annotated[
        float, typer.Option(help="The n-th most popular expert has a weight of n ** -skew.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the routing and of jitter.")] = 0,
    combine: Annotated[
        bool, typer.Option("--combine", help="Simulate a combine by windows, not a dispatch through rings.")
    ] = False,
    chunk: Annotated[
        int | None, typer.Option(help="Tokens that move at a time; default: as in the tuned config.")
    ] = None,
    net_ring: Annotated[
        int | None, typer.Option(help="Rows of a ring between nodes; default: as in the tuned config.")
    ] = None,
    nvl_ring: Annotated[
        int | None, typer.Option(help="Rows of a ring within a node; default: as in the tuned config.")
    ] = None,
    network_latency_us: Annotated[float, typer.Option(help="Latency of a chunk, and of a credit.")] = 5.0,
    slow_rank: Annotated[
        int | None, typer.Option(help="A rank whose SMs are slower, or that is late.")
    ] = None,
    slow_by: Annotated[float, typer.Option(help="How many times as long the slow rank's SMs take.")] = 1.0,
    late_us: Annotated[float, typer.Option(help="How much later the slow rank begins the call.")] = 0.0,
    slow_link: Annotated[int | None, typer.Option(help="A rank whose NIC is slower.")] = None,
    link_share: Annotated[float, typer.Option(help="The part of its rate that this NIC reaches.")] = 0.5,
    jitter: Annotated[float, typer.Option(help="The relative deviation of each step's time.")] = 0.0,
    watch: Annotated[int, typer.Option(help="The rank whose stages --plot shows.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", help="Draw a waterfall of the watched rank to this file.")
    ] = None,
) -> None:
    """Run one call in virtual time: what rings, slow ranks, slow links and jitter do to it."""
    if machine is None:
        raise InvalidCall("on which machine? Name it with --machine, like --machine 'H800 CX7'")
    if slow_rank is None and (slow_by != 1.0 or late_us):
        raise InvalidCall("--slow-by and --late-us are about a slow rank: name it with --slow-rank")
    workload = Workload(hidden, dtype, tokens, topk, experts, num_sms, ranks_per_node, None)
    trouble = Trouble(
        slow_rank, slow_by, late_us, slow_link, link_share if slow_link is not None else 1.0, jitter, seed
    )
    asked = TimesAsked(workload, (ranks,), find_machine(machine), library, None, 0.0)
    what = COMBINE if combine else DISPATCH
    scenario = scenario_of(asked, (chunk, net_ring, nvl_ring), network_latency_us, trouble, watch, what)
    trace = draw_trace((ranks, tokens, topk), scenario.call.num_experts, _check_skew(skew), seed, num_steps=1)
    units = units_of(trace.steps[0], scenario.call.num_experts, scenario.shape)
    run = simulate_combine if combine else simulate
    result = run(units, scenario.shape, scenario.speeds, trouble, watch=watch)
    if plot_file is not None:
        draw_to("the plot", plot_file, lambda path: _draw(scenario, result, path))
    if as_json:
        print(json.dumps(record_of(scenario, result), indent=2))
    else:
        _print(scenario, result)


def scenario_of(
    asked: TimesAsked,
    rings: tuple[int | None, int | None, int | None],
    network_latency_us: float,
    trouble: Trouble,
    watch: int,
    what: str,
) -> Scenario:
    """Check what is asked for, and derive the speeds of the parts from the machine's constants."""
    (ranks,) = asked.ranks
    if ranks > MOST_RANKS:
        raise InvalidCall(
            f"--ranks is {ranks}: at most {MOST_RANKS} are simulated; `anyep plan` has a formula"
        )
    tokens = whole_number("--tokens", asked.workload.num_tokens, minimum=1)
    if ranks * tokens > MOST_TOKENS:
        raise InvalidCall(
            f"{ranks} ranks with {tokens} tokens each would take minutes: lower one of them, to at most"
            f" {MOST_TOKENS} tokens together"
        )
    call = next(call for call in asked.calls(ranks) if call.what == what)
    topology = Topology(ranks, ranks // call.num_nodes)
    shape = _shape(call, topology, rings)
    _check_trouble(trouble, ranks, watch)
    if not 0 <= network_latency_us < float("inf"):
        raise InvalidCall(f"--network-latency-us is {network_latency_us:g}: it must be a time, 0 or more")
    library = asked.library_of(NORMAL)
    constants = asked.machine.constants(library, NORMAL)
    several = call.num_nodes > 1
    near = SMS_PER_CHANNEL * constant(constants, f"{call.what}_gbs_per_sm")
    relay = SMS_PER_CHANNEL * constant(constants, f"{call.what}_relay_gbs_per_sm") if several else near
    launch = constant(constants, f"{call.what}_start_us")
    speeds = Speeds(
        launch + (constants.get("notify_us", 0.0) if several else 0.0),
        near,
        relay,
        near,
        constant(constants, f"{call.what}_nvlink_gbs"),
        constant(constants, "network_gbs") if several else 1.0,
        network_latency_us=network_latency_us,
    )
    formula = time_of(call, constants).total_us
    return Scenario(call, shape, speeds, trouble, watch, launch, formula, asked.machine.names[0])


def _shape(call: Call, topology: Topology, rings: tuple[int | None, int | None, int | None]) -> Shape:
    tuned = get_dispatch_config if call.what == DISPATCH else get_combine_config
    config = tuned(call.num_ranks, call.num_sms)
    chunk, net_rows, nvl_rows = rings
    for name, count in (("--chunk", chunk), ("--net-ring", net_rows), ("--nvl-ring", nvl_rows)):
        if count is not None:
            whole_number(name, count, minimum=1)
    net_rows = config.num_max_rdma_chunked_recv_tokens if net_rows is None else net_rows
    nvl_rows = config.num_max_nvl_chunked_recv_tokens if nvl_rows is None else nvl_rows
    smallest = min(net_rows, nvl_rows) if call.num_nodes > 1 else nvl_rows
    if chunk is None:
        usual = (
            config.num_max_rdma_chunked_send_tokens
            if call.num_nodes > 1
            else config.num_max_nvl_chunked_send_tokens
        )
        chunk = max(1, min(usual, smallest // 2))
    if chunk > smallest:
        raise InvalidCall(f"--chunk is {chunk}, but the smallest ring has {smallest} rows: a chunk must fit")
    return Shape(topology, config.num_channels, chunk, net_rows, nvl_rows, call.row_bytes)


def _check_trouble(trouble: Trouble, ranks: int, watch: int) -> None:
    for name, rank in (
        ("--slow-rank", trouble.slow_rank),
        ("--slow-link", trouble.slow_link),
        ("--watch", watch),
    ):
        if rank is not None and not 0 <= rank < ranks:
            raise InvalidCall(f"{name} is {rank}, but the ranks are 0 to {ranks - 1}")
    if not 1 <= trouble.slow_by <= 1000:
        raise InvalidCall(f"--slow-by is {trouble.slow_by:g}: it must be from 1, as fast as others, to 1000")
    if not 0 <= trouble.late_us < float("inf"):
        raise InvalidCall(f"--late-us is {trouble.late_us:g}: it must be a time, 0 or more")
    if not 0.001 <= trouble.link_share <= 1:
        raise InvalidCall(f"--link-share is {trouble.link_share:g}: it must be from 0.001 to 1")
    if not 0 <= trouble.jitter <= 3:
        raise InvalidCall(f"--jitter is {trouble.jitter:g}: it must be from 0, none, to 3")
    if trouble.seed < 0:
        raise InvalidCall(f"--seed is {trouble.seed}: it must be at least 0")


def _check_skew(skew: float) -> float:
    if not 0 <= skew <= 4:
        raise InvalidCall(f"--skew is {skew:g}: it must be from 0, all experts alike, to 4")
    return skew


def record_of(scenario: Scenario, result: Result) -> dict[str, Any]:
    """The run for programs."""
    call, shape = scenario.call, scenario.shape
    return {
        "machine": scenario.name,
        "what": call.what,
        "ranks": call.num_ranks,
        "nodes": call.num_nodes,
        "tokens": call.num_tokens,
        "experts": call.num_experts,
        "channels": shape.num_channels,
        "chunk_tokens": shape.chunk_tokens,
        "net_ring_rows": shape.net_rows,
        "nvl_ring_rows": shape.nvl_rows,
        "trouble": scenario.trouble._asdict(),
        "simulated_us": round(result.total_us, 1),
        "formula_us": round(scenario.formula_us, 1),
        "difference": round(result.total_us / scenario.formula_us - 1, 4),
        "finished_us": [round(each, 1) for each in result.finished_us],
        "busy": {stage: [round(each, 4) for each in of_ranks] for stage, of_ranks in result.busy.items()},
        "waits_us": {name: round(each, 1) for name, each in result.waits._asdict().items()},
        "steps": result.num_steps,
        "stuck": list(result.stuck),
    }


def _draw(scenario: Scenario, result: Result, path: Path) -> None:
    from anyep.cli.waterfall import draw_waterfall

    draw_waterfall(scenario, result, path)


def _print(scenario: Scenario, result: Result) -> None:
    from rich import box
    from rich.table import Table

    from anyep.cli.console import console_for_results

    console = console_for_results()
    call, shape = scenario.call, scenario.shape
    console.print(
        f"[bold]{scenario.name}[/bold]: {call.num_ranks} ranks on {call.num_nodes} nodes,"
        f" {call.num_tokens} tokens per rank, top-{call.num_topk} of {call.num_experts} experts;"
        f" {shape.num_channels} channels, chunks of {shape.chunk_tokens} tokens"
    )
    if result.stuck:
        console.print("[bold]it stands still[/bold]: " + "; ".join(result.stuck[:6]))
        return
    slowest = max(range(call.num_ranks), key=lambda rank: result.finished_us[rank])
    first = min(result.finished_us)
    console.print(
        f"a {call.what} takes {result.total_us:.0f} us; the formula says {scenario.formula_us:.0f} us"
        f" ({result.total_us / scenario.formula_us - 1:+.1%})"
    )
    console.print(f"the first rank is finished after {first:.0f} us, the last one is rank {slowest}")
    table = Table(box=box.SIMPLE_HEAD)
    for number, heading in enumerate(("stage", "rows move", "busy on average", "busiest rank")):
        table.add_column(heading, justify="left" if number < 2 else "right")
    for stage, of_ranks in result.busy.items():
        busiest = max(range(len(of_ranks)), key=lambda rank: of_ranks[rank])
        mean = sum(of_ranks) / len(of_ranks)
        if mean:
            table.add_row(stage, WAYS[call.what][stage], f"{mean:.0%}", f"{busiest}: {of_ranks[busiest]:.0%}")
    console.print(table)
    waits = result.waits
    console.print(
        f"a channel waits for room in rings: its sender {waits.sender_us:.0f} us, its relay"
        f" {waits.relay_us:.0f} us"
    )
