"""Draws the pictures of the documentation: `python tools/draw_pictures.py` writes docs/pictures/*.svg.

Their colours follow the reader's light or dark setting. `dispatch.svg` moves; where motion is not wanted
(`prefers-reduced-motion`) the tokens stand still at their destinations.
"""

from __future__ import annotations

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
    """A whole SVG file; its title is read to those who cannot see it."""
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
        210,
        "The way of a token on one node",
        node(10, 10, 620, 190, "one node"),
        box(40, 70, 150, 60, "rank 0", "token, gate"),
        box(240, 70, 160, 60, "window of rank 1", "received rows"),
        box(460, 70, 140, 60, "rank 1", "its experts"),
        arrow(190, 88, 240, 88),
        arrow(400, 88, 460, 88),
        text(215, 60, "dispatch writes", small=True),
        arrow(460, 114, 400, 114, back=True),
        arrow(240, 114, 190, 114, back=True),
        text(215, 150, "combine reads, and adds up", small=True),
    )


def between_nodes() -> str:
    return picture(
        680,
        220,
        "The way of a token between nodes",
        node(10, 10, 230, 200, "node 0"),
        node(350, 10, 320, 200, "node 1"),
        box(40, 50, 150, 60, "rank 1", "token"),
        box(370, 50, 120, 60, "rank 5", "relay: same place"),
        box(540, 40, 110, 44, "rank 4"),
        box(540, 100, 110, 44, "rank 7"),
        arrow(190, 72, 370, 72, "once over the network"),
        arrow(490, 72, 540, 62),
        arrow(490, 90, 540, 120),
        arrow(370, 96, 190, 96, back=True),
        text(295, 118, "combine: one sum per node", small=True),
    )


def low_latency() -> str:
    return picture(
        640,
        230,
        "The way of a token in low-latency mode",
        node(10, 10, 620, 210, "one node"),
        box(30, 50, 150, 60, "rank 0", "row, cast once"),
        box(30, 130, 150, 60, "completion record", "number, counts"),
        box(380, 50, 110, 60, "rank 1", "expert 2"),
        box(380, 130, 110, 60, "rank 2", "expert 5"),
        arrow(180, 72, 380, 72, "each reads in place"),
        arrow(180, 92, 380, 150),
        text(560, 84, "rows packed", small=True),
        text(560, 100, "by expert", small=True),
        text(280, 200, "no exchange of counts before the rows", small=True),
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


ROUTES: Final = ((0, 1), (0, 2), (1, 3), (1, 0), (2, 2), (2, 0), (3, 1), (3, 2))
"""The tokens of the moving picture: from which rank to which."""


def moving_dispatch() -> str:
    """Four ranks in a square with two tokens each; a token's colour is that of its source."""
    corners = ((90, 60), (390, 60), (90, 220), (390, 220))
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
        600,
        340,
        "A dispatch among four ranks: each token moves to the rank of its expert",
        style,
        *ranks,
        *dots,
        text(300, 334, "above a rank: its tokens; below: what it receives, by source"),
    )


PICTURES: Final[dict[str, Callable[[], str]]] = {
    "one-node.svg": one_node,
    "between-nodes.svg": between_nodes,
    "low-latency.svg": low_latency,
    "ring.svg": ring,
    "windows-and-rings.svg": windows_and_rings,
    "dispatch.svg": moving_dispatch,
}

if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / name).write_text(draw())
