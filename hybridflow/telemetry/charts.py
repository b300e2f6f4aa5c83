"""The charts of a report, as plain data: what plotly.js draws. Colours of text and grid are the page's."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybridflow.telemetry.metrics import METRICS, TIME_SPLIT, Metric, metric_of

__all__ = ["Chart", "Run", "main_charts", "other_charts", "smooth", "smoothing_span"]

Series = NDArray[np.float64]

LINES = ("reward/mean", "cost/mean", "lambda", "episode_return/mean")
DIAGNOSTICS = ("kl", "response_length/mean", "entropy", "tokens_per_s", "env_steps_per_s", "grad_norm")
SHOWN = {"step", *LINES, *DIAGNOSTICS, *TIME_SPLIT, "time/step_s", "eval/score", "eval/low", "eval/high", "eval/count"}
MAX_POINTS = 1500
MAX_BARS = 50
SPLIT_COLORS = {
    "time/generate_s": "#3b82f6",
    "time/reward_s": "#10b981",
    "time/forward_s": "#f59e0b",
    "time/learn_s": "#a855f7",
    "other": "#94a3b8",
}


@dataclass(frozen=True)
class Run:
    """A run as the report sees it. ``records``: one a step, sorted; ``samples``: as logged. ``predicted_bytes``: the most
    that a process should have taken, if that is known."""

    name: str
    color: str
    config: Mapping[str, Any]
    config_toml: str
    records: Sequence[Mapping[str, Any]]
    samples: Sequence[Mapping[str, Any]]
    predicted_bytes: int | None = None

    @property
    def steps(self) -> int:
        return max((int(record["step"]) for record in self.records), default=0)

    def series(self, key: str) -> tuple[Series, Series]:
        """(steps, values) of a metric, where it was recorded and finite."""
        pairs = [(r["step"], r[key]) for r in self.records if _is_number(r.get(key))]
        array = np.array(pairs, np.float64).reshape(-1, 2)
        return array[:, 0], array[:, 1]

    def names(self) -> Iterator[str]:
        """Every metric that has a value, in the order of first use."""
        yield from dict.fromkeys(key for record in self.records for key, value in record.items() if _is_number(value))


@dataclass(frozen=True)
class Chart:
    """One chart: plotly traces, and what stands around them."""

    title: str
    note: str
    traces: Sequence[Mapping[str, Any]]
    layout: Mapping[str, Any]


def main_charts(runs: Sequence[Run]) -> list[Chart]:
    """Reward, evaluation, diagnostics, and the time split of each run; a metric that no run has is left out."""
    charts = [_line(runs, key) for key in LINES]
    charts.append(_evaluation(runs))
    charts += [_line(runs, key) for key in DIAGNOSTICS]
    charts += [_time_split(run, alone=len(runs) == 1) for run in runs]
    return [chart for chart in charts if chart]


def other_charts(runs: Sequence[Run]) -> list[Chart]:
    """Every other metric: the known ones first, then the rest by name."""
    names = {key for run in runs for key in run.names()} - SHOWN
    charts = [_line(runs, key) for key in [*(k for k in METRICS if k in names), *sorted(names - set(METRICS))]]
    return [chart for chart in charts if chart]


def smoothing_span(count: int) -> int:
    """Steps that the moving average spans: a tenth of the run, 50 at most."""
    return max(1, min(50, count // 10))


def smooth(values: Series, span: int) -> Series:
    """Exponential moving average with alpha = 2 / (span + 1), without bias towards the first value."""
    keep = 1 - 2 / (span + 1)
    total, weight, out = 0.0, 0.0, np.empty(len(values))
    for index, value in enumerate(values):
        total, weight = total * keep + float(value), weight * keep + 1
        out[index] = total / weight
    return out


def _line(runs: Sequence[Run], key: str) -> Chart | None:
    """Each run's points, faint, under their moving average."""
    metric = metric_of(key) or Metric(key, "", "")
    drawn = [(run, *run.series(key)) for run in runs]
    drawn = [(run, steps, values) for run, steps, values in drawn if len(steps)]
    if not drawn:
        return None
    traces = [trace for run, steps, values in drawn for trace in _points_and_average(run, steps, values)]
    title = _sentence(metric.label) if key in METRICS else key
    axes = _axes(metric.title, [steps for _, steps, _ in drawn])
    axes["yaxis"] |= _range_of_constant(np.concatenate([values for _, _, values in drawn]))
    return Chart(title, _sentence(metric.meaning), traces, axes | {"showlegend": len(runs) > 1})


def _points_and_average(run: Run, steps: Series, values: Series) -> Iterator[dict[str, Any]]:
    span = smoothing_span(len(steps))
    shown = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), MAX_POINTS)).round().astype(int))
    x, raw, average = (_short(column[shown]) for column in (steps, values, smooth(values, span)))
    common = {"type": "scatter", "x": x, "legendgroup": run.name, "name": _legend(run.name)}
    if span > 1:
        marker = {"color": run.color, "size": 4, "opacity": 0.38}
        yield {**common, "y": raw, "mode": "markers", "marker": marker, "hoverinfo": "skip", "showlegend": False}
    yield {
        **common,
        "y": average,
        "customdata": raw,
        "mode": "lines" if len(x) > 1 else "markers",
        "line": {"color": run.color, "width": 2.2},
        "marker": {"color": run.color, "size": 7},
        "hovertemplate": "%{y:.4~g}" + (" (this step %{customdata:.4~g})" if span > 1 else ""),
    }


