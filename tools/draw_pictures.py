"""Draws the pictures of the documentation: `python tools/draw_pictures.py` writes docs/pictures/*.svg.

Their colours follow the reader's light or dark setting. `dispatch.svg` moves; where motion is not wanted
(`prefers-reduced-motion`) the tokens stand still at their destinations.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).parents[1] / "docs" / "pictures"
STYLE: Final = (
    "text{font:13px system-ui,sans-serif;fill:#1f2328}.box{fill:#f6f8fa;stroke:#57606a}.node{fill:none;"
    "stroke:#8c959f;stroke-dasharray:5 4}.way{fill:none;stroke:#0969da;stroke-width:2}.back{fill:none;"
    "stroke:#8250df;stroke-width:2}.full{fill:#0969da}.free{fill:none;stroke:#57606a}.head{fill:#0969da}"
    ".headback{fill:#8250df}.small{font-size:11px}"
    "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.box{fill:#161b22;stroke:#8b949e}.node{stroke:#6e7681}"
    ".way{stroke:#4493f8}.back{stroke:#ab7df8}.full,.head{fill:#4493f8}.headback{fill:#ab7df8}.free{stroke:#8b949e}}"
)
ARROWS: Final = "".join(
    f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" orient="auto">'
    f'<path d="M0 0L8 4L0 8Z" class="{look}"/></marker>'
    for name, look in (("a", "head"), ("b", "headback"))
)


def picture(width: int, height: int, title: str, *parts: str) -> str:
    """A whole SVG file; screen readers read its title."""
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" role="img"'
        f' viewBox="0 0 {width} {height}" width="{width}">\n<title>{title}</title>'
        f"<style>{STYLE}</style><defs>{ARROWS}</defs>\n" + "\n".join(parts) + "\n</svg>\n"
    )


def text(x: float, y: float, words: str, *, small: bool = False, anchor: str = "middle") -> str:
    look = ' class="small"' if small else ""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{look}>{words}</text>'


def box(x: float, y: float, width: float, height: float, words: str, *below: str) -> str:
    """A rectangle with a line of text in its middle, or several."""
    lines = (words, *below)
    first = y + height / 2 + 5 - 8 * (len(lines) - 1)
    written = "".join(text(x + width / 2, first + 16 * i, line, small=i > 0) for i, line in enumerate(lines))
    return f'<rect class="box" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6"/>{written}'


def arrow(x1: float, y1: float, x2: float, y2: float, words: str = "", *, back: bool = False) -> str:
    look, end = ("back", "b") if back else ("way", "a")
    line = f'<path class="{look}" d="M{x1:g} {y1:g}L{x2:g} {y2:g}" marker-end="url(#{end})"/>'
    return line + (text((x1 + x2) / 2, (y1 + y2) / 2 - 7, words, small=True) if words else "")


def node(x: float, y: float, width: float, height: float, words: str) -> str:
    return f'<rect class="node" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="8"/>' + text(
        x + 10, y + 18, words, small=True, anchor="start"
    )


def one_node() -> str:
    return picture(
        640,
        180,
        "The path of a token on one node",
        node(10, 10, 620, 160, "one node"),
        box(30, 66, 140, 60, "rank 0", "token, gate"),
        box(260, 66, 140, 60, "window of rank 1", "received rows"),
        box(490, 66, 120, 60, "rank 1", "its experts"),
        arrow(170, 84, 260, 84),
        arrow(400, 84, 490, 84),
        text(215, 56, "dispatch writes", small=True),
        arrow(490, 110, 400, 110, back=True),
        arrow(260, 110, 170, 110, back=True),
        text(215, 146, "combine reads, and adds up", small=True),
    )


def between_nodes() -> str:
    return picture(
        680,
        180,
        "The path of a token between nodes",
        node(10, 10, 170, 160, "node 0"),
        node(370, 10, 300, 160, "node 1"),
        box(30, 70, 120, 60, "rank 1", "token"),
        box(390, 70, 120, 60, "rank 5", "relay: same index"),
        box(560, 50, 90, 44, "rank 4"),
        box(560, 108, 90, 44, "rank 7"),
        arrow(150, 88, 390, 88),
        text(275, 80, "once over the network", small=True),
        arrow(510, 92, 560, 76),
        arrow(510, 108, 560, 128),
        arrow(390, 112, 150, 112, back=True),
        text(275, 130, "combine: one sum per node", small=True),
    )


def low_latency() -> str:
    return picture(
        640,
        230,
        "The path of a token in low-latency mode",
        node(10, 10, 620, 210, "one node"),
        box(30, 40, 150, 60, "rank 0", "row, cast once"),
        box(30, 116, 150, 60, "completion record", "number, counts"),
        box(380, 40, 110, 60, "rank 1", "expert 2"),
        box(380, 116, 110, 60, "rank 2", "expert 5"),
        arrow(180, 62, 380, 62, "each reads in place"),
        arrow(180, 82, 380, 140),
        text(560, 100, "rows packed", small=True),
        text(560, 116, "by expert", small=True),
        text(320, 206, "no exchange of counts before the rows", small=True),
    )


def ring() -> str:
    """Six rows of which three are filled: the sender's tail is 7, the receiver's head is 4."""
    cells = "".join(
        f'<rect class="{"full" if 4 <= number < 7 else "free"}" x="{110 + 70 * (number - 3)}" y="60"'
        f' width="60" height="40" rx="4"/>'
        + text(140 + 70 * (number - 3), 120, f"row {number % 6}", small=True)
        for number in range(3, 9)
    )
    return picture(
        640,
        200,
        "A ring at work",
        cells,
        arrow(210, 25, 210, 56),
        text(210, 18, "head 4: rows taken", small=True),
        arrow(420, 25, 420, 56),
        text(420, 18, "tail 7: rows sent", small=True),
        text(
            320,
            160,
            "The receiver takes rows and raises the head; the sender fills free rows and raises the tail.",
        ),
        text(320, 182, "6 rows: the sender may fill rows below number head + 6 = 10."),
    )


def windows_and_rings() -> str:
    return picture(
        660,
        240,
        "Windows against rings",
        text(330, 22, "window: each row is written once, to its final place"),
        box(40, 40, 130, 50, "sender"),
        box(490, 40, 130, 50, "result tensor"),
        arrow(170, 65, 490, 65, "one write"),
        text(330, 140, "ring: any amount of data through a few rows, one copy more"),
        box(40, 160, 130, 50, "sender"),
        box(265, 160, 130, 50, "ring"),
        box(490, 160, 130, 50, "result tensor"),
        arrow(170, 185, 265, 185, "write"),
        arrow(395, 185, 490, 185, "copy"),
    )


LOOP: Final = (
    *(("send A", 52), ("send B", 52), ("receive A", 64), ("experts A", 88), ("send A'", 54)),
    *(("receive B", 64), ("experts B", 88), ("send B'", 54), ("receive A'", 68)),
)
"""What a program does, one after the other, and how long it takes. A' are the outputs of A's experts."""


def overlap() -> str:
    """Two micro-batches in turns: the rows of one travel while the experts work on the other."""
    left, end, x = 110.0, 740.0, 110.0
    steps, sent, received = [], {}, {}
    for words, width in LOOP:
        what, name = words.split()
        steps.append(_step(x, 46, width, words, f"step{name[0].lower()}"))
        if what == "send":
            sent[name] = x + width
        elif what == "receive":
            received[name] = x
        x += width + 2
    ways = [
        _step(start, 100 + 40 * (name[0] == "B"), received.get(name, end) - start, f"rows {name}", look)
        for name, start in sent.items()
        for look in [f"way{name[0].lower()}"]
    ]
    return picture(
        750,
        214,
        "The timeline of an overlapped step: rows of one micro-batch travel while experts work on the other",
        "<style>.stepa{fill:#b6d7ff;stroke:#0969da}.stepb{fill:#e2d3fb;stroke:#8250df}"
        ".waya,.wayb{fill:none;stroke:#0969da;stroke-dasharray:4 3}.wayb{stroke:#8250df}"
        "@media(prefers-color-scheme:dark){.stepa{fill:#0c3d7a;stroke:#4493f8}"
        ".stepb{fill:#44297a;stroke:#ab7df8}.waya{stroke:#4493f8}.wayb{stroke:#ab7df8}}</style>",
        text(left, 24, "time", anchor="start", small=True),
        arrow(left + 32, 20, end, 20),
        text(96, 68, "the program", anchor="end"),
        text(96, 142, "on the way", anchor="end"),
        *steps,
        *ways,
        text(
            425,
            202,
            "While the experts work on A, the rows of B travel; the hook that receives B finds them.",
        ),
    )


def _step(x: float, y: float, width: float, words: str, look: str) -> str:
    rect = f'<rect class="{look}" x="{x:g}" y="{y:g}" width="{width:g}" height="34" rx="4"/>'
    return rect + text(x + width / 2, y + 21, words, small=True)


ROUTES: Final = ((0, 1), (0, 2), (1, 3), (1, 0), (2, 2), (2, 0), (3, 1), (3, 2))
"""The tokens of the moving picture: from which rank to which."""


def moving_dispatch() -> str:
    """Four ranks in a square with two tokens each; a token's colour is that of its source."""
    corners = ((30, 50), (230, 50), (30, 210), (230, 210))
    ranks = [
        box(x, y, 120, 60, f"rank {i}", f"experts {2 * i}, {2 * i + 1}") for i, (x, y) in enumerate(corners)
    ]
    colours = ("#0969da", "#bf8700", "#1a7f37", "#cf222e")
    moves, dots = [], []
    for number, (source, target) in enumerate(ROUTES):
        sent = [token for token, route in enumerate(ROUTES) if route[0] == source].index(number)
        came = [token for token, route in enumerate(ROUTES) if route[1] == target].index(number)
        x1, y1 = corners[source][0] + 40 + 40 * sent, corners[source][1] - 14
        x2, y2 = corners[target][0] + 30 + 30 * came, corners[target][1] + 74
        dots.append(f'<circle class="t{number}" cx="{x2}" cy="{y2}" r="8" fill="{colours[source]}"/>')
        moves.append(
            f"@keyframes m{number}{{0%,15%{{transform:translate({x1 - x2}px,{y1 - y2}px)}}"
            f"55%,100%{{transform:none}}}}"
            f".t{number}{{animation:m{number} 5s ease-in-out infinite}}"
        )
    style = "<style>@media(prefers-reduced-motion:no-preference){" + "".join(moves) + "}</style>"
    return picture(
        380,
        350,
        "A dispatch among four ranks: each token moves to the rank of its expert",
        style,
        *ranks,
        *dots,
        text(190, 322, "above a rank: its tokens;"),
        text(190, 340, "below it: what it receives, by source"),
    )


