"""Draws one rank's memory to scale: the picture behind `anyep plan --map`.

Each strip is a piece of memory, drawn to scale from left to right; the strip below it magnifies one part of
it, and the grey fan between them shows which. From top to bottom: the whole heap, the rings within the node,
one ring, one token, the token's small fields; then the control region, the rings between nodes and the
low-latency slots where there are any. Offsets and sizes come from `layout.py`, none from here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from anyep.cli.memory_plan import MemoryPlan
from anyep.cli.units import format_bytes
from anyep.errors import NotSupported
from anyep.layout import ControlRegion, RingArea, low_latency_heap, normal_heap
from anyep.sizes import LOW_LATENCY_HEADER_BYTES

WIDTH: Final = 1000.0
STRIP_HEIGHT: Final = 34.0
FAN_HEIGHT: Final = 26.0
TITLE_HEIGHT: Final = 26.0
LABEL_CHARACTER_WIDTH: Final = 5.0
"""Estimated width of one character of a label, in the picture's units."""
PLATE: Final = {"facecolor": "white", "edgecolor": "none", "pad": 1.5, "alpha": 0.85}

INK: Final = "#22313f"
FAINT: Final = "#7b8794"
SLACK: Final = "#eef1f4"
COLOURS: Final = {
    "control": "#e4572e",
    "nvl": "#2e86ab",
    "rdma receive": "#4d9078",
    "rdma send": "#9bc1a3",
    "low latency": "#8367c7",
    "hidden": "#2e86ab",
    "source_meta": "#f2a541",
    "scales": "#4d9078",
    "topk_ids": "#8367c7",
    "topk_weights": "#c86fc9",
    "padding": "#cfd6dd",
    "send": "#b5a4e3",
    "receive": "#8367c7",
    "signal": "#f2a541",
}
PEER_COLOURS: Final = ("#2e86ab", "#5fa8c8", "#3d6f8e", "#86c0d9", "#1f5f7f", "#72b2d0", "#4a8fb0", "#a5d2e5")
NODE_COLOURS: Final = ("#4d9078", "#7fb69c", "#36705b", "#a3cdb8")
CONTROL_COLOURS: Final = (
    *("#e4572e", "#2e86ab", "#f2a541", "#4d9078", "#8367c7"),
    *("#c86fc9", "#8f3b2a", "#1f5f7f", "#9bc1a3", "#f9c784"),
)
SMALL: Final = "#aab4be"
"""The colour of all parts of the control region that are too small to be told apart."""
SMALL_SHARE: Final = 0.01
LIGHT_FIELDS: Final = ("padding", "source_meta")


@dataclass(frozen=True)
class Piece:
    """A part of a strip: its bytes, its colour and its labels, of which the first that fits is drawn."""

    num_bytes: float
    colour: str
    labels: tuple[str, ...] = ()
    light: bool = False
    hatched: bool = False


@dataclass(frozen=True)
class Span:
    """Where a piece was drawn."""

    left: float
    right: float
    bottom: float


