"""Every constant, table row and vector of the size contract."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError, asdict, fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyep import AnyEPError, Config, InvalidCall, sizes
from anyep.sizes import (
    LowLatencySizes,
    TokenLayout,
    align,
    get_combine_config,
    get_dispatch_config,
    get_low_latency_rdma_size_hint,
    nvl_hint_parts,
    rdma_hint_parts,
    token_layout,
)
from tests.support.strategies import configs


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NUM_MAX_NVL_PEERS", 8),
        ("NUM_MAX_RDMA_PEERS", 20),
        ("NUM_MAX_FIFO_SLOTS", 32768),
        ("NUM_WORKSPACE_BYTES", 33554432),
        ("NUM_MAX_LOCAL_EXPERTS", 1024),
        ("NUM_BUFFER_ALIGNMENT_BYTES", 128),
        ("NUM_CPU_TIMEOUT_SECS", 100),
        ("NUM_WAIT_NANOSECONDS", 500),
        ("NUM_TIMEOUT_CYCLES", 200000000000),
        ("FINISHED_SUM_TAG", 1024),
        ("NUM_MAX_TOPK", 128),
        ("NUM_MAX_SCALES", 128),
        ("SOURCE_META_BYTES", 8),
        ("NUM_DEFAULT_SMS", 20),
        ("RDMA_META_BYTES", 72),
        ("LOW_LATENCY_HEADER_BYTES", 16),
        ("CHANNELS_PER_SCALE", 128),
        ("ROW_ALIGNMENT_BYTES", 16),
    ],
)
def test_constant(name: str, value: int) -> None:
    assert getattr(sizes, name) == value


TUNED = {
    2: ((16, 256, 6, 128), (6, 256, 6, 128)),
    4: ((16, 256, 6, 128), (6, 256, 6, 128)),
    8: ((6, 256, 6, 128), (6, 256, 6, 128)),
    16: ((16, 288, 20, 128), (2, 288, 28, 128)),
    24: ((8, 288, 32, 128), (1, 288, 20, 128)),
    32: ((8, 288, 32, 128), (1, 288, 20, 128)),
    64: ((20, 288, 28, 128), (1, 288, 20, 128)),
    128: ((20, 560, 32, 128), (1, 560, 12, 128)),
    144: ((32, 720, 12, 128), (2, 720, 8, 128)),
    160: ((28, 720, 12, 128), (2, 720, 8, 128)),
}


@pytest.mark.parametrize("num_ranks", TUNED)
def test_tuned_config(num_ranks: int) -> None:
    dispatch, combine = TUNED[num_ranks]
    assert get_dispatch_config(num_ranks) == Config(20, *dispatch)
    assert get_combine_config(num_ranks) == Config(20, *combine)
    assert get_dispatch_config(num_ranks, 24) == Config(24, *dispatch)
    assert get_combine_config(num_ranks, 24) == Config(24, *combine)


def test_tuned_tables_in_full() -> None:
    # Rounding hides some changes from the configs themselves.
    assert {count: rows[0] for count, rows in TUNED.items()} == sizes.TUNED_DISPATCH
    assert {count: rows[1] for count, rows in TUNED.items()} == sizes.TUNED_COMBINE


@given(st.integers(1, 10_000))
def test_any_rank_count_takes_the_row_below_it(num_ranks: int) -> None:
    listed = 2
    for count in TUNED:
        if count <= num_ranks:
            listed = count
    assert get_dispatch_config(num_ranks) == get_dispatch_config(listed)
    assert get_combine_config(num_ranks) == get_combine_config(listed)


def test_config_defaults_and_rounding() -> None:
    assert [field.default for field in fields(Config)] == [20, 6, 256, 6, 256]
    config = Config()
    assert (config.num_sms, config.num_channels) == (20, 10)
    assert (config.num_max_nvl_chunked_send_tokens, config.num_max_nvl_chunked_recv_tokens) == (6, 256)
    assert (config.num_max_rdma_chunked_send_tokens, config.num_max_rdma_chunked_recv_tokens) == (6, 258)
    assert Config(20, 36, 288, 20, 128).num_max_rdma_chunked_recv_tokens == 140


def test_config_goes_through_json_and_is_frozen() -> None:
    config = Config(24, 8, 64, 5, 10)
    assert Config(**json.loads(json.dumps(asdict(config)))) == config
    with pytest.raises(FrozenInstanceError):
        config.num_sms = 2  # type: ignore[misc]


def test_config_limits_are_reached_but_not_passed() -> None:
    assert Config(2, 1, 2, 1, 2).num_channels == 1
    # 128 // 2 is still allowed; the rounding comes after the test.
    assert Config(20, 6, 256, 64, 129).num_max_rdma_chunked_recv_tokens == 192
    with pytest.raises(InvalidCall):
        Config(20, 6, 256, 65, 129)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((3,), "num_sms is 3: it must be even, since a channel takes two SMs"),
        ((0,), "num_sms is 0: it must be at least 1"),
        ((-2,), "num_sms is -2: it must be at least 1"),
        (("20",), "num_sms is '20': it must be a whole number"),
        ((20.0,), "num_sms is 20.0: it must be a whole number"),
        (
            (20, 256, 256),
            "num_max_nvl_chunked_send_tokens is 256: it must be below"
            " num_max_nvl_chunked_recv_tokens, which is 256",
        ),
        ((20, 0, 256), "num_max_nvl_chunked_send_tokens is 0: it must be at least 1"),
        (
            (20, 6, 256, 65, 128),
            "num_max_rdma_chunked_send_tokens is 65: it must be at most half of"
            " num_max_rdma_chunked_recv_tokens, which is 128",
        ),
        ((20, 6, 256, 6, -1), "num_max_rdma_chunked_recv_tokens is -1: it must be at least 1"),
    ],
)
def test_config_refuses(arguments: tuple[int, ...], sentence: str) -> None:
    with pytest.raises(InvalidCall) as caught:
        Config(*arguments)
    assert str(caught.value) == sentence
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, AnyEPError)


def test_vectors_of_the_normal_hints() -> None:
    config = Config(20, 6, 256, 6, 128)
    assert config.get_nvl_buffer_size_hint(14336, 8) == 335_709_824
    assert config.get_rdma_buffer_size_hint(14336, 8) == 0
    config = Config(20, 36, 288, 20, 128)
    assert config.get_nvl_buffer_size_hint(14336, 16) == 377_673_984
    assert config.get_rdma_buffer_size_hint(14336, 16) == 91_887_744


def test_vectors_of_low_latency() -> None:
    low_latency = LowLatencySizes(num_max_tokens=128, hidden=7168, num_experts=256)
    assert low_latency.dispatch_message_bytes == low_latency.combine_message_bytes == 14_352
    assert low_latency.send_bytes == low_latency.recv_bytes == 470_286_336
    assert low_latency.signal_bytes == 1_024
    assert low_latency.total_bytes == 1_881_147_520
    assert get_low_latency_rdma_size_hint(128, 7168, 8, 256) == 1_881_147_520


@given(
    configs(),
    st.integers(1, 2000).map(lambda n: 16 * n),
    st.integers(1, 200),
    st.integers(1, 72),
)
def test_hints_follow_the_formulas(config: Config, hidden_bytes: int, ranks: int, per_node: int) -> None:
    channels, nvl_recv = config.num_sms // 2, config.num_max_nvl_chunked_recv_tokens
    node_ranks, nodes = min(ranks, per_node), (ranks + per_node - 1) // per_node
    nvl = channels * node_ranks * ((2 * nodes + 3) * 4 + nvl_recv * (hidden_bytes + 8 + 1536 + 512))
    nvl_hint = config.get_nvl_buffer_size_hint(hidden_bytes, ranks, ranks_per_node=per_node)
    assert nvl <= nvl_hint < nvl + 128
    assert nvl_hint % 128 == 0
    rdma_recv = config.num_max_rdma_chunked_recv_tokens
    rdma = channels * nodes * 2 * ((2 * 8 + 2) * 4 + rdma_recv * (hidden_bytes + 8 + 1536 + 512 + 16))
    rdma_hint = config.get_rdma_buffer_size_hint(hidden_bytes, ranks, ranks_per_node=per_node)
    if nodes == 1:
        assert rdma_hint == 0
    else:
        assert rdma <= rdma_hint < rdma + 128
        assert rdma_hint % 128 == 0


def test_parts_of_the_hints_are_its_terms() -> None:
    config = Config(20, 36, 288, 20, 128)
    rows = 10 * 8 * 288
    assert nvl_hint_parts(config, 14336, 16) == {
        "hidden": rows * 14336,
        "source_meta": rows * 8,
        "topk": rows * 1536,
        "scales": rows * 512,
        "prefixes_heads_tails": 10 * 8 * 28,
        "padding": 64,
    }
    rows = 10 * 2 * 2 * 140
    assert rdma_hint_parts(config, 14336, 16) == {
        "hidden": rows * 14336,
        "source_meta": rows * 8,
        "topk": rows * 1536,
        "scales": rows * 512,
        "row_alignment": rows * 16,
        "meta_heads_tails": 10 * 2 * 2 * 72,
        "padding": 64,
    }
    assert rdma_hint_parts(config, 14336, 8) == {}


@given(st.integers(1, 512), st.integers(1, 2048).map(lambda n: 8 * n), st.integers(1, 600))
def test_low_latency_follows_the_formulas(tokens: int, hidden: int, experts: int) -> None:
    low_latency = LowLatencySizes(tokens, hidden, experts)
    dispatch = 16 + max(2 * hidden, hidden + 4 * (hidden // 128))
    combine = 16 + 2 * hidden
    send = max(tokens * dispatch, experts * tokens * combine)
    recv = experts * tokens * max(dispatch, combine)
    assert low_latency.dispatch_message_bytes == dispatch
    assert (low_latency.send_bytes, low_latency.recv_bytes) == (send, recv)
    assert low_latency.total_bytes == (2 * send + 2 * recv + 2 * 4 * experts + 128) // 128 * 128
    assert sum(low_latency.parts().values()) == low_latency.total_bytes
    assert low_latency.parts()["signals"] == 8 * experts
    assert low_latency.parts()["send"] == 2 * send
    assert low_latency.parts()["receive"] == 2 * recv


@given(st.integers(1, 2000).map(lambda n: 16 * n), st.integers(0, 128), st.integers(0, 128))
def test_token_follows_the_formula(hidden_bytes: int, num_scales: int, num_topk: int) -> None:
    token = TokenLayout(hidden_bytes, num_scales, num_topk)
    used = hidden_bytes + 8 + 4 * num_scales + 4 * num_topk + 4 * num_topk
    assert used <= token.token_bytes < used + 16
    assert token.token_bytes % 16 == 0
    assert list(token.parts()) == ["hidden", "source_meta", "scales", "topk_ids", "topk_weights", "padding"]
    assert list(token.parts().values())[:5] == [hidden_bytes, 8, 4 * num_scales, 4 * num_topk, 4 * num_topk]


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: TokenLayout(24), "a row of 24 bytes is no multiple of 16 bytes:"),
        (lambda: TokenLayout(0), "hidden_bytes is 0: it must be at least 1"),
        (lambda: TokenLayout(16, num_scales=129), "129 scales per token: at most 128 can be carried"),
        (lambda: TokenLayout(16, num_scales=-1), "num_scales is -1: it must be at least 0"),
        (lambda: TokenLayout(16, num_topk=129), "top-k is 129: at most 128 experts per token"),
        (lambda: TokenLayout(16, num_topk=-1), "num_topk is -1: it must be at least 0"),
        (lambda: get_dispatch_config(0), "num_ranks is 0: it must be at least 1"),
        (lambda: get_combine_config(-1), "num_ranks is -1: it must be at least 1"),
        (lambda: get_dispatch_config(8, 7), "num_sms is 7: it must be even"),
        (lambda: Config().get_nvl_buffer_size_hint(-16, 8), "hidden_bytes is -16: it must be at least 1"),
        (lambda: Config().get_nvl_buffer_size_hint(100, 8), "a row of 100 bytes is no multiple of 16 bytes:"),
        (lambda: Config().get_nvl_buffer_size_hint(16, 0), "num_ranks is 0: it must be at least 1"),
        (lambda: Config().get_rdma_buffer_size_hint(16, 0), "num_ranks is 0: it must be at least 1"),
        (
            lambda: Config().get_rdma_buffer_size_hint(16, 8, ranks_per_node=0),
            "ranks_per_node is 0: it must be at least 1",
        ),
        (
            lambda: get_low_latency_rdma_size_hint(0, 7168, 8, 256),
            "num_max_dispatch_tokens_per_rank is 0: it must be at least 1",
        ),
        (lambda: get_low_latency_rdma_size_hint(1, 0, 8, 256), "hidden is 0: it must be at least 1"),
        (lambda: get_low_latency_rdma_size_hint(1, 4, 8, 256), "a row of 8 bytes is no multiple of 16"),
        (lambda: get_low_latency_rdma_size_hint(1, 7168, 0, 256), "num_ranks is 0: it must be at least 1"),
        (lambda: get_low_latency_rdma_size_hint(1, 7168, 8, 0), "num_experts is 0: it must be at least 1"),
    ],
)
def test_sizes_refuse(call, sentence: str) -> None:
    with pytest.raises(InvalidCall) as caught:
        call()
    assert str(caught.value).startswith(sentence)


def test_smallest_sizes_are_taken() -> None:
    assert TokenLayout(16) == TokenLayout(16, num_scales=0, num_topk=0)
    assert token_layout(16, 1, 2) == TokenLayout(16, num_scales=1, num_topk=2)
    assert token_layout(16, 1, 2) is token_layout(16, 1, 2)
    assert TokenLayout(16).token_bytes == 32
    assert TokenLayout(16, 128, 128).token_bytes == align(16 + 8 + 512 + 512 + 512, 16)
    assert LowLatencySizes(1, 8, 1).dispatch_message_bytes == 32
    assert get_low_latency_rdma_size_hint(1, 8, 1, 1) == 256
    assert Config(2, 1, 2, 1, 2).get_nvl_buffer_size_hint(16, 1) == align(20 + 2 * (16 + 2056), 128)
    assert Config(2, 1, 2, 1, 2).get_rdma_buffer_size_hint(16, 2, ranks_per_node=1) > 0


@given(st.integers(0, 10**12), st.integers(1, 4096))
def test_align(num_bytes: int, alignment: int) -> None:
    aligned = align(num_bytes, alignment)
    assert aligned % alignment == 0
    assert num_bytes <= aligned < num_bytes + alignment


def test_what_a_call_takes() -> None:
    assert sizes.check_num_experts(256, num_ranks=8) == 256
    assert [sizes.check_num_topk("topk_idx has", count) for count in (1, 128)] == [1, 128]
    sizes.check_fp8_hidden(128)
    sizes.check_fp8_hidden(512, use_ue8m0=True)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: sizes.check_num_experts(256, 3), "256 experts do not divide over 3 ranks"),
        (lambda: sizes.check_num_experts(3 * 1025, 3), "1025 experts per rank: at most 1024 are possible"),
        (lambda: sizes.check_num_topk("x has", 0), "x has 0 experts per token: it must be 1 to 128"),
        (lambda: sizes.check_num_topk("x has", 129), "x has 129 experts per token: it must be 1 to 128"),
        (lambda: sizes.check_fp8_hidden(64), "hidden is 64: with use_fp8 it must be a multiple of 128"),
        (
            lambda: sizes.check_fp8_hidden(384, True, "--hidden"),
            "--hidden is 384: with use_ue8m0 it must be a multiple of 512",
        ),
    ],
)
def test_what_no_call_takes(call, sentence: str) -> None:
    with pytest.raises(InvalidCall) as caught:
        call()
    assert str(caught.value).startswith(sentence)
