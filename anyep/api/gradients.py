"""A warning for tensors that require gradients, because the calls of `Buffer` give none.

`Buffer` moves values. Its results are not connected to its arguments by autograd, so a model that trains
through it would learn nothing there, without an error.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch

_has_warned = False


def warn_if_lost(*given: Any) -> None:
    """Warn, once per process, if one of these tensors (or tuples of them) expects a gradient.

    No tensor does under `torch.no_grad()` or in an autograd function, so `anyep.autograd` and clients with
    their own autograd functions get no warning.
    """
    global _has_warned  # noqa: PLW0603 - once per process
    if _has_warned or not torch.is_grad_enabled() or not _is_any_lost(given):
        return
    _has_warned = True
    warnings.warn(
        "a tensor that requires gradients was passed to anyep.Buffer or anyep.ElasticBuffer, whose results"
        " have none: use anyep.autograd (dispatch, combine) or anyep.nn for training; where no gradient is"
        " wanted, pass x.detach() or call it under torch.no_grad(). This warning is shown once per process",
        UserWarning,
        stacklevel=_level_of_caller(),
    )


def _is_any_lost(things: tuple[Any, ...]) -> bool:
    for thing in things:
        if isinstance(thing, torch.Tensor):
            if thing.requires_grad:
                return True
        elif isinstance(thing, tuple) and _is_any_lost(thing):
            return True
    return False


def _level_of_caller() -> int:
    """The `stacklevel` of the first caller outside AnyEP, counted from `warn_if_lost`."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("anyep."):
        frame, level = frame.f_back, level + 1
    return level