def draw_memory_map(plan: MemoryPlan, path: Path) -> None:
    """Draw `plan` to `path`; the file extension determines the format."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise NotSupported("drawing a map needs matplotlib: pip install 'anyep[plot]'") from error
    figure = Figure(figsize=(15, 10))
    axes = figure.add_axes((0.03, 0.02, 0.94, 0.96))
    canvas = _Canvas(axes)
    _draw_heading(canvas, plan)
    _draw_normal_mode(canvas, plan)
    if plan.low_latency is not None:
        _draw_low_latency(canvas, plan)
    axes.set_xlim(-2, WIDTH + 2)
    axes.set_ylim(canvas.y + 6, 0)
    axes.axis("off")
    figure.set_size_inches(15, 15 * 0.94 / 0.96 * canvas.y / WIDTH * 0.96)
    figure.savefig(path, dpi=140, facecolor="white")


class _Canvas:
    """A page that is filled from top to bottom; y grows downwards."""

    def __init__(self, axes: Any) -> None:
        self._axes = axes
        self.y = 0.0

    def text(self, x: float, y: float, text: str, **style: Any) -> None:
        defaults = {"fontsize": 9, "color": INK, "va": "center", "ha": "left", "family": "DejaVu Sans"}
        self._axes.text(x, y, text, **(defaults | style))

    def title(self, text: str, detail: str = "") -> None:
        self.text(0, self.y + TITLE_HEIGHT / 2, text, fontsize=10.5, weight="bold")
        if detail:
            self.text(WIDTH, self.y + TITLE_HEIGHT / 2, detail, color=FAINT, ha="right")
        self.y += TITLE_HEIGHT

    def strip(
        self, pieces: Sequence[Piece], left: float = 0.0, right: float = WIDTH, height: float = STRIP_HEIGHT
    ) -> list[Span]:
        """Draw pieces side by side, to scale, and move down."""
        from matplotlib.patches import Rectangle

        total = sum(piece.num_bytes for piece in pieces)
        spans = []
        x = left
        for piece in pieces:
            width = piece.num_bytes / total * (right - left)
            edge = min(0.6, width / 6)
            self._axes.add_patch(
                Rectangle(
                    (x, self.y),
                    width,
                    height,
                    facecolor=piece.colour,
                    edgecolor=FAINT if piece.hatched else "white",
                    linewidth=edge,
                    hatch="///" if piece.hatched else None,
                )
            )
            label = next((label for label in piece.labels if len(label) * LABEL_CHARACTER_WIDTH < width), "")
            if label:
                colour = INK if piece.light or piece.hatched else "white"
                plate = PLATE if piece.hatched else None
                middle = (x + width / 2, self.y + height / 2)
                self.text(*middle, label, color=colour, ha="center", fontsize=8, bbox=plate)
            spans.append(Span(x, x + width, self.y + height))
            x += width
        self.y += height
        return spans

    def fan(self, source: Span, left: float = 0.0, right: float = WIDTH, height: float = FAN_HEIGHT) -> None:
        """Join a piece of the strip above to the strip that magnifies it."""
        from matplotlib.patches import Polygon

        corners = [
            (source.left, self.y),
            (source.right, self.y),
            (right, self.y + height),
            (left, self.y + height),
        ]
        self._axes.add_patch(
            Polygon(corners, facecolor="#f3f5f7", edgecolor="#dde3e8", linewidth=0.6, zorder=0)
        )
        self.y += height

    def braces(self, spans: Sequence[Span], labels: Sequence[str]) -> None:
        """Name groups of pieces below a strip."""
        for span, label in zip(spans, labels, strict=True):
            y = self.y + 4
            self._axes.plot([span.left + 1, span.right - 1], [y, y], color=FAINT, linewidth=1)
            if len(label) * LABEL_CHARACTER_WIDTH < span.right - span.left:
                self.text((span.left + span.right) / 2, y + 9, label, ha="center", color=FAINT, fontsize=8)
        self.y += 20

    def pointer(self, x: float, y: float, text: str, text_y: float) -> None:
        """An arrow to (x, y) with its text above or below."""
        self._axes.annotate(
            text,
            (x, y),
            (x, text_y),
            fontsize=8,
            color=INK,
            ha="center",
            va="center",
            arrowprops={"arrowstyle": "-|>", "color": INK, "linewidth": 0.8},
        )

    def legend(self, entries: Sequence[tuple[str, str]], columns: int = 6) -> None:
        """Coloured squares with their meanings, in the order of the strip above."""
        self.y += 6
        for index, (colour, text) in enumerate(entries):
            x = index % columns * WIDTH / columns
            y = self.y + index // columns * 15 + 7
            self._axes.plot([x + 4], [y], marker="s", markersize=6, color=colour)
            self.text(x + 12, y, text, fontsize=8)
        self.y += -(-len(entries) // columns) * 15 + 4

    def line(self, text: str) -> None:
        self.text(0, self.y + 9, text, color=FAINT, fontsize=8.5)
        self.y += 18

    def gap(self, height: float = 14.0) -> None:
        self.y += height


def _draw_heading(canvas: _Canvas, plan: MemoryPlan) -> None:
    workload = plan.workload
    nodes = (
        "on one node" if plan.num_nodes == 1 else f"on {plan.num_nodes} nodes of {workload.ranks_per_node}"
    )
    canvas.text(0, canvas.y + 14, "The memory of one rank", fontsize=18, weight="bold")
    canvas.y += 32
    canvas.line(
        f"{plan.num_ranks} ranks {nodes}, hidden {workload.hidden} {workload.dtype}, top-{workload.num_topk}"
        f" of {workload.num_experts} experts. Every strip is to scale; the one below it magnifies one part."
        f" Peers write straight into this memory."
    )
    canvas.gap(6)


def _draw_normal_mode(canvas: _Canvas, plan: MemoryPlan) -> None:
    workload = plan.workload
    config = plan.dispatch_config
    heap = normal_heap(config, plan.num_ranks, workload.ranks_per_node, workload.token)
    control_bytes = heap.control.num_bytes
    total = control_bytes + plan.nvl_bytes + plan.rdma_bytes
    canvas.title("Heap in normal mode", f"{format_bytes(total)}; hatched: reserved for larger tokens")
    pieces = [
        Piece(control_bytes, COLOURS["control"]),
        Piece(
            heap.nvl.num_bytes,
            COLOURS["nvl"],
            (f"rings within the node  {format_bytes(heap.nvl.num_bytes)}",),
        ),
        Piece(plan.nvl_bytes - heap.nvl.num_bytes, SLACK, ("reserved",), hatched=True),
    ]
    for area in heap.rdma:
        what = "from nodes" if area.name == "rdma receive" else "to nodes"
        labels = (f"rings {what}  {format_bytes(area.num_bytes)}", f"rings {what}", what)
        pieces.append(Piece(area.num_bytes, COLOURS[area.name], labels))
    if heap.rdma:
        used = sum(area.num_bytes for area in heap.rdma)
        pieces.append(Piece(plan.rdma_bytes - used, SLACK, ("reserved",), hatched=True))
    spans = canvas.strip(pieces)
    control_share = control_bytes / total
    canvas.fan(spans[1])

    rings = heap.nvl.num_channels * heap.nvl.num_peers
    canvas.title(
        "Rings within the node: one per (channel, peer)",
        f"{heap.nvl.num_channels} channels x {heap.nvl.num_peers} peers = {rings} rings of"
        f" {format_bytes(heap.nvl.ring_bytes)}, then {heap.nvl.control_bytes} reserved bytes for each",
    )
    ring_spans = _draw_rings(canvas, heap.nvl, PEER_COLOURS, "peer")
    canvas.y -= 20
    canvas.fan(ring_spans[0], height=FAN_HEIGHT + 20)
    _draw_one_ring(canvas, heap.nvl, config.num_max_nvl_chunked_send_tokens)
    _draw_token(canvas, plan)
    _draw_control_fields(canvas, heap.nvl)
    canvas.gap()
    _draw_control_region(canvas, heap.control, control_share)
    if heap.rdma:
        area = heap.rdma[0]
        canvas.gap()
        canvas.title(
            "Rings from other nodes: one per (channel, node)",
            f"{area.num_channels} channels x {area.num_peers} nodes, {area.num_rows} rows each,"
            f" {format_bytes(area.ring_bytes)}; the rings to other nodes look the same",
        )
        _draw_rings(canvas, area, NODE_COLOURS, "node")
        _draw_control_fields(canvas, area)


def _draw_rings(canvas: _Canvas, area: RingArea, colours: Sequence[str], peer_word: str) -> list[Span]:
    data = [region for region in area.regions() if region.kind == "data"]
    pieces = [
        Piece(
            region.num_bytes,
            colours[(region.peer or 0) % len(colours)],
            (f"{peer_word} {region.peer}", f"{region.peer}"),
        )
        for region in data
    ]
    control = area.num_channels * area.num_peers * area.control_bytes
    spans = canvas.strip([*pieces, Piece(control, COLOURS["source_meta"])])
    channels = [
        list(group) for _, group in groupby(zip(data, spans, strict=False), lambda pair: pair[0].channel)
    ]
    canvas.braces(
        [Span(group[0][1].left, group[-1][1].right, 0) for group in channels],
        [f"channel {group[0][0].channel}" for group in channels],
    )
    return spans


def _draw_one_ring(canvas: _Canvas, ring: RingArea, send_chunk: int) -> None:
    """A ring in use; the positions of head and tail are an example."""
    head, tail = ring.num_rows * 2 // 5, ring.num_rows * 3 // 5
    chunk = max(1, min(send_chunk, ring.num_rows - tail))
    canvas.title(
        "One ring, at work: channel 0, peer 0",
        f"{ring.num_rows} rows of {ring.token_bytes:,} bytes; the sender adds at most {send_chunk} at a time",
    )
    canvas.gap(18)
    top = canvas.y
    pieces = [
        Piece(
            1,
            COLOURS["nvl"] if head <= row < tail else "#f2a541" if tail <= row < tail + chunk else "#dbe9f1",
        )
        for row in range(ring.num_rows)
    ]
    spans = canvas.strip(pieces)
    canvas.pointer(spans[head].left, top, "head: the receiver has taken all before", top - 14)
    canvas.pointer(spans[tail].left, top, "tail: the sender has filled all before", top - 14)
    middle = (head + tail) // 2
    label_y = top + STRIP_HEIGHT / 2
    for row, text in (
        (middle, "waiting to be taken"),
        (head // 2, "free"),
        ((tail + ring.num_rows) // 2, "free"),
    ):
        canvas.text(spans[row].left, label_y, text, ha="center", fontsize=8, bbox=PLATE)
    canvas.text(spans[tail].left + 2, canvas.y + 9, "next chunk", fontsize=8, color="#b8761a")
    canvas.fan(spans[middle], height=FAN_HEIGHT + 6)


def _draw_token(canvas: _Canvas, plan: MemoryPlan) -> None:
    token = plan.workload.token
    canvas.title("One token in a row", f"{token.token_bytes:,} bytes: a multiple of 16")
    parts = {name: size for name, size in token.parts().items() if size}
    hidden_label = f"hidden: {plan.workload.hidden} x {plan.workload.dtype} = {token.hidden_bytes:,} bytes"
    spans = canvas.strip(
        [
            Piece(size, COLOURS[name], (hidden_label,) if name == "hidden" else ())
            for name, size in parts.items()
        ]
    )
    small = {name: size for name, size in parts.items() if name != "hidden"}
    canvas.fan(Span(spans[1].left, spans[-1].right, 0))
    words = {
        "source_meta": "source meta",
        "scales": "scales (float32)",
        "topk_ids": "top-k ids (int32)",
        "topk_weights": "top-k weights (float32)",
        "padding": "padding",
    }
    canvas.strip(
        [
            Piece(
                size,
                COLOURS[name],
                (f"{words[name]}  {size}", f"{words[name].split(' (')[0]}  {size}", f"{size}"),
                name in LIGHT_FIELDS,
            )
            for name, size in small.items()
        ]
    )
    canvas.line(
        "source meta: the source node, and a bit per rank of the node that wants the token."
        " A row is read once and written to every rank that wants it."
    )


def _draw_control_fields(canvas: _Canvas, area: RingArea) -> None:
    canvas.gap(4)
    shades = ("#f2a541", "#f7c173", "#c8853a", "#e3b27a")
    canvas.strip(
        [
            Piece(num_bytes, shades[index % 4], (f"{kind}  {num_bytes} bytes", kind), light=True)
            for index, (kind, num_bytes) in enumerate(area.control_fields)
        ],
        right=WIDTH * 0.45,
        height=STRIP_HEIGHT * 0.7,
    )
    text_y = canvas.y - STRIP_HEIGHT * 0.35
    canvas.text(
        WIDTH * 0.46, text_y - 6, "Behind all rows, per ring: the fields of the classic layout,", fontsize=8.5
    )
    canvas.text(
        WIDTH * 0.46,
        text_y + 8,
        "reserved; the live 64-bit counters lie in the control region.",
        fontsize=8.5,
    )


def _draw_control_region(canvas: _Canvas, control: ControlRegion, share: float) -> None:
    canvas.title(
        "Control region: every live flag, counter and notify message",
        f"{format_bytes(control.num_bytes)}: the red line ({share:.2%}) at the left end of the heap",
    )
    kinds: dict[str, int] = {}
    for region in control.regions():
        kinds[region.kind] = kinds.get(region.kind, 0) + region.num_bytes
    colours = control_colours(kinds)
    entries = [(colours.get(kind, SMALL), f"{kind}  {format_bytes(size)}") for kind, size in kinds.items()]
    canvas.strip([Piece(size, colours.get(kind, SMALL)) for kind, size in kinds.items()])
    canvas.legend([entry for entry in entries if entry[0] != SMALL])
    canvas.legend([(SMALL, "small parts, in their order:")], columns=1)
    canvas.y -= 4
    small = [text.replace("  ", " ") for colour, text in entries if colour == SMALL]
    canvas.line("    " + ",  ".join(small))
    canvas.line(
        "status: what this rank is doing, for the others to read.  mailbox: two messages from every rank."
        "  ring tail / head: how far each ring is filled and emptied."
    )


def control_colours(kinds: Mapping[str, int]) -> dict[str, str]:
    """A colour of its own for each kind of word that takes a visible share of the control region.

    >>> control_colours({"status": 8000, "doorbell": 8, "mailbox": 90000})
    {'status': '#e4572e', 'mailbox': '#2e86ab'}
    """
    total = sum(kinds.values())
    visible = [kind for kind, size in kinds.items() if size >= SMALL_SHARE * total]
    largest = sorted(visible, key=lambda kind: -kinds[kind])[: len(CONTROL_COLOURS)]
    return dict(zip((kind for kind in kinds if kind in largest), CONTROL_COLOURS, strict=False))


def _draw_low_latency(canvas: _Canvas, plan: MemoryPlan) -> None:
    sizes = plan.low_latency
    if sizes is None:
        return
    slots = low_latency_heap(sizes, plan.num_ranks, plan.workload.ranks_per_node).slots
    canvas.gap()
    canvas.title(
        "Low-latency mode: fixed slots, in two sets that alternate",
        f"{format_bytes(sizes.total_bytes)}, beside the rings between nodes where there are any",
    )
    regions = list(slots.regions())
    spans = canvas.strip(
        [
            Piece(
                region.num_bytes,
                COLOURS[region.kind],
                (f"{region.kind} {region.slot_set}  {format_bytes(region.num_bytes)}",),
                light=region.kind == "send",
            )
            for region in regions
        ]
    )
    first_receive = next(index for index, region in enumerate(regions) if region.kind == "receive")
    canvas.fan(spans[first_receive])
    canvas.title(
        "Receive set 0: local experts, within each the source ranks, within each the tokens",
        f"{slots.num_local_experts} experts x {plan.num_ranks} ranks x {sizes.num_max_tokens} slots of"
        f" {slots.message_bytes:,} bytes",
    )
    shades = ("#8367c7", "#9d86d4", "#6b4fb3", "#b5a4e3")
    experts = range(slots.num_local_experts)
    pieces = [
        Piece(1, shades[(source + 2 * (expert % 2)) % 4], (f"{source}",))
        for expert in experts
        for source in range(plan.num_ranks)
    ]
    source_spans = canvas.strip(pieces)
    per_expert = [source_spans[e * plan.num_ranks : (e + 1) * plan.num_ranks] for e in experts]
    canvas.braces(
        [Span(group[0].left, group[-1].right, 0) for group in per_expert], [f"expert {e}" for e in experts]
    )
    canvas.line(
        f"A message is {LOW_LATENCY_HEADER_BYTES} bytes of header and one row, written once into a send set,"
        f" where ranks of the same host read it."
    )
    canvas.line(
        "The slots for such a rank hold the list of the tokens that it reads; those for a rank on another"
        " host, the rows that come from it."
    )
