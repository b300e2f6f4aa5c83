"""Ten methods, four sizes of networks, three control modes: throughput and use of the CPUs in one table.

    python benchmarks/matrix.py [--methods sac,ppo] [--sizes 32,64] [--modes single,hybrid] [--seconds 3] [--json]

Every cell runs on Ray with two env workers and one learner, on processes of this machine, for about ``--seconds``; the
modes are those of control_modes.py. A cell that can't be says why: a method whose mathematics needs rollouts of its newest
policy has no asynchronous mode, and env workers make gradients in a3c alone. Throughput wants a quiet machine.

All methods run CartPole with 8 environments, but td3 and ddpg, which need continuous actions, Pendulum.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator
from typing import Any

from control_modes import Config, measure, on_ray, show

from hybridflow.controller.ray_group import connect

WORKERS = 2
SIZES = (32, 64, 128, 256)
MODES = ("single", "multi", "hybrid")
ON_POLICY = ("reinforce", "a2c", "ppo", "trpo", "impala")
REPLAYS = ("dqn", "sac", "td3", "ddpg")
METHODS = (*ON_POLICY, "a3c", *REPLAYS)
NEWEST = "learns from rollouts of its newest policy alone"
WITH_VALUE = ("a2c", "ppo", "trpo", "impala")


def refusal(method: str, mode: str) -> str | None:
    """Why a method doesn't have a mode."""
    if mode == "single":
        return "its env workers work by themselves" if method == "a3c" else None
    if mode == "multi":
        others = NEWEST if method in ON_POLICY[:-1] else "its learner makes the gradients"
        return None if method == "a3c" else others
    if method == "a3c":
        return "its env workers make the gradients"
    return NEWEST if method in ON_POLICY[:-1] else None


def configured(method: str, size: int, mode: str) -> Config:
    trained = {"net": {"hidden": [size, size]}, "optimizer": {"lr": 1e-3}}
    continuous = method in ("td3", "ddpg")
    environment: Config = {"id": "Pendulum-v1" if continuous else "CartPole-v1", "num_envs": 8}
    environment["steps_per_rollout"] = 4 if method in REPLAYS else 64
    if mode != "single":
        environment["workers"] = WORKERS
    config: Config = {"algorithm": method, "run_dir": "unused", "threads": 1, "actor": trained, "environment": environment}
    if method in (*WITH_VALUE, "sac", "td3", "ddpg"):
        config["critic"] = trained
    if method == "ppo":
        config["train"] = {"steps": 10**6, "epochs": 4, "minibatches": 4}
    elif method in REPLAYS:
        config |= {"train": {"steps": 10**6, "updates_per_step": 8}, "replay": {"batch_size": 128, "warmup": 64}}
    else:
        config["train"] = {"steps": 10**6}
    return on_ray(config, WORKERS)


def rows_of(args: argparse.Namespace) -> Iterator[Config]:
    for method, size, mode in itertools.product(args.methods, args.sizes, args.modes):
        row: dict[str, Any] = {"method": method, "network": f"{size}-{size}", "mode": mode}
        why = refusal(method, mode)
        if why is None:
            found = measure(configured(method, size, mode), 4, args.seconds)
            row |= {"steps/s": found.steps_per_s, "steps/CPU-s": found.steps_per_cpu_s, "CPU": found.utilisation}
        elif size != args.sizes[0]:
            continue
        yield {**row, "why not": why or ""}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", type=lambda text: text.split(","), default=METHODS)
    parser.add_argument("--sizes", type=lambda text: [int(size) for size in text.split(",")], default=SIZES)
    parser.add_argument("--modes", type=lambda text: text.split(","), default=MODES)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--json", action="store_true", help="one JSON object a line, as they come, instead of the table")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    connect(None, WORKERS + 1)  # one Ray for all cells
    rows = []
    for row in rows_of(args):
        rows.append(row)
        if args.json:
            print(json.dumps(row), flush=True)
    if not args.json:
        show("two env workers and a learner", rows)


if __name__ == "__main__":
    main()
