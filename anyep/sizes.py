"""Sizes: constants, `Config`, tuned configs and size hints.

Pure integer arithmetic, imported by everything and importing nothing heavy. A caller computes

    config = get_dispatch_config(num_ranks=8)
    num_nvl_bytes = config.get_nvl_buffer_size_hint(hidden_bytes=7168 * 2, num_ranks=8)

and passes the result to `Buffer`. `layout.py` has the actual layout of one call, which is never larger.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache, cached_property
from typing import Final, SupportsIndex

from anyep.errors import InvalidCall, whole_number

NUM_MAX_NVL_PEERS: Final = 8
NUM_MAX_RDMA_PEERS: Final = 20
NUM_MAX_FIFO_SLOTS: Final = 32768
NUM_WORKSPACE_BYTES: Final = 32 * 1024 * 1024
NUM_MAX_LOCAL_EXPERTS: Final = 1024
NUM_BUFFER_ALIGNMENT_BYTES: Final = 128
NUM_CPU_TIMEOUT_SECS: Final = 100
NUM_WAIT_NANOSECONDS: Final = 500
NUM_TIMEOUT_CYCLES: Final = 200_000_000_000
FINISHED_SUM_TAG: Final = 1024
NUM_MAX_TOPK: Final = 128
NUM_MAX_SCALES: Final = 128
SOURCE_META_BYTES: Final = 8
"""Source node (int32) and a bit mask of the ranks of a node that the token goes to (int32)."""

NUM_DEFAULT_SMS: Final = 20
ROW_ALIGNMENT_BYTES: Final = 16
"""Rows start at multiples of this; copies can then use 128-bit words."""
CHANNELS_PER_SCALE: Final = 128
"""FP8 data carries one scale per this many values."""

TOPK_ID_BYTES_RESERVED: Final = 8
TOPK_ID_BYTES: Final = 4
TOPK_WEIGHT_BYTES: Final = 4
SCALE_BYTES: Final = 4
RDMA_META_BYTES: Final = (2 * NUM_MAX_NVL_PEERS + 2) * 4
"""The counts of one channel from a sending node: two ints per rank of the node, and two totals."""
LOW_LATENCY_HEADER_BYTES: Final = 16
"""Source token index and padding, in front of every low-latency message."""


def align(num_bytes: int, alignment: int) -> int:
    """The smallest multiple of `alignment` that is at least `num_bytes`.

    >>> align(0, 128), align(1, 128), align(128, 128), align(129, 128)
    (0, 128, 128, 256)
    """
    return (num_bytes + alignment - 1) // alignment * alignment


@dataclass(frozen=True)
class Config:
    """How a call divides its work: the number of SMs (two per channel) and the chunk sizes of its rings.

    Args:
        num_sms: An even number, two per channel. If a rank's share of its GPU is smaller, fewer SMs serve
            the channels.
        num_max_nvl_chunked_send_tokens: Rows that a ring within a node moves at a time.
        num_max_nvl_chunked_recv_tokens: Rows of such a ring; more than are moved at a time.
        num_max_rdma_chunked_send_tokens: Rows that a ring between nodes moves at a time.
        num_max_rdma_chunked_recv_tokens: Rows of such a ring; at least twice as many as are moved at a time,
            and rounded up to a multiple of them.

    >>> Config(20, 6, 256, 6, 128).num_channels
    10
    >>> Config(20, 36, 288, 20, 128).num_max_rdma_chunked_recv_tokens  # up to a multiple of 20
    140
    """

    num_sms: int = NUM_DEFAULT_SMS
    """Determines the number of channels. If a rank's share of its GPU is smaller, fewer SMs serve them."""
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def __post_init__(self) -> None:
        for field in fields(self):
            object.__setattr__(
                self, field.name, whole_number(field.name, getattr(self, field.name), minimum=1)
            )
        check_even_sms("num_sms", self.num_sms)
        nvl_send, nvl_recv = self.num_max_nvl_chunked_send_tokens, self.num_max_nvl_chunked_recv_tokens
        if nvl_send >= nvl_recv:
            raise InvalidCall(
                f"num_max_nvl_chunked_send_tokens is {nvl_send}: it must be below"
                f" num_max_nvl_chunked_recv_tokens, which is {nvl_recv}"
            )
        rdma_send, rdma_recv = self.num_max_rdma_chunked_send_tokens, self.num_max_rdma_chunked_recv_tokens
        if rdma_send > rdma_recv // 2:
            raise InvalidCall(
                f"num_max_rdma_chunked_send_tokens is {rdma_send}: it must be at most half of"
                f" num_max_rdma_chunked_recv_tokens, which is {rdma_recv}"
            )
        object.__setattr__(self, "num_max_rdma_chunked_recv_tokens", align(rdma_recv, rdma_send))

    @property
    def num_channels(self) -> int:
        return self.num_sms // 2

    def get_nvl_buffer_size_hint(
        self, hidden_bytes: int, num_ranks: int, *, ranks_per_node: int | None = None
    ) -> int:
        """Bytes for `Buffer(num_nvl_bytes=...)` that suffice for any call with this config.

        `ranks_per_node` defaults to `ANYEP_RANKS_PER_NODE`, or 8.

        Args:
            hidden_bytes: Bytes per row.
            num_ranks: The ranks of the group.
            ranks_per_node: The ranks of a node.
        """
        per_node = _expected_ranks_per_node(ranks_per_node)
        return sum(nvl_hint_parts(self, hidden_bytes, num_ranks, ranks_per_node=per_node).values())

    def get_rdma_buffer_size_hint(
        self, hidden_bytes: int, num_ranks: int, *, ranks_per_node: int | None = None
    ) -> int:
        """Bytes for `Buffer(num_rdma_bytes=...)` that suffice for any call; 0 on one node.

        `ranks_per_node` defaults to `ANYEP_RANKS_PER_NODE`, or 8.

        Args:
            hidden_bytes: Bytes per row.
            num_ranks: The ranks of the group.
            ranks_per_node: The ranks of a node.
        """
        per_node = _expected_ranks_per_node(ranks_per_node)
        return sum(rdma_hint_parts(self, hidden_bytes, num_ranks, ranks_per_node=per_node).values())


