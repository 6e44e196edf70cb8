"""How commands share a GPU between ranks, as far as that can be seen without one.

NVIDIA's programs are stood in for by small scripts on the path.
"""

from __future__ import annotations

import importlib.metadata as metadata
import json
import os
from pathlib import Path

import pytest
import torch

from anyep.backends.cuda.mps import MultiProcessService
from anyep.cli.gpus import ON_THE_CPU, Placement, placed
from anyep.cli.ranks import Rank, run_ranks
from anyep.errors import NotSupported
from tests.support.commands import anyep, wait_until
from tests.support.mps import folders
from tests.support.programs import Program
from tests.support.world import start_server

# They look for what services of other tests would leave, too.
pytestmark = pytest.mark.xdist_group("services")

SERVES = """#!/bin/sh
here="$CUDA_MPS_PIPE_DIRECTORY"
if [ "$1" = -f ]; then
    touch "$here/control"
    while [ -e "$here/control" ]; do sleep 0.05; done
    exit 0
fi
read question
[ -e "$here/control" ] || exit 1
[ "$question" = quit ] && rm "$here/control"
exit 0
"""
FAILS = """#!/bin/sh
[ "$1" = -f ] && echo "no permission" > "$CUDA_MPS_LOG_DIRECTORY/control.log"
exit 1
"""
DOES_NOT_QUIT = SERVES.replace('rm "$here/control"', "exit 0")
LISTS_A_GPU = "#!/bin/sh\necho '0, NVIDIA Stand-in, 1024 MiB, 1.2.3'\n"


def put_on_path(folder: Path, name: str, script: str) -> str:
    program = folder / name
    program.write_text(script)
    program.chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """A program, whose text is the parameter; and nothing in the environment leads to another service."""
    script = getattr(request, "param", SERVES)
    monkeypatch.setenv("PATH", put_on_path(tmp_path, "nvidia-cuda-mps-control", script))
    for name in ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"):
        monkeypatch.setenv(name, str(tmp_path / "elsewhere"))
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)


