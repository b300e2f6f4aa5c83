"""The same training under each schedule, on the same workers, in turns: seconds a step, and what was learned.

    python benchmarks/schedules.py [--tasks reverse,addition] [--schedules sync,async] [--seeds 5] [--steps N] [--json]

"sync together": all roles on all workers, rollout and learning in turns. The others have one worker that learns and others
that draw responses: "sync", "one step off", "async" (2 steps ahead, responses go on with new weights) and "async whole"
(new weights wait until responses have ended). Each worker has one thread of torch. Lengths of responses are skewed:
"reverse" is a fresh model of about 0.4M parameters on digits that has 48 tokens of room and learns to stop after 9;
"addition" is SmolLM2-135M with 24 tokens of room.

"predicted" is what the "sync" runs come to if those who learn and those who draw work side by side: the busier of both sets
the pace, or the cores, where all processes together (driver and Ray, too) have more to do in a step than these can. Wall
seconds, without the first two steps; "cores": that are busy with the run, of those that there are; "score": of held-out
prompts, mean and 95 % interval over seeds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from hybridflow.core.config import toml_value
from hybridflow.telemetry.graph_tables import aligned
from hybridflow.telemetry.records import read_records
from hybridflow.telemetry.result import mean_interval
from hybridflow.telemetry.timeline import WAITS, read_timeline

WARMUP = 2
REVERSE: dict[str, Any] = {
    "actor": {"fresh": {"hidden_size": 128, "num_layers": 2, "num_heads": 4, "rope_theta": 16}, "optimizer": {"lr": 1e-3}},
    "data": {"task": "reverse", "options": {"length": 8}},
    "loss": {"entropy_coef": 0.1},
    "generation": {"max_new_tokens": 48},
    "train": {"steps": 150, "prompts_per_step": 16, "group_size": 8},
}
ADDITION: dict[str, Any] = {
    "actor": {
        "model": "smollm2-135m",
        "dtype": "bfloat16",
        "optimizer": {"lr": 2e-5, "freeze": ["embed*", "layers.[0-9].*", "layers.1[0-4].*"]},
    },
    "data": {"task": "addition"},
    "generation": {"max_new_tokens": 24},
    "train": {"steps": 20, "prompts_per_step": 8, "group_size": 8},
    "evaluation": {"limit": 100},
}
TASKS = {"reverse": REVERSE, "addition": ADDITION}
SCHEDULES: dict[str, dict[str, Any]] = {
    "sync together": {},
    "sync": {},
    "one step off": {"kind": "one_step_off"},
    "async": {"kind": "async", "max_staleness": 2},
    "async whole": {"kind": "async", "max_staleness": 2, "partial_rollouts": False},
}


def config_of(task: str, name: str, workers: int, seed: int, steps: int, run_dir: Path) -> dict[str, Any]:
    """The configuration of a run with so many workers."""
    data = {"algorithm": "grpo", "threads": 1, **TASKS[task], "seed": seed, "run_dir": str(run_dir)}
    data["train"] = {**data["train"], **({"steps": steps} if steps else {})}
    data["runtime"] = {"kind": "ray"}
    if name == "sync together":
        return {**data, "placement": {"pools": {"main": workers}}}
    roles = {"actor": "learners", "reward": "learners", "sampler": "samplers"}
    placement = {"pools": {"learners": 1, "samplers": workers - 1}, "roles": roles}
    return {**data, "placement": placement, **({"schedule": SCHEDULES[name]} if SCHEDULES[name] else {})}


def run(task: str, name: str, workers: int, seed: int, steps: int) -> dict[str, float]:
    """One run: seconds a step, the score at the end, and busy seconds a step of each pool."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        config = config_of(task, name, workers, seed, steps, run_dir)
        file = Path(folder) / "run.toml"
        file.write_text("".join(f"{key} = {toml_value(value)}\n" for key, value in config.items()))
        command = [sys.executable, "-m", "hybridflow.cli", "train", str(file)]
        with open(Path(folder) / "log", "w+") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
            cpu_s = _cpu_seconds(process, run_dir / "metrics.jsonl")
            log.seek(0)
            if process.returncode:
                raise SystemExit(f"{task}, {name}, seed {seed}: exit code {process.returncode}\n{log.read()[-2000:]}")
        after = json.loads((run_dir / "result.json").read_text())["after"]
        records = [line for line in read_records(run_dir / "metrics.jsonl") if "time/step_s" in line][WARMUP:]
        busy = _busy(read_timeline(run_dir / "timeline.json"), len(records))
    step_s = statistics.fmean(line["time/step_s"] for line in records)
    return {"step_s": step_s, "score": after["eval/score"], "cpu_s": cpu_s, **busy}


