"""Records what calls on a Buffer return, as digests, and shows later that they still return the same.

    python tools/record.py                 # replay everything that this machine can, print what differs
    python tools/record.py --only dtypes   # the recordings whose names contain it
    python tools/record.py --write         # record anew: five times under load, and only if all are equal

A recording (tests/support/recordings/) is a named sequence of rounds on one Buffer, as data. A round makes
some public calls with inputs that are made from its name, and notes what they return: of a tensor, 8 digits
of the SHA-256 of dtype, shape and bytes; of an error its type and sentence; of anything else its text. Only
what the contract defines is noted: no rows past the received ones. `tests/support/recorded/<recording>.json`
has, for each shape (4: four ranks on one node; 2x2: two nodes of two), for each call and each part of its
result the value of every rank, or one value where all ranks have the same.

Same inputs, same bits: what is stored holds for every device and for every variant, which is a way to ask for
the same results: through windows or rings, in line, asynchronously or by hooks. Where a device differs for a
documented reason (a GPU raises some errors at the next contact), it has a recording of its own (`devices`).

To add a case, add a round to a recording, or a recording to `RECORDINGS`, and run
`python tools/record.py --write --only <name>`. In the difference of the JSON file nothing but the new calls
may appear. A round's name is the seed of its inputs: renaming a round changes its digests.

Recording anew is legitimate when a change of behaviour is intended and the specification says so: another
sentence of an error, another order of addition, a new part of a handle. The commit then says which calls
changed, and why. It is not legitimate in a change that only moves code: there every difference is a bug, in
the code or in a recording that notes something undefined.
"""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import torch
import torch.distributed as dist

from anyep import AnyEPError
from anyep.api.buffer import Buffer
from tests.support.places import Place, buffer_device, tensor_device
from tests.support.world import RankContext

FOLDER: Final = Path(__file__).with_name("recorded")
NUM_DIGITS: Final = 8
TIMEOUT_S: Final = 400.0
Value = str | None
Part = Value | list[Value]
"""The value of all ranks, or of each of them."""
Calls = dict[str, dict[str, Part]]


# Inputs: the same on every machine and with every version of torch and numpy


def words(seed: int, count: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Numbers that look random: SplitMix64.

    >>> [f"{word:016x}" for word in words(0, 2)]
    ['e220a8397b1dcdaf', '6e789e6aa1b965f4']
    """
    with np.errstate(over="ignore"):
        state = np.uint64(seed) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed: np.ndarray[Any, np.dtype[np.uint64]] = state ^ (state >> np.uint64(31))
        return mixed


def uniform(seed: int, *shape: int) -> torch.Tensor:
    """float32 in [0, 1), of 24 bits."""
    values = (words(seed, int(np.prod(shape))) >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)
    return torch.from_numpy(values.reshape(shape))


def values(seed: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Rows of any dtype; numbers are in -6 to 6, near 0 more often than far from it."""
    if dtype.itemsize == 1:
        data = (words(seed, int(np.prod(shape))) >> np.uint64(56)).astype(np.uint8)
        return torch.from_numpy(data.reshape(shape)).view(dtype)
    drawn = uniform(seed, 4, *shape)
    return (((drawn[0] + drawn[1]) + (drawn[2] + drawn[3]) - 2) * 3).to(dtype)


def seed_of(*names: object) -> int:
    return zlib.crc32("/".join(map(str, names)).encode())


# What is noted


def digest(tensor: torch.Tensor) -> str:
    """Digits that stand for dtype, shape and bytes.

    >>> ones = torch.ones(2, 2)
    >>> digest(ones) == digest(ones.clone()), digest(ones) == digest(ones.half())
    (True, False)
    """
    content = b""
    if tensor.numel():
        content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    head = f"{tensor.dtype} {list(tensor.shape)} "
    return hashlib.sha256(head.encode() + content).hexdigest()[:NUM_DIGITS]


def normalised(text: str) -> str:
    """Without what differs between two runs, or between two devices that should say the same.

    >>> normalised("rank 1 (pid 712) is idle for 0.3 s, at 0x7f3a")
    'rank 1 (pid N) is idle for N s, at 0xN'
    """
    for pattern, with_what in (
        (r"\b(pid|process) \d+", r"\1 N"),
        (r"\b\d+(\.\d+)? (s|ms)\b", r"N \2"),
        (r"\b0x[0-9a-f]+", "0xN"),
        (r"\bon (cuda|cpu)(:\d)?", "on DEVICE"),
    ):
        text = re.sub(pattern, with_what, text)
    return text


def text_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return digest(value)
    return normalised(value if isinstance(value, str) else repr(value))


# Recordings


@dataclass(frozen=True)
class Variant:
    """A way to ask for the same results."""

    num_window_bytes: int | None = None
    how: str = "in line"
    """in line, beside (asynchronously) or hooks."""
    zero_copy: bool = False
    needs_rings: bool = False
    """Programs of a kernel then wait for each other, which the simulated GPU cannot do."""


VARIANTS: Final = {
    "windows": Variant(),
    "rings": Variant(num_window_bytes=0, needs_rings=True),
    "few-windows": Variant(num_window_bytes=1024, needs_rings=True),
    "beside": Variant(how="beside"),
    "rings-beside": Variant(num_window_bytes=0, how="beside", needs_rings=True),
    "hooks": Variant(how="hooks"),
    "zero-copy": Variant(zero_copy=True),
}


class Round(Protocol):
    """Some calls, as data."""

    @property
    def name(self) -> str: ...

    def play(self, player: Player) -> None:
        """Make the calls and note what they return."""


@dataclass(frozen=True)
class Recording:
    """Rounds on one Buffer, and where and how they are played."""

    name: str
    rounds: tuple[Round, ...]
    mode: str = "normal"
    shapes: tuple[str, ...] = ("1", "2", "3", "4", "8", "2x1", "2x2", "4x1", "2x4")
    """Ranks on one node, or nodes x ranks of each."""
    devices: tuple[str, ...] = ("cpu", "simulated", "cuda")
    variants: tuple[str, ...] = ("windows",)
    """They are recorded with the first, on the first device; everything else must give the same."""
    buffer: dict[str, Any] = field(default_factory=dict)
    """Arguments of its Buffer."""

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.mode}_{self.name.replace(' ', '_')}.json"


