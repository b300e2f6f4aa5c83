"""Classical methods against Stable-Baselines3 and against one plain file of torch: CPU-seconds on one thread.

    python -m venv sb3 && sb3/bin/pip install torch==2.13.0 && sb3/bin/pip install "stable-baselines3==2.9.*" \\
        "gymnasium[classic-control]"
    python benchmarks/vs_sb3.py --sb3-python sb3/bin/python [--methods ppo,a2c] [--rounds 5] [--json]

Networks, numbers of environments, steps, minibatches, epochs, coefficients and optimizers are the same on all sides. Each
side is a process of its own; they take turns round by round, so a loaded machine slows all. A round is so many environment
steps with all that is learned from them; the first round is a warm-up, a number is the median of the others.

"plain" is a loop with the hyperparameters that CleanRL publishes for PPO (clipped value loss, advantages normalised in each
minibatch, one optimizer with eps 1e-5; no entropy bonus, as on the other sides), written for this comparison: what a user
who wants no framework would run.
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Round = Callable[[int], None]
"""Runs so many environment steps more, and what is learned from them."""


@dataclass(frozen=True)
class Method:
    """What the sides run: a configuration of hybridflow, and a class of SB3 with its arguments.

    ``steps``: of the environments in a round. ``target``: SB3's CPU-seconds over ours, at least.
    """

    config: dict[str, Any]
    sb3: str
    arguments: dict[str, Any]
    policy: dict[str, Any]
    steps: int
    target: float
    plain: bool = False
    env: str = field(init=False)
    num_envs: int = field(init=False)

    def __post_init__(self) -> None:
        environment = self.config["environment"]
        object.__setattr__(self, "env", environment["id"])
        object.__setattr__(self, "num_envs", environment["num_envs"])


def on_policy(algorithm: str, steps: int, lr: float, **sections: Any) -> dict[str, Any]:
    optimizer = {"optimizer": {"lr": lr, "max_grad_norm": 0.5, "eps": 1e-5}}
    environment = {"id": "CartPole-v1", "num_envs": 4, "steps_per_rollout": steps}
    return {"algorithm": algorithm, "actor": optimizer, "critic": optimizer, "environment": environment, **sections}


def off_policy(algorithm: str, sb3: str, steps: int, **arguments: Any) -> Method:
    """On Pendulum with SB3's networks, 20 updates for 20 steps: both sides learn as often as they act."""
    trained = {"net": {"hidden": [256, 256], "activation": "relu"}, "optimizer": {"lr": 1e-3, "max_grad_norm": 1e6}}
    config = {
        "algorithm": algorithm,
        "actor": trained,
        "critic": trained,
        "environment": {"id": "Pendulum-v1", "num_envs": 1, "steps_per_rollout": 20},
        "replay": {"capacity": 50_000, "batch_size": 256, "warmup": 100},
        "train": {"updates_per_step": 20},
    }
    learning = {"learning_rate": 1e-3, "buffer_size": 50_000, "batch_size": 256, "learning_starts": 100}
    learning |= {"train_freq": 20, "gradient_steps": 20, **arguments}
    return Method(config, sb3, learning, {"net_arch": [256, 256]}, steps, target=1.5)


def dqn() -> Method:
    """On CartPole with SB3's network, without double Q-learning, which SB3 has not."""
    trained = {"net": {"hidden": [64, 64], "activation": "relu"}, "optimizer": {"lr": 1e-3, "max_grad_norm": 10.0}}
    config = {
        "algorithm": "dqn",
        "dqn": {"double": False, "huber_delta": 1.0, "tau": 0.02},
        "actor": trained,
        "environment": {"id": "CartPole-v1", "num_envs": 1, "steps_per_rollout": 16},
        "replay": {"capacity": 50_000, "batch_size": 64, "warmup": 100},
        "train": {"updates_per_step": 16},
    }
    learning = {"learning_rate": 1e-3, "buffer_size": 50_000, "batch_size": 64, "learning_starts": 100, "train_freq": 16}
    learning |= {"gradient_steps": 16, "target_update_interval": 1, "tau": 0.02, "max_grad_norm": 10.0}
    return Method(config, "DQN", learning, {"net_arch": [64, 64]}, 1600, target=1.5)


