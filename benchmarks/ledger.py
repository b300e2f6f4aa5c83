"""What the ledger costs: its share of a run's processor time, and its file.

python benchmarks/ledger.py
"""

from __future__ import annotations

import tempfile
import time
from functools import wraps
from pathlib import Path
from typing import Any

from hybridflow.config import load_config
from hybridflow.launch import train
from hybridflow.ledger import Ledger

RUNS = (("dqn_cartpole", 1000), ("sac_pendulum", 150), ("cartpole", 10), ("reverse", 20))
"""examples, those with the shortest steps first, and steps"""
spent_s = 0.0


def timed(name: str) -> None:
    method = getattr(Ledger, name)

    @wraps(method)
    def run(*arguments: Any) -> Any:
        global spent_s
        start, before = time.process_time(), spent_s
        try:
            return method(*arguments)
        finally:
            spent_s = before + time.process_time() - start  # inner calls count once

    setattr(Ledger, name, run)


def main() -> None:
    global spent_s
    for name in ("issued", "made", "learned", "write", "__call__"):
        timed(name)
    examples, lines = Path(__file__).parent.parent / "examples", []
    for name, steps in RUNS:
        with tempfile.TemporaryDirectory() as folder:
            keys = {"run_dir": f"{folder}/run", "train.steps": steps, "evaluation.limit": 1, "threads": 1}
            config = load_config(
                examples / f"{name}.toml", [part for key, value in keys.items() for part in (f"--{key}", str(value))]
            )
            spent_s, start = 0.0, time.process_time()
            train(config)
            took_s, size = time.process_time() - start, Path(folder, "run", "ledger.sqlite").stat().st_size
            told = f"{spent_s / steps * 1e6:.0f} us a step, {size / steps:.0f} bytes a step"
            lines.append(f"{name}: {spent_s / took_s:.2%} of {took_s:.1f} CPU-s, {told}")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
