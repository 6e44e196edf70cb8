"""Where compiled kernels are kept, who may compile them, and that nothing compiles where it should not."""

from __future__ import annotations

import ast
import errno
import fcntl
import io
import json
import logging
import os
import shutil
import signal
import stat
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import anyep
from anyep import sizes
from anyep.backends import cache_folder
from anyep.backends.cache_folder import Folder, Unusable, open_folder
from anyep.backends.cpu import compilation, compile_cache
from anyep.backends.cpu.compile_cache import source_key
from anyep.backends.cpu.kernels import masks, notify, signals
from anyep.backends.cpu.kernels.compiler import KERNELS, Group, Kernel, kernel
from anyep.progress import CompileProgress
from tests.support.programs import run_program

PACKAGE = Path(anyep.__file__).parent
KEY = "0123456789abcdef" * 2


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of this test's own, which does not exist yet."""
    path = tmp_path / "cache" / "anyep"
    monkeypatch.setenv("ANYEP_CACHE_DIR", str(path))
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    return path


def twin(dispatcher: object) -> Kernel:
    """The same kernel once more, not compiled yet."""
    original = next(kernel for kernel in KERNELS if kernel.dispatcher is dispatcher)
    kernel(original.signature, original.group)(original.dispatcher.py_func)
    return KERNELS.pop()


def silent(_num_done: int, _num_kernels: int) -> None:
    pass


def num_compiled(kernels: list[Kernel]) -> int:
    """What a process that starts now has to compile of these."""
    number = compilation._Keeper().compile(kernels, silent)
    assert all(kernel.is_compiled for kernel in kernels)
    return number


def assert_works(made: Kernel) -> None:
    """The twin of raise_words."""
    words = np.array([5, 9], np.int64)
    assert made.dispatcher(words.ctypes.data, np.array([0, 8]), np.array([7, 8])) == 1
    assert words.tolist() == [7, 9]


# The folder


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"ANYEP_CACHE_DIR": "/a/b", "XDG_CACHE_HOME": "/x"}, "/a/b"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/anyep"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/home/me"}, "/home/me/.cache/anyep"),
        ({"ANYEP_CACHE_DIR": "", "HOME": "/home/me"}, "/home/me/.cache/anyep"),
    ],
)
def test_where_it_is(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: str) -> None:
    for name in ("ANYEP_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert str(cache_folder.base_folder()) == expected


def test_it_is_readable_by_its_user_alone(base: Path) -> None:
    old_mask = os.umask(0)
    try:
        folder = open_folder(KEY)
        folder.write("name", "identity", b"code")
    finally:
        os.umask(old_mask)
    for path in (base.parent, base, folder.path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700, path
    assert stat.S_IMODE((folder.path / "name").stat().st_mode) == 0o600
    assert folder.read("name", "identity") == b"code"


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o777])
@pytest.mark.parametrize("inner", [False, True])
def test_a_folder_that_others_can_write_is_refused(base: Path, mode: int, inner: bool) -> None:
    path = open_folder(KEY).path if inner else base
    path.mkdir(parents=True, exist_ok=True)
    path.chmod(mode)
    with pytest.raises(Unusable, match=f"other users can write {path} .*chmod go-w"):
        open_folder(KEY)


def test_a_folder_that_others_can_read_will_do(base: Path) -> None:
    base.mkdir(parents=True)
    base.chmod(0o755)
    assert open_folder(KEY).path == base / KEY


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
@pytest.mark.parametrize("inner", [False, True])
def test_a_folder_of_another_user_is_refused(base: Path, inner: bool) -> None:
    path = open_folder(KEY).path if inner else base
    path.mkdir(parents=True, exist_ok=True)
    os.chown(path, 12345, -1)
    with pytest.raises(Unusable, match=f"{path} belongs to user 12345, and this process runs as user 0"):
        open_folder(KEY)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_file_of_another_user_counts_as_missing(base: Path) -> None:
    folder = open_folder(KEY)
    folder.write("name", "identity", b"code")
    os.chown(folder.path / "name", 12345, -1)
    assert folder.read("name", "identity") is None


