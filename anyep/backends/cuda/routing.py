"""The routing of a dispatch on a GPU: the tensors of its handle, and the checks of a user's handle."""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch

from anyep.errors import InvalidCall

NUM_TENSORS: Final = 6
VERSION_OF: Final = operator.attrgetter("_version")


class GpuRouting(NamedTuple):
    """The six tensors of a handle, and its digests where they are known."""

    rank_prefix_matrix: torch.Tensor
    channel_prefix_matrix: torch.Tensor
    recv_channel_prefix_matrix: torch.Tensor
    recv_src_idx: torch.Tensor
    is_token_in_rank: torch.Tensor
    send_head: torch.Tensor
    digests: torch.Tensor | None = None
    """Digests of the rows to each rank, then of those from each rank; not part of the handle. They are filled
    only by the kernels of the dispatch that fills the handle: replaying a graph fills both again."""

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The flat tuple that users keep. Its digests can be looked up as long as its tensors are not
        changed."""
        parts = self[:NUM_TENSORS]
        remember_digests(parts, self.digests)
        return parts

    @property
    def num_ranks(self) -> int:
        return self.rank_prefix_matrix.shape[0]

    def is_on(self, device: torch.device) -> bool:
        return self.rank_prefix_matrix.device == device

    @property
    def num_tokens(self) -> int:
        return self.send_head.shape[0]

    @property
    def num_recv_rows(self) -> int:
        return self.recv_src_idx.shape[0]

    @property
    def num_channels(self) -> int:
        return self.channel_prefix_matrix.shape[1]


def new_routing(
    empty: Callable[[tuple[int, ...], torch.dtype], torch.Tensor],
    num_tokens: int,
    num_ranks: int,
    num_channels: int,
) -> GpuRouting:
    """A routing that kernels will fill, in memory that `empty` allocates; without source indices yet."""
    by_rank, by_channel = (num_tokens, num_ranks), (num_ranks, num_channels)
    head = empty(by_rank, torch.int32)
    return GpuRouting(
        empty((num_ranks, num_ranks), torch.int32),
        empty(by_channel, torch.int32),
        empty(by_channel, torch.int32),
        head,
        empty(by_rank, torch.bool),
        head,
        empty((2 * num_ranks,), torch.int64),
    )


class _Known:
    """The digests of a handle, the rest of its tensors, and the versions of all of them.

    Copies of a handle, and handles saved to a file, have no digests: an empty dictionary replaces this.
    """

    __slots__ = ("digests", "others", "versions")

    def __init__(self, digests: torch.Tensor, parts: tuple[torch.Tensor, ...]) -> None:
        self.digests = digests
        self.others = parts[1:]
        self.versions = tuple(map(VERSION_OF, parts))

    def __reduce__(self) -> tuple[type[OrderedDict[str, int]], tuple[()]]:
        return OrderedDict, ()


def remember_digests(parts: tuple[torch.Tensor, ...], digests: torch.Tensor | None) -> None:
    """Attach the digests of a handle to its first tensor."""
    # All were made in one call, and in one mode.
    if digests is not None and not parts[0].is_inference() and not parts[3].is_inference():
        parts[0]._anyep_digests = _Known(digests, parts)  # type: ignore[attr-defined]


def known_digests(parts: tuple[torch.Tensor, ...]) -> torch.Tensor | None:
    """The digests of a handle, if it consists of the same tensors that a dispatch filled, unchanged since.

    torch does not track changes of tensors that were made in inference mode: their digests are not known.
    """
    known = getattr(parts[0], "_anyep_digests", None)
    if known.__class__ is not _Known:
        return None
    # Written out: this runs in every call.
    first, a, b, c, d, e = parts
    others = known.others
    is_same = a is others[0] and b is others[1] and c is others[2] and d is others[3] and e is others[4]
    versions = first._version, a._version, b._version, c._version, d._version, e._version
    return known.digests if is_same and versions == known.versions else None


def known_digests_of_any(parts: tuple[torch.Tensor, ...]) -> torch.Tensor | None:
    """The same for a handle of any number of tensors."""
    known = getattr(parts[0], "_anyep_digests", None)
    if known.__class__ is not _Known or not all(map(operator.is_, parts[1:], known.others)):
        return None
    return known.digests if tuple(map(VERSION_OF, parts)) == known.versions else None


def known_routing(handle: Any) -> GpuRouting | None:
    """The routing of a handle whose digests are known: a dispatch filled it, so it needs no other check."""
    if handle.__class__ is not tuple or len(handle) != NUM_TENSORS:
        return None
    digests = known_digests(handle)
    return GpuRouting(*handle, digests) if digests is not None else None


class GpuCounts(NamedTuple):
    """Where the tokens of a dispatch go, as counted by the caller; kernels check it."""

    in_rank: torch.Tensor
    by_rank: torch.Tensor
    by_expert: torch.Tensor
    by_node: torch.Tensor | None = None
    """Between nodes; the user may leave it out."""

    @property
    def num_experts(self) -> int:
        return self.by_expert.shape[0]


def checked_handle(handle: Any, num_ranks: int, device: torch.device) -> GpuRouting:
    """Check the types and shapes of a user's handle; kernels check the values when they read them."""
    if not isinstance(handle, tuple | list) or len(handle) != NUM_TENSORS:
        raise InvalidCall(f"the handle must be the tuple of {NUM_TENSORS} tensors that dispatch returned")
    for part in handle:
        if not isinstance(part, torch.Tensor) or part.dim() == 0:
            raise InvalidCall("the handle must hold tensors only, as dispatch returned it")
    parts = tuple(part if part.is_contiguous() else part.contiguous() for part in handle)
    routing = GpuRouting(*parts)._replace(digests=known_digests(parts))
    num_tokens, num_channels = routing.send_head.shape[0], routing.channel_prefix_matrix.shape[-1]
    for name, part, dtype, shape in (
        ("rank_prefix_matrix", routing[0], torch.int32, (num_ranks, num_ranks)),
        ("channel_prefix_matrix", routing[1], torch.int32, (num_ranks, max(1, num_channels))),
        ("recv_channel_prefix_matrix", routing[2], torch.int32, (num_ranks, max(1, num_channels))),
        ("recv_src_idx", routing[3], torch.int32, (routing[3].shape[0],)),
        ("is_token_in_rank", routing[4], torch.bool, (num_tokens, num_ranks)),
        ("send_head", routing[5], torch.int32, (num_tokens, num_ranks)),
    ):
        if part.dtype != dtype or tuple(part.shape) != shape or part.device != device:
            raise InvalidCall(
                f"the handle's {name} is {part.dtype} {list(part.shape)} on {part.device}:"
                f" it must be {dtype} {list(shape)} on {device};"
                f" is the handle from another Buffer?"
            )
    return routing
