"""Changes one constant or operator of a module at a time and checks that its tests notice.

`python tools/mutate.py anyep/sizes.py ...`: for each module the tests are tests/unit/test_<name>.py. Prints the
changes that no test noticed, and exits 1 if there are any. The module is restored, also after Ctrl-C.
"""

from __future__ import annotations

import ast
import copy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

OPERATORS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
}


def mutations(source: str) -> Iterator[tuple[str, str]]:
    """Every (description, changed source)."""
    tree = ast.parse(source)
    for index, node in enumerate(ast.walk(tree)):
        changed = copy.deepcopy(tree)
        twin = list(ast.walk(changed))[index]
        if isinstance(node, ast.Constant) and type(node.value) is int:
            assert isinstance(twin, ast.Constant)
            twin.value = node.value + 1
            yield f"line {node.lineno}: {node.value} -> {node.value + 1}", ast.unparse(changed)
        elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            assert isinstance(twin, ast.BinOp)
            twin.op = OPERATORS[type(node.op)]()  # type: ignore[assignment]
            yield f"line {node.lineno}: {ast.unparse(node)} -> {ast.unparse(twin)}", ast.unparse(changed)
        elif isinstance(node, ast.Compare) and type(node.ops[0]) in OPERATORS:
            assert isinstance(twin, ast.Compare)
            twin.ops[0] = OPERATORS[type(node.ops[0])]()  # type: ignore[call-overload]
            yield f"line {node.lineno}: {ast.unparse(node)} -> {ast.unparse(twin)}", ast.unparse(changed)


def survivors(module: Path) -> list[str]:
    original = module.read_text()
    tests = f"tests/unit/test_{module.stem}.py"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        tests,
        "--hypothesis-seed=0",
        "-p",
        "no:cacheprovider",
    ]
    survived = []
    cases = list(mutations(original))
    try:
        for number, (description, source) in enumerate(cases, 1):
            module.write_text(source)
            noticed = subprocess.run(command, capture_output=True, check=False).returncode != 0
            print(
                f"{module} {number}/{len(cases)} {'ok' if noticed else 'SURVIVED'}  {description}", flush=True
            )
            if not noticed:
                survived.append(f"{module} {description}")
    finally:
        module.write_text(original)
    return survived


if __name__ == "__main__":
    unnoticed = [line for argument in sys.argv[1:] for line in survivors(Path(argument))]
    print(f"{len(unnoticed)} changes were not noticed", *unnoticed, sep="\n  ")
    sys.exit(1 if unnoticed else 0)