# Rows of (nvl_send, nvl_recv, rdma_send, rdma_recv) by number of ranks.
TUNED_DISPATCH: Final = {
    2: (16, 256, 6, 128),
    4: (16, 256, 6, 128),
    8: (6, 256, 6, 128),
    16: (16, 288, 20, 128),
    24: (8, 288, 32, 128),
    32: (8, 288, 32, 128),
    64: (20, 288, 28, 128),
    128: (20, 560, 32, 128),
    144: (32, 720, 12, 128),
    160: (28, 720, 12, 128),
}
TUNED_COMBINE: Final = {
    2: (6, 256, 6, 128),
    4: (6, 256, 6, 128),
    8: (6, 256, 6, 128),
    16: (2, 288, 28, 128),
    24: (1, 288, 20, 128),
    32: (1, 288, 20, 128),
    64: (1, 288, 20, 128),
    128: (1, 560, 12, 128),
    144: (2, 720, 8, 128),
    160: (2, 720, 8, 128),
}


def get_dispatch_config(num_ranks: int, num_sms: int = NUM_DEFAULT_SMS) -> Config:
    """The tuned config for dispatch between `num_ranks` ranks (any number of them).

    Args:
        num_ranks: The ranks of the group.
        num_sms: An even number of SMs, two per channel.
    """
    return _tuned("dispatch", whole_number("num_ranks", num_ranks, minimum=1), num_sms)


def get_combine_config(num_ranks: int, num_sms: int = NUM_DEFAULT_SMS) -> Config:
    """The tuned config for combine between `num_ranks` ranks (any number of them).

    Args:
        num_ranks: The ranks of the group.
        num_sms: An even number of SMs, two per channel.
    """
    return _tuned("combine", whole_number("num_ranks", num_ranks, minimum=1), num_sms)


