"""What a user gets by importing the package."""

from __future__ import annotations

import ast
import importlib.resources
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import anyep

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


@pytest.mark.parametrize("name", ["errors", "layout", "sizes", "topology", "autograd", "nn"])
def test_modules_are_attributes(name: str) -> None:
    """After `import anyep`; those that need no torch do not load it."""
    code = (
        f"import anyep, sys; assert {name!r} in dir(anyep)\n"
        "assert 'torch' not in sys.modules\n"
        f"assert anyep.{name} is sys.modules['anyep.{name}']\n"
        f"assert ('torch' in sys.modules) == {name in ('autograd', 'nn')}\n"
    )
    finished = python(code)
    assert finished.returncode == 0, finished.stderr


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
    ("version", "errors", "machine", "launch", "progress", "ending", "nixl_packages", "requirements"),
    ("sizes", "settings"),
    ("topology", "layout", "formats", "freelist", "events", "headers", "outcomes", "digests"),
    ("agreement", "roll_call", "rendezvous"),
    ("backends", "network"),
    ("modes",),
    ("arguments", "gradients", "low_latency_arguments", "buffer"),
    ("autograd", "balance", "nn", "training"),
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


ANYEP_RUN = ("-m", "anyep", "run", "-n")
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node")


@pytest.mark.parametrize("page", ["docs/low-latency.md"])
@pytest.mark.parametrize(("launcher", "num_ranks"), [(ANYEP_RUN, 1), (ANYEP_RUN, 4), (TORCHRUN, 2)])
def test_examples_run(tmp_path: Path, launcher: tuple[str, ...], num_ranks: int, page: str) -> None:
    repository = Path(anyep.__file__).parent.parent
    script = tmp_path / "example.py"
    script.write_text((repository / page).read_text().split("```python\n")[1].split("```")[0])
    finished = subprocess.run(
        [sys.executable, *launcher, str(num_ranks), str(script)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ | {"PYTHONPATH": str(repository)},
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.count("rows for its experts") == num_ranks