def _cpu_seconds(process: subprocess.Popen[Any], metrics: Path) -> float:
    """Seconds of a processor a step that a run and all that it has started take after the warm-up; waits for its end."""
    seen: list[float] = []  # after each step
    while process.poll() is None:
        time.sleep(0.02)
        steps = metrics.read_text().count('"time/step_s"') if metrics.exists() else 0
        if steps > len(seen):
            seen += [_cpu_so_far(process.pid)] * (steps - len(seen))
    return (seen[-1] - seen[WARMUP - 1]) / (len(seen) - WARMUP) if len(seen) > WARMUP else 0.0


def _cpu_so_far(pid: int) -> float:
    """Seconds of a processor that a process and all that it has started have taken."""
    seconds = 0.0
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for one in (root, *root.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                times = one.cpu_times()
                seconds += times.user + times.system
    return seconds


def _busy(events: Sequence[Mapping[str, Any]], steps: int) -> dict[str, float]:
    """Seconds a step in which the first worker of each pool computes, without evaluations."""
    pools = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    first = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name" and e["args"]["name"] == "worker 0"}
    busy: dict[str, float] = {}
    for event in events:
        counts = event["ph"] == "X" and event["cat"] not in (*WAITS, "evaluation")
        if counts and (event["pid"], event["tid"]) in first and event["args"]["step"] > WARMUP:
            pool = pools[event["pid"]].removeprefix("pool ")
            busy[pool] = busy.get(pool, 0.0) + event["dur"] / 1e6 / steps
    return busy


def predicted(sync: Sequence[Mapping[str, float]]) -> float:
    """Seconds of a step with learners and samplers side by side, from runs in which they take turns."""
    pools = [{pool: one[pool] for pool in ("learners", "samplers")} for one in sync]
    gaps = [one["step_s"] - sum(busy.values()) for one, busy in zip(sync, pools, strict=True)]
    cores = len(os.sched_getaffinity(0))
    pace = [max(busy.values()) + gap for busy, gap in zip(pools, gaps, strict=True)]
    return statistics.fmean(max(seconds, one["cpu_s"] / cores) for seconds, one in zip(pace, sync, strict=True))


def rows(task: str, results: Mapping[str, Sequence[Mapping[str, float]]]) -> list[tuple[str, ...]]:
    """A line of the table for each schedule."""
    turns = statistics.fmean(one["step_s"] for one in results["sync"])
    expected, out = predicted(results["sync"]), []
    for name, runs in results.items():
        step_s = statistics.fmean(one["step_s"] for one in runs)
        mean, low, high = mean_interval([one["score"] for one in runs])
        guess = f"{turns / expected:.2f}" if name not in ("sync", "sync together") else ""
        cores = f"{statistics.fmean(one['cpu_s'] / one['step_s'] for one in runs):.1f}"
        score = f"{mean:.3f} ({low:.3f} to {high:.3f})"
        out.append((task, name, f"{step_s:.3f}", cores, f"{turns / step_s:.2f}", guess, score))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument(
        "--schedules", default=",".join(SCHEDULES), help="among them sync, which the others are compared with"
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=0, help="0: as the task says")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    results: dict[str, dict[str, list[dict[str, float]]]] = {}
    for task in options.tasks.split(","):
        of_task = results[task] = {name: [] for name in options.schedules.split(",")}
        for seed in range(1, options.seeds + 1):
            for name, runs in of_task.items():
                runs.append(run(task, name, options.workers, seed, options.steps))
                print(f"{task}, {name}, seed {seed}: {runs[-1]['step_s']:.3f} s", file=sys.stderr, flush=True)
    header = ("task", "schedule", "s a step", "cores", "gain", "predicted", "score")
    table = [header, *(row for task, of_task in results.items() for row in rows(task, of_task))]
    print(json.dumps(results, indent=2) if options.json else "\n".join(aligned(table, right=header[2:6])))


if __name__ == "__main__":
    main()
