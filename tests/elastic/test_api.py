"""What `ElasticBuffer` has beside dispatch and combine: events, hints, barriers, handles, its end."""

from __future__ import annotations

import copy
import pickle
import re
import time
import warnings
from typing import Any

import pytest
import torch

from anyep.api.elastic import ElasticBuffer
from anyep.errors import AnyEPError, BufferBroken, InvalidCall, NotSupported, PeerLost
from anyep.events import EventHandle, EventOverlap
from tests.support.elastic_cases import NUM_BYTES, ElasticCase, check_case, elastic_buffer
from tests.support.patience import scaled
from tests.support.world import RankContext, get_world

GOOD = ElasticCase((3, 4))
HIDDEN = 16


def ones(num_tokens: int) -> torch.Tensor:
    return torch.ones((num_tokens, HIDDEN), dtype=torch.bfloat16, device="cpu")


def one_choice(experts: list[int]) -> torch.Tensor:
    return torch.tensor(experts, dtype=torch.int64, device="cpu")[:, None]


# Events


def hold_an_epilogue(context: RankContext) -> None:
    """Rows are sent, but laid out only after the event of the caller."""
    buffer, gate = elastic_buffer(context), EventHandle.pending()
    rows, _, _, handle, event = buffer.dispatch(
        ones(2),
        one_choice([0, 1]),
        num_experts=2,
        do_expand=True,
        previous_event_before_epilogue=gate,
        async_with_compute_stream=True,
    )
    assert handle.num_recv_tokens_per_expert_list == [2]
    assert event.event is not None
    assert not event.event.is_finished
    gate.finish()
    event.current_stream_wait()
    assert isinstance(rows, torch.Tensor)
    assert rows.tolist() == ones(2).tolist()


def test_epilogue_waits_for_its_event() -> None:
    get_world(2).run(hold_an_epilogue)


def combine_rows_of_the_future(context: RankContext) -> None:
    """A combine that is called before its rows are there, which the previous event says."""
    buffer, ready = elastic_buffer(context), EventHandle.pending()
    rows, _, _, handle, _ = buffer.dispatch(ones(2), one_choice([0, 1]), num_experts=2, do_expand=True)
    assert isinstance(rows, torch.Tensor)
    outputs = torch.zeros_like(rows)
    combined, _, event = buffer.combine(
        outputs,
        handle,
        previous_event=ready,
        async_with_compute_stream=True,
        allocate_on_comm_stream=True,
    )
    outputs.fill_(3)
    ready.finish()
    with event:
        pass
    assert combined.tolist() == (3 * ones(2)).tolist()


def test_combine_follows_its_event() -> None:
    get_world(2).run(combine_rows_of_the_future)


def combine_what_failed(context: RankContext) -> str:
    """The work before rank 0's combine fails: the peers hear of it, and later calls work."""
    buffer, ready = elastic_buffer(context), EventHandle.pending()
    rows, _, _, handle, _ = buffer.dispatch(ones(2), one_choice([0, 1]), num_experts=2, do_expand=True)
    assert isinstance(rows, torch.Tensor)
    _, _, event = buffer.combine(rows, handle, previous_event=ready, async_with_compute_stream=True)
    ready.finish(InvalidCall("the experts failed") if context.rank == 0 else None)
    with pytest.raises(AnyEPError) as raised:
        event.current_stream_wait()
    check_case(context, GOOD, buffer)
    return str(raised.value)


def test_previous_work_that_failed() -> None:
    first, second = get_world(2).run(combine_what_failed)
    assert first == "the experts failed"
    assert second.startswith("rank 0 refused its combine")


def test_overlap_has_a_hook_and_lets_go() -> None:
    calls: list[str] = []
    event = EventOverlap(EventHandle(), extra_tensors=(1,))
    event.register_hook_after_wait(lambda: calls.append("hook"))
    with pytest.raises(InvalidCall, match="this event has a hook already"):
        event.register_hook_after_wait(lambda: None)
    with event(release_handle=True):
        assert event.event is not None
    assert (calls, event.event, event.extra_tensors) == (["hook"], None, None)
    event.current_stream_wait()
    assert calls == ["hook"]


