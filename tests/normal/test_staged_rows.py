"""A combine of rows that lie in no window copies them into one, and gives that back."""

from __future__ import annotations

from anyep.api.buffer import Buffer
from tests.support.cases import Case, inputs_of
from tests.support.world import RankContext, get_world


def combine_copies(context: RankContext) -> list[int]:
    """The bytes of windows that are used before and after combines of rows in other memory."""
    case = Case(tokens=(20,) * context.num_ranks)
    given = inputs_of(case)[context.rank]
    assert given.topk_idx is not None
    with Buffer(context.group, 1 << 20, device="cpu", num_window_bytes=1 << 20) as buffer:
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(given.topk_idx, case.num_experts)
        recv, _, weights, _, handle, _ = buffer.dispatch(
            given.x,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=given.topk_idx,
            topk_weights=given.topk_weights,
        )
        rows = recv.clone()  # type: ignore[union-attr]
        assert buffer.runtime is not None
        windows = buffer.runtime.windows
        assert windows.block.offset_of(rows) is None
        used_bytes = [windows.used_bytes]
        for _ in range(3):
            buffer.combine(rows, handle, topk_weights=weights)
            used_bytes.append(windows.used_bytes)
    return used_bytes


def test_windows_of_copies_come_back() -> None:
    for used_bytes in get_world(3).run(combine_copies):
        assert len(set(used_bytes)) == 1
