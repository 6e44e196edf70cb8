"""Cases that are run under other defaults of torch, on the CPU and on GPUs.

Ranks on a simulated GPU import this module, so it loads nothing that loads Triton.
"""

from __future__ import annotations

import torch

from tests.support import cases

NORMAL = {
    "plain": cases.Case((5, 0, 7, 3)),
    "float32, biases and weights": cases.Case(
        (9, 4, 1, 6), dtype="float32", num_biases=2, combine_weights=True, num_topk=3
    ),
    "fp8 with scales": cases.Case((9, 3, 14, 2), dtype="float8_e4m3fn", num_scales=5, strided_scales=True),
    "the worst case, asynchronous": cases.Case(
        (8, 3, 2, 5), worst=True, run_async=True, combine_weights=True
    ),
    "some choices missing": cases.Case((12, 11, 9, 8), routing="some missing", num_topk=4, alignment=4),
    "without choices of experts": cases.Case((7, 2, 4, 1), send_topk=False),
}


def set_other_defaults(rank: int) -> None:
    """To prepare a rank: even its process group is made under these."""
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.bfloat16)
