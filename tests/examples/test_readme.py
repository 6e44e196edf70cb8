"""The README, in the repository or on a package page: its programs run, and its links lead somewhere."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path
from textwrap import indent

import numpy as np
import pytest
import torch

from tests.support.programs import ROOT
from tests.support.scripts import code_of, launch_script, run_script

ADDRESS = "https://github.com/anyep/anyep"
PROGRAMS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def check_program(finished: subprocess.CompletedProcess[str], num_ranks: int) -> None:
    assert finished.returncode == 0, finished.stderr
    assert len(re.findall(r"rank \d (?:holds|got)", finished.stdout)) == num_ranks


@pytest.fixture(params=PROGRAMS)
def script(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "example.py"
    path.write_text(request.param)
    return path


SLOW = pytest.mark.slow
WITH_A_BUFFER = (
    "troubleshooting/hangs",
    "troubleshooting/exceptions",
    "concepts/ranks-and-nodes",
    "concepts/handles",
    "concepts/determinism",
    "concepts/windows",
    "howto/gradients",
)


@pytest.mark.parametrize("num_ranks", [2, pytest.param(1, marks=SLOW), pytest.param(4, marks=SLOW)])
def test_programs_run(script: Path, num_ranks: int) -> None:
    check_program(run_script(script, num_ranks=num_ranks), num_ranks)


@pytest.mark.parametrize("num_ranks", [2, pytest.param(1, marks=SLOW), pytest.param(4, marks=SLOW)])
def test_the_program_of_the_docs_runs(tmp_path: Path, num_ranks: int) -> None:
    script = tmp_path / "example.py"
    script.write_text(code_of("docs/low-latency.md"))
    finished = run_script(script, num_ranks=num_ranks)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.count("rows for its experts") == num_ranks


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=SLOW)])
def test_the_first_run_and_what_other_pages_do_with_a_buffer(tmp_path: Path, num_ranks: int) -> None:
    """Blocks that begin with a Buffer and a handle run inside the first program."""
    blocks = [code_of(f"docs/{page}.md") for page in WITH_A_BUFFER]
    traffic = (ROOT / "docs/nodes.md").read_text().split("## What is sent")[1].split("```python\n")[1]
    blocks.append(traffic.split("```")[0].replace("dispatch(...)", "dispatch(x, handle)"))
    check = "assert sum(sent.normal.rows) == in_rank.sum()\n"
    script = tmp_path / "first.py"
    inside = indent("".join([*blocks, check]), "    ")
    script.write_text(code_of("docs/start/first-run.md").replace("dist.destroy", f"{inside}dist.destroy"))
    finished = run_script(script, num_ranks=num_ranks)
    assert finished.returncode == 0, finished.stderr
    found = re.findall(r"rank \d got \d+ rows for its experts: \[\d+, \d+\]", finished.stdout)
    assert len(found) == num_ranks


NAMES = """
import torch, torch.distributed as dist
from anyep import Buffer
hidden = 64
"""
"""What the programs of docs/running.md and docs/api.md take for granted."""


def test_programs_that_show_how_a_buffer_is_made(tmp_path: Path) -> None:
    running = code_of("docs/running.md")
    api = code_of("docs/api.md").replace("buffer =", "second =").replace("group,", "dist.group.WORLD,")
    assert "...\n" in running
    script = tmp_path / "made.py"
    script.write_text(NAMES + running.replace("...\n", f"{api}print(buffer, second)\nsecond.destroy()\n"))
    finished = run_script(script, num_ranks=2, env={"ANYEP_DEVICE": "cpu"})
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.count("; working>") == 4


def test_the_programs_of_planning_for_a_routing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    topk_idx = np.arange(64).reshape(2, 8, 4) % 32
    given = {
        "topk_idx_of_all_ranks": topk_idx,
        "topk_idx_0": torch.from_numpy(topk_idx[0]),
        "topk_idx_1": torch.from_numpy(topk_idx[1]),
        "load": torch.arange(256, dtype=torch.int64, device="cpu"),
    }
    page = (ROOT / "docs/planning-traces.md").read_text()
    monkeypatch.chdir(tmp_path)
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec("import numpy, torch, anyep.balance\n" + block, given)
    assert np.array_equal(np.load("step0.npy"), topk_idx)
    assert len(torch.load("step0.pt", weights_only=True)) == 2
    assert len(given["placement"].experts) == 288  # type: ignore[attr-defined]


NOT_RUN = {"docs/howto/megatron.md": "needs Megatron-LM"}


def test_every_program_of_the_docs_is_run() -> None:
    """A page with a program is named by a test, or in `NOT_RUN`."""
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    tests += '"docs/tutorial.md"' if '"docs" / "tutorial.md"' in tests else ""
    for page in (ROOT / "docs").rglob("*.md"):
        if "```python\n" in page.read_text():
            name = str(page.relative_to(ROOT))
            is_named = f'{name}"' in tests or name.removeprefix("docs/").removesuffix(".md") in WITH_A_BUFFER
            assert is_named, f"no test runs the program of {name}"


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [("anyep", "run", "-n"), ("torch.distributed.run", "--nproc-per-node")])
def test_programs_run_by_launchers(script: Path, launcher: tuple[str, ...]) -> None:
    check_program(launch_script(script, launcher=launcher), 2)


def test_the_example_is_short_and_complete() -> None:
    (program,) = PROGRAMS
    assert len([line for line in program.splitlines() if line]) <= 10
    assert "anyep.nn" in program
    assert ".destroy()" in program


def test_the_readme_begins_with_two_sentences_a_picture_and_two_commands() -> None:
    words, picture, commands = (ROOT / "README.md").read_text().split("\n\n")[1:4]
    assert words.count(". ") + words.count(".\n") == 1
    assert re.match(r"!\[[^\]]+\]\(https://\S+\.svg\)$", picture)
    assert len(commands.splitlines()) == 4


@pytest.mark.parametrize("page", ["README.md", "compat/deep_ep/README.md"])
def test_links_work_on_a_package_page(page: str) -> None:
    """A package page shows the README without the repository around it."""
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.DOTALL)
    definitions = dict(re.findall(r"^\[([^\]]+)\]: (\S+)$", text, re.MULTILINE))
    labels = re.findall(r"\[[^\]]+\]\[([^\]]+)\]", text)
    assert set(labels) == set(definitions), "every reference has its address, and every address is used"
    links = [*re.findall(r"\]\(([^)\s]*)\)", text), *definitions.values()]
    assert links
    for link in links:
        assert link.startswith("https://"), f"{link} is not absolute: begin it with {ADDRESS}/blob/main/"
        if link.startswith(f"{ADDRESS}/"):
            address = re.sub(r"^(blob|tree|raw)/main/", "", link.removeprefix(f"{ADDRESS}/"))
            path, _, anchor = address.partition("#")
            assert (ROOT / path).exists(), link
            assert not anchor or anchor in anchors(ROOT / path), link


def anchors(page: Path) -> list[str]:
    """The headings of a page, as links name them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return [re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings]


@pytest.mark.parametrize("project", ["pyproject.toml", "compat/deep_ep/pyproject.toml"])
def test_metadata_has_addresses(project: str) -> None:
    urls = tomllib.loads((ROOT / project).read_text())["project"]["urls"]
    assert set(urls) == {"Homepage", "Documentation", "Repository", "Changelog", "Issues"}
    assert all(url.startswith(ADDRESS) for url in urls.values())
