"""Calls that are refused, and calls that differ between ranks, as rounds: what each rank hears, and that the
Buffer works afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

from anyep import Config
from anyep.api.buffer import Buffer
from tests.support.recorder import Player
from tests.support.recordings.low_latency import LowLatency
from tests.support.recordings.normal import CONFIG, Normal


class NormalScene:
    """What right calls pass: rank and token decide where it goes. Every token has neighbouring experts."""

    tokens, hidden, num_topk = 6, 32, 2

    def __init__(self, player: Player) -> None:
        self.player, self.buffer = player, player.buffer
        self.num_experts = 2 * player.num_ranks
        self.ids = self.there(torch.arange(12).view(6, 2) % self.num_experts)
        self.arguments = self.right_arguments(self.ids)
        self.x, self.data = self.arguments["x"], self.there(torch.zeros(6, 32, dtype=torch.uint8))
        self.rows, *_, self.handle, _ = self.buffer.dispatch(**self.arguments)
        self.others = self.right_arguments(self.there(torch.zeros(6, 2, dtype=torch.int64)))
        self.rows_of_others, *_, self.handle_of_others, _ = self.buffer.dispatch(**self.others)

    def there(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.player.there(tensor)

    def right_arguments(self, ids: torch.Tensor) -> dict[str, Any]:
        per_rank, per_node, per_expert, in_rank, _ = self.buffer.get_dispatch_layout(ids, self.num_experts)
        return {
            "x": self.there(torch.ones(6, 32, dtype=torch.bfloat16)),
            "num_tokens_per_rank": per_rank,
            "num_tokens_per_rdma_rank": per_node,
            "is_token_in_rank": in_rank,
            "num_tokens_per_expert": per_expert,
            "topk_idx": ids,
            "topk_weights": self.there(torch.ones(6, 2)),
            "config": CONFIG,
        }

    def dispatch(self, **changes: Any) -> None:
        self.buffer.dispatch(**self.arguments | changes)[-1].current_stream_wait()

    def again(self, **changes: Any) -> None:
        arguments = {"x": self.x, "handle": self.handle, "config": CONFIG} | changes
        self.buffer.dispatch(**arguments)[-1].current_stream_wait()

    def combine(self, **changes: Any) -> None:
        arguments = {"x": self.rows, "handle": self.handle, "config": CONFIG} | changes
        self.buffer.combine(**arguments)[-1].current_stream_wait()

    def changed(self, index: int, change: Callable[[torch.Tensor], Any]) -> Any:
        return (*self.handle[:index], change(self.handle[index]), *self.handle[index + 1 :])

    def right(self) -> None:
        self.dispatch()


class LowLatencyScene:
    """As NormalScene."""

    def __init__(self, player: Player) -> None:
        self.player, self.buffer = player, player.buffer
        self.num_experts = 2 * player.num_ranks
        self.ids = self.there(torch.arange(12).view(6, 2) % self.num_experts)
        self.x = self.rows_of(6)
        self.buffer.clean_low_latency_buffer(8, 128, self.num_experts)
        _, _, self.handle, *_ = self.buffer.low_latency_dispatch(self.x, self.ids, 8, self.num_experts)
        self.outputs = self.there(torch.ones(2, 8 * player.num_ranks, 128, dtype=torch.bfloat16))
        self.weights = self.there(torch.ones(6, 2))

    def there(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.player.there(tensor)

    def rows_of(self, tokens: int, hidden: int = 128) -> torch.Tensor:
        return self.there(torch.ones(tokens, hidden, dtype=torch.bfloat16))

    def dispatch(self, **changes: Any) -> None:
        arguments = {
            "x": self.x,
            "topk_idx": self.ids,
            "num_max_dispatch_tokens_per_rank": 8,
            "num_experts": self.num_experts,
            "use_fp8": False,
        }
        *_, event, hook = self.buffer.low_latency_dispatch(**arguments | changes)
        event.current_stream_wait()
        if hook is not None:
            hook()

    def combine(self, **changes: Any) -> None:
        arguments = {
            "x": self.outputs,
            "topk_idx": self.ids,
            "topk_weights": self.weights,
            "handle": self.handle,
        }
        *_, event, hook = self.buffer.low_latency_combine(**arguments | changes)
        event.current_stream_wait()
        if hook is not None:
            hook()

    def clean(self, *sizes: Any) -> None:
        self.buffer.clean_low_latency_buffer(*sizes or (8, 128, self.num_experts))

    def changed(self, index: int, change: Callable[[Any], Any]) -> Any:
        return (*self.handle[:index], change(self.handle[index]), *self.handle[index + 1 :])

    def right(self) -> None:
        self.dispatch()


@dataclass(frozen=True)
class Wrong:
    """Some ranks make another call than the others; then all make a right one."""

    name: str
    call: Callable[[Any], Any]
    others: Callable[[Any], Any] = lambda scene: scene.right()
    who: str = "first"
    """first, last or all."""
    scene: type = NormalScene

    def play(self, player: Player) -> None:
        if self.scene not in player.scenes:
            player.scenes[self.scene] = self.scene(player)
            player.barrier()
        scene = player.scenes[self.scene]
        wrong = {"first": player.rank == 0, "last": player.rank == player.num_ranks - 1, "all": True}[
            self.who
        ]
        player.attempt(self.name, lambda: (self.call if wrong else self.others)(scene))
        # On a GPU some errors are found by kernels, of all ranks.
        player.barrier()
        player.attempt(f"{self.name}: then", scene.right)


def wrong_dispatch(name: str, change: Callable[[NormalScene], dict[str, Any]]) -> Wrong:
    return Wrong(f"dispatch, {name}", lambda scene: scene.dispatch(**change(scene)))


def wrong_again(name: str, change: Callable[[NormalScene], dict[str, Any]]) -> Wrong:
    return Wrong(
        f"again, {name}", lambda scene: scene.again(**change(scene)), others=lambda scene: scene.again()
    )


def wrong_combine(name: str, change: Callable[[NormalScene], dict[str, Any]]) -> Wrong:
    return Wrong(
        f"combine, {name}", lambda scene: scene.combine(**change(scene)), others=lambda scene: scene.combine()
    )


def unlike(name: str, call: Callable[[Any], Any]) -> Wrong:
    """The last rank calls rightly, but otherwise than the others."""
    return Wrong(f"unlike, {name}", call, who="last")


def wrong_low_latency(name: str, call: Callable[[LowLatencyScene], Any], **more: Any) -> Wrong:
    return Wrong(name, call, scene=LowLatencyScene, **more)


def one_more(counts: torch.Tensor) -> torch.Tensor:
    """Of the first."""
    counts = counts.clone()
    counts[0] += 1
    return counts


WRONG_CALLS: Final = (
    wrong_dispatch("no tensor", lambda scene: {"x": [1, 2, 3]}),
    wrong_dispatch("dtype", lambda scene: {"x": scene.x.long()}),
    wrong_dispatch("dimensions", lambda scene: {"x": scene.x[0]}),
    wrong_dispatch("meta", lambda scene: {"x": scene.x.to("meta")}),
    wrong_dispatch("strides", lambda scene: {"x": scene.x.t().contiguous().t()}),
    wrong_dispatch("row bytes", lambda scene: {"x": scene.x[:, :4].contiguous()}),
    wrong_dispatch("scales of wide data", lambda scene: {"x": (scene.x, scene.there(torch.ones(6, 1)))}),
    wrong_dispatch("scales' rows", lambda scene: {"x": (scene.data, scene.there(torch.ones(7, 1)))}),
    wrong_dispatch("too many scales", lambda scene: {"x": (scene.data, scene.there(torch.ones(6, 129)))}),
    wrong_dispatch("ids alone", lambda scene: {"topk_weights": None}),
    wrong_dispatch("ids' dtype", lambda scene: {"topk_idx": scene.ids.int()}),
    wrong_dispatch("weights' shape", lambda scene: {"topk_weights": scene.there(torch.ones(6, 3))}),
    wrong_dispatch("no counts", lambda scene: {"num_tokens_per_rank": None}),
    wrong_dispatch("mask's shape", lambda scene: {"is_token_in_rank": scene.there(torch.ones(6, 9).bool())}),
    wrong_dispatch(
        "counts",
        lambda scene: {"num_tokens_per_rank": one_more(scene.arguments["num_tokens_per_rank"])},
    ),
    wrong_dispatch(
        "expert counts",
        lambda scene: {"num_tokens_per_expert": one_more(scene.arguments["num_tokens_per_expert"])},
    ),
    wrong_dispatch("other ids", lambda scene: {"topk_idx": scene.ids.roll(1, 0).contiguous()}),
    wrong_dispatch("alignment", lambda scene: {"expert_alignment": 0}),
    wrong_dispatch("worst case", lambda scene: {"num_worst_tokens": -1}),
    wrong_dispatch(
        "worst case without ids",
        lambda scene: {"num_worst_tokens": 9, "topk_idx": None, "topk_weights": None},
    ),
    wrong_dispatch("config", lambda scene: {"config": (4, 2)}),
    wrong_dispatch("too many channels", lambda scene: {"config": Config(258, 1, 2)}),
    wrong_dispatch("event", lambda scene: {"previous_event": 7}),
    wrong_dispatch("allocation", lambda scene: {"allocate_on_comm_stream": True}),
    Wrong(
        "dispatch, too many rows",
        lambda scene: scene.dispatch(num_worst_tokens=1),
        others=lambda scene: scene.dispatch(num_worst_tokens=99),
    ),
    wrong_again("rows", lambda scene: {"x": scene.x[:-1]}),
    wrong_again("ids", lambda scene: {"topk_idx": scene.ids}),
    wrong_again("channels", lambda scene: {"config": Config(8, 2, 5, 2, 6)}),
    wrong_combine("rows", lambda scene: {"x": scene.rows[:-1]}),
    wrong_combine("dtype", lambda scene: {"x": scene.rows.to(torch.uint8)}),
    wrong_combine("no handle", lambda scene: {"handle": None}),
    wrong_combine("part of a handle", lambda scene: {"handle": scene.handle[:5]}),
    wrong_combine("handle's dtype", lambda scene: {"handle": scene.changed(0, torch.Tensor.double)}),
    wrong_combine("three biases", lambda scene: {"bias": (scene.x, scene.x, scene.x)}),
    wrong_combine("bias's shape", lambda scene: {"bias": scene.x[:1]}),
    wrong_combine("bias's dtype", lambda scene: {"bias": scene.x.float()}),
    wrong_combine("weights' rows", lambda scene: {"topk_weights": scene.there(torch.ones(3, 2))}),
    Wrong("layout, dtype", lambda scene: scene.buffer.get_dispatch_layout(scene.ids.int(), 8), who="all"),
    Wrong("layout, experts", lambda scene: scene.buffer.get_dispatch_layout(scene.ids, 4097), who="all"),
    Wrong(
        "local tensor, offset",
        lambda scene: scene.buffer.get_local_buffer_tensor(torch.int32, offset=2),
        who="all",
    ),
    Wrong(
        "no config",
        lambda scene: scene.buffer.internode_dispatch(scene.x, scene.handle),
        others=lambda scene: scene.again(),
    ),
    Wrong("no low-latency mode", lambda scene: scene.buffer.clean_low_latency_buffer(8, 128, 8), who="all"),
    unlike("combine", lambda scene: scene.combine()),
    unlike("again", lambda scene: scene.again()),
    unlike("hidden", lambda scene: scene.dispatch(x=scene.x.repeat(1, 2))),
    unlike("dtype", lambda scene: scene.dispatch(x=scene.x.half())),
    unlike("fp8", lambda scene: scene.dispatch(x=(scene.data, scene.there(torch.ones(6, 1))))),
    unlike("no ids", lambda scene: scene.dispatch(x=scene.x.float(), topk_idx=None, topk_weights=None)),
    unlike("channels", lambda scene: scene.dispatch(config=Config(8, 2, 5, 2, 6))),
    unlike("rings", lambda scene: scene.dispatch(config=Config(4, 2, 9, 2, 6))),
    Wrong(
        "combine by another handle",
        lambda scene: scene.combine(x=scene.rows_of_others, handle=scene.handle_of_others),
        others=lambda scene: scene.combine(),
    ),
    Wrong(
        "again by another handle",
        lambda scene: scene.again(handle=scene.handle_of_others),
        others=lambda scene: scene.again(),
    ),
    Normal("after all of it"),
)
HEARD_ON_GPUS: Final = tuple(
    call
    for call in WRONG_CALLS
    if call.name.startswith(("unlike", "combine, rows", "combine by", "again, rows", "again by", "after"))
    or call.name
    in ("dispatch, row bytes", "dispatch, counts", "dispatch, expert counts", "dispatch, too many rows")
    or call.name in ("combine, bias's shape", "layout, dtype", "no config")
)
"""Those that go another way than on the CPU, and some that do not. Ids that are elsewhere are looked for side
by side on a GPU: which is found first is not defined."""
WRONG_LOW_LATENCY_CALLS: Final = (
    wrong_low_latency(
        "too many tokens",
        lambda scene: scene.dispatch(
            x=scene.rows_of(9), topk_idx=scene.there(torch.zeros(9, 2, dtype=torch.int64))
        ),
    ),
    wrong_low_latency("another maximum", lambda scene: scene.dispatch(num_max_dispatch_tokens_per_rank=16)),
    wrong_low_latency("another hidden", lambda scene: scene.dispatch(x=scene.rows_of(6, 256))),
    wrong_low_latency("no maximum", lambda scene: scene.dispatch(num_max_dispatch_tokens_per_rank="8")),
    wrong_low_latency("experts", lambda scene: scene.dispatch(num_experts=4097)),
    wrong_low_latency("hidden with FP8", lambda scene: scene.dispatch(x=scene.rows_of(6, 136), use_fp8=True)),
    wrong_low_latency("UE8M0 alone", lambda scene: scene.dispatch(use_fp8=True, use_ue8m0=True)),
    wrong_low_latency(
        "both ways to go on", lambda scene: scene.dispatch(async_finish=True, return_recv_hook=True)
    ),
    wrong_low_latency("dtype", lambda scene: scene.dispatch(x=scene.x.half())),
    wrong_low_latency("meta", lambda scene: scene.dispatch(x=scene.x.to("meta"))),
    wrong_low_latency("ids", lambda scene: scene.dispatch(topk_idx=scene.ids.int())),
    wrong_low_latency(
        "stats",
        lambda scene: scene.dispatch(cumulative_local_expert_recv_stats=scene.there(torch.zeros(9).int())),
    ),
    wrong_low_latency(
        "dispatch, others by hook",
        lambda scene: scene.dispatch(x=None),
        others=lambda scene: scene.dispatch(return_recv_hook=True),
    ),
    wrong_low_latency(
        "dispatch, others beside",
        lambda scene: scene.dispatch(x=None),
        others=lambda scene: scene.dispatch(async_finish=True),
    ),
    *(
        wrong_low_latency(f"combine, {name}", call, others=lambda scene: scene.combine())
        for name, call in {
            "no handle": lambda scene: scene.combine(handle=None),
            "part of a handle": lambda scene: scene.combine(handle=scene.handle[:4]),
            "handle's maximum": lambda scene: scene.combine(handle=scene.changed(2, lambda _: 16)),
            "source indices": lambda scene: scene.combine(handle=scene.changed(0, torch.Tensor.long)),
            "ranges' shape": lambda scene: scene.combine(handle=scene.changed(1, lambda part: part[:1])),
            "x's shape": lambda scene: scene.combine(x=scene.outputs[:, :-1].contiguous()),
            "x's dtype": lambda scene: scene.combine(x=scene.outputs.float()),
            "weights": lambda scene: scene.combine(topk_weights=None),
            "out": lambda scene: scene.combine(out=scene.rows_of(7)),
            "zero copy and LogFMT": lambda scene: scene.combine(zero_copy=True, use_logfmt=True),
            "zero copy without its buffer": lambda scene: scene.combine(zero_copy=True),
        }.items()
    ),
    wrong_low_latency("clean", lambda scene: scene.clean(0, 128, 8), others=lambda scene: scene.clean()),
    wrong_low_latency("no masks", lambda scene: scene.buffer.low_latency_clean_mask_buffer(), who="all"),
    *(
        wrong_low_latency(f"unlike, {name}", call, others=others, who="last")
        for name, call, others in (
            ("combine", lambda scene: scene.combine(), lambda scene: scene.dispatch()),
            ("fp8", lambda scene: scene.dispatch(use_fp8=True), lambda scene: scene.dispatch()),
            (
                "round_scale",
                lambda scene: scene.dispatch(use_fp8=True, round_scale=True),
                lambda scene: scene.dispatch(use_fp8=True),
            ),
            ("logfmt", lambda scene: scene.combine(use_logfmt=True), lambda scene: scene.combine()),
            ("clean", lambda scene: scene.clean(9, 128, scene.num_experts), lambda scene: scene.clean()),
        )
    ),
    LowLatency("after all of it"),
)


@dataclass(frozen=True)
class Making:
    """Buffers that cannot be made, or not so."""

    name: str

    def play(self, player: Player) -> None:
        for number, (who, changes) in enumerate(
            (
                ("all", {"num_nvl_bytes": 100}),
                ("all", {"num_nvl_bytes": -128}),
                ("last", {"num_rdma_bytes": 1}),
                ("all", {"num_window_bytes": 64}),
                ("all", {"ranks_per_node": 7}),
                ("last", {"network": "foo"}),
                ("all", {"device": "foo"}),
                ("last", {"num_nvl_bytes": 1 << 21}),
                ("last", {"low_latency_mode": True, "num_rdma_bytes": 1 << 20}),
                ("all", {"group": None}),
            )
        ):
            arguments: dict[str, Any] = {
                "group": player.group,
                "num_nvl_bytes": 1 << 20,
                "device": "cpu",
                "ranks_per_node": None,
            }
            if who == "all" or player.rank == player.num_ranks - 1:
                arguments |= changes
            player.attempt(f"{self.name} {number}", lambda made=arguments: Buffer(**made).destroy())


LOW_LATENCY_HEARD_ON_GPUS: Final = tuple(
    call
    for call in WRONG_LOW_LATENCY_CALLS
    if call.name.startswith(("unlike", "dispatch", "after", "clean"))
    or call.name in ("too many tokens", "another hidden", "combine, no handle", "combine, x's shape")
)
