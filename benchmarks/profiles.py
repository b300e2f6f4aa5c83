"""Predictions from task profiles against what runs then take, at sizes that were not profiled.

    python benchmarks/profiles.py [--steps 6] [--only 5m] [--out runs/profiles]

Each configuration is profiled (``hybridflow profile``: a quarter, half, once and twice its rows), in a base of its own.
Then it is trained at 0.75 and 3 times its rows, with one thread and with all cores: sizes that nobody measured, the second
beyond all that were. Every task that takes a hundredth of a step or more is a row: medians over its calls of measured
seconds, of what is said about a call of that size from the profile alone, and of one by the other; "CPU-s off" is the same
of processor seconds, which other work on the machine disturbs less.

    5m          GRPO, 5M parameters from random weights in float32, on "reverse"
    smollm2     GRPO, SmolLM2-135M in bfloat16, of which the upper half is trained, on "addition"
    pendulum    PPO in Pendulum-v1

The exit code is 1 if the median error is 15 % or more. Runs want the machine for themselves: "busy" has the cores that
other work took before each of them. About 15 minutes on two cores.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from hybridflow.build_profile import base_here
from hybridflow.commands.profile import SOURCE
from hybridflow.config import resolved, validate
from hybridflow.models.sources import cache_home
from hybridflow.planner.profile_base import ProfileBase, Sample
from hybridflow.telemetry.graph_tables import aligned
from hybridflow.telemetry.records import read_records
from hybridflow.telemetry.rundir import RunDirectory

TEXT = {"algorithm": "grpo", "kl": {"coef": 0.01}, "evaluation": {"limit": 2}}
RUNS: dict[str, dict[str, Any]] = {
    "5m": {
        **TEXT,
        "actor": {"fresh": {"hidden_size": 256, "num_layers": 6, "num_heads": 8}},
        "data": {"task": "reverse", "options": {"length": 12}},
        "generation": {"max_new_tokens": 28},
        "train": {"prompts_per_step": 8, "group_size": 8, "minibatches": 2},
    },
    "smollm2": {
        **TEXT,
        "actor": {
            "model": "smollm2-135m",
            "dtype": "bfloat16",
            "optimizer": {"freeze": ["embed*", "layers.[0-9].*", "layers.1[0-4].*"]},
        },
        "data": {"task": "addition"},
        "generation": {"max_new_tokens": 8},
        "train": {"prompts_per_step": 4, "group_size": 8, "minibatches": 2},
    },
    "pendulum": {
        "algorithm": "ppo",
        "environment": {"id": "Pendulum-v1", "num_envs": 8, "steps_per_rollout": 256},
        "train": {"epochs": 4, "minibatches": 4},
        "evaluation": {"limit": 1},
    },
}
TIMES = (0.75, 3.0)
ENOUGH, TARGET = 0.01, 0.15


def command(*arguments: object) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hybridflow.cli", *map(str, arguments)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{arguments}: {(done.stdout + done.stderr)[-2000:]}")


def measure(name: str, out: Path, steps: int) -> Iterator[tuple[str, ...]]:
    """Profile, train at other sizes; a row for each task of those."""
    data = RUNS[name]
    file = out / f"{name}.toml"
    file.write_text(resolved(validate({**data, "run_dir": name}, name)))
    command("profile", file)
    print(f"{name}: profiled", flush=True)
    key = "environment.num_envs" if "environment" in data else "train.prompts_per_step"
    section, _, last = key.partition(".")
    for times in TIMES:
        for threads in sorted({1, os.cpu_count() or 1}):
            busy = psutil.cpu_percent(1.0) / 100 * (psutil.cpu_count() or 1)
            run, size = out / f"{name}-{times:g}-{threads}", round(times * data[section][last])
            command("train", file, "--run_dir", run, f"--{key}", size, "--threads", threads, "--train.steps", steps)
            for task, (took, said, off, spread, cpu_off) in compared(run).items():
                shown = (f"{took:.4f}", f"{said:.4f}", f"{off - 1:+.0%}", f"{spread:.2f}", f"{cpu_off - 1:+.0%}")
                shown = (*shown, f"{busy:.1f}")
                yield name, f"x {times:g}", str(threads), task, *shown


def compared(run: Path) -> dict[str, tuple[float, ...]]:
    """By task: medians of seconds, of what is predicted from the profile alone, of one by the other, of the spread, and of
    predicted processor seconds by measured ones."""
    source, base = str(run.resolve()), base_here()
    known, step_s = [one for one in base.samples if one.source == SOURCE], _step_s(run)
    profiled = ProfileBase(base.path, base.machine, known)  # of other runs here, some had this size
    found = dict[str, tuple[float, ...]]()
    for verb in dict.fromkeys(one.verb for one in base.samples if one.source == source):
        mine = [one for one in base.samples if one.source == source and one.verb == verb]
        if sum(one.seconds for one in mine) > ENOUGH * step_s * len(mine):
            guesses = [_guess(profiled, one) for one in mine]
            took = [one.seconds for one in mine]
            off = [guess.seconds / seconds for guess, seconds in zip(guesses, took, strict=True)]
            cpu_off = [guess.cpu_seconds / max(one.cpu_s, 1e-6) for guess, one in zip(guesses, mine, strict=True)]
            said, spread = [one.seconds for one in guesses], [one.spread for one in guesses]
            found[verb] = tuple(map(statistics.median, (took, said, off, spread, cpu_off)))
    return found


def _guess(base: ProfileBase, one: Sample) -> Any:
    size = {"rows": one.rows, "tokens": one.tokens, "threads": one.threads, "workers": one.workers}
    return base.predict(one.verb, device=one.device, model=one.model, **size)  # type: ignore[arg-type]


def _step_s(run: Path) -> float:
    records = [record for record in read_records(RunDirectory.open(run).metrics) if "time/step_s" in record]
    return statistics.median(record["time/step_s"] for record in records)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/profiles"))
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--only", default="", help="configurations whose names begin so")
    options = parser.parse_args()
    options.out.mkdir(parents=True)
    models, home = cache_home() / "models", options.out.resolve() / "home"
    home.mkdir()
    (home / "models").symlink_to(models.resolve())
    os.environ["HYBRIDFLOW_HOME"] = str(home)
    header = ("model", "rows", "threads", "task", "measured s", "predicted s", "off", "spread", "CPU-s off", "busy")
    rows = [row for name in RUNS if name.startswith(options.only) for row in measure(name, options.out, options.steps)]
    print("\n".join(aligned([header, *rows], right=header[4:])))
    for name in (*dict.fromkeys(row[0] for row in rows), ""):
        mine = [row for row in rows if name in ("", row[0])]
        errors, cpu = ([abs(float(row[place].rstrip("%")) / 100) for row in mine] for place in (6, 8))
        told = f"median error {statistics.median(errors):.0%}, worst {max(errors):.0%} of {len(errors)}"
        print(f"{name or 'all'}: {told}; of processor seconds {statistics.median(cpu):.0%}, worst {max(cpu):.0%}")
    return int(statistics.median(errors) >= TARGET)


if __name__ == "__main__":
    sys.exit(main())
