"""Settings from the environment: every `ANYEP_*` variable that the package reads, each in one place.

    network = NETWORK.choose(network)   # the argument if it is given, else the variable, else the default
    ... network.value, network.source   # the source tells which of the three it was

Programs that were written for deep_ep cannot pass AnyEP's own arguments, so each argument has a variable.
An explicit argument wins. `anyep doctor` shows the current settings, docs/settings.md explains them.
"""

from __future__ import annotations

import difflib
import logging
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final, Generic, TypeVar

from anyep.errors import AnyEPError, InvalidCall
from anyep.sizes import NUM_BUFFER_ALIGNMENT_BYTES, NUM_CPU_TIMEOUT_SECS

T = TypeVar("T")
PREFIX: Final = "ANYEP_"
ARGUMENT: Final = "argument"
DEFAULT: Final = "default"
_FACTORS: Final = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "K": 2**10,
    "KIB": 2**10,
    "M": 2**20,
    "MIB": 2**20,
    "G": 2**30,
    "GIB": 2**30,
    "T": 2**40,
    "TIB": 2**40,
}
_OF_THE_TESTS: Final = ("ANYEP_SOAK_PAIRS", "ANYEP_SOAK_SEED")
"""Read by the test suite, not by the package."""
log = logging.getLogger("anyep")


@dataclass(frozen=True)
class Chosen(Generic[T]):
    """A value, and where it comes from: the argument, a variable of the environment, or the default."""

    value: T
    source: str
    argument: str

    def explain(self, error: AnyEPError) -> AnyEPError:
        """The same error, naming the variable instead of the argument if the value comes from a variable."""
        if not self.source.startswith(PREFIX):
            return error
        # The argument's name as a separate word, not in set_device, and not torch's "current device".
        name = rf"(?<![\w.])(?<!current ){self.argument}(?=\W)"
        return type(error)(re.sub(name, self.source, str(error)))


@dataclass(frozen=True)
class Setting(Generic[T]):
    """One variable of the environment."""

    name: str
    argument: str
    """The argument of `Buffer` that wins over it; empty if there is none."""
    meaning: str
    must_be: str
    """What its text must be, as a message says it after "it must be"."""
    parse: Callable[[str], T]
    """Raises ValueError for any other text."""
    default: T
    default_in_words: str

    def choose(self, argument: T | None = None) -> Chosen[T]:
        """The argument if it is given, else the value of the environment, else the default."""
        if argument is not None:
            return Chosen(argument, ARGUMENT, self.argument)
        text = self.text
        if text is None:
            return Chosen(self.default, DEFAULT, self.argument)
        try:
            return Chosen(self.parse(text.strip()), self.name, self.argument)
        except ValueError:
            raise InvalidCall(f"{self.name} is {text!r}: it must be {self.must_be}") from None

    @property
    def text(self) -> str | None:
        """The value of the environment, or None; an empty variable counts as not set."""
        return os.environ.get(self.name) or None


