"""A run in turns that is done → what its steps would take with rollouts beside learning, on its own lengths and speeds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybridflow.build_compare import calls_by_step
from hybridflow.config import load_config
from hybridflow.core.errors import ConfigError
from hybridflow.planner.lengths import Lengths
from hybridflow.planner.streaming import Engine, Order, Stream, stream
from hybridflow.telemetry.records import read_records
from hybridflow.telemetry.rundir import RunDirectory
from hybridflow.telemetry.timeline import read_timeline

__all__ = ["Recorded", "recorded", "recorded_lengths", "recorded_prompt", "streamed"]

Array = NDArray[np.float64]
ROLLOUT, STEP = "sampler.rollout", "time/step_s"
LENGTHS = {STEP, "response_length/mean", "response_length/max"}
FEWEST = 5
"""steps after the first"""
SAMPLES = 50
"""lengths of responses that say how lengths are distributed; with fewer, their mean and deviation do"""


@dataclass(frozen=True)
class Recorded:
    """``groups`` of ``rows`` responses a step, drawn by ``replicas`` engines. Medians: ``learn_s``: of a step, all but its
    rollout; ``step_s``."""

    lengths: Lengths
    groups: int
    rows: int
    replicas: int
    engine: Engine
    learn_s: float
    step_s: float


def recorded(path: Path) -> Recorded:
    """Of a run directory. ConfigError: its steps weren't taken in turns, it drew no responses, or has too few steps."""
    directory = RunDirectory.open(path)
    config = load_config(directory.config, [])
    if config.schedule.ahead:
        raise ConfigError(
            [f'{path}: schedule.kind = {config.schedule.kind!r}; expected "sync", a run whose steps took turns']
        )
    found = [one for one in read_records(directory.metrics) if one["step"] > 1 and one.keys() >= LENGTHS]
    if len(found) < FEWEST:
        raise ConfigError([f"{path}: {len(found)} steps after the first in which responses were drawn; expected {FEWEST}"])
    calls = calls_by_step(read_timeline(directory.timeline), {one["step"] for one in found})[ROLLOUT]
    found = [one | {ROLLOUT: calls[one["step"]]} for one in found if one["step"] in calls]
    groups, rows = config.train.prompts_per_step, config.train.group_size
    replicas = config.placed.mesh_of("sampler", None).while_generating.dp
    learn_s = statistics.median(one[STEP] - one[ROLLOUT] for one in found)
    engine = _engine(found, groups * rows / replicas)
    step_s = statistics.median(one[STEP] for one in found)
    return Recorded(recorded_lengths(path), groups, rows, replicas, engine, learn_s, step_s)


def recorded_lengths(path: Path) -> Lengths:
    """Of a run's responses: of those that it kept samples of, or by the mean, deviation and maximum of its steps.
    ConfigError: it drew none."""
    directory = RunDirectory.open(path)
    sampled = tuple(float(one["tokens"]) for one in read_records(directory.samples) if "tokens" in one)
    if len(sampled) >= SAMPLES:
        return Lengths.of(sampled)
    found = _drawn(directory)
    mean, deviation, longest = (
        np.array([float(one.get(f"response_length/{name}") or 0.0) for one in found]) for name in ("mean", "std", "max")
    )
    return Lengths(float(mean.mean()), float(np.sqrt((deviation**2).mean() + mean.var())), float(longest.max()))


def recorded_prompt(path: Path) -> float:
    """Mean tokens of a run's prompts. ConfigError: it drew no responses."""
    return statistics.fmean(one["prompt_length/mean"] for one in _drawn(RunDirectory.open(path)))


def _drawn(directory: RunDirectory) -> list[dict[str, Any]]:
    """Metrics of the steps in which responses were drawn."""
    found = [one for one in read_records(directory.metrics) if "response_length/mean" in one]
    if not found:
        raise ConfigError([f"{directory.path}: no lengths of responses in metrics.jsonl; expected a run that draws text"])
    return found


def _engine(records: Sequence[Mapping[str, Any]], rows: float) -> Engine:
    """From steps of different lengths: seconds of a rollout are those of as many decode steps as the longest response has
    tokens, and of all tokens of a replica. Least squares, none below 0, of steps that are no outliers in the median."""
    work = np.array([[one["response_length/max"], one["response_length/mean"] * rows] for one in records])
    seconds = np.array([one[ROLLOUT] for one in records])
    usual = seconds <= 2 * np.median(seconds)
    fits = [np.linalg.lstsq(work[usual], seconds[usual], rcond=None)[0], *(_alone(work, seconds, one) for one in (0, 1))]
    possible = [fit for fit in fits if min(fit) >= 0]
    best = min(possible, key=lambda fit: float(((work[usual] @ fit - seconds[usual]) ** 2).sum()))
    step_s, row_s = best * np.median(seconds / (work @ best))
    return Engine(max(1, round(rows)), float(step_s), float(row_s))


def _alone(work: Array, seconds: Array, column: int) -> Array:
    """A fit that one kind of work explains alone."""
    fit = np.zeros(2)
    fit[column] = np.median(seconds / work[:, column])
    return fit


def streamed(run: Recorded, order: Order, steps: int = 40, publish_s: float = 0.0, seed: int = 0) -> Stream:
    """The run under another order; responses are as long as its own, and learning takes as long."""
    drawn = run.lengths.draw(np.random.default_rng(seed), (steps, run.groups, run.rows))
    expected = np.full(drawn.shape[:2], run.lengths.mean)  # what the prompt has to do with it isn't recorded
    return stream(drawn, [run.engine] * run.replicas, run.learn_s, order, publish_s, expected)
