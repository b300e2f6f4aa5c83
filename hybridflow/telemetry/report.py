"""The report of one or several runs: an HTML page with charts, samples and configurations."""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridflow.core.config import read_toml
from hybridflow.core.errors import UserError
from hybridflow.core.files import write_whole
from hybridflow.telemetry.charts import Chart, Run, main_charts, other_charts
from hybridflow.telemetry.metrics import METRICS, format_number, format_seconds
from hybridflow.telemetry.page import details, escape, page, plots, table
from hybridflow.telemetry.records import read_records
from hybridflow.telemetry.rundir import RunDirectory

__all__ = ["write_report"]

COLORS = ("#2f6fed", "#e8710a", "#0d9f6e", "#a142f4", "#d93025", "#0891b2", "#b58900", "#d6409f")
SMOOTHING = "Points: each step. Lines: exponential moving average over a tenth of the run's steps, 50 at most."
SAMPLE_STEPS = 6
Predict = Callable[[Path], int | None]
SAMPLES_PER_STEP = 4
# what a sample's table shows, and under which heading; a column that no sample has is left out
SAMPLE_COLUMNS = {
    "prompt": "prompt",
    "response": "response",
    "score": "score",
    "group_id": "group",
    "policy_version": "policy version",
}


def write_report(runs: Sequence[Path], output: Path, predicted: Predict = lambda _: None) -> Path:
    """Write one self-contained HTML page about run directories and return its path. ``predicted``: the most bytes that a
    process of the run in this directory should have taken, if that is known.

    UserError if a run can't be read or the page can't be written.
    """
    if not runs:
        raise UserError("report: no run given; expected at least one run directory")
    loaded = _load(runs, predicted)
    charts, others = main_charts(loaded), other_charts(loaded)
    body = "\n".join(_body(loaded, charts, others))
    title = loaded[0].name if len(loaded) == 1 else f"{len(loaded)} runs"
    text = page(f"{title} · HybridFlow", body, [*charts, *others])
    output = Path(output)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_whole(output, text.encode("utf-8", errors="replace"))
    except OSError as error:
        raise UserError(f"report: can't write {output} ({error.strerror}); choose another output file") from None
    return output


def _load(paths: Sequence[Path], predicted: Predict) -> list[Run]:
    runs = [RunDirectory.open(path) for path in paths]
    places = [run.path.resolve() for run in runs]
    for place, path in zip(places, paths, strict=True):
        if places.count(place) > 1:
            raise UserError(f"report: {path} is given twice; name each run once")
    names = _names(places)
    pairs = enumerate(zip(runs, names, strict=True))
    return [_run(run, name, COLORS[index % len(COLORS)], predicted(run.path)) for index, (run, name) in pairs]


def _run(directory: RunDirectory, name: str, color: str, predicted: int | None) -> Run:
    return Run(
        name=name,
        color=color,
        config=read_toml(directory.config),
        config_toml=directory.config.read_text(encoding="utf-8"),
        records=_by_step(read_records(directory.metrics)),
        samples=read_records(directory.samples),
        predicted_bytes=predicted,
    )