def test_files_that_others_can_write_and_links_count_as_missing(base: Path) -> None:
    folder = open_folder(KEY)
    folder.write("name", "identity", b"code")
    (folder.path / "link").symlink_to(folder.path / "name")
    assert folder.read("link", "identity") is None
    (folder.path / "name").chmod(0o620)
    assert folder.read("name", "identity") is None


def test_a_file_where_the_folder_should_be(base: Path) -> None:
    base.parent.mkdir()
    base.write_text("")
    with pytest.raises(Unusable, match=f"{base}.* cannot be used: Not a directory"):
        open_folder(KEY)


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:10],
        lambda content: content[:-1],
        lambda content: content[:-1] + bytes([content[-1] ^ 1]),
        lambda content: bytes([content[0] ^ 1]) + content[1:],
    ],
    ids=["empty", "checksum cut", "cut", "a bit of the code", "a bit of the checksum"],
)
def test_a_damaged_file_counts_as_missing(base: Path, damage: Callable[[bytes], bytes]) -> None:
    folder = open_folder(KEY)
    folder.write("name", "identity", b"some code")
    assert folder.read("name", "another identity") is None
    path = folder.path / "name"
    path.write_bytes(damage(path.read_bytes()))
    assert folder.read("name", "identity") is None


def test_the_newest_keys_and_those_in_use_stay(base: Path) -> None:
    used = open_folder("e" * 32)
    (base / "notes of the user").mkdir()
    for age in range(cache_folder.NUM_KEPT + 2):
        path = base / f"{age:032x}"
        path.mkdir()
        (path / "in-use").touch()
        os.utime(path, (time.time() - 1000 - age, time.time() - 1000 - age))
    os.utime(used.path, (0, 0))
    folder = open_folder(KEY)
    (folder.path / "name.abc.tmp").touch()
    os.utime(folder.path / "name.abc.tmp", (0, 0))
    folder.prune()
    left = {path.name for path in base.iterdir()}
    newest = {f"{age:032x}" for age in range(cache_folder.NUM_KEPT - 1)}
    assert left == {KEY, used.path.name, "notes of the user", *newest}
    assert [path.name for path in folder.path.iterdir()] == ["in-use"]


def test_where_there_are_no_locks_nobody_waits(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with open_folder(KEY).locked(lambda pid: pytest.fail("it waited")):
        pass


def test_a_lock_that_is_held_for_too_long_is_passed_over(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_folder, "GIVE_UP_S", 0.5)
    monkeypatch.setattr(cache_folder, "LONG_WAIT_S", 0.1)
    folder = open_folder(KEY)
    waited_for: list[int] = []
    with folder.locked(waited_for.append):
        # As if another job held it.
        (folder.path / "lock").write_text("4321 1")
        with Folder(folder.path).locked(waited_for.append):
            pass
        (folder.path / "lock").write_text(f"4322 {os.getppid()}")
        with Folder(folder.path).locked(waited_for.append):
            pass
    assert waited_for == [4321]


# The key


def test_the_key_knows_every_module_that_kernels_use() -> None:
    hashed = {path.relative_to(PACKAGE).with_suffix("").as_posix() for path in compile_cache.source_files()}
    assert "backends/cpu/kernels/rings" in hashed
    assert {module for entry in KERNELS if (module := entry.module).startswith("anyep.")} <= {
        f"anyep.{name.replace('/', '.')}" for name in hashed
    }
    # The environment, which size hints look at, is no part of any kernel.
    known = hashed | {"settings"}
    for name in hashed:
        for node in ast.walk(ast.parse((PACKAGE / f"{name}.py").read_text())):
            imported: list[str] = []
            if isinstance(node, ast.Import):
                imported = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module in ("anyep", "anyep.core"):
                imported = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert not node.level
                imported = [node.module or ""]
            for module in imported:
                if module.split(".")[0] == "anyep":
                    path = module.removeprefix("anyep.").replace(".", "/")
                    assert path in known, f"{name} uses {module}, which is not part of the key: add it"


@pytest.mark.parametrize(
    "edited", ["sizes.py", "backends/cpu/kernels/rings.py", "backends/cpu/kernels/new.py"]
)
def test_the_key_changes_with_any_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, edited: str
) -> None:
    copy = tmp_path / "anyep"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    before = compile_cache._hash_sources()
    monkeypatch.setattr(compile_cache, "_PACKAGE", copy)
    assert compile_cache._hash_sources() == before
    os.utime(copy / "sizes.py", (0, 0))
    assert compile_cache._hash_sources() == before  # dates do not matter
    with (copy / edited).open("a") as file:
        file.write("\nANOTHER = 1\n")
    assert compile_cache._hash_sources() != before


