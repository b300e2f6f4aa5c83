"""What the ledger costs: its share of a run's processor time, and its file, in the table of docs/reliability.md.

    python benchmarks/ledger.py

``SHORT=10`` trains for a tenth of the steps, to see that it works.
"""

from __future__ import annotations

import os
import tempfile
import time
from contextlib import redirect_stdout
from functools import wraps
from pathlib import Path
from typing import Any

from hybridflow.config import load_config
from hybridflow.launch import train
from hybridflow.ledger import Ledger

RUNS = (("dqn_cartpole", 1000), ("sac_pendulum", 150), ("cartpole", 10), ("reverse", 20))
"""examples, those with the shortest steps first, and steps"""
SHORT = int(os.environ.get("SHORT", 1))
spent_s = 0.0


def timed(name: str) -> None:
    method = getattr(Ledger, name)

    @wraps(method)
    def run(*arguments: Any, **named: Any) -> Any:
        global spent_s
        start, before = time.process_time(), spent_s
        try:
            return method(*arguments, **named)
        finally:
            spent_s = before + time.process_time() - start  # inner calls count once

    setattr(Ledger, name, run)


def main() -> None:
    global spent_s
    for name in ("issued", "made", "learned", "write", "__call__"):
        timed(name)
    examples = Path(__file__).parent.parent / "examples"
    print("| run | steps | CPU-s | of them the ledger | a step | bytes a step |", "|---|---|---|---|---|---|", sep="\n")
    for name, whole in RUNS:
        steps = max(1, whole // SHORT)
        with tempfile.TemporaryDirectory() as folder:
            keys = {"run_dir": f"{folder}/run", "train.steps": steps, "evaluation.limit": 1, "threads": 1}
            config = load_config(
                examples / f"{name}.toml", [part for key, value in keys.items() for part in (f"--{key}", str(value))]
            )
            spent_s, start = 0.0, time.process_time()
            with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
                assert train(config) == 0
            took_s, size = time.process_time() - start, Path(folder, "run", "ledger.sqlite").stat().st_size
            told = f"{spent_s / took_s:.2%} | {spent_s / steps * 1e3:.2f} ms | {size / steps:.0f}"
            print(f"| `examples/{name}.toml` | {steps:,} | {took_s:.1f} | {told} |", flush=True)


if __name__ == "__main__":
    main()
