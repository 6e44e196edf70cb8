"""The sources of GPU kernels, read without compiling them."""

from __future__ import annotations

import ast
from pathlib import Path

import anyep

KERNELS = Path(anyep.__file__).parent / "backends" / "cuda" / "kernels"


def test_arguments_that_are_not_specialized_exist() -> None:
    """Triton ignores unknown names in `do_not_specialize`, and compiles for each value of the argument."""
    for path in KERNELS.glob("*.py"):
        tree = ast.parse(path.read_text())
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        arguments = {argument.arg for function in functions for argument in function.args.args}
        lists = [
            keyword.value
            for function in functions
            for decorator in function.decorator_list
            if isinstance(decorator, ast.Call)
            for keyword in decorator.keywords
            if keyword.arg == "do_not_specialize"
        ]
        shared = [
            node.value
            for node in tree.body
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
            if node.targets[0].id in {value.id for value in lists if isinstance(value, ast.Name)}
        ]
        named = {
            node.value
            for value in [*lists, *shared]
            for node in ast.walk(value)
            if isinstance(node, ast.Constant)
        }
        assert named <= arguments, (path.name, named - arguments)
