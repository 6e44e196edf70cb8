"""The CPU: heaps of shared memory (memfd), a stream that is a thread, kernels compiled by Numba.

A backend is this list of names; the modes use nothing else of it.
"""

from anyep.backends.cpu.compilation import compile_kernels
from anyep.backends.cpu.heap import BlockAddress, OwnBlock, PrivateBlock, SharedBlock, open_block
from anyep.backends.cpu.kernels.atomics import MAX_POLLS
from anyep.backends.cpu.kernels.commands import take_commands
from anyep.backends.cpu.kernels.compiler import Group
from anyep.backends.cpu.kernels.counting import (
    check_handle,
    count_layout,
    count_sent,
    fill_handle,
    first_contradiction,
    first_difference_of_digests,
    first_wrong_id,
    place_tokens,
)
from anyep.backends.cpu.kernels.driver_calls import run_batch
from anyep.backends.cpu.kernels.event_calls import record_and_wait
from anyep.backends.cpu.kernels.expand import (
    count_received,
    expand_rows,
    place_by_expert,
    reduce_expanded,
    zero_padding,
)
from anyep.backends.cpu.kernels.masks import adopt_masks, post_requests, read_requests
from anyep.backends.cpu.kernels.node_handles import (
    count_relayed,
    first_difference,
    place_in_nodes,
    plan_lanes,
    read_node_handle,
)
from anyep.backends.cpu.kernels.notify import (
    await_counters,
    post_notify,
    read_counts,
    read_headers,
    signal,
)
from anyep.backends.cpu.kernels.relay_combine import combine_between_nodes
from anyep.backends.cpu.kernels.relay_dispatch import dispatch_between_nodes
from anyep.backends.cpu.kernels.rings import combine_through_rings, dispatch_through_rings, read_counters
from anyep.backends.cpu.kernels.slots import (
    count_read,
    count_rows,
    list_returns,
    list_tokens,
    pack_tokens,
    post_records,
    read_records,
    send_tokens,
    stage_rows,
    sum_tokens,
)
from anyep.backends.cpu.kernels.sums import BF16, FP16, FP32, pull_and_sum
from anyep.backends.cpu.kernels.windows import (
    choose_windows,
    copy_rows,
    pad_ids,
    send_to_windows,
    unpack_window,
)
from anyep.backends.cpu.stream import Stream
from anyep.backends.cpu.team import Team

__all__ = [
    "BF16",
    "FP16",
    "FP32",
    "MAX_POLLS",
    "BlockAddress",
    "Group",
    "OwnBlock",
    "PrivateBlock",
    "SharedBlock",
    "Stream",
    "Team",
    "adopt_masks",
    "await_counters",
    "check_handle",
    "choose_windows",
    "combine_between_nodes",
    "combine_through_rings",
    "compile_kernels",
    "copy_rows",
    "count_layout",
    "count_read",
    "count_received",
    "count_relayed",
    "count_rows",
    "count_sent",
    "dispatch_between_nodes",
    "dispatch_through_rings",
    "expand_rows",
    "fill_handle",
    "first_contradiction",
    "first_difference",
    "first_difference_of_digests",
    "first_wrong_id",
    "list_returns",
    "list_tokens",
    "open_block",
    "pack_tokens",
    "pad_ids",
    "place_by_expert",
    "place_in_nodes",
    "place_tokens",
    "plan_lanes",
    "post_notify",
    "post_records",
    "post_requests",
    "pull_and_sum",
    "read_counters",
    "read_counts",
    "read_headers",
    "read_node_handle",
    "read_records",
    "read_requests",
    "record_and_wait",
    "reduce_expanded",
    "run_batch",
    "send_to_windows",
    "send_tokens",
    "signal",
    "stage_rows",
    "sum_tokens",
    "take_commands",
    "unpack_window",
    "zero_padding",
]
