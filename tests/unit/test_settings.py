"""Settings from the environment: what they do, what is said about wrong or different ones, who shows them."""

from __future__ import annotations

import ast
import inspect
import json
import logging
import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import anyep
from anyep import AnyEPError, Config, Disagreement, InvalidCall, settings
from anyep.api.buffer import Buffer
from anyep.join.agreement import RankValue, check_agreement
from anyep.join.rendezvous import refuse_one_gpu_twice
from anyep.join.roll_call import Process
from anyep.nn import make_buffer
from tests.support.commands import anyep as anyep_command
from tests.support.scripts import run_script
from tests.support.world import RankContext, get_world

REPOSITORY = Path(anyep.__file__).parent.parent
NAMES = [setting.name for setting in settings.SETTINGS]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    """Variables of a rank's process, for a while."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


# One setting


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("ANYEP_DEVICE", "cpu", "cpu"),
        ("ANYEP_DEVICE", "cuda:1", "cuda:1"),
        ("ANYEP_RANKS_PER_NODE", "8", 8),
        ("ANYEP_RANKS_PER_NODE", " 8 ", 8),
        ("ANYEP_NUM_WINDOW_BYTES", "2GiB", 2 << 30),
        ("ANYEP_NUM_WINDOW_BYTES", "0.5 mib", 1 << 19),
        ("ANYEP_NUM_WINDOW_BYTES", "1024", 1024),
        ("ANYEP_NUM_WINDOW_BYTES", "0", 0),
        ("ANYEP_NUM_WINDOW_BYTES", "auto", None),
        ("ANYEP_NETWORK", "nixl", "nixl"),
        ("ANYEP_NETWORK", "loopback", "loopback"),
        ("ANYEP_HEAP", "host", "host"),
        ("ANYEP_TIMEOUT_S", "2.5", 2.5),
        ("ANYEP_CACHE_DIR", "/some/where", "/some/where"),
        ("ANYEP_REPLACE_DEEP_EP", "1", True),
        ("ANYEP_REPLACE_DEEP_EP", "0", False),
    ],
)
def test_values(monkeypatch: pytest.MonkeyPatch, name: str, text: str, value: Any) -> None:
    setting = next(setting for setting in settings.SETTINGS if setting.name == name)
    assert setting.choose() == settings.Chosen(setting.default, "default", setting.argument)
    monkeypatch.setenv(name, text)
    assert setting.choose() == settings.Chosen(value, name, setting.argument)
    assert setting.choose("given") == settings.Chosen("given", "argument", setting.argument)
    monkeypatch.setenv(name, "")
    assert setting.choose().source == "default"


WRONG = [
    ("ANYEP_DEVICE", "gpu", "it must be cpu or cuda"),
    ("ANYEP_RANKS_PER_NODE", "two", "it must be a whole number of ranks, at least 1"),
    ("ANYEP_RANKS_PER_NODE", "0", "it must be a whole number of ranks, at least 1"),
    ("ANYEP_NUM_WINDOW_BYTES", "2 gigs", "it must be auto, or bytes as a multiple of 128, such as 2GiB"),
    ("ANYEP_NUM_WINDOW_BYTES", "100", "it must be auto, or bytes as a multiple of 128"),
    ("ANYEP_NUM_WINDOW_BYTES", "-128", "it must be auto, or bytes as a multiple of 128"),
    ("ANYEP_NETWORK", "tcp", "it must be nixl or loopback"),
    ("ANYEP_HEAP", "gpu", "it must be auto, device or host"),
    ("ANYEP_TIMEOUT_S", "soon", "it must be a number of seconds above 0"),
    ("ANYEP_TIMEOUT_S", "nan", "it must be a number of seconds above 0"),
]


def make(context: RankContext, variables: list[dict[str, str]], arguments: dict[str, Any]) -> str:
    """Make a Buffer with other variables on each rank; the error, or what the Buffer is like."""
    with environment(**variables[context.rank]):
        try:
            buffer = Buffer(context.group, 1 << 20, 1 << 20, **arguments)
        except AnyEPError as error:
            return f"{type(error).__name__}: {error}"
        options = buffer.runtime.options
        buffer.destroy()
        return (
            f"{options.device} {options.ranks_per_node} {options.num_window_bytes} {options.network}"
            f" {options.heap} {options.timeout_s:g}"
        )


@pytest.mark.parametrize(("name", "text", "must"), WRONG)
def test_a_wrong_value_is_told_on_all_ranks(name: str, text: str, must: str) -> None:
    wrong, right = get_world(2).run(make, [{name: text}, {}], {})
    assert wrong.startswith(f"InvalidCall: {name} is {text!r}: {must}")
    assert right.startswith(f"InvalidCall: rank 0 could not make its Buffer: {name} is {text!r}: {must}")


def test_a_buffer_by_the_environment() -> None:
    variables = {
        "ANYEP_DEVICE": "cpu",
        "ANYEP_RANKS_PER_NODE": "1",
        "ANYEP_NUM_WINDOW_BYTES": "1MiB",
        "ANYEP_NETWORK": "loopback",
        "ANYEP_HEAP": "host",
        "ANYEP_TIMEOUT_S": "7",
    }
    assert get_world(2).run(make, [variables] * 2, {}) == ["cpu 1 1048576 loopback host 7"] * 2
    given = {"device": "cpu", "ranks_per_node": 2, "num_window_bytes": 0, "heap": "auto"}
    assert get_world(2).run(make, [variables] * 2, given) == ["cpu 2 0 loopback auto 7"] * 2


def test_nodes_that_do_not_fit() -> None:
    """The sentence of the argument, about the variable."""
    by_argument = get_world(2).run(make, [{}] * 2, {"ranks_per_node": 3, "device": "cpu"})
    by_variable = get_world(2).run(make, [{"ANYEP_RANKS_PER_NODE": "3"}] * 2, {"device": "cpu"})
    assert "ranks_per_node must divide 2" in by_argument[0]
    assert by_variable == [by_argument[0].replace("ranks_per_node", "ANYEP_RANKS_PER_NODE")] * 2


def test_a_device_that_is_not_there() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    for message in get_world(2).run(make, [{"ANYEP_DEVICE": "cuda"}] * 2, {}):
        assert message == (
            "NotSupported: ANYEP_DEVICE is 'cuda', but torch finds no GPU here: pass ANYEP_DEVICE='cpu'"
        )


# Settings that differ


@pytest.mark.parametrize(
    ("variables", "arguments", "sentence"),
    [
        (
            [{"ANYEP_NUM_WINDOW_BYTES": size} for size in ("1GiB", "2GiB", "1GiB", "2GiB")],
            {},
            "num_window_bytes: 1 GiB on ranks 0, 2 (ANYEP_NUM_WINDOW_BYTES); 2 GiB on ranks 1, 3"
            " (ANYEP_NUM_WINDOW_BYTES)",
        ),
        (
            [{"ANYEP_RANKS_PER_NODE": "2"}, {}, {"ANYEP_RANKS_PER_NODE": "1"}, {}],
            {},
            "ranks_per_node: 2 on rank 0 (ANYEP_RANKS_PER_NODE); all ranks of a host on ranks 1, 3 (default);"
            " 1 on rank 2 (ANYEP_RANKS_PER_NODE)",
        ),
        (
            [{"ANYEP_NETWORK": "loopback"}, *[{}] * 3],
            {},
            "network: loopback on rank 0 (ANYEP_NETWORK); none on ranks 1, 2, 3 (default)",
        ),
        (
            [{"ANYEP_HEAP": "host"}, *[{}] * 3],
            {},
            "heap: host on rank 0 (ANYEP_HEAP); auto on ranks 1, 2, 3 (default)",
        ),
        (
            [{}, {}, {"ANYEP_TIMEOUT_S": "3"}, {"ANYEP_TIMEOUT_S": "3"}],
            {},
            "timeout_s: 100 on ranks 0, 1 (default); 3 on ranks 2, 3 (ANYEP_TIMEOUT_S)",
        ),
    ],
)
def test_ranks_that_differ(variables: list[dict[str, str]], arguments: dict[str, Any], sentence: str) -> None:
    for message in get_world(4).run(make, variables, {"device": "cpu"} | arguments):
        assert message == f"Disagreement: the ranks disagree about {sentence}"


def test_devices_that_differ() -> None:
    values = [{"device": RankValue("cuda", "ANYEP_DEVICE")}, {"device": RankValue("cpu", "argument")}]
    with pytest.raises(
        Disagreement, match=r"device: cuda on rank 0 \(ANYEP_DEVICE\); cpu on rank 1 \(argument\)"
    ):
        check_agreement(values)


def make_a_layers_buffer(context: RankContext, variables: list[dict[str, str]], num_sms: list[int]) -> str:
    usual = Buffer.num_sms
    Buffer.set_num_sms(num_sms[context.rank])
    try:
        with environment(**variables[context.rank]):
            buffer = make_buffer(context.group, 64, 8, device="cpu")
    except AnyEPError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        Buffer.set_num_sms(usual)
    num_nodes = buffer.topology.num_nodes
    buffer.destroy()
    return f"{num_nodes} nodes"


def test_a_buffer_for_layers() -> None:
    by_variable = [{"ANYEP_RANKS_PER_NODE": "1"}] * 2
    run = get_world(2).run
    assert run(make_a_layers_buffer, by_variable, [20, 20]) == ["2 nodes"] * 2
    sentence = "about ranks_per_node: 1 on rank 0 (ANYEP_RANKS_PER_NODE); all ranks of a host on"
    for message in run(make_a_layers_buffer, [by_variable[0], {}], [20, 20]):
        assert message == f"Disagreement: the ranks disagree {sentence} rank 1 (default)"
    for message in run(make_a_layers_buffer, [{}, {}], [20, 24]):
        assert message == "Disagreement: the ranks disagree about num_sms: 20 on rank 0; 24 on rank 1"
    wrong, right = run(make_a_layers_buffer, [{"ANYEP_RANKS_PER_NODE": "x"}, {}], [20, 20])
    assert wrong.startswith("InvalidCall: ANYEP_RANKS_PER_NODE is 'x'")
    assert right.startswith("InvalidCall: rank 0 could not make its Buffer: ANYEP_RANKS_PER_NODE is 'x'")


def test_hints_go_by_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config()
    assert config.get_rdma_buffer_size_hint(128, 4) == 0
    monkeypatch.setenv("ANYEP_RANKS_PER_NODE", "2")
    for hint in (config.get_rdma_buffer_size_hint, config.get_nvl_buffer_size_hint):
        assert hint(128, 4) == hint(128, 4, ranks_per_node=2)
        assert hint(128, 4, ranks_per_node=4) != hint(128, 4)


# Mistyped ones


def test_unknown_variables(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("ANYEP_RANK_PER_NODE", "2")
    monkeypatch.setenv("ANYEP_WWWWWWWWWWWWW", "2")
    monkeypatch.setenv("ANYEP_SOAK_PAIRS", "2")
    monkeypatch.setattr(settings, "_warned", set())
    with caplog.at_level(logging.WARNING, "anyep"):
        settings.warn_of_unknown_variables()
        settings.warn_of_unknown_variables()
    assert caplog.messages == [
        "ANYEP_RANK_PER_NODE is set, but AnyEP has no such setting: is ANYEP_RANKS_PER_NODE meant?",
        "ANYEP_WWWWWWWWWWWWW is set, but AnyEP has no such setting; docs/settings.md lists them",
    ]


def heard_while_making(context: RankContext) -> list[str]:
    heard: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    listener = Listener()
    logging.getLogger("anyep").addHandler(listener)
    try:
        with environment(ANYEP_DEVICES="cpu"):
            for _ in range(2):
                Buffer(context.group, 1 << 20, device="cpu").destroy()
    finally:
        logging.getLogger("anyep").removeHandler(listener)
    return heard


def test_making_a_buffer_warns_of_unknown_variables_once() -> None:
    sentence = "ANYEP_DEVICES is set, but AnyEP has no such setting: is ANYEP_DEVICE meant?"
    assert get_world(2).run(heard_while_making) == [[sentence]] * 2


# Where they are shown


def test_doctor() -> None:
    variables = {"ANYEP_RANKS_PER_NODE": "4", "ANYEP_DEVICE": "gpu", "ANYEP_NETWRK": "nixl"}
    findings = {
        finding["name"]: finding
        for finding in json.loads(anyep_command("doctor", "--json", env=variables).stdout)
    }
    for setting in settings.SETTINGS:
        finding = findings[setting.name]
        text = variables.get(setting.name)
        assert finding["value"] == text
        assert finding["source"] == ("environment" if text else "default")
        assert finding["default"] == setting.default_in_words
    assert findings["ANYEP_RANKS_PER_NODE"]["state"] == "ok"
    assert findings["ANYEP_DEVICE"]["state"] == "note"
    assert findings["ANYEP_DEVICE"]["detail"] == "ANYEP_DEVICE is 'gpu': it must be cpu or cuda"
    assert findings["ANYEP_NETWRK"]["next_step"] == "is ANYEP_NETWORK meant?"
    printed = " ".join(anyep_command("doctor", env=variables).stdout.split())
    assert all(name in printed for name in NAMES)
    assert "4 (from the environment; default: a host is a node)" in printed


def test_every_setting_is_on_the_page() -> None:
    page = (REPOSITORY / "docs" / "settings.md").read_text()
    for setting in settings.SETTINGS:
        (line,) = [line for line in page.splitlines() if line.startswith(f"| `{setting.name}` |")]
        assert (f"`{setting.argument}`" in line) == bool(setting.argument)
        for word in re.findall(r"[\w$./~]+", setting.default_in_words):
            assert word in line, (setting.name, word)
    listed = set(re.findall(r"^\| `(ANYEP_\w+)`", page, re.MULTILINE))
    assert listed == set(NAMES)
    for place in ("README.md", "docs/running.md"):
        assert "settings.md" in (REPOSITORY / place).read_text()


def test_every_argument_has_a_setting() -> None:
    """Those of the constructor that deep_ep does not have."""
    parts = inspect.signature(Buffer).parameters.values()
    own = {part.name for part in parts if part.kind is part.KEYWORD_ONLY}
    assert own == {setting.argument for setting in settings.SETTINGS if setting.argument}


def variables_read(path: Path) -> Iterator[tuple[str, str]]:
    """(where, the variable or how it is computed) for each look into the environment in a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        key: ast.expr | None = None
        if isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("environ"):
            key = node.slice if isinstance(node.ctx, ast.Load) else None
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("environ.get", "getenv")):
            key = node.args[0]
        elif isinstance(node, ast.Compare) and ast.unparse(node.comparators[0]).endswith("environ"):
            key = node.left
        if key is not None:
            yield (
                f"{path.name}:{node.lineno}",
                ast.literal_eval(key) if isinstance(key, ast.Constant) else "?",
            )


