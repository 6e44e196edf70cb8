"""What a user gets by importing the package."""

from __future__ import annotations

import ast
import importlib
import importlib.resources
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import anyep

TESTS = Path(__file__).parents[1]
HEAVY = ("torch", "numba", "numpy", "triton", "matplotlib", "rich", "typer")


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )


def test_import_is_light_and_silent() -> None:
    finished = python(f"import anyep, sys; sys.exit(any(name in sys.modules for name in {HEAVY}))")
    assert (finished.returncode, finished.stdout, finished.stderr) == (0, "", "")


def test_plan_needs_neither_torch_nor_numba() -> None:
    code = (
        "import sys; sys.argv = ['anyep', 'plan']\n"
        "from anyep.cli.main import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code\n"
        "assert 'torch' not in sys.modules and 'numba' not in sys.modules\n"
    )
    finished = python(code)
    assert finished.returncode == 0, finished.stderr


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_other_systems_are_refused_with_advice(platform: str) -> None:
    finished = python(f"import sys; sys.platform = {platform!r}\nimport anyep")
    assert finished.returncode == 1
    last_line = finished.stderr.splitlines()[-1]
    assert last_line.startswith(f"ImportError: AnyEP runs on Linux only, and this is {platform!r}")
    assert "WSL 2" in last_line


def test_types_are_shipped() -> None:
    assert importlib.resources.files("anyep").joinpath("py.typed").is_file()


def test_names() -> None:
    for name in anyep.__all__:
        assert getattr(anyep, name) is not None


def test_modules_are_attributes() -> None:
    """After `import anyep`; those that need no torch do not load it."""
    code = (
        "import anyep, sys\n"
        "for name in ('errors', 'layout', 'sizes', 'topology', 'autograd', 'nn'):\n"
        "    assert name in dir(anyep)\n"
        "    if name == 'autograd': assert 'torch' not in sys.modules\n"
        "    assert getattr(anyep, name) is sys.modules[f'anyep.{name}']\n"
        "assert 'torch' in sys.modules\n"
    )
    finished = python(code)
    assert finished.returncode == 0, finished.stderr


def test_what_the_page_lists_is_there() -> None:
    page = (TESTS.parent / "docs" / "api.md").read_text()
    rows = re.findall(r"^\| `(anyep[.a-z]*)` \| (.*) \|$", page, re.MULTILINE)
    assert {module for module, _ in rows} >= {"anyep", "anyep.nn", "anyep.sizes", "anyep.layout"}
    for name, contents in rows:
        module = importlib.import_module(name)
        for attribute in re.findall(r"`(\w+)`", contents):
            assert hasattr(module, attribute), f"{name}.{attribute}"


def test_the_page_lists_what_modules_export() -> None:
    listed = set(re.findall(r"`(\w+)`", (TESTS.parent / "docs" / "api.md").read_text()))
    for name in ("anyep", "anyep.nn"):
        assert set(importlib.import_module(name).__all__) <= listed, name


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="module 'anyep' has no attribute 'nothing'"):
        anyep.nothing  # noqa: B018


@pytest.mark.parametrize(
    ("name", "also"),
    [
        ("InvalidCall", ValueError),
        ("Disagreement", anyep.AnyEPError),
        ("PeerLost", anyep.AnyEPError),
        ("Masked", anyep.PeerLost),
        ("WaitTimeout", TimeoutError),
        ("BufferBroken", anyep.AnyEPError),
        ("NotSupported", anyep.AnyEPError),
    ],
)
def test_exceptions_travel(name: str, also: type[Exception]) -> None:
    kind = getattr(anyep, name)
    error = pickle.loads(pickle.dumps(kind("rank 3 did not answer")))
    assert type(error) is kind
    assert str(error) == "rank 3 did not answer"
    assert isinstance(error, also)
    assert isinstance(error, anyep.AnyEPError)


# A module may import those of its own layer and of the layers before it.
LAYERS = (
    (
        "version",
        "errors",
        "machine",
        "launch",
        "progress",
        "ending",
        "nixl_packages",
        "requirements",
        "link_rates",
    ),
    ("sizes", "settings"),
    ("topology", "layout", "events", "core", "join"),
    ("planning",),
    ("backends",),
    ("transport",),
    ("control",),
    ("modes",),
    ("connection", "gpu_connection", "session"),
    ("api",),
    ("autograd", "balance", "elastic_autograd", "feed_forward", "grouped_experts", "nn", "training"),
    ("deep_ep_modules", "as_deep_ep", "run_as_deep_ep"),
    ("cli", "__main__"),
)


def layer_of(module: str) -> int:
    name = module.split(".")[0]
    return next(index for index, names in enumerate(LAYERS) if name in names)


def test_nothing_reaches_upwards() -> None:
    package = Path(anyep.__file__).parent
    for path in package.rglob("*.py"):
        module = ".".join(path.relative_to(package).with_suffix("").parts)
        if module == "__init__":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("anyep."):
                imported = (node.module or "").removeprefix("anyep.")
                assert layer_of(imported) <= layer_of(module), f"{module} imports {imported}"


# The tests themselves

FOLDERS = {
    *("unit", "kernels", "model", "normal", "low_latency", "elastic", "nodes", "faults", "layers"),
    *("cli", "compat", "examples", "gpu", "support"),
}


def modules_imported_by(path: Path) -> Iterator[str]:
    """Modules, and names in modules, which may be modules: also those that functions import."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_no_test_module_imports_another() -> None:
    found = [
        f"{path.relative_to(TESTS.parent)} imports {module}"
        for path in [*TESTS.rglob("*.py"), *(TESTS.parent / "tools").glob("*.py")]
        for module in modules_imported_by(path)
        if module.startswith("tests.") and any(part.startswith("test_") for part in module.split(".")[:3])
    ]
    assert not found, "move what they share to tests/support:\n" + "\n".join(found)


def test_the_folders_of_tests_are_those_of_the_readme() -> None:
    folders = {path.name for path in TESTS.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders == FOLDERS
    readme = (TESTS / "README.md").read_text()
    assert all(f"\n| `{folder}` |" in readme for folder in FOLDERS)
    assert {path.name for path in TESTS.glob("*.py")} == {"__init__.py", "conftest.py"}
    assert not list((TESTS / "support").rglob("test_*.py"))


def test_no_marks_of_a_merge_are_left() -> None:
    """In files that people read; Python would refuse them in its own."""
    root = TESTS.parent
    for pattern in ("*.md", "docs/**/*.md", "tests/*.md", "tools/*.toml", "tools/*.sh"):
        for path in root.glob(pattern):
            marks = re.findall(r"^(?:<<<<<<<|>>>>>>>) .*$", path.read_text(), re.MULTILINE)
            assert not marks, (path, marks)
