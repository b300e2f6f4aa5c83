"""Replay buffers: rows inserted and drawn per CPU-second, on one thread, against Stable-Baselines3's.

    python -m venv sb3 && sb3/bin/pip install torch==2.13.0 "stable-baselines3==2.9.*"
    STEPS=16 python benchmarks/replay.py --sb3-python sb3/bin/python [--rounds 5] [--json]

Rows are transitions of 8 environments, of 4 floats ("small") or 84 x 84 x 4 bytes ("images"), in rollouts of ``STEPS``,
which SB3 is given step by step, as its loop does. Draws are of 256 rows and end as torch tensors on both sides; ours go
through the runtime and, of small rows, are 16 at once, as in runs with ``updates_per_step = 16``; "one draw": one by one.
"priorities": proportional, each draw by itself, with the priorities of what was drawn set anew, which SB3 doesn't have.
"spill": rows in memory-mapped files. Each side is a process of its own; they take turns round by round, so a loaded machine
slows all; a number is the median over the rounds but the first. ``resident`` is the process's anonymous memory after it, in
MB, less what it had before the buffer.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

ENVS, BATCH = 8, 256
STEPS = int(os.environ.get("STEPS", "16"))
CASES: dict[str, dict[str, Any]] = {
    "small": {"shape": (4,), "dtype": "float32", "capacity": 100_000, "rows": 51_200, "draws": 320, "at_once": 16},
    "images": {"shape": (84, 84, 4), "dtype": "uint8", "capacity": 4_000, "rows": 2_560, "draws": 10, "at_once": 1},
}
SIDES = ("uniform", "one draw", "priorities", "spill", "sb3")
Pair = tuple[Callable[[int], None], Callable[[int], None]]


def rollouts(case: dict[str, Any]) -> Iterator[dict[str, np.ndarray]]:
    """Time-major arrays [STEPS + 1, ENVS, ...], a few that come again and again."""
    random = np.random.default_rng(0)
    made = []
    for _ in range(4):
        size = (STEPS + 1, ENVS, *case["shape"])
        seen = random.integers(0, 255, size).astype(case["dtype"])
        actions, rewards = random.integers(0, 2, (STEPS, ENVS)), random.random((STEPS, ENVS)).astype(np.float32)
        made.append({"observations": seen, "actions": actions, "rewards": rewards})
    while True:
        yield from made


def ours(case: dict[str, Any], kind: str, folder: str) -> Pair:
    """(insert rows, draw batches) of a replay buffer on the local runtime."""
    import torch

    from hybridflow.controller.local_runtime import LocalRuntime
    from hybridflow.core.batch import Batch, Ragged
    from hybridflow.core.roles import Role
    from hybridflow.rollout.replay import Replay, ReplayConfig
    from hybridflow.workers.replay_rows import ReplayWorker

    frame = np.dtype((case["dtype"], case["shape"]))
    types = {"observations": frame, "actions": np.dtype(np.int64), "final_observations": frame}
    spill = folder if kind == "spill" else None
    runtime = LocalRuntime()
    rows = runtime.role(Role("replay", ReplayWorker, {"capacity": case["capacity"], "types": types, "spill": spill}))
    priority = 0.6 if kind == "priorities" else 0.0
    config = ReplayConfig(capacity=case["capacity"], batch_size=BATCH, warmup=1, priority=priority)
    at_once = 1 if kind in ("one draw", "priorities") else case["at_once"]
    replay = Replay(config, 0, 0.99, rows, num_draws=1000, draws=at_once)
    lengths, count = np.full(ENVS, STEPS), ENVS * STEPS

    def collected() -> Iterator[Batch]:
        """As the sampler of environments gives them: by environment and time."""
        together = []
        for rollout in rollouts(case):
            if len(together) < 4:
                by_env = {name: values[:STEPS].swapaxes(0, 1) for name, values in rollout.items()}
                flat = {name: values.reshape(count, *values.shape[2:]).copy() for name, values in by_env.items()}
                columns: dict[str, Any] = {name: Ragged(values, lengths) for name, values in flat.items()}
                columns |= {"response_mask": Ragged(np.ones(count, bool), lengths), "sample_id": np.arange(ENVS)}
                columns |= {name: np.zeros(ENVS, bool) for name in ("terminated", "truncated")}
                together.append(Batch({**columns, "final_observations": rollout["observations"][STEPS]}))
                if len(together) < 4:
                    continue
            while True:
                yield from together

    batches = collected()
    next(batches)

    def insert(number: int) -> None:
        for _ in range(number // count):
            replay.add(next(batches), 0)

    def draw(number: int) -> None:
        for _ in range(number // at_once):
            batch = replay.sample(0)
            assert batch is not None
            columns = {name: batch[name] for name in batch.columns}
            arrays = {name: column.values if isinstance(column, Ragged) else column for name, column in columns.items()}
            tensors = {name: torch.tensor(array) for name, array in arrays.items()}
            assert len(tensors["observations"]) == at_once * BATCH
            replay.learned(batch.with_columns(td_errors=batch["rewards"]))

    return insert, draw


def theirs(case: dict[str, Any]) -> Pair:
    """(insert rows, draw batches) of SB3's buffer."""
    from gymnasium import spaces
    from stable_baselines3.common.buffers import ReplayBuffer

    high = 255 if case["dtype"] == "uint8" else np.inf
    space = spaces.Box(0 if high == 255 else -high, high, case["shape"], np.dtype(case["dtype"]).type)
    replay = ReplayBuffer(case["capacity"], space, spaces.Discrete(2), device="cpu", n_envs=ENVS)
    source, done, infos = rollouts(case), np.zeros(ENVS, bool), [{} for _ in range(ENVS)]

    def insert(number: int) -> None:
        for _ in range(number // (ENVS * STEPS)):
            rollout = next(source)
            seen = rollout["observations"]
            for t in range(STEPS):
                replay.add(seen[t], seen[t + 1], rollout["actions"][t], rollout["rewards"][t], done, infos)

    def draw(number: int) -> None:
        for _ in range(number):
            assert len(replay.sample(BATCH).observations) == BATCH

    return insert, draw


def serve(side: str, name: str, folder: str) -> None:
    """Play a round for each line that comes in: CPU-seconds of inserting and of drawing, and anonymous MB."""
    import torch

    torch.set_num_threads(1)
    case, before = CASES[name], anonymous_mb()
    insert, draw = theirs(case) if side == "sb3" else ours(case, side, folder)
    for _ in sys.stdin:
        start = time.process_time()
        insert(case["rows"])
        between = time.process_time()
        draw(case["draws"])
        print(json.dumps([between - start, time.process_time() - between, anonymous_mb() - before]), flush=True)


def anonymous_mb() -> float:
    """Resident memory of this process that no file backs."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon")) / 1024


def measure(name: str, sides: dict[str, str], rounds: int) -> dict[str, dict[str, float]]:
    """By side: rows inserted and drawn per CPU-second, and anonymous memory in MB."""
    case, told = CASES[name], {side: list[list[float]]() for side in sides}
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        played = {
            side: subprocess.Popen(
                [python, __file__, "--serve", side, name, folder],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
            )
            for side, python in sides.items()
        }
        for _ in range(rounds + 1):
            for side, process in played.items():
                assert process.stdin is not None and process.stdout is not None
                process.stdin.write("\n")
                process.stdin.flush()
                told[side].append(json.loads(process.stdout.readline()))
        for process in played.values():
            process.communicate()
    out = {}
    for side, lines in told.items():
        inserting, drawing, _ = (statistics.median(column) for column in zip(*lines[1:], strict=True))
        inserted, drawn = case["rows"] / inserting, case["draws"] * BATCH / drawing
        out[side] = {"inserted": inserted, "drawn": drawn, "resident": lines[-1][2]}
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description="Rows per CPU-second of replay buffers, against Stable-Baselines3's.")
    parser.add_argument("--sb3-python", help="interpreter with Stable-Baselines3; left out, only ours are measured")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(*given.serve)
        return
    sides = {side: sys.executable for side in SIDES if side != "sb3"}
    sides |= {"sb3": given.sb3_python} if given.sb3_python else {}
    results = {name: measure(name, sides, given.rounds) for name in CASES}
    if given.json:
        print(json.dumps(results))
        return
    print(f"{'rows':8} {'side':12} {'inserted/s':>12} {'drawn/s':>12} {'resident MB':>12}")
    for name, by_side in results.items():
        for side, told in by_side.items():
            print(f"{name:8} {side:12} {told['inserted']:12,.0f} {told['drawn']:12,.0f} {told['resident']:12,.0f}")


if __name__ == "__main__":
    main()
