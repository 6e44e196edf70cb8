"""The interface between modes and devices: shared data types, and the operations of a backend as protocols.
`low_latency.py` has what only low-latency mode needs.

A mode is a sequence of operations. Every operation enqueues: on CUDA onto a stream, on the CPU onto the queue
of the call. The host waits only in `NormalCall.totals`, in `NormalCall.grow`, and at the end of a synchronous
call on the CPU. An operation says what happens, not how many kernels it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch

from anyep.core.calls import Array, Call, Phase, Stall
from anyep.core.traffic import Traffic
from anyep.errors import AnyEPError
from anyep.events import EventHandle, EventOverlap
from anyep.layout import SOURCE_INDEX_BYTES, ControlBlock, Window, window_of
from anyep.sizes import Config, TokenLayout, token_layout

T = TypeVar("T")
MIN_WINDOW_BYTES: Final = 128
Rows = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""Rows, or a pair of rows and their scales."""


# Data


@dataclass(frozen=True)
class Payload:
    """What a dispatch sends: rows, optionally with scales, optionally with top-k ids and weights."""

    x: torch.Tensor
    scales: torch.Tensor | None = None
    topk_idx: torch.Tensor | None = None
    topk_weights: torch.Tensor | None = None
    source_bytes: int = SOURCE_INDEX_BYTES
    """What is kept about the origin of each received row."""
    num_tokens: int = field(init=False)
    token: TokenLayout = field(init=False)

    def __post_init__(self) -> None:
        # Computed at once, since every call needs them and a cached property takes a lock.
        num_tokens, hidden = self.x.shape
        num_scales = self.scales.shape[1] if self.scales is not None else 0
        num_topk = self.topk_idx.shape[1] if self.topk_idx is not None else 0
        token = token_layout(hidden * self.x.element_size(), num_scales, num_topk)
        object.__setattr__(self, "num_tokens", num_tokens)
        object.__setattr__(self, "token", token)

    def window(self, num_rows: int) -> Window:
        """The window of a receiver that gets `num_rows` rows."""
        return window_for(num_rows, self.token, self.source_bytes)

    def window_bytes(self, num_rows: int) -> int:
        """The bytes to allocate for that window."""
        return window_bytes(num_rows, self.token, self.source_bytes)

    @property
    def bytes_per_row(self) -> Array:
        """The bytes per row of each part of a window; read-only."""
        return _bytes_per_row(self.token, self.source_bytes)

    @property
    def bytes_beside_row(self) -> int:
        """The bytes in a window that belong to a row and are not its data."""
        return _bytes_beside_row(self.token, self.source_bytes)


def window_bytes(num_rows: int, token: TokenLayout, source_bytes: int) -> int:
    """The bytes to allocate for a window of rows of this layout."""
    return max(window_for(num_rows, token, source_bytes).num_bytes, MIN_WINDOW_BYTES)


def window_for(num_rows: int, token: TokenLayout, source_bytes: int) -> Window:
    """The window for rows of this layout."""
    return window_of(num_rows, token.hidden_bytes, token.num_topk, token.num_scales, source_bytes)


@lru_cache(maxsize=64)
def _bytes_per_row(token: TokenLayout, source_bytes: int) -> Array:
    window = window_of(1, token.hidden_bytes, token.num_topk, token.num_scales, source_bytes)
    return np.array(window.sizes, np.int64)


@lru_cache(maxsize=64)
def _bytes_beside_row(token: TokenLayout, source_bytes: int) -> int:
    return int(_bytes_per_row(token, source_bytes)[1:].sum())


