"""Does it learn? Every method's example, from start to end, on several seeds; the table of docs/classical.md.

    python benchmarks/learning.py                         # everything, hours on one core
    python benchmarks/learning.py sac_pendulum --seeds 3  # some examples, the first seeds
    python benchmarks/learning.py --table                 # the table of what has been run, without running anything

A run is `hybridflow train examples/NAME.toml --seed S`, in a process of its own with one thread, and is judged by what it
evaluates after its last step: whole episodes in fresh environments, without exploration. What was run is kept in
benchmarks/learning.json, by example and seed, with a digest of the example; an example that has changed is run again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
KEPT = ROOT / "benchmarks" / "learning.json"


@dataclass(frozen=True)
class Target:
    """What a run on this environment should reach, and what rl-baselines3-zoo has published for the method, if anything.
    The run is that of an ``example``, left out: of the same name, with further ``options`` of the command."""

    environment: str
    returns: float
    published: str = ""
    example: str = ""
    options: tuple[str, ...] = ()


CARTPOLE = Target("CartPole-v1", 475)
TWO_WORKERS = (
    *("--runtime.kind", "ray", "--placement.pools.learner", "1", "--placement.pools.envs", "2"),
    *("--placement.roles.actor", "learner", "--placement.roles.sampler", "envs"),
)
TARGETS = {
    "cartpole": Target("CartPole-v1", 475, "500 at 100k"),
    "a2c_cartpole": Target("CartPole-v1", 475, "500 at 500k"),
    "dqn_cartpole": Target("CartPole-v1", 475, "500 at 50k"),
    "a3c_cartpole": CARTPOLE,
    "a3c_cartpole on Ray": Target("CartPole-v1", 475, example="a3c_cartpole", options=TWO_WORKERS),
    "reinforce_cartpole": CARTPOLE,
    "trpo_cartpole": CARTPOLE,
    "impala_cartpole": CARTPOLE,
    "sac_pendulum": Target("Pendulum-v1", -170, "-157 at 20k"),
    "td3_pendulum": Target("Pendulum-v1", -170, "-152 at 20k"),
    "ddpg_pendulum": Target("Pendulum-v1", -170, "-152 at 20k"),
    "ppo_pendulum": Target("Pendulum-v1", -200, "-172 at 100k"),
    "q_learning_frozenlake": Target("FrozenLake-v1", 0.7),
    "ppo_lunarlander": Target("LunarLander-v3", 200, "242 at 1M, of v2"),
    "ppo_acrobot": Target("Acrobot-v1", -100, "-74 at 1M"),
    "ppo_minigrid": Target("MiniGrid-DoorKey-5x5", 0.9),
    "ppo_simple_spread": Target("simple_spread", -60),
    "mappo_simple_spread": Target("simple_spread", -60),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("examples", nargs="*", default=list(TARGETS), help=f"of {', '.join(TARGETS)}")
    parser.add_argument("--seeds", type=int, default=5, help="the first so many, from 1")
    parser.add_argument("--table", action="store_true", help="run nothing")
    options = parser.parse_args()
    if unknown := set(options.examples) - TARGETS.keys():
        parser.error(f"unknown example {sorted(unknown)[0]!r}; expected some of {', '.join(TARGETS)}")
    for name in options.examples:
        for seed in range(1, options.seeds + 1):
            if not options.table and known(name).get(str(seed)) is None:
                keep(name, seed, run(name, seed))
    print_table(options.examples)


def example(name: str) -> str:
    """Path from the repository's root."""
    return f"examples/{TARGETS[name].example or name}.toml"


def digest(name: str) -> str:
    return hashlib.sha256((ROOT / example(name)).read_bytes() + " ".join(TARGETS[name].options).encode()).hexdigest()[:12]


def everything() -> dict[str, Any]:
    return dict(json.loads(KEPT.read_text())) if KEPT.is_file() else {}


def known(name: str) -> dict[str, Any]:
    """Results by seed, of the example as it is now."""
    entry = everything().get(name, {})
    return dict(entry["seeds"]) if entry.get("digest") == digest(name) else {}


def keep(name: str, seed: int, result: dict[str, float]) -> None:
    seeds = {**known(name), str(seed): result}
    KEPT.write_text(json.dumps({**everything(), name: {"digest": digest(name), "seeds": seeds}}, indent=1) + "\n")
    print(
        f"{name} seed {seed}: {shown(result['return'])} after {result['steps']:,} steps, {result['cpu_s']:.0f} CPU-s",
        flush=True,
    )


def run(name: str, seed: int) -> dict[str, float]:
    """One run: return of the policy at the end, steps of the environments, processor time."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        command = [sys.executable, "-m", "hybridflow.cli", "train", example(name), "--run_dir", str(run_dir)]
        command += [*TARGETS[name].options, "--seed", str(seed)]
        before = processor_time()
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{name} seed {seed}: exit code {done.returncode}\n{done.stderr[-2000:]}")
        took = processor_time() - before
        after = json.loads((run_dir / "result.json").read_text())["after"]
        config = tomllib.loads((run_dir / "config.toml").read_text())
    slots = config["environment"]
    steps = after["step"] * slots["num_envs"] // max(1, slots.get("workers", 0)) * slots["steps_per_rollout"]
    return {"return": after["eval/score"], "steps": steps, "cpu_s": round(took, 1)}


def processor_time() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def print_table(names: list[str]) -> None:
    print("| example | environment | steps | return, mean ± deviation over seeds | worst | reached | CPU-s | published |")
    print("|---|---|---|---|---|---|---|---|")
    for name in names:
        target, results = TARGETS[name], list(known(name).values())
        if not results:
            continue
        returns = [result["return"] for result in results]
        spread = statistics.stdev(returns) if len(returns) > 1 else 0.0
        mean, worst = statistics.mean(returns), min(returns)
        reached = sum(value >= target.returns for value in returns)
        cells = (
            name,
            target.environment,
            f"{results[0]['steps']:,}",
            f"{shown(mean)} ± {shown(spread, like=mean)}",
            shown(worst),
            f"{reached} of {len(returns)} (≥ {target.returns:g})",
            f"{statistics.median(result['cpu_s'] for result in results):.0f}",
            target.published,
        )
        print(f"| {' | '.join(cells)} |")


def shown(value: float, like: float | None = None) -> str:
    """With one decimal, or three where it, or what it is a deviation ``like``, is around one."""
    return f"{value:.1f}" if abs(value if like is None else like) > 10 else f"{value:.3f}"


if __name__ == "__main__":
    main()
