"""Who decides when environments are stepped: single-controller, multi-controller and hybrid control of the same work.

    python benchmarks/control_modes.py [--workers 1,2,4,8] [--rollouts 64] [--sections measured,tasks,simulated] [--json]

The work: so many rollouts of 8 environments x ``--horizon`` steps, and a gradient of policy and value (64-64) on each.

    single   a2c     all env workers roll out together, then one process makes the gradient of all and steps
    multi    a3c     each env worker rolls out and makes gradients by itself, the learner takes the steps
    hybrid   impala  each env worker rolls out by itself, the learner makes the gradients (with V-trace) and steps

``measured``: on Ray, env workers and one learner as processes of this machine, against the work of one worker in one
process without Ray. Wall time wants a quiet machine; CPU-seconds are those of the driver and everything that it started,
Ray included, and "extra CPU ms" is what a rollout takes of them more than in one process. "per core" is the speed-up over
the cores that could be busy, of which this machine may have fewer than there are processes.

``tasks``: CPU-seconds of each task in one process. ``simulated``: the same schedules played out on machines with
``--per-node`` cores, an env worker on each, and one more core for the learner, a single process in all modes. Assumed:
tasks take what they took here; rollouts take ``--slower`` times as long, as in environments that take longer, and vary by
``--spread`` (deviation over mean: the single controller waits for the slowest); a message takes ``--link-ms`` beside its
bytes at ``--gbits``; a worker process adds ``--call-ms`` of its own to each call.
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import psutil

from hybridflow.build import Run, build
from hybridflow.config import validate

MODES = {"single": "a2c", "multi": "a3c", "hybrid": "impala"}
ENVS, WARM_UP = 8, 8
Config = dict[str, Any]


@dataclass(frozen=True)
class Work:
    """What a rollout is."""

    env: str
    horizon: int

    @property
    def steps(self) -> int:
        return ENVS * self.horizon


def configured(work: Work, mode: str, workers: int, ray: bool = True) -> Config:
    """``workers`` env workers with ``ENVS`` environments each."""
    environment: Config = {"id": work.env, "num_envs": ENVS * workers, "steps_per_rollout": work.horizon}
    optimizer = {"optimizer": {"lr": 1e-3}}
    config: Config = {"algorithm": MODES[mode], "actor": optimizer, "environment": environment, "run_dir": "unused"}
    config |= {"threads": 1, "train": {"steps": 10**6}} | ({} if mode == "multi" else {"critic": optimizer})
    if mode != "single":
        environment["workers"] = workers
    return on_ray(config, workers) if ray else config


def on_ray(config: Config, workers: int) -> Config:
    """Env workers as processes, and all other roles in one."""
    others = ["actor", "critic"] if config["algorithm"] in ("a2c", "impala", "ppo", "trpo") else ["actor"]
    placement = {"pools": {"learner": 1, "envs": workers}, "roles": dict.fromkeys(others, "learner") | {"sampler": "envs"}}
    return {**config, "runtime": {"kind": "ray"}, "placement": placement}


@dataclass(frozen=True)
class Measured:
    """``cpu_s``: of all processes."""

    env_steps: int
    wall_s: float
    cpu_s: float

    @property
    def steps_per_s(self) -> float:
        return self.env_steps / self.wall_s

    @property
    def steps_per_cpu_s(self) -> float:
        return self.env_steps / self.cpu_s

    @property
    def utilisation(self) -> float:
        """Share of this machine's cores that were busy with it."""
        return self.cpu_s / self.wall_s / (os.cpu_count() or 1)


def cpu_seconds() -> float:
    """Of this process and all that it has started."""
    here = psutil.Process()
    times = [process.cpu_times() for process in (here, *here.children(recursive=True))]
    return sum(each.user + each.system for each in times)


def measure(config: Config, steps: int, seconds: float = 0.0) -> Measured:
    """``steps`` steps of a run, or as many as take about so many ``seconds``, after ``WARM_UP``."""
    run = build(validate(config, "benchmark"))
    try:
        environment, trainer = config["environment"], run.trainer
        trainer.train(2)
        start = time.perf_counter()
        trainer.train(WARM_UP)
        steps = max(steps, round(seconds * (WARM_UP - 2) / (time.perf_counter() - start)))
        cpu_s, start = cpu_seconds(), time.perf_counter()
        trainer.train(WARM_UP + steps)
        wall_s, cpu_s = time.perf_counter() - start, cpu_seconds() - cpu_s
        per_step = environment["num_envs"] // max(1, environment.get("workers", 1)) * environment["steps_per_rollout"]
        return Measured(steps * per_step, wall_s, cpu_s)
    finally:
        run.runtime.stop()


