"""The page of a report: one HTML file that needs nothing else, and is not allowed to fetch anything."""

import html
import json
from collections.abc import Sequence

from plotly.offline import get_plotlyjs

from hybridflow.telemetry.charts import Chart
from hybridflow.telemetry.metrics import format_number

__all__ = ["details", "escape", "page", "plots", "table"]

# the browser itself refuses any request of the page
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"

STYLE = """
:root {
  color-scheme: light dark;
  --page: #f6f7f9; --card: #ffffff; --edge: #e3e6eb; --text: #16191f; --muted: #5d6675; --grid: #eceef2; --soft: #f1f3f6;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #0f1217; --card: #171b22; --edge: #2a303a; --text: #e8ebf0; --muted: #9aa4b2; --grid: #262c36; --soft: #1e232c;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--text);
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
  -webkit-text-size-adjust: 100%;
}
main { max-width: 1240px; margin: 0 auto; padding: 36px 24px 56px; }
h1 { font-size: 28px; line-height: 1.2; letter-spacing: -0.02em; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 19px; letter-spacing: -0.01em; margin: 40px 0 14px; }
h2 + .note { margin: -10px 0 14px; }
h3 { font-size: 15px; margin: 0; overflow-wrap: anywhere; }
p { margin: 0; }
.muted, .note { color: var(--muted); }
.note { font-size: 13px; line-height: 1.4; }
.over { font-size: 12px; font-weight: 600; letter-spacing: 0.08em; text-transform: uppercase; color: var(--muted); }
.grid { display: grid; gap: 16px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 500px), 1fr)); }
.runs { margin-top: 24px; }
.card { background: var(--card); border: 1px solid var(--edge); border-radius: 12px; padding: 18px 20px; min-width: 0; }
.run { display: flex; gap: 10px; align-items: baseline; }
.dot { display: inline-block; flex: none; width: 11px; height: 11px; border-radius: 50%; }
.facts { color: var(--muted); font-size: 14px; overflow-wrap: anywhere; }
.run + .facts { margin: 2px 0 14px 21px; }
.stats { display: flex; flex-wrap: wrap; gap: 16px 40px; }
.facts + .stats { margin-left: 21px; }
.stat b { display: block; font-size: 22px; font-weight: 650; letter-spacing: -0.01em; font-variant-numeric: tabular-nums; }
.stat .over { display: block; }
.stat .note { display: block; white-space: pre-line; }
.plot { height: 300px; margin: 8px -8px -8px; }
.empty { padding: 28px 20px; text-align: center; color: var(--muted); }
details { background: var(--card); border: 1px solid var(--edge); border-radius: 12px; margin-top: 12px; }
details .grid { padding: 0 16px 16px; }
details .card { background: var(--page); }
summary { cursor: pointer; padding: 13px 20px; font-weight: 600; overflow-wrap: anywhere; }
summary .muted { font-weight: 400; }
details > details { margin: 0 16px 12px; border-radius: 8px; }
details > details:last-child { margin-bottom: 16px; }
pre {
  margin: 0 16px 16px; padding: 14px 16px; overflow: auto; max-height: 30rem; border-radius: 8px; background: var(--soft);
  font: 13px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace;
}
.scroll { overflow-x: auto; padding: 0 16px 12px; }
table { width: 100%; border-collapse: collapse; font-size: 14px; }
th { text-align: left; font-size: 13px; color: var(--muted); font-weight: 600; white-space: nowrap; }
th, td { padding: 8px 12px; border-top: 1px solid var(--edge); vertical-align: top; }
thead th { border-top: 0; }
td .text { white-space: pre-wrap; overflow-wrap: anywhere; max-height: 11rem; overflow-y: auto; min-width: 12ch; }
td.number { width: 1%; padding-right: 24px; font-variant-numeric: tabular-nums; white-space: nowrap; }
footer { margin-top: 40px; font-size: 13px; color: var(--muted); }
@media (max-width: 640px) {
  main { padding: 24px 14px 40px; }
  h1 { font-size: 23px; }
  .card { padding: 14px; }
  .plot { height: 270px; }
  .facts + .stats, .run + .facts { margin-left: 0; }
  table, tbody, tr, td { display: block; width: 100%; }
  thead { display: none; }
  tr { padding: 10px 0; border-top: 1px solid var(--edge); }
  td { border: 0; padding: 3px 0; }
  td::before {
    content: attr(data-label); display: block; font-size: 12px; font-weight: 600; color: var(--muted);
  }
  td.number { display: inline-block; width: auto; }
}
"""

