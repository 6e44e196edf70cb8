"""Creates the project's virtual environment: `python3 tools/make_venv.py .venv EXTRAS`.

The Makefile runs it with whatever python3 the machine has, so it uses the standard library alone. A machine
whose own torch can use a GPU keeps that torch; elsewhere the exact versions of constraints.txt are installed.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

PROBE = (
    "import torch; v = tuple(int(p) for p in torch.__version__.split('+')[0].split('.')[:2]);"
    "raise SystemExit(0 if v >= (2, 11) and torch.cuda.is_available() else 1)"
)


def main(folder: str, extras: str) -> None:
    if sys.version_info < (3, 11):  # noqa: UP036  (this is the message that older versions get)
        version = sys.version.split()[0]
        sys.exit(
            f"AnyEP needs Python 3.11 or later, and {sys.executable} is {version}."
            " Name a newer one: make PYTHON=python3.12"
        )
    started = time.time()
    constraints = Path("constraints.txt").read_text().splitlines()
    options = []
    if subprocess.call([sys.executable, "-c", PROBE], stderr=subprocess.DEVNULL) == 0:
        print("This Python's torch sees a GPU: the environment uses it.", flush=True)
        options = ["--system-site-packages"]
        constraints = [line for line in constraints if not line.startswith(("torch==", "triton=="))]
    print(f"Setting up {folder}, about a minute without a pip cache ...", flush=True)
    run([sys.executable, "-m", "venv", *options, folder])
    pip = [f"{folder}/bin/python", "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(constraints) + "\n")
        file.flush()
        run([*pip, "--constraint", file.name, "--editable", f".[{extras}]"])
    print(f"Done in {time.time() - started:.0f} s.", flush=True)


def run(command: "list[str]") -> None:
    if subprocess.call(command) != 0:
        sys.exit(f"Setting up failed at: {' '.join(command)}\nIt starts anew with the next make.")


main(*sys.argv[1:])
