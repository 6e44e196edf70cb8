"""Changes the sources on purpose, one change at a time, and checks that a test fails each time.

    python tools/mutate.py                                  # every change of tools/mutations.toml
    python tools/mutate.py --only 'cpu-ring-*' --jobs 1     # some of them
    python tools/mutate.py --operators anyep/sizes.py       # every constant and operator of a module

A change of the table names a file, a text in it, another text for it, and the tests that must catch it. First
these tests are run on the sources as they are, where they must pass. Then each change is made in a private
copy of the tree, never in the tree itself, and its tests are run there. A test that fails, a crash and a hang
catch it. The last lines name the changes that survived. Exits 1 if there are any (more than `--allow`), and 2
if a test fails without a change, or if the arguments or the table are wrong.

CPU kernels are compiled into a cache of the copy; those of modules that the change does not reach are taken
from the user's own cache.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import fnmatch
import functools
import json
import os
import re
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final, TypeVar

S = TypeVar("S")
T = TypeVar("T")
ROOT: Final = Path(__file__).resolve().parents[1]
TABLE: Final = Path(__file__).with_name("mutations.toml")
TRIES: Final = 3
"""Some changes are wrong only when ranks happen to meet in a certain order."""
LIMIT_S: Final = 30.0
"""A change whose tests take longer counts as caught: it made something hang."""
BASELINE_LIMIT_S: Final = 1200.0
MARK: Final = "MUTATE_RUN"
"""A variable in the environment of all processes of a run, by which they are found and ended."""
CAUGHT, SURVIVED, INVALID = "caught", "SURVIVED", "INVALID"
NOT_TESTED: Final = {3: "an internal error", 4: "a wrong name or option", 5: "no test was found"}
"""Exit codes of pytest that say nothing about a change, unless a test is named as failing."""
KERNELS: Final = "anyep/backends/cpu/kernels"
PYTEST: Final = (
    "-q",
    "-rfE",
    "--tb=line",
    "--hypothesis-seed=0",
    "-p",
    "no:cacheprovider",
)

NOT_SLOW: Final = ("-m", "not slow")

OPERATORS: Final[dict[type[ast.AST], type[ast.AST]]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
}


@dataclass(frozen=True)
class Mutation:
    """One change: `source` is the whole text of the file with it."""

    id: str
    file: str
    what: str
    tests: tuple[str, ...]
    source: str = field(repr=False)
    environment: dict[str, str] = field(default_factory=dict)
    limit_s: float = LIMIT_S
    slow: bool = False
    """Whether its tests are slow ones; else the slow ones among them are left out."""
    uses_kernels: bool = True
    """Whether its tests may call CPU kernels."""


@dataclass(frozen=True)
class Result:
    """How a change ended: `by` is the test that caught it, or what else did."""

    id: str
    file: str
    what: str
    outcome: str
    by: str
    seconds: float
    tries: int = 1


@dataclass(frozen=True)
class Run:
    """How a run of tests ended; `exit_code` is None where it took too long."""

    exit_code: int | None
    output: str
    seconds: float

    @property
    def failures(self) -> list[str]:
        """The tests that failed.

        >>> Run(1, "FAILED tests/unit/test_sizes.py::test_align - assert 1 == 2", 0.5).failures
        ['tests/unit/test_sizes.py::test_align']
        """
        return re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", self.output, re.MULTILINE)


# The table


def load_table(path: Path, root: Path) -> list[Mutation]:
    """The changes of a table, each made in the file as it is now."""
    try:
        entries = tomllib.loads(path.read_text()).get("mutation", [])
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"cannot read the table {path}: {error}") from error
    ids = [entry.get("id") for entry in entries]
    twice = sorted({name for name in ids if name and ids.count(name) > 1})
    if twice:
        raise ValueError(f"{path.name} has more than one {', '.join(twice)}")
    return [read_entry(entry, root, f"{path.name}: number {place}") for place, entry in enumerate(entries, 1)]


def read_entry(entry: Mapping[str, Any], root: Path, where: str) -> Mutation:
    """The change of one entry of a table."""
    missing = [name for name in ("id", "file", "what", "tests", "old", "new") if name not in entry]
    if missing:
        raise ValueError(f"{where} ({entry.get('id', 'without id')}) lacks {', '.join(missing)}")
    try:
        source = (root / entry["file"]).read_text()
        changed = changed_text(source, entry["old"], entry["new"], entry.get("occurrence", 0))
        # What cannot be compiled would be caught by any test.
        compile(changed, entry["file"], "exec", dont_inherit=True)
    except (OSError, ValueError, SyntaxError) as error:
        raise ValueError(f"{where} ({entry['id']}, {entry['file']}): {error}") from error
    return Mutation(
        entry["id"],
        entry["file"],
        entry["what"],
        tuple(entry["tests"]),
        changed,
        entry.get("environment", {}),
        entry.get("limit_s", LIMIT_S),
        entry.get("slow", False),
    )


def changed_text(text: str, old: str, new: str, occurrence: int = 0) -> str:
    """The text with `old` replaced; where it is there more than once, `occurrence` says which (from 1 on).

    >>> changed_text("a + b", "+", "-"), changed_text("a + b + c", "+", "-", occurrence=2)
    ('a - b', 'a + b - c')
    """
    count = text.count(old)
    if count == 0 or occurrence > count:
        raise ValueError(f"there is no {old!r} (number {max(1, occurrence)})")
    if count > 1 and not occurrence:
        raise ValueError(f"{old!r} is there {count} times: say which by `occurrence`")
    if old == new:
        raise ValueError(f"{old!r} is replaced by itself")
    before = text.split(old, max(1, occurrence))[: max(1, occurrence)]
    start = len(old.join(before))
    return text[:start] + new + text[start + len(old) :]


# Every constant and operator of a module


def operator_mutations(root: Path, file: str) -> list[Mutation]:
    """Every change of one constant or operator of a module; its tests are tests/unit/test_<name>.py."""
    tests = (f"tests/unit/test_{Path(file).stem}.py",)
    for needed in (file, *tests):
        if not (root / needed).is_file():
            raise ValueError(f"there is no {needed} in {root}")
    changes = changes_of(Path(root, file).read_text())
    return [
        # Hypothesis takes its time to find the smallest example.
        Mutation(f"{Path(file).stem}-{number}", file, what, tests, source, limit_s=300.0, uses_kernels=False)
        for number, (what, source) in enumerate(changes, 1)
    ]


def changes_of(source: str) -> Iterator[tuple[str, str]]:
    """Every (description, changed source).

    >>> [what for what, _ in changes_of("a = b + 1")]
    ['line 1: b + 1 -> b - 1', 'line 1: 1 -> 2']
    """
    tree = ast.parse(source)
    for index, node in enumerate(ast.walk(tree)):
        changed = copy.deepcopy(tree)
        twin = list(ast.walk(changed))[index]
        if isinstance(node, ast.Constant) and type(node.value) is int:
            assert isinstance(twin, ast.Constant)
            twin.value = node.value + 1
            yield f"line {node.lineno}: {node.value} -> {node.value + 1}", ast.unparse(changed)
        elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            assert isinstance(twin, ast.BinOp)
            twin.op = OPERATORS[type(node.op)]()  # type: ignore[assignment]
            yield f"line {node.lineno}: {ast.unparse(node)} -> {ast.unparse(twin)}", ast.unparse(changed)
        elif isinstance(node, ast.Compare) and type(node.ops[0]) in OPERATORS:
            assert isinstance(twin, ast.Compare)
            twin.ops[0] = OPERATORS[type(node.ops[0])]()  # type: ignore[call-overload]
            yield f"line {node.lineno}: {ast.unparse(node)} -> {ast.unparse(twin)}", ast.unparse(changed)


# A private copy of the tree

_SERVER: Final = """\
import gc, importlib, json, os, sys
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ImportError:
        pass