# Handles


def use_copies_of_handles(context: RankContext) -> None:
    """Two handles in flight; one is pickled and one copied while its dispatch may be under way."""
    buffer, made = elastic_buffer(context), []
    for experts in ([0, 1, 0], [1, 1, 0]):
        rows, _, _, handle, event = buffer.dispatch(
            ones(3), one_choice(experts), num_experts=2, do_expand=True, async_with_compute_stream=True
        )
        made.append((rows, handle, event))
    copies = pickle.loads(pickle.dumps(made[0][1])), copy.deepcopy(made[1][1])
    for (rows, handle, event), other in zip(reversed(made), reversed(copies), strict=True):
        event.current_stream_wait()
        assert isinstance(rows, torch.Tensor)
        again = buffer.dispatch(ones(3), handle=other, do_expand=True)[0]
        assert isinstance(again, torch.Tensor)
        assert again.tolist() == rows.tolist()
        assert buffer.combine(rows, handle)[0].tolist() == buffer.combine(rows, other)[0].tolist()


def test_copies_of_handles() -> None:
    get_world(2).run(use_copies_of_handles)


def restore_the_tensors_of_a_handle(context: RankContext) -> None:
    """As activation checkpointing does: every tensor is replaced by one with the same numbers."""
    buffer = elastic_buffer(context)
    rows, _, _, handle, _ = buffer.dispatch(ones(3), one_choice([0, 1, -1]), num_experts=2)
    assert isinstance(rows, torch.Tensor)
    before = buffer.combine(rows, handle)[0]
    for name, value in vars(handle).items():
        if isinstance(value, torch.Tensor):
            setattr(handle, name, value.clone())
    assert buffer.combine(rows, handle)[0].tolist() == before.tolist()


def test_tensors_of_a_handle_restored() -> None:
    get_world(2).run(restore_the_tensors_of_a_handle)


# Barriers and hints


def arrive_late(context: RankContext) -> float:
    buffer, started = elastic_buffer(context), time.monotonic()
    if context.rank == 1:
        time.sleep(0.2)
    buffer.barrier(with_cpu_sync=True)
    check_case(context, GOOD, buffer)
    return time.monotonic() - started


def test_barrier() -> None:
    assert min(get_world(2).run(arrive_late)) >= 0.2


def call_something_else(context: RankContext) -> str:
    buffer = elastic_buffer(context)
    calls = buffer.barrier, lambda: buffer.dispatch(ones(1), one_choice([0]), num_experts=2)
    with pytest.raises(AnyEPError) as raised:
        calls[context.rank]()
    check_case(context, GOOD, buffer)
    return str(raised.value)


def test_barrier_on_some_ranks() -> None:
    for message in get_world(2).run(call_something_else):
        assert message.endswith("about the function called: barrier on rank 0; dispatch on rank 1")


def ask_for_numbers(context: RankContext) -> None:
    assert ElasticBuffer.get_buffer_size_hint(context.group, 8192, 7168, 8) == 947912704
    buffer = elastic_buffer(context)
    assert buffer.get_theoretical_num_sms(256, 8, nvlink_gbs=430.3) == 14
    assert buffer.get_theoretical_num_sms(256, 8) == 14
    assert buffer.get_theoretical_num_qps(4) == 4
    assert isinstance(buffer.get_comm_stream(), torch.Stream | torch.cpu.Stream)
    with pytest.raises(NotSupported, match="num_scaleout_topk is 1: it must be 0"):
        buffer.get_theoretical_num_sms(256, 8, 1)
    assert ElasticBuffer.get_engram_storage_size_hint(100_000, 128, 512) == (2097152, 27262976)
    assert ElasticBuffer.get_pp_buffer_size_hint(1_000_001, 2) == 8388608
    assert ElasticBuffer.get_agrs_num_max_session_bytes(context.group, [(3,), (5, 2)], torch.uint8) == 128
    assert ElasticBuffer.get_agrs_num_max_session_bytes(context.group, (5, 2), torch.uint8) == 96
    assert ElasticBuffer.get_agrs_buffer_size_hint(context.group, 5) == 2 << 20


def test_numbers() -> None:
    get_world(8).run(ask_for_numbers)


