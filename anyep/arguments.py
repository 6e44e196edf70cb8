"""The checks of what users pass to `Buffer`: each refuses with a sentence that says what to do."""

from __future__ import annotations

from typing import Any, Final

import torch

from anyep.errors import InvalidCall, whole_number
from anyep.events import EventOverlap
from anyep.layout import NUM_MAX_CHANNELS
from anyep.modes.intranode import Payload
from anyep.sizes import (
    NUM_BUFFER_ALIGNMENT_BYTES,
    NUM_MAX_LOCAL_EXPERTS,
    NUM_MAX_SCALES,
    NUM_MAX_TOPK,
    Config,
    check_row_bytes,
)

FLOAT_DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)


def check_num_bytes(name: str, value: int) -> int:
    value = whole_number(name, value, minimum=0)
    if value % NUM_BUFFER_ALIGNMENT_BYTES:
        raise InvalidCall(f"{name} is {value}: it must be a multiple of {NUM_BUFFER_ALIGNMENT_BYTES}")
    return value


def check_devices(device: torch.device, **things: Any) -> None:
    """Refuse tensors, and pairs with tensors, that are not on the Buffer's device."""
    for name, thing in things.items():
        for part in thing if isinstance(thing, tuple | list) else (thing,):
            if isinstance(part, torch.Tensor) and part.device != device:
                works = "the CPU" if device.type == "cpu" else str(device)
                raise InvalidCall(
                    f"{name} is on {part.device}, but this Buffer works on {works}: move the tensor, or make"
                    f" the Buffer with device='{part.device.type}' instead of device='{device.type}'"
                )


def check_tensor(
    name: str, tensor: Any, dtypes: tuple[torch.dtype, ...] | None, shape: tuple[int | None, ...]
) -> torch.Tensor:
    """A tensor of one of these dtypes and this shape; None stands for any size."""
    if not isinstance(tensor, torch.Tensor):
        raise InvalidCall(f"{name} is of type {type(tensor).__name__}: it must be a tensor")
    if tensor.layout is not torch.strided:
        raise InvalidCall(f"{name} is sparse: pass {name}.to_dense()")
    if dtypes is not None and tensor.dtype not in dtypes:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise InvalidCall(f"{name} is {str(tensor.dtype).removeprefix('torch.')}: it must be {names}")
    actual = tensor.shape
    if actual != shape and not _fits(actual, shape):
        wanted_shape = ", ".join("any" if size is None else str(size) for size in shape)
        raise InvalidCall(f"{name} has shape {list(actual)}: it must be [{wanted_shape}]")
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    plain: torch.Tensor = tensor.detach() if tensor.requires_grad else tensor
    return plain


def _fits(actual: tuple[int, ...], shape: tuple[int | None, ...]) -> bool:
    if len(actual) != len(shape):
        return False
    for wanted, size in zip(shape, actual, strict=True):
        if wanted is not None and wanted != size:
            return False
    return True


def check_x(name: str, x: Any, dtypes: tuple[torch.dtype, ...] | None) -> torch.Tensor:
    """Rows that can be sent: contiguous, in multiples of 16 bytes."""
    rows = check_tensor(name, x, dtypes, (None, None))
    if not rows.is_contiguous():
        raise InvalidCall(f"{name} is not contiguous: pass {name}.contiguous()")
    if rows.shape[1] == 0:
        raise InvalidCall(f"{name} has no columns: the hidden size must be at least 1")
    check_row_bytes(rows.shape[1] * rows.element_size())
    return rows