gc.freeze()
for line in sys.stdin:
    request = json.loads(line)
    pid = os.fork()
    if pid == 0:
        break
    print(json.dumps(pid), flush=True)
    print(json.dumps(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])), flush=True)
else:
    sys.exit()
os.setsid()
for number, path in enumerate(("/dev/null", request["output"], request["output"])):
    os.dup2(os.open(path, os.O_RDWR | os.O_APPEND), number)
os.chdir(request["folder"])
os.environ.clear()
os.environ.update(request["environment"])
sys.path.insert(0, request["folder"])
if request["code"]:
    sys.argv = ["-c", *request["arguments"]]
    exec(request["code"], {"__name__": "__main__"})
else:
    import pytest
    sys.exit(pytest.main(request["arguments"]))
"""
"""Python with what takes long to import. The processes of runs are forked from it. A line is a request; it is
answered by the number of the process, and by its exit code."""
PRELOADED: Final = ("torch", "torch.distributed", "numba", "hypothesis", "pytest")


class Tree:
    """A copy of the tree, in which tests run and files change."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.path = folder / "tree"
        self.compiled = folder / "compiled"
        self._output = folder / "output"
        self._triton = folder / "triton"
        self._num_changes = 0
        self._running: tuple[int, str] | None = None
        for name in files_of(root):
            to = self.path / name
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, to, follow_symlinks=False)
        preloaded = PRELOADED if (root / KERNELS).is_dir() else ("hypothesis", "pytest")
        # Without a buffer: what has been read cannot be waited for any more.
        self._server = subprocess.Popen(
            [sys.executable, "-c", _SERVER, *preloaded],
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )

    def stop(self) -> None:
        """End the run that is under way."""
        if self._running is not None:
            end_all(*self._running)

    def close(self) -> None:
        self._server.communicate()

    @contextlib.contextmanager
    def changed(self, file: str, source: str) -> Iterator[None]:
        """The tree with another content of a file."""
        path = self.path / file
        original, status = path.read_bytes(), path.stat()
        self._num_changes += 1
        try:
            path.write_text(source)
            # Python tells by its size and its second whether it has compiled a source before.
            later = status.st_mtime + 10 * self._num_changes
            os.utime(path, (later, later))
            yield
        finally:
            path.write_bytes(original)
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))

    def test(self, tests: Sequence[str], slow: bool, environment: dict[str, str], limit_s: float) -> Run:
        """Run pytest here."""
        return self._run("", [*PYTEST, *([] if slow else NOT_SLOW), *tests], environment, limit_s)

    def do(self, code: str, arguments: Sequence[str], environment: dict[str, str]) -> Run:
        """Run a piece of Python here."""
        return self._run(code, arguments, environment, BASELINE_LIMIT_S)

    def _run(self, code: str, arguments: Sequence[str], environment: dict[str, str], limit_s: float) -> Run:
        """Run something, and end whatever it has left behind."""
        token = secrets.token_hex(8)
        variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        variables |= {"PYTHONPATH": str(self.path), "TRITON_CACHE_DIR": str(self._triton), MARK: token}
        self._output.write_bytes(b"")
        request = {
            "code": code,
            "arguments": list(arguments),
            "folder": str(self.path),
            "output": str(self._output),
            "environment": variables | environment,
        }
        started = time.monotonic()
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(request).encode() + b"\n")
        self._running = int(self._server.stdout.readline()), token
        is_over, _, _ = select.select([self._server.stdout], [], [], limit_s)
        end_all(*self._running)
        self._running = None
        exit_code = int(self._server.stdout.readline())
        output = self._output.read_text(errors="replace")
        return Run(exit_code if is_over else None, output, time.monotonic() - started)