def test_nothing_else_reads_settings() -> None:
    for path in (REPOSITORY / "anyep").rglob("*.py"):
        if path.name != "settings.py":
            for where, variable in variables_read(path):
                assert variable != "?", f"{where} reads a variable that cannot be told: write its name there"
                assert not variable.startswith("ANYEP_"), f"{where} reads {variable}: use anyep.settings"


# Programs that were written for deep_ep: only names of deep_ep, and sizes as its hints say

PROGRAM = """
import torch
import torch.distributed as dist
import deep_ep

def main():
    dist.init_process_group("gloo")
    group, rank, num_ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    num_local_ranks, num_experts, num_tokens, hidden, num_topk = 2, 8, 12, 128, 3
    num_nodes = num_ranks // num_local_ranks
    torch.manual_seed(rank)
    dispatch_config = deep_ep.Buffer.get_dispatch_config(num_ranks)
    combine_config = deep_ep.Buffer.get_combine_config(num_ranks)
    num_nvl_bytes = num_rdma_bytes = 0
    for config in (dispatch_config, combine_config):
        num_nvl_bytes = max(num_nvl_bytes, config.get_nvl_buffer_size_hint(hidden * 2, num_ranks))
        num_rdma_bytes = max(num_rdma_bytes, config.get_rdma_buffer_size_hint(hidden * 2, num_ranks))
    hint = deep_ep.Buffer.get_low_latency_rdma_size_hint(num_tokens, hidden, num_ranks, num_experts)
    buffer = deep_ep.Buffer(
        group, num_nvl_bytes, max(num_rdma_bytes, hint), low_latency_mode=True,
        num_qps_per_rank=num_experts // num_ranks, explicitly_destroy=True,
    )
    x = torch.full((num_tokens, hidden), float(rank + 1), dtype=torch.bfloat16)
    weights, topk_idx = torch.rand(num_tokens, num_experts).topk(num_topk)
    per_rank, per_rdma_rank, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, num_experts)
    assert isinstance(per_rdma_rank, torch.Tensor) and per_rdma_rank.shape == (num_nodes,)
    in_node = in_rank.view(num_tokens, num_nodes, num_local_ranks).any(2)
    assert torch.equal(per_rdma_rank, in_node.sum(0, dtype=torch.int32))
    recv_x, recv_idx, recv_weights, counts, handle, event = buffer.dispatch(
        x, topk_idx=topk_idx, topk_weights=weights, num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=per_rdma_rank, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert,
        config=dispatch_config, async_finish=True,
    )
    event.current_stream_wait()
    everyones = [None] * num_ranks
    dist.all_gather_object(everyones, (in_rank[:, rank].sum().item(), in_rank, topk_idx))
    expected = [None] * num_ranks
    dist.all_gather_object(expected, in_rank.sum(0).tolist())
    assert recv_x[:, 0].float().tolist() == [
        float(source + 1) for source in range(num_ranks) for _ in range(expected[source][rank])
    ]
    first = rank * num_experts // num_ranks
    assert counts == [
        sum((choices == first + local).sum().item() for _, _, choices in everyones)
        for local in range(num_experts // num_ranks)
    ]
    combined, _, event = buffer.combine(recv_x, handle, config=combine_config, async_finish=True)
    event.current_stream_wait()
    assert torch.equal(combined.float(), x.float() * in_rank.sum(1, keepdim=True))

    rows, counts, handle, _, hook = buffer.low_latency_dispatch(
        x, topk_idx, num_tokens, num_experts, use_fp8=False, return_recv_hook=True
    )
    hook()
    assert counts.tolist() == [
        sum((choices == first + local).sum().item() for _, _, choices in everyones)
        for local in range(num_experts // num_ranks)
    ]
    combined, _, hook = buffer.low_latency_combine(
        rows, topk_idx, weights, handle, return_recv_hook=True
    )
    hook()
    torch.testing.assert_close(
        combined.float(), x.float() * weights.sum(1, keepdim=True), rtol=0.02, atol=0.02
    )
    print(f"rank {rank}: {num_nodes} nodes are right", flush=True)
    buffer.destroy()
    dist.barrier()
    dist.destroy_process_group()

main()
"""


