"""Constants of the cost model from what was measured: few of them, each with how well the measurements determine it.

    log(predicted / measured), robustly small, over the logarithms of the constants:
    one constant at a time, in wide steps ──> Gauss-Newton ──> one at a time again, in small ones ──> leave-one-out spread

Logarithms, as all constants are positive and errors are ratios. Predictions have kinks (which limit binds, which plan is
best), where derivatives mislead; so each constant is also searched on its own. All are pulled a little to where they start.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybridflow.core.files import write_whole
from hybridflow.planner.cluster import HERE, Cluster
from hybridflow.planner.cost import CostModel, Efficiency, Estimate
from hybridflow.planner.graph import TaskGraph
from hybridflow.planner.hardware import Probe, fingerprint, kept, load_probe
from hybridflow.planner.mapping import DeviceMapping
from hybridflow.planner.simulate import simulate

__all__ = [
    "CONSTANTS",
    "Fitted",
    "Observation",
    "as_seen",
    "calibrate",
    "efficiency_of",
    "fit",
    "here_start",
    "keep",
    "source_of",
]

CONSTANTS = ("compute", "decode_step_s", "decode_row_s", "call_s", "network", "copy")
BOUNDS = {
    "compute": (0.01, 1.5),
    "decode_step_s": (1e-6, 1.0),
    "decode_row_s": (1e-8, 0.1),
    "call_s": (1e-6, 10.0),
    "network": (0.01, 1.5),
    "copy": (1e6, 1e12),
}
FILE = "efficiency.json"

Array = NDArray[np.float64]
Predict = Callable[[Mapping[str, float]], Sequence[float] | Array]

NOISE = 0.03
"""errors, in logarithms, that measurements have anyway"""
HUBER = 0.1
"""errors above it pull no harder than one of it"""
PRIOR = math.log(10.0)
"""how far, in logarithms, a constant may well be from where the fit starts"""
FAR = 3.0
"""of an error, at most: predictions that are missing or infinite have it"""
STEP = 0.02
SMALLEST = 0.01
ROUNDS = 12
FELT = 0.02
"""a constant is determined if twice of it would change a prediction by so much or more"""


@dataclass(frozen=True)
class Fitted:
    """``values`` of constants by name. ``spread``: a factor of 1 or more, by which a constant may be larger or smaller: one
    standard error, by leaving out each measurement in turn. ``determined``: those that the measurements depend on; the
    others are where they started. ``errors`` [N]: log(predicted / measured)."""

    values: dict[str, float]
    spread: dict[str, float]
    determined: tuple[str, ...]
    errors: Array

    @property
    def median_error(self) -> float:
        """Of predictions, as a share of what was measured."""
        return float(np.median(np.abs(np.expm1(self.errors))))

    @property
    def worst_error(self) -> float:
        return float(np.max(np.abs(np.expm1(self.errors))))


def fit(
    predict: Predict,
    observed: Sequence[float] | Array,
    start: Mapping[str, float],
    bounds: Mapping[str, tuple[float, float]] | None = None,
    weights: Sequence[float] | Array | None = None,
) -> Fitted:
    """The constants with which ``predict`` comes nearest to ``observed`` [N], both above 0.

    ``start``: by name, above 0; what measurements don't determine stays there. ``bounds``: (least, most) of a constant,
    both above 0. ``weights`` [N]: how much each measurement counts. The same arguments give the same result.
    """
    problem = _Problem(predict, np.asarray(observed, float), start, bounds or {}, weights)
    point = problem.newton(problem.one_by_one(problem.start, 2.0))
    point = problem.one_by_one(point, 0.4)
    jacobian, errors = problem.jacobian(point), problem.errors(point)
    spread = problem.spread(jacobian, errors)
    felt = np.abs(jacobian).max(axis=0, initial=0.0) * math.log(2) >= FELT
    # a pull alone must not look like a measurement: what isn't felt has the width of the prior
    spread[~felt] = PRIOR
    return Fitted(
        values={name: float(math.exp(value)) for name, value in zip(problem.names, point, strict=True)},
        spread={name: float(math.exp(value)) for name, value in zip(problem.names, spread, strict=True)},
        determined=tuple(name for name, one in zip(problem.names, felt, strict=True) if one),
        errors=errors,
    )


class _Problem:
    """Constants are a vector of logarithms."""

    def __init__(
        self,
        predict: Predict,
        observed: Array,
        start: Mapping[str, float],
        bounds: Mapping[str, tuple[float, float]],
        weights: Sequence[float] | Array | None,
    ) -> None:
        self.predict, self.log_observed, self.names = predict, np.log(observed), tuple(start)
        self.start = np.log(np.array([start[name] for name in self.names], float))
        limits = np.log(np.array([bounds.get(name, (1e-12, 1e18)) for name in self.names], float).reshape(-1, 2))
        self.low, self.high = limits[:, 0], limits[:, 1]
        given = np.ones(len(observed)) if weights is None else np.asarray(weights, float)
        self.weights = given * len(observed) / given.sum()

    def errors(self, point: Array) -> Array:
        values = {name: math.exp(value) for name, value in zip(self.names, point, strict=True)}
        with np.errstate(divide="ignore", invalid="ignore"):
            found = np.log(np.asarray(self.predict(values), float)) - self.log_observed
        errors: Array = np.clip(np.nan_to_num(found, nan=FAR, posinf=FAR, neginf=-FAR), -FAR, FAR)
        return errors

    def loss(self, point: Array) -> float:
        """Huber's, and the pull to the start."""
        size = np.abs(self.errors(point))
        robust = np.where(size <= HUBER, size**2 / 2, HUBER * (size - HUBER / 2))
        pull = ((point - self.start) / PRIOR) ** 2 / 2
        return float((self.weights * robust).sum() / NOISE**2 + pull.sum())

    def jacobian(self, point: Array) -> Array:
        """[N, constants], by central differences inside the bounds."""
        columns = []
        for index in range(len(point)):
            above, below = point.copy(), point.copy()
            above[index] = min(point[index] + STEP, self.high[index])
            below[index] = max(point[index] - STEP, self.low[index])
            width = above[index] - below[index]
            change = self.errors(above) - self.errors(below) if width else np.zeros_like(self.log_observed)
            columns.append(change / (width or 1.0))
        return np.stack(columns, axis=1) if columns else np.zeros((len(self.log_observed), 0))

    def _pulls(self, errors: Array) -> Array:
        """Weights of squares whose sum has the slope of Huber's loss."""
        pulls: Array = self.weights * np.minimum(1.0, HUBER / np.maximum(np.abs(errors), 1e-12)) / NOISE**2
        return pulls

    def newton(self, point: Array) -> Array:
        """Gauss-Newton, damped until the loss falls."""
        damping, best = 1e-3, self.loss(point)
        for _ in range(ROUNDS):
            errors, jacobian = self.errors(point), self.jacobian(point)
            pulls = self._pulls(errors)
            slope = jacobian.T @ (pulls * errors) + (point - self.start) / PRIOR**2
            normal = jacobian.T @ (pulls[:, None] * jacobian) + np.eye(len(point)) / PRIOR**2
            for _ in range(6):
                damped = normal + damping * np.diag(np.diag(normal))
                tried = np.clip(point - np.linalg.solve(damped, slope), self.low, self.high)
                if (loss := self.loss(tried)) < best:
                    break
                damping *= 10
            else:
                return point
            gain, best, point, damping = best - loss, loss, tried, damping / 10
            if gain < 1e-4 * best:
                break
        return point

    def one_by_one(self, point: Array, width: float) -> Array:
        """Smaller and smaller steps of one constant at a time, as long as the loss falls."""
        best = self.loss(point)
        while width > SMALLEST:
            moved = False
            for index in range(len(point)):
                for way in (width, -width):
                    tried = point.copy()
                    tried[index] = np.clip(point[index] + way, self.low[index], self.high[index])
                    if (loss := self.loss(tried)) < best - 1e-9:
                        best, point, moved = loss, tried, True
                        break
            width = width if moved else width / 2
        return point

    def spread(self, jacobian: Array, errors: Array) -> Array:
        """[constants], one standard error of their logarithms: the jackknife, each constant moved by the one Newton step
        that leaving out a measurement makes (Efron 1982)."""
        pulls, count = self._pulls(errors), len(errors)
        normal = jacobian.T @ (pulls[:, None] * jacobian) + np.eye(jacobian.shape[1]) / PRIOR**2
        inverse = np.linalg.inv(normal)
        leverage = pulls * np.einsum("ni,ij,nj->n", jacobian, inverse, jacobian)
        moves = (pulls * errors / np.maximum(1 - leverage, 0.1))[:, None] * (jacobian @ inverse)
        jackknife: Array = np.sqrt((count - 1) / count * (moves**2).sum(axis=0))
        return np.minimum(jackknife, PRIOR) if count > 1 else np.full(len(inverse), PRIOR)


