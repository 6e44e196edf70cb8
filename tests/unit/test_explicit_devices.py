"""No tensor of ours depends on torch's default device or default dtype: calls that make one state both.

This is checked in the source, so that a call on a path that no test takes is found too.
`tests/normal/test_default_device.py` runs the code under other defaults.
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils import _device

import anyep

REPOSITORY = Path(anyep.__file__).parent.parent
FOLDERS = ("anyep", "examples")
OF_THE_PROGRAM = "changes the defaults of the whole program"
# What sets defaults because the function it stands for does: `init_dist` of deep_ep.
SETS_DEFAULTS = ("anyep/as_deep_ep/deep_ep/utils/envs.py",)

DTYPE_IS_FIXED = {"randint", "randperm", "tril_indices", "triu_indices"}
"""They give int64 unless told otherwise, whatever the default is."""
DTYPE_OF_INPUT = {"as_tensor", "asarray"}
"""They take the dtype of an array or a tensor. (Of a list they would choose one: use `torch.tensor`.)"""
OTHER_CONSTRUCTORS = {
    "BFloat16Tensor",
    "BoolTensor",
    "ByteTensor",
    "DoubleTensor",
    "FloatTensor",
    "HalfTensor",
    "IntTensor",
    "LongTensor",
    "Tensor",
}
"""The old ways to make a tensor take no device, or not in the same way."""
SETTERS = {"set_default_device", "set_default_dtype", "set_default_tensor_type"}
"""The defaults belong to the program that uses AnyEP."""


def name_in_torch(node: ast.expr) -> str | None:
    """`torch.fft.fftfreq` as "fft.fftfreq", `nn.Linear` as "nn.Linear"; None for what is not of torch."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.insert(0, node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in ("torch", "nn") or not parts:
        return None
    return ".".join(parts if node.id == "torch" else ("nn", *parts))


def is_constructor(name: str) -> bool:
    """Whether a default device changes what this function of torch does, by torch's own list."""
    function = functools.reduce(lambda found, part: getattr(found, part, None), name.split("."), torch)
    return function in _device._device_constructors()


def missing_arguments(name: str, call: ast.Call) -> list[str]:
    """Which of `device` and `dtype` a call should state and does not."""
    given = {keyword.arg for keyword in call.keywords}
    if name.startswith("nn."):
        module = getattr(torch.nn, name.removeprefix("nn."), None)
        accepted = inspect.signature(module).parameters if inspect.isclass(module) else {}
        return [
            argument for argument in ("device", "dtype") if argument in accepted and argument not in given
        ]
    if not is_constructor(name):
        return []
    needed = ["device"] if name in DTYPE_IS_FIXED | DTYPE_OF_INPUT else ["device", "dtype"]
    return [argument for argument in needed if argument not in given]


def faults(source: str) -> Iterator[str]:
    """What in a module depends on a default of torch, or sets one."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module in ("torch", "torch.nn"):
            for alias in node.names:
                is_module = node.module == "torch.nn" and alias.name[0].isupper()
                if is_module or alias.name in SETTERS or is_constructor(alias.name):
                    yield f"line {node.lineno}: import {alias.name} by way of its module"
        if not isinstance(node, ast.Call) or (name := name_in_torch(node.func)) is None:
            continue
        if name in SETTERS:
            yield f"line {node.lineno}: torch.{name} {OF_THE_PROGRAM}"
        if name in OTHER_CONSTRUCTORS:
            yield f"line {node.lineno}: torch.{name} makes a tensor: use torch.tensor or torch.empty"
        if missing := missing_arguments(name, node):
            yield f"line {node.lineno}: torch.{name} without {' and '.join(missing)}"


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_tensor_has_its_own_device_and_dtype(folder: str) -> None:
    found = [
        f"{path.relative_to(REPOSITORY)}, {fault}"
        for path in sorted((REPOSITORY / folder).rglob("*.py"))
        for fault in faults(path.read_text())
        # The models of examples are those of users, who choose by torch's defaults where they lie.
        if folder == "anyep" or "torch.nn." not in fault
        if not (fault.endswith(OF_THE_PROGRAM) and str(path.relative_to(REPOSITORY)) in SETS_DEFAULTS)
    ]
    assert not found, "state device= and dtype= in these calls:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("torch.zeros(3)", "torch.zeros without device and dtype"),
        ("torch.zeros(3, dtype=torch.int64)", "torch.zeros without device"),
        ("torch.tensor([1.0], device='cpu')", "torch.tensor without dtype"),
        ("torch.as_tensor(array)", "torch.as_tensor without device"),
        ("torch.randint(3, (2,))", "torch.randint without device"),
        ("torch.fft.fftfreq(3)", "torch.fft.fftfreq without device and dtype"),
        ("nn.Linear(3, 4)", "torch.nn.Linear without device and dtype"),
        ("torch.nn.Linear(3, 4, device=device)", "torch.nn.Linear without dtype"),
        ("torch.FloatTensor([1.0])", "torch.FloatTensor makes a tensor"),
        ("torch.set_default_device('cuda')", "changes the defaults of the whole program"),
        ("from torch import zeros", "import zeros by way of its module"),
        ("from torch.nn import Linear", "import Linear by way of its module"),
    ],
)
def test_what_depends_on_a_default_is_found(source: str, fault: str) -> None:
    (found,) = faults(source)
    assert fault in found


@pytest.mark.parametrize(
    "source",
    [
        "torch.zeros(3, dtype=torch.int64, device=x.device)",
        "torch.as_tensor(array, device='cpu')",
        "torch.zeros_like(x)",
        "torch.randperm(4, device=device)",
        "nn.Parameter(x)",
        "nn.ModuleList(modules)",
        "numpy.zeros(3)",
        "from torch import Tensor, nn",
    ],
)
def test_what_depends_on_no_default_is_let_pass(source: str) -> None:
    assert list(faults(source)) == []