def files_of(root: Path) -> list[str]:
    """The files of a tree that git knows or does not ignore; all of them where there is no git."""
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False)
    if listed.returncode == 0:
        names = sorted(set(listed.stdout.split("\0")) - {""})
    else:
        names = sorted(
            str(path.relative_to(root)) for path in root.rglob("*") if "__pycache__" not in path.parts
        )
    return [name for name in names if (root / name).is_file()]


def end_all(leader: int, token: str) -> None:
    """End a process group, and what has left it: whatever has the token in its environment."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)
    wanted = f"{MARK}={token}".encode()
    for _ in range(3):
        left = [int(path.name) for path in Path("/proc").glob("[0-9]*") if wanted in variables_of(path)]
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not left:
            return
        time.sleep(0.05)


def variables_of(process: Path) -> list[bytes]:
    """The environment that a process began with; nothing of one that is gone or another user's."""
    try:
        return (process / "environ").read_bytes().split(b"\0")
    except OSError:
        return []


# Compiled CPU kernels

_FILL_CACHE: Final = """\
import sys
from pathlib import Path
from anyep.backends import cpu
from anyep.backends.cpu import compilation
from anyep.backends.cache_folder import Folder, open_folder
from anyep.backends.cpu.compile_cache import source_key
from anyep.backends.cpu.kernels.compiler import KERNELS
if len(sys.argv) > 1:
    theirs, ours = Folder(Path(sys.argv[1])), open_folder(source_key())
    for kernel in KERNELS:
        if kernel.name not in sys.argv[2:]:
            known = compilation._CachedKernel(None, kernel, theirs)
            new = compilation._CachedKernel(None, kernel, ours)
            content = theirs.read(known.file_name, known._identity)
            if content is not None:
                ours.write(new.file_name, new._identity, content)
print("folder", cpu.compile_kernels().folder)
"""
"""Compiles all kernels. What is in a folder that it is given, but for some kernels, it takes from there."""


