"""Traces: what a model's gate chose, step by step, read from files or drawn.

    trace = read_trace([Path("step0.npy"), Path("step1.npy")])      # each [rank, token, top-k]
    trace.steps[0].shape

A file of a trace has `topk_idx` as whole numbers, -1 for no expert. Nothing in a file is executed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from anyep.errors import InvalidCall, NotSupported
from anyep.planning.counts import Array, check_choices

ENDINGS: Final = (".npy", ".pt", ".parquet")
NO_EXPERT: Final = -1
RANK_DIMS, STEP_DIMS, TRACE_DIMS = 2, 3, 4
"""Of [token, top-k], [rank, token, top-k] and [step, rank, token, top-k]."""
SCORES_AT_ONCE: Final = 1 << 24
MOST_SCORES: Final = 1 << 26
SHAPES: Final = "[ranks, tokens, topk], [steps, ranks, tokens, topk], or [tokens, topk] in one file per rank"


class Trace(NamedTuple):
    """Choices of all ranks; ranks with fewer tokens than others are filled up with -1."""

    steps: tuple[Array, ...]
    """[rank, token, top-k] each."""
    num_tokens: tuple[Array, ...]
    """[rank] of each step."""
    scale: float = 1.0
    """Tokens that each of these stands for; 1 unless only a sample was drawn."""

    @property
    def num_ranks(self) -> int:
        return int(self.steps[0].shape[0])

    @property
    def num_topk(self) -> int:
        return int(self.steps[0].shape[2])

    def check(self, num_experts: int) -> None:
        """Refuse ids that no expert has."""
        for step in self.steps:
            check_choices(step, num_experts, "the trace")


def read_trace(paths: Sequence[Path]) -> Trace:
    """The trace in some files: steps one after the other, or a file for each rank of one step."""
    arrays = [(path, each) for path in paths for each in _read(path)]
    dims = {each.ndim for _, each in arrays}
    if dims == {RANK_DIMS}:
        return _of_ranks([each for _, each in arrays])
    if not dims <= {STEP_DIMS, TRACE_DIMS}:
        shapes = "; ".join(f"{path.name} has {list(each.shape)}" for path, each in arrays[:3])
        raise InvalidCall(f"the shapes of the trace do not fit ({shapes}): they must be {SHAPES}")
    steps = [step for _, each in arrays for step in (each if each.ndim == TRACE_DIMS else each[None])]
    first = steps[0].shape
    if not steps or not all(first):
        raise InvalidCall(f"{str(paths[0])!r} has no tokens: its shape {list(arrays[0][1].shape)} has a zero")
    for path, each in arrays:
        if (each.shape[-3], each.shape[-1]) != (first[0], first[2]):
            raise InvalidCall(
                f"{str(path)!r} has {each.shape[-3]} ranks and top-{each.shape[-1]}, but {str(paths[0])!r}"
                f" has {first[0]} and top-{first[2]}: all steps of a trace need the same"
            )
    return Trace(tuple(steps), tuple(np.full(first[0], step.shape[1], np.int64) for step in steps))


def draw_trace(
    shape: tuple[int, int, int], num_experts: int, skew: float, seed: int, num_steps: int = 2
) -> Trace:
    """Choices that follow a power law: the n-th most popular expert is drawn with a weight of n ** -skew.

    Which expert is how popular is drawn as well, once for all steps. `shape` is [ranks, tokens, top-k]; very
    large ones are sampled, see `Trace.scale`.

    >>> draw_trace((2, 4, 2), 8, skew=1.0, seed=1).steps[0].shape
    (2, 4, 2)
    """
    ranks, tokens, topk = shape
    rng = np.random.default_rng(seed)
    log_weights = -skew * np.log(rng.permutation(num_experts) + 1.0).astype(np.float32)
    is_even = skew == 0 and topk * topk <= num_experts
    scores = num_steps * ranks * (topk if is_even else num_experts)
    drawn = max(1, min(tokens, MOST_SCORES // scores))
    steps = []
    for _ in range(num_steps):
        step = np.empty((ranks * drawn, topk), np.int32)
        if is_even:
            _draw_evenly(rng, step, num_experts)
        else:
            _draw_by_weight(rng, step, log_weights)
        steps.append(step.reshape(ranks, drawn, topk))
    counts = tuple(np.full(ranks, drawn, np.int64) for _ in steps)
    return Trace(tuple(steps), counts, tokens / drawn)


def _draw_evenly(rng: np.random.Generator, choices: Array, num_experts: int) -> None:
    """All sets of experts are equally likely: whole tokens are drawn again while they repeat an expert."""
    wrong = np.arange(len(choices))
    while len(wrong):
        choices[wrong] = rng.integers(0, num_experts, (len(wrong), choices.shape[1]))
        ascending = np.sort(choices[wrong], axis=1)
        wrong = wrong[(ascending[:, 1:] == ascending[:, :-1]).any(axis=1)]


def _draw_by_weight(rng: np.random.Generator, choices: Array, log_weights: Array) -> None:
    """The largest of log weights plus Gumbel noise are draws without repetition."""
    topk, num_experts = choices.shape[1], len(log_weights)
    at_once = max(1, SCORES_AT_ONCE // num_experts)
    for first in range(0, len(choices), at_once):
        some = choices[first : first + at_once]
        noise = rng.standard_exponential((len(some), num_experts), np.float32)
        scores = log_weights - np.log(np.maximum(noise, np.float32(1e-30)))
        some[:] = np.argpartition(-scores, topk - 1, axis=1)[:, :topk]


def _of_ranks(ranks: list[Array]) -> Trace:
    """One step of ranks with their own numbers of tokens."""
    topk = {each.shape[1] for each in ranks}
    if len(topk) > 1:
        raise InvalidCall(
            f"the ranks of the trace have different top-k ({', '.join(map(str, sorted(topk)))}): fill up with"
            f" -1"
        )
    longest = max(len(each) for each in ranks)
    step = np.full((len(ranks), longest, topk.pop()), NO_EXPERT, np.int64)
    for row, each in zip(step, ranks, strict=True):
        row[: len(each)] = each
    if not step.size:
        raise InvalidCall("the trace has no tokens: record at least one token of one rank")
    return Trace((step,), (np.array([len(each) for each in ranks]),))


def _read(path: Path) -> list[Array]:
    """The arrays of a file, which is an array or a list of them."""
    if path.suffix not in ENDINGS:
        raise InvalidCall(f"{str(path)!r} is no trace: the name of its file must end in {', '.join(ENDINGS)}")
    try:
        read = {".npy": _read_npy, ".pt": _read_pt, ".parquet": _read_parquet}[path.suffix](path)
    except OSError as error:
        raise InvalidCall(
            f"the trace {str(path)!r} cannot be read ({error.strerror or error}): name a file that exists"
        ) from None
    arrays = []
    for each in read:
        if each.dtype.kind not in "iu" or not each.ndim:
            raise InvalidCall(
                f"{str(path)!r} has values of {each.dtype} in {each.ndim} dimensions: topk_idx are whole"
                f" numbers of shape {SHAPES}"
            )
        arrays.append(each)
    if not arrays:
        raise InvalidCall(f"{str(path)!r} has no tensors: store topk_idx in it")
    return arrays


def _read_npy(path: Path) -> list[Array]:
    try:
        return [np.load(path, allow_pickle=False)]
    except (ValueError, EOFError) as error:
        raise InvalidCall(
            f"{str(path)!r} is no array of numbers ({error}): store it with numpy.save(file, topk_idx)"
        ) from None


def _read_pt(path: Path) -> list[Array]:
    import pickle
    import warnings

    import torch

    try:
        with warnings.catch_warnings():
            # What is odd about a file is in the error.
            warnings.simplefilter("ignore")
            content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError) as error:
        reason = str(error).splitlines()[0][:100] if str(error) else type(error).__name__
        raise InvalidCall(
            f"{str(path)!r} is no file of tensors alone ({reason}): store it with torch.save(topk_idx, file)"
        ) from None
    tensors = content if isinstance(content, (list, tuple)) else [content]
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise InvalidCall(
                f"{str(path)!r} has a {type(tensor).__name__}: store a tensor of topk_idx, or a list of them"
            )
    return [tensor.numpy() for tensor in tensors]


def _read_parquet(path: Path) -> list[Array]:
    """A row for each token, with the columns rank, topk_idx (a list) and, if there are several, step."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise NotSupported(
            f"{str(path)!r} needs pyarrow to be read: pip install pyarrow, or store it as .npy"
        ) from error
    try:
        table = pyarrow.parquet.read_table(path)
    except pyarrow.ArrowInvalid as error:
        raise InvalidCall(f"{str(path)!r} is no parquet file ({str(error)[:100]}): write it again") from None
    columns = {name: table.column(name).combine_chunks() for name in table.column_names}
    if not {"rank", "topk_idx"} <= columns.keys():
        raise InvalidCall(f"{str(path)!r} has no columns rank and topk_idx: write them, and step for several")
    return _from_columns(path, columns)


