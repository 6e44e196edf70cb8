"""`anyep plan`: how much memory a cluster's ranks need, where it goes, and a picture of it.

With `--machine` it predicts how long dispatch and combine take there; with `--validate` it prints published
times beside predicted ones."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import typer

from anyep.cli import options, plan_options
from anyep.cli.checks import check_experts, check_file, writing
from anyep.cli.memory_plan import MemoryPlan, Workload
from anyep.cli.plan_times import asked_of, show_times
from anyep.cli.plan_trace import Balance, TraceAsked, check_balance, show_trace
from anyep.cli.units import format_bytes, parse_bytes
from anyep.errors import InvalidCall, whole_number
from anyep.planning.machines import find_machine
from anyep.planning.traces import Trace, draw_trace, read_trace
from anyep.sizes import NUM_DEFAULT_SMS, NUM_MAX_NVL_PEERS, Config

MOST_SKEW = 4.0
MAP_ENDINGS = (".svg", ".png")
STANDARD_OUTPUT = "-"
"""What may follow --json, which has no other place to print to."""
ROWS = ("hidden", "dtype", "experts", "num_sms", "ranks_per_node", "as_json")
OF_TIMES = ("machine", "library", "topk_nodes", "compute_us", "plot_file")
OF_BALANCE = ("replicas", "groups", "expert_bytes")
OF_TRACES = ("seed", "with_balance", *OF_BALANCE)
"""Options by what they are about; each kind of plan refuses those that it would pass over."""


def plan(
    context: typer.Context,
    figures: plan_options.Files = None,
    ranks: plan_options.Ranks = "8",
    hidden: plan_options.Hidden = 7168,
    dtype: plan_options.Dtype = "bf16",
    tokens: plan_options.Tokens = 4096,
    topk: options.Topk = 8,
    experts: plan_options.Experts = 256,
    num_sms: plan_options.NumSms = NUM_DEFAULT_SMS,
    ranks_per_node: plan_options.RanksPerNode = NUM_MAX_NVL_PEERS,
    low_latency_tokens: plan_options.LowLatencyTokens = None,
    memory: plan_options.Memory = None,
    as_json: plan_options.AsJson = False,
    map_file: plan_options.MapFile = None,
    machine: plan_options.MachineName = None,
    library: plan_options.Library = None,
    topk_nodes: plan_options.TopkNodes = None,
    compute_us: plan_options.ComputeUs = 0.0,
    plot_file: plan_options.PlotFile = None,
    trace: plan_options.TraceFiles = None,
    skew: plan_options.Skew = None,
    seed: plan_options.Seed = 0,
    with_balance: plan_options.WithBalance = False,
    replicas: plan_options.Replicas = None,
    groups: plan_options.Groups = 1,
    expert_bytes: plan_options.ExpertBytes = None,
    with_validation: plan_options.Validate = False,
) -> None:
    """Show how much memory each rank needs and where it goes; with --machine, how long calls take; with
    --trace, what a routing sends."""
    files = [file for file in figures or [] if not (as_json and str(file) == STANDARD_OUTPUT)]
    if with_validation:
        _check_alone(context, ("figures", "as_json", "with_validation"), "--validate")
        from anyep.cli.validation_report import validate

        validate(files, as_json)
        return
    if files and trace is None:
        raise InvalidCall(
            f"{str(files[0])!r} is a file of figures only with --validate, and of a trace only with --trace:"
            f" add one, or leave the file out"
        )
    workload = Workload(hidden, dtype, tokens, topk, experts, num_sms, ranks_per_node, low_latency_tokens)
    if trace is not None or skew is not None:
        balance = Balance(replicas, groups, expert_bytes, compute_us) if with_balance else None
        _check_trace_options(context, balance)
        found = read_trace([*(trace or []), *files]) if trace else _drawn(workload, ranks, skew or 0.0, seed)
        on = find_machine(machine) if machine is not None else None
        show_trace(TraceAsked(found, workload, on, library, balance), as_json, plot_file)
        return
    _check_needs(context, OF_TRACES, "is about a routing: give one with --trace or --skew")
    if machine is not None:
        _check_alone(
            context, (*ROWS, *OF_TIMES, "ranks", "tokens", "topk", "low_latency_tokens"), "--machine"
        )
        asked = asked_of(workload, _parse_ranks(ranks), machine, library, topk_nodes, compute_us)
        show_times(asked, as_json, plot_file)
        return
    _check_needs(context, OF_TIMES, "is about predicted times: say on which machine with --machine")
    _show_memory(workload, _parse_ranks(ranks), memory, as_json, map_file)


def _show_memory(
    workload: Workload, ranks: list[int], memory: str | None, as_json: bool, map_file: Path | None
) -> None:
    plans = [MemoryPlan(workload, count) for count in ranks]
    records = [plan.record() for plan in plans]
    memory_bytes = parse_bytes("--memory", memory) if memory is not None else None
    if memory_bytes is not None:
        for plan_, record in zip(plans, records, strict=True):
            record["fits"] = plan_.total_bytes <= memory_bytes
    if map_file is not None:
        _draw(plans, map_file)
    if as_json:
        print(json.dumps(records[0] if len(records) == 1 else records, indent=2))
    elif len(plans) == 1:
        _print_one(plans[0], memory_bytes)
    else:
        _print_rows(plans, memory_bytes)


def _drawn(workload: Workload, ranks: str, skew: float, seed: int) -> Trace:
    """A routing by a power law."""
    counts = _parse_ranks(ranks)
    if len(counts) > 1:
        raise InvalidCall("a routing is drawn for one number of ranks: give --ranks a single one with --skew")
    if not 0 <= skew <= MOST_SKEW:
        raise InvalidCall(f"--skew is {skew:g}: it must be from 0, all experts alike, to {MOST_SKEW}")
    whole_number("--ranks", counts[0], minimum=1)
    whole_number("--tokens", workload.num_tokens, minimum=1)
    whole_number("--seed", seed, minimum=0)
    check_experts(workload.num_experts, counts[0], workload.num_topk)
    return draw_trace((counts[0], workload.num_tokens, workload.num_topk), workload.num_experts, skew, seed)


def _given(context: typer.Context) -> dict[str, str]:
    """The options on the command line, by the name of their parameter."""
    found = {}
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if source is not None and source.name == "COMMANDLINE":
            found[parameter.name or ""] = parameter.opts[0]
    return found


def _check_alone(context: typer.Context, allowed: tuple[str, ...], option: str) -> None:
    """Refuse options that another one would pass over."""
    for name, wrong in _given(context).items():
        if name not in allowed:
            raise InvalidCall(f"{wrong} has no effect with {option}: leave one of them out")


def _check_needs(context: typer.Context, names: tuple[str, ...], why: str) -> None:
    for name, option in _given(context).items():
        if name in names:
            raise InvalidCall(f"{option} {why}")


def _check_trace_options(context: typer.Context, balance: Balance | None) -> None:
    """A trace has its own ranks, tokens and top-k; a drawn one has those of the options."""
    given = _given(context)
    own = "figures trace" if "trace" in given else "skew seed ranks tokens topk"
    common = ("machine", "library", "plot_file", "with_balance", "compute_us", "low_latency_tokens")
    allowed = (*ROWS, *own.split(), *common, *OF_BALANCE)
    _check_alone(context, allowed, given["trace" if "trace" in given else "skew"])
    if "library" in given and "machine" not in given:
        raise InvalidCall("--library is about predicted times: say on which machine with --machine")
    if balance is None:
        _check_needs(context, (*OF_BALANCE, "compute_us"), "is about placing experts: add --balance")
    else:
        check_balance(balance)


def _parse_ranks(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise InvalidCall(f"--ranks is {text!r}: write a number, or several like 8,16,32") from None


def _draw(plans: list[MemoryPlan], map_file: Path) -> None:
    if map_file.suffix.lower() not in MAP_ENDINGS:
        raise InvalidCall(f"a map cannot be written to {str(map_file)!r}: its name must end in .svg or .png")
    if len(plans) > 1:
        raise InvalidCall("a map shows one cluster: give --ranks a single number with --map")
    check_file("the map", map_file)
    from anyep.cli.memory_map import draw_memory_map

    with writing("the map", map_file):
        draw_memory_map(plans[0], map_file)
    print(f"wrote {map_file}", file=sys.stderr)


def _config_text(config: Config) -> str:
    return (
        f"{config.num_channels} channels; within a node chunks of {config.num_max_nvl_chunked_send_tokens}"
        f" in rings of {config.num_max_nvl_chunked_recv_tokens} rows;"
        f" between nodes {config.num_max_rdma_chunked_send_tokens}"
        f" in {config.num_max_rdma_chunked_recv_tokens}"
    )


def _fits_text(plan: MemoryPlan, memory_bytes: int) -> str:
    if plan.total_bytes <= memory_bytes:
        return f"fits, {format_bytes(memory_bytes - plan.total_bytes)} left"
    return f"{format_bytes(plan.total_bytes - memory_bytes)} too much"


def _print_one(plan: MemoryPlan, memory_bytes: int | None) -> None:
    from rich import box
    from rich.table import Table

    from anyep.cli.console import console_for_results

    workload = plan.workload
    console = console_for_results()
    nodes = "one node" if plan.num_nodes == 1 else f"{plan.num_nodes} nodes of {workload.ranks_per_node}"
    console.print(
        f"[bold]{plan.num_ranks} ranks[/bold] on {nodes}; {workload.num_tokens} tokens per rank, hidden"
        f" {workload.hidden} {workload.dtype}, top-{workload.num_topk} of {workload.num_experts} experts"
    )
    console.print(f"  dispatch  {_config_text(plan.dispatch_config)}")
    console.print(f"  combine   {_config_text(plan.combine_config)}")
    table = Table(box=box.SIMPLE_HEAD, title="memory of one rank", title_justify="left")
    table.add_column("part")
    table.add_column("bytes", justify="right")
    table.add_column("", justify="right")
    low_latency_parts = plan.low_latency.parts() if plan.low_latency else {}
    for name, parts, why_none in (
        ("control region", plan.control_parts, ""),
        ("NVL rings (num_nvl_bytes)", plan.nvl_parts, ""),
        ("RDMA rings (num_rdma_bytes)", plan.rdma_parts, "one node needs none"),
        ("low-latency slots (num_rdma_bytes)", low_latency_parts, "ask with --low-latency-tokens"),
    ):
        total = sum(parts.values())
        table.add_row(f"[bold]{name}[/bold]", f"{total:,}", format_bytes(total) if total else why_none)
        for part, size in parts.items():
            if size:
                table.add_row(f"  {_words(part)}", f"{size:,}", format_bytes(size), style="dim")
    table.add_section()
    table.add_row("[bold]heap[/bold]", f"{plan.total_bytes:,}", format_bytes(plan.total_bytes))
    console.print(table)
    token = ", ".join(f"{_words(name)} {size:,}" for name, size in workload.token.parts().items() if size)
    console.print(f"one token on the wire: {workload.token.token_bytes:,} bytes = {token}")
    console.print(
        f"one dispatch with uniform routing brings about {plan.expected_rows:,} rows to a rank"
        f" ({format_bytes(plan.expected_window_bytes)}): a window of that size takes them straight,"
        f" smaller memory sends them through the rings"
    )
    if memory_bytes is not None:
        console.print(f"in {format_bytes(memory_bytes)} of memory: {_fits_text(plan, memory_bytes)}")


def _print_rows(plans: list[MemoryPlan], memory_bytes: int | None) -> None:
    from rich import box
    from rich.table import Table

    from anyep.cli.console import console_for_results

    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("ranks", "nodes", "NVL", "RDMA", "low latency", "heap", "rows a call"):
        table.add_column(heading, justify="right", no_wrap=True)
    if memory_bytes is not None:
        table.add_column(f"in {format_bytes(memory_bytes)}", no_wrap=True)
    for plan in plans:
        low_latency = format_bytes(plan.low_latency_bytes) if plan.low_latency_bytes is not None else "-"
        cells = [
            str(plan.num_ranks),
            str(plan.num_nodes),
            format_bytes(plan.nvl_bytes),
            format_bytes(plan.rdma_bytes),
            low_latency,
            format_bytes(plan.total_bytes),
            f"{plan.expected_rows:,}",
        ]
        if memory_bytes is not None:
            cells.append(_fits_text(plan, memory_bytes))
        table.add_row(*cells)
    console = console_for_results()
    console.print(table)
    console.print(f"one token on the wire: {plans[0].workload.token.token_bytes:,} bytes")


def _words(name: str) -> str:
    return name.replace("_", " ").replace("topk", "top-k")
