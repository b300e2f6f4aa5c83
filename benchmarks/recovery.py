"""How long a run on Ray takes to see that workers are lost and to go on, and what that costs while nobody is.

    python benchmarks/recovery.py                 a table: fault, times from the fault on, steps done again
    python benchmarks/recovery.py --cost          shares of snapshots, ledger, guards and health checks in a run's time

Both print tables of docs/reliability.md. Every fault strikes ``--repeats`` times, in one run. The weights at the end are
compared with those of a run without faults.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, redirect_stdout
from functools import wraps
from pathlib import Path
from typing import Any
from unittest import mock

import ray
import torch

from hybridflow import checkpoint
from hybridflow.config import load_config
from hybridflow.controller.ray_group import connect
from hybridflow.controller.ray_watch import Watch
from hybridflow.launch import train
from hybridflow.ledger import Ledger
from hybridflow.recovery import Recovery
from hybridflow.telemetry.guards import Guards
from hybridflow.workers.checkpoint import PieceReader

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "reliability"))
from worker_faults import Fault, striking

EXAMPLES = Path(__file__).parents[1] / "examples"
RAY = ["--runtime.kind", "ray", "--threads", "1", "--evaluation.every", "0"]
APART = ["--placement.pools", "{learning = 2, sampling = 1}", "--placement.roles"]
ROLES = '{actor = "learning", sampler = "sampling", reward = "learning"}'
EVERYONE = [("learning", 0), ("learning", 1), ("sampling", 0)]
KINDS: dict[str, tuple[str, list[tuple[str, int]], signal.Signals]] = {
    "a learner is killed during its update": ("actor.update", [("learning", 1)], signal.SIGKILL),
    "the sampler is killed during a rollout": ("sampler.rollout", [("sampling", 0)], signal.SIGKILL),
    "a learner is killed while it publishes": ("publish", [("learning", 0)], signal.SIGKILL),
    "a learner is killed while it saves": ("actor.save", [("learning", 1)], signal.SIGKILL),
    "all three are killed at once": ("actor.update", EVERYONE, signal.SIGKILL),
    "a learner is stopped (SIGSTOP)": ("actor.update", [("learning", 1)], signal.SIGSTOP),
    "the sampler is stopped (SIGSTOP)": ("sampler.rollout", [("sampling", 0)], signal.SIGSTOP),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cost", action="store_true")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    connect(None, 4)
    with tempfile.TemporaryDirectory() as folder:
        costs(Path(folder), options.steps) if options.cost else faults(Path(folder), options.repeats)
    ray.shutdown()


def faults(folder: Path, repeats: int) -> None:
    steps = 3 * repeats + 3
    keys = [*RAY, *APART, ROLES, "--train.steps", str(steps), "--train.prompts_per_step", "4", "--checkpoint.every"]
    expected = weights(run(folder / "clean", "reverse", [*keys, str(steps)]))
    print(f"| fault ({repeats} each) | median s | worst s | seen within, worst s | steps done again | same weights |")
    print("|---|---|---|---|---|---|", flush=True)
    for number, (name, (what, who, signals)) in enumerate(KINDS.items()):
        struck_s: list[float] = []
        planned = [Fault(what, 3 * (i + 1), who, signals) for i in range(repeats)]
        with striking(*planned, when=struck_s):
            path = run(folder / str(number), "reverse", [*keys, "1" if what == "actor.save" else str(steps)])
        events = [json.loads(line) for line in (path / "recoveries.jsonl").read_text().splitlines()]
        took = [event["unix_s"] - struck for event, struck in zip(events, struck_s, strict=True)]
        found, again = weights(path), sum(event["after"] - event["step"] for event in events)
        same = all(torch.equal(expected[key], found[key]) for key in expected)
        seen = max(event["seen_s"] for event in events)
        times = f"{statistics.median(took):.1f} | {max(took):.1f} | {seen:.1f}"
        print(f"| {name} | {times} | {again} | {'yes' if same else 'NO'} |", flush=True)


PARTS: dict[str, tuple[tuple[type, str], ...]] = {
    "snapshots": ((Recovery, "__call__"),),
    "ledger": tuple((Ledger, name) for name in ("issued", "made", "learned", "write", "__call__")),
    "guards": ((Guards, "look"),),
    "health checks": ((Watch, "look"),),
}
"""what the driver calls in the loop so that nothing is lost"""


def costs(folder: Path, steps: int) -> None:
    print(f"| run | steps | seconds | {' | '.join(PARTS)} | all |")
    print("|---|---|---|" + "---|" * (len(PARTS) + 1))
    for name in ("reverse", "cartpole"):
        spent = dict.fromkeys(PARTS, 0.0)
        with ExitStack() as stack:
            for part, methods in PARTS.items():
                for owner, method in methods:
                    stack.enter_context(mock.patch.object(owner, method, timed(getattr(owner, method), part, spent)))
            path = run(folder / name, name, [*RAY, "--placement.pools", "{main = 2}", "--train.steps", str(steps)])
        records = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        total = sum(record.get("time/step_s", 0.0) for record in records)
        shares = [f"{seconds / total:.2%}" for seconds in (*spent.values(), sum(spent.values()))]
        print(f"| `examples/{name}.toml` | {steps} | {total:.1f} | {' | '.join(shares)} |", flush=True)


def timed(method: Callable[..., Any], part: str, spent: dict[str, float]) -> Callable[..., Any]:
    """The method, whose wall seconds are added to those of ``part``; inner calls count once."""

    @wraps(method)
    def run(*arguments: Any, **named: Any) -> Any:
        start, before = time.perf_counter(), spent[part]
        try:
            return method(*arguments, **named)
        finally:
            spent[part] = before + time.perf_counter() - start

    return run


def run(path: Path, example: str, keys: list[str]) -> Path:
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        assert train(load_config(EXAMPLES / f"{example}.toml", ["--run_dir", str(path), *keys])) == 0
    return path


def weights(path: Path) -> dict[str, torch.Tensor]:
    with PieceReader(checkpoint.latest(path / "checkpoints") / "actor") as reader:
        return {name: reader.full(name) for name in reader.names()}


if __name__ == "__main__":
    main()
