"""Creates the project's virtual environment, or adds to it: `python3 tools/make_venv.py .venv [EXTRAS]`.

The Makefile runs it with whatever python3 the machine has, so it uses the standard library alone. A machine
whose own torch can use a GPU keeps that torch; elsewhere the exact versions of constraints.txt are installed.
What pip does is shown as one line that changes, or as a line every few seconds where that is not possible.
When it fails, everything that it said is printed.
"""

import queue
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

MIN_PYTHON = (3, 11)
PROBE = (
    "import torch; v = tuple(int(p) for p in torch.__version__.split('+')[0].split('.')[:2]);"
    "raise SystemExit(0 if v >= (2, 11) and torch.cuda.is_available() else 1)"
)
BETWEEN_LINES_S = 5.0
"""Where lines cannot be changed, one is printed so often."""
TICK_S = 0.5


def main(folder: str, extras: str = "") -> None:
    if sys.version_info < MIN_PYTHON:
        version = sys.version.split()[0]
        sys.exit(
            f"AnyEP needs Python 3.11 or later, and {sys.executable} is {version}."
            " Name a newer one: make PYTHON=python3.12"
        )
    progress = Progress()
    constraints = Path("constraints.txt").read_text().splitlines()
    has_gpu = subprocess.call([sys.executable, "-c", PROBE], stderr=subprocess.DEVNULL) == 0
    if has_gpu:
        print("This Python's torch sees a GPU: the environment uses it.", flush=True)
        constraints = [line for line in constraints if not line.startswith(("torch==", "triton=="))]
    print(announcement(folder, extras), flush=True)
    if not is_usable(Path(folder), has_gpu):
        options = ["--clear", *(["--system-site-packages"] if has_gpu else [])]
        run([sys.executable, "-m", "venv", *options, folder], "creating the environment", progress)
    # On a GPU the demo needs Triton, which comes with most builds of torch.
    wanted = sorted({*filter(None, extras.split(",")), *(["cuda"] if has_gpu else [])})
    project = f".[{','.join(wanted)}]" if wanted else "."
    pip = [f"{folder}/bin/python", "-m", "pip", "--disable-pip-version-check", "--no-input"]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(constraints) + "\n")
        file.flush()
        options = ["--progress-bar", "off", "--constraint", file.name, "--editable", project]
        run([*pip, "install", *options], "asking for packages", progress, Installation(Path(folder)))
    progress.finish()
    print(f"Done in {progress.seconds():.0f} s; {folder} takes {megabytes_of(folder)} MB.", flush=True)


def announcement(folder: str, extras: str) -> str:
    """What is about to happen, with what was measured on a machine with two cores and no GPU."""
    size = "2.4 GB, all that tests need" if "dev" in extras.split(",") else "1.2 GB, most of it torch"
    return (
        f"Setting up {folder}: packages of about {size}. That takes one to two minutes on a fast network, and"
        " several on a slow one or on a busy machine."
    )


def is_usable(folder: Path, has_gpu: bool) -> bool:
    """Whether there is an environment of this Python, with or without the system's packages as wanted."""
    try:
        settings = (folder / "pyvenv.cfg").read_text().lower()
        code = "import sys, pip; print(sys.version)"
        version = subprocess.check_output([f"{folder}/bin/python", "-c", code], text=True)
    except (OSError, subprocess.CalledProcessError):
        return False
    sees_system = re.search(r"include-system-site-packages\s*=\s*true", settings) is not None
    return version.strip() == sys.version.strip() and sees_system == has_gpu


