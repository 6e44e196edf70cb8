"""The examples, as a user runs them, at a small size; and that each of them can fail."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.support.programs import ROOT
from tests.support.scripts import code_of, launch_script, run_script

EXAMPLES = ROOT / "examples"
TRAIN = EXAMPLES / "train.py"
needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="pip install 'anyep[examples]'"
)


def changed(tmp_path: Path, name: str, before: str, after: str, script: str) -> Path:
    """A copy of the examples in which one line is wrong."""
    for path in EXAMPLES.glob("*.py"):
        text = path.read_text()
        if path.name == name:
            assert text.count(before) == 1
            text = text.replace(before, after)
        (tmp_path / path.name).write_text(text)
    return tmp_path / script


@pytest.mark.slow
@needs_transformers
def test_logits_and_gradients_match() -> None:
    finished = run_script(EXAMPLES / "match.py", "--sequences", "1", "--length", "12")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "relative difference of logits" in finished.stdout


def test_training_matches() -> None:
    """The example compares with one process itself."""
    finished = run_script(TRAIN, "--steps", "2")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert finished.stdout.count("farthest apart, relative") == 1
    assert "Warning" not in finished.stderr


@pytest.mark.slow
def test_training_goes_on_with_other_ranks(tmp_path: Path) -> None:
    """As users start it: the checkpoint of four ranks with DDP, read by two with FSDP2."""
    picture, folder = tmp_path / "losses.png", tmp_path / "checkpoint"
    finished = launch_script(TRAIN, "--steps", "4", "--save", str(folder), num_ranks=4)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    options = ("--resume", str(folder), "--steps", "2", "--parallel", "fsdp", "--plot", str(picture))
    finished = launch_script(TRAIN, *options)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert finished.stdout.count("farthest apart, relative") == 1
    assert "Warning" not in finished.stderr
    if importlib.util.find_spec("matplotlib") is not None:
        assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_training_with_autocast(parallel: str) -> None:
    options = ("--autocast", "--steps", "8", "--micro-batches", "1", "--parallel", parallel)
    finished = run_script(TRAIN, *options)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    first, last = (float(word) for word in finished.stdout.split("loss ", 1)[1].split()[:3:2])
    assert last < 0.8 * first


@pytest.mark.slow
@needs_transformers
def test_tokens_match() -> None:
    finished = run_script(EXAMPLES / "decode.py", "--prompts", "2", "--new-tokens", "8")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "32 of 32 tokens are those of one process" in finished.stdout


# Gradients that are not summed over ranks, experts that are mixed up.
@pytest.mark.slow
@needs_transformers
@pytest.mark.parametrize(
    ("name", "before", "after", "script", "options"),
    [
        ("match.py", "    sum_shared_gradients(model, group)\n", "", "match.py", ("--length", "8")),
        ("qwen3_moe.py", "Expert(all_, i)", "Expert(all_, i ^ 1)", "decode.py", ("--new-tokens", "4")),
    ],
)
def test_a_wrong_example_fails(
    tmp_path: Path, name: str, before: str, after: str, script: str, options: tuple[str, ...]
) -> None:
    finished = run_script(changed(tmp_path, name, before, after, script), *options)
    assert finished.returncode == 1
    assert "Traceback" not in finished.stderr


# Gradients of experts that are not divided, a norm of one rank, an even load of one rank, averaged experts.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("        average_expert_gradients(model, group.size())\n", ""),
        (
            "clip_grad_norm(model, plan.max_norm, group)",
            "nn.utils.clip_grad_norm_(model.parameters(), plan.max_norm)",
        ),
        ("load_balancing_loss(of_block, topk_idx, group)", "load_balancing_loss(of_block, topk_idx)"),
        ("return data_parallel(model,", "return DistributedDataParallel(model,"),
    ],
)
def test_a_wrong_recipe_fails(tmp_path: Path, before: str, after: str) -> None:
    finished = run_script(changed(tmp_path, "train.py", before, after, "train.py"), "--steps", "2")
    assert finished.returncode == 1
    assert "Traceback" not in finished.stderr
    assert "farthest apart, relative" in finished.stdout


@pytest.mark.parametrize("num_ranks", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_outputs_of_the_docs(tmp_path: Path, num_ranks: int) -> None:
    script = tmp_path / "outputs.py"
    script.write_text(code_of("docs/outputs.md"))
    finished = run_script(script, num_ranks=num_ranks)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.count(f"outputs of {8 // num_ranks} experts") == num_ranks


@pytest.mark.parametrize("num_ranks", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_expanded_rows_of_the_docs(tmp_path: Path, num_ranks: int) -> None:
    script = tmp_path / "elastic.py"
    script.write_text(code_of("docs/elastic.md"))
    finished = run_script(script, num_ranks=num_ranks)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.count(f"rows of {8 // num_ranks} experts") == num_ranks


@pytest.mark.parametrize("num_ranks", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_padded_rows_of_the_docs(tmp_path: Path, num_ranks: int) -> None:
    script = tmp_path / "hybrid.py"
    script.write_text(code_of("docs/hybrid.md"))
    finished = run_script(script, num_ranks=num_ranks)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.count("combined (100, 64) from groups of") == num_ranks


@pytest.mark.parametrize("num_ranks", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_the_layer_of_the_docs_runs(tmp_path: Path, num_ranks: int) -> None:
    script = tmp_path / "layer.py"
    script.write_text(code_of("docs/layers.md"))
    finished = run_script(script, num_ranks=num_ranks)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.count("trained: loss") == num_ranks
