"""``hybridflow plan RUN --compare``: what the planner says about a run that is done, beside what it took."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hybridflow.build_compare import Measured, Predicted, measured, observed, predicted, run_cluster
from hybridflow.planner.calibrate import Fitted, Observation, calibrate, efficiency_of, here_start, keep, source_of
from hybridflow.planner.hardware import load_probe
from hybridflow.telemetry.graph_tables import aligned

__all__ = ["compare"]

PARTS = 3
"""largest parts of an estimate that are shown"""


def compare(run: Path, refit: bool, as_json: bool) -> None:
    """Print a table of tasks and the step. ``refit``: fit the constants to this run first, print and keep them.
    ConfigError: the run has too few steps, or this machine was not measured."""
    found = measured(run)
    cluster = run_cluster(found.config)
    seen = observed(found, cluster)
    efficiency, fitted, path = efficiency_of(cluster), None, None
    if refit:
        efficiency, fitted = calibrate([seen], here_start(load_probe()))
        path = keep(fitted, str(run))
    guess = predicted(seen, efficiency)
    if as_json:
        print(json.dumps(_data(found, seen, guess, fitted), indent=2))
        return
    print("\n".join(_text(found, seen, guess)))
    if fitted is not None:
        print("\n".join(("", *_constants(fitted), f"kept in {path}")))
    else:
        print(f"constants: {source_of()}; --calibrate fits them to this run")


def _text(found: Measured, seen: Observation, guess: Predicted) -> Iterator[str]:
    lengths = f"{seen.graph.tokens:,.0f} tokens a step"
    yield f"{found.config.algorithm}, {lengths}; seconds in a step, medians of {found.steps} steps"
    yield ""
    header = ("task", "measured", "predicted", "off", "mostly")
    yield from aligned([header, *_rows(seen, guess)], right=header[1:4])
    yield ""
    if own := [name for name in seen.seconds if not _has_model(seen, name)]:
        yield f"{', '.join(own)}: without a model, so taken as measured."


def _rows(seen: Observation, guess: Predicted) -> Iterator[tuple[str, ...]]:
    for name, estimate in guess.estimates.items():
        parts = sorted(estimate.parts.items(), key=lambda part: -part[1])[:PARTS] if _has_model(seen, name) else []
        shown = ", ".join(f"{part} {seconds:.3f}" for part, seconds in parts)
        yield _row(name, seen.seconds.get(name), estimate.seconds, shown)
    yield _row("step", seen.step_s, guess.step_s, "")


def _row(name: str, took: float | None, predicted_s: float, shown: str) -> tuple[str, ...]:
    off = f"{predicted_s / took - 1:+.0%}" if took else ""
    return name, "" if took is None else f"{took:.3f}", f"{predicted_s:.3f}", off, shown


def _has_model(seen: Observation, task: str) -> bool:
    """Or is weights on their way, which are no task."""
    role = {one.name: one.role for one in seen.graph.tasks}.get(task)
    return role is None or any(role == one.name for one in seen.graph.roles)


def _constants(fitted: Fitted) -> Iterator[str]:
    header = ("constant", "value", "times or divided by", "")
    rows = [
        (name, f"{value:.3g}", f"{fitted.spread[name]:.2f}", "")
        if name in fitted.determined
        else (name, f"{value:.3g}", "", "this run says nothing about it")
        for name, value in fitted.values.items()
    ]
    yield from aligned([header, *rows], right=header[1:3])


def _data(found: Measured, seen: Observation, guess: Predicted, fitted: Fitted | None) -> dict[str, Any]:
    tasks = [
        {"task": name, "measured_s": seen.seconds.get(name), "predicted_s": estimate.seconds, "parts": estimate.parts}
        for name, estimate in guess.estimates.items()
    ]
    data: dict[str, Any] = {"steps": found.steps, "measured_s": seen.step_s, "predicted_s": guess.step_s, "tasks": tasks}
    if fitted is not None:
        data["constants"] = {
            name: {"value": value, "spread": fitted.spread[name], "determined": name in fitted.determined}
            for name, value in fitted.values.items()
        }
    return data