def test_the_key_changes_with_constants_and_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    before = source_key()
    assert source_key() == before
    with monkeypatch.context() as changed:
        changed.setattr(sizes, "LOW_LATENCY_HEADER_BYTES", sizes.LOW_LATENCY_HEADER_BYTES + 16)
        assert source_key() != before
    with monkeypatch.context() as changed:
        changed.setattr("numba.__version__", "0.99")
        assert source_key() != before
    with monkeypatch.context() as changed:
        changed.setattr("llvmlite.__version__", "0.99")
        assert source_key() != before
    with monkeypatch.context() as changed:
        changed.setattr(sys, "version", "4.0")
        assert source_key() != before
    assert source_key() == before


# Kernels


def test_a_kernel_is_compiled_once_and_then_loaded(base: Path) -> None:
    first, second = twin(signals.raise_words), twin(signals.raise_words)
    assert num_compiled([first]) == 1
    assert num_compiled([second]) == 0
    for made in (first, second):
        assert_works(made)
        assert len(made.dispatcher.overloads) == 1


def test_nothing_compiles_in_a_call(base: Path) -> None:
    made = twin(signals.raise_words)
    with pytest.raises(TypeError):
        made.dispatcher(0, np.array([0]), np.array([7]))
    assert not made.is_compiled
    num_compiled([made])
    with pytest.raises(TypeError):
        made.dispatcher(0, np.array([0.5]), np.array([7]))
    assert len(made.dispatcher.overloads) == 1