# ------------------------------------------------------------------------------------------- constants of the cost model


@dataclass(frozen=True)
class Observation:
    """A run: its task graph and mapping, and the seconds that were measured of tasks, by name, and of a step. Where weights
    were published to another pool, that is "SAMPLER.weights"."""

    graph: TaskGraph
    mapping: DeviceMapping
    seconds: Mapping[str, float]
    step_s: float


def calibrate(observations: Sequence[Observation], start: Efficiency) -> tuple[Efficiency, Fitted]:
    """The constants of ``start`` that fit best, and how well. Tasks count by their share of their step, and each step as
    much as its tasks together. Tasks without a model, whose seconds are given, don't count."""

    def predict(values: Mapping[str, float]) -> list[float]:
        return [seconds for one in observations for seconds in _predicted(one, _with(start, values))]

    observed = [seconds for one in observations for seconds in (*_counted(one).values(), one.step_s)]
    weights = [seconds / one.step_s for one in observations for seconds in (*_counted(one).values(), one.step_s)]
    found = fit(predict, observed, {name: getattr(start, name) for name in CONSTANTS}, BOUNDS, weights)
    return _with(start, found.values), found


def _with(start: Efficiency, values: Mapping[str, Any]) -> Efficiency:
    return replace(start, **values)


def _counted(one: Observation) -> dict[str, float]:
    known = {role.name for role in one.graph.roles}
    own = {task.name for task in one.graph.tasks if task.role not in known}
    return {name: seconds for name, seconds in one.seconds.items() if name not in own}