class Installation:
    """Reads what pip prints, and says in a few words what it does.

    >>> installation = Installation(Path("nowhere"))
    >>> installation.read("Collecting numba==0.68.1 (from -c constraints.txt)")
    'asking for numba'
    >>> installation.read("  Downloading https://host/path/numba-0.68.1-cp311-linux_x86_64.whl (3.8 MB)")
    'downloading numba 0.68.1 (3.8 MB)'
    >>> installation.read("  Using cached rich-15.0.0-py3-none-any.whl (250 kB)")
    'taking rich 15.0.0 from the cache'
    >>> installation.read("Installing collected packages: numba, rich")
    'installing numba (1 of 2)'
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._packages: list[str] = []
        self._num_before = 0
        self._text = ""

    def read(self, line: str) -> str:
        """What a line of pip says."""
        line = line.strip()
        words = line.split()
        if line.startswith("Installing collected packages:"):
            self._packages = line.split(":", 1)[1].replace(",", " ").split()
            self._num_before = self._num_installed()
        elif line.startswith("Collecting "):
            self._text = f"asking for {re.split('[<>=!~;[( ]', words[1])[0]}"
        elif line.startswith("Downloading ") and not line.endswith(".metadata"):
            size = re.search(r"\(([^()]* [kMG]?B)\)", line)
            self._text = f"downloading {named(words[1])}" + (f" ({size.group(1)})" if size else "")
        elif line.startswith("Using cached "):
            self._text = f"taking {named(words[2])} from the cache"
        elif "build dependencies" in line or line.startswith("Preparing "):
            self._text = "preparing AnyEP itself"
        return self.now()

    def now(self) -> str:
        """What pip is doing. While it installs it prints nothing; this file is the last of a package."""
        if not self._packages:
            return self._text
        number = min(max(0, self._num_installed() - self._num_before), len(self._packages) - 1)
        return f"installing {self._packages[number]} ({number + 1} of {len(self._packages)})"

    def _num_installed(self) -> int:
        return len(list(self._folder.glob("lib/python*/site-packages/*.dist-info/INSTALLER")))


def named(file: str) -> str:
    """
    >>> named("https://host/torch-2.13.0%2Bcpu-cp311-linux_x86_64.whl"), named("mpmath-1.3.0.tar.gz")
    ('torch 2.13.0', 'mpmath 1.3.0')
    """
    name, _, rest = file.rsplit("/", 1)[-1].partition("-")
    version = re.match(r"[0-9][0-9.]*[0-9]", rest)
    return f"{name} {version.group(0)}" if version else name


class Progress:
    """Prints how long everything has taken, and what is being done."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._started = time.monotonic()
        self._last_at = 0.0

    def seconds(self) -> float:
        return time.monotonic() - self._started

    def show(self, text: str) -> None:
        now = time.monotonic()
        line = f"[{self.seconds():4.0f} s] {text}"
        if self._is_terminal:
            width = shutil.get_terminal_size().columns - 1
            print(f"\r{line[:width]:<{width}}", end="", file=sys.stderr, flush=True)
        elif now - self._last_at >= BETWEEN_LINES_S:
            print(line, file=sys.stderr, flush=True)
            self._last_at = now

    def finish(self) -> None:
        if self._is_terminal:
            print(f"\r{'':<{shutil.get_terminal_size().columns - 1}}\r", end="", file=sys.stderr, flush=True)


def run(
    command: "list[str]", text: str, progress: Progress, installation: "Installation | None" = None
) -> None:
    """Run a command; what it prints is shown in short, and in full where it fails."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines = queue.Queue()  # type: queue.Queue[str | None]

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    printed: list[str] = []
    try:
        while True:
            progress.show(text)
            try:
                line = lines.get(timeout=TICK_S)
            except queue.Empty:
                text = (installation.now() if installation else "") or text
                continue
            if line is None:
                break
            printed.append(line)
            text = (installation.read(line) if installation else "") or text
        exit_code = process.wait()
    except KeyboardInterrupt:
        process.wait()
        progress.finish()
        sys.exit("Interrupted. The next make goes on from here.")
    if exit_code != 0:
        progress.finish()
        print("".join(printed), file=sys.stderr)
        sys.exit(f"Setting up failed at: {' '.join(command)}\nIt starts anew with the next make.")


def megabytes_of(folder: str) -> int:
    """What a folder takes on the disk."""
    return round(sum(path.lstat().st_size for path in Path(folder).rglob("*")) / 1e6)


if __name__ == "__main__":
    main(*sys.argv[1:])