def compiled_kernels(tree: Tree) -> str:
    """Compile the kernels of the sources as they are, where they are not yet; the folder that has them."""
    run = tree.do(_FILL_CACHE, [], {})
    found = re.search(r"^folder (/.*)$", run.output, re.MULTILINE)
    return found[1] if found and run.exit_code == 0 else ""


def kernels_reached(root: Path, file: str, source: str) -> set[str]:
    """The CPU kernels, such as "notify.signal", that a change of a file makes different: they use
    what is changed, or what uses it. Kernels know nothing of files that they do not import: these reach
    none."""
    modules = modules_of_kernels(root)
    name = module_of(file)
    if name not in modules:
        return set()
    before, after = modules[name], definitions_of(source)
    reached = {(name, one) for one in before.keys() | after.keys() if before.get(one) != after.get(one)}
    uses = {
        (module, one): {use if use[0] else (module, use[1]) for use in definition.uses}
        for module, definitions in {**modules, name: after}.items()
        for one, definition in definitions.items()
    }
    while more := {one for one, used in uses.items() if used & (reached | wholly(reached))} - reached:
        reached |= more
    package = module_of(KERNELS) + "."
    return {f"{module.removeprefix(package)}.{one}" for module, one in reached if module.startswith(package)}


def wholly(reached: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """The modules of these names: importing a module counts as using it."""
    return {(module, "") for module, _ in reached}


@dataclass(frozen=True)
class Definition:
    """A function or constant of a module: its text, and the (module, name) it uses; its own module is ""."""

    text: str
    uses: frozenset[tuple[str, str]]


def module_of(file: str) -> str:
    """
    >>> module_of("anyep/layout.py")
    'anyep.layout'
    """
    return file.removesuffix(".py").replace("/", ".")


def definitions_of(source: str) -> dict[str, Definition]:
    """What a module defines.

    >>> ("a", "b") in definitions_of("from a import b; c = b + 1")["c"].uses
    True
    """
    imported: dict[str, set[tuple[str, str]]] = {}
    found: dict[str, Definition] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                what = {(node.module, alias.name), (f"{node.module}.{alias.name}", "")}
                imported[alias.asname or alias.name] = what
            continue
        names = {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}
        uses = frozenset(use for name in names for use in imported.get(name, {("", name)}))
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = Definition(ast.unparse(node), uses)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                for child in ast.walk(target):
                    if isinstance(child, ast.Name):
                        found[child.id] = Definition(ast.unparse(node), uses)
    return found


@functools.cache
def modules_of_kernels(root: Path) -> dict[str, dict[str, Definition]]:
    """The modules of CPU kernels and those that they import, with what they define."""
    modules: dict[str, dict[str, Definition]] = {}
    to_read = {module_of(f"{KERNELS}/{path.stem}") for path in (root / KERNELS).glob("*.py")}
    while to_read:
        name = to_read.pop()
        path = root / f"{name.replace('.', '/')}.py"
        if path.is_file():
            modules[name] = definitions_of(path.read_text())
            used = {module for definition in modules[name].values() for module, _ in definition.uses}
            to_read |= {module for module in used if module.startswith("anyep.")} - modules.keys()
    return modules


# Trying


class Trial:
    """Tries changes in copies of a tree, as many at a time as there are copies."""

    def __init__(self, root: Path, folder: Path, jobs: int) -> None:
        self._root = root
        self._jobs = jobs
        self._all_trees = [Tree(root, folder / str(number)) for number in range(jobs)]
        self._trees: SimpleQueue[Tree] = SimpleQueue()
        for tree in self._all_trees:
            self._trees.put(tree)
        self._compiled = ""
        if (root / KERNELS).is_dir():
            with self._tree() as tree:
                self._compiled = compiled_kernels(tree)

    def close(self) -> None:
        for tree in self._all_trees:
            tree.close()

    @contextlib.contextmanager
    def _tree(self) -> Iterator[Tree]:
        tree = self._trees.get()
        try:
            yield tree
        finally:
            self._trees.put(tree)

    def failing_tests(self, mutations: Sequence[Mutation]) -> dict[str, str]:
        """The tests that do not pass on the sources as they are, and what they print."""
        batches: dict[tuple[bool, tuple[tuple[str, str], ...], int], set[str]] = {}
        files = sorted({test.partition("::")[0] for mutation in mutations for test in mutation.tests})
        for mutation in mutations:
            for test in mutation.tests:
                variables = tuple(sorted(mutation.environment.items()))
                share = files.index(test.partition("::")[0]) % self._jobs
                batches.setdefault((mutation.slow, variables, share), set()).add(test)

        def run(key: tuple[bool, tuple[tuple[str, str], ...], int]) -> dict[str, str]:
            slow, variables, _ = key
            tests = sorted(batches[key])
            with self._tree() as tree:
                done = tree.test(tests, slow, dict(variables), BASELINE_LIMIT_S)
            failed = [test for test in tests if any(belongs_to(name, test) for name in done.failures)]
            # Errors of collection, and crashes, have no names.
            return dict.fromkeys(failed or tests, done.output) if done.exit_code != 0 else {}

        return {name: output for failed in self._each(run, list(batches)) for name, output in failed.items()}

    def try_all(self, mutations: Sequence[Mutation], show: Callable[[Result], None]) -> list[Result]:
        def attempt(mutation: Mutation) -> Result:
            results = [self._try(mutation)]
            while results[-1].outcome == SURVIVED and len(results) < TRIES:
                results.append(self._try(mutation))
            seconds = round(sum(result.seconds for result in results), 1)
            result = replace(results[-1], seconds=seconds, tries=len(results))
            show(result)
            return result

        return self._each(attempt, mutations)

    def _each(self, work: Callable[[S], T], things: Sequence[S]) -> list[T]:
        """Do something with each thing, as many at a time as there are trees; Ctrl-C ends it at once."""
        pool = ThreadPoolExecutor(self._jobs)
        try:
            return list(pool.map(work, things))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for tree in self._all_trees:
                tree.stop()
            raise
        finally:
            pool.shutdown()

    def _try(self, mutation: Mutation) -> Result:
        with self._tree() as tree, tree.changed(mutation.file, mutation.source):
            variables = dict(mutation.environment)
            started = time.monotonic()
            is_compiled = module_of(mutation.file) in modules_of_kernels(self._root)
            if self._compiled and is_compiled and mutation.uses_kernels:
                variables["ANYEP_CACHE_DIR"] = str(tree.compiled)
                reached = kernels_reached(self._root, mutation.file, mutation.source)
                tree.do(_FILL_CACHE, [self._compiled, *sorted(reached)], variables)
            limit_s = mutation.limit_s * crowding()
            run = tree.test(["-x", *mutation.tests], mutation.slow, variables, limit_s)
            shutil.rmtree(tree.compiled, ignore_errors=True)
        outcome, by = judge(run)
        seconds = round(time.monotonic() - started, 1)
        return Result(mutation.id, mutation.file, mutation.what, outcome, by, seconds)


def belongs_to(name: str, test: str) -> bool:
    """Whether a test that ran is one that a name of the table stands for.

    >>> belongs_to("tests/test_a.py::test_b[1]", "tests/test_a.py::test_b"), belongs_to("a.py::b", "a.py")
    (True, True)
    """
    return name == test or name.startswith((f"{test}[", f"{test}::"))


def crowding() -> float:
    """How much longer things take than on an idle machine, roughly."""
    return max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))