class Routing(Protocol):
    """What a dispatch found out about which rank sends what to which; each backend has its own type."""

    @property
    def num_tokens(self) -> int:
        """The tokens that this rank sent."""

    @property
    def num_recv_rows(self) -> int:
        """The rows that the results have room for."""

    @property
    def num_channels(self) -> int: ...

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The handle that users keep."""


class TokenCounts(Protocol):
    """Where the tokens of a dispatch go, as the user counted them; each backend has its own type."""

    @property
    def num_experts(self) -> int: ...


R = TypeVar("R", bound=Routing)
"""A backend's own type of routing."""
R_co = TypeVar("R_co", bound=Routing, covariant=True)
C = TypeVar("C", bound=TokenCounts)
"""A backend's own type of counts."""
C_in = TypeVar("C_in", bound=TokenCounts, contravariant=True)


class Results(NamedTuple):
    """The tensors that a dispatch fills; `source` is what is known about the origin of each row."""

    x: torch.Tensor
    source: Any
    topk_idx: torch.Tensor | None
    topk_weights: torch.Tensor | None
    scales: torch.Tensor | None


class Totals(NamedTuple):
    """What the notify messages of a dispatch say about this rank."""

    num_rows: int
    tokens_per_expert: list[int]
    window: int
    """The window allocated for the rows; -1 if none of the offered windows is large enough."""
    may_grow: bool
    """Whether all hosts wait for their totals and some rank has no window: they can add windows together."""


class CombineInput(NamedTuple, Generic[R_co]):
    """The input of a combine: the experts' rows, optionally weights, their routing, and the initial values
    of the sums."""

    x: torch.Tensor
    routing: R_co
    topk_weights: torch.Tensor | None
    biases: tuple[torch.Tensor, ...]
    config: Config
    order: torch.Tensor | None = None
    """int32 [tokens, ranks]: the ranks in the order in which their rows are added; by default ascending. Rows
    from other nodes are added in no other order."""
    is_keyed: bool = False
    """Between nodes on CPUs: whether the last column of `topk_weights` is no weight, but the order: at each
    step rows are added with ascending ones, and a sum has the last of its rows'."""

    @property
    def token(self) -> TokenLayout:
        num_topk = self.topk_weights.shape[1] if self.topk_weights is not None else 0
        return token_layout(self.x.shape[1] * self.x.element_size(), 0, num_topk)


class CountedTokens(NamedTuple):
    """The arguments of a dispatch that counts its rows, as the user passed them."""

    x: Any
    topk_idx: Any
    topk_weights: Any
    num_tokens_per_rank: Any
    is_token_in_rank: Any
    num_tokens_per_expert: Any


class CountedDispatch(NamedTuple, Generic[R_co]):
    """What such a dispatch found out and fills."""

    results: Results
    tokens_per_expert: list[int]
    routing: R_co


class StartedDispatch(NamedTuple, Generic[R, C]):
    """Such a dispatch after its notify messages were sent; its totals are still to be read."""

    started: Call
    call: NormalCall[R, C]
    payload: Payload
    counts: C
    routing: R
    header: Array


class DispatchLayout(NamedTuple):
    """How many tokens go to each rank, node (None on one node) and expert, and which token goes where."""

    tokens_per_rank: torch.Tensor
    tokens_per_node: torch.Tensor | None
    tokens_per_expert: torch.Tensor
    in_rank: torch.Tensor
    event: EventHandle | None


# What a backend needs from the layers above it


