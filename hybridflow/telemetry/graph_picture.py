"""Pictures of a call graph: Graphviz, and a page with a lane for each role, in which calls stand in the order of a step."""

from __future__ import annotations

import json
from collections.abc import Iterator

from hybridflow.core.graph import Call, Edge, Graph
from hybridflow.telemetry.page import escape, page, table

__all__ = ["call_size", "count", "dot", "graph_page", "memory"]

LANE, ROW, WIDTH, HEIGHT, TOP = 150, 92, 138, 48, 92
COLORS = {
    "generate": "#3b82f6",
    "reward": "#10b981",
    "forward": "#f59e0b",
    "train": "#a855f7",
    "compute": "#64748b",
    "source": "#94a3b8",
}


def memory(size: int) -> str:
    """Bytes in a unit that people read; empty for none."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.3g} {unit}"
    return f"{size} B" if size else ""


def count(number: int) -> str:
    """134,515,008 -> 134.5M."""
    for unit, scale in (("B", 1e9), ("M", 1e6)):
        if number >= scale:
            return f"{number / scale:.1f}{unit}"
    return f"{number:,}"


def call_size(call: Call, unit: str) -> str:
    """Rows, and tokens or steps, of a call, and how often a step makes it."""
    read = f"{'prompt ' if call.kind == 'generate' else ''}{unit}"
    parts = [f"{call.rows:,} rows"]
    parts += [f"{number:,} {what}" for number, what in ((call.tokens_in, read), (call.tokens_out, f"new {unit}")) if number]
    return ", ".join(parts) + (f", {call.times} times" if call.times > 1 else "")


def dot(graph: Graph, name: str) -> str:
    """The graph in Graphviz's language."""
    lines = [f"digraph {json.dumps(name)} {{", "  node [shape=box];"]
    for call in graph.calls:
        label = f"{call.number} {call.name}\n{call.kind}, {call_size(call, graph.unit)}"
        lines.append(f"  n{call.number} [label={json.dumps(label)}, color={json.dumps(COLORS[call.kind])}];")
    for call in graph.calls:
        for writer, edges in graph.read_by(call):
            lines.append(f"  n{writer.number} -> n{call.number} [label={json.dumps(_told(edges))}];")
    return "\n".join([*lines, "}"])


def _told(edges: list[Edge]) -> str:
    size = memory(sum(edge.bytes or 0 for edge in edges))
    return ", ".join(edge.column for edge in edges) + (f"\n{size}" if size else "")


def graph_page(graph: Graph, title: str, headline: str) -> str:
    """One HTML file that fetches nothing: the lanes, and every column that passes."""
    header = ("reader", "column", "type", "bytes", "writer")
    names = [f"{call.number} {call.name}" for call in graph.calls]
    rows = [
        (names[e.reader], e.column, e.dtype, e.bytes if e.bytes is not None else "text", names[e.writer])
        for e in graph.edges
    ]
    body = [
        f'<h1>{escape(title)}</h1><p class="muted">{escape(headline)}</p>',
        f'<section class="card" style="margin-top:24px; overflow-x:auto">{_svg(graph)}</section>',
        f'<h2>Columns</h2><section class="card">{table(header, rows)}</section>',
    ]
    return page(title, "\n".join(body), ())


def _svg(graph: Graph) -> str:
    lanes = list(dict.fromkeys(call.role for call in graph.calls))
    levels = _levels(graph)
    places = {call.number: (lanes.index(call.role) * LANE, TOP + levels[call.number] * ROW) for call in graph.calls}
    width, height = len(lanes) * LANE, TOP + (max(levels.values()) + 1) * ROW
    parts = [*_lanes(graph, lanes, height), *_curves(graph, places, levels), *_boxes(graph, places)]
    shown = f'style="width:100%; min-width:{width * 3 // 4}px; max-width:{width}px" font-family="inherit" font-size="12"'
    hover = "<style>path:hover { opacity: 1; stroke-width: 4 }</style>"
    return f'<svg viewBox="0 0 {width} {height}" {shown}>{hover}{"".join(parts)}</svg>'


def _levels(graph: Graph) -> dict[int, int]:
    """How far down a call stands: below all that it reads from, and below its role's calls before it."""
    levels: dict[int, int] = {}
    last: dict[str, int] = {}
    for call in graph.calls:
        above = [levels[writer.number] for writer, _ in graph.read_by(call)]
        levels[call.number] = last[call.role] = max([*above, last.get(call.role, -1)], default=-1) + 1
    return levels


def _lanes(graph: Graph, lanes: list[str], height: int) -> Iterator[str]:
    roles = {role.name: role for role in graph.roles}
    for index, name in enumerate(lanes):
        x = index * LANE
        if index % 2 == 0:
            yield f'<rect x="{x}" y="0" width="{LANE}" height="{height}" rx="8" fill="var(--soft)"/>'
        lines = [name]
        if name in roles:
            role = roles[name]
            held = memory(role.weight_bytes + role.gradient_bytes + role.optimizer_bytes)
            lines += [role.model.rsplit(":", 1)[-1], f"{role.where}{', ' + held if held else ''}"]
        for line, text in enumerate(lines):
            style = 'font-weight="650" font-size="14" fill="var(--text)"' if line == 0 else 'fill="var(--muted)"'
            yield f'<text x="{x + 12}" y="{26 + 19 * line}" {style}>{escape(text)}</text>'


def _curves(graph: Graph, places: dict[int, tuple[int, int]], levels: dict[int, int]) -> Iterator[str]:
    """What skips levels is fainter, or the eye finds no way."""
    for call in graph.calls:
        for writer, edges in graph.read_by(call):
            (x0, y0), (x1, y1) = places[writer.number], places[call.number]
            start, end, bend = (x0 + LANE // 2, y0 + HEIGHT), (x1 + LANE // 2, y1), max(24, (y1 - y0 - HEIGHT) // 2)
            path = f"M{start[0]} {start[1]} C{start[0]} {start[1] + bend} {end[0]} {end[1] - bend} {end[0]} {end[1]}"
            told = escape(f"{writer.name} → {call.name}: {_told(edges)}")
            opacity = 0.9 if levels[call.number] == levels[writer.number] + 1 else 0.3
            line = f'fill="none" stroke="{COLORS[writer.kind]}" stroke-width="1.6" opacity="{opacity}"'
            yield f'<path d="{path}" {line}><title>{told}</title></path>'


def _boxes(graph: Graph, places: dict[int, tuple[int, int]]) -> Iterator[str]:
    for call in graph.calls:
        x, y = places[call.number]
        left = x + (LANE - WIDTH) // 2
        times = f" × {call.times}" if call.times > 1 else ""
        told = escape(
            f"{call_size(call, graph.unit)}\nruns {call.function}" if call.function else call_size(call, graph.unit)
        )
        size = f"{call.tokens_out:,} new" if call.kind == "generate" else f"{call.rows:,} rows"
        yield f'<g><title>{told}</title><rect x="{left}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="8" '
        yield f'fill="var(--card)" stroke="{COLORS[call.kind]}" stroke-width="1.6"/>'
        yield f'<text x="{left + 10}" y="{y + 20}" font-weight="600" fill="var(--text)">'
        yield f"{call.number} {escape(call.verb)}{times}</text>"
        yield f'<text x="{left + 10}" y="{y + 38}" fill="var(--muted)">{escape(call.kind)}, {size}</text></g>'
