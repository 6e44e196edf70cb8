"""The interface between low-latency mode and devices: what a call sends and fills, and its operations.

A call has two halves. On the CPU a half is a function that waits for peers; on CUDA it is a batch of kernels.
`base.py` has what both modes share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from anyep.backends.base import Control
from anyep.core import formats
from anyep.core.calls import Array, Call, Stall
from anyep.core.records import Format
from anyep.errors import AnyEPError
from anyep.events import EventHandle
from anyep.layout import LowLatencySlots
from anyep.sizes import LowLatencySizes

Work = TypeVar("Work", bound="LowLatencyWork")


class LowLatencyTokens(NamedTuple):
    """What a low-latency dispatch sends, and the statistics that it updates."""

    x: torch.Tensor
    topk_idx: torch.Tensor
    sizes: LowLatencySizes
    travel: Format
    expert_stats: torch.Tensor | None
    wait_stats: torch.Tensor | None

    @property
    def num_scale_words(self) -> int:
        """Words of 4 bytes that travel with each row."""
        return num_scale_words(self.sizes.hidden, self.travel)


def num_scale_words(hidden: int, travel: Format) -> int:
    """Words of 4 bytes that travel with a row of `hidden` values.

    >>> num_scale_words(7168, Format.FP8), num_scale_words(7168, Format.FP8_UE8M0)
    (56, 14)
    """
    if travel is Format.BF16:
        return 0
    num_scales = hidden // formats.CHANNELS_PER_BLOCK
    return num_scales // 4 if travel is Format.FP8_UE8M0 else num_scales


class Outline(NamedTuple):
    """What a tensor looks like."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_transposed: bool = False
    """Whether its last two dimensions are exchanged in memory."""


class LowLatencyResults(NamedTuple):
    """What a low-latency dispatch fills: rows by expert, and where they came from."""

    x: torch.Tensor
    scales: torch.Tensor | None
    counts: torch.Tensor
    src_info: torch.Tensor
    layout_range: torch.Tensor


class LowLatencyInput(NamedTuple):
    """What a low-latency combine sums, where it writes the sums, and the statistics that it updates."""

    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor
    src_info: torch.Tensor
    layout_range: torch.Tensor
    num_rows: int
    sizes: LowLatencySizes
    use_logfmt: bool
    zero_copy: bool
    out: torch.Tensor | None
    wait_stats: torch.Tensor | None


class LowLatencyWork(Protocol):
    """The two halves of a call, as its backend runs them."""

    @property
    def release(self) -> Callable[[], None]:
        """Lets the senders go on whose rows will not be received; it holds no tensor of the user's."""


@dataclass
class Agreement:
    """Whether a call with the current slots has succeeded on all ranks, as far as the host knows."""

    holds: bool = False


class LowLatencyControl(Control, Protocol):
    """The part of the control plane that low-latency operations use."""

    def await_counters(
        self,
        counters: Array,
        expected: int,
        missing: Array,
        num_spins: int,
        topic: int,
        waited: Array = ...,
        started: int = 0,
    ) -> int: ...
    def stall(
        self, counters: Array, missing: Array, what: str, expected: int, ranks: Sequence[int] | None = None
    ) -> Stall: ...
    def publish_refusal(self, text: int, reason: str) -> None: ...
    def disagreement(
        self,
        call: Call,
        headers: Array,
        text: int,
        signature_words: Mapping[Any, str],
        for_people: Callable[[int, Any], str],
    ) -> AnyEPError: ...


class Mask(Protocol):
    """Which ranks calls go on without."""

    masked: Array
    """By rank."""

    def look(self) -> None:
        """Adopt what peers have published, and raise if this rank is masked."""

    def mask(self, ranks: Sequence[int], reason: str) -> None:
        """Go on without these ranks, and tell every rank."""


class LowLatencyOps(Protocol[Work]):
    """Low-latency mode on one device."""

    agreement: Agreement

    @property
    def is_capturing(self) -> bool:
        """Whether calls are recorded into a CUDA graph."""

    def before_call(self) -> None:
        """Raise, before a call takes its number, if this rank knows that it is masked."""

    def listen(self) -> None:
        """Look for errors of earlier calls; those that end this rank's part are raised."""

    def raise_earlier(self) -> None:
        """Raise the error of an earlier call that the host did not wait for; at the end of a call."""

    def is_quiet(self) -> bool:
        """Whether there is no such error, and none to look for; False where the host waits for calls."""

    def check_ids(self, topk_idx: torch.Tensor, num_experts: int) -> None:
        """Refuse ids that are neither experts nor -1, here or in a kernel."""

    def count_rows(self, layout_range: torch.Tensor, src_info: torch.Tensor, max_tokens: int) -> int:
        """The rows of a handle as far as the host knows them; below 0 if its contents are impossible."""

    def check_zero_copy(self) -> None:
        """Raise where zero copy is not possible."""

    def check_not_captured(self, function: str) -> None:
        """Raise if calls are recorded into a CUDA graph, in which this function cannot be."""

    def use_slots(self, slots: LowLatencySlots) -> None:
        """Let later calls have these slots."""

    def allocator(self, outlines: Sequence[Outline]) -> Callable[[], Sequence[torch.Tensor]]:
        """A function that allocates tensors that look like this, for the results of many calls."""

    def dispatch(self, call: Call, tokens: LowLatencyTokens, results: LowLatencyResults) -> Work: ...
    def combine(self, call: Call, combined: LowLatencyInput, out: torch.Tensor) -> Work: ...
    def run(self, call: Call, work: Work, run_async: bool, on_end: Callable[[], None]) -> EventHandle | None:
        """Do both halves; `on_end` is called when the host needs to know no more about the call."""

    def send(self, call: Call, work: Work) -> None:
        """Do the first half."""

    def receive(self, call: Call, work: Work, on_end: Callable[[], None]) -> None:
        """Do the second half."""

    def refuse(self, call: Call, error: AnyEPError) -> None:
        """Tell the peers that this rank's call was wrong."""

    def clean(self, call: Call, sizes: LowLatencySizes) -> None:
        """Return when all ranks want these sizes and need nothing of earlier calls."""

    def wait_for_earlier(self) -> None:
        """Wait until earlier calls are over, where the next one would wait for them on the host."""

    def next_combine_rows(self, call: Call, slots: LowLatencySlots) -> torch.Tensor:
        """Where a combine with zero copy looks for its rows; waits until they may be written."""

    def before_unmask(self) -> None:
        """Wait for earlier calls, and raise their errors."""

    def unmask(self, work: Callable[[], int], generations: Array) -> None:
        """Run a round that unmasks ranks, after all earlier calls; it returns the call number to go on from.

        `generations` are those of the ranks, as the round leaves them.
        """