def check_payload(x: Any, topk_idx: Any, topk_weights: Any, source_bytes: int) -> Payload:
    """What dispatch sends: x, or (1-byte data, scales), and top-k ids with weights or neither; and so many
    bytes about each row's origin."""
    scales = None
    if isinstance(x, tuple | list):
        if len(x) != 2:
            raise InvalidCall(f"x is a {type(x).__name__} of {len(x)}: it must be a tensor or (data, scales)")
        data, scales = x
        data = check_x("x[0]", data, None)
        if data.element_size() != 1:
            raise InvalidCall(
                f"x[0] is {_name(data.dtype)}: data with scales must have 1-byte values, such as float8"
            )
        scales = check_tensor("x[1]", scales, (torch.float32, torch.int32), (data.shape[0], None))
        if not 1 <= scales.shape[1] <= NUM_MAX_SCALES:
            raise InvalidCall(
                f"x[1] has {scales.shape[1]} scales per token: it must be 1 to {NUM_MAX_SCALES}"
            )
    else:
        data = check_x("x", x, None)
        if data.dtype not in FLOAT_DTYPES and data.element_size() != 1:
            raise InvalidCall(
                f"x is {_name(data.dtype)}: it must be bfloat16, float16, float32 or 1-byte data"
            )
    if (topk_idx is None) != (topk_weights is None):
        given, absent = ("topk_idx", "topk_weights") if topk_weights is None else ("topk_weights", "topk_idx")
        raise InvalidCall(f"{given} is given without {absent}: pass both or neither")
    if topk_idx is not None:
        topk_idx = check_topk_idx(topk_idx, data.shape[0])
        topk_weights = check_tensor("topk_weights", topk_weights, (torch.float32,), tuple(topk_idx.shape))
        topk_weights = topk_weights.contiguous()
    return Payload(data, scales, topk_idx, topk_weights, source_bytes)


def check_topk_idx(topk_idx: Any, num_tokens: int | None) -> torch.Tensor:
    ids = check_tensor("topk_idx", topk_idx, (torch.int64,), (num_tokens, None))
    if not 1 <= ids.shape[1] <= NUM_MAX_TOPK:
        raise InvalidCall(f"topk_idx has {ids.shape[1]} experts per token: it must be 1 to {NUM_MAX_TOPK}")
    return ids.contiguous()


def check_num_experts(num_experts: Any, num_ranks: int) -> int:
    count: int = whole_number("num_experts", num_experts, minimum=1)
    if count % num_ranks:
        raise InvalidCall(
            f"{count} experts do not divide over {num_ranks} ranks:"
            f" every rank holds the same number of experts"
        )
    if count // num_ranks > NUM_MAX_LOCAL_EXPERTS:
        raise InvalidCall(
            f"{count // num_ranks} experts per rank: at most {NUM_MAX_LOCAL_EXPERTS} are possible,"
            f" use more ranks"
        )
    return count


def check_config(config: Any, default: Config, num_channels: int | None) -> Config:
    """The config to use: the user's, or the tuned one; with a handle it must have the handle's channels."""
    if config is None:
        config = default
        if num_channels is not None and num_channels != config.num_channels:
            config = Config(
                2 * num_channels,
                config.num_max_nvl_chunked_send_tokens,
                config.num_max_nvl_chunked_recv_tokens,
            )
    if not isinstance(config, Config):
        raise InvalidCall(f"config is of type {type(config).__name__}: it must be an anyep.Config")
    if num_channels is not None and config.num_channels != num_channels:
        raise InvalidCall(
            f"the config has {config.num_channels} channels, but the handle was made with {num_channels}:"
            f" use a Config with num_sms={2 * num_channels}"
        )
    if config.num_channels > NUM_MAX_CHANNELS:
        raise InvalidCall(f"num_sms is {config.num_sms}: at most {2 * NUM_MAX_CHANNELS} are possible")
    return config


def check_events(
    previous_event: Any, async_finish: bool, allocate_on_comm_stream: bool
) -> EventOverlap | None:
    if previous_event is not None and not isinstance(previous_event, EventOverlap):
        raise InvalidCall(
            f"previous_event is of type {type(previous_event).__name__}: it must be an EventOverlap"
        )
    if allocate_on_comm_stream and not (previous_event is not None and async_finish):
        raise InvalidCall("allocate_on_comm_stream needs a previous_event and async_finish=True")
    return previous_event


def check_biases(bias: Any, shape: tuple[int, int], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """No, one or two tensors to start the sum from."""
    if bias is None:
        return ()
    biases = bias if isinstance(bias, tuple | list) else (bias,)
    if len(biases) != 2 and isinstance(bias, tuple | list):
        raise InvalidCall(
            f"bias is a {type(bias).__name__} of {len(biases)}: it must be a tensor or a pair of tensors"
        )
    return tuple(check_tensor("bias", part, (dtype,), shape).contiguous() for part in biases)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