def _evaluation(runs: Sequence[Run]) -> Chart | None:
    traces, steps = [], []
    for run in runs:
        x, score = run.series("eval/score")
        if len(x):
            steps.append(x)
            traces += list(_score_and_band(run, x, score))
    if not traces:
        return None
    note = "Mean score on the evaluation set; band: 95 % confidence interval"
    return Chart("Evaluation", note, traces, _axes("evaluation score", steps) | {"showlegend": len(runs) > 1})


def _score_and_band(run: Run, x: Series, score: Series) -> Iterator[dict[str, Any]]:
    low, high = (dict(zip(*run.series(key), strict=True)) for key in ("eval/low", "eval/high"))
    bounds = [(low.get(step, value), high.get(step, value)) for step, value in zip(x, score, strict=True)]
    lows, highs = np.array(bounds).T
    common = {"type": "scatter", "legendgroup": run.name, "name": _legend(run.name)}
    outline = {"x": _short(np.concatenate([x, x[::-1]])), "y": _short(np.concatenate([highs, lows[::-1]]))}
    band = {"fill": "toself", "fillcolor": _faint(run.color), "line": {"width": 0}, "mode": "lines"}
    yield {**common, **outline, **band, "hoverinfo": "skip", "showlegend": False}
    yield {
        **common,
        "x": _short(x),
        "y": _short(score),
        "customdata": [_short(np.array(pair)) for pair in bounds],
        "mode": "lines+markers",
        "line": {"color": run.color, "width": 2.2},
        "marker": {"color": run.color, "size": 7},
        # where there is one evaluation, the band has no width
        "error_y": {
            "type": "data",
            "symmetric": False,
            "array": _short(highs - score),
            "arrayminus": _short(score - lows),
            "visible": len(x) == 1,
        },
        "hovertemplate": "%{y:.4~g} [%{customdata[0]:.4~g}, %{customdata[1]:.4~g}]",
    }


def _time_split(run: Run, alone: bool) -> Chart | None:
    """Stacked bars; long runs show means over equal numbers of steps."""
    records = [record for record in run.records if _is_number(record.get("time/step_s"))]
    if not records:
        return None
    parts = {key: np.array([_number_or_zero(record.get(key)) for record in records]) for key in TIME_SPLIT}
    total = np.array([record["time/step_s"] for record in records], np.float64)
    parts["other"] = np.maximum(0.0, total - sum(parts.values()))
    steps = np.array([record["step"] for record in records], np.float64)
    per = -(-len(steps) // MAX_BARS)
    pieces = np.split(np.arange(len(steps)), range(per, len(steps), per))
    x = _short(np.array([steps[piece].mean() for piece in pieces]))
    traces = [
        {
            "type": "bar",
            "x": x,
            "width": [0.88 * len(piece) for piece in pieces],
            "y": _short(np.array([values[piece].mean() for piece in pieces])),
            "name": METRICS[key].label if key in METRICS else key,
            "marker": {"color": SPLIT_COLORS[key]},
            "hovertemplate": "%{y:.3~g} s",
        }
        for key, values in parts.items()
        if values.any()
    ]
    note = "Wall time of each step" if per == 1 else f"Wall time of a step, mean over {per} steps a bar"
    if (sum(parts.values()) > 1.01 * total).any():
        note += "; pools that run side by side add up"
    layout = _axes("time (s)", [steps]) | {"barmode": "stack", "showlegend": True}
    layout["yaxis"] |= {"rangemode": "tozero"}
    return Chart("Time per step" + ("" if alone else f" · {run.name}"), note, traces, layout)


def _axes(title: str, steps: Sequence[Series]) -> dict[str, Any]:
    span = max(s.max() for s in steps) - min(s.min() for s in steps)
    whole = {"dtick": 1} if span <= 8 else {}  # no ticks between steps
    return {"xaxis": {"title": {"text": "step"}, **whole}, "yaxis": {"title": {"text": html.escape(title)}}}


def _range_of_constant(values: Series) -> dict[str, Any]:
    """plotly would show a constant learning rate of 1e-5 between -1 and 1."""
    value = float(values[0])
    if value == 0 or not np.allclose(values, value, rtol=1e-9, atol=0):
        return {}
    return {"range": sorted([value * 0.5, value * 1.5])}


def _short(values: Series) -> list[float]:
    """Six significant digits: a report is read, not computed with."""
    return [float(f"{value:.6g}") for value in values]


def _legend(name: str) -> str:
    """A long name loses its middle; plotly reads names as HTML."""
    return html.escape(name if len(name) <= 32 else f"{name[:15]}…{name[-16:]}")


def _faint(color: str) -> str:
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.16)"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number_or_zero(value: Any) -> float:
    return float(value) if _is_number(value) else 0.0