ABSENT = {
    "engram_write": "AnyEP has no remote tables",
    "engram_fetch": "AnyEP has no remote tables",
    "pp_set_config": "AnyEP sends no tensors between pipeline stages",
    "pp_send": "AnyEP sends no tensors between pipeline stages",
    "pp_recv": "AnyEP sends no tensors between pipeline stages",
    "agrs_set_config": "AnyEP has no sessions of all-gathers",
    "create_agrs_session": "AnyEP has no sessions of all-gathers",
    "destroy_agrs_session": "AnyEP has no sessions of all-gathers",
    "agrs_new_session": "AnyEP has no sessions of all-gathers",
    "agrs_get_inplace_tensor": "AnyEP has no sessions of all-gathers",
    "all_gather": "AnyEP has no sessions of all-gathers",
}


def call_absent(context: RankContext) -> None:
    buffer = elastic_buffer(context)
    for name, sentence in ABSENT.items():
        with pytest.raises(NotSupported, match=rf"^ElasticBuffer.{name}: {sentence}"):
            getattr(buffer, name)(1, dtype=2)


def test_absent_calls() -> None:
    get_world(1).run(call_absent)


# The end, and who is named


def end_it(context: RankContext) -> None:
    buffer = ElasticBuffer(context.group, NUM_BYTES, num_max_tokens_per_rank=4, device="cpu")
    assert repr(buffer).startswith(f"<ElasticBuffer of rank {context.rank} of 2 on cpu")
    with pytest.raises(InvalidCall, match="x is on meta"):
        buffer.dispatch(torch.empty(1, HIDDEN, device="meta"), one_choice([0]), num_experts=2)
    buffer.destroy()
    buffer.destroy()
    with pytest.raises(BufferBroken, match=r"^this ElasticBuffer was destroyed: make a new one$"):
        buffer.barrier()
    other = ElasticBuffer(
        context.group, NUM_BYTES, num_max_tokens_per_rank=4, device="cpu", explicitly_destroy=True
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del other
    assert [str(one.message) for one in caught] == [
        "an ElasticBuffer made with explicitly_destroy=True was dropped without destroy()"
    ]


def test_end() -> None:
    get_world(2).run(end_it)


def leave_while_others_wait(context: RankContext) -> str:
    buffer = ElasticBuffer(context.group, NUM_BYTES, num_max_tokens_per_rank=4, device="cpu")
    if context.rank == 0:
        buffer.destroy()
        return ""
    with pytest.raises(PeerLost) as lost:
        buffer.barrier()
    with pytest.raises(BufferBroken, match=r"^this ElasticBuffer is broken since an earlier call: "):
        buffer.barrier()
    buffer.destroy()
    return str(lost.value)


def test_peer_that_leaves() -> None:
    _, message = get_world(2).run(leave_while_others_wait)
    assert "destroyed its ElasticBuffer while rank 1 waited for its notify message in barrier" in message


def wait_no_longer_than_said(context: RankContext) -> str:
    """Without ANYEP_TIMEOUT_S the argument is the deadline."""
    with pytest.MonkeyPatch.context() as patched:
        patched.delenv("ANYEP_TIMEOUT_S", raising=False)
        buffer = ElasticBuffer(
            context.group, NUM_BYTES, num_max_tokens_per_rank=4, device="cpu", num_cpu_timeout_secs=1
        )
    if context.rank == 0:
        time.sleep(scaled(3))
        return ""
    with pytest.raises(AnyEPError) as raised:
        buffer.barrier()
    return str(raised.value)


def test_deadline() -> None:
    _, message = get_world(2).run(wait_no_longer_than_said)
    assert re.search(r"\b1(\.0)? s\b", message)


def buffers_of_two_kinds(context: RankContext) -> str:
    from anyep import Buffer

    making: Any = ElasticBuffer if context.rank == 0 else Buffer
    with pytest.raises(AnyEPError) as raised:
        making(context.group, NUM_BYTES, device="cpu")
    return str(raised.value)


def test_two_classes_in_one_group() -> None:
    for message in get_world(2).run(buffers_of_two_kinds):
        assert "the ranks disagree about" in message
