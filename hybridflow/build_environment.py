"""The parts of a run in environments: small networks as actor and critic, and no scorers, since environments reward."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from hybridflow.build_networks import (
    WEIGHTS,
    action_space,
    actor_networks,
    critic_input,
    critic_networks,
    main_network,
    trained_besides,
)
from hybridflow.config import RunConfig
from hybridflow.controller.actor import LinkedActor, SplitActor
from hybridflow.controller.protocols import blocks
from hybridflow.core.batch import Batch
from hybridflow.core.errors import DataError
from hybridflow.core.placement import Rows
from hybridflow.core.roles import Role, Runtime
from hybridflow.data.envs import EnvironmentConfig, rollout_source, spaces_of
from hybridflow.hooks import Evaluation
from hybridflow.models.exported import save_policy
from hybridflow.models.memory import memory_size
from hybridflow.models.nets import NetConfig
from hybridflow.telemetry.result import mean_interval
from hybridflow.workers.env_sampler import EnvSampler
from hybridflow.workers.gradient_sampler import GradientSampler
from hybridflow.workers.learner import Learner
from hybridflow.workers.networks import Networks
from hybridflow.workers.replica import Replica

__all__ = ["EnvironmentParts"]


class EnvironmentParts:
    """Makes actor and critic for the environment's spaces; which networks they hold is in ``build_networks``."""

    failures: tuple[str, ...] = ()

    def __init__(self, config: RunConfig, environment: EnvironmentConfig, runtime: Runtime) -> None:
        self.config, self.environment, self.runtime = config, environment, runtime
        self.spaces = spaces_of(environment)
        evaluated = environment.with_options(config.evaluation.options)
        if evaluated != environment and (found := spaces_of(evaluated)) != self.spaces:
            told = f"evaluation.options: with them the spaces are {found}, those of training are {self.spaces}"
            raise DataError(f"{told}; expected the same, as the policy has to fit both")
        self._slots = rollout_source(environment)

    def describe(self) -> str:
        """One line on the model and the environments."""
        return f"{self.actor.describe()}, {self.environment.num_envs} x {self.environment.id}"

    def source(self, step: int) -> Batch:
        return self._slots

    def makers(self) -> Mapping[str, Callable[[], Any]]:
        return {
            "actor": lambda: self.actor,
            "critic": self.critic,
            "scorers": tuple,
            "action_space": lambda: action_space(self.spaces),
            "replay": lambda: self.config.replay,
        }

    @cached_property
    def actor(self) -> LinkedActor:
        """The policy, or the action values, with the sampler that steps the environments."""
        config = self.config
        networks = Networks(
            partial(actor_networks, self.spaces, config),
            main_network(config),
            ("observations", "actions", *config.actor.net.remembered),
            config.actor.model or _called(config.actor.net),
            normalised=config.actor.net.normalise and _has_scale(self.spaces[0]),
            clipped_apart=("policy.", "value.") if config.algorithm == "a3c" else ("",),
        )
        args = config.learner_args(config.actor)
        others = trained_besides(config, args["total_steps"])
        if config.algorithm == "td3":
            args["total_steps"] //= config.td3.policy_every
        args |= {"networks": networks, **({"others": others} if others else {})}
        learner = Role("actor", Learner, args, replica=partial(Replica.at, networks))
        worker = GradientSampler if config.algorithm == "a3c" else EnvSampler
        sampler: Role[Any] = Role("sampler", worker, self._sampler_args())
        if self.environment.workers:
            return SplitActor(self.runtime, learner, sampler, self.environment.workers)
        return LinkedActor(self.runtime, learner, sampler)

    @property
    def shares(self) -> list[Rows]:
        """Of each env worker: the rows of ``source`` that it rolls out from."""
        return blocks(np.ones(self.environment.num_envs, np.int64), self.environment.workers)

    def _sampler_args(self) -> dict[str, Any]:
        config = self.config
        with_states = config.critic.input == "state"
        args = {"config": self.environment, "seed": config.seed, "with_states": with_states}
        if remembered := memory_size(self.spaces[0], config.actor.net):
            args |= {"memory_size": remembered, "max_piece": config.replay.sequence if config.replays else 0}
        if config.algorithm in ("dqn", "q_learning"):
            return {**args, "exploration": config.exploration}
        noise = config.exploration.noise if config.algorithm in ("td3", "ddpg") else 0.0
        at_random = config.replays and config.replay.dataset is None and not action_space(self.spaces).discrete
        return {**args, "noise": noise, "random_steps": config.replay.warmup if at_random else 0}

    def critic(self) -> Any:
        space, column = critic_input(self.spaces, self.config)
        build = partial(critic_networks, space, column, self.config)
        net = self.config.critic.net
        columns = (column, *net.remembered)
        normalised = (net.normalise and _has_scale(space)) or net.normalise_returns
        networks = Networks(build, "value", columns, _called(net), normalised=normalised)
        return self.runtime.role(
            Role("critic", Learner, {"networks": networks, **self.config.learner_args(self.config.critic)})
        )

    @property
    def evaluate(self) -> Callable[[], Evaluation]:
        return lambda: self.evaluated(self.config.evaluation.limit)

    def evaluated(self, num_episodes: int) -> Evaluation:
        """Mean return of whole episodes, of several agents the sum of theirs, under the greedy policy."""
        played = self.actor.sampler.evaluate(num_episodes, self.config.evaluation.options)
        returns = [episode.episode_return for episode in played]
        others = {
            "return_min": min(returns),
            "return_max": max(returns),
            "return_std": statistics.pstdev(returns),
            "episode_length": statistics.fmean(episode.episode_length for episode in played),
        }
        others |= {f"return/{name}": statistics.fmean(one.by_agent[name] for one in played) for name in played[0].by_agent}
        return Evaluation(*mean_interval(returns), len(returns), others)

    def export(self, folder: Path) -> None:
        """Write the policy's weights with their version, in place of those that are there; ``[actor] model`` reads such a
        folder."""
        folder.mkdir(parents=True, exist_ok=True)
        version = self.actor.learner.policy_version()
        self.actor.learner.export(partial(save_policy, version=version, path=folder / WEIGHTS))


def _has_scale(space: Any) -> bool:
    """One-hot observations have nothing to normalise."""
    return type(space).__name__ == "Box"


def _called(net: NetConfig) -> str:
    kind = net.activation if net.kind == "mlp" else net.kind
    return f"fresh {kind} {'-'.join(map(str, net.hidden))}"