def test_a_program_for_deep_ep_on_virtual_nodes(tmp_path: Path) -> None:
    script = tmp_path / "internode.py"
    script.write_text(PROGRAM)

    def run(**variables: str) -> subprocess.CompletedProcess[str]:
        program = ("-m", "anyep.run_as_deep_ep", script)
        return run_script(*program, num_ranks=4, env={"ANYEP_DEVICE": "cpu", **variables})

    finished = run(ANYEP_RANKS_PER_NODE="2")
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.count("2 nodes are right") == 4
    # Without the setting all ranks of a host are one node.
    assert "isinstance(per_rdma_rank, torch.Tensor)" in run().stderr


# Groups of NCCL


def test_ranks_of_an_nccl_group_that_share_a_gpu() -> None:
    def process(rank: int, gpu: str, host: str = "a") -> Process:
        return Process(rank, 100 + rank, 1, host, "pid:[1]", gpu)

    refuse_one_gpu_twice([process(0, "x"), process(1, "y"), process(2, "x", host="b"), process(3, "")])
    with pytest.raises(anyep.NotSupported, match=r"ranks 0, 1 and 3 have the same GPU, but NCCL.*'gloo'"):
        refuse_one_gpu_twice([process(rank, "y" if rank == 2 else "x") for rank in range(4)])


def test_errors_about_arguments_stay_what_they_are() -> None:
    rest = "is 'cuda:3', but the current device is 0: call torch.cuda.set_device(3) first"
    error = InvalidCall(f"device {rest}")
    assert settings.Chosen("cuda:3", "argument", "device").explain(error) is error
    explained = settings.Chosen("cuda:3", "ANYEP_DEVICE", "device").explain(error)
    assert type(explained) is InvalidCall
    assert str(explained) == f"ANYEP_DEVICE {rest}"
