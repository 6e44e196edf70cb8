"""`anyep run` and its launcher, with real processes: what ranks are given, and that nothing outlives it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyep.errors import InvalidCall
from anyep.launch import launch
from anyep.launch.output import MAX_LINE_BYTES, LinePrefixer
from anyep.launch.programs import START_RANK, reserved_port
from tests.support.commands import anyep, children_of, is_gone, wait_until
from tests.support.patience import scaled
from tests.support.programs import ROOT, Program
from tests.support.scripts import run_script


def run(*arguments: str, cwd: Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return anyep("run", *arguments, cwd=cwd, env={"OMP_NUM_THREADS": None, **(env or {})})


def running(*arguments: str, cwd: Path) -> Program:
    return Program("-m", "anyep", "run", *arguments, cwd=cwd, env={"PYTHONPATH": str(ROOT)})


# Far longer than ranks take to end on request: a launcher that waits this long fails the test.
LONG_GRACE_S = 60.0
WITH_LONG_GRACE = f"""
import anyep.launch.programs
anyep.launch.programs.GRACE_S = {LONG_GRACE_S}
from anyep.cli.main import main
main()
"""


def running_with_long_grace(*arguments: str, cwd: Path) -> Program:
    return Program("-c", WITH_LONG_GRACE, "run", *arguments, cwd=cwd, env={"PYTHONPATH": str(ROOT)})


def script(folder: Path, text: str) -> str:
    (folder / "script.py").write_text(
        "import os, subprocess, sys, time\nrank = int(os.environ['RANK'])\n" + text
    )
    return "script.py"


# A rank with a child, both of which would run for a long time; the file says that both are there.
SLEEPERS = """
from pathlib import Path
child = subprocess.Popen(["sleep", "300"])
Path(f"{rank}.new").write_text(f"{os.getpid()} {child.pid}")
os.rename(f"{rank}.new", f"{rank}.pids")
"""


def pids_of_sleepers(folder: Path, num_ranks: int) -> list[int]:
    """The processes of all ranks and of their children, once all are there."""
    files = [folder / f"{rank}.pids" for rank in range(num_ranks)]
    wait_until(lambda: all(file.exists() for file in files))
    return [int(pid) for file in files for pid in file.read_text().split()]


def open_descriptors() -> set[str]:
    # Without the one that reads the folder.
    return {path.name for path in Path("/proc/self/fd").iterdir() if path.exists()}


def all_gone(pids: list[int]) -> None:
    wait_until(lambda: all(is_gone(pid) for pid in pids))


def test_environment(tmp_path: Path) -> None:
    program = script(tmp_path, "import json; print(json.dumps(dict(os.environ)))")
    finished = run("-n", "3", program, cwd=tmp_path, env={"COLOUR": "blue", "RANK": "9"})
    assert (finished.returncode, finished.stderr) == (0, "")
    ranks = [json.loads(line.partition("] ")[2]) for line in sorted(finished.stdout.splitlines())]
    assert [rank["RANK"] for rank in ranks] == ["0", "1", "2"]
    assert [rank["LOCAL_RANK"] for rank in ranks] == ["0", "1", "2"]
    cores = len(os.sched_getaffinity(0))
    for rank in ranks:
        assert rank["WORLD_SIZE"] == rank["LOCAL_WORLD_SIZE"] == "3"
        assert rank["MASTER_ADDR"] == "127.0.0.1"
        assert rank["MASTER_PORT"] == ranks[0]["MASTER_PORT"]
        assert 1024 <= int(rank["MASTER_PORT"]) < 65536
        assert rank["OMP_NUM_THREADS"] == str(max(1, cores // 3))
        assert rank["COLOUR"] == "blue"


def test_threads_that_were_asked_for(tmp_path: Path) -> None:
    program = script(tmp_path, "print(os.environ['OMP_NUM_THREADS'])")
    assert run("-n", "1", program, cwd=tmp_path, env={"OMP_NUM_THREADS": "5"}).stdout == "5\n"


def test_arguments_pass_through(tmp_path: Path) -> None:
    program = script(tmp_path, "print(sys.argv[1:])")
    arguments = ["-n", "9", "--help", "-m", "--", "two words", "--no-prefix", "", "*"]
    assert run("-n", "1", program, *arguments, cwd=tmp_path).stdout == f"{arguments}\n"
    assert run("-n", "1", "--", program, *arguments, cwd=tmp_path).stdout == f"{arguments}\n"
    assert run("-n1", "-m", "script", *arguments, cwd=tmp_path).stdout == f"{arguments}\n"


def test_each_rank_has_its_own_session(tmp_path: Path) -> None:
    program = script(tmp_path, "print(os.getpid() == os.getsid(0) == os.getpgid(0))")
    assert run("-n", "2", program, cwd=tmp_path).stdout.count("] True\n") == 2


@pytest.mark.slow  # examples meet by Gloo in the same environment
def test_gloo(tmp_path: Path) -> None:
    program = script(
        tmp_path,
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "total = torch.tensor([rank + 1])\n"
        "dist.all_reduce(total)\n"
        "print(total.item(), dist.get_world_size())\n"
        "dist.destroy_process_group()\n",
    )
    finished = run("-n", "2", program, cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr
    assert sorted(finished.stdout.splitlines()) == ["[rank 0] 3 2", "[rank 1] 3 2"]


@pytest.mark.parametrize(
    ("failure", "exit_code", "reason"),
    [
        ("sys.exit(7)", 7, "exit code 7"),
        ("os.kill(os.getpid(), 9)", 137, "killed by SIGKILL"),
        pytest.param("raise RuntimeError('no')", 1, "exit code 1", marks=pytest.mark.slow),
        pytest.param("os.kill(os.getpid(), 11)", 139, "killed by SIGSEGV", marks=pytest.mark.slow),
        pytest.param("sys.exit(137)", 137, "exit code 137", marks=pytest.mark.slow),
    ],
)
def test_one_failing_rank_ends_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: str, exit_code: int, reason: str
) -> None:
    monkeypatch.setattr("anyep.launch.programs.GRACE_S", LONG_GRACE_S)
    # Rank 0 has ended well before, rank 2 fails, the others would sleep.
    program = script(
        tmp_path,
        f"{SLEEPERS}\n"
        "while not all(os.path.exists(f'{other}.pids') for other in range(4)): time.sleep(0.01)\n"
        "if rank == 0: sys.exit(0)\n"
        f"if rank == 2:\n    Path('failed').touch(); {failure}\n"
        "time.sleep(300)\n",
    )
    finished = run("-n", "4", program, cwd=tmp_path)
    assert time.time() - (tmp_path / "failed").stat().st_mtime < scaled(5)
    assert finished.returncode == exit_code
    last_line = finished.stderr.splitlines()[-1]
    assert last_line == f"anyep: rank 2 failed first ({reason}); the ranks still running were ended"
    all_gone(pids_of_sleepers(tmp_path, 4))


def test_a_killed_rank_comes_before_those_that_complain(tmp_path: Path) -> None:
    program = script(
        tmp_path,
        f"{SLEEPERS}\nwhile not os.path.exists('go'): time.sleep(0.01)\n"
        "if rank == 1: os.kill(os.getpid(), 9)\n"
        "sys.exit(1)\n",
    )
    with running("-n", "3", program, cwd=tmp_path) as launcher:
        ranks = pids_of_sleepers(tmp_path, 3)[::2]
        # A launcher that sleeps finds all of them dead at once, and cannot know the order.
        launcher.send_signal(signal.SIGSTOP)
        (tmp_path / "go").touch()
        all_gone(ranks)
        launcher.send_signal(signal.SIGCONT)
        _, errors = launcher.communicate()
        launcher.wait()
        assert (launcher.returncode, errors) == (137, "anyep: rank 1 failed first (killed by SIGKILL)\n")


def test_a_single_rank_that_fails(tmp_path: Path) -> None:
    finished = run("-n", "1", script(tmp_path, "sys.exit(3)"), cwd=tmp_path)
    assert (finished.returncode, finished.stderr) == (3, "anyep: rank 0 failed (exit code 3)\n")


def test_ranks_that_ignore_sigterm_are_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anyep.launch.programs.GRACE_S", 0.5)
    program = script(
        tmp_path,
        "import signal\n"
        "signal.signal(signal.SIGTERM, lambda *_: print('not yet'))\n"
        f"{SLEEPERS}\n"
        "while not os.path.exists('1.pids'): time.sleep(0.01)\n"
        "if rank == 0:\n    Path('failed').touch(); os._exit(4)\n"
        "while True: time.sleep(1)\n",
    )
    finished = run("-n", "2", program, cwd=tmp_path)
    # From just before SIGTERM is sent: when its handler runs depends on how busy the machine is.
    assert time.time() - (tmp_path / "failed").stat().st_mtime >= 0.5
    assert finished.returncode == 4
    assert finished.stdout == "[rank 1] not yet\n"
    all_gone(pids_of_sleepers(tmp_path, 2))


def test_ranks_can_clean_up(tmp_path: Path) -> None:
    program = script(
        tmp_path,
        "import signal\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit('cleaned up'))\n"
        f"{SLEEPERS}\n"
        "while not os.path.exists('1.pids'): time.sleep(0.01)\n"
        "if rank == 0: sys.exit(4)\n"
        "while True: time.sleep(1)\n",
    )
    finished = run("-n", "2", program, cwd=tmp_path)
    assert finished.returncode == 4
    assert finished.stderr.splitlines()[0] == "[rank 1] cleaned up"


@pytest.mark.parametrize(
    ("number", "exit_code"),
    [("SIGINT", 130), ("SIGTERM", 143), pytest.param("SIGHUP", 129, marks=pytest.mark.slow)],
)
def test_a_signal_to_the_launcher_ends_everything(tmp_path: Path, number: str, exit_code: int) -> None:
    if signal.getsignal(signal.Signals[number]) == signal.SIG_IGN and number == "SIGHUP":
        pytest.skip("these tests run under nohup")
    program = script(tmp_path, f"{SLEEPERS}\ntime.sleep(300)")
    with running_with_long_grace("-n", "3", program, cwd=tmp_path) as launcher:
        pids = pids_of_sleepers(tmp_path, 3) + children_of(launcher.pid)
        start = time.monotonic()
        launcher.send_signal(signal.Signals[number])
        _, errors = launcher.communicate()
        assert time.monotonic() - start < scaled(5)
        assert launcher.wait() == exit_code
        assert errors == f"anyep: stopped by {number}; all ranks were ended\n"
        all_gone(pids)


def test_a_killed_launcher_takes_everything_with_it(tmp_path: Path) -> None:
    with running("-n", "3", script(tmp_path, f"{SLEEPERS}\ntime.sleep(300)"), cwd=tmp_path) as launcher:
        pids = pids_of_sleepers(tmp_path, 3)
        children = children_of(launcher.pid)
        assert len(children) == 4  # three ranks and the guard
        launcher.kill()
        all_gone(pids + children)


def test_ranks_die_with_the_launcher_without_its_guard(tmp_path: Path) -> None:
    with running("-n", "2", script(tmp_path, f"{SLEEPERS}\ntime.sleep(300)"), cwd=tmp_path) as launcher:
        pids = pids_of_sleepers(tmp_path, 2)
        ranks, sleeping_children = pids[::2], pids[1::2]
        (guard,) = set(children_of(launcher.pid)) - set(ranks)
        os.kill(guard, signal.SIGKILL)
        launcher.kill()
        all_gone(ranks)
    for pid in sleeping_children:
        os.kill(pid, signal.SIGKILL)


def test_a_rank_whose_launcher_died_first_does_not_start() -> None:
    not_our_pid = 1 if os.getpid() != 1 else 2
    finished = subprocess.run(
        [sys.executable, "-I", "-S", "-c", START_RANK, str(not_our_pid), "echo", "started"],
        capture_output=True,
        check=False,
    )
    assert (finished.returncode, finished.stdout) == (1, b"")


def test_children_of_ranks_that_ended_well_are_killed(tmp_path: Path) -> None:
    finished = run("-n", "2", script(tmp_path, SLEEPERS), cwd=tmp_path)
    assert finished.returncode == 0
    all_gone(pids_of_sleepers(tmp_path, 2))


def test_a_daemon_that_keeps_the_output_open_delays_nothing(tmp_path: Path) -> None:
    program = script(
        tmp_path,
        "daemon = subprocess.Popen(['sleep', '300'], start_new_session=True)\nprint(daemon.pid, end='')\n",
    )
    finished = run("-n", "2", program, cwd=tmp_path)
    assert finished.returncode == 0
    for line in finished.stdout.splitlines():
        os.kill(int(line.split()[-1]), signal.SIGKILL)


def test_lines_have_the_rank_in_front(tmp_path: Path) -> None:
    program = script(
        tmp_path,
        "print(f'first {rank}\\nsecond', end='\\n\\nthird')\nprint('oh dear', file=sys.stderr)\n",
    )
    finished = run("-n", "2", program, cwd=tmp_path)
    for rank in (0, 1):
        mine = [line for line in finished.stdout.splitlines() if line.startswith(f"[rank {rank}] ")]
        assert mine == [f"[rank {rank}] {text}" for text in (f"first {rank}", "second", "", "third")]
    assert sorted(finished.stderr.splitlines()) == ["[rank 0] oh dear", "[rank 1] oh dear"]
    assert len(finished.stdout.splitlines()) == 8
    alone = run("-n", "1", program, cwd=tmp_path)
    assert (alone.stdout, alone.stderr) == ("first 0\nsecond\n\nthird", "oh dear\n")
    plain = run("-n", "2", "--no-prefix", program, cwd=tmp_path)
    assert "[rank" not in plain.stdout + plain.stderr
    assert plain.stdout.count("second") == 2


def test_much_output_arrives_whole(tmp_path: Path) -> None:
    program = script(
        tmp_path,
        "for i in range(20000): print(f'line {i} of {rank}')\n"
        f"print('x' * {3 * MAX_LINE_BYTES})\nos._exit(0)\n",
    )
    finished = run("-n", "2", program, cwd=tmp_path)
    lines = finished.stdout.splitlines()
    for rank in (0, 1):
        mine = [line.removeprefix(f"[rank {rank}] ") for line in lines if line.startswith(f"[rank {rank}] ")]
        assert mine[:20000] == [f"line {i} of {rank}" for i in range(20000)]
        assert "".join(mine[20000:]) == "x" * (3 * MAX_LINE_BYTES)


# A rank that prints where it listens: the address (as the kernel writes it) and the port of each TCP socket.
LISTENERS = """
import torch.distributed as dist
from anyep import Buffer
from pathlib import Path
dist.init_process_group("gloo")
with Buffer(dist.group.WORLD, 1 << 22, device="cpu"):
    own = {file.readlink().name for file in Path("/proc/self/fd").iterdir() if file.is_symlink()}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                print("listens", rank, *fields[1].split(":"), os.environ["MASTER_PORT"])
    dist.barrier()
