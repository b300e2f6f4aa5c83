"""A picture of who runs when: a row for each role, pool by pool, with what each pool's devices hold."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hybridflow.core.graph import DRIVER
from hybridflow.core.metrics import Span
from hybridflow.telemetry.graph_picture import COLORS
from hybridflow.telemetry.graph_tables import memory
from hybridflow.telemetry.metrics import format_seconds
from hybridflow.telemetry.page import escape, page, table

__all__ = ["Lane", "gantt_page"]

Table = tuple[str, Sequence[Sequence[str]]]
"""what is said of it, and its rows, of which the first is the header"""

WIDTH, LEFT, RIGHT, ROW, BAR, HEAD, TOP, GAP = 1180, 190, 14, 30, 22, 66, 44, 18
LETTER = 7.0
"""width of a letter of 12 pixels, rather too much"""
KINDS = {**COLORS, "transfer": "#f43f5e"}
TOLD = {
    "generate": "generate",
    "reward": "reward",
    "forward": "forward",
    "train": "train",
    "compute": "compute",
    "transfer": "transfer: weights and inputs",
}


@dataclass(frozen=True)
class Lane:
    """A pool: what is said of it, and of what its devices' ``capacity`` of bytes is taken, by name."""

    pool: str
    text: str
    memory: Mapping[str, float]
    capacity: float


@dataclass(frozen=True)
class _Bar:
    """A task in a step, over all workers of a pool. ``first``: when the first of them was done."""

    role: str
    name: str
    kind: str
    step: int
    start: float
    first: float
    end: float


def gantt_page(
    title: str, headline: str, lanes: Sequence[Lane], steps: Sequence[Sequence[Span]], tables: Mapping[str, Table]
) -> str:
    """One HTML file that fetches nothing. ``tables``: by title."""
    body = [
        f'<h1>{escape(title)}</h1><p class="muted">{escape(headline)}</p>',
        f'<section class="card" style="margin-top:24px; overflow-x:auto">{_svg(lanes, steps)}</section>',
    ]
    for name, (note, (header, *rows)) in tables.items():
        shown = [[cell or "–" for cell in row] for row in rows]
        body.append(f'<h2>{escape(name)}</h2><p class="note">{escape(note)}</p>')
        body.append(f'<section class="card">{table(header, shown)}</section>')
    return page(title, "\n".join(body), ())


def _svg(lanes: Sequence[Lane], steps: Sequence[Sequence[Span]]) -> str:
    bars = {lane.pool: [*_bars(lane.pool, steps)] for lane in lanes}
    driver = [*_bars("", steps)]
    every = [bar for there in (*bars.values(), driver) for bar in there]
    axis = _Axis(max((bar.end for bar in every), default=0.0) or 1.0, [_end(spans) for spans in steps])
    parts, y = [*axis.labels()], TOP
    for lane in lanes:
        parts += [*_head(lane, y), *_rows(bars[lane.pool], y + HEAD, axis)]
        y += HEAD + ROW * len(_roles(bars[lane.pool])) + GAP
    if driver:
        parts += [_name(DRIVER, y), *_rows(driver, y + 34, axis)]
        y += 34 + ROW * len(_roles(driver)) + GAP
    parts += _legend(y, {bar.kind for bar in every})
    shown = f'style="width:100%; min-width:860px; max-width:{WIDTH}px" font-family="inherit" font-size="12"'
    return f'<svg viewBox="0 0 {WIDTH} {y + 26}" {shown} role="img">{_HATCH}{"".join(parts)}</svg>'


@dataclass(frozen=True)
class _Axis:
    """Seconds from left to right, until ``end``, with a line where each step is done."""

    end: float
    steps: Sequence[float]

    def x(self, seconds: float) -> float:
        return LEFT + seconds * (WIDTH - LEFT - RIGHT) / self.end

    @property
    def ticks(self) -> list[float]:
        tick = _tick(self.end / 9)
        return [number * tick for number in range(int(self.end / tick + 1e-9) + 1)]

    def labels(self) -> Iterator[str]:
        for seconds in self.ticks:
            x, anchor = self.x(seconds), "end" if self.x(seconds) > WIDTH - 40 else "middle"
            yield f'<text x="{x:.1f}" y="{TOP - 14}" text-anchor="{anchor}" fill="var(--muted)">{seconds:.4g} s</text>'
        before = 0.0
        for number, seconds in enumerate(self.steps, 1):
            place, told = f'x="{self.x(seconds):.1f}" y="12" text-anchor="end"', f"step {number} done"
            if self.x(seconds) - before > len(told) * LETTER:
                before = self.x(seconds)
                yield f'<text {place} fill="var(--muted)">{told}</text>'

    def lines(self, top: float, bottom: float) -> Iterator[str]:
        for seconds in self.ticks:
            place = f'x1="{self.x(seconds):.1f}" x2="{self.x(seconds):.1f}" y1="{top}" y2="{bottom}"'
            yield f'<line {place} stroke="var(--edge)"/>'
        for seconds in self.steps:
            place = f'x1="{self.x(seconds):.1f}" x2="{self.x(seconds):.1f}" y1="{top}" y2="{bottom}"'
            yield f'<line {place} stroke="var(--muted)" stroke-dasharray="4 3"/>'


_HATCH = (
    '<defs><pattern id="late" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="2" height="6" fill="var(--muted)" opacity="0.55"/></pattern></defs>'
)


