"""The tutorial: its blocks are one program, which checks itself."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.programs import ROOT
from tests.support.scripts import run_script

BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "tutorial.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_blocks_run_one_after_the_other(tmp_path: Path, num_ranks: int) -> None:
    script = tmp_path / "tutorial.py"
    script.write_text("\n".join(BLOCKS))
    finished = run_script(script, num_ranks=num_ranks)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.count("the sum is that of the dense layer") == num_ranks
    assert finished.stdout.count("decoded 6 tokens") == num_ranks


@pytest.mark.slow
@pytest.mark.parametrize("num_blocks", range(1, len(BLOCKS)))
def test_it_runs_after_any_step(tmp_path: Path, num_blocks: int) -> None:
    """As the page says; the steps that come later destroy the Buffer and the group."""
    script = tmp_path / "tutorial.py"
    script.write_text("\n".join(BLOCKS[:num_blocks]))
    finished = run_script(script, num_ranks=2)
    assert (finished.returncode, "Traceback" in finished.stderr) == (0, False), finished.stderr


def test_every_step_has_a_block() -> None:
    steps = re.split(r"^## \d\. ", (ROOT / "docs" / "tutorial.md").read_text(), flags=re.MULTILINE)[1:]
    assert len(steps) == 9
    assert all("```python\n" in step for step in steps)
    assert all("assert " in step for step in steps[1:] if not step.startswith("Experts"))
