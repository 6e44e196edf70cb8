"""`HybridEPBuffer`, the API of DeepEP's hybrid-ep branch, over `ElasticBuffer`.

    buffer = HybridEPBuffer(group, hidden_dim=7168, max_num_of_tokens_per_rank=4096, num_local_experts=8)
    rows, row_probs, _, counts, handle = buffer.dispatch_with_permute(
        hidden=x, routing_map=routing_map, probs=probs, pad_multiple=16
    )
    combined, probs_back = buffer.combine_with_unpermute(hidden=outputs, probs=row_probs, handle=handle)

Rows by expert are an expanded dispatch whose padding is zeroed; rows by token a compact one. Routing as a map
becomes the choices of tokens (`hybrid_routing`), which travel with the rows.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, NamedTuple, TypeVar

import torch

from anyep.api import hybrid_routing as routing
from anyep.api.arguments import check_devices
from anyep.api.elastic import ElasticBuffer
from anyep.api.elastic_arguments import ring_bytes
from anyep.api.elastic_handle import EPHandle
from anyep.api.hybrid_handle import BufferConfig, Configurer, HybridHandle, checked_handle
from anyep.core.calls import Kind
from anyep.core.elastic_sizes import BUFFER_ALIGNMENT
from anyep.errors import InvalidCall, whole_number
from anyep.session import Session
from anyep.sizes import NUM_MAX_TOPK, align, check_num_experts

T = TypeVar("T")
DEFAULT_TOPK: Final = 32
MOST_BYTES: Final = 1 << 62
MOST_ROWS: Final = 1 << 30
"""Rows of all ranks, in a call whose host learns their number."""
INTEGERS: Final = (torch.int64, torch.int32, torch.int16, torch.int8)
Dispatched = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, HybridHandle]
Permuted = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, HybridHandle]


class _Inputs(NamedTuple):
    """The checked arguments of a dispatch."""

    x: Any
    handle: EPHandle | None
    """The routing of an earlier dispatch."""
    num_experts: int
    ids: torch.Tensor
    """The experts of each token."""
    weights: torch.Tensor | None
    loses_choices: torch.Tensor | None = None
    """Whether a token of a routing map has more experts than travel."""

    @property
    def routing(self) -> dict[str, Any]:
        """What a dispatch of `ElasticBuffer` takes besides."""
        if self.handle is not None:
            return {"topk_weights": self.weights, "handle": self.handle}
        return {"topk_idx": self.ids, "topk_weights": self.weights, "num_experts": self.num_experts}


class HybridEPBuffer:
    """Communication between the ranks of a process group, with routing as maps of tokens and experts.

    The constructor is collective, and every rank must make the same calls in the same order. Ranks may have
    different numbers of tokens, and none.

    Args:
        group: The process group of the ranks. Gloo is enough.
        hidden_dim: The values of a row.
        max_num_of_tokens_per_rank: The most tokens that a rank sends in a non-blocking call, for which it
            must be the same on all ranks. Other calls take more, too.
        num_local_experts: The experts of each rank.
        use_fp8: Kept in `config`; both kinds of rows work either way.
        num_sms_dispatch_api: SMs of a dispatch; None: the library chooses.
        num_sms_combine_api: Accepted and ignored: a combine takes the SMs of its dispatch.
        num_sms_preprocessing_api: Accepted and ignored, as are the next six.
        num_blocks_permute: Ignored.
        num_blocks_unpermute: Ignored.
        load_cached_kernels: Ignored: kernels are always kept.
        use_shared_buffer: Ignored.
        enable_custom_allgather: Ignored.
        num_of_hybrid_ep_ranks_per_nvlink_domain: Ranks of a node; None: as for `Buffer`.
        use_mnnvl: Ignored.
        device: As for `Buffer`.
        num_topk: The most experts of a token in a routing map, up to 128; 0: 32, or all experts if there are
            fewer. The same on all ranks. What travels with a row grows by 12 bytes for each.
        num_window_bytes: As for `Buffer`.
    """

    def __init__(
        self,
        group: Any,
        hidden_dim: int,
        max_num_of_tokens_per_rank: int,
        num_local_experts: int,
        use_fp8: bool = False,
        num_sms_dispatch_api: int | None = None,
        num_sms_combine_api: int | None = None,
        num_sms_preprocessing_api: int | None = None,
        num_blocks_permute: int | None = None,
        num_blocks_unpermute: int | None = None,
        load_cached_kernels: bool = False,
        use_shared_buffer: bool = True,
        enable_custom_allgather: bool = False,
        num_of_hybrid_ep_ranks_per_nvlink_domain: int | None = None,
        use_mnnvl: bool | None = None,
        *,
        device: str | torch.device | None = None,
        num_topk: int = 0,
        num_window_bytes: int | None = None,
    ) -> None:
        hidden = whole_number("hidden_dim", hidden_dim, minimum=1)
        most = whole_number("max_num_of_tokens_per_rank", max_num_of_tokens_per_rank, minimum=1)
        local_experts = whole_number("num_local_experts", num_local_experts, minimum=1)
        self._num_topk = whole_number("num_topk", num_topk, minimum=0) or DEFAULT_TOPK
        self._num_sms = whole_number("num_sms_dispatch_api", num_sms_dispatch_api or 0, minimum=0)
        # Ranks may have been told different numbers of tokens, on which nothing here depends.
        domain = num_of_hybrid_ep_ranks_per_nvlink_domain
        within, _ = ring_bytes(MOST_BYTES, hidden, group, domain)
        self._elastic = ElasticBuffer(
            group,
            align(within, BUFFER_ALIGNMENT),
            hidden=hidden,
            device=device,
            ranks_per_node=domain,
            num_window_bytes=num_window_bytes,
        )
        self.group = group
        self.rank, self.group_size = self._elastic.rank_idx, self._elastic.num_ranks
        self.num_of_hybrid_ep_ranks_per_nvlink_domain = self._elastic.num_nvlink_ranks
        self.num_of_nodes = self.group_size // self.num_of_hybrid_ep_ranks_per_nvlink_domain
        self.node_rank, self.local_rank = divmod(self.rank, self.num_of_hybrid_ep_ranks_per_nvlink_domain)
        per_node = self.num_of_hybrid_ep_ranks_per_nvlink_domain
        self.config = BufferConfig(
            *(hidden, most, local_experts, per_node, self.num_of_nodes), use_fp8=bool(use_fp8)
        )
        self.configurer = Configurer(self.config)

    @property
    def runtime(self) -> Session | None:
        """What this buffer owns; None after `destroy`."""
        return self._elastic.runtime

    def empty_jit_cache(self) -> None:
        """Do nothing: AnyEP keeps its kernels in the user's cache folder, where they harm no program."""

    def update_template_config(
        self,
        hidden_dim: int | None = None,
        num_of_tokens_per_rank: int | None = None,
        num_local_experts: int | None = None,
        pad_multiple: int | None = None,
        use_fp8: bool | None = None,
        fuse_permute_dispatch: bool = False,
        **_: Any,
    ) -> BufferConfig:
        """Change sizes for the calls that follow, on all ranks; returns them all.

        Args:
            hidden_dim: The values of a row.
            num_of_tokens_per_rank: The most tokens that a rank sends in a non-blocking call.
            num_local_experts: The experts of each rank.
            pad_multiple: What groups are padded to where a call does not say it.
            use_fp8: As for the constructor.
            fuse_permute_dispatch: Accepted and ignored.
        """
        config = self.config
        for name, field, value in (
            ("hidden_dim", "hidden_dim", hidden_dim),
            ("num_of_tokens_per_rank", "max_num_of_tokens_per_rank", num_of_tokens_per_rank),
            ("num_local_experts", "num_of_experts_per_rank", num_local_experts),
            ("pad_multiple", "pad_multiple", pad_multiple),
        ):
            if value is not None:
                setattr(config, field, whole_number(name, value, minimum=1))
        if use_fp8 is not None:
            config.use_fp8 = bool(use_fp8)
        return config

    # Rows by token

    def dispatch(
        self,
        hidden: torch.Tensor,
        scaling_factor: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        num_of_experts: int | None = None,
        probs: torch.Tensor | None = None,
        routing_map: torch.Tensor | None = None,
        num_dispatched_tokens_tensor: torch.Tensor | None = None,
        num_dispatched_tokens: int | None = None,
        handle: HybridHandle | None = None,
    ) -> Dispatched:
        """Send each token once to every rank that holds one of its experts.

        Args:
            hidden: Rows [tokens, hidden]; with a scaling factor values of 1 byte.
            scaling_factor: float32 [tokens, scales], for FP8.
            topk_idx: Integers [tokens, top-k]; below 0 is "no expert". The same top-k on all ranks.
            topk_weights: float32 [tokens, top-k]; on all ranks or on none.
            num_of_experts: The experts of all ranks together, if not those of the buffer.
            probs: float32 [tokens, experts], with a routing map; on all ranks or on none.
            routing_map: bool [tokens, experts].
            num_dispatched_tokens_tensor: Accepted and ignored.
            num_dispatched_tokens: Accepted and ignored: the host learns the number.
            handle: That of an earlier dispatch, whose routing is used again.

        Returns:
            Rows in the order of source ranks and their tokens; their probabilities [rows, experts of the
            node], in the columns of this rank's experts (None without `probs`); scaling factors or None; the
            handle.
        """
        inputs = self._told(
            lambda: self._inputs(
                *(hidden, scaling_factor, topk_idx, topk_weights, num_of_experts),
                *(probs, routing_map, handle, False, True),
            ),
            _kind_of(handle),
        )
        most = None if handle else self._most_tokens(inputs.ids)
        rows, ids, weights, found, _ = self._elastic.dispatch(
            inputs.x, num_max_tokens_per_rank=most, num_sms=self._num_sms, **inputs.routing
        )
        assert ids is not None
        data, scales = rows if isinstance(rows, tuple) else (rows, None)
        local = inputs.num_experts // self.group_size
        row_probs = None
        if inputs.weights is not None and weights is not None:
            of_node = torch.where(ids >= 0, ids + self.local_rank * local, -1)
            row_probs = routing.spread(weights, of_node, local * self._ranks_per_node)
        if handle is None:
            local_map, _ = routing.indices_to_map(ids, None, len(ids), local)
            num_rows = found.psum_num_recv_tokens_per_scaleup_rank[-1:]
            parts = (found.dst_buffer_slot_idx, None, None, num_rows, local_map, len(hidden), self.config)
            handle = HybridHandle.of(parts, found)
        return data, row_probs, scales, handle

    def combine(
        self, hidden: torch.Tensor, probs: torch.Tensor | None = None, handle: HybridHandle | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Add up each token's rows at its source.

        Args:
            hidden: A row for each that the dispatch gave.
            probs: float32 [rows, experts of the node]; the columns of this rank's experts are carried back.
            handle: That of the dispatch.

        Returns:
            The sums [tokens, hidden], and the probabilities [tokens, experts] (None without `probs`).
        """

        def check() -> tuple[EPHandle, torch.Tensor | None]:
            known = checked_handle(handle, is_permuted=False)
            if probs is None:
                return known, None
            self._check_devices(probs=probs)
            local = known.num_experts // self.group_size
            shape = (known.num_recv_tokens, local * self._ranks_per_node)
            _check("probs", probs, torch.float32, shape)
            columns = probs[:, self.local_rank * local : (self.local_rank + 1) * local]
            return known, routing.gathered(columns, known.recv_topk_idx)

        return self._combined(hidden, *self._told(check, Kind.COMBINE))

    # Rows by expert

    def dispatch_with_permute(
        self,
        *,
        hidden: torch.Tensor,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        num_of_experts_per_rank: int | None = None,
        num_of_experts: int | None = None,
        use_fp8: bool | None = None,
        routing_map: torch.Tensor | None = None,
        probs: torch.Tensor | None = None,
        scaling_factor: torch.Tensor | None = None,
        num_permuted_tokens: int | None = None,
        pad_multiple: int | None = None,
        handle: HybridHandle | None = None,
        non_blocking: bool = False,
        fuse_permute_dispatch: bool = False,
        num_dispatched_tokens: int | None = None,
        use_host_meta: bool | None = None,
    ) -> Permuted:
        """Send each token to the ranks of its experts, where it has one row for each of them.

        Args:
            hidden: As in `dispatch`.
            topk_idx: As in `dispatch`.
            topk_weights: As in `dispatch`.
            num_of_experts_per_rank: The experts of each rank, if not those of the buffer.
            num_of_experts: As in `dispatch`.
            use_fp8: If True, `hidden` must have values of 1 byte.
            routing_map: As in `dispatch`.
            probs: As in `dispatch`.
            scaling_factor: As in `dispatch`.
            num_permuted_tokens: The rows of the result, a multiple of `pad_multiple`; None or below 0: as
                many as there are. Rows that do not fit are dropped, and the overflow flag, the last part of
                the handle, is 1. With a handle: as many as its dispatch gave, or None.
            pad_multiple: Each group of rows is padded to a multiple of this with zero rows; None or 0: that
                of the buffer, which is 1 unless `update_template_config` has changed it. With a handle that
                of its dispatch holds.
            handle: That of an earlier dispatch, whose routing is used again.
            non_blocking: The host does not wait, so that the call can be captured in a CUDA graph; needs
                `num_permuted_tokens`. Tokens of a map with more experts than the buffer's `num_topk` lose the
                last ones, and the overflow flag is 1.
            fuse_permute_dispatch: Accepted and ignored.
            num_dispatched_tokens: Accepted and ignored.
            use_host_meta: Accepted and ignored.

        Returns:
            Rows grouped by expert, in a group ordered by source rank and token; the probability of each row
            (None without `probs`); scaling factors or None; int64 [local experts], the rows of each group
            with their padding, on the host unless `non_blocking`, None with a handle; the handle.
        """

        def check() -> tuple[_Inputs, int, int | None]:
            alignment = whole_number("pad_multiple", pad_multiple or self.config.pad_multiple, minimum=1)
            capacity = _capacity(num_permuted_tokens)
            most = self.config.max_num_of_tokens_per_rank
            if non_blocking and handle is None and isinstance(hidden, torch.Tensor) and len(hidden) > most:
                raise InvalidCall(
                    f"hidden has {len(hidden)} tokens, but a non-blocking call may have {most}: call"
                    f" update_template_config(num_of_tokens_per_rank={len(hidden)}) on all ranks"
                )
            if non_blocking and capacity is None and handle is None:
                raise InvalidCall(
                    "non_blocking needs num_permuted_tokens, since the host does not learn how many rows"
                    " there are: pass the rows that the result is to have"
                )
            if capacity is not None and handle is None and capacity % alignment:
                raise InvalidCall(
                    f"num_permuted_tokens is {capacity}: it must be a multiple of pad_multiple, {alignment}"
                )
            experts = num_of_experts
            if num_of_experts_per_rank is not None:
                per_rank = whole_number("num_of_experts_per_rank", num_of_experts_per_rank, minimum=1)
                experts = per_rank * self.group_size
                if num_of_experts not in (None, experts):
                    raise InvalidCall(
                        f"num_of_experts is {num_of_experts}, but num_of_experts_per_rank is {per_rank} on"
                        f" {self.group_size} ranks: leave one of them out"
                    )
            inputs = self._inputs(
                *(hidden, scaling_factor, topk_idx, topk_weights, experts),
                *(probs, routing_map, handle, True, not non_blocking),
            )
            if use_fp8 and hidden.element_size() != 1:
                raise InvalidCall(f"use_fp8 is set, but hidden is of {hidden.dtype}: pass values of 1 byte")
            return inputs, alignment, capacity

        inputs, alignment, capacity = self._told(check, _kind_of(handle))
        how: dict[str, Any] = {}
        if handle is None:
            most = self.config.max_num_of_tokens_per_rank if non_blocking else self._most_tokens(inputs.ids)
            how = {
                "num_max_tokens_per_rank": most,
                "expert_alignment": alignment,
                "do_cpu_sync": not non_blocking,
            }
        rows, _, weights, found, _ = self._elastic.dispatch(
            inputs.x,
            num_sms=self._num_sms,
            do_expand=True,
            do_zero_padding=True,
            num_expanded_tokens=capacity,
            **how,
            **inputs.routing,
        )
        data, scales = rows if isinstance(rows, tuple) else (rows, None)
        if handle is not None:
            return data, weights, scales, None, handle
        counts = found.num_unaligned_recv_tokens_per_expert
        if not non_blocking:
            counts = counts.cpu()
        by_expert = routing.rows_that_fit(counts, alignment, capacity)
        flag = _overflow(found, inputs.loses_choices, capacity)
        num_rows = found.psum_num_recv_tokens_per_scaleup_rank[-1:]
        maps = (found.dst_buffer_slot_idx, None, None, num_rows, None, None, found.recv_src_metadata[:, 2:])
        handle = HybridHandle.of((*maps, counts, len(hidden), self.config, flag), found)
        return data, weights, scales, by_expert, handle

    def combine_with_unpermute(
        self,
        *,
        hidden: torch.Tensor,
        probs: torch.Tensor | None = None,
        handle: HybridHandle | None = None,
        pad_multiple: int | None = None,
        fuse_unpermute_combine: bool = False,
        num_dispatched_tokens: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Add up each token's rows: on their rank in the order of its experts, then at its source.

        Args:
            hidden: A row for each that `dispatch_with_permute` gave.
            probs: float32 [rows]; they are carried back.
            handle: That of the dispatch.
            pad_multiple: Accepted and ignored: that of the handle holds.
            fuse_unpermute_combine: Accepted and ignored.
            num_dispatched_tokens: Accepted and ignored.

        Returns:
            As `combine`.
        """

        def check() -> EPHandle:
            known = checked_handle(handle, is_permuted=True)
            if probs is not None:
                self._check_devices(probs=probs)
                _check("probs", probs, torch.float32, (known.num_expanded_tokens,))
            return known

        return self._combined(hidden, self._told(check, Kind.COMBINE), probs)

    # The end

    def destroy(self) -> None:
        """Release what the buffer holds; every rank calls it. Results stay valid."""
        self._elastic.destroy()

    def __enter__(self) -> HybridEPBuffer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._elastic.__exit__(kind, error, traceback)

    def __repr__(self) -> str:
        """The rank, place, sizes and state on one line; does not wait."""
        return repr(self._elastic)

    # Helpers

    @property
    def _ranks_per_node(self) -> int:
        return self.num_of_hybrid_ep_ranks_per_nvlink_domain

    def _most_tokens(self, ids: torch.Tensor) -> int:
        """What a blocking call says to be the most tokens of a rank: the same on all ranks, and enough."""
        return int(MOST_ROWS // (self.group_size * max(1, ids.shape[1])))

    def _check_devices(self, **tensors: Any) -> None:
        check_devices(self._elastic._device, type(self).__name__, **tensors)

    def _told(self, check: Callable[[], T], kind: Kind) -> T:
        """What `check` returns; if it refuses the arguments, the peers are told."""
        try:
            return check()
        except BaseException as error:
            session = self._elastic._session()
            session.refuse(session.control.begin(kind), error, session.normal.ops.refuse)
            raise

    def _inputs(
        self,
        hidden: Any,
        scaling_factor: Any,
        topk_idx: Any,
        topk_weights: Any,
        num_of_experts: int | None,
        probs: Any,
        routing_map: Any,
        handle: Any,
        is_permuted: bool,
        host_waits: bool,
    ) -> _Inputs:
        """The rows of a dispatch, and where its tokens go."""
        if not isinstance(hidden, torch.Tensor) or hidden.dim() != 2:
            raise InvalidCall("hidden must be a tensor [tokens, hidden]")
        self._check_devices(hidden=hidden, routing_map=routing_map, probs=probs, topk_idx=topk_idx)
        # Gradients are often not contiguous.
        rows = _contiguous(hidden)
        x = rows if scaling_factor is None else (rows, scaling_factor)
        if topk_weights is not None and (routing_map is not None or probs is not None):
            raise InvalidCall("topk_weights go with topk_idx, and probs with routing_map: pass one pair")
        if handle is not None:
            known = checked_handle(handle, is_permuted)
            if routing_map is not None or topk_idx is not None:
                raise InvalidCall("a dispatch with a handle takes no routing_map or topk_idx: leave them out")
            if probs is not None:
                _check("probs", probs, torch.float32, (known.topk_idx.shape[0], known.num_experts))
                topk_weights = routing.gathered(probs, known.topk_idx)
            return _Inputs(x, known, known.num_experts, known.topk_idx, topk_weights)
        num_experts = num_of_experts or self.config.num_of_experts_per_rank * self.group_size
        num_experts = check_num_experts(num_experts, self.group_size, "num_of_experts")
        shape = (len(hidden), num_experts)
        if topk_idx is not None:
            if routing_map is not None or probs is not None:
                raise InvalidCall("pass routing_map and probs, or topk_idx and topk_weights, and not both")
            is_tensor = isinstance(topk_idx, torch.Tensor)
            if not is_tensor or topk_idx.dtype not in INTEGERS or topk_idx.dim() != 2:
                raise InvalidCall("topk_idx must be a tensor of integers [tokens, top-k]")
            return _Inputs(x, None, num_experts, topk_idx.to(torch.int64), topk_weights)
        if routing_map is None:
            raise InvalidCall(
                "the routing is missing: pass routing_map, topk_idx, or the handle of a dispatch"
            )
        _check("routing_map", routing_map, torch.bool, shape)
        if probs is not None:
            _check("probs", probs, torch.float32, shape)
        num_topk = min(self._num_topk, num_experts, NUM_MAX_TOPK)
        most = routing.most_choices(routing_map)
        if host_waits and int(most) > num_topk:
            has = f"routing_map has a token with {int(most)} experts"
            if int(most) > NUM_MAX_TOPK:
                raise InvalidCall(f"{has}: it must be at most {NUM_MAX_TOPK}")
            raise InvalidCall(
                f"{has}, but the buffer was made for {num_topk}: make the HybridEPBuffer with"
                f" num_topk={int(most)} on all ranks"
            )
        ids = routing.choices_of(routing_map, num_topk)
        weights = None if probs is None else routing.gathered(probs, ids)
        return _Inputs(x, None, num_experts, ids, weights, most > num_topk)

    def _combined(
        self, hidden: torch.Tensor, handle: EPHandle, weights: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        rows = self._told(lambda: _contiguous(hidden), Kind.COMBINE)
        sums, back, _ = self._elastic.combine(rows, handle, topk_weights=weights)
        return sums, None if back is None else routing.spread(back, handle.topk_idx, handle.num_experts)


def _contiguous(rows: Any) -> Any:
    """The rows of a strided tensor without gaps; what is none is refused later."""
    is_strided = isinstance(rows, torch.Tensor) and rows.layout is torch.strided
    return rows.contiguous() if is_strided else rows


def _kind_of(handle: Any) -> Kind:
    """What a dispatch is called, to the peers."""
    return Kind.DISPATCH if handle is None else Kind.CACHED_DISPATCH


def _capacity(num_permuted_tokens: Any) -> int | None:
    """The rows of a result; below 0 is "as many as there are"."""
    if num_permuted_tokens is None:
        return None
    rows = whole_number("num_permuted_tokens", num_permuted_tokens, minimum=-MOST_BYTES)
    return rows if rows >= 0 else None


def _overflow(handle: EPHandle, loses_choices: torch.Tensor | None, capacity: int | None) -> torch.Tensor:
    """Whether rows or choices were left out: int32 [1]."""
    end = handle.psum_num_recv_tokens_per_expert[-1:]
    flag = end > (end if capacity is None else capacity)
    if loses_choices is not None:
        flag = flag | loses_choices
    return flag.to(torch.int32)


def _check(name: str, tensor: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise InvalidCall(f"{name} is of type {type(tensor).__name__}: it must be a tensor")
    if tensor.dtype is not dtype or tuple(tensor.shape) != shape:
        raise InvalidCall(
            f"{name} is of {tensor.dtype} and shape {list(tensor.shape)}: it must be of {dtype} and shape"
            f" {list(shape)}"
        )