def sweep() -> str:
    """Lines for the table of docs/performance/sweeps.md: times by number of tokens, both axes logarithmic."""
    page = (FOLDER.parent / "performance" / "sweeps.md").read_text()
    rows = re.findall(r"^\| (\d+) \| ([\d.]+) (us|ms) \|.*?\| ([\d.]+) (us|ms) \|", page, re.MULTILINE)
    scale = {"us": 1.0, "ms": 1000.0}
    points = [(int(n), float(a) * scale[unit], float(b) * scale[other]) for n, a, unit, b, other in rows]

    def x_of(tokens: int) -> float:
        return 90 + 500 * math.log(tokens) / math.log(points[-1][0])

    def y_of(us: float) -> float:
        return 206 - 120 * (math.log10(us) - math.log10(500))

    ticks = [
        f'<path class="grid" d="M90 {y_of(us):g}H600"/>'
        + text(82, y_of(us) + 4, words, small=True, anchor="end")
        for us, words in ((500, "0.5 ms"), (1000, "1 ms"), (2000, "2 ms"), (5000, "5 ms"), (10000, "10 ms"))
    ]
    lines = []
    for look, column, name in (("way", 1, "cached dispatch"), ("back", 2, "combine")):
        path = "L".join(f"{x_of(point[0]):g} {y_of(point[column]):g}" for point in points)
        lines.append(f'<path class="{look}" d="M{path}"/>')
        lines += [
            f'<circle class="{"head" if look == "way" else "headback"}" cx="{x_of(point[0]):g}"'
            f' cy="{y_of(point[column]):g}" r="4"/>'
            for point in points
        ]
        lines.append(text(x_of(points[-1][0]) + 10, y_of(points[-1][column]) + 4, name, anchor="start"))
    return picture(
        720,
        264,
        "Time of a cached dispatch and of a combine by number of tokens, 8 ranks on 2 cores",
        "<style>.grid{stroke:#8c959f;stroke-opacity:.4}</style>",
        *ticks,
        *lines,
        *(text(x_of(point[0]), 228, str(point[0]), small=True) for point in points),
        text(345, 252, "tokens per rank", small=True),
    )