METHODS: dict[str, Method] = {
    "sac": off_policy("sac", "SAC", 400),
    "td3": off_policy("td3", "TD3", 400, action_noise=0.1),
    "ddpg": off_policy("ddpg", "DDPG", 400, action_noise=0.1),
    "dqn": dqn(),
    "ppo": Method(
        on_policy("ppo", 128, 2.5e-4, ppo={"gamma": 0.99}, train={"epochs": 4, "minibatches": 4}),
        "PPO",
        {"n_steps": 128, "batch_size": 128, "n_epochs": 4, "learning_rate": 2.5e-4, "clip_range_vf": 0.2},
        {"net_arch": [64, 64]},
        steps=20_480,
        target=2.0,
        plain=True,
    ),
    "a2c": Method(
        on_policy("a2c", 5, 7e-4, a2c={"gamma": 0.99, "lam": 1.0, "entropy_coef": 0.0}),
        "A2C",
        {"n_steps": 5, "learning_rate": 7e-4, "use_rms_prop": False},
        {"net_arch": [64, 64]},
        steps=5_120,
        target=1.0,
    ),
}


def hybridflow_side(method: Method) -> Round:
    from hybridflow.build import build
    from hybridflow.config import validate

    environment, train = method.config["environment"], method.config.get("train", {})
    per_step = environment["num_envs"] * environment["steps_per_rollout"]
    config = {**method.config, "run_dir": "unused", "threads": 1, "train": {**train, "steps": 10**6}}
    trainer = build(validate(config, "benchmark")).trainer
    return lambda steps: trainer.train(trainer.step + steps // per_step)


def sb3_side(method: Method) -> Round:
    import numpy as np
    import stable_baselines3
    import torch
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.noise import NormalActionNoise

    torch.set_num_threads(1)
    environments, arguments = make_vec_env(method.env, method.num_envs, seed=1), dict(method.arguments)
    if deviation := arguments.get("action_noise"):
        arguments["action_noise"] = NormalActionNoise(np.zeros(1), np.full(1, deviation))
    model = getattr(stable_baselines3, method.sb3)(
        "MlpPolicy", environments, policy_kwargs=method.policy, seed=1, device="cpu", **arguments
    )
    return lambda steps: model.learn(steps, log_interval=10**9, reset_num_timesteps=False)


class PlainPPO:
    """PPO with nothing around it."""

    def __init__(self, method: Method) -> None:
        import gymnasium
        import torch
        from torch import nn

        torch.set_num_threads(1)
        self.settings, self.num_envs, self.horizon = method.arguments, method.num_envs, method.arguments["n_steps"]
        same_step = {"autoreset_mode": gymnasium.vector.AutoresetMode.SAME_STEP}
        self.environments = gymnasium.make_vec(method.env, self.num_envs, "sync", vector_kwargs=same_step)

        def net(outputs: int, gain: float) -> nn.Sequential:
            layers = [nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs)]
            for layer, scale in zip(layers[::2], (2**0.5, 2**0.5, gain), strict=True):
                nn.init.orthogonal_(layer.weight, scale)
                nn.init.zeros_(layer.bias)
            return nn.Sequential(*layers)

        self.actor, self.critic = net(2, 0.01), net(1, 1.0)
        self.parameters = [*self.actor.parameters(), *self.critic.parameters()]
        self.optimizer = torch.optim.Adam(self.parameters, lr=self.settings["learning_rate"], eps=1e-5)
        self.seen = torch.zeros(self.horizon + 1, self.num_envs, 4)
        self.acted, self.rewards, self.log_probs, self.values, self.ended = torch.zeros(5, self.horizon + 1, self.num_envs)
        self.seen[-1] = torch.from_numpy(self.environments.reset(seed=1)[0])

    def collect(self) -> None:
        import numpy as np
        import torch

        self.seen[0], self.ended[0] = self.seen[-1], self.ended[-1]
        for t in range(self.horizon):
            with torch.no_grad():
                policy = torch.distributions.Categorical(logits=self.actor(self.seen[t]))
                self.values[t] = self.critic(self.seen[t])[:, 0]
                action = policy.sample()
            self.acted[t], self.log_probs[t] = action, policy.log_prob(action)
            following, reward, terminated, truncated, _ = self.environments.step(action.numpy())
            self.seen[t + 1], self.rewards[t] = torch.from_numpy(following), torch.from_numpy(reward)
            self.ended[t + 1] = torch.from_numpy(np.logical_or(terminated, truncated))
        with torch.no_grad():
            self.values[-1] = self.critic(self.seen[-1])[:, 0]

    def advantages(self) -> Any:
        import torch

        advantages, last, gamma, lam = torch.zeros(self.horizon, self.num_envs), torch.zeros(self.num_envs), 0.99, 0.95
        for t in reversed(range(self.horizon)):
            going = 1 - self.ended[t + 1]
            delta = self.rewards[t] + gamma * self.values[t + 1] * going - self.values[t]
            last = advantages[t] = delta + gamma * lam * going * last
        return advantages

    def learn(self) -> None:
        import torch

        advantages = self.advantages()
        columns = (self.seen, self.acted, self.log_probs, self.values)
        flat = [x.flatten(0, 1) for x in (*(x[:-1] for x in columns), advantages, advantages + self.values[:-1])]
        for _ in range(self.settings["n_epochs"]):
            for index in torch.randperm(self.horizon * self.num_envs).split(self.settings["batch_size"]):
                self.minibatch(*(x[index] for x in flat))

    def minibatch(self, seen: Any, acted: Any, old: Any, before: Any, advantage: Any, target: Any) -> None:
        import torch

        clip = 0.2
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        policy = torch.distributions.Categorical(logits=self.actor(seen))
        ratio = (policy.log_prob(acted) - old).exp()
        surrogate = torch.max(-advantage * ratio, -advantage * ratio.clamp(1 - clip, 1 + clip)).mean()
        value = self.critic(seen)[:, 0]
        near = before + (value - before).clamp(-clip, clip)
        error = 0.5 * torch.max((value - target) ** 2, (near - target) ** 2).mean()
        loss = surrogate + 0.5 * error
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 0.5)
        self.optimizer.step()

    def run(self, steps: int) -> None:
        for _ in range(steps // (self.horizon * self.num_envs)):
            self.collect()
            self.learn()


SIDES: dict[str, Callable[[Method], Round]] = {
    "hybridflow": hybridflow_side,
    "sb3": sb3_side,
    "plain": lambda method: PlainPPO(method).run,
}


def serve(side: str, method: Method) -> None:
    """One round for every line of standard input; its CPU-seconds to the real standard output."""
    with os.fdopen(os.dup(1), "w", buffering=1) as out:
        os.dup2(2, 1)
        run = SIDES[side](method)
        for _ in sys.stdin:
            start = time.process_time()
            run(method.steps)
            print(time.process_time() - start, file=out)


class Side:
    """A side as a process."""

    def __init__(self, name: str, method: str, python: str, log: Path) -> None:
        self.log = log
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [python, __file__, "--side", name, "--methods", method],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                text=True,
            )

    def round(self) -> float:
        """CPU-seconds of one round."""
        assert self.process.stdin and self.process.stdout
        with contextlib.suppress(BrokenPipeError):  # it ended early
            self.process.stdin.write("\n")
            self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(
                f"a side ended early, {self.process.wait()}; the end of its log:\n{self.log.read_text()[-3000:]}"
            )
        return float(line)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def compare(name: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All sides of a method, in turns."""
    method = METHODS[name]
    pythons = {"hybridflow": sys.executable, "sb3": args.sb3_python, **({"plain": sys.executable} if method.plain else {})}
    sides = {side: Side(side, name, python, folder / f"{name}-{side}.log") for side, python in pythons.items()}
    try:
        rounds = [{side: process.round() for side, process in sides.items()} for _ in range(args.rounds + 1)][1:]
    finally:
        for process in sides.values():
            process.close()
    speeds = {side: method.steps / statistics.median(measured[side] for measured in rounds) for side in sides}
    ratios = {side: speeds["hybridflow"] / speed for side, speed in speeds.items()}
    return {
        "method": name,
        "env": method.env,
        "rounds": rounds,
        "speeds": speeds,
        "ratios": ratios,
        "target": method.target,
    }


def lines_of(result: dict[str, Any]) -> Iterator[str]:
    """Rows of the table."""
    yield f"\n{result['method']} on {result['env']}, target {result['target']} times SB3"
    yield f"  {'':<12}{'steps per CPU-second':>22}{'ours over it':>14}"
    for side, speed in result["speeds"].items():
        yield f"  {side:<12}{speed:>22,.0f}{result['ratios'][side]:>14.2f}"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sb3-python", help="interpreter of an environment with Stable-Baselines3")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds, after one of warm-up")
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of the table")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not args.side and not args.sb3_python:
        parser.error("--sb3-python is missing; the top of this file says how to make that environment")
    return args


def main() -> None:
    args = parse_arguments()
    if args.side:
        serve(args.side, METHODS[args.methods])
        return
    with tempfile.TemporaryDirectory() as scratch:
        for name in args.methods.split(","):
            result = compare(name, args, Path(scratch))
            print("\n".join([json.dumps(result)] if args.json else lines_of(result)), flush=True)


if __name__ == "__main__":
    main()