def measured(work: Work, workers: Sequence[int], rollouts: int) -> list[Config]:
    """Every mode with so many env workers, on the same number of environment steps."""
    base = measure(configured(work, "multi", 1, ray=False), rollouts)
    rows = [_row("one process", 1, 1, base, base)]
    for count in workers:
        for mode in MODES:
            steps = rollouts // count if mode == "single" else rollouts
            processes = count + 1
            found = measure(configured(work, mode, count), steps)
            extra = (1 / found.steps_per_cpu_s - 1 / base.steps_per_cpu_s) * work.steps * 1e3
            rows.append(_row(mode, count, processes, found, base) | {"extra CPU ms": extra})
    return rows


def _row(mode: str, workers: int, processes: int, found: Measured, base: Measured) -> Config:
    speedup, cores = found.steps_per_s / base.steps_per_s, min(processes, os.cpu_count() or 1)
    rates = {"steps/s": found.steps_per_s, "steps/CPU-s": found.steps_per_cpu_s, "CPU utilisation": found.utilisation}
    return {"mode": mode, "env workers": workers, **rates, "speed-up": speedup, "per core": speedup / cores}


# What tasks take, and the schedules played out.


WEIGHT_BYTES, STEP_BYTES = 40_000, 50
"""about what policy and value of 64-64 have, and the columns of a step of CartPole"""


@dataclass(frozen=True)
class Times:
    """Seconds: of a worker's rollout and of its gradients; of a step on gradients; of learning from n rollouts in the two
    other modes, ``fixed + n each``; of a message of weights or gradients, of one of a rollout, and of a call."""

    rollout: float
    gradients: float
    apply: float
    a2c: tuple[float, float]
    impala: tuple[float, float]
    weights_message: float
    rollout_message: float
    call: float
    spread: float


def task_seconds(config: Config, steps: int = 30) -> dict[str, float]:
    """CPU-seconds of a call of each verb, in one process."""
    run, spent = build(validate(config, "benchmark")), defaultdict[str, list[float]](list)
    try:
        run.trainer.train(5)
        _timed(run, spent)
        run.trainer.train(5 + steps)
    finally:
        run.runtime.stop()
    return {name: statistics.median(seconds) for name, seconds in spent.items()}


def _timed(run: Run, spent: dict[str, list[float]]) -> None:
    runtime: Any = run.runtime
    call: Callable[..., Any] = runtime.call

    def timed(role: Any, name: str, *rest: Any) -> Any:
        start = time.process_time()
        out = call(role, name, *rest)
        spent[f"{role.name}.{name}"].append(time.process_time() - start)
        return out

    runtime.call = timed


def times_of(args: argparse.Namespace, work: Work) -> Times:
    """Tasks of one worker's share, and of learning from one and from eight of them."""
    a3c = task_seconds(configured(work, "multi", 1, ray=False))
    learning = {}
    for mode in ("single", "hybrid"):
        config = configured(work, mode, 1, ray=False)
        sizes = [{**config["environment"], "num_envs": ENVS * count, "workers": int(mode == "hybrid")} for count in (1, 8)]
        small, large = (_learning(task_seconds({**config, "environment": environment})) for environment in sizes)
        each = (large - small) / 7
        learning[mode] = (max(0.0, small - each), each)
    seconds_per_byte = 8 / args.gbits / 1e9
    weights = WEIGHT_BYTES * seconds_per_byte + args.link_ms / 1e3
    rollout = work.steps * STEP_BYTES * seconds_per_byte + args.link_ms / 1e3
    return Times(
        a3c["sampler.rollout"],
        a3c["sampler.gradients"],
        a3c["actor.apply"],
        learning["single"],
        learning["hybrid"],
        weights,
        rollout,
        args.call_ms / 1e3,
        args.spread,
    )


def _learning(seconds: dict[str, float]) -> float:
    return sum(value for name, value in seconds.items() if not name.startswith("sampler."))


