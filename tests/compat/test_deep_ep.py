"""AnyEP under the name of deep_ep: three ways to get it, and what happens where another deep_ep is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

import anyep
from tests.support.programs import ROOT as REPOSITORY
from tests.support.programs import run_program

DISTRIBUTION = REPOSITORY / "compat" / "deep_ep"
IMPORTS = """
from deep_ep import Buffer, Config, EventOverlap, topk_idx_t
from deep_ep.buffer import Buffer as buffers_buffer
from deep_ep.utils import EventHandle, EventOverlap as utils_overlap
from deep_ep_cpp import Config as cpp_config, EventHandle as cpp_handle
from deep_ep.utils import comm, envs, event, gate, math, refs, testing
from deep_ep.buffers.legacy import Buffer as legacy_buffer
from deep_ep._C import EventHandle as c_handle, get_elastic_buffer_alignment
import anyep, deep_ep, importlib.util, torch
assert Buffer is buffers_buffer is legacy_buffer is anyep.Buffer is deep_ep.buffer.Buffer
assert c_handle is anyep.EventHandle and get_elastic_buffer_alignment() == 2 << 20
assert math.align(5, 4) == 8 and event.EventOverlap is EventOverlap
assert Config is cpp_config is anyep.Config
assert EventOverlap is utils_overlap is deep_ep.utils.EventOverlap is anyep.EventOverlap
assert EventHandle is cpp_handle is deep_ep.EventHandle is anyep.EventHandle
assert topk_idx_t is torch.int64
assert deep_ep.__version__ == "2.1.0" and not hasattr(deep_ep, "HybridEPBuffer")
from deep_ep import ElasticBuffer, EPHandle
from deep_ep.buffers.elastic import ElasticBuffer as buffers_elastic
assert ElasticBuffer is anyep.ElasticBuffer is buffers_elastic and EPHandle is anyep.EPHandle
for name in ("deep_ep", "deep_ep.buffer", "deep_ep.utils", "deep_ep_cpp"):
    assert importlib.util.find_spec(name).name == name
"""
INSTALL = "import anyep; anyep.install_as_deep_ep()\n"


def python(
    *arguments: str, path: tuple[Path, ...] = (), **environment: str
) -> subprocess.CompletedProcess[str]:
    folders = os.pathsep.join(map(str, (*path, REPOSITORY)))
    return run_program(*arguments, env={"PYTHONPATH": folders, **environment})


def succeeds(*arguments: str, path: tuple[Path, ...] = (), **environment: str) -> str:
    finished = python(*arguments, path=path, **environment)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


@pytest.fixture
def another(tmp_path: Path) -> Path:
    """A folder with a deep_ep that is not AnyEP's."""
    folder = tmp_path / "another"
    (folder / "deep_ep").mkdir(parents=True)
    (folder / "deep_ep" / "__init__.py").write_text("from deep_ep.kernels import Buffer\n")
    (folder / "deep_ep" / "kernels.py").write_text("class Buffer: pass\n")
    return folder


def test_the_folder_of_the_distribution_on_the_path() -> None:
    succeeds("-c", IMPORTS, path=(DISTRIBUTION,))


def test_without_the_names_of_version_2() -> None:
    code = (
        "import deep_ep; assert deep_ep.__version__ == '1.2.1' and deep_ep.Buffer\n"
        "assert not hasattr(deep_ep, 'ElasticBuffer') and not hasattr(deep_ep, 'EPHandle')\n"
        "import deep_ep.buffers.legacy, deep_ep.utils.refs\n"
        "try: import deep_ep.buffers.elastic\nexcept ImportError as error: print(error)\n"
    )
    told = succeeds("-c", code, path=(DISTRIBUTION,), ANYEP_DEEP_EP_API="v1")
    assert told.startswith("ANYEP_DEEP_EP_API=v1 leaves out deep_ep.buffers.elastic: unset it")


def test_a_version_that_there_is_not() -> None:
    finished = python("-c", "import deep_ep", path=(DISTRIBUTION,), ANYEP_DEEP_EP_API="v3")
    assert finished.stderr.splitlines()[-1].endswith("ANYEP_DEEP_EP_API is 'v3': it must be v1 or v2")


def test_installed_in_a_process(tmp_path: Path) -> None:
    """Twice, where its absence was pretended before, and where a mere folder has its name."""
    (tmp_path / "deep_ep").mkdir()
    code = "import sys; sys.modules['deep_ep'] = None\n"
    succeeds("-c", code + INSTALL + INSTALL + IMPORTS, path=(tmp_path,))


def test_installed_where_it_is_on_the_path_too() -> None:
    succeeds("-c", "import deep_ep\n" + INSTALL + IMPORTS, path=(DISTRIBUTION,))


@pytest.mark.slow
def test_processes_that_multiprocessing_starts(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "def child():\n    import deep_ep\n    print(deep_ep.Buffer)\n"
        "if __name__ == '__main__':\n"
        "    import anyep, multiprocessing\n    anyep.install_as_deep_ep()\n"
        "    process = multiprocessing.get_context('spawn').Process(target=child)\n"
        "    process.start(); process.join(); assert process.exitcode == 0\n"
    )
    assert succeeds(str(script)) == "<class 'anyep.api.buffer.Buffer'>\n"


@pytest.mark.skipif(
    find_spec("hatchling") is None, reason="hatchling, which builds the wheel, is not installed"
)
def test_the_wheel(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=DISTRIBUTION, check=True, capture_output=True, timeout=120)
    (wheel,) = tmp_path.glob("anyep_deep_ep-*.whl")
    unpacked = tmp_path / "unpacked"
    zipfile.ZipFile(wheel).extractall(unpacked)
    assert "Requires-Dist: anyep\n" in next(unpacked.glob("*.dist-info/METADATA")).read_text()
    succeeds("-c", IMPORTS, path=(unpacked,))