def size_hints(
    row_bytes: int, num_ranks: int, ranks_per_node: int, num_sms: int = NUM_DEFAULT_SMS
) -> tuple[int, int]:
    """NVL and RDMA bytes that suffice for dispatch and combine, with the tuned configs.

    Args:
        row_bytes: Bytes per row.
        num_ranks: The ranks of the group.
        ranks_per_node: The ranks of a node.
        num_sms: An even number of SMs, two per channel.

    >>> size_hints(14336, 8, 8)[1], size_hints(14336, 8, 4)[1] > 0
    (0, True)
    """
    configs = get_dispatch_config(num_ranks, num_sms), get_combine_config(num_ranks, num_sms)
    sizes = row_bytes, num_ranks
    return (
        max(config.get_nvl_buffer_size_hint(*sizes, ranks_per_node=ranks_per_node) for config in configs),
        max(config.get_rdma_buffer_size_hint(*sizes, ranks_per_node=ranks_per_node) for config in configs),
    )


@cache
def _tuned(table_name: str, num_ranks: int, num_sms: int) -> Config:
    table = {"dispatch": TUNED_DISPATCH, "combine": TUNED_COMBINE}[table_name]
    listed = max((count for count in table if count <= num_ranks), default=min(table))
    return Config(num_sms, *table[listed])


def _expected_ranks_per_node(ranks_per_node: int | None) -> int:
    """How many ranks the nodes of a Buffer will have, as far as known before the Buffer exists."""
    # Imported here, since the settings take their defaults from this module.
    from anyep.settings import RANKS_PER_NODE

    chosen = RANKS_PER_NODE.choose(ranks_per_node).value
    return NUM_MAX_NVL_PEERS if chosen is None else chosen


def num_ranks_of_a_node(num_ranks: int, ranks_per_node: int) -> int:
    return min(num_ranks, ranks_per_node)