class Control(Protocol):
    """The part of the control plane that operations use."""

    rank: int
    num_ranks: int
    num_spins: int
    timeout_s: float
    headers: Array
    sleepers: Array
    doorbells: Array
    wake_ups: Array
    regions: list[int]
    traffic: Traffic

    def peer_counters(self, block: ControlBlock, slot_set: int = 0) -> Array: ...
    def own_counters(self, block: ControlBlock, slot_set: int = 0) -> Array: ...
    def counters_at(self, ranks: Sequence[int], block: ControlBlock, writer: int) -> Array: ...
    @property
    def works_unobserved(self) -> bool: ...
    def next_number(self) -> int: ...
    @property
    def publish(self) -> Callable[[int, int, int], None]: ...
    def enter(self, call: Call, phase: Phase) -> None: ...
    def end(self, call: Call) -> None: ...
    def ended_by(self, call: Call, error: BaseException) -> None: ...
    def guarded(self, call: Call, work: Callable[[], T]) -> T: ...
    def refuse(self, call: Call, error: AnyEPError) -> None: ...
    def exchange(
        self,
        call: Call,
        header: Array,
        counts: tuple[Array, Array, Array] | None = None,
        annex: Callable[[], Mapping[int, Sequence[tuple[int, int]]]] = ...,
    ) -> Array: ...
    def read_counts(self, call: Call, matrix: Array, by_channel: Array, by_expert: Array) -> None: ...
    def signal(self, counters: Array, topic: int, value: int, wake_ups: Array | None = None) -> None: ...
    def wait_for_counters(
        self,
        call: Call,
        phase: Phase,
        counters: Array,
        topic: int,
        what: str,
        ranks: Sequence[int] | None = None,
        expected: int | None = None,
    ) -> None: ...
    def wait_until(
        self,
        call: Call,
        step: Callable[[int], int],
        stalled: Callable[[], Stall],
        progress: Callable[[], int] = ...,
        give_up: Callable[[Sequence[int], AnyEPError], None] | None = None,
    ) -> None: ...
    def poll_until_done(self, look: Callable[[], tuple[int, bool]]) -> int: ...


class Windows(Protocol):
    """The windows of this rank: memory that peers write and read, used by result tensors."""

    def offers(self, most: int) -> list[tuple[int, int]]:
        """Free windows as (offset, bytes), at most `most` of them."""

    def allocate(self, num_bytes: int) -> int | None:
        """The offset of a new window; None if there is no room."""

    def free(self, offset: int) -> None: ...


class Heap(Protocol):
    """The memory of one rank on a device, which its peers map."""

    address: int
    num_bytes: int

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor over a part of the heap."""

    def lend(
        self, offset: int, shape: tuple[int, ...], dtype: torch.dtype, on_death: Callable[[], None]
    ) -> torch.Tensor:
        """A tensor that may outlive the heap's owner; `on_death` is called when it and its views are gone."""


# Operations


class NormalCall(Protocol[R, C_in]):
    """The operations of one normal-mode call, in the order of the call."""

    def prepare_to_wait(self) -> None:
        """Called first in a call that uses `totals`; raises if the host cannot wait."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Memory for a result."""

    def new_routing(self, payload: Payload, counts: C_in, config: Config) -> R:
        """A routing that `notify` fills, without room for received rows yet."""

    def with_rows(self, routing: R, num_rows: int, is_counted: bool) -> R:
        """The routing with room for the data kept per row; `num_rows` was counted or given by the user."""

    def new_results(self, payload: Payload, routing: R, window: int) -> Results:
        """The tensors that a dispatch fills, x in the window at `window`, or (-1) elsewhere."""

    def begin(self) -> None:
        """Order the following operations after the previous event, or after the caller's earlier work."""

    def notify(
        self, header: Array, payload: Payload, counts: C_in, config: Config, routing: R, host_waits: bool
    ) -> None:
        """Exchange notify messages with counts, fill the routing, and choose a window for each receiver.

        If the host waits for the totals, a backend may send rows before the host knows them.
        """

    def notify_by_handle(self, header: Array, payload: Payload | None, routing: R) -> None:
        """Exchange short messages: all ranks must have handles of one dispatch. With a payload, choose
        windows for its rows; without, find the location of each rank's rows for a combine."""

    def totals(self, header: Array, payload: Payload) -> Totals:
        """Wait for the counts of this rank's rows in the messages."""

    def grow(self, payload: Payload, totals: Totals) -> int:
        """Add windows together with all ranks, if that is allowed; returns this rank's window."""

    def send_rows(
        self,
        payload: Payload,
        routing: R,
        results: Results,
        config: Config,
        experts_per_rank: int,
        is_new: bool,
    ) -> None:
        """Send the rows: into the receiver's window, or through its rings. `is_new`: not along a handle."""

    def stage(self, combined: CombineInput[R], header: Array) -> None:
        """Make the rows and weights readable by peers: in place if they are in a window, else as a copy."""

    def reduce(self, combined: CombineInput[R], out: torch.Tensor, out_weights: torch.Tensor | None) -> None:
        """Sum each token's rows at its source: in float32, in rank order, rounded once."""

    def barrier(self, phase: Phase) -> None:
        """Wait until every rank's rows have arrived (RECEIVE), or until every reader has read
        (ACKNOWLEDGE)."""

    def unpack(self, payload: Payload, routing: R, results: Results, is_new: bool, pads: bool) -> None:
        """Copy the data beside the rows out of the window; with `pads`, mark the rows that are not in use."""

    def end(self, *used: torch.Tensor | None) -> EventHandle | None:
        """All of the call is enqueued. `used` are tensors that must live until the call is over."""