dist.destroy_process_group()
"""


def test_only_the_store_of_torch_listens_beyond_this_machine(tmp_path: Path) -> None:
    """docs/security.md says so."""
    finished = run_script(tmp_path / script(tmp_path, LISTENERS))
    assert finished.returncode == 0, finished.stderr
    found = [line.split()[1:] for line in finished.stdout.splitlines() if line.startswith("listens ")]
    loopback = f"{int.from_bytes(socket.inet_aton('127.0.0.1'), sys.byteorder):08X}"
    assert {rank for rank, address, *_ in found if address == loopback} == {"0", "1"}
    for rank, address, port, master_port in found:
        if address != loopback:
            assert (rank, int(port, 16)) == ("0", int(master_port)), found


@given(st.lists(st.sampled_from([b"", b"a", b"bc", b"\n", b"d\ne", b"\xff\n\n"])))
def test_the_prefix_does_not_depend_on_where_the_stream_is_cut(pieces: list[bytes]) -> None:
    prefixer = LinePrefixer("> ")
    printed = b"".join(prefixer.take(piece) for piece in pieces) + prefixer.rest()
    *lines, unfinished = b"".join(pieces).split(b"\n")
    assert printed == b"".join(b"> " + line + b"\n" for line in lines + ([unfinished] if unfinished else []))


def test_a_reader_that_goes_away_ends_the_ranks(tmp_path: Path) -> None:
    with running(
        "-n", "2", script(tmp_path, f"{SLEEPERS}\nwhile True: print('y')"), cwd=tmp_path
    ) as launcher:
        pids = pids_of_sleepers(tmp_path, 2)
        assert launcher.stdout is not None
        assert launcher.stdout.readline().endswith(b"] y\n")
        launcher.stdout.close()
        assert launcher.wait() == 141
        all_gone(pids)


def test_a_reader_that_does_not_read_cannot_stop_a_signal(tmp_path: Path) -> None:
    with running(
        "-n", "2", script(tmp_path, f"{SLEEPERS}\nwhile True: print('y')"), cwd=tmp_path
    ) as launcher:
        pids = pids_of_sleepers(tmp_path, 2)
        time.sleep(0.3)
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait() == 143
        all_gone(pids)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("-n", "0", "script.py"), "--ranks (-n) is 0: it must be at least 1"),
        (("-n", "-2", "script.py"), "--ranks (-n) is -2"),
        (("-n", "two", "script.py"), "-n"),
        (("script.py",), "-n"),
        (("-n", "2"), "there is no script to run"),
        (("-n", "2", "-m"), "there is no script to run"),
        (("-n", "2", "missing.py"), "there is no script 'missing.py'"),
        (("-n", "2", "--bogus", "script.py"), "--bogus"),
    ],
)
def test_wrong_arguments_get_one_sentence(tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    script(tmp_path, "print('started')")
    finished = run(*arguments, cwd=tmp_path)
    assert (finished.returncode, finished.stdout) == (2, "")
    assert words in finished.stderr
    assert finished.stderr.count("\n") == 1


def test_launch_is_a_function_too(capfd: pytest.CaptureFixture[str]) -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    descriptors, children = open_descriptors(), children_of(os.getpid())
    for exit_code in (0, 5):
        code = launch(
            2, ["sh", "-c", 'echo "$COLOUR"; exit $CODE'], {"COLOUR": "red", "CODE": str(exit_code)}
        )
        assert code == exit_code
    output = capfd.readouterr()
    assert output.out.count("red\n") >= 3
    assert output.err.startswith("anyep: rank ")
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == handlers
    assert open_descriptors() <= descriptors
    assert children_of(os.getpid()) == children


def test_launch_in_a_thread() -> None:
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(launch(2, ["true"])))
    thread.start()
    thread.join(20)
    assert codes == [0]


def test_launch_refuses_nonsense() -> None:
    with pytest.raises(InvalidCall, match="num_ranks is 0"):
        launch(0, ["true"])
    with pytest.raises(InvalidCall, match="the command is empty"):
        launch(1, [])
    with pytest.raises(InvalidCall, match="there is no program 'no-such-program'"):
        launch(1, ["no-such-program"])


def test_programs_start_with_the_default_for_broken_pipes(capfd: pytest.CaptureFixture[str]) -> None:
    assert launch(1, ["sh", "-c", "grep SigIgn /proc/self/status"]) == 0
    ignored = int(capfd.readouterr().out.split()[1], 16)
    assert not ignored & (1 << (signal.SIGPIPE - 1))


def test_areserved_port_is_for_rank_0_only() -> None:
    with reserved_port() as port:
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind(("127.0.0.1", port))
        # create_server sets SO_REUSEADDR, as torch.distributed does.
        with (
            socket.create_server(("127.0.0.1", port)) as server,
            socket.create_connection(("127.0.0.1", port), timeout=5),
        ):
            server.accept()[0].close()


def test_the_launcher_loads_no_torch() -> None:
    code = "import sys, anyep.launch, anyep.cli.run; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
