"""The sizes of DeepEP V2: the bytes of buffers, the numbers of SMs and queue pairs, the rows at most.

    domains = Domains.of(num_rdma_ranks=2, num_nvlink_ranks=8, allow_hybrid_mode=True)
    buffer_bytes(domains, num_max_tokens_per_rank=4096, hidden=7168, num_topk=8)

Programs compare these numbers and pass them on, so they are the reference's, byte for byte. AnyEP's own
memory is in `anyep.sizes`: its windows begin smaller and grow.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from anyep.errors import InvalidCall

BUFFER_ALIGNMENT: Final = 2 << 20
"""Buffers are multiples of so many bytes."""
MESSAGE_ALIGNMENT: Final = 32
DEFAULT_NUM_TOPK: Final = 32
NUM_MAX_CHANNELS: Final = 8 * 160
"""Channels of the relaying kernels: 8 on each of 160 SMs."""
CHANNELS_PER_SCALE: Final = 32
"""The size of FP8 rows is computed with one scale for so many channels."""
PP_BUFFERS: Final = 4
"""To and from two neighbours."""
FP8_BYTES: Final = 1
BF16_BYTES: Final = 2

UNKNOWN_NVLINK_GBS: Final = 430.3
"""Where the rate of NVLink is unknown: nine tenths of what the 18 links of an H100 report."""
UNKNOWN_RDMA_GBS: Final = 50.0
"""Where the rate of the network is unknown: 400 Gbit/s."""
SM_MARGIN: Final = 1.25
MIN_SMS: Final = 4
MIN_SMS_ALONE: Final = 64
"""The least where calls need not leave room for compute."""
QPS_PER_SM: Final = 16
MAX_DIRECT_QPS: Final = 9
ALLOCATED_QPS: Final = 129
ALLOCATED_DIRECT_QPS: Final = 17


class Domains(NamedTuple):
    """The ranks of a job: `num_rdma_ranks` nodes of `num_nvlink_ranks` ranks, and how calls group these."""

    num_rdma_ranks: int
    num_nvlink_ranks: int
    num_scaleout_ranks: int
    num_scaleup_ranks: int

    @staticmethod
    def of(num_rdma_ranks: int, num_nvlink_ranks: int, allow_hybrid_mode: bool = True) -> Domains:
        """In hybrid mode rows cross once to each node; else every rank sends to every rank.

        >>> Domains.of(2, 8), Domains.of(2, 8, allow_hybrid_mode=False)[2:]
        (Domains(num_rdma_ranks=2, num_nvlink_ranks=8, num_scaleout_ranks=2, num_scaleup_ranks=8), (1, 16))
        """
        if allow_hybrid_mode:
            return Domains(num_rdma_ranks, num_nvlink_ranks, num_rdma_ranks, num_nvlink_ranks)
        return Domains(num_rdma_ranks, num_nvlink_ranks, 1, num_rdma_ranks * num_nvlink_ranks)

    @property
    def num_ranks(self) -> int:
        return self.num_rdma_ranks * self.num_nvlink_ranks


def align(value: int, alignment: int) -> int:
    """The next multiple.

    >>> align(33, 32), align(64, 32), align(0, 32)
    (64, 64, 0)
    """
    return -(-value // alignment) * alignment


def expanded_rows(num_received: int, num_topk: int, num_local_experts: int, alignment: int) -> int:
    """The most rows of an expanded result of `num_received` tokens, for whichever local experts they are.

    >>> expanded_rows(8 * 4096, num_topk=8, num_local_experts=32, alignment=128)
    266240
    >>> expanded_rows(10, num_topk=8, num_local_experts=2, alignment=1)
    20
    """
    copies = num_received * min(num_topk, num_local_experts)
    return align(copies + (alignment - 1) * num_local_experts, alignment)


# Bytes


def buffer_bytes(
    domains: Domains,
    num_max_tokens_per_rank: int,
    hidden: int,
    num_topk: int = 0,
    use_fp8_dispatch: bool = False,
    allow_multiple_reduction: bool = True,
) -> int:
    """The bytes of a buffer for dispatch and combine; `num_topk` 0 is 32.

    >>> buffer_bytes(Domains.of(1, 8), 8192, 7168, 8)
    947912704
    """
    for name, value, least in (
        ("num_max_tokens_per_rank", num_max_tokens_per_rank, 1),
        ("hidden", hidden, 1),
        ("num_topk", num_topk, 0),
    ):
        if value < least:
            raise InvalidCall(f"{name}={value} is less than {least}")
    topk = num_topk or DEFAULT_NUM_TOPK
    dispatch = _dispatch_messages(domains, num_max_tokens_per_rank) * _dispatch_message_bytes(
        hidden, topk, use_fp8_dispatch
    )
    combine = _combine_messages(domains, num_max_tokens_per_rank, topk, allow_multiple_reduction) * (
        _combine_message_bytes(hidden, topk)
    )
    return align(max(dispatch, combine), BUFFER_ALIGNMENT)


def _dispatch_message_bytes(hidden: int, num_topk: int, use_fp8: bool) -> int:
    """A row with its scales, top-k ids and weights, and the number of its token."""
    row = hidden * (FP8_BYTES if use_fp8 else BF16_BYTES)
    num_scales = -(-hidden // CHANNELS_PER_SCALE) if use_fp8 else 0
    beside = 8 * num_topk + 4 * (1 + num_topk)
    return sum(align(part, MESSAGE_ALIGNMENT) for part in (row, 4 * num_scales, beside))


def _combine_message_bytes(hidden: int, num_topk: int) -> int:
    return align(hidden * BF16_BYTES, MESSAGE_ALIGNMENT) + align(8 * num_topk, MESSAGE_ALIGNMENT)


def _dispatch_messages(domains: Domains, num_tokens: int) -> int:
    scaleout, scaleup = domains.num_scaleout_ranks, domains.num_scaleup_ranks
    if scaleout == 1:
        return (domains.num_ranks + (domains.num_rdma_ranks > 1)) * num_tokens
    return scaleup * scaleout * num_tokens + num_tokens + scaleout * (num_tokens + NUM_MAX_CHANNELS)


def _combine_messages(domains: Domains, num_tokens: int, num_topk: int, sums_on_the_way: bool) -> int:
    """With one sum at the end, a row of each choice may come back."""
    scaleout, scaleup = domains.num_scaleout_ranks, domains.num_scaleup_ranks

    def rows_of(num_groups: int) -> int:
        return min(num_groups, num_topk) if sums_on_the_way else num_topk

    if scaleout == 1:
        staged = domains.num_ranks * rows_of(1) if domains.num_rdma_ranks > 1 else 0
        return (rows_of(domains.num_ranks) + staged) * num_tokens
    relayed = rows_of(scaleup) * scaleout * num_tokens + rows_of(scaleout) * num_tokens
    return relayed + rows_of(1) * scaleout * (num_tokens + NUM_MAX_CHANNELS)


def engram_bytes(
    num_entries: int, hidden: int, num_max_tokens_per_rank: int, itemsize: int
) -> tuple[int, int]:
    """The bytes of a remote table: on the GPU for what was fetched, on the host for the entries.

    >>> engram_bytes(100_000, 128, 512, 2)
    (2097152, 27262976)
    """
    entry = align(hidden * itemsize, MESSAGE_ALIGNMENT)
    return align(entry * num_max_tokens_per_rank, BUFFER_ALIGNMENT), align(
        entry * num_entries, BUFFER_ALIGNMENT
    )


def pipeline_bytes(num_max_tensor_bytes: int, num_max_inflight_tensors: int) -> int:
    """The bytes of a buffer for tensors that go to the next and the previous rank.

    >>> pipeline_bytes(1_000_001, 2)
    8388608
    """
    tensor = align(num_max_tensor_bytes, MESSAGE_ALIGNMENT)
    return align(tensor * num_max_inflight_tensors * PP_BUFFERS, BUFFER_ALIGNMENT)


def gathered_bytes(num_ranks: int, sizes: list[int]) -> int:
    """The bytes of the results of all-gathers of tensors with these bytes.

    >>> gathered_bytes(8, [6, 100])
    864
    """
    return sum(align(num_ranks * size, MESSAGE_ALIGNMENT) for size in sizes)


# SMs and queue pairs


class Rates(NamedTuple):
    """GB/s; 0 where a rate is unknown."""

    rdma: float = 0.0
    nvlink: float = 0.0
    sm_read: float = 200.0
    sm_write: float = 50.0

    def known(self) -> Rates:
        """With typical rates of a GPU's links in place of unknown ones.

        >>> Rates(nvlink=860.6).known()[:2]
        (50.0, 860.6)
        """
        return self._replace(rdma=self.rdma or UNKNOWN_RDMA_GBS, nvlink=self.nvlink or UNKNOWN_NVLINK_GBS)


class _Traffic(NamedTuple):
    """Bytes per byte of a received row."""

    read: float
    write: float
    nvlink: float
    rdma: float


def groups_hit(num_groups: int, num_experts: int, num_topk: int) -> float:
    """How many of some groups of experts a token's choices are expected to fall into.

    >>> groups_hit(1, 256, 8), groups_hit(256, 256, 8)
    (1.0, 8.0)
    """
    missed = math.comb(num_experts - num_experts // num_groups, num_topk) / math.comb(num_experts, num_topk)
    return num_groups * (1 - missed)


def theoretical_num_sms(
    domains: Domains,
    num_experts: int,
    num_topk: int,
    num_device_sms: int,
    rates: Rates,
    prefer_overlap_with_compute: bool = True,
) -> int:
    """The SMs that fill the slowest link, if the choices are balanced.

    >>> theoretical_num_sms(Domains.of(2, 8), 256, 8, 132, Rates(rdma=50, nvlink=430.3))
    12
    """
    if not 0 < num_topk <= num_experts:
        raise InvalidCall(f"num_topk={num_topk} is not between 1 and num_experts={num_experts}")
    if num_experts % domains.num_ranks:
        raise InvalidCall(f"num_experts={num_experts} is not a multiple of the {domains.num_ranks} ranks")
    known = rates.known()
    if min(known) <= 0:
        raise InvalidCall(f"the rates of links and SMs are positive numbers of GB/s: {known}")
    traffic = _traffic(domains, num_experts, num_topk)
    is_hybrid = domains.num_scaleout_ranks > 1
    bytes_of_link, rate = traffic.nvlink, known.nvlink
    if is_hybrid and traffic.rdma / known.rdma > traffic.nvlink / known.nvlink:
        bytes_of_link, rate = traffic.rdma, known.rdma
    if bytes_of_link == 0:
        return num_device_sms
    rows_per_s = rate / bytes_of_link
    needed = max(rows_per_s * traffic.read / known.sm_read, rows_per_s * traffic.write / known.sm_write)
    num_sms = align(max(MIN_SMS, math.ceil(SM_MARGIN * needed)), 2)
    if not prefer_overlap_with_compute:
        num_sms = max(num_sms, MIN_SMS_ALONE)
    return min(num_sms, num_device_sms)


def _traffic(domains: Domains, num_experts: int, num_topk: int) -> _Traffic:
    ranks_hit = groups_hit(domains.num_ranks, num_experts, num_topk)
    num_nodes, num_nvlink_ranks = domains.num_rdma_ranks, domains.num_nvlink_ranks
    if domains.num_scaleout_ranks > 1:
        scaleout = domains.num_scaleout_ranks
        nodes_hit = groups_hit(scaleout, num_experts, num_topk) / ranks_hit
        return _Traffic(
            read=1 / ranks_hit + nodes_hit,
            write=1 / ranks_hit + nodes_hit / scaleout + 1,
            nvlink=1 - 1 / domains.num_scaleup_ranks,
            rdma=nodes_hit * (1 - 1 / scaleout),
        )
    share = num_nvlink_ranks / domains.num_ranks
    return _Traffic(
        read=1 / ranks_hit,
        write=(1 / ranks_hit if num_nodes > 1 else 0.0) + share,
        nvlink=share * (1 - 1 / num_nvlink_ranks),
        rdma=1 - share,
    )


def theoretical_num_qps(domains: Domains, num_sms: int, num_allocated_qps: int = 0) -> int:
    """The queue pairs for so many SMs; 0 allocated ones are as many as the reference allocates.

    >>> theoretical_num_qps(Domains.of(2, 8), 12), theoretical_num_qps(Domains.of(1, 8), 12)
    (129, 9)
    """
    is_hybrid = domains.num_scaleout_ranks > 1
    wanted = num_sms * QPS_PER_SM + 1 if is_hybrid else min(num_sms, MAX_DIRECT_QPS)
    return min(wanted, num_allocated_qps or (ALLOCATED_QPS if is_hybrid else ALLOCATED_DIRECT_QPS))