def _bars(pool: str, steps: Sequence[Sequence[Span]]) -> Iterator[_Bar]:
    """What the workers of a pool did together."""
    for step, spans in enumerate(steps, 1):
        found: dict[tuple[str, str], list[Span]] = {}
        for span in spans:
            if span.worker.rpartition("/")[0] == pool and span.kind != "queue":
                found.setdefault((span.name, span.kind), []).append(span)
        for (name, kind), same in found.items():
            ends = [span.start_s + span.duration_s for span in same]
            start = min(span.start_s for span in same)
            yield _Bar(name.rpartition(".")[0] or name, name, kind, step, start, min(ends), max(ends))


def _end(spans: Sequence[Span]) -> float:
    return max(span.start_s + span.duration_s for span in spans)


def _roles(bars: Sequence[_Bar]) -> list[str]:
    return list(dict.fromkeys(bar.role for bar in bars))


def _rows(bars: Sequence[_Bar], y: float, axis: _Axis) -> Iterator[str]:
    roles = _roles(bars)
    for index, role in enumerate(roles):
        top = y + index * ROW
        yield f'<rect x="{LEFT}" y="{top}" width="{WIDTH - LEFT - RIGHT}" height="{BAR}" rx="4" fill="var(--soft)"/>'
        yield f'<text x="{LEFT - 12}" y="{top + 15}" text-anchor="end" fill="var(--text)">{escape(_cut(role, 24))}</text>'
    yield from axis.lines(y - 3, y + ROW * len(roles) - ROW + BAR + 3)
    for bar in bars:
        yield from _bar(bar, y + roles.index(bar.role) * ROW, axis)


def _bar(bar: _Bar, top: float, axis: _Axis) -> Iterator[str]:
    x, width, color = axis.x(bar.start), max(axis.x(bar.end) - axis.x(bar.start), 0.8), KINDS[bar.kind]
    seconds, verb = format_seconds(bar.end - bar.start), bar.name.rpartition(".")[2]
    late = f", the first worker after {format_seconds(bar.first - bar.start)}" if bar.first < bar.end else ""
    what = f"{bar.name}: {bar.kind}" if bar.kind == "transfer" else bar.name
    yield f"<g><title>{escape(f'{what}, step {bar.step}: {seconds}{late}')}</title>"
    place = f'y="{top}" height="{BAR}" rx="{min(4, width / 2):.1f}"'
    yield f'<rect x="{x:.1f}" width="{width:.1f}" {place} fill="var(--card)"/>'
    yield f'<rect x="{x:.1f}" width="{width:.1f}" {place} fill="{color}" fill-opacity="0.35" stroke="{color}"/>'
    start = axis.x(bar.first)
    if x + width - start > 1:
        yield f'<rect x="{start:.1f}" width="{x + width - start:.1f}" {place} fill="url(#late)"/>'
    label = next((text for text in (f"{verb} {seconds}", verb, seconds) if len(text) * LETTER + 8 <= width), "")
    if label:
        yield f'<text x="{x + 6:.1f}" y="{top + 15}" fill="var(--text)">{escape(label)}</text>'
    yield "</g>"


def _name(pool: str, y: float, text: str = "") -> str:
    told = f'<tspan dx="10" font-weight="400" font-size="12" fill="var(--muted)">{escape(text)}</tspan>'
    return f'<text x="0" y="{y + 24}" font-weight="650" font-size="14" fill="var(--text)">{escape(pool)}{told}</text>'


def _head(lane: Lane, y: float) -> Iterator[str]:
    """Its name, and a bar of its devices' memory."""
    yield _name(lane.pool, y, lane.text)
    width, used = WIDTH - LEFT - RIGHT, sum(lane.memory.values())
    scale, x = width / max(lane.capacity, used, 1.0), float(LEFT)
    yield f'<text x="{LEFT - 12}" y="{y + 49}" text-anchor="end" fill="var(--muted)">memory of a device</text>'
    yield f'<rect x="{LEFT}" y="{y + 37}" width="{width}" height="16" rx="3" fill="var(--soft)"/>'
    for name, size in lane.memory.items():
        told = f"{name} {memory(round(size))}"
        place = f'x="{x:.1f}" y="{y + 37}" width="{size * scale:.1f}" height="16"'
        yield f"<g><title>{escape(told)}</title>"
        yield f'<rect {place} fill="var(--muted)" fill-opacity="0.28" stroke="var(--card)"/>'
        label = next((text for text in (told, name) if len(text) * LETTER + 8 <= size * scale), "")
        yield f'<text x="{x + 6:.1f}" y="{y + 49}" font-size="11" fill="var(--text)">{escape(label)}</text></g>'
        x += size * scale
    free = f"{memory(round(lane.capacity - used)) or '0 GB'} free"
    if len(free) * LETTER + 8 <= LEFT + width - x:
        place = f'x="{LEFT + width - 6}" y="{y + 49}" text-anchor="end"'
        yield f'<text {place} font-size="11" fill="var(--muted)">{free}</text>'


def _tick(least: float) -> float:
    """1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(times * power for times in (1, 2, 5, 10) if times * power >= least)


def _legend(y: float, kinds: set[str]) -> Iterator[str]:
    x = float(LEFT)
    told = {KINDS[kind]: text for kind, text in TOLD.items() if kind in kinds}
    for fill, text in {**told, "url(#late)": "some workers are done, others not yet"}.items():
        yield f'<rect x="{x:.0f}" y="{y}" width="14" height="14" rx="3" fill="{fill}" fill-opacity="0.6"/>'
        yield f'<text x="{x + 20:.0f}" y="{y + 12}" fill="var(--muted)">{text}</text>'
        x += 40 + len(text) * 6.2


def _cut(text: str, letters: int) -> str:
    return text if len(text) <= letters else f"{text[: letters - 1]}…"
