"""``hybridflow plan RUN --compare``: what the planner says about a run that is done, beside what it took."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hybridflow.build_compare import Measured, Predicted, measured, observed, predicted, run_cluster
from hybridflow.build_profile import base_if_any, profiled, run_workers
from hybridflow.planner.calibrate import Fitted, Observation, calibrate, efficiency_of, here_start, keep, source_of
from hybridflow.planner.hardware import load_probe
from hybridflow.planner.profile_base import Prediction
from hybridflow.telemetry.graph_tables import aligned

__all__ = ["compare"]

PARTS = 3
"""largest parts of an estimate that are shown"""


@dataclass(frozen=True)
class Compared:
    """A run, and what both say about it: the cost model, and task ``profiles`` of this machine, by task, from other runs
    alone. ``mixed``: with profiles where there are some, else by the cost model; None: there are none."""

    found: Measured
    seen: Observation
    guess: Predicted
    profiles: Mapping[str, Prediction]
    mixed: Predicted | None

    @property
    def error(self) -> float:
        """Median, of profiles, as a share of what was measured."""
        assert self.mixed is not None, "there are profiles"
        taken = [(self.mixed.estimates[name].seconds, self.seen.seconds.get(name)) for name in self.profiles]
        return statistics.median(abs(one / took - 1) for one, took in taken if took)


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
    profiles = _profiles(found, seen, run)
    times = {task.name: task.times for task in seen.graph.tasks}
    known = {name: times[name] * one.seconds for name, one in profiles.items()}
    mixed = predicted(seen, efficiency, known) if known else None
    one = Compared(found, seen, predicted(seen, efficiency), profiles, mixed)
    if as_json:
        print(json.dumps(_data(one, fitted), indent=2))
        return
    print("\n".join(_text(one, run)))
    if fitted is not None:
        print("\n".join(("", *_constants(fitted), f"kept in {path}")))
    else:
        print(f"constants: {source_of()}; --calibrate fits them to this run")


def _profiles(found: Measured, seen: Observation, run: Path) -> dict[str, Prediction]:
    base, config = base_if_any(), found.config
    if base is None:
        return {}
    own = sum(pool.size for pool in config.placed.pools) if config.runtime.kind == "ray" else 0
    threads = config.num_threads or (max(1, base.cores // own) if own else torch.get_num_threads())
    return profiled(config, seen.graph, base.without(str(run.resolve())), run_workers(config), threads)


def _text(one: Compared, run: Path) -> Iterator[str]:
    found, seen = one.found, one.seen
    lengths = f"{seen.graph.tokens:,.0f} tokens a step"
    yield f"{found.config.algorithm}, {lengths}; seconds in a step, medians of {found.steps} steps"
    yield ""
    header = ("task", "measured", "predicted", "off", "profiled", "off", "mostly")
    yield from aligned([header, *_rows(one)], right=header[1:6])
    yield ""
    if own := [name for name in seen.seconds if not _has_model(seen, name)]:
        yield f"{', '.join(own)}: without a model, so predicted as measured."
    if one.mixed is not None:
        yield "predicted: by the cost model; profiled: by what other runs measured of these tasks on this machine,"
        yield f"off by {one.error:.0%} in the median; the step with both, the cost model where nothing was profiled."
    else:
        yield f"no other run has measured these tasks on this machine; to do so: hybridflow profile {run}/config.toml"


def _rows(one: Compared) -> Iterator[tuple[str, ...]]:
    seen = one.seen
    for name, estimate in one.guess.estimates.items():
        parts = sorted(estimate.parts.items(), key=lambda part: -part[1])[:PARTS] if _has_model(seen, name) else []
        shown = ", ".join(f"{part} {seconds:.3f}" for part, seconds in parts)
        profile = one.mixed.estimates[name].seconds if one.mixed is not None and name in one.profiles else None
        yield _row(name, seen.seconds.get(name), estimate.seconds, profile, shown)
    yield _row("step", seen.step_s, one.guess.step_s, None if one.mixed is None else one.mixed.step_s, "")


def _row(name: str, took: float | None, predicted_s: float, profile_s: float | None, shown: str) -> tuple[str, ...]:
    guesses = [("", "") if guess is None else (f"{guess:.3f}", _off(guess, took)) for guess in (predicted_s, profile_s)]
    return name, "" if took is None else f"{took:.3f}", *guesses[0], *guesses[1], shown


def _off(guess: float, took: float | None) -> str:
    return f"{guess / took - 1:+.0%}" if took else ""


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


def _data(one: Compared, fitted: Fitted | None) -> dict[str, Any]:
    found, seen = one.found, one.seen
    tasks = [
        {"task": name, "measured_s": seen.seconds.get(name), "predicted_s": estimate.seconds, "parts": estimate.parts}
        for name, estimate in one.guess.estimates.items()
    ]
    for task in tasks:
        if one.mixed is not None and (profile := one.profiles.get(str(task["task"]))) is not None:
            task |= {"profiled_s": one.mixed.estimates[str(task["task"])].seconds, "spread": profile.spread}
    data: dict[str, Any] = {
        "steps": found.steps,
        "measured_s": seen.step_s,
        "predicted_s": one.guess.step_s,
        "tasks": tasks,
    }
    if one.mixed is not None:
        data |= {"profiled_s": one.mixed.step_s, "profile_error": one.error}
    if fitted is not None:
        data["constants"] = {
            name: {"value": value, "spread": fitted.spread[name], "determined": name in fitted.determined}
            for name, value in fitted.values.items()
        }
    return data