def test_the_distribution_has_the_version_of_the_package() -> None:
    project = tomllib.loads((DISTRIBUTION / "pyproject.toml").read_text())["project"]
    assert (project["name"], project["version"]) == ("anyep-deep-ep", anyep.__version__)


# Another deep_ep


def refused(finished: subprocess.CompletedProcess[str], where: Path | str) -> None:
    assert finished.returncode == 1
    last_line = finished.stderr.splitlines()[-1]
    assert "there is another deep_ep here" in last_line
    assert str(where) in last_line
    assert "ANYEP_REPLACE_DEEP_EP=1" in last_line


@pytest.mark.parametrize("first", [False, True])
def test_another_is_not_hidden_unasked(another: Path, first: bool) -> None:
    refused(python("-c", INSTALL, path=(another,)), another / "deep_ep" / "__init__.py")
    path = (another, DISTRIBUTION) if first else (DISTRIBUTION, another)
    refused(python("-c", INSTALL, path=path), another / "deep_ep" / "__init__.py")
    if not first:
        # Not an ImportError, which clients take for "there is no deep_ep".
        code = "try: import deep_ep\nexcept ImportError: pass"
        refused(python("-c", code, path=path), another / "deep_ep" / "__init__.py")


def test_another_that_is_compiled(tmp_path: Path) -> None:
    (tmp_path / "deep_ep_cpp.abi3.so").touch()
    refused(python("-c", INSTALL, path=(tmp_path,)), tmp_path / "deep_ep_cpp.abi3.so")


def test_another_that_is_imported_already(another: Path) -> None:
    code = f"import sys; sys.path.insert(0, {str(another)!r}); import deep_ep; del sys.path[0]\n"
    finished = python("-c", code + INSTALL)
    refused(finished, f"deep_ep is imported already, from {another}")


def test_another_that_has_no_file() -> None:
    code = "import sys, types; sys.modules['deep_ep'] = types.ModuleType('deep_ep')\n"
    refused(python("-c", code + INSTALL), "imported already, from no file")


def test_another_distribution_whose_files_were_overwritten(tmp_path: Path) -> None:
    metadata = tmp_path / "deep_ep-1.2.1.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: deep_ep\nVersion: 1.2.1\n")
    finished = python("-c", "import deep_ep", path=(DISTRIBUTION, tmp_path))
    refused(finished, "the distribution deep_ep 1.2.1")


def test_another_is_replaced_where_asked(another: Path) -> None:
    code = "import deep_ep.kernels, sys, anyep; anyep.install_as_deep_ep(replace=True)\n"
    succeeds("-c", code + IMPORTS + "assert 'deep_ep.kernels' not in sys.modules", path=(another,))
    succeeds("-c", IMPORTS, path=(DISTRIBUTION, another), ANYEP_REPLACE_DEEP_EP="1")


# The command

SCRIPT = """
import __main__, json, sys
from deep_ep import Buffer
print(json.dumps([sys.argv, sys.path[0], __name__, __file__, __main__.Buffer is Buffer, Buffer.__module__]))
sys.exit(7)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "scripts" / "script.py"
    path.parent.mkdir()
    path.write_text(SCRIPT)
    return path


RUN = ("-m", "anyep.run_as_deep_ep")


def test_a_script_sees_what_it_expects(script: Path) -> None:
    finished = python(*RUN, str(script), "-m", "--replace")
    arguments, folder, name, file, is_main, module = json.loads(finished.stdout)
    assert (finished.returncode, finished.stderr) == (7, "")
    assert arguments == [str(script), "-m", "--replace"]
    assert (folder, name, file) == (str(script.parent), "__main__", str(script))
    assert (is_main, module) == (True, "anyep.api.buffer")


def test_a_module_instead_of_a_script(script: Path) -> None:
    finished = python(*RUN, "-m", "script", "argument", path=(script.parent,))
    arguments, _, name, _, is_main, _ = json.loads(finished.stdout)
    assert finished.returncode == 7
    assert (arguments, name, is_main) == ([str(script), "argument"], "__main__", True)


@pytest.mark.parametrize(
    ("code", "printed"),
    [
        ("from importlib.util import find_spec; print(find_spec('deep_ep').origin)", "as_deep_ep"),
        pytest.param(
            "import deep_ep; print(deep_ep.Buffer)",
            "<class 'anyep.api.buffer.Buffer'>",
            marks=pytest.mark.slow,  # it imports torch
        ),
    ],
)
def test_pythons_that_a_script_starts(tmp_path: Path, code: str, printed: str) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {code!r}], check=True)\n"
    )
    assert printed in succeeds(*RUN, str(script))


def test_a_script_where_another_is(another: Path, script: Path) -> None:
    refused(python(*RUN, str(script), path=(another,)), another / "deep_ep" / "__init__.py")
    assert "anyep.api.buffer" in python(*RUN, "--replace", str(script), path=(another,)).stdout


@pytest.mark.parametrize("arguments", [(), ("--replace",), ("-m",), ("--nonsense", "script.py")])
def test_the_usage(arguments: tuple[str, ...]) -> None:
    finished = python(*RUN, *arguments)
    assert finished.returncode == 1
    assert finished.stderr.startswith("usage: python -m anyep.run_as_deep_ep")


def test_a_script_that_is_not_there(tmp_path: Path) -> None:
    finished = python(*RUN, str(tmp_path / "none.py"))
    assert finished.returncode == 1
    assert finished.stderr.startswith(f"there is no {tmp_path / 'none.py'}")
