"""Every public argument is documented where it is declared, in the form that the reference shows.

Public is what the pages of docs/reference/ name. An argument has a line `name: what it is` below "Args:", in
the docstring of its function or, for a constructor, of its class.
"""

from __future__ import annotations

import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.programs import ROOT

SAME: dict[str, str] = {
    "Buffer.internode_dispatch": "Buffer.dispatch",
    "Buffer.internode_combine": "Buffer.combine",
}
"""Functions whose docstring says that their arguments are those of another one."""


def documented(docstring: str) -> dict[str, str]:
    """What the "Args:" of a docstring, or the "Attributes:" of a named tuple, say of each argument."""
    lines = textwrap.dedent("    " + docstring).splitlines() if docstring else []
    lines = inspect.cleandoc("\n".join(lines)).splitlines()
    found: dict[str, str] = {}
    inside = False
    for line in lines:
        if line in ("Args:", "Attributes:"):
            inside = True
        elif line and not line.startswith(" "):
            inside = False
        elif inside and (match := re.match(r" {4}\*{0,2}(\w+): (.+)", line)):
            found[match[1]] = match[2]
    return found


def named() -> Iterator[tuple[str, Any]]:
    """What the pages of the reference show: classes and functions with their names."""
    for page in sorted((ROOT / "docs" / "reference").glob("*.md")):
        for path, members in re.findall(
            r"^::: (\S+)\n(?:    options:\n      members: \[(.*)\])?", page.read_text(), re.M
        ):
            yield from shown(path, members.split(", ") if members else None)


def shown(path: str, members: list[str] | None) -> Iterator[tuple[str, Any]]:
    owner, _, name = path.rpartition(".")
    if name[0].isupper() or name == "install_as_deep_ep":
        yield name, getattr(importlib.import_module(owner), name)
        return
    module = importlib.import_module(path)
    for member in members or [name for name, value in vars(module).items() if is_of(module, name, value)]:
        yield f"{name}.{member}", getattr(module, member)


def is_of(module: Any, name: str, value: Any) -> bool:
    return not name.startswith("_") and getattr(value, "__module__", None) == module.__name__


def functions() -> Iterator[tuple[str, Any, str]]:
    """Each function with its name and the docstring that documents its arguments."""
    for name, value in named():
        if not inspect.isclass(value):
            yield name, value, value.__doc__ or ""
            continue
        if not issubclass(value, BaseException):
            yield name, value, value.__doc__ or ""
        for member, method in vars(value).items():
            function = getattr(method, "__func__", method)
            if not member.startswith("_") and inspect.isfunction(function):
                yield f"{name}.{member}", function, function.__doc__ or ""


FUNCTIONS = {name: (function, docstring) for name, function, docstring in functions()}


def arguments(function: Any) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name not in ("self", "cls", "_")]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_argument_is_documented(name: str) -> None:
    function, docstring = FUNCTIONS[name]
    if name in SAME:
        other, docstring = FUNCTIONS[SAME[name]]
        assert arguments(function) == arguments(other)
        assert f"`{SAME[name].split('.')[1]}`, with the same arguments" in function.__doc__
    lines = documented(docstring)
    missing = [argument for argument in arguments(function) if argument not in lines]
    assert not missing, f"{name}: write a line below Args: for {', '.join(missing)}"
    unknown = set(lines) - set(arguments(function))
    assert not unknown, f"{name}: there is no argument {', '.join(sorted(unknown))}"


def test_what_is_found() -> None:
    """The reference is read: the layers' and the Buffer's functions are among what is checked."""
    assert len(FUNCTIONS) >= 60
    assert {"Buffer", "Buffer.dispatch", "nn.TopKGate.forward", "balance.update_bias"} <= set(FUNCTIONS)
    assert documented("One.\n\n    Args:\n        a: Tokens.\n            b: no\n\n    c: no\n    ") == {
        "a": "Tokens."
    }


def test_the_reference_has_everything_that_is_public() -> None:
    """What docs/api.md lists, by the module where it is defined."""
    page = (ROOT / "docs" / "api.md").read_text()
    rows = re.findall(r"^\| `(anyep(?:\.\w+)?)` \| (.*) \|$", page, re.MULTILINE)
    referenced = {value for _, value in named()}
    assert len(rows) >= 8
    for module, words in rows:
        for name in re.findall(r"`([a-zA-Z]\w+)`", words):
            value = getattr(importlib.import_module(module), name, None)
            if inspect.isclass(value) or inspect.isfunction(value):
                assert value in referenced, f"{module}.{name} is public, but not in docs/reference"