def _by_step(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One record a step: an evaluation may have been logged apart from its step."""
    merged: dict[int, dict[str, Any]] = {}
    for record in records:
        merged.setdefault(record["step"], {}).update(record)
    return [merged[step] for step in sorted(merged)]


def _names(places: Sequence[Path]) -> list[str]:
    """The last parts of the paths: as few as tell the runs apart."""
    for count in range(1, max(len(place.parts) for place in places) + 1):
        names = ["/".join(place.parts[-count:]) for place in places]
        if len(set(names)) == len(names):
            break
    return names


def _body(runs: Sequence[Run], charts: Sequence[Chart], others: Sequence[Chart]) -> Iterator[str]:
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs compared"
    under = f'<p class="facts">{_facts(runs[0])}</p>' if len(runs) == 1 else ""
    yield f'<header><p class="over">HybridFlow · run report</p><h1>{escape(title)}</h1>{under}</header>'
    yield f'<div class="grid runs">{"".join(_card(run, alone=len(runs) == 1) for run in runs)}</div>'
    yield "<h2>Training</h2>"
    if charts:
        yield f'<p class="note">{SMOOTHING}</p>'
        yield plots(charts, 0)
    else:
        yield '<div class="card empty">Nothing to draw yet: no step has been recorded.</div>'
    if others:
        yield details(f'Other metrics <span class="muted">· {len(others)}</span>', plots(others, len(charts)))
    sampled = [run for run in runs if run.samples]
    if sampled:
        yield "<h2>Samples</h2>"
        yield from (_samples(run, alone=len(runs) == 1, opened=run is sampled[0]) for run in sampled)
    yield "<h2>Configuration</h2>"
    if len(runs) > 1:
        yield _differences(runs)
    yield from (details(_named(run), f"<pre>{escape(run.config_toml.strip())}</pre>") for run in runs)
    if charts:
        yield "<footer>In a chart: drag to zoom, double-click to reset, click a legend entry to hide its line.</footer>"


def _named(run: Run) -> str:
    return f'<span class="dot" style="background:{run.color}"></span> {escape(run.name)}'


def _card(run: Run, alone: bool) -> str:
    """The numbers of a run; a run that is alone has its name and facts in the page's heading."""
    heading = f'<div class="run"><h3>{_named(run)}</h3></div><p class="facts">{_facts(run)}</p>'
    stats = "".join(_stats(run)) or '<p class="muted">No number to show yet.</p>'
    return f'<section class="card">{"" if alone else heading}<div class="stats">{stats}</div></section>'


def _facts(run: Run) -> str:
    facts = [str(run.config.get("algorithm", "")), _model(run.config), _progress(run)]
    return escape(" · ".join(filter(None, facts)))


def _model(config: Mapping[str, Any]) -> str:
    """The actor's model: a name, or the sizes of a fresh one."""
    actor = config.get("actor")
    model = actor.get("model", "") if isinstance(actor, dict) else ""
    if isinstance(model, dict):
        return "fresh model: " + ", ".join(f"{key} {value}" for key, value in model.items() if not isinstance(value, dict))
    return str(model)


def _progress(run: Run) -> str:
    if not run.steps:
        return "no training step recorded"
    text = f"{run.steps} step{'s' if run.steps > 1 else ''}"
    times = run.series("time/step_s")[1]
    return f"{text} in {format_seconds(float(times.sum()))}" if len(times) else text


def _stats(run: Run) -> Iterator[str]:
    """First and last reward or return (means over a tenth of the steps), evaluation before and after, and others."""
    for key in ("reward/mean", "episode_return/mean"):
        values = run.series(key)[1]
        if len(values):
            count = max(1, len(values) // 10)
            first, last = statistics.fmean(values[:count]), statistics.fmean(values[-count:])
            under = "first and last step" if count == 1 else f"mean of the first and last {count} steps"
            if len(values) == 1:
                yield _stat(METRICS[key].label, format_number(first), "of one step")
            else:
                yield _stat(METRICS[key].label, f"{format_number(first)} → {format_number(last)}", under)
    evaluated = [record for record in run.records if record.get("eval/score") is not None]
    if evaluated:
        ends = evaluated if len(evaluated) == 1 else [evaluated[0], evaluated[-1]]
        scores = " → ".join(format_number(record["eval/score"]) for record in ends)
        yield _stat("evaluation", scores, _evaluated(ends))
    for key in ("tokens_per_s", "env_steps_per_s"):
        values = run.series(key)[1]
        if len(values):
            yield _stat(METRICS[key].label, format_number(statistics.fmean(values)), f"{METRICS[key].unit}, mean")
    grown = run.series("memory/grown_gb")[1]
    if len(grown):
        told = "" if run.predicted_bytes is None else f", predicted {format_number(run.predicted_bytes / 1e9)}"
        yield _stat(METRICS["memory/grown_gb"].label, format_number(max(grown)), f"GB at most{told}")


def _stat(label: str, value: str, under: str) -> str:
    return (
        f'<div class="stat"><span class="over">{escape(label)}</span><b>{escape(value)}</b>'
        f'<span class="note">{escape(under)}</span></div>'
    )


def _evaluated(ends: Sequence[Mapping[str, Any]]) -> str:
    """Intervals, steps and size of the first and the last evaluation."""
    bounds = [[end[key] for key in ("eval/low", "eval/high") if end.get(key) is not None] for end in ends]
    known = [f"[{', '.join(map(format_number, pair))}]" for pair in bounds if len(pair) == 2]
    interval = f"95 % CI {' → '.join(known)}\n" if len(known) == len(ends) else ""
    steps, count = " → ".join(str(end["step"]) for end in ends), ends[-1].get("eval/count")
    return f"{interval}step {steps}" + (f" · n {count:.0f}" if count is not None else "")


def _samples(run: Run, alone: bool, opened: bool) -> str:
    """A few steps from first to last, a few samples each; the first and the last step are open."""
    steps = sorted({sample["step"] for sample in run.samples})
    chosen = sorted({steps[round(i * (len(steps) - 1) / (SAMPLE_STEPS - 1))] for i in range(SAMPLE_STEPS)})
    parts = [
        _sample_step(step, [sample for sample in run.samples if sample["step"] == step], step in (chosen[0], chosen[-1]))
        for step in chosen
    ]
    return "".join(parts) if alone else details(_named(run), "".join(parts), opened=opened)


def _sample_step(step: int, samples: Sequence[Mapping[str, Any]], opened: bool) -> str:
    shown = samples[:SAMPLES_PER_STEP]
    keys = [key for key in SAMPLE_COLUMNS if any(key in sample for sample in shown)]
    rows = [[sample.get(key) for key in keys] for sample in shown]
    scores = [sample["score"] for sample in samples if sample.get("score") is not None]
    mean = f" · mean score {format_number(statistics.fmean(scores))}" if scores else ""
    count = f"{len(shown)} of {len(samples)} samples" if len(shown) < len(samples) else f"samples: {len(samples)}"
    summary = f'Step {step} <span class="muted">· {count}{mean}</span>'
    return details(summary, table([SAMPLE_COLUMNS[key] for key in keys], rows), opened=opened)


def _differences(runs: Sequence[Run]) -> str:
    """The keys on which the runs differ. ``run_dir`` is left out: it differs by nature."""
    flat = [dict(_flatten(run.config)) for run in runs]
    keys = dict.fromkeys(key for config in flat for key in config)
    differing = [key for key in keys if key != "run_dir" and len({repr(config.get(key)) for config in flat}) > 1]
    if not differing:
        return '<p class="muted">The runs have the same configuration.</p>'
    rows = [[key, *(str(config[key]) if key in config else None for config in flat)] for key in differing]
    content = table(["key", *(run.name for run in runs)], rows)
    return details(f'Differences <span class="muted">· {len(differing)}</span>', content, opened=True)


def _flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