def users_of(folder: str) -> list[str]:
    """The processes whose environment leads to this folder, other than this one."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if folder.encode() in path.read_bytes():
                found.append(path.parent.name)
        except OSError:
            continue
    return found


@pytest.mark.usefixtures("service")
def test_the_service_runs_and_ends() -> None:
    before = folders()
    assert not MultiProcessService.is_running()
    with MultiProcessService() as environment:
        folder = environment["CUDA_MPS_PIPE_DIRECTORY"]
        assert folders() - before == {Path(folder)}
        assert Path(folder, "control").exists()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("CUDA_MPS_PIPE_DIRECTORY", folder)
            assert MultiProcessService.is_running()
    assert folders() == before
    assert not users_of(folder)


@pytest.mark.parametrize("service", [SERVES, DOES_NOT_QUIT], indirect=True, ids=["quits", "does not quit"])
@pytest.mark.usefixtures("service")
def test_the_service_ends_with_a_killed_command() -> None:
    code = (
        "import time\n"
        "from anyep.backends.cuda.mps import MultiProcessService\n"
        "with MultiProcessService() as environment:\n"
        "    print(environment['CUDA_MPS_PIPE_DIRECTORY'], flush=True)\n"
        "    time.sleep(100)\n"
    )
    with Program("-c", code) as parent:
        assert parent.stdout is not None
        folder = parent.stdout.readline().decode().strip()
        assert Path(folder, "control").exists()
        parent.kill()
    wait_until(lambda: not Path(folder).exists() and not users_of(folder))


@pytest.mark.parametrize("service", [FAILS], indirect=True, ids=["fails"])
@pytest.mark.usefixtures("service")
def test_a_service_that_does_not_start() -> None:
    before = folders()
    with (
        pytest.raises(NotSupported, match="nvidia-cuda-mps-control did not start: no permission"),
        MultiProcessService(),
    ):
        pass
    assert folders() == before


def test_without_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert not MultiProcessService.is_running()
    with pytest.raises(NotSupported, match="not on the path"), MultiProcessService():
        pass


# Where ranks run


def test_on_the_cpu_nothing_is_started() -> None:
    before = folders()
    with placed("cpu", 8) as placement:
        assert placement == ON_THE_CPU
        assert folders() == before


@pytest.mark.usefixtures("service")
def test_a_rank_per_gpu_needs_no_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    before = folders()
    with placed("cuda", 4) as placement:
        assert placement == Placement(4)
        assert folders() == before


@pytest.mark.usefixtures("service")
def test_more_ranks_than_gpus_get_the_service(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with placed("cuda", 3) as placement:
        folder = placement.environment["CUDA_MPS_PIPE_DIRECTORY"]
        assert placement.num_gpus == 2
        assert Path(folder, "control").exists()
        # One that runs already is used as it is.
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("CUDA_MPS_PIPE_DIRECTORY", folder)
            with placed("cuda", 3) as second:
                assert second == Placement(2, {"CUDA_DEVICE_MAX_CONNECTIONS": "32"})
    assert not Path(folder).exists()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("service", [FAILS], indirect=True, ids=["fails"])
@pytest.mark.usefixtures("service")
def test_a_missing_service_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with placed("cuda", 3) as placement:
        assert placement == Placement(1)
    warning = capsys.readouterr().err
    assert warning.startswith("anyep: 3 ranks share one GPU without NVIDIA's multi-process service")
    assert "no permission" in warning
    assert "a few milliseconds for each of them instead of microseconds" in warning


@pytest.mark.usefixtures("service")
def test_a_number_of_connections_that_is_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for num_ranks, connections in ((2, "32"), (3, "21"), (8, "8"), (16, "4"), (17, None)):
        with placed("cuda", num_ranks) as placement:
            assert placement.environment.get("CUDA_DEVICE_MAX_CONNECTIONS") == connections
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with placed("cuda", 2) as placement:
        assert "CUDA_MPS_PIPE_DIRECTORY" in placement.environment
        assert "CUDA_DEVICE_MAX_CONNECTIONS" not in placement.environment


PRINTS_CONNECTIONS = "import os; print(os.environ.get('CUDA_DEVICE_MAX_CONNECTIONS'))"


@pytest.mark.parametrize(
    ("is_running", "value", "seen"), [(False, "", ""), (True, "", "32"), (True, "1", "1")]
)
def test_run_sets_the_connections_under_the_service(
    tmp_path: Path, is_running: bool, value: str, seen: str
) -> None:
    path = put_on_path(tmp_path, "nvidia-cuda-mps-control", SERVES)
    script = tmp_path / "program.py"
    script.write_text(PRINTS_CONNECTIONS)
    if is_running:
        (tmp_path / "control").touch()
    environment = {
        "PATH": path,
        "CUDA_MPS_PIPE_DIRECTORY": str(tmp_path),
        "CUDA_DEVICE_MAX_CONNECTIONS": value,
    }
    finished = anyep("run", "-n", "2", "--no-prefix", str(script), env=environment)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout == f"{seen}\n" * 2


def variable_of(rank: Rank, name: str) -> tuple[int, str | None]:
    """What a rank runs in the next test."""
    return rank.rank, os.environ.get(name)


def test_the_environment_reaches_the_ranks() -> None:
    """Also where the server that they are forked from has run for longer."""
    start_server()
    for value in ("first", "second"):
        found = run_ranks(2, variable_of, "HERE", placement=Placement(0, {"HERE": value}))
        assert found == [(0, value), (1, value)]


# Without a GPU

NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.parametrize("command", [("demo",), ("demo", "--mode", "low-latency"), ("bench",)])
def test_commands_say_that_there_is_no_gpu(command: tuple[str, ...]) -> None:
    finished = anyep(*command, "--device", "cuda", env=NO_GPU)
    assert (finished.returncode, finished.stdout) == (1, "")
    assert finished.stderr.startswith("anyep: there is no GPU to use: ")
    assert "leave --device out to run on the CPU" in finished.stderr
    assert finished.stderr.count("\n") == 1


def findings_of(**environment: str) -> dict[str, dict[str, str]]:
    finished = anyep("doctor", "--json", env=environment)
    assert finished.returncode == 0, finished.stderr
    return {finding["name"]: finding for finding in json.loads(finished.stdout)}


def test_doctor_without_a_gpu() -> None:
    findings = findings_of(PATH="", **NO_GPU)
    assert findings["gpu"]["detail"] == "none found"
    assert "everything works on the CPU" in findings["gpu"]["next_step"]
    assert findings["mps"]["detail"] == "there is no GPU that ranks could share"
    assert "AnyEP can run on this machine" in anyep("doctor", env={"PATH": "", **NO_GPU}).stdout


def test_doctor_on_a_gpu_without_the_service(tmp_path: Path) -> None:
    put_on_path(tmp_path, "nvidia-smi", LISTS_A_GPU)
    findings = findings_of(PATH=str(tmp_path))
    assert findings["gpu"] == {
        "name": "gpu",
        "state": "ok",
        "detail": "0, NVIDIA Stand-in, 1024 MiB, 1.2.3",
        "next_step": "",
    }
    assert findings["mps"]["state"] == "note"
    assert "not on the path" in findings["mps"]["detail"]
    assert "a few milliseconds for each of them" in findings["mps"]["detail"]


def test_doctor_on_a_gpu_with_the_service(tmp_path: Path) -> None:
    put_on_path(tmp_path, "nvidia-smi", LISTS_A_GPU)
    path = put_on_path(tmp_path, "nvidia-cuda-mps-control", SERVES)
    environment = {"PATH": path, "CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)}
    idle = findings_of(**environment)["mps"]
    assert idle["state"] == "note"
    assert f"not running, though CUDA_MPS_PIPE_DIRECTORY is {tmp_path}" in idle["detail"]
    for words in ("anyep demo --device cuda", "nvidia-cuda-mps-control -d", "echo quit"):
        assert words in idle["next_step"]
    (tmp_path / "control").touch()
    running = findings_of(**environment)["mps"]
    assert running["state"] == "ok"
    assert f"runs in {tmp_path} (CUDA_MPS_PIPE_DIRECTORY)" in running["detail"]


def test_doctor_tells_about_connections(tmp_path: Path) -> None:
    assert "connections" not in findings_of(PATH="", **NO_GPU)
    put_on_path(tmp_path, "nvidia-smi", LISTS_A_GPU)
    for value, found in (("", "is not set: under"), ("1", "is 1: under"), ("many", "is many: under")):
        finding = findings_of(PATH=str(tmp_path), CUDA_DEVICE_MAX_CONNECTIONS=value)["connections"]
        assert finding["state"] == "note"
        assert finding["detail"].startswith(f"CUDA_DEVICE_MAX_CONNECTIONS {found}")
        assert "export CUDA_DEVICE_MAX_CONNECTIONS=8" in finding["next_step"]
    finding = findings_of(PATH=str(tmp_path), CUDA_DEVICE_MAX_CONNECTIONS="8")["connections"]
    assert finding["state"] == "ok"
    assert finding["detail"] == "CUDA_DEVICE_MAX_CONNECTIONS is 8"
    assert finding["next_step"] == ""


def test_doctor_on_a_gpu_without_a_c_compiler(tmp_path: Path) -> None:
    """It is not needed."""
    put_on_path(tmp_path, "nvidia-smi", LISTS_A_GPU)
    triton = findings_of(PATH=str(tmp_path), CC="")["triton"]
    assert triton["state"] == "ok"
    assert triton["detail"].endswith("the driver loads them, and no C compiler is needed")


def test_doctor_without_triton(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    version = metadata.version

    def version_of(name: str) -> str:
        if name == "triton":
            raise metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(metadata, "version", version_of)
    triton = findings_of(PATH="", **NO_GPU)["triton"]
    assert (triton["state"], triton["next_step"]) == ("note", "pip install triton")
    put_on_path(tmp_path, "nvidia-smi", LISTS_A_GPU)
    triton = findings_of(PATH=str(tmp_path), **NO_GPU)["triton"]
    assert (triton["state"], triton["next_step"]) == ("missing", "pip install triton")
