"""The memory that a workload needs on each rank: the arithmetic behind `anyep plan`."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, Final

from anyep.cli.checks import check_experts
from anyep.errors import InvalidCall, whole_number
from anyep.layout import ControlRegion, check_num_sms
from anyep.sizes import (
    CHANNELS_PER_SCALE,
    Config,
    LowLatencySizes,
    TokenLayout,
    check_fp8_hidden,
    get_combine_config,
    get_dispatch_config,
    num_nodes,
    nvl_hint_parts,
    rdma_hint_parts,
)
from anyep.topology import check_nodes

ELEMENT_BYTES: Final = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8": 1}
LOW_LATENCY_DTYPES: Final = ("bf16", "fp8")


@dataclass(frozen=True)
class Workload:
    """What the ranks are going to do, except for the number of ranks."""

    hidden: int
    dtype: str
    num_tokens: int
    num_topk: int
    num_experts: int
    num_sms: int
    ranks_per_node: int
    low_latency_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.dtype not in ELEMENT_BYTES:
            raise InvalidCall(f"--dtype is {self.dtype!r}: choose one of {', '.join(ELEMENT_BYTES)}")
        whole_number("--hidden", self.hidden, minimum=1)
        whole_number("--tokens", self.num_tokens, minimum=0)
        check_num_sms("--num-sms", self.num_sms)
        whole_number("--ranks-per-node", self.ranks_per_node, minimum=1)
        if self.low_latency_tokens is not None:
            whole_number("--low-latency-tokens", self.low_latency_tokens, minimum=1)
            if self.dtype not in LOW_LATENCY_DTYPES:
                raise InvalidCall(
                    f"--dtype is {self.dtype!r}, but low-latency calls take bf16 rows, which may travel as"
                    f" FP8: choose {' or '.join(LOW_LATENCY_DTYPES)}, or leave --low-latency-tokens out"
                )
            if self.dtype == "fp8":
                check_fp8_hidden(self.hidden, name="--hidden")

    @property
    def hint_hidden_bytes(self) -> int:
        """A row as the size hints count it: 1-byte data may come back from the experts as 2-byte data."""
        return self.hidden * max(ELEMENT_BYTES[self.dtype], 2)

    @property
    def token(self) -> TokenLayout:
        num_scales = -(-self.hidden // CHANNELS_PER_SCALE) if self.dtype == "fp8" else 0
        return TokenLayout(self.hidden * ELEMENT_BYTES[self.dtype], num_scales, self.num_topk)


@dataclass(frozen=True)
class MemoryPlan:
    """What one of `num_ranks` ranks needs for a workload."""

    workload: Workload
    num_ranks: int

    def __post_init__(self) -> None:
        """Refuse what a Buffer would refuse, by the same checks."""
        whole_number("--ranks", self.num_ranks, minimum=1)
        # If there are fewer ranks than a node could have, they are one node.
        ranks_per_node = min(self.num_ranks, self.workload.ranks_per_node)
        check_nodes(self.num_ranks, ranks_per_node, "--ranks-per-node")
        check_experts(self.workload.num_experts, self.num_ranks, self.workload.num_topk)

    @cached_property
    def dispatch_config(self) -> Config:
        return get_dispatch_config(self.num_ranks, self.workload.num_sms)

    @cached_property
    def combine_config(self) -> Config:
        return get_combine_config(self.num_ranks, self.workload.num_sms)

    @property
    def num_nodes(self) -> int:
        return num_nodes(self.num_ranks, self.workload.ranks_per_node)

    @cached_property
    def nvl_parts(self) -> dict[str, int]:
        return self._larger_hint(nvl_hint_parts)

    @cached_property
    def rdma_parts(self) -> dict[str, int]:
        return self._larger_hint(rdma_hint_parts)

    @cached_property
    def low_latency(self) -> LowLatencySizes | None:
        if self.workload.low_latency_tokens is None:
            return None
        return LowLatencySizes(
            self.workload.low_latency_tokens, self.workload.hidden, self.workload.num_experts
        )

    @property
    def nvl_bytes(self) -> int:
        return sum(self.nvl_parts.values())

    @property
    def rdma_bytes(self) -> int:
        return sum(self.rdma_parts.values())

    @property
    def low_latency_bytes(self) -> int | None:
        return self.low_latency.total_bytes if self.low_latency else None

    @cached_property
    def control_parts(self) -> dict[str, int]:
        """The control region by kind; it comes on top of the hints."""
        control = ControlRegion(self.num_ranks, self.workload.ranks_per_node)
        parts: dict[str, int] = {}
        for block in control.blocks:
            kind = block.kind.replace(" ", "_").replace("-", "_")
            parts[kind] = block.num_bytes * block.num_peers * block.num_sets
        return parts | {"padding": control.num_bytes - sum(parts.values())}

    @property
    def total_bytes(self) -> int:
        """The bytes that a rank uses of its heap: low-latency slots lie beside the rings between nodes."""
        slots = self.low_latency_bytes or 0
        return sum(self.control_parts.values()) + self.nvl_bytes + self.rdma_bytes + slots

    @property
    def expected_rows(self) -> int:
        """Rows that a rank receives in one dispatch if every token draws its experts uniformly."""
        experts_elsewhere = self.workload.num_experts - self.workload.num_experts // self.num_ranks
        experts, topk = self.workload.num_experts, self.workload.num_topk
        missed = Fraction(math.comb(experts_elsewhere, topk), math.comb(experts, topk))
        return round(self.num_ranks * self.workload.num_tokens * (1 - missed))

    @property
    def expected_window_bytes(self) -> int:
        return self.expected_rows * self.workload.token.token_bytes

    def record(self) -> dict[str, Any]:
        """The plan for programs."""
        return {
            "ranks": self.num_ranks,
            "config": {"dispatch": asdict(self.dispatch_config), "combine": asdict(self.combine_config)},
            "nvl_bytes": self.nvl_bytes,
            "rdma_bytes": self.rdma_bytes,
            "low_latency_bytes": self.low_latency_bytes,
            "token_bytes": self.workload.token.token_bytes,
            "parts": {
                "nvl": self.nvl_parts,
                "rdma": self.rdma_parts,
                "low_latency": self.low_latency.parts() if self.low_latency else None,
                "token": self.workload.token.parts(),
                "control": self.control_parts,
            },
        }

    def _larger_hint(self, hint_parts: Any) -> dict[str, int]:
        candidates = [
            hint_parts(
                config,
                self.workload.hint_hidden_bytes,
                self.num_ranks,
                ranks_per_node=self.workload.ranks_per_node,
            )
            for config in (self.dispatch_config, self.combine_config)
        ]
        return max(candidates, key=lambda parts: sum(parts.values()))
