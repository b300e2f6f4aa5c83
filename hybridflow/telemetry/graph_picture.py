"""Pictures of a call graph: Graphviz, and a page with a lane for each role, in which calls stand in the order of a step."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from hybridflow.core.graph import Edge, Graph, RoleSize
from hybridflow.telemetry.graph_tables import (
    HELD,
    PASSES,
    STAGES,
    call_size,
    memory,
    pool_table,
    stage_table,
    transfer_table,
)
from hybridflow.telemetry.page import escape, page, table

__all__ = ["COLORS", "dot", "graph_page"]

LANE, ROW, WIDTH, HEIGHT, TOP, LINE = 150, 92, 138, 48, 92, 19
COLORS = {
    "generate": "#3b82f6",
    "reward": "#10b981",
    "forward": "#f59e0b",
    "train": "#a855f7",
    "compute": "#64748b",
    "source": "#94a3b8",
}


def dot(graph: Graph, name: str) -> str:
    """The graph in Graphviz's language, a cluster for each pool."""
    lines = [f"digraph {json.dumps(name)} {{", "  node [shape=box];"]
    stages = (
        {call.number: number for number, stage in enumerate(graph.stages(), 1) for call in stage} if graph.pools else {}
    )
    for call in graph.calls:
        stage = f"stage {stages[call.number]}: " if call.number in stages else ""
        label = f"{call.number} {call.name}\n{stage}{call.kind}, {call_size(call, graph.unit)}"
        lines.append(f"  n{call.number} [label={json.dumps(label)}, color={json.dumps(COLORS[call.kind])}];")
    for pool in graph.pools:
        there = "".join(f" n{call.number};" for call in graph.calls if graph.pool_of(call) == pool.name)
        label = f"{pool.name}: {sum(pool.nodes)} workers"
        lines.append(f"  subgraph {json.dumps(f'cluster {pool.name}')} {{ label={json.dumps(label)};{there} }}")
    for call in graph.calls:
        for writer, edges in graph.read_by(call):
            lines.append(f"  n{writer.number} -> n{call.number} [label={json.dumps(_told(edges))}];")
    return "\n".join([*lines, "}"])


def _told(edges: list[Edge]) -> str:
    size = memory(sum(edge.bytes or 0 for edge in edges))
    return ", ".join(edge.column for edge in edges) + (f"\n{size}" if size else "")


def graph_page(graph: Graph, title: str, headline: str) -> str:
    """One HTML file that fetches nothing: the lanes, the pools if there are any, and every column that passes."""
    body = [
        f'<h1>{escape(title)}</h1><p class="muted">{escape(headline)}</p>',
        f'<section class="card" style="margin-top:24px; overflow-x:auto">{_svg(graph)}</section>',
        *(_pools(graph) if graph.pools else ()),
        f'<h2>Columns</h2><section class="card">{_columns(graph)}</section>',
    ]
    return page(title, "\n".join(body), ())


def _pools(graph: Graph) -> Iterator[str]:
    told = {"Execution order": (STAGES, stage_table), "Pools": (HELD, pool_table), "Transfers": (PASSES, transfer_table)}
    for title, (text, rows_of) in told.items():
        header, *rows = rows_of(graph)
        shown = [[cell or "–" for cell in row] for row in rows]
        yield f'<h2>{title}</h2><p class="muted">{escape(text)}</p><section class="card">{table(header, shown)}</section>'


def _columns(graph: Graph) -> str:
    header = ("reader", "column", "type", "bytes", "writer")
    names = [f"{call.number} {call.name}" + (f" on {graph.pool_of(call)}" if graph.pools else "") for call in graph.calls]
    return table(
        header,
        [
            (names[e.reader], e.column, e.dtype, e.bytes if e.bytes is not None else "text", names[e.writer])
            for e in graph.edges
        ],
    )


def _svg(graph: Graph) -> str:
    """Lanes of one pool stand together. A row is a stage; without pools, what could run side by side if there were some."""
    lanes: dict[str, str] = {call.role: graph.pool_of(call) if graph.pools else call.role for call in graph.calls}
    pools = list(dict.fromkeys(lanes.values()))
    lanes = dict(sorted(lanes.items(), key=lambda lane: pools.index(lane[1])))
    order, top = list(lanes), TOP + (LINE if graph.pools else 0)
    levels = graph.levels(graph.pool_of if graph.pools else lambda call: call.role)
    places = {call.number: (order.index(call.role) * LANE, top + levels[call.number] * ROW) for call in graph.calls}
    width, height = len(lanes) * LANE, top + (max(levels.values()) + 1) * ROW
    parts = [*_lanes(graph, lanes, height), *_curves(graph, places, levels), *_boxes(graph, places)]
    shown = f'style="width:100%; min-width:{width * 3 // 4}px; max-width:{width}px" font-family="inherit" font-size="12"'
    hover = "<style>path:hover { opacity: 1; stroke-width: 4 }</style>"
    return f'<svg viewBox="0 0 {width} {height}" {shown}>{hover}{"".join(parts)}</svg>'


def _lanes(graph: Graph, lanes: Mapping[str, str], height: int) -> Iterator[str]:
    """``lanes``: role and what it shares its background with."""
    roles, shared = {role.name: role for role in graph.roles}, list(lanes.values())
    for index, background in enumerate(dict.fromkeys(shared)):
        if index % 2 == 0:
            place = f'x="{shared.index(background) * LANE}" y="0" width="{shared.count(background) * LANE}"'
            yield f'<rect {place} height="{height}" rx="8" fill="var(--soft)"/>'
    for index, name in enumerate(lanes):
        for line, text in enumerate([name, *(_held(roles[name], graph) if name in roles else ())]):
            style = 'font-weight="650" font-size="14" fill="var(--text)"' if line == 0 else 'fill="var(--muted)"'
            yield f'<text x="{index * LANE + 12}" y="{26 + LINE * line}" {style}>{escape(text)}</text>'


def _held(role: RoleSize, graph: Graph) -> list[str]:
    """What is said of a role under its name."""
    held = memory(role.weight_bytes + role.gradient_bytes + role.optimizer_bytes)
    pool = f"pool {role.pool}{', ' + role.mesh if role.mesh != '1' else ''}" if graph.pools else ""
    lines = (pool, role.model.rsplit(":", 1)[-1], f"{role.where}{', ' + held if held else ''}")
    return [line for line in lines if line]


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
