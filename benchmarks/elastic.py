"""A workload whose needs change, on worker groups that change with it: auction, even split, every static split.

    python benchmarks/elastic.py                  a table: seconds and utilisation in each phase, and over the whole run
    python benchmarks/elastic.py --steps 10 --repeats 1

Deep Q-learning with a large network, on environments whose step takes as long as a simulator elsewhere takes to answer. The
simulator is slow at first, and then twenty times as fast. ``SLOTS`` CPU slots are shared out among env workers, one slot
each, and threads of the learner; the sampler collects the next rollout while the learner learns. All do the same steps.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import gymnasium
import numpy as np
from gymnasium import spaces

from hybridflow.allocator import Allocator, tenants
from hybridflow.build import build
from hybridflow.config import validate
from hybridflow.controller.ray_runtime import RayRuntime
from hybridflow.train import Step

FILE = Path(__file__).absolute()
SLOTS, ENV_WORKERS, WARMUP = 4, 3, 5
EVEN = (2, 2)
SIMULATOR_S = {"simulation-heavy": 4e-3, "learning-heavy": 2e-4}


class Simulated(gymnasium.Env[Any, Any]):
    """A random walk in 32 dimensions that is asked of a simulator elsewhere, which takes as many seconds as ``price``, a
    file, says; the driver changes it."""

    observation_space, action_space = spaces.Box(-np.inf, np.inf, (32,), np.float32), spaces.Discrete(4)

    def __init__(self, price: str) -> None:
        self.price = Path(price)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.state = self.np_random.normal(size=32).astype(np.float32)
        return self.state.copy(), {}

    def step(self, action: Any) -> Any:
        time.sleep(float(self.price.read_text()))
        self.state = np.roll(self.state, int(action) + 1)
        return self.state.copy(), float(self.state[0]), False, bool(self.np_random.random() < 0.02), {}


if "Simulated-v0" not in gymnasium.registry:
    gymnasium.register("Simulated-v0", Simulated)


def configuration(folder: Path, price: Path, steps: int) -> dict[str, Any]:
    return {
        "algorithm": "dqn",
        "run_dir": str(folder),
        "dqn": {"tau": 0.05},
        "actor": {"net": {"hidden": [512, 512]}},
        "environment": {
            "id": f"{FILE}:Simulated-v0",
            "num_envs": 12,
            "steps_per_rollout": 16,
            "options": {"price": str(price), "disable_env_checker": True},
        },
        "replay": {"capacity": 10_000, "batch_size": 512, "warmup": 512},
        "train": {"steps": WARMUP + 2 * steps, "updates_per_step": 8},
        "schedule": {"kind": "one_step_off"},
        "runtime": {"kind": "ray"},
        "placement": {"pools": {"learn": 1, "envs": ENV_WORKERS}, "roles": {"actor": "learn", "sampler": "envs"}},
    }


class Measure:
    """A hook: how long steps took and how much of the slots they used; the price changes when it is time."""

    def __init__(self, price: Path, steps: int) -> None:
        self.price, self.steps, self.taken = price, steps, list[tuple[float, float]]()
        self.given = list[tuple[int, int]]()
        self.runtime: RayRuntime
        self.begin(0)

    def begin(self, phase: int) -> None:
        self.price.write_text(str([*SIMULATOR_S.values()][phase]))

    def __call__(self, step: Step) -> None:
        workers, threads = self.units()
        used = sum(s.duration_s * (threads if s.worker.startswith("learn") else 1) for s in step.spans if s.kind != "queue")
        self.taken.append((step.metrics["time/step_s"], used))
        self.given.append((workers, threads))
        if step.number == WARMUP + self.steps:
            self.begin(1)

    def units(self) -> tuple[int, int]:
        return self.runtime.num_workers("sampler"), self.runtime.num_threads("learn")

    def seconds(self, phase: int) -> float:
        return sum(taken for taken, _ in self._of(phase))

    def utilisation(self, phase: int) -> float:
        return sum(used for _, used in self._of(phase)) / (SLOTS * self.seconds(phase))

    def _of(self, phase: int) -> list[tuple[float, float]]:
        begun = WARMUP + phase * self.steps
        return self.taken[begun : begun + self.steps]


def run(folder: Path, steps: int, units: tuple[int, int] | None) -> Measure:
    """``units``: env workers and threads of the learner all the time; None: an auction."""
    measure = Measure(folder / "price", steps)
    made = build(validate(configuration(folder / "run", measure.price, steps), "benchmark"))
    measure.runtime = runtime = cast(RayRuntime, made.runtime)
    try:
        workers, threads = units or EVEN
        runtime.resize("sampler", workers)
        runtime.rethread("learn", threads)
        pools = tenants(runtime, SLOTS, ["actor"], False, 12)
        allocator = Allocator(runtime, pools, SLOTS, folder / "auction.jsonl")
        made.trainer.hooks = [measure, *([allocator] if units is None else [])]
        made.trainer.train(WARMUP + 2 * steps)
    finally:
        runtime.stop()
    return measure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40, help="of each phase")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    split = [(workers, SLOTS - workers) for workers in range(1, ENV_WORKERS + 1)]
    measured: dict[tuple[int, int] | None, list[Measure]] = {units: [] for units in (None, *split)}
    for repeat, units in itertools.product(range(options.repeats), measured):
        with tempfile.TemporaryDirectory() as folder:
            measured[units].append(run(Path(folder), options.steps, units))
            print(f"{repeat + 1}/{options.repeats} {_name(units)}", file=sys.stderr)
    table(measured)


def table(measured: Mapping[tuple[int, int] | None, Sequence[Measure]]) -> None:
    seconds = {units: [_median(runs, phase) for phase in (0, 1)] for units, runs in measured.items()}
    static = {units: sum(phases) for units, phases in seconds.items() if units is not None}
    best = min(static, key=lambda units: static[units])
    first, second = SIMULATOR_S
    print(f"| allocation | {first}, s | used | {second}, s | used | both, s |")
    print("|---|---|---|---|---|---|")
    for units, runs in measured.items():
        used = [statistics.median(run.utilisation(phase) for run in runs) for phase in (0, 1)]
        notes = [*(["even split"] if units == EVEN else []), *(["best static split"] if units == best else [])]
        name = _name(units) + (f" ({', '.join(notes)})" if notes else "")
        cells = " | ".join(f"{s:.2f} | {u:.0%}" for s, u in zip(seconds[units], used, strict=True))
        print(f"| {name} | {cells} | {sum(seconds[units]):.2f} |")
    auction = seconds[None]
    ratios = [
        min(phases[phase] for units, phases in seconds.items() if units is not None) / auction[phase] for phase in (0, 1)
    ]
    whole = static[best] / sum(auction)
    print(
        f"auction against the best split of each phase: {ratios[0]:.2f} and {ratios[1]:.2f}; of both together: {whole:.2f}"
    )
    for run in measured[None]:
        changes = [
            (step, units)
            for step, (units, old) in enumerate(zip(run.given[1:], run.given, strict=False), 2)
            if units != old
        ]
        print(
            "auction changed after steps "
            + ", ".join(f"{step - 1}: {w} env workers, {t} threads" for step, (w, t) in changes)
        )


def _median(runs: Sequence[Measure], phase: int) -> float:
    return statistics.median(run.seconds(phase) for run in runs)


def _name(units: tuple[int, int] | None) -> str:
    return "auction" if units is None else f"{units[0]} env workers, {units[1]} threads"


if __name__ == "__main__":
    main()