SCRIPT = """
const charts = JSON.parse(document.getElementById("charts").textContent);
const color = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const axis = given => ({
  automargin: true, gridcolor: color("--grid"), linecolor: color("--edge"), zeroline: false, exponentformat: "power",
  separatethousands: true, tickfont: {size: 12}, ...given, title: {...given.title, standoff: 10, font: {size: 12.5}}});
const layout = given => ({
  ...given, autosize: true, margin: {l: 12, r: 16, t: 12, b: 12}, hovermode: "x unified", dragmode: "zoom",
  paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
  font: {family: getComputedStyle(document.body).fontFamily, size: 12, color: color("--muted")},
  hoverlabel: {bgcolor: color("--card"), bordercolor: color("--edge"), font: {color: color("--text"), size: 12}},
  legend: {orientation: "h", x: 0, y: 1.03, xanchor: "left", yanchor: "bottom", traceorder: "normal",
           font: {size: 12, color: color("--text")}},
  xaxis: axis({...given.xaxis, showgrid: false, showline: true, hoverformat: ",.6~g",
               unifiedhovertitle: {text: "step %{x}"}}),
  yaxis: axis(given.yaxis)});
const options = {responsive: true, displayModeBar: false};
const draw = place => {
  const chart = charts[Number(place.dataset.chart)];
  Plotly.react(place, chart.traces, layout(chart.layout), options);
};
const visible = place => !place.closest("details:not([open])");
const places = [...document.querySelectorAll(".plot")];
const redraw = () => places.filter(visible).forEach(draw);
document.querySelectorAll("details").forEach(part => part.addEventListener("toggle", () => {
  if (part.open) part.querySelectorAll(".plot").forEach(draw);
}));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
redraw();
"""


def escape(text: object) -> str:
    return html.escape(str(text))


def page(title: str, body: str, charts: Sequence[Chart]) -> str:
    """The whole file; ``body`` is HTML whose plots refer to ``charts`` by index."""
    data = json.dumps([{"traces": chart.traces, "layout": chart.layout} for chart in charts], allow_nan=False)
    drawing = [f"<script>{get_plotlyjs()}</script>", f"<script>{SCRIPT}</script>"] if charts else []
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<link rel="icon" href="data:,">',
            f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><main>",
            body,
            # text inside a script element ends at "</", wherever it stands
            f'</main><script type="application/json" id="charts">{data.replace("<", chr(92) + "u003c")}</script>',
            *drawing,
            "</body></html>\n",
        ]
    )


def plots(charts: Sequence[Chart], first: int) -> str:
    """A grid of charts, whose indices on the page begin at ``first``."""
    cards = [
        f'<section class="card"><h3>{escape(chart.title)}</h3><p class="note">{escape(chart.note)}</p>'
        f'<div class="plot" data-chart="{index}" role="img" aria-label="{escape(chart.title)}, chart"></div></section>'
        for index, chart in enumerate(charts, first)
    ]
    return f'<div class="grid">{"".join(cards)}</div>'


def details(summary: str, content: str, *, opened: bool = False) -> str:
    """A collapsible part; ``summary`` and ``content`` are HTML."""
    return f"<details{' open' if opened else ''}><summary>{summary}</summary>{content}</details>"


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table of texts (wrapped, as they are) and numbers; on a phone each row stands as a block."""
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    lines = ["".join(map(_cell, header, row)) for row in rows]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(label: str, value: object) -> str:
    if isinstance(value, str):
        text = escape(value) if value else '<span class="muted">(empty)</span>'
        return f'<td data-label="{escape(label)}"><div class="text">{text}</div></td>'
    shown = format_number(value) if isinstance(value, int | float) else "—"
    return f'<td class="number" data-label="{escape(label)}">{shown}</td>'
