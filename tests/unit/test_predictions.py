"""`anyep plan --machine`: predictions, when they are ranges, and what the command prints and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from anyep.errors import InvalidCall
from anyep.planning.machines import find_machine, shipped_machine
from anyep.planning.predictions import Question, counted_bytes, enough_sms, predict
from anyep.planning.times import Call, Load, expected_load, time_of
from tests.support.commands import anyep

H800 = ("plan", "--machine", "H800 CX7", "--dtype", "fp8")


def question(machine: str, **changes: object) -> Question:
    call = Call("normal", "dispatch", 4, 32, 4096, 7392, 8, 256)._replace(**changes)  # type: ignore[arg-type]
    found = find_machine(machine)
    return Question(found, found.libraries(call.mode)[0], call)


def test_a_number_where_figures_are_and_a_range_beyond() -> None:
    sure = predict(question("h100_sxm"))
    assert sure.us[0] == sure.us[1] == sure.times.total_us
    assert not sure.doubts
    far = predict(question("h100_sxm", num_nodes=9, num_ranks=72, num_experts=288))
    assert "no figure has more than 8 nodes" in far.doubts[0]
    assert far.us[0] == far.times.total_us
    # The network bounds it; at half of its rate it takes nearly twice as long.
    assert 1.8 * far.us[0] < far.us[1] < 2.05 * far.us[0]
    assert far.record()["predicted_us"] is None
    assert far.record()["range_us"] == [round(us, 1) for us in far.us]
    assert sure.record()["predicted_us"] == round(sure.us[0], 1)


def test_ranges_of_constants() -> None:
    """What no figure sets may be off by two, what another machine lends by a quarter, a NIC not at all."""
    assumed = find_machine("CX7").tables["pplx"]["normal"]["dispatch_nvlink_gbs"]
    assert (assumed.low, assumed.value, assumed.high) == (188.5, 377.0, 754.0)
    assert assumed.source.startswith("assumed: as h100.toml")
    lent = shipped_machine("h200.toml").tables["deepep-v1"]["normal"]
    assert lent["notify_us"].high == pytest.approx(1.25 * 31.1)
    assert lent["network_gbs"].low == lent["network_gbs"].high == 46.0
    best, worst = find_machine("CX7").limits("pplx", "normal")
    assert best["dispatch_nvlink_gbs"] > worst["dispatch_nvlink_gbs"]
    assert best["dispatch_start_us"] < worst["dispatch_start_us"]
    doubtful = predict(question("CX7", num_nodes=1, num_ranks=8))
    assert "cx7.toml were not measured there" in doubtful.doubts[0]
    assert doubtful.us[0] < doubtful.times.total_us < doubtful.us[1]


def test_rates() -> None:
    """Between nodes tokens count once per node; here they go to all experts."""
    call = Call("normal", "dispatch", 2, 16, 1000, 100, 16, 16)
    assert counted_bytes(call) == pytest.approx((200_000, 100_000))
    one_node = Call("normal", "dispatch", 1, 8, 1000, 100, 8, 8)
    assert counted_bytes(one_node) == pytest.approx((800_000, 700_000))
    low_latency = Call("ll", "dispatch", 4, 32, 1000, 100, 8, 256)
    assert counted_bytes(low_latency) == pytest.approx((800_000, 600_000))
    prediction = predict(question("h100_sxm"))
    logical, physical = counted_bytes(question("h100_sxm").call)
    assert prediction.logical_gbs == pytest.approx((logical / prediction.us[0] / 1e3,) * 2)
    assert prediction.physical_gbs == pytest.approx((physical / prediction.us[0] / 1e3,) * 2)


def test_enough_sms() -> None:
    asked = question("h100_sxm", num_nodes=2, num_ranks=16)
    enough = enough_sms(asked)

    def us(sms: int) -> float:
        return time_of(asked.call._replace(num_sms=sms), asked.constants).total_us

    assert us(enough) <= 1.05 * us(64) < us(enough - 2)


def test_overlap() -> None:
    """In normal mode the computation has fewer SMs; in low-latency mode it keeps them all."""
    normal = question("h100_sxm", num_sms=33)._replace(compute_us=99_000.0)
    overlap = predict(normal).overlap
    assert overlap is not None
    assert overlap.compute_us == pytest.approx(99_000 * 132 / 99)
    assert overlap.exposed_us[0] == pytest.approx(33_000)
    hooked = question("h100_sxm", mode="ll", num_tokens=128)._replace(compute_us=1.0)
    prediction = predict(hooked)
    assert prediction.overlap is not None
    assert prediction.overlap.compute_us == 1.0
    assert prediction.overlap.exposed_us[0] == pytest.approx(prediction.us[0] - 1.0)


def test_a_given_load_decides() -> None:
    asked = question("h100_sxm")
    load = expected_load(asked.call)
    assert predict(asked._replace(load=load)).us == predict(asked).us
    doubled = Load(load.near_rows, 2 * load.far_rows)
    assert predict(asked._replace(load=doubled)).times.network_us == pytest.approx(
        2 * predict(asked).times.network_us
    )


# The command


def test_scale(tmp_path: Path) -> None:
    picture = tmp_path / "scale.png"
    ranks = (8, 16, 32, 64, 128, 256, 512, 1024, 2048)
    finished = anyep(
        *H800,
        "--ranks",
        ",".join(map(str, ranks)),
        "--json",
        "--plot",
        str(picture),
        "--low-latency-tokens",
        "128",
    )
    assert (finished.returncode, finished.stderr) == (0, f"wrote {picture}\n")
    assert picture.read_bytes().startswith(b"\x89PNG")
    records = json.loads(finished.stdout)
    assert [record["ranks"] for record in records if record["what"] == "combine"] == sorted([*ranks, *ranks])
    assert {record["mode"] for record in records} == {"normal", "ll"}
    by_key = {(record["ranks"], record["mode"], record["what"]): record for record in records}
    assert by_key[8, "normal", "dispatch"]["bound"] == "NVLink"
    assert by_key[32, "normal", "dispatch"]["bound"] == "network"
    # Published: 59 GB/s of logical bytes at 4 nodes; low latency 173 us at 64 ranks.
    assert by_key[64, "ll", "dispatch"]["predicted_us"] == pytest.approx(173, rel=0.05)
    assert by_key[2048, "normal", "dispatch"]["experts"] == 2048
    assert by_key[2048, "normal", "dispatch"]["predicted_us"] is None
    for record in records:
        low, high = record["range_us"]
        assert (record["predicted_us"] is None) == (low < high) == bool(record["doubts"])


def test_a_table_for_people() -> None:
    finished = anyep(*H800, "--ranks", "8,128", "--compute-us", "500")
    assert finished.returncode == 0
    assert "normal mode, 4096 tokens per rank, deepep-v1" in finished.stdout
    assert "A range: no figure has more than 8 nodes" in finished.stdout
    assert "waits for the number of rows takes 20 to 100 us" in finished.stdout
    assert "exposed: by how much 500 us" in finished.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("plan", "--plot", "x.png"), "--plot is about predicted times: say on which machine with --machine"),
        (("plan", "--library", "uccl"), "--library is about predicted times"),
        ((*H800, "--map", "x.svg"), "--map has no effect with --machine"),
        ((*H800, "--plot", "x.txt"), "its name must end in .png, .svg, .pdf"),
        ((*H800, "--library", "uccl"), "no constants of 'uccl' for normal mode: choose one of deepep-v1"),
        ((*H800, "--topk-nodes", "0"), "--topk-nodes is 0: it must be at least 1"),
        ((*H800, "--compute-us", "-1"), "--compute-us is -1: it must be a time"),
        ((*H800, "--ranks", "12"), "--ranks-per-node"),
        (
            (*H800, "--ranks", "64", "--experts", "64", "--topk-nodes", "1", "--topk", "16"),
            "raise --topk-nodes",
        ),
        (("plan", "--machine", "H9"), "there is no machine 'H9' in anyep/machines: choose one of"),
        (("plan", "--machine", "none.toml"), "the machine 'none.toml' cannot be read (No such file"),
    ],
)
def test_what_is_refused(arguments: tuple[str, ...], said: str) -> None:
    finished = anyep(*arguments)
    assert (finished.returncode, finished.stdout) == (2, "")
    assert said in finished.stderr
    assert finished.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = [", "is no machine"),
        ("a = 1", "is no machine"),
        ('names = ["mine"]\n[anyep.normal]\nnetwork_gbs = { value = 3 }', "is no machine ('source')"),
        (
            'names = ["mine"]\n[anyep.normal]\nnetwork_gbs = { value = 3, low = 4, source = "measured" }',
            "network_gbs is 3, between 4 and 3",
        ),
        ('names = ["mine"]\n[anyep.normal]\nbased_on = "mine.toml"', "there is no file 'mine.toml'"),
    ],
)
def test_files_that_are_no_machines(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(InvalidCall) as refused:
        find_machine(str(file))
    assert said in str(refused.value)


def test_a_machine_of_a_user(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    constants = "".join(
        f"\n{what}_{name} = {{ value = {value}, source = 'measured here' }}"
        for what in ("dispatch", "combine")
        for name, value in (("gbs_per_sm", 5), ("nvlink_gbs", 100), ("start_us", 50))
    )
    file.write_text(f'names = ["mine"]\n[anyep.normal]{constants}\n')
    finished = anyep("plan", "--machine", str(file), "--json")
    records = json.loads(finished.stdout)
    assert [record["library"] for record in records] == ["anyep", "anyep"]
    assert records[0]["host_sync_us"] is None
    # Two nodes need constants that the file does not have.
    finished = anyep("plan", "--machine", str(file), "--ranks", "16")
    assert finished.returncode == 2
    assert "no constant 'dispatch_relay_gbs_per_sm': add it" in finished.stderr
