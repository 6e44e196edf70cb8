"""Another library with the same API, such as `deep_ep`: the cases run through it too, in the same run.

Only what its API promises is checked: received rows of a low-latency dispatch may come in any order, and sums
may be rounded elsewhere.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from anyep.api.buffer import Buffer
from anyep.cli.bench.records import Setup
from anyep.cli.ranks import Rank


@contextmanager
def normal_buffer(name: str, rank: Rank, setup: Setup, sms: int | None) -> Iterator[Any]:
    """A Buffer of the library, with as many bytes as its configs ask for."""
    made_by = importlib.import_module(name).Buffer
    if sms is not None:
        made_by.set_num_sms(sms)
    configs = made_by.get_dispatch_config(rank.num_ranks), made_by.get_combine_config(rank.num_ranks)
    num_bytes = max(config.get_nvl_buffer_size_hint(setup.row_bytes, rank.num_ranks) for config in configs)
    with _destroyed(made_by(rank.group, num_bytes, 0, **_options(made_by, setup))) as buffer:
        yield buffer


@contextmanager
def low_latency_buffer(name: str, rank: Rank, setup: Setup, tokens: int) -> Iterator[Any]:
    """A Buffer of the library for low-latency calls of so many tokens."""
    made_by = importlib.import_module(name).Buffer
    num_bytes = made_by.get_low_latency_rdma_size_hint(tokens, setup.hidden, rank.num_ranks, setup.experts)
    options = _options(made_by, setup) | {
        "low_latency_mode": True,
        "num_qps_per_rank": setup.experts // rank.num_ranks,
    }
    with _destroyed(made_by(rank.group, 0, num_bytes, **options)) as buffer:
        yield buffer


def _options(made_by: Any, setup: Setup) -> dict[str, Any]:
    # AnyEP under the other name works on any device, and has to be told which; others know only one.
    if issubclass(made_by, Buffer):
        return {"device": setup.device}
    accepted = inspect.signature(made_by.__init__).parameters
    return {"explicitly_destroy": True} if "explicitly_destroy" in accepted else {}


@contextmanager
def _destroyed(buffer: Any) -> Iterator[Any]:
    try:
        yield buffer
    finally:
        if isinstance(buffer, Buffer) or getattr(buffer, "explicitly_destroy", False):
            buffer.destroy()
