"""How fast normal mode is between two hosts that TCP joins: two network namespaces of this machine.

    python -m tools.bench_namespaces --tokens 512 --json between.json

In one run, interleaved: AnyEP over NIXL, Gloo's all-to-all of the same rows, and plain sockets with large
sends. All of them, and the network itself, share the cores of this machine. Needs root, as `namespaces` does.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import socket
import struct
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist

from anyep.api.buffer import Buffer
from anyep.cli.bench.clock import Case, CpuClock
from anyep.cli.bench.normal import groups_of
from anyep.cli.bench.records import Label, RankReport, Record, Setup, medians_of, records_of
from anyep.cli.nodes import Nodes
from anyep.cli.ranks import Rank
from anyep.cli.units import format_bytes, format_rate, format_seconds
from anyep.machine import num_cores
from tests.support.namespaces import INTERFACE, NUM_HOSTS, TwoHosts
from tests.support.world import RankContext

TCP: Final = "tcp"
CROSSING: Final = "crossing"
ONE_WAY, BOTH_WAYS = "one rank, one way", "all ranks, both ways"
SIOCGIFADDR: Final = 0x8915
TIMEOUT_S: Final = 500.0


@dataclass(frozen=True)
class Rates:
    """GB/s from one host to the other: of one socket, and of one per rank while as much comes back."""

    one_way: float
    both_ways: float


class Sockets:
    """A connection between each rank and the rank of its index on the other host, and large sends over it."""

    def __init__(self, rank: Rank, ranks_per_host: int, num_bytes: int) -> None:
        self._is_first = rank.rank % ranks_per_host == 0
        self._is_left = rank.rank < ranks_per_host
        server = socket.create_server((_own_address(), 0))
        addresses: list[Any] = [None] * rank.num_ranks
        dist.all_gather_object(addresses, server.getsockname(), group=rank.group)
        if self._is_left:
            self._socket, _ = server.accept()
        else:
            self._socket = socket.create_connection(addresses[rank.rank - ranks_per_host])
        server.close()
        self._outgoing = memoryview(bytearray(b"\1" * num_bytes))
        self._incoming = memoryview(bytearray(num_bytes))
        self._pool = ThreadPoolExecutor(1)

    def one_way(self) -> None:
        if self._is_first:
            if self._is_left:
                self._socket.sendall(self._outgoing)
            else:
                self._receive()

    def both_ways(self) -> None:
        sent = self._pool.submit(self._socket.sendall, self._outgoing)
        self._receive()
        sent.result()

    def _receive(self) -> None:
        rest = self._incoming
        while rest:
            num_bytes = self._socket.recv_into(rest)
            if not num_bytes:
                raise ConnectionError("the other host has closed the connection")
            rest = rest[num_bytes:]


def _own_address() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        answer = fcntl.ioctl(asking.fileno(), SIOCGIFADDR, struct.pack("256s", INTERFACE.encode()))
    return socket.inet_ntoa(answer[20:24])


def crossing(rank: Rank, setup: Setup) -> Case:
    """A dispatch that only crosses: every token goes to the rank of its index on the other host."""
    buffer = Buffer(rank.group, device="cpu", **setup.nodes.of_buffer(setup.row_bytes))
    x = torch.randn(setup.tokens, setup.hidden).bfloat16()
    other = (rank.rank + setup.nodes.ranks_per_node) % rank.num_ranks
    topk_idx = torch.full((setup.tokens, 1), other * (setup.experts // rank.num_ranks))
    per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, setup.experts)
    _, _, _, _, handle, _ = buffer.dispatch(x, None, per_rank, per_node, in_rank, per_expert)
    return Case(
        Label(CROSSING, "window", setup.tokens, x.nbytes, is_listed=False),
        lambda: buffer.dispatch(x, handle=handle),
        lambda result: len(result[0]) == setup.tokens,
    )


def measure_between_hosts(context: RankContext, setup: Setup, socket_bytes: int) -> RankReport:
    """What each rank does: the cases of `anyep bench`, and the sockets'."""
    rank = Rank(context.rank, context.num_ranks, context.group, lambda _: None)
    sockets = Sockets(rank, setup.nodes.ranks_per_node, socket_bytes)

    def tcp(path: str, work: Callable[[], Any]) -> Case:
        label = Label(TCP, path, setup.tokens, socket_bytes, is_listed=False)
        return Case(label, work, lambda _: True)

    clock = CpuClock(rank, setup)
    others = nullcontext(
        [tcp(ONE_WAY, sockets.one_way), tcp(BOTH_WAYS, sockets.both_ways), crossing(rank, setup)]
    )
    return clock.report(clock.time(setup.tokens, [others, *groups_of(rank, setup, clock, setup.tokens)]))


