"""What the property tests draw."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from anyep import Config
from tests.support import low_latency_cases as low_latency_cases_module
from tests.support.cases import COMBINE_FROM, ROUTINGS, ROW_DTYPES, Case
from tests.support.places import Place

WINDOW_BYTES = {"cpu": (None, 0, 4096, 1 << 16), "simulated": (None,), "cuda": (None, 0, 1 << 16)}
"""Automatic; none, so that rows go through rings; little. The simulated GPU has no rings."""


@st.composite
def configs(draw: st.DrawFn, max_channels: int = 32, max_rows: int = 64) -> Config:
    """Any valid config, small ones first."""
    nvl_send = draw(st.integers(1, max_rows - 1))
    nvl_recv = draw(st.integers(nvl_send + 1, max_rows))
    rdma_send = draw(st.integers(1, max_rows // 2))
    rdma_recv = draw(st.integers(2 * rdma_send, max_rows))
    return Config(2 * draw(st.integers(1, max_channels)), nvl_send, nvl_recv, rdma_send, rdma_recv)


@st.composite
def cases(
    draw: st.DrawFn,
    num_ranks: int,
    max_tokens: int = 24,
    window_bytes: tuple[int | None, ...] = WINDOW_BYTES["cpu"],
) -> Case:
    """Any dispatch and combine between `num_ranks` ranks."""
    dtype = draw(st.sampled_from(list(ROW_DTYPES)))
    one_byte = ROW_DTYPES[dtype].itemsize == 1
    send_chunk = draw(st.integers(1, 6))
    return Case(
        tokens=tuple(draw(st.lists(st.integers(0, max_tokens), min_size=num_ranks, max_size=num_ranks))),
        hidden=draw(st.sampled_from([16, 32, 48, 272, 1040])),
        dtype=dtype,
        num_topk=draw(st.integers(1, 6)),
        local_experts=draw(st.integers(1, 4)),
        routing=draw(st.sampled_from(ROUTINGS)),
        send_topk=draw(st.booleans()),
        num_scales=draw(st.integers(0, 5)) if one_byte else 0,
        strided_scales=draw(st.booleans()),
        alignment=draw(st.integers(1, 4)),
        worst=draw(st.booleans()),
        num_biases=draw(st.integers(0, 2)),
        combine_weights=draw(st.booleans()),
        combine_from=draw(st.sampled_from(COMBINE_FROM)),
        config=Config(2 * draw(st.integers(1, 4)), send_chunk, draw(st.integers(max(2, send_chunk + 1), 12))),
        num_window_bytes=draw(st.sampled_from(window_bytes)),
        run_async=draw(st.booleans()),
        delay_seed=draw(st.one_of(st.none(), st.integers(0, 1000))),
        seed=draw(st.integers(0, 10_000)),
    )


@st.composite
def cases_at(draw: st.DrawFn, place: Place, max_tokens: int | None = None) -> Case:
    """Any dispatch and combine in a place."""
    most = max_tokens or (12 if place.device == "simulated" else 24)
    if place.num_nodes == 1:
        return draw(cases(place.num_ranks, most, WINDOW_BYTES[place.device]))
    # Between nodes on GPUs rows go to windows only.
    windows = WINDOW_BYTES["cpu"] if place.device == "cpu" else (None,)
    case = draw(cases(place.num_ranks, most, windows))
    net_send = draw(st.integers(1, 4))
    # In the interpreter a ring must hold all rows of a channel.
    least = max(2 * net_send, most if place.device == "simulated" else 0)
    config = replace(
        case.config,
        num_max_rdma_chunked_send_tokens=net_send,
        num_max_rdma_chunked_recv_tokens=draw(st.integers(least, max(12, least + 2))),
    )
    return replace(case, config=config).at(place)


@st.composite
def with_many_sms(draw: st.DrawFn, some_cases: st.SearchStrategy[Case]) -> Case:
    """With more SMs than one of eight ranks has of a GPU."""
    case = draw(some_cases)
    return replace(case, config=replace(case.config, num_sms=2 * draw(st.integers(9, 38))))


@st.composite
def low_latency_cases(
    draw: st.DrawFn, num_ranks: int, max_tokens: int | None = None
) -> low_latency_cases_module.Case:
    """Any low-latency dispatch and combine between `num_ranks` ranks."""
    most = draw(st.integers(1, 12)) if max_tokens is None else max_tokens
    travel = draw(st.sampled_from(low_latency_cases_module.FORMATS))
    use_logfmt = draw(st.booleans())
    case = low_latency_cases_module.Case(
        tokens=tuple(draw(st.lists(st.integers(0, most), min_size=num_ranks, max_size=num_ranks))),
        max_tokens=most,
        num_topk=draw(st.integers(1, 6)),
        local_experts=draw(st.integers(1, 4)),
        routing=draw(st.sampled_from(ROUTINGS)),
        travel=travel,
        use_logfmt=use_logfmt,
        zero_copy=not use_logfmt and draw(st.booleans()),
        in_place=draw(st.booleans()),
        how=draw(st.sampled_from(["in line", "async", "hook"])),
        stats=draw(st.booleans()),
        combines=draw(st.integers(1, 2)),
        delay_seed=draw(st.one_of(st.none(), st.integers(0, 1000))),
        seed=draw(st.integers(0, 10_000)),
    )
    return replace(case, hidden=case.hidden_multiple * draw(st.integers(1, 3)))
