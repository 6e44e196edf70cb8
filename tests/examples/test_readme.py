"""The README, in the repository or on a package page: its programs run, and its links lead somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import anyep

REPOSITORY = Path(anyep.__file__).parent.parent
ADDRESS = "https://github.com/anyep/anyep"
PROGRAMS = re.findall(r"```python\n(.*?)```", (REPOSITORY / "README.md").read_text(), re.DOTALL)
ANYEP_RUN = ("-m", "anyep", "run", "-n")
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node")


@pytest.mark.parametrize(("launcher", "num_ranks"), [(ANYEP_RUN, 1), (ANYEP_RUN, 4), (TORCHRUN, 2)])
@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_run(tmp_path: Path, program: str, launcher: tuple[str, ...], num_ranks: int) -> None:
    script = tmp_path / "example.py"
    script.write_text(program)
    finished = subprocess.run(
        [sys.executable, *launcher, str(num_ranks), str(script)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
    )
    assert finished.returncode == 0, finished.stderr
    assert len(re.findall(r"rank \d (?:holds|got)", finished.stdout)) == num_ranks


def test_the_layer_comes_first_and_buffers_are_destroyed() -> None:
    assert ["anyep.nn" in program for program in PROGRAMS] == [True, False]
    assert all(".destroy()" in program or "with Buffer(" in program for program in PROGRAMS)


@pytest.mark.parametrize("page", ["README.md", "compat/deep_ep/README.md"])
def test_links_work_on_a_package_page(page: str) -> None:
    """A package page shows the README without the repository around it."""
    text = re.sub(r"```.*?```", "", (REPOSITORY / page).read_text(), flags=re.DOTALL)
    definitions = dict(re.findall(r"^\[([^\]]+)\]: (\S+)$", text, re.MULTILINE))
    labels = re.findall(r"\[[^\]]+\]\[([^\]]+)\]", text)
    assert set(labels) == set(definitions), "every reference has its address, and every address is used"
    links = [*re.findall(r"\]\(([^)\s]*)\)", text), *definitions.values()]
    assert links
    for link in links:
        assert link.startswith("https://"), f"{link} is not absolute: begin it with {ADDRESS}/blob/main/"
        if link.startswith(f"{ADDRESS}/"):
            path = re.sub(r"^(blob|tree)/main/", "", link.removeprefix(f"{ADDRESS}/")).split("#")[0]
            assert (REPOSITORY / path).exists(), link


@pytest.mark.parametrize("project", ["pyproject.toml", "compat/deep_ep/pyproject.toml"])
def test_metadata_has_addresses(project: str) -> None:
    urls = tomllib.loads((REPOSITORY / project).read_text())["project"]["urls"]
    assert set(urls) == {"Homepage", "Documentation", "Repository", "Changelog", "Issues"}
    assert all(url.startswith(ADDRESS) for url in urls.values())