def measure(setup: Setup, socket_bytes: int) -> list[RankReport]:
    """Every case, on every rank of two hosts. Where there cannot be any, a test is skipped."""
    with TwoHosts(setup.nodes.ranks_per_node) as hosts:
        return hosts.run(measure_between_hosts, setup, socket_bytes, timeout=TIMEOUT_S)


def report(setup: Setup, by_rank: list[RankReport], socket_bytes: int) -> tuple[Rates, list[Record]]:
    """Print everything; the sockets' rates, and the records."""
    medians, per_host = medians_of([of_rank.timings for of_rank in by_rank]), setup.nodes.ranks_per_node
    rates = Rates(
        socket_bytes / medians[TCP, ONE_WAY, setup.tokens] / 1e9,
        per_host * socket_bytes / medians[TCP, BOTH_WAYS, setup.tokens] / 1e9,
    )
    print(
        f"{NUM_HOSTS} hosts (network namespaces) with {per_host} ranks each on {num_cores()} cores,"
        f" network {setup.nodes.network},\n"
        f"{setup.tokens} tokens per rank, hidden {setup.hidden} bf16, top-{setup.topk} of {setup.experts}"
        f" experts on {setup.nodes.topk_nodes} of the hosts; medians of {setup.repeats} interleaved repeats"
    )
    print(
        f"plain TCP sockets, {format_bytes(socket_bytes)} per send: {format_rate(rates.one_way)} GB/s"
        f" {ONE_WAY}; {format_rate(rates.both_ways)} GB/s each way, {BOTH_WAYS}\n"
    )
    crossing_s = medians[CROSSING, "window", setup.tokens]
    crossing_rate = per_host * setup.tokens * setup.row_bytes / crossing_s / 1e9
    print(
        f"a dispatch of which every row crosses, to one rank: {format_seconds(crossing_s)},"
        f" {format_rate(crossing_rate)} GB/s each way, {crossing_rate / rates.both_ways:.0%} of TCP\n"
    )
    line = "{:16} {:8} {:>10} {:>14} {:>8} {:>14} {:>8} {:>14} {:>12}"
    print(
        line.format(
            "", "", "", "GB/s per rank", "vs Gloo", "between hosts", "of TCP", "Gloo between", "of TCP"
        )
    )
    records = records_of(setup, by_rank)
    for record in records:
        cells = ["", "", "", "", ""]
        if record.bytes_between_nodes and record.all_to_all_bytes_between_nodes:
            # Both move all their bytes in the time of the call, each way.
            ours = per_host * record.bytes_between_nodes / record.median_s / 1e9
            gloo_s = record.median_s * record.vs["gloo"]
            theirs = per_host * record.all_to_all_bytes_between_nodes / gloo_s / 1e9
            cells = [
                f"{record.vs['gloo']:.1f}x",
                f"{format_rate(ours)} GB/s",
                f"{ours / rates.both_ways:.0%}",
                f"{format_rate(theirs)} GB/s",
                f"{theirs / rates.both_ways:.0%}",
            ]
        rate = format_rate(record.gbps) if record.gbps else ""
        print(line.format(record.case, record.path, format_seconds(record.median_s), rate, *cells))
    sent = next(record for record in records if record.bytes_between_nodes)
    print(
        f"\na rank sends {format_bytes(sent.bytes_between_nodes or 0)} to the other host in a {sent.case};"
        f" a plain all-to-all {format_bytes(sent.all_to_all_bytes_between_nodes or 0)}"
    )
    return rates, records


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Normal mode between two network namespaces, beside plain TCP."
    )
    for option, usual in (
        ("ranks-per-host", 2),
        ("tokens", 512),
        ("hidden", 7168),
        ("experts", 64),
        ("topk", 8),
        ("repeats", 9),
        ("seed", 0),
        ("socket-mib", 32),
    ):
        parser.add_argument(f"--{option}", type=int, default=usual)
    parser.add_argument("--network", choices=("nixl", "loopback"), default="nixl")
    parser.add_argument("--json", type=Path, help="write the records and the sockets' rates to this file")
    options = parser.parse_args()
    nodes = Nodes(NUM_HOSTS, options.ranks_per_host, 1, options.network)
    setup = Setup(
        "normal",
        nodes.num_ranks,
        options.tokens,
        options.hidden,
        options.experts,
        options.topk,
        options.repeats,
        options.seed,
        nodes=nodes,
    )
    socket_bytes = options.socket_mib << 20
    try:
        by_rank = measure(setup, socket_bytes)
    except pytest.skip.Exception as reason:
        sys.exit(str(reason))
    rates, records = report(setup, by_rank, socket_bytes)
    if options.json is not None:
        content = {"tcp": asdict(rates), "records": [record.as_json() for record in records]}
        options.json.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