@pytest.mark.parametrize("damage", ["garbage", "cut", "not a kernel"])
def test_a_damaged_kernel_is_compiled_anew(base: Path, damage: str) -> None:
    assert num_compiled([twin(signals.raise_words)]) == 1
    (path,) = base.glob("*/*.kernel")
    whole = path.read_bytes()
    if damage == "not a kernel":
        keeper = compilation._Keeper()
        assert keeper.folder is not None
        cached = compilation._CachedKernel(keeper, twin(signals.raise_words), keeper.folder)
        keeper.folder.write(path.name, cached._identity, b"\x80\x04N.")  # None, pickled
    else:
        path.write_bytes(b"garbage" if damage == "garbage" else whole[: len(whole) // 2])
    again = twin(signals.raise_words)
    assert num_compiled([again]) == 1
    assert_works(again)
    assert num_compiled([twin(signals.raise_words)]) == 0


def test_machines_with_other_cpus_have_files_of_their_own(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert num_compiled([twin(signals.raise_words)]) == 1
    with monkeypatch.context() as other_machine:
        codegen = type(signals.raise_words.targetctx.codegen())
        other_machine.setattr(codegen, "magic_tuple", lambda self: ("triple", "another cpu", "+feature"))
        assert num_compiled([twin(signals.raise_words)]) == 1
        assert num_compiled([twin(signals.raise_words)]) == 0
    assert num_compiled([twin(signals.raise_words)]) == 0
    assert len(list(base.glob("*/*.kernel"))) == 2


def unusable_folder(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base.mkdir(parents=True)
    base.chmod(0o777)


def no_folder(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYEP_CACHE_DIR", "/proc/self/fdinfo/anyep")


def full_disk(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> bytes:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", refuse)


def another_numba(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "_CompileResult", None)


@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        (unusable_folder, "other users can write"),
        (no_folder, "/proc/self/fdinfo/anyep cannot be used"),
        (full_disk, "cannot be written: No space left on device"),
        (another_numba, "does not know how to keep what Numba"),
    ],
)
def test_where_nothing_can_be_kept_that_is_said_once(
    base: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    trouble: Callable[[Path, pytest.MonkeyPatch], None],
    reason: str,
) -> None:
    trouble(base, monkeypatch)
    first, second = twin(signals.raise_words), twin(notify.signal)
    keeper = compilation._Keeper()
    with caplog.at_level(logging.WARNING, "anyep"):
        assert keeper.compile([first], silent) == 1
        assert keeper.compile([second], silent) == 1
    assert_works(first)
    assert second.is_compiled
    (record,) = caplog.records
    assert reason in record.getMessage()
    assert "Set ANYEP_CACHE_DIR to a folder" in record.getMessage()
    assert not list(base.glob("*/*.kernel"))
    assert not list(base.glob("*/*.tmp"))


def test_only_one_rank_of_a_machine_says_so(
    base: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    unusable_folder(base, monkeypatch)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert num_compiled([twin(signals.raise_words)]) == 1
    assert not caplog.records


def test_kernels_of_others_are_not_kept(base: Path) -> None:
    kernel("int64(int64)")(lambda number: number + 1)
    made = KERNELS.pop()
    assert num_compiled([made]) == 1
    assert made.dispatcher(4) == 5
    assert not list(base.glob("*/*.kernel"))


# Processes


def control_twins() -> list[Kernel]:
    return [
        twin(entry) for entry in (notify.signal, masks.adopt_masks, masks.post_requests, masks.read_requests)
    ]


class Child:
    """A process forked from this one that says how many kernels it compiled."""

    def __init__(self, work: Callable[[], int]) -> None:
        self._answer, answer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.write(answer, str(work()).encode())
            finally:
                os._exit(0)
        os.close(answer)

    def answer(self) -> int:
        text = os.read(self._answer, 100)
        os.waitpid(self.pid, 0)
        os.close(self._answer)
        return int(text)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self._answer)


def test_of_processes_that_start_at_once_one_compiles(base: Path) -> None:
    twins = control_twins()
    children = [Child(lambda: num_compiled(twins)) for _ in range(4)]
    assert sorted(child.answer() for child in children) == [0, 0, 0, len(twins)]


def test_when_the_process_that_compiles_is_killed_another_takes_over(base: Path) -> None:
    twins = control_twins()

    def stuck_after_two() -> int:
        def show(num_done: int, _num_kernels: int) -> None:
            if num_done == 2:
                signal.pause()

        return compilation._Keeper().compile(twins, show)

    first = Child(stuck_after_two)
    deadline = time.monotonic() + 60
    while len(list(base.glob("*/*.kernel"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    second = Child(lambda: num_compiled(twins))
    time.sleep(1)
    assert len(list(base.glob("*/*.kernel"))) == 2  # it waits
    first.kill()
    assert second.answer() == len(twins) - 2


def run(*program: str, **variables: str) -> str:
    finished = run_program(*program, env=variables)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def test_import_compiles_nothing_and_use_leaves_nothing_in_the_package(base: Path, tmp_path: Path) -> None:
    copy = tmp_path / "site" / "anyep"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    files = {path for path in copy.rglob("*") if path.is_file()}
    code = (
        "import anyep, anyep.api.buffer\n"
        "from anyep.backends.cpu import Group, compile_kernels\n"
        "from anyep.backends.cpu.kernels.compiler import KERNELS\n"
        "assert KERNELS and not any(kernel.is_compiled for kernel in KERNELS)\n"
        "compilation = compile_kernels(Group.CONTROL)\n"
        "assert {kernel.group for kernel in KERNELS if kernel.is_compiled} == {Group.CONTROL}\n"
        "assert compilation.num_compiled == compilation.num_kernels\n"
        "print(anyep.__file__, compilation.folder, compilation.num_compiled)\n"
    )
    code = "import sys; sys.dont_write_bytecode = False; sys.path.remove('')\n" + code
    where, folder, number = run("-c", code, PYTHONPATH=str(copy.parent)).split()
    assert Path(where).parent == copy
    assert Path(folder).parent == base
    assert len(list(base.glob("*/*.kernel"))) == int(number)
    new = {path for path in copy.rglob("*") if path.is_file()} - files
    assert new
    assert all(path.suffix == ".pyc" and path.parent.name == "__pycache__" for path in new)


def test_a_buffer_compiles_all_that_its_calls_use() -> None:
    code = (
        "import os, torch.distributed as dist, anyep\n"
        "from anyep.backends.cpu.kernels.compiler import KERNELS\n"
        "os.environ['GLOO_SOCKET_IFNAME'] = 'lo'\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "groups = lambda: ' '.join(sorted({kernel.group for kernel in KERNELS if kernel.is_compiled}))\n"
        "anyep.Buffer(dist.group.WORLD, 1 << 20, device='cpu').destroy()\n"
        "print(groups())\n"
        "anyep.Buffer(dist.group.WORLD, 0, 1 << 20, low_latency_mode=True, device='cpu').destroy()\n"
        "print(groups())\n"
        "compiled = [kernel for kernel in KERNELS if kernel.is_compiled]\n"
        "assert all(len(kernel.dispatcher.overloads) == 1 for kernel in compiled)\n"
    )
    assert run("-c", code).splitlines() == ["control normal", "control low_latency normal"]


# The command


def test_warmup() -> None:
    sources = PACKAGE.joinpath("backends", "cpu", "kernels").glob("*.py")
    number = sum(source.read_text().count("\n@kernel(") for source in sources if source.name != "compiler.py")
    record = json.loads(run("-m", "anyep", "warmup", "--json"))
    assert record["kernels"] == record["compiled"] + record["loaded"] == number
    assert record["seconds"] > 0
    assert len(list(Path(record["folder"]).glob("*.kernel"))) >= number


def test_warmup_fails_where_nothing_can_be_kept() -> None:
    finished = run_program("-m", "anyep", "warmup", env={"ANYEP_CACHE_DIR": "/proc/self/fdinfo/anyep"})
    assert finished.returncode == 1
    assert finished.stdout == ""
    assert "anyep: compiled kernels cannot be kept: /proc/self/fdinfo/anyep cannot" in finished.stderr
    assert "Set ANYEP_CACHE_DIR" in finished.stderr


# Progress


class Clock:
    """Time that passes when a test says so."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock()
    monkeypatch.setattr("anyep.progress.time.monotonic", clock)
    yield clock
    monkeypatch.undo()


def test_progress_in_a_file(clock: Clock) -> None:
    stream = io.StringIO()
    progress = CompileProgress(stream)
    for num_done in range(31):
        progress.show(num_done, 30)
        clock.now += 0.9
    progress.finish()
    numbers = [line.rpartition(" ")[2] for line in stream.getvalue().splitlines()]
    assert stream.getvalue().startswith("AnyEP: compiling 30 kernels, once per version: 2/30\n")
    assert numbers == ["2/30", "8/30", "20/30", "30/30"]


def test_progress_on_a_terminal(clock: Clock) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    progress = CompileProgress(stream)
    for num_done in range(4):
        progress.show(num_done, 3)
        clock.now += 0.6
    progress.finish()
    sentence = "\rAnyEP: compiling 3 kernels, once per version: "
    assert stream.getvalue() == f"{sentence}2/3{sentence}3/3\n"


def test_short_work_is_silent(clock: Clock) -> None:
    stream = io.StringIO()
    progress = CompileProgress(stream)
    for num_done in range(4):
        progress.show(num_done, 3)
        clock.now += 0.3
    progress.finish()
    assert stream.getvalue() == ""


def test_groups_are_known() -> None:
    """A kernel in a module of no group would be compiled for every Buffer; this is how they are today."""
    by_default = {entry.module.rpartition(".")[2] for entry in KERNELS if entry.group is Group.CONTROL}
    ours = {entry.module.rpartition(".")[2] for entry in KERNELS if entry.module.startswith("anyep.")}
    assert by_default & ours == {"notify", "masks", "rings"}
