"""Recovery from 69 faults of 22 kinds: how long until each is seen, and until the run goes on, with tiny runs.

    python benchmarks/chaos.py [--only local,ray ...] [--json]

Each case is one ``hybridflow chaos`` of a configuration below: in one process, on one Ray node, on three. Prints the
table of docs/reliability.md: by kind, how many, and the median and worst of both times in seconds. Times are wall time and
grow with what else the machine does; a fault of the driver costs a start of Python and torch.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from hybridflow.core.config import toml_value

TINY = {"fresh": {"hidden_size": 32}, "optimizer": {"lr": 1e-3}}
SAVED = {"every": 1, "keep": 3}
REVERSE: dict[str, Any] = {
    "algorithm": "grpo",
    "threads": 1,
    "actor": TINY,
    "data": {"task": "reverse", "options": {"length": 3}},
    "generation": {"max_new_tokens": 4},
    "train": {"prompts_per_step": 4, "group_size": 4, "minibatches": 2},
    "reward": {"retries": 1, "timeout_s": 2.0, "workers": 1},
    "evaluation": {"limit": 4},
    "checkpoint": SAVED,
}
MANY = {**REVERSE, "train": {"prompts_per_step": 32, "group_size": 16, "minibatches": 2}}  # 512 a step
CARTPOLE: dict[str, Any] = {
    "algorithm": "ppo",
    "threads": 1,
    "ppo": {"gamma": 0.99},
    "environment": {"id": "CartPole-v1", "num_envs": 4, "steps_per_rollout": 64},
    "train": {"minibatches": 2},
    "evaluation": {"limit": 2},
    "checkpoint": SAVED,
}
REPLAY: dict[str, Any] = {
    **CARTPOLE,
    "algorithm": "dqn",
    "train": {"updates_per_step": 4},
    "replay": {"capacity": 2000, "batch_size": 16, "warmup": 64, "priority": 0.6},
}
del REPLAY["ppo"]
APART = {
    "runtime": {"kind": "ray"},
    "placement": {
        "pools": {"learning": 2, "sampling": 1},
        "roles": {"actor": "learning", "reward": "sampling", "sampler": "sampling"},
    },
}
TOGETHER = {"runtime": {"kind": "ray"}, "placement": {"pools": {"main": 2}}}
SPREAD = {"runtime": {"kind": "ray"}, "placement": {"pools": {"main": [1, 1]}}}
ASYNC: dict[str, Any] = {
    **CARTPOLE,
    "algorithm": "impala",
    "environment": {**CARTPOLE["environment"], "workers": 2},
    "train": {},
    "runtime": {"kind": "ray"},
    "placement": {
        "pools": {"learning": 1, "acting": 2},
        "roles": {"actor": "learning", "critic": "learning", "sampler": "acting"},
    },
}
del ASYNC["ppo"]

DRIVER = ("kill-driver", "kill-driver-saving", "terminate-driver", "pause-driver", "kill-everything")
FILES = ("flip-checkpoint", "truncate-checkpoint", "delete-checkpoint-file", "delete-manifest", "fill-disk")
REWARDS = ("kill-reward", "stop-reward")
ENVIRONMENTS = ("kill-environment", "stop-environment")
WORKERS = ("kill-worker", "kill-worker-saving", "stop-worker", "pause-worker", "slow-worker", "kill-pool")
NODES = ("kill-node", "disconnect-node")


class Case(NamedTuple):
    """A configuration, the steps that it does, and what befalls it: ``faults`` of these ``kinds``."""

    config: dict[str, Any]
    kinds: tuple[str, ...]
    faults: int
    steps: int = 60
    nodes: int = 0


def with_processes(config: dict[str, Any]) -> dict[str, Any]:
    """Its environments are stepped by two processes."""
    return {**config, "environment": {**config["environment"], "processes": 2, "timeout_s": 8.0}}


CASES = {
    "local environments": Case(with_processes(CARTPOLE), (*DRIVER, *FILES, *ENVIRONMENTS), 12),
    "local rewards": Case(REVERSE, (*REWARDS, "kill-driver", "pause-driver"), 8),
    "local replay": Case(REPLAY, ("kill-driver", "kill-driver-saving", "flip-checkpoint", "terminate-driver"), 4),
    "ray pools": Case({**REVERSE, **APART}, (*WORKERS, *REWARDS, "kill-driver", "terminate-driver", "fill-disk"), 14),
    "ray environments": Case({**CARTPOLE, **TOGETHER}, (*WORKERS, "kill-driver", "kill-everything"), 8, steps=150),
    "ray asynchronous": Case(ASYNC, ("kill-worker", "kill-pool", "kill-driver", "pause-worker"), 4, steps=150),
    "local, 30,000 samples": Case(MANY, ("kill-driver", "kill-driver-saving", *REWARDS, "terminate-driver"), 5),
    "three nodes, learning": Case(
        {**REVERSE, **SPREAD}, (*NODES, "kill-worker", "kill-pool", "kill-driver"), 8, steps=300, nodes=3
    ),
    "three nodes, environments": Case(
        {**CARTPOLE, **SPREAD}, (*NODES, "stop-worker", "slow-worker"), 6, steps=300, nodes=3
    ),
}


def written(name: str, folder: Path) -> Path:
    """The configuration of a case, in a file."""
    case, place = CASES[name], folder / name.replace(" ", "-").replace(",", "")
    config = {**case.config, "run_dir": str(place), "train": {**case.config["train"], "steps": case.steps}}
    file = place.with_suffix(".toml")
    file.write_text("".join(f"{key} = {toml_value(value)}\n" for key, value in config.items()))
    return file


def run(name: str, folder: Path) -> tuple[int, dict[str, Any]]:
    """The exit code of ``hybridflow chaos``, and what it printed."""
    case = CASES[name]
    chaos = [sys.executable, "-m", "hybridflow.cli", "chaos", str(written(name, folder)), "--json"]
    given = {"--kinds": ",".join(case.kinds), "--faults": case.faults, "--nodes": case.nodes}
    command = [*chaos, *(str(word) for pair in given.items() for word in pair)]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"})
    return ran.returncode, json.loads(ran.stdout)


def table(faults: list[dict[str, Any]]) -> Iterator[str]:
    """By kind, in Markdown."""
    yield "| fault | times | seen after, s: median, worst | gone on after, s: median, worst |"
    yield "|---|---|---|---|"
    for kind in dict.fromkeys(fault["kind"] for fault in faults):
        of_kind = [fault for fault in faults if fault["kind"] == kind]
        seen = [fault["detect_s"] for fault in of_kind if fault["detect_s"] is not None]
        gone_on = [fault["recover_s"] for fault in of_kind if fault["recover_s"] is not None]
        yield f"| {kind} | {len(of_kind)} | {_times(seen)} | {_times(gone_on)} |"
    gone_on = [fault["recover_s"] for fault in faults if fault["recover_s"] is not None]
    yield f"| all | {len(faults)}, {len(gone_on)} recovered from | | {_times(gone_on)} |"


def _times(seconds: list[float]) -> str:
    return f"{median(seconds):.1f}, {max(seconds):.1f}" if seconds else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="words that the names of cases begin with, by commas")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    names = [name for name in CASES if name.startswith(tuple(options.only.split(",")))]
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            results[name] = run(name, Path(folder))
            print(f"{name}: exit code {results[name][0]}", file=sys.stderr, flush=True)
    faults = [fault for _, told in results.values() for fault in told["faults"]]
    print(json.dumps(results, indent=2) if options.json else "\n".join(table(faults)))
    return max(code for code, _ in results.values())


if __name__ == "__main__":
    sys.exit(main())