def num_nodes(num_ranks: int, ranks_per_node: int) -> int:
    return -(-num_ranks // ranks_per_node)


def nvl_hint_parts(
    config: Config, hidden_bytes: int, num_ranks: int, *, ranks_per_node: int = NUM_MAX_NVL_PEERS
) -> dict[str, int]:
    """The NVL size hint, term by term; the terms add up to the hint.

    The rings of one node: for each channel and each rank of the node `nvl_recv` rows, two prefixes per node
    and three more ints. Rows are sized for the most data that a token can carry.
    """
    hidden_bytes, num_ranks, ranks_per_node = _checked(hidden_bytes, num_ranks, ranks_per_node)
    num_rings = config.num_channels * num_ranks_of_a_node(num_ranks, ranks_per_node)
    num_rows = num_rings * config.num_max_nvl_chunked_recv_tokens
    parts = _row_hint_parts(num_rows, hidden_bytes)
    parts["prefixes_heads_tails"] = num_rings * (2 * num_nodes(num_ranks, ranks_per_node) + 3) * 4
    return _with_padding(parts)


def rdma_hint_parts(
    config: Config, hidden_bytes: int, num_ranks: int, *, ranks_per_node: int = NUM_MAX_NVL_PEERS
) -> dict[str, int]:
    """The RDMA size hint, term by term; the terms add up to the hint, and there are none on one node.

    The rings between nodes count twice: rows are received in one half and assembled for sending in the other.
    """
    hidden_bytes, num_ranks, ranks_per_node = _checked(hidden_bytes, num_ranks, ranks_per_node)
    nodes = num_nodes(num_ranks, ranks_per_node)
    if nodes == 1:
        return {}
    num_rings = config.num_channels * nodes * 2
    num_rows = num_rings * config.num_max_rdma_chunked_recv_tokens
    parts = _row_hint_parts(num_rows, hidden_bytes)
    parts["row_alignment"] = num_rows * ROW_ALIGNMENT_BYTES
    parts["meta_heads_tails"] = num_rings * RDMA_META_BYTES
    return _with_padding(parts)


@dataclass(frozen=True)
class LowLatencySizes:
    """The byte sizes of low-latency mode, for one of its two sets of slots.

    Args:
        num_max_tokens: The most tokens that a rank passes to one call.
        hidden: Values per token.
        num_experts: The experts of all ranks together.

    >>> LowLatencySizes(num_max_tokens=128, hidden=7168, num_experts=256).total_bytes
    1881147520
    """

    num_max_tokens: int
    hidden: int
    num_experts: int

    def __post_init__(self) -> None:
        whole_number("num_max_dispatch_tokens_per_rank", self.num_max_tokens, minimum=1)
        whole_number("hidden", self.hidden, minimum=1)
        whole_number("num_experts", self.num_experts, minimum=1)
        check_row_bytes(self.hidden * 2)

    @cached_property
    def dispatch_message_bytes(self) -> int:
        num_scales = self.hidden // CHANNELS_PER_SCALE
        return LOW_LATENCY_HEADER_BYTES + max(2 * self.hidden, self.hidden + SCALE_BYTES * num_scales)

    @cached_property
    def combine_message_bytes(self) -> int:
        return LOW_LATENCY_HEADER_BYTES + 2 * self.hidden

    @cached_property
    def send_bytes(self) -> int:
        dispatch_bytes = self.num_max_tokens * self.dispatch_message_bytes
        combine_bytes = self.num_experts * self.num_max_tokens * self.combine_message_bytes
        return max(dispatch_bytes, combine_bytes)

    @cached_property
    def recv_bytes(self) -> int:
        message_bytes = max(self.dispatch_message_bytes, self.combine_message_bytes)
        return self.num_experts * self.num_max_tokens * message_bytes

    @property
    def signal_bytes(self) -> int:
        return 4 * self.num_experts

    @cached_property
    def total_bytes(self) -> int:
        """Both sets and room to align them: always more than their sum."""
        return (2 * (self.send_bytes + self.recv_bytes + self.signal_bytes) + 128) // 128 * 128

    def parts(self) -> dict[str, int]:
        """`total_bytes`, term by term."""
        parts = {
            "send": 2 * self.send_bytes,
            "receive": 2 * self.recv_bytes,
            "signals": 2 * self.signal_bytes,
        }
        parts["padding"] = self.total_bytes - sum(parts.values())
        return parts


@cache
def low_latency_sizes(num_max_tokens: int, hidden: int, num_experts: int) -> LowLatencySizes:
    """`LowLatencySizes`, checked once and cached; calls of the same sizes share them.

    >>> low_latency_sizes(128, 7168, 256) is low_latency_sizes(128, 7168, 256)
    True
    """
    return LowLatencySizes(num_max_tokens, hidden, num_experts)


def get_low_latency_rdma_size_hint(
    num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
) -> int:
    """Bytes for `Buffer(num_rdma_bytes=...)` that suffice for low-latency calls of these sizes.

    Args:
        num_max_dispatch_tokens_per_rank: The most tokens that a rank passes to one call.
        hidden: Values per token.
        num_ranks: The ranks of the group.
        num_experts: The experts of all ranks together.
    """
    whole_number("num_ranks", num_ranks, minimum=1)
    return LowLatencySizes(num_max_dispatch_tokens_per_rank, hidden, num_experts).total_bytes


@dataclass(frozen=True)
class TokenLayout:
    """One token on the wire: hidden | source meta | scales | top-k ids | top-k weights | padding.

    Args:
        hidden_bytes: Bytes of its row, a multiple of 16.
        num_scales: Scales of an FP8 row, float32.
        num_topk: Experts per token, each with an id and a weight; 0 where neither travels.

    >>> TokenLayout(hidden_bytes=14336, num_topk=8).token_bytes
    14416
    """

    hidden_bytes: int
    num_scales: int = 0
    num_topk: int = 0

    def __post_init__(self) -> None:
        whole_number("hidden_bytes", self.hidden_bytes, minimum=1)
        whole_number("num_scales", self.num_scales, minimum=0)
        whole_number("num_topk", self.num_topk, minimum=0)
        check_row_bytes(self.hidden_bytes)
        if self.num_scales > NUM_MAX_SCALES:
            raise InvalidCall(f"{self.num_scales} scales per token: at most {NUM_MAX_SCALES} can be carried")
        if self.num_topk > NUM_MAX_TOPK:
            raise InvalidCall(f"top-k is {self.num_topk}: at most {NUM_MAX_TOPK} experts per token")

    def parts(self) -> dict[str, int]:
        """Field by field, in wire order; the sizes add up to `token_bytes`."""
        parts = {
            "hidden": self.hidden_bytes,
            "source_meta": SOURCE_META_BYTES,
            "scales": SCALE_BYTES * self.num_scales,
            "topk_ids": TOPK_ID_BYTES * self.num_topk,
            "topk_weights": TOPK_WEIGHT_BYTES * self.num_topk,
        }
        used_bytes = sum(parts.values())
        parts["padding"] = align(used_bytes, ROW_ALIGNMENT_BYTES) - used_bytes
        return parts

    @cached_property
    def token_bytes(self) -> int:
        return sum(self.parts().values())


@cache
def token_layout(hidden_bytes: int, num_scales: int, num_topk: int) -> TokenLayout:
    """A `TokenLayout`, checked once and cached; calls of the same sizes share it."""
    return TokenLayout(hidden_bytes, num_scales, num_topk)


def check_even_sms(name: str, num_sms: SupportsIndex) -> int:
    """Refuse an odd number of SMs, as a channel has two; `name` is the caller's name for the number."""
    count = whole_number(name, num_sms, minimum=1)
    if count % 2:
        raise InvalidCall(f"{name} is {count}: it must be even, since a channel takes two SMs")
    return count


def experts_per_rank(num_experts: SupportsIndex, num_ranks: int, name: str = "num_experts") -> int:
    """How many experts each rank holds; `name` is the caller's name for `num_experts`.

    >>> experts_per_rank(256, num_ranks=8)
    32
    """
    count = whole_number(name, num_experts, minimum=1)
    if count % num_ranks:
        raise InvalidCall(
            f"{count} experts do not divide over {num_ranks} ranks: every rank holds the same number of"
            f" experts; choose a multiple of {num_ranks}, such as {align(count, num_ranks)}"
        )
    return count // num_ranks


def check_num_experts(num_experts: SupportsIndex, num_ranks: int, name: str = "num_experts") -> int:
    """Refuse experts that cannot be divided evenly over the ranks, or more than a rank can hold."""
    per_rank = experts_per_rank(num_experts, num_ranks, name)
    if per_rank > NUM_MAX_LOCAL_EXPERTS:
        raise InvalidCall(
            f"{per_rank} experts per rank: at most {NUM_MAX_LOCAL_EXPERTS} are possible, use more ranks"
        )
    return per_rank * num_ranks


def check_num_topk(has: str, num_topk: int) -> int:
    """Refuse too few or too many experts per token; `has` starts the message, such as "topk_idx has"."""
    if not 1 <= num_topk <= NUM_MAX_TOPK:
        raise InvalidCall(f"{has} {num_topk} experts per token: it must be 1 to {NUM_MAX_TOPK}")
    return num_topk


def check_fp8_hidden(hidden: int, use_ue8m0: bool = False, name: str = "hidden") -> None:
    """Refuse rows that cannot be sent as FP8 in low-latency mode; with UE8M0 a word holds four scales."""
    kind, multiple = ("use_ue8m0", 4 * CHANNELS_PER_SCALE) if use_ue8m0 else ("use_fp8", CHANNELS_PER_SCALE)
    if hidden % multiple:
        raise InvalidCall(f"{name} is {hidden}: with {kind} it must be a multiple of {multiple}")


def check_row_bytes(row_bytes: int) -> None:
    """Refuse rows that cannot be copied in 128-bit words."""
    if row_bytes % ROW_ALIGNMENT_BYTES:
        raise InvalidCall(
            f"a row of {row_bytes} bytes is no multiple of {ROW_ALIGNMENT_BYTES} bytes:"
            f" choose a hidden size that makes it one"
        )


def _checked(hidden_bytes: int, num_ranks: int, ranks_per_node: int) -> tuple[int, int, int]:
    hidden_bytes = whole_number("hidden_bytes", hidden_bytes, minimum=1)
    check_row_bytes(hidden_bytes)
    return (
        hidden_bytes,
        whole_number("num_ranks", num_ranks, minimum=1),
        whole_number("ranks_per_node", ranks_per_node, minimum=1),
    )


def _row_hint_parts(num_rows: int, hidden_bytes: int) -> dict[str, int]:
    return {
        "hidden": num_rows * hidden_bytes,
        "source_meta": num_rows * SOURCE_META_BYTES,
        "topk": num_rows * NUM_MAX_TOPK * (TOPK_ID_BYTES_RESERVED + TOPK_WEIGHT_BYTES),
        "scales": num_rows * NUM_MAX_SCALES * SCALE_BYTES,
    }


def _with_padding(parts: dict[str, int]) -> dict[str, int]:
    used_bytes = sum(parts.values())
    return parts | {"padding": align(used_bytes, NUM_BUFFER_ALIGNMENT_BYTES) - used_bytes}