def simulate(mode: str, workers: int, times: Times, rollouts: int, seed: int = 0) -> tuple[float, float]:
    """(rollouts a second, share of the workers' and the learner's cores that is busy). Rollouts are gamma distributed."""
    shape, rng = 1 / times.spread**2, np.random.default_rng(seed)
    drawn = iter(rng.gamma(shape, times.rollout / shape, (rollouts // workers + 2) * workers * 2).tolist())
    if mode == "single":
        return _together(workers, times, max(1, rollouts // workers), drawn)
    at_worker = times.call * 2 + (times.gradients if mode == "multi" else 0.0)
    message = times.weights_message if mode == "multi" else times.rollout_message
    at_learner = times.call * 2 + (times.apply if mode == "multi" else sum(times.impala))
    ready = [(next(drawn) + at_worker + message, worker) for worker in range(workers)]
    heapq.heapify(ready)
    free = busy = 0.0
    for _ in range(rollouts):
        arrived, worker = heapq.heappop(ready)
        free = max(free, arrived) + at_learner
        work = next(drawn) + at_worker
        busy += at_learner + work
        heapq.heappush(ready, (free + times.weights_message + work + message, worker))
    return rollouts / free, min(1.0, busy / free / (workers + 1))


def _together(workers: int, times: Times, steps: int, drawn: Any) -> tuple[float, float]:
    """Everybody waits for the slowest rollout, then for the learner."""
    wall = busy = 0.0
    learning = times.a2c[0] + workers * times.a2c[1] + 3 * times.call
    for _ in range(steps):
        each = [next(drawn) + times.call for _ in range(workers)]
        wall += max(each) + times.rollout_message + learning + times.weights_message
        busy += sum(each) + learning
    return steps * workers / wall, busy / wall / (workers + 1)


def simulated(work: Work, times: Times, per_node: int, nodes: Sequence[int], slower: float) -> list[Config]:
    rows, times = [], replace(times, rollout=times.rollout * slower)
    for count in nodes:
        workers = count * per_node
        row: Config = {"nodes": count, "env workers": workers}
        for mode in MODES:
            rate, busy = simulate(mode, workers, times, rollouts=max(2000, 20 * workers))
            row |= {f"{mode} steps/s": rate * work.steps, f"{mode} CPU utilisation": busy}
        rows.append(row)
    return rows


def show(title: str, rows: Sequence[Config]) -> None:
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[_cell(row.get(name)) for name in names] for row in rows]
    widths = [max(len(line[i]) for line in [names, *cells]) for i in range(len(names))]
    print(f"\n{title}")
    for line in [names, *cells]:
        print("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)), flush=True)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return "" if value is None else str(value)


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", default="measured,tasks,simulated")
    parser.add_argument("--env", default="CartPole-v1")
    parser.add_argument("--horizon", type=int, default=256, help="steps of each environment in a rollout")
    parser.add_argument("--workers", type=numbers, default=[1, 2, 4, 8])
    parser.add_argument("--rollouts", type=int, default=64, help="measured, in each mode")
    parser.add_argument("--nodes", type=numbers, default=[1, 2, 4, 8, 16, 32, 64, 128])
    parser.add_argument("--per-node", type=int, default=8)
    parser.add_argument("--slower", type=numbers, default=[1, 30])
    parser.add_argument("--spread", type=float, default=0.2)
    parser.add_argument("--link-ms", type=float, default=0.1)
    parser.add_argument("--gbits", type=float, default=10.0)
    parser.add_argument("--call-ms", type=float, default=1.0)
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of the tables")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    work = Work(args.env, args.horizon)
    wanted, tables = args.sections.split(","), dict[str, list[Config]]()
    if "measured" in wanted:
        tables[f"measured, {os.cpu_count()} cores"] = measured(work, args.workers, args.rollouts)
    if {"tasks", "simulated"} & set(wanted):
        times = times_of(args, work)
        tables["seconds of a task"] = [{"task": name, "s": value} for name, value in _named(times)]
        if "simulated" in wanted:
            for slower in args.slower:
                title = f"simulated, rollouts {slower} times as long"
                tables[title] = simulated(work, times, args.per_node, args.nodes, slower)
    for title, rows in tables.items():
        if args.json:
            for row in rows:
                print(json.dumps({"section": title, **row}), flush=True)
        else:
            show(title, rows)


def _named(times: Times) -> list[tuple[str, float]]:
    found: list[tuple[str, float]] = []
    for name, value in asdict(times).items():
        found += (
            [(f"{name}, fixed", value[0]), (f"{name}, a rollout", value[1])]
            if isinstance(value, tuple)
            else [(name, value)]
        )
    return found


if __name__ == "__main__":
    main()
