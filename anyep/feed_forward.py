"""`FeedForward`, the expert of most models; `anyep.nn` has it as well."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class FeedForward(nn.Module):
    """An expert: `down(silu(gate(x)) * up(x))`.

    `device` and `dtype` are those of the weights; as in torch.nn, they default to torch's defaults.

    Args:
        hidden: Values per row.
        inner: Values between the two products.
        device: Of the weights.
        dtype: Of the weights.
    """

    def __init__(
        self,
        hidden: int,
        inner: int,
        *,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, inner, bias=False, device=device, dtype=dtype)
        self.up = nn.Linear(hidden, inner, bias=False, device=device, dtype=dtype)
        self.down = nn.Linear(inner, hidden, bias=False, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """The expert's output for each row.

        Args:
            x: Rows [rows, hidden]; there may be none.
        """
        output: Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return output