def _from_columns(path: Path, columns: dict[str, Any]) -> list[Array]:
    ranks = columns["rank"].to_numpy(zero_copy_only=False)
    lists = columns["topk_idx"]
    flat = lists.flatten().to_numpy(zero_copy_only=False)
    if not len(ranks) or len(flat) % len(ranks) or (lists.value_lengths().unique().to_pylist() == [None]):
        raise InvalidCall(f"{str(path)!r} has rows without topk_idx: every token needs as many as the others")
    if len(lists.value_lengths().unique()) > 1:
        raise InvalidCall(f"{str(path)!r} has topk_idx of different lengths: fill up with -1")
    choices = flat.reshape(len(ranks), -1)
    steps = columns["step"].to_numpy(zero_copy_only=False) if "step" in columns else np.zeros_like(ranks)
    num_ranks = int(ranks.max()) + 1
    return [_of_rows(choices[steps == step], ranks[steps == step], num_ranks) for step in np.unique(steps)]


def _of_rows(choices: Array, ranks: Array, num_ranks: int) -> Array:
    """[rank, token, top-k] of rows in any order of ranks."""
    order = np.argsort(ranks, kind="stable")
    counts = np.bincount(ranks, minlength=num_ranks)
    step = np.full((num_ranks, int(counts.max()), choices.shape[1]), NO_EXPERT, np.int64)
    numbers = np.arange(len(ranks)) - np.repeat(np.cumsum(counts) - counts, counts)
    step[ranks[order], numbers] = choices[order]
    return step