@dataclass(frozen=True)
class Replay:
    """A recording in one place, in one way."""

    recording: Recording
    shape: str
    place: Place
    variant: str

    def __str__(self) -> str:
        return f"{self.recording.name.replace(' ', '-')}-{self.place}-{self.variant}"

    def run(self, flips_bit: bool = False) -> Calls:
        """What comes now. With `flips_bit` a bit of rank 0's rows is another one in every call."""
        tapes = self.place.world().run(
            play,
            (self.recording.mode, self.recording.name),
            self.place.ranks_per_node,
            self.place.network,
            self.variant,
            flips_bit,
            timeout=TIMEOUT_S,
        )
        return merged(tapes)

    def differences(self) -> list[str]:
        """What comes now and did not come when it was recorded, or the reverse."""
        return differences(load(self.recording)[self.shape], self.run())


def place_of(device: Any, shape: str, hosts: bool = False) -> Place:
    nodes, per_node = map(int, shape.split("x")) if "x" in shape else (1, int(shape))
    return Place(device, nodes * per_node, nodes, hosts)


class Player:
    """One rank that plays a recording."""

    def __init__(self, context: RankContext, buffer: Buffer, variant: Variant, flips_bit: bool) -> None:
        self.rank, self.num_ranks, self.group = context.rank, context.num_ranks, context.group
        self.buffer, self.variant, self.flips_bit = buffer, variant, flips_bit
        self.device = tensor_device()
        self.tape: dict[str, dict[str, str]] = {}
        self.held: dict[str, torch.Tensor] = {}
        """Results that must not change until the end, and after the Buffer's."""
        self.scenes: dict[type, Any] = {}
        """What rounds share."""

    def note(self, call: str, **parts: Any) -> None:
        """Parts that are None are omitted."""
        if call in self.tape:
            raise ValueError(f"{call!r} was noted before: rounds need names of their own")
        self.tape[call] = {part: text_of(value) for part, value in parts.items() if value is not None}

    def attempt(self, call: str, work: Callable[[], Any]) -> None:
        """Make a call that may be refused, and note what it raises."""
        try:
            work()
            outcome = "fine"
        except AnyEPError as error:
            outcome = f"{type(error).__name__}: {error}"
        finally:
            self.synchronize()
        self.note(call, outcome=outcome)

    def synchronize(self) -> None:
        """What kernels found wrong is heard of by the next call, and not by a later one."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def barrier(self) -> None:
        self.synchronize()
        dist.barrier(group=self.group)

    def there(self, tensor: torch.Tensor) -> torch.Tensor:
        """On the Buffer's device, with the same strides."""
        return tensor.to(self.device)

    def flipped(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows that a call sends, with one bit changed where that is wanted."""
        if self.flips_bit and self.rank == 0 and rows.numel():
            rows.view(torch.uint8).view(-1)[0] ^= 1
        return rows


def play(
    context: RankContext,
    key: tuple[str, str],
    ranks_per_node: int | None,
    network: str | None,
    variant_name: str,
    flips_bit: bool,
) -> dict[str, dict[str, str]]:
    """On a rank: play a recording, and return what was noted."""
    from tests.support.recordings import RECORDINGS

    recording, variant = RECORDINGS[key], VARIANTS[variant_name]
    arguments = {
        "num_nvl_bytes": 1 << 20,
        "num_rdma_bytes": 0 if ranks_per_node is None else 1 << 20,
        **recording.buffer,
    }
    buffer = Buffer(
        context.group,
        **arguments,
        device=buffer_device(),
        ranks_per_node=ranks_per_node,
        num_window_bytes=variant.num_window_bytes,
        network=network,
    )
    player = Player(context, buffer, variant, flips_bit)
    with buffer:
        for part in recording.rounds:
            part.play(player)
        player.barrier()
    for name, tensor in player.held.items():
        player.note(f"{name}: after destroy", tensor=tensor)
    player.note("the end", repr=repr(buffer))
    player.attempt("a call after the end", buffer.status)
    return player.tape


# What is stored


def merged(tapes: Sequence[dict[str, dict[str, str]]]) -> Calls:
    """The notes of all ranks, by call and part."""
    calls = dict.fromkeys(call for tape in tapes for call in tape)
    result: Calls = {}
    for call in calls:
        parts = dict.fromkeys(part for tape in tapes for part in tape.get(call, {}))
        result[call] = {}
        for part in parts:
            of_ranks = [tape.get(call, {}).get(part) for tape in tapes]
            result[call][part] = of_ranks[0] if len(set(of_ranks)) == 1 else list(of_ranks)
    return result


def differences(recorded: Calls, now: Calls) -> list[str]:
    """One line for each part of each call that differs, with the ranks.

    >>> differences({"dispatch": {"x": ["a", "b"]}}, {"dispatch": {"x": "a"}})
    ['dispatch: x of rank 1: recorded b, now a']
    """
    lines = []
    for call in dict.fromkeys([*recorded, *now]):
        if call not in now or call not in recorded:
            lines.append(f"{call}: {'no such call was recorded' if call in now else 'it was not made now'}")
            continue
        for part in dict.fromkeys([*recorded[call], *now[call]]):
            before, after = recorded[call].get(part), now[call].get(part)
            lines += (f"{call}: {part} {line}" for line in _by_rank(before, after))
    return lines


def _by_rank(before: Part, after: Part) -> Iterator[str]:
    if before == after:
        return
    if not isinstance(before, list) and not isinstance(after, list):
        yield f"of all ranks: recorded {before}, now {after}"
        return
    num_ranks = max(len(part) for part in (before, after) if isinstance(part, list))
    old, new = (part if isinstance(part, list) else [part] * num_ranks for part in (before, after))
    for rank in range(num_ranks):
        if old[rank : rank + 1] != new[rank : rank + 1]:
            yield f"of rank {rank}: recorded {old[rank]}, now {new[rank]}"


def load(recording: Recording) -> dict[str, Calls]:
    """What is stored, by shape."""
    stored: dict[str, Calls] = json.loads(recording.path.read_text())
    return stored


def store(recording: Recording, shapes: dict[str, Calls]) -> None:
    """Write a file with a line for each call."""
    FOLDER.mkdir(exist_ok=True)
    blocks = []
    for shape, calls in shapes.items():
        lines = ",\n".join(f"    {json.dumps(call)}: {json.dumps(parts)}" for call, parts in calls.items())
        blocks.append(f"  {json.dumps(shape)}: {{\n{lines}\n  }}")
    recording.path.write_text("{\n" + ",\n".join(blocks) + "\n}\n")
