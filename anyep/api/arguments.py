"""Checks of the arguments that users pass to `Buffer`: each refuses with a message that says what to do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import torch

from anyep.backends.base import Payload
from anyep.errors import InvalidCall, whole_number
from anyep.events import EventOverlap
from anyep.layout import check_num_sms
from anyep.sizes import (
    NUM_BUFFER_ALIGNMENT_BYTES,
    NUM_MAX_SCALES,
    Config,
    check_num_topk,
    check_row_bytes,
)
from anyep.sizes import check_num_experts as check_num_experts

FLOAT_DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)
DEVICE_TYPES: Final = ("cpu", "cuda")
"""The device types that have a backend."""


def check_num_bytes(name: str, value: int) -> int:
    value = whole_number(name, value, minimum=0)
    if value % NUM_BUFFER_ALIGNMENT_BYTES:
        raise InvalidCall(f"{name} is {value}: it must be a multiple of {NUM_BUFFER_ALIGNMENT_BYTES}")
    return value


def check_devices(device: torch.device, api: str = "Buffer", **things: Any) -> None:
    """Refuse tensors, and pairs with tensors, that are not on the Buffer's device; `api` names its class."""
    for name, thing in things.items():
        for part in thing if isinstance(thing, tuple | list) else (thing,):
            if isinstance(part, torch.Tensor) and part.device != device:
                raise InvalidCall(_wrong_device(name, part.device, device, api))


def _wrong_device(name: str, found: torch.device, wanted: torch.device, api: str = "Buffer") -> str:
    """The message about a tensor that is on one device, but is needed on another.

    >>> _wrong_device("x", torch.device("cuda:1"), torch.device("cuda:0"))
    "x is on cuda:1, but this Buffer works on cuda:0: pass x.to('cuda:0')"
    """
    if found.type == "meta":
        return (
            f"{name} is on meta, where tensors have no data: AnyEP works on CPU and CUDA tensors; materialise"
            f" it first, for example as torch.empty_like({name}, device='{wanted}'), and fill it"
        )
    if found.type not in DEVICE_TYPES:
        return f"{name} is on {found}: AnyEP works on CPU and CUDA tensors; pass {name}.to('{wanted}')"
    works = "the CPU" if wanted.type == "cpu" else str(wanted)
    advice = f"pass {name}.to('{wanted}')"
    if found.type != wanted.type:
        advice += f", or make the {api} with device='{found.type}' instead of device='{wanted.type}'"
    return f"{name} is on {found}, but this {api} works on {works}: {advice}"


def check_tensor(
    name: str, tensor: Any, dtypes: tuple[torch.dtype, ...] | None, shape: tuple[int | str, ...]
) -> torch.Tensor:
    """A tensor of one of these dtypes and this shape; a dimension of any size is given by its name."""
    if not isinstance(tensor, torch.Tensor):
        raise InvalidCall(f"{name} is of type {type(tensor).__name__}: it must be a tensor")
    if tensor.layout is not torch.strided:
        raise InvalidCall(f"{name} is sparse: pass {name}.to_dense()")
    if dtypes is not None and tensor.dtype not in dtypes:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise InvalidCall(f"{name} is {str(tensor.dtype).removeprefix('torch.')}: it must be {names}")
    actual = tensor.shape
    if actual != shape and not _fits(actual, shape):
        wanted_shape = ", ".join(map(str, shape))
        raise InvalidCall(f"{name} has shape {list(actual)}: it must be [{wanted_shape}]")
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    plain: torch.Tensor = tensor.detach() if tensor.requires_grad else tensor
    return plain


def _fits(actual: tuple[int, ...], shape: tuple[int | str, ...]) -> bool:
    if len(actual) != len(shape):
        return False
    for wanted, size in zip(shape, actual, strict=True):
        if wanted != size and not isinstance(wanted, str):
            return False
    return True


def check_x(name: str, x: Any, dtypes: tuple[torch.dtype, ...] | None) -> torch.Tensor:
    """Rows that can be sent: contiguous, in multiples of 16 bytes."""
    rows = check_tensor(name, x, dtypes, ("tokens", "hidden"))
    if not rows.is_contiguous():
        raise InvalidCall(f"{name} is not contiguous: pass {name}.contiguous()")
    if rows.shape[1] == 0:
        raise InvalidCall(f"{name} has no columns: the hidden size must be at least 1")
    check_row_bytes(rows.shape[1] * rows.element_size())
    return rows


def check_payload(x: Any, topk_idx: Any, topk_weights: Any, source_bytes: int) -> Payload:
    """What dispatch sends: x, or (1-byte data, scales); top-k ids with weights, or neither; and
    `source_bytes` bytes about each row's origin."""
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
        scales = check_tensor("x[1]", scales, (torch.float32, torch.int32), (data.shape[0], "scales"))
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
    shape = ("tokens" if num_tokens is None else num_tokens, "top-k")
    ids = check_tensor("topk_idx", topk_idx, (torch.int64,), shape)
    check_num_topk("topk_idx has", ids.shape[1])
    return ids.contiguous()


def check_config(config: Any, default: Config, num_channels: int | None) -> Config:
    """The config to use: the user's, or the tuned one; with a handle it must have the handle's channels."""
    if config is None:
        config = default
        if num_channels is not None and num_channels != config.num_channels:
            config = replace(config, num_sms=2 * num_channels)
    if not isinstance(config, Config):
        raise InvalidCall(f"config is of type {type(config).__name__}: it must be an anyep.Config")
    if num_channels is not None and config.num_channels != num_channels:
        raise InvalidCall(
            f"the config has {config.num_channels} channels, but the handle was made with {num_channels}:"
            f" use a Config with num_sms={2 * num_channels}"
        )
    check_num_sms("num_sms", config.num_sms)
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
    """Zero, one or two tensors to start the sum from."""
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