def number_of_bytes(text: str) -> Fraction:
    """Bytes as people write them: a number, with or without a unit; ValueError for anything else.

    >>> int(number_of_bytes("80GiB")), int(number_of_bytes(" 1.5 MB ")), int(number_of_bytes("4096"))
    (85899345920, 1500000, 4096)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    factor = _FACTORS.get(match[2].upper()) if match else None
    if match is None or factor is None:
        raise ValueError(text)
    return Fraction(match[1]) * factor


def parse_bytes(text: str) -> int | None:
    """Bytes, a multiple of 128, with or without a unit; None for "auto".

    >>> parse_bytes("2GiB"), parse_bytes("1.5 MiB"), parse_bytes("4096"), parse_bytes("auto")
    (2147483648, 1572864, 4096, None)
    >>> parse_bytes("2 gigabytes")
    Traceback (most recent call last):
    ValueError: 2 gigabytes
    """
    if text.lower() == "auto":
        return None
    num_bytes = number_of_bytes(text)
    if num_bytes % NUM_BUFFER_ALIGNMENT_BYTES:
        raise ValueError(text)
    return int(num_bytes)


def format_bytes(num_bytes: int) -> str:
    """Bytes as `parse_bytes` takes them, without rounding.

    >>> format_bytes(2 << 30), format_bytes(3 << 19), format_bytes(1000), format_bytes(0)
    ('2 GiB', '1536 KiB', '1000 bytes', '0 bytes')
    """
    for unit, shift in (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if num_bytes and num_bytes % (1 << shift) == 0:
            return f"{num_bytes >> shift} {unit}"
    return f"{num_bytes} bytes"


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def _seconds(text: str) -> float:
    seconds = float(text)
    if not seconds > 0:
        raise ValueError(text)
    return seconds


def _one_of(*words: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in words:
            raise ValueError(text)
        return text

    return parse


def _device(text: str) -> str:
    if not re.fullmatch(r"cpu|cuda(:\d+)?", text):
        raise ValueError(text)
    return text


DEVICE: Final[Setting[str | None]] = Setting(
    "ANYEP_DEVICE",
    "device",
    "where Buffers work",
    "cpu or cuda",
    _device,
    None,
    "the current GPU where torch finds one, else the CPU",
)
RANKS_PER_NODE: Final[Setting[int | None]] = Setting(
    "ANYEP_RANKS_PER_NODE",
    "ranks_per_node",
    "ranks of a node: cuts hosts into virtual nodes",
    "a whole number of ranks, at least 1",
    _count,
    None,
    "a host is a node",
)
NUM_WINDOW_BYTES: Final[Setting[int | None]] = Setting(
    "ANYEP_NUM_WINDOW_BYTES",
    "num_window_bytes",
    "memory of each rank for results",
    f"auto, or bytes as a multiple of {NUM_BUFFER_ALIGNMENT_BYTES}, such as 2GiB, 512MiB or 0",
    parse_bytes,
    None,
    "auto, up to a quarter of the free memory, shared among the ranks",
)
NETWORK: Final[Setting[str | None]] = Setting(
    "ANYEP_NETWORK",
    "network",
    "how ranks of other nodes are reached",
    "nixl or loopback",
    _one_of("nixl", "loopback"),
    None,
    "nixl between hosts, shared memory (loopback) within one",
)
HEAPS: Final = ("auto", "device", "host")
"""Where ranks on GPUs can keep what they share."""
HEAP: Final[Setting[str]] = Setting(
    "ANYEP_HEAP",
    "heap",
    "where ranks on GPUs keep what they share",
    "auto, device or host",
    _one_of(*HEAPS),
    "auto",
    "auto: memory of the GPUs where they can reach each other's, else of the host",
)
TIMEOUT_S: Final[Setting[float]] = Setting(
    "ANYEP_TIMEOUT_S",
    "",
    "seconds after which a wait without progress gives up",
    "a number of seconds above 0",
    _seconds,
    float(NUM_CPU_TIMEOUT_SECS),
    str(NUM_CPU_TIMEOUT_SECS),
)
REPLACE_DEEP_EP: Final[Setting[bool]] = Setting(
    "ANYEP_REPLACE_DEEP_EP",
    "",
    "whether AnyEP takes the place of another deep_ep that is installed",
    "0 or 1",
    lambda text: _one_of("0", "1")(text) == "1",
    False,
    "0, no",
)
DEEP_EP_API: Final[Setting[str]] = Setting(
    "ANYEP_DEEP_EP_API",
    "",
    "the version of deep_ep whose names the drop-in has",
    "v1 or v2",
    _one_of("v1", "v2"),
    "v2",
    "v2",
)
CACHE_DIR: Final[Setting[str | None]] = Setting(
    "ANYEP_CACHE_DIR",
    "",
    "folder for compiled kernels",
    "the path of a folder",
    str,
    None,
    "$XDG_CACHE_HOME/anyep or ~/.cache/anyep",
)
SETTINGS: Final[tuple[Setting[Any], ...]] = (
    DEVICE,
    RANKS_PER_NODE,
    NUM_WINDOW_BYTES,
    NETWORK,
    HEAP,
    TIMEOUT_S,
    CACHE_DIR,
    REPLACE_DEEP_EP,
    DEEP_EP_API,
)


def unset(*settings: Setting[Any]) -> None:
    """Remove settings from the environment of this process, for a command whose own options decide."""
    for setting in settings:
        os.environ.pop(setting.name, None)


_warned: set[str] = set()


def unknown_variables() -> Iterator[tuple[str, str | None]]:
    """The `ANYEP_*` variables of the environment that are not read, and the setting that each resembles."""
    names = [setting.name for setting in SETTINGS]
    for variable in sorted(os.environ):
        if variable.startswith(PREFIX) and variable not in (*names, *_OF_THE_TESTS):
            nearest = difflib.get_close_matches(variable, names, n=1)
            yield variable, nearest[0] if nearest else None


def warn_of_unknown_variables() -> None:
    """Warn once about each variable that is not read: its name may be mistyped."""
    for variable, nearest in unknown_variables():
        if variable not in _warned:
            _warned.add(variable)
            log.warning("%s is set, but AnyEP has no such setting%s", variable, advice_about(nearest))


def advice_about(nearest: str | None) -> str:
    """What to do about a variable that is not read."""
    return f": is {nearest} meant?" if nearest else "; docs/settings.md lists them"