def judge(run: Run) -> tuple[str, str]:
    """Whether a run of tests has caught a change, and by what.

    >>> judge(Run(0, "", 1.0)), judge(Run(None, "", 1.0)), judge(Run(-11, "", 1.0))
    (('SURVIVED', ''), ('caught', 'a hang'), ('caught', 'a crash (SIGSEGV)'))
    >>> judge(Run(2, "", 1.0)), judge(Run(5, "", 1.0))
    (('caught', 'pytest ended with 2'), ('INVALID', 'pytest ended with 5: no test was found'))
    """
    if run.exit_code == 0:
        return SURVIVED, ""
    if run.exit_code is None:
        return CAUGHT, "a hang"
    if run.failures:
        # Where tests are named, an error while they are collected is 4, too.
        return CAUGHT, run.failures[0]
    if run.exit_code in NOT_TESTED:
        return INVALID, f"pytest ended with {run.exit_code}: {NOT_TESTED[run.exit_code]}"
    if run.exit_code < 0:
        return CAUGHT, f"a crash ({signal.Signals(-run.exit_code).name})"
    return CAUGHT, f"pytest ended with {run.exit_code}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Checks that tests catch changes of the sources.")
    parser.add_argument(
        "--only", action="append", default=[], metavar="ID", help="may have wildcards; again for more"
    )
    parser.add_argument(
        "--jobs", type=int, default=len(os.sched_getaffinity(0)), metavar="N", help="changes tried at a time"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to a file, too")
    parser.add_argument("--list", action="store_true", help="show the changes, and try none")
    parser.add_argument(
        "--operators", nargs="+", metavar="FILE", help="every constant and operator of these modules"
    )
    parser.add_argument(
        "--allow", type=int, default=0, metavar="N", help="exit 0 if at most so many changes survive"
    )
    parser.add_argument("--table", type=Path, default=TABLE, help="another table")
    parser.add_argument("--root", type=Path, default=ROOT, help="another tree")
    options = parser.parse_args(arguments)
    if options.jobs < 1:
        parser.error(f"--jobs must be at least 1, not {options.jobs}")
    if options.allow < 0:
        parser.error(f"--allow must not be negative, not {options.allow}")
    try:
        if options.operators:
            mutations = [
                each for file in options.operators for each in operator_mutations(options.root, file)
            ]
        else:
            mutations = load_table(options.table, options.root)
    except ValueError as error:
        parser.error(str(error))
    for pattern in options.only:
        if not any(fnmatch.fnmatchcase(mutation.id, pattern) for mutation in mutations):
            parser.error(f"no change has the id {pattern!r}; --list shows them all")
    if options.only:
        mutations = [
            mutation
            for mutation in mutations
            if any(fnmatch.fnmatchcase(mutation.id, pattern) for pattern in options.only)
        ]
    if options.list:
        for mutation in mutations:
            print(f"{mutation.id:<32} {mutation.file:<44} {mutation.what}")
        return 0
    started = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="anyep-mutate-") as folder,
        contextlib.closing(Trial(options.root, Path(folder), options.jobs)) as trial,
    ):
        print(f"the tests of {len(mutations)} changes, on the sources as they are ...", flush=True)
        failing = trial.failing_tests(mutations)
        for name, output in failing.items():
            print(f"{name} fails without any change:\n{output[-2000:]}", flush=True)
        valid = [mutation for mutation in mutations if not failing.keys() & set(mutation.tests)]
        num_done = 0

        def show(result: Result) -> None:
            nonlocal num_done
            num_done += 1
            how = f"{result.outcome} by {result.by}" if result.by else result.outcome
            tries = f", try {result.tries}" if result.tries > 1 else ""
            print(f"{num_done}/{len(valid)}  {result.id}: {how} ({result.seconds} s{tries})", flush=True)

        results = trial.try_all(valid, show)
    results += [
        Result(mutation.id, mutation.file, mutation.what, INVALID, "its tests fail without it", 0.0)
        for mutation in mutations
        if mutation not in valid
    ]
    print_table(results)
    if options.json:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")
    counts = Counter(result.outcome for result in results)
    seconds = time.monotonic() - started
    print(f"{counts[CAUGHT]} of {len(results)} were caught, {counts[SURVIVED]} survived; {seconds:.0f} s")
    for result in results:
        if result.outcome != CAUGHT:
            print(f"{result.outcome}: {result.id} ({result.file}): {result.what}")
    return exit_code_of(counts, options.allow)


def exit_code_of(counts: Mapping[str, int], num_allowed: int = 0) -> int:
    """
    >>> [exit_code_of(Counter(outcomes)) for outcomes in ([CAUGHT], [CAUGHT, SURVIVED], [INVALID])]
    [0, 1, 2]
    >>> exit_code_of(Counter([SURVIVED]), num_allowed=1)
    0
    """
    return 2 if counts[INVALID] else 1 if counts[SURVIVED] > num_allowed else 0


def print_table(results: Sequence[Result]) -> None:
    """As Markdown."""
    print("\n| id | file | what | outcome | seconds |\n|---|---|---|---|---|")
    for result in results:
        outcome = result.by if result.outcome == CAUGHT else f"{result.outcome} {result.by}".strip()
        cells = (result.id, result.file, result.what, outcome, f"{result.seconds:.1f}")
        print("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")


if __name__ == "__main__":
    sys.exit(main())