class NormalOps(Protocol[R, C]):
    """Normal mode on one device."""

    @property
    def source_bytes(self) -> int:
        """What is kept about the origin of each received row."""

    @property
    def windows(self) -> Windows: ...

    def before(self, run_async: bool) -> None:
        """Check for an error of an earlier asynchronous call."""

    def raise_earlier(self, checks_ids: bool = False) -> None:
        """At the end of a call, raise the error of an earlier call that the host did not wait for."""

    def wait_until_readable(self, previous: EventOverlap | None) -> None:
        """Wait until the host may read the caller's arguments, if it has to."""

    def default_config(self, config: Config) -> Config:
        """The tuned config, as far as this device allows it."""

    def check_config(self, config: Config) -> None:
        """Warn if the device cannot do what a config requests."""

    def is_quiet(self) -> bool:
        """Whether calls may be repeated: calls work, no earlier one has failed, and nothing follows their
        phases or captures them in a graph."""

    def dispatch_again(self, x: Any, handle: Any, config: Config) -> Rows | None:
        """The rows of a dispatch with a handle and no other argument, made at once, with less work, if one
        like it was made before. None if not: then nothing has happened."""

    def combine_again(self, x: Any, handle: Any, config: Config, order: Any = None) -> torch.Tensor | None:
        """The same for a combine: its sums. `order` is that of `CombineInput`."""

    def counted_again(
        self, tokens: CountedTokens, config: Config
    ) -> CountedDispatch[R] | StartedDispatch[R, C] | None:
        """The same for a dispatch that counts its rows."""

    def aligned_payload(self, payload: Payload) -> Payload:
        """The payload with rows aligned as the device requires."""

    def aligned_input(self, combined: CombineInput[R]) -> CombineInput[R]:
        """The same for a combine."""

    def layout(
        self, topk_idx: torch.Tensor, num_experts: int, previous: EventOverlap | None, run_async: bool
    ) -> DispatchLayout: ...

    def routing_of(self, handle: Any, last: tuple[Any, R] | None) -> R:
        """The routing of a user's handle; `last` is the last handle that a dispatch returned, and its
        routing."""

    def outputs(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Memory for rows that a combine will read: in a window if one has room, so that nothing is staged.

        Work of the caller that follows may write to it."""

    def counts_of(
        self,
        payload: Payload,
        in_rank: torch.Tensor,
        per_rank: torch.Tensor,
        per_node: Any,
        per_expert: torch.Tensor,
        num_channels: int,
    ) -> C:
        """Where the tokens go; counts that contradict each other are refused, here or by a kernel."""

    def refuse(self, call: Call, error: AnyEPError) -> None:
        """Tell the peers that this rank refused its call."""

    def start(self, call: Call, previous: EventOverlap | None, run_async: bool) -> NormalCall[R, C]:
        """The operations of a call."""
