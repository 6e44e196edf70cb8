"""The operations of normal mode on a GPU: kernels on the communication stream, which do all the waiting.

The operations of a call are in normal_call.py. The host waits only for the totals of a dispatch; other calls
can be captured in CUDA graphs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, Protocol

import torch

from anyep.backends.base import (
    CombineInput,
    CountedDispatch,
    CountedTokens,
    DispatchLayout,
    Payload,
    Rows,
    StartedDispatch,
)
from anyep.backends.cpu.kernels.driver_calls import NO_STREAM
from anyep.backends.cuda import constants
from anyep.backends.cuda.batch import Prepared, Recipes
from anyep.backends.cuda.counted_repeats import CountedRepeats
from anyep.backends.cuda.device_control import DeviceControl
from anyep.backends.cuda.node_call import GpuNodeCall
from anyep.backends.cuda.node_kernels import NodeKernels
from anyep.backends.cuda.node_routing import checked_node_counts, checked_node_handle
from anyep.backends.cuda.normal_call import GpuCall
from anyep.backends.cuda.repeats import Repeats
from anyep.backends.cuda.routing import GpuCounts, GpuRouting, checked_handle, known_routing
from anyep.backends.cuda.routing_kernels import RoutingKernels
from anyep.backends.cuda.row_kernels import RowKernels
from anyep.backends.cuda.templates import template
from anyep.backends.cuda.tiles import tiles_for
from anyep.backends.cuda.tuned import Key, with_tuned
from anyep.backends.cuda.windows import GpuWindows
from anyep.core.calls import Call
from anyep.core.rings import Rings
from anyep.errors import AnyEPError, InvalidCall, no_expert
from anyep.events import EventOverlap
from anyep.layout import SOURCE_INDEX_BYTES
from anyep.sizes import SOURCE_META_BYTES, Config

log = logging.getLogger("anyep")
MAX_LAYOUTS: Final = 256
OF_LAYOUT: Final = "topk_idx", "by_rank", "by_expert", "in_rank", "by_node", "num_tokens"
"""The inputs of a layout, in the order in which they are passed."""


class Reporter(Protocol):
    """Reads the reports of kernels."""

    @property
    def has_news(self) -> bool: ...
    def reported(self) -> AnyEPError | None: ...
    def raise_reported(self) -> None: ...
    def refuse(self, call: Call, error: AnyEPError) -> None: ...


class Sms(Protocol):
    """How the ranks of a GPU share its SMs."""

    ranks_on_gpu: int
    share_of_sms: int
    least_share_of_sms: int


class _Layout(NamedTuple):
    """What layouts of the same sizes have in common."""

    results: Sequence[torch.Tensor]
    """Templates: tokens per rank and per expert, which token goes to which rank, and, where there are several
    nodes, tokens per node."""
    kernel: Prepared


class GpuNormalOps:
    """Normal mode on a GPU."""

    def __init__(
        self,
        device_control: DeviceControl,
        reports: Reporter,
        gpu_windows: GpuWindows,
        grow: Callable[[Call, int], int | None],
        sms: Sms,
        all_rings: Rings,
    ) -> None:
        """`grow` adds windows of a number of bytes, in a call and together with all ranks; it returns the
        offset where they begin."""
        self.device_control = device_control
        self.windows: GpuWindows = gpu_windows
        self.gpu = device_control.gpu
        self.grow = grow
        self._reports = reports
        self._rank, self.num_ranks = device_control.rank, device_control.num_ranks
        self._sms = sms
        self._warned_sms: set[int] = set()
        """Values of `num_sms` above this rank's share for which a warning was logged."""
        tiles = with_tuned(
            tiles_for(self.num_ranks, bool(gpu_windows.num_bytes)),
            Key(self.gpu.name, self.num_ranks, sms.ranks_on_gpu),
        )
        self.rows = RowKernels(
            device_control.kernels, all_rings, tiles, sms.share_of_sms, self.gpu.rounds_in_hardware
        )
        self.kernels = RoutingKernels(device_control.kernels)
        self.topology = device_control.topology
        self._nodes: NodeKernels | None = None
        """Only between nodes."""
        self.source_bytes = SOURCE_INDEX_BYTES
        if all_rings.network is not None:
            self._nodes = NodeKernels(device_control, self.rows, all_rings.network)
            self.source_bytes = SOURCE_META_BYTES
        self.repeats = Repeats(device_control, gpu_windows)
        self.counted_repeats = CountedRepeats(device_control, gpu_windows)
        self._smaller_configs: dict[int, tuple[Config, Config]] = {}
        self._unheard: AnyEPError | None = None
        """The error of an earlier call that has not been raised yet."""
        self._layout_report = self.gpu.words(constants.NUM_LAYOUT_WORDS)
        """Where the kernel of a layout reports an id that is not an expert."""
        self._layout_words = self._layout_report.data
        """The same, for a look that takes less time."""
        self._told = int(self._layout_report.ctypes.data)
        self._layouts: dict[tuple[int, int, int], _Layout] = {}
        """By tokens, choices of each, and experts."""
        self.scratch_digests = self.gpu.table([0] * (2 * self.num_ranks))
        """Digests of a handle without known digests; calls share them, because they run in stream order."""

    @property
    def stream(self) -> Any:
        """The CUDA stream that calls run on."""
        return self.gpu.stream.stream

    # Before and after calls

    def before(self, run_async: bool) -> None:
        """Look for an error of an earlier call. It is raised when this call is launched. If this call were
        refused instead, the peers would learn of that later, refuse another call, and so on."""
        if self._unheard is None:
            self._unheard = self._reports.reported()
            if self._unheard is not None:
                self.forget_layout()

    def raise_earlier(self, checks_ids: bool = False) -> None:
        """Raise the error of an earlier call. A call that checks top-k ids itself reports more about them,
        and on all ranks, than a layout before it, which reports on this rank alone."""
        if self._unheard is not None:
            error, self._unheard = self._unheard, None
            try:
                raise error
            finally:
                # Its traceback refers to this frame, and through it to those of all callers.
                del error
        if not checks_ids:
            self._raise_layout()

    def raise_reported(self) -> None:
        self._reports.raise_reported()

    def wait_until_readable(self, previous: EventOverlap | None) -> None:
        """Nothing to do: the host does not read the caller's tensors; kernels read them in stream order."""

    def refuse(self, call: Call, error: AnyEPError) -> None:
        self._reports.refuse(call, error)

    def check_config(self, config: Config) -> None:
        """Warn once if this rank has fewer SMs than `num_sms`; any number of channels works."""
        if self._nodes is not None and not self.windows.num_bytes:
            raise InvalidCall(
                "between nodes rows on GPUs go to windows, and this Buffer has none: leave out"
                " num_window_bytes=0 and heap='host'"
            )
        num_sms = config.num_sms
        if num_sms <= self._sms.share_of_sms or num_sms in self._warned_sms:
            return
        self._warned_sms.add(num_sms)
        ranks = self._sms.ranks_on_gpu
        log.warning(
            "rank %d uses %d SMs instead of num_sms=%d: %s on a GPU of %d SMs, and all must run at once."
            " The %d channels of the config, the shapes of its handles and all results are as they would be"
            " with %d SMs",
            self._rank,
            self._sms.share_of_sms,
            num_sms,
            "there is one rank" if ranks == 1 else f"there are {ranks} ranks",
            self.gpu.num_sms,
            config.num_channels,
            num_sms,
        )

    def default_config(self, config: Config) -> Config:
        """The tuned config, with at most the smallest share of SMs of any rank: channels are equal on all."""
        if config.num_sms <= self._sms.least_share_of_sms:
            return config
        known = self._smaller_configs.get(id(config))
        if known is None:
            known = (config, dataclasses.replace(config, num_sms=self._sms.least_share_of_sms))
            self._smaller_configs[id(config)] = known
        return known[1]

    def dispatch_again(self, x: Any, handle: Any, config: Config) -> Rows | None:
        return self.repeats.dispatch(x, handle, config, self.is_quiet)

    def combine_again(self, x: Any, handle: Any, config: Config, order: Any = None) -> torch.Tensor | None:
        return self.repeats.combine(x, handle, config, self.is_quiet, order)

    def counted_again(
        self, tokens: CountedTokens, config: Config
    ) -> CountedDispatch[GpuRouting] | StartedDispatch[GpuRouting, GpuCounts] | None:
        return self.counted_repeats.dispatch(self, tokens, config)

    def is_quiet(self) -> bool:
        return (
            self._has_no_error()
            and not self.gpu.stream.is_capturing()
            and self.device_control.control.works_unobserved
        )

    def _has_no_error(self) -> bool:
        """Whether no earlier call has failed."""
        return self._unheard is None and self._layouts_were_right() and not self._reports.has_news

    def _layouts_were_right(self) -> bool:
        words = self._layout_words
        return bool(words[constants.NUM_REPORTS] == words[constants.NUM_READ])

    def aligned_payload(self, payload: Payload) -> Payload:
        x = _aligned(payload.x)
        return payload if x is payload.x else dataclasses.replace(payload, x=x)

    def aligned_input(self, combined: CombineInput[GpuRouting]) -> CombineInput[GpuRouting]:
        biases = tuple(_aligned(bias) for bias in combined.biases)
        return combined._replace(x=_aligned(combined.x), biases=biases)

    def routing_of(self, handle: Any, last: tuple[Any, Any] | None) -> Any:
        """The routing of a user's handle. One that a dispatch of as many ranks filled need not be checked."""
        if self._nodes is not None:
            return checked_node_handle(handle, self.topology, self.gpu.device)
        known = known_routing(handle)
        if known is not None and known.num_ranks == self.num_ranks and known.is_on(self.gpu.device):
            return known
        if last is not None and handle is last[0]:
            return last[1]._replace(digests=None)
        return checked_handle(handle, self.num_ranks, self.gpu.device)

    def outputs(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        num_bytes = math.prod(shape) * dtype.itemsize
        # No work of a call follows here, for which windows that come back could wait.
        self.windows.followed = NO_STREAM
        window = self.windows.allocate(num_bytes) if num_bytes else None
        if window is None:
            return self.gpu.empty(shape, dtype)
        if self.gpu.stream.is_capturing():
            # A stream takes part in a capture from when it first waits for one that does.
            self.gpu.stream.begin(None)
        # Earlier calls may have used the window, and their streams run in their own time.
        self.gpu.stream.end(False)
        (rows,) = self.windows.lend(window, num_bytes, [(0, shape, dtype)])
        return rows

    def counts_of(
        self,
        payload: Payload,
        in_rank: torch.Tensor,
        per_rank: torch.Tensor,
        per_node: Any,
        per_expert: torch.Tensor,
        num_channels: int,
    ) -> GpuCounts:
        """Where the tokens go; kernels check that the counts are consistent."""
        if self._nodes is None or per_node is None:
            return GpuCounts(in_rank, per_rank, per_expert)
        return GpuCounts(in_rank, per_rank, per_expert, checked_node_counts(per_node, self.topology))

    def start(self, call: Call, previous: EventOverlap | None, run_async: bool) -> GpuCall:
        follows_event = previous is not None and previous.event is not None
        self.windows.followed = NO_STREAM if follows_event else self.gpu.stream.caller()
        if self._nodes is not None:
            return GpuNodeCall(self, call, previous, run_async, self._nodes)
        return GpuCall(self, call, previous, run_async)

    # Layout

    def layout(
        self, topk_idx: torch.Tensor, num_experts: int, previous: EventOverlap | None, run_async: bool
    ) -> DispatchLayout:
        if not self._layouts_were_right():
            self._raise_layout()
        gpu, stream = self.gpu, self.gpu.stream
        num_tokens, num_topk = topk_idx.shape
        kind = num_tokens, num_topk, num_experts
        known = self._layouts.get(kind) or self._new_layout(kind)
        if not run_async and previous is None:
            per_rank, per_expert, in_rank, *rest = map(gpu.empty_like, known.results)
            by_node = rest[0] if rest else None
            # No peer takes part: as nothing is to overlap, the kernel runs on the caller's stream.
            moment = stream.moment(True, True) if stream.is_capturing() else stream.beside_caller()
            known.kernel.run(moment, (topk_idx, per_rank, per_expert, in_rank, by_node, num_tokens))
            return DispatchLayout(per_rank, by_node, per_expert, in_rank, None)
        with gpu.on_communication_stream() if previous is not None else contextlib.nullcontext():
            per_rank, per_expert, in_rank, *rest = map(gpu.empty_like, known.results)
        by_node = rest[0] if rest else None
        moment = stream.moment(True, not run_async, previous)
        known.kernel.run(moment, (topk_idx, per_rank, per_expert, in_rank, by_node, num_tokens))
        self.keep(run_async, previous, topk_idx, per_rank, by_node, per_expert, in_rank)
        event = stream.end(True) if run_async else None
        return DispatchLayout(per_rank, by_node, per_expert, in_rank, event)

    def _new_layout(self, kind: tuple[int, int, int]) -> _Layout:
        num_tokens, num_topk, num_experts = kind
        gpu, num_ranks = self.gpu, self.num_ranks
        results = [
            template(gpu, (num_ranks,), torch.int32),
            template(gpu, (num_experts,), torch.int32),
            template(gpu, (num_tokens, num_ranks), torch.bool),
        ]
        recipes: Recipes = ((self.kernels.count_layout, num_topk, num_experts // num_ranks, self._told),)
        if self._nodes is not None:
            results.append(template(gpu, (self.topology.num_nodes,), torch.int32))
            recipes += ((self._nodes.count_nodes,),)
        if len(self._layouts) >= MAX_LAYOUTS:
            # The oldest one.
            del self._layouts[next(iter(self._layouts))]
        made = self._layouts[kind] = _Layout(
            results, Prepared(self.device_control.batches, recipes, OF_LAYOUT)
        )
        return made

    def _raise_layout(self) -> None:
        """Raise the error that the kernel of an earlier layout reported."""
        if self._layouts_were_right() or self.gpu.stream.is_capturing():
            return
        words = self._layout_report
        at = (
            constants.LAYOUT_TOKEN,
            constants.LAYOUT_COLUMN,
            constants.LAYOUT_VALUE,
            constants.LAYOUT_EXPERTS,
        )
        error = no_expert(*(int(words[index]) for index in at))
        self.forget_layout()
        raise error

    def forget_layout(self) -> None:
        """Drop the report of a layout: a later dispatch has reported the same error, or a worse one."""
        self._layout_report[constants.NUM_READ] = self._layout_report[constants.NUM_REPORTS]

    # Memory

    def empty(
        self, previous: EventOverlap | None, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        """Allocate a result. This must happen before communication waits for the caller's stream, whose
        pending work may use the same memory (and torch may fill it). If communication does not wait for that
        stream, the memory is allocated on the communication stream."""
        if previous is None:
            return self.gpu.empty(shape, dtype)
        with self.gpu.on_communication_stream():
            return self.gpu.empty(shape, dtype)

    def keep(self, run_async: bool, previous: EventOverlap | None, *tensors: torch.Tensor | None) -> None:
        """Keep tensors until both streams are done with them, if the streams do not wait for each other."""
        if run_async or previous is not None:
            for tensor in tensors:
                if tensor is not None:
                    self.gpu.used_by_both(tensor)


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself if it begins at a multiple of 16 bytes, as kernels expect; otherwise a copy."""
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()