def beside_deep_ep() -> str:
    """Bars for the table of docs/performance/gpu.md: rates of DeepEP and AnyEP."""
    table = (FOLDER.parent / "performance" / "gpu.md").read_text().split("| DeepEP | AnyEP |")[1]
    rows = re.findall(r"^\| (\d+) x (\d+) \| ([\w ]+) \| (\d+) \| (\d+) \|", table, re.MULTILINE)
    left, scale, parts = 250.0, 0.5, []
    for index, (ranks, sms, call, theirs, ours) in enumerate(rows):
        y = 52 + 44 * index + 14 * (index // 3)
        if index % 3 == 0:
            parts.append(text(10, y + 21, f"{ranks} ranks, {sms} SMs", anchor="start"))
        parts.append(text(left - 8, y + 21, call, anchor="end"))
        for offset, look, value in ((0, "theirs", theirs), (17, "full", ours)):
            width = scale * int(value)
            parts.append(
                f'<rect class="{look}" x="{left:g}" y="{y + offset:g}" width="{width:g}" height="15" rx="2"/>'
            )
            parts.append(text(left + width + 6, y + offset + 12, value, small=True, anchor="start"))
    return picture(
        660,
        490,
        "Rates of DeepEP and AnyEP between ranks that share one H200, GB/s per rank",
        "<style>.theirs{fill:#8c959f}@media(prefers-color-scheme:dark){.theirs{fill:#6e7681}}</style>",
        f'<rect class="theirs" x="{left:g}" y="16" width="15" height="15" rx="2"/>',
        text(left + 22, 28, "DeepEP", anchor="start"),
        f'<rect class="full" x="{left + 90:g}" y="16" width="15" height="15" rx="2"/>',
        text(left + 112, 28, "AnyEP", anchor="start"),
        text(left + 180, 28, "GB/s per rank", anchor="start", small=True),
        *parts,
    )


PICTURES: Final[dict[str, Callable[[], str]]] = {
    "one-node.svg": one_node,
    "between-nodes.svg": between_nodes,
    "low-latency.svg": low_latency,
    "ring.svg": ring,
    "windows-and-rings.svg": windows_and_rings,
    "overlap.svg": overlap,
    "sweep.svg": sweep,
    "beside-deep-ep.svg": beside_deep_ep,
    "dispatch.svg": moving_dispatch,
}

if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / name).write_text(draw())
