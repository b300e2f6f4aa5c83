"""What looking at calls costs a run: the same run with and without it, in turns, in one process.

    python benchmarks/probes.py [--rounds 20]

"looked at" is what runs do: any call may be looked at, and what was found goes to a base of task profiles. "not": a meter
that measures nothing but seconds. A round is some steps of each; medians over the rounds of the ratio of their processor
time, with the quartiles, since one round is noisier than what is looked for. "looks": the seconds of looks and of keeping
what they found, as a share of the steps', which has less noise but leaves out what looks do to caches. "writes": those of
one write as a share of the time until the next. The exit code is 1 if both together are above 1 %.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from hybridflow.build import Run, build
from hybridflow.build_profile import KEEP_S, ProfileKeeper
from hybridflow.config import validate
from hybridflow.controller.local_runtime import LocalRuntime
from hybridflow.core.effort import SHARE
from hybridflow.planner.profile_base import ProfileBase
from hybridflow.train import Step

TEXT = {"actor": {"fresh": {"hidden_size": 64}}, "data": {"task": "reverse"}, "generation": {"max_new_tokens": 8}}
ENV = {"id": "CartPole-v1"}
ONE = {**ENV, "num_envs": 1, "steps_per_rollout": 8}
RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "grpo, 100k parameters": (20, {"algorithm": "grpo", **TEXT, "train": {"prompts_per_step": 16, "group_size": 8}}),
    "ppo, CartPole": (
        8,
        {"algorithm": "ppo", "environment": ENV, "train": {"epochs": 4, "minibatches": 4}},
    ),
    "dqn, CartPole": (
        200,
        {"algorithm": "dqn", "environment": ONE},
    ),
}


class Turns:
    """A run that is looked at or not."""

    def __init__(self, data: dict[str, Any], home: Path) -> None:
        self.run: Run = build(validate({**data, "run_dir": "run", "threads": 1}, "benchmark"))
        assert isinstance(self.run.runtime, LocalRuntime)
        self.meter, self.looks = self.run.runtime.meter, 0
        self.keeping_s = self.writing_s = self.took_s = 0.0
        self.keeper = ProfileKeeper(self.run.config, home, print)
        ProfileBase.add(self.keeper.path, self.keeper.machine, [])  # made once in the life of a machine

    def steps(self, number: int, looked_at: bool) -> float:
        """Processor seconds."""
        self.meter.share = SHARE if looked_at else -math.inf
        self.run.trainer.hooks = [self.keep] if looked_at else []
        start, begun = time.process_time(), time.perf_counter()
        self.run.trainer.train(self.run.trainer.step + number)
        self.took_s += looked_at * (time.perf_counter() - begun)
        return time.process_time() - start

    def keep(self, step: Step) -> None:
        begun = time.perf_counter()
        self.keeper(step)
        self.keeping_s += time.perf_counter() - begun
        self.looks += sum(span.effort is not None for span in step.spans)

    def write(self) -> None:
        """As at the end of a run."""
        begun = time.perf_counter()
        self.keeper.write()
        self.writing_s = time.perf_counter() - begun


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    rounds, over = parser.parse_args().rounds, False
    torch.set_num_threads(1)
    print(f"{'run':24}{'looked at / not':>16}{'quartiles':>18}{'looks':>9}{'writes':>9}{'looks/s':>9}")
    for name, (number, data) in RUNS.items():
        with tempfile.TemporaryDirectory() as folder:
            os.environ["HYBRIDFLOW_HOME"] = folder
            turns = Turns(data, Path(folder))
            turns.steps(5 * number, looked_at=False)
            ratios = []
            for round_number in range(rounds):
                order = (True, False) if round_number % 2 else (False, True)
                seconds = {looked_at: turns.steps(number, looked_at) for looked_at in order}
                ratios.append(seconds[True] / seconds[False])
            turns.run.runtime.stop()
        low, middle, high = statistics.quantiles(ratios, n=4)
        turns.write()
        looked = sum(turns.meter.looking.values()) / sum(
            turns.meter.took.values()
        )  # calls of all turns make room for looks
        shares = looked + turns.keeping_s / turns.took_s, turns.writing_s / KEEP_S
        looks, over = turns.looks / turns.took_s, over or sum(shares) > 0.01
        print(
            f"{name:24}{middle:16.4f}{f'{low:.3f} - {high:.3f}':>18}{shares[0]:9.2%}{shares[1]:9.2%}{looks:9.1f}",
            flush=True,
        )
    return int(over)


if __name__ == "__main__":
    sys.exit(main())