def _predicted(one: Observation, efficiency: Efficiency) -> Iterator[float]:
    estimates = CostModel(one.graph, efficiency).estimates(one.mapping)
    apart = as_seen(one, estimates)
    yield from (apart[name].seconds for name in _counted(one))
    yield simulate(one.graph, one.mapping, estimates).step_s


def as_seen(one: Observation, estimates: Mapping[str, Estimate]) -> dict[str, Estimate]:
    """Estimates by what a run was seen to do: weights that it published apart from the task that waits for them."""
    found = dict(estimates)
    for task in one.graph.tasks:
        parts, weights = dict(found[task.name].parts), f"{task.role}.weights"
        if weights in one.seconds and "transition" in parts:
            found[weights] = Estimate({"transition": parts.pop("transition")})
            found[task.name] = Estimate(parts)
    return found


def here_start(probe: Probe) -> Efficiency:
    """Where constants of this machine start: peaks were measured, so that nearly all of them can be reached."""
    return Efficiency(
        compute=0.7,
        decode_step_s=1e-3,
        decode_row_s=2e-5,
        call_s=5e-3,
        network=1.0,
        copy=probe.bandwidth[1] / 16,
        bandwidth=1.0,
        link=1.0,
        device="cuda" if probe.gpus else "cpu",
    )


def efficiency_of(cluster: Cluster) -> Efficiency:
    """Constants for a cluster: for machines here those that were fitted, or else where a fit would start; for others the
    published ones."""
    if any(machine.device.name != HERE for _, machine in cluster.machines):
        return Efficiency()
    start, found = here_start(load_probe()), kept(FILE)
    return start if found is None else _with(start, {name: found[name]["value"] for name in CONSTANTS})


def source_of() -> str:
    """Where the constants of this machine are from."""
    found = kept(FILE)
    return "where a fit would start" if found is None else f"as fitted to {found['source']}"


def keep(found: Fitted, source: str) -> Path:
    """Keep fitted constants of this machine for ``efficiency_of``; where they are. ``source``: of what run."""
    path = fingerprint().folder / FILE
    constants = {
        name: {"value": value, "spread": found.spread[name], "determined": name in found.determined}
        for name, value in found.values.items()
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps({**constants, "source": source}, indent=2).encode())
    return path
