"""What the planner predicts of runs on this machine, against what they take: Ray workers, two cores or more.

    python benchmarks/planner_here.py [--out runs/planner_here] [--rounds 2] [--steps 5] [--only grpo-5m] [--read]

The machine is probed, then every run is trained for some steps, all of them in turns, ROUNDS times over. The constants of
the cost model are fitted to the runs of ``CALIBRATION`` alone; all others are predicted with these, from their own lengths
of prompts and responses and nothing else that was measured. --read prints the tables of runs that are there.

Models: one of 5M parameters from random weights in float32 on the task "reverse", and SmolLM2-135M in bfloat16, whose upper
half is trained, on "addition". Placements:

    alone      one worker that has one core          one       one worker that has all cores
    together   two workers, all roles on both        split     actor, sampler and reference on one, critic on the other
    judged     actor and sampler on one, critic and reference on the other
    helped     all but the reference on one, the reference on the other
    drawn      the sampler alone on one, all others on the other
    tensor     two workers, the actor cut into two (tp = 2), the reference on both
    pipeline   two workers, the actor in two stages (pp = 2), the reference on both

The runs want the machine for themselves: the last table has the cores that other work kept busy before each.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import psutil

from hybridflow.build_compare import Measured, Predicted, measured, observed, predicted, run_cluster
from hybridflow.config import RunConfig, resolved, validate
from hybridflow.planner.calibrate import Fitted, Observation, calibrate, here_start
from hybridflow.planner.hardware import load_probe, save_probe
from hybridflow.planner.probe import measure
from hybridflow.telemetry.graph_tables import aligned

MODELS: dict[str, dict[str, Any]] = {
    "5m": {
        "actor": {"fresh": {"hidden_size": 256, "num_layers": 6, "num_heads": 8}},
        "data": {"task": "reverse", "options": {"length": 12}},
        "generation": {"max_new_tokens": 28},
        "train": {"prompts_per_step": 128},
    },
    "smollm2": {
        "actor": {
            "model": "smollm2-135m",
            "dtype": "bfloat16",
            "optimizer": {"freeze": ["embed*", "layers.[0-9].*", "layers.1[0-4].*"]},
        },
        "data": {"task": "addition"},
        "generation": {"max_new_tokens": 8},
        "train": {"prompts_per_step": 64},
    },
}
CRITIC = {"smollm2": {"optimizer": {"freeze": ["embed*", "layers.[0-9].*", "layers.1[0-4].*"]}}, "5m": {}}
GROUP = 8
PLACEMENTS: dict[str, dict[str, Any]] = {
    "alone": {"pools": {"main": 1}},
    "one": {"pools": {"main": 1}},
    "together": {"pools": {"main": 2}},
    "split": {"pools": {"a": 1, "b": 1}, "roles": {"actor": "a", "reference": "a", "critic": "b", "reward": "b"}},
    "judged": {"pools": {"a": 1, "b": 1}, "roles": {"actor": "a", "reference": "b", "critic": "b", "reward": "b"}},
    "helped": {
        "pools": {"a": 1, "b": 1},
        "roles": {"actor": "a", "critic": "a", "reference": "b", "reward": "b"},
    },
    "drawn": {
        "pools": {"a": 1, "b": 1},
        "roles": {"sampler": "b", "actor": "a", "reference": "a", "critic": "a", "reward": "a"},
    },
}
for cut in ("tensor", "pipeline"):
    PLACEMENTS[cut] = PLACEMENTS["together"]
MESHES = {"tensor": {"tp": 2}, "pipeline": {"pp": 2}}
THREADS = {"alone": 1}
CALIBRATION = ("grpo-5m-alone", "grpo-smollm2-alone")
ORDERED = {model: [f"ppo-{model}-{placement}" for placement in ("split", "judged", "helped", "drawn")] for model in MODELS}
RUNS = (
    *(f"grpo-{model}-{placement}" for model in MODELS for placement in ("alone", "one", "together", *MESHES)),
    *(f"ppo-{model}-{placement}" for model in MODELS for placement in ("one", "together")),
    *(name for names in ORDERED.values() for name in names),
)
FAR = 0.25
APART = 0.1
"""of two steps, what the shorter one takes less, for their order to count"""


def config_of(name: str, steps: int) -> RunConfig:
    """Of a run by its name, ALGORITHM-MODEL-PLACEMENT."""
    algorithm, model, placement = name.split("-")
    data = json.loads(json.dumps(MODELS[model]))
    data["train"] |= {"steps": steps, "minibatches": 2}
    data["actor"]["mesh"] = MESHES.get(placement, {})
    if algorithm == "grpo":
        data["train"] |= {"group_size": GROUP, "prompts_per_step": data["train"]["prompts_per_step"] // GROUP}
    else:
        data["critic"] = CRITIC[model]
    return validate(
        {
            "algorithm": algorithm,
            "run_dir": name,
            "threads": THREADS.get(placement, 0),
            "kl": {"coef": 0.01},
            **data,
            "runtime": {"kind": "ray"},
            "placement": PLACEMENTS[placement],
            "evaluation": {"limit": 2},
        },
        name,
    )


def train(name: str, steps: int, out: Path, number: int) -> None:
    """Train in a process of its own; what kept the machine busy before goes beside the run."""
    path = out / f"{name}-{number}"
    busy = psutil.cpu_percent(1.0) / 100 * (psutil.cpu_count() or 1)
    config = out / f"{name}.toml"
    config.write_text(resolved(config_of(name, steps)))
    command = [sys.executable, "-m", "hybridflow.cli", "train", str(config), "--run_dir", str(path)]
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name}: {(done.stdout + done.stderr)[-2000:]}")
    (path / "busy.json").write_text(json.dumps(busy))
    print(f"round {number}  {name:22} {time.perf_counter() - start:5.1f} s  busy before: {busy:.2f} cores", flush=True)


def rounds_of(name: str, out: Path) -> list[Path]:
    return sorted(path for path in out.glob(f"{name}-*") if (path / "busy.json").exists())


def together(paths: Sequence[Path]) -> Measured:
    """Medians over the rounds of a run."""
    rounds = [measured(path) for path in paths]
    calls = {name: statistics.median(one.calls.get(name, 0.0) for one in rounds) for name in rounds[0].calls}
    return replace(rounds[0], step_s=statistics.median(one.step_s for one in rounds), calls=calls)


def compare(out: Path) -> int:
    """Print the tables; the exit code: 1 if a step is more than FAR off, or an order is wrong."""
    rounds = {name: rounds_of(name, out) for name in RUNS}
    found = {name: together(paths) for name, paths in rounds.items() if paths}
    seen = {name: observed(one, run_cluster(one.config), own={}) for name, one in found.items()}
    fitted_to = [seen[name] for name in CALIBRATION if name in seen]
    efficiency, fitted = calibrate(fitted_to, here_start(load_probe()))
    guesses = {name: predicted(one, efficiency) for name, one in seen.items()}
    show([_constant(name, fitted) for name in fitted.values])
    show([row for name in seen for row in _tasks(name, seen[name], guesses[name])])
    show([_step(name, seen[name], guesses[name], rounds[name]) for name in seen])
    off = {name: abs(guesses[name].step_s / one.step_s - 1) for name, one in seen.items() if name not in CALIBRATION}
    print(f"held out: median {statistics.median(off.values()):.1%}, worst {max(off.values()):.1%} of {len(off)} runs")
    times = {name: (seen[name].step_s, guesses[name].step_s) for name in seen}
    right = [_in_order(names, times) for names in ORDERED.values() if all(name in times for name in names)]
    pairs = [
        pair for model in MODELS for pair in _apart([name for name in times if name.startswith(f"ppo-{model}")], times)
    ]
    print(
        f"of {len(pairs)} pairs of all placements that took {APART:.0%} or more longer than each other, {sum(pairs)} right"
    )
    return int(max(off.values()) > FAR or not all(right))


def show(rows: Sequence[dict[str, str]]) -> None:
    print("\n".join((*aligned([tuple(rows[0]), *(tuple(row.values()) for row in rows)], right=()), "")))


def _constant(name: str, fitted: Fitted) -> dict[str, str]:
    told = "" if name in fitted.determined else "not determined"
    return {"constant": name, "value": f"{fitted.values[name]:.3g}", "x or /": f"{fitted.spread[name]:.2f}", "": told}


def _tasks(name: str, one: Observation, guess: Predicted) -> Iterator[dict[str, str]]:
    for task, seconds in one.seconds.items():
        if seconds > 0.01 * one.step_s:
            estimate = guess.estimates[task]
            largest = sorted(estimate.parts.items(), key=lambda part: -part[1])[:3]
            yield {
                "run": name,
                "task": task,
                "measured": f"{seconds:.3f} s",
                "predicted": f"{estimate.seconds:.3f} s",
                "off": f"{estimate.seconds / seconds - 1:+.0%}",
                "mostly": ", ".join(f"{part} {value:.3f}" for part, value in largest),
            }


def _step(name: str, one: Observation, guess: Predicted, rounds: Sequence[Path]) -> dict[str, str]:
    times, busy = (
        [measured(path).step_s for path in rounds],
        [json.loads((path / "busy.json").read_text()) for path in rounds],
    )
    return {
        "run": name,
        "measured": f"{one.step_s:.3f} s",
        "rounds": " ".join(f"{seconds:.3f}" for seconds in times),
        "predicted": f"{guess.step_s:.3f} s",
        "off": f"{guess.step_s / one.step_s - 1:+.1%}",
        "": "calibrated on" if name in CALIBRATION else "",
        "busy before": " ".join(f"{cores:.1f}" for cores in busy),
    }


def _in_order(names: Sequence[str], times: Mapping[str, tuple[float, float]]) -> bool:
    """Whether the order of placements by prediction is that by measurement; prints both."""
    orders = [sorted(names, key=lambda name: times[name][way]) for way in range(2)]
    for what, way, order in (("measured ", 0, orders[0]), ("predicted", 1, orders[1])):
        shown = " < ".join(f"{name.split('-')[2]} {times[name][way]:.2f} s" for name in order)
        print(f"{names[0].rpartition('-')[0]}, {what}: {shown}")
    return orders[0] == orders[1]


def _apart(names: Sequence[str], times: Mapping[str, tuple[float, float]]) -> Iterator[bool]:
    """Of every two runs that are far enough apart: whether they are predicted in their order."""
    for one, other in combinations(sorted(names, key=lambda name: times[name][0]), 2):
        if times[one][0] < (1 - APART) * times[other][0]:
            yield times[one][1] < times[other][1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/planner_here"))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--only", default="", help="runs whose names begin so")
    parser.add_argument("--read", action="store_true", help="print the tables of what is there")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if not options.read:
        save_probe(measure())
        first = len(rounds_of(RUNS[0], options.out))
        for number in range(first, first + options.rounds):
            for name in RUNS:
                if name.startswith(options.only):
                    train(name, options.steps, options.out, number)
    return compare(options.out)


if __name__ == "__main__":
    sys.exit(main())
