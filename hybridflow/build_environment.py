"""The parts of a run in environments: small networks as actor and critic, and no scorers, since environments reward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from safetensors.torch import load_model, save_model
from torch import nn

from hybridflow.config import RunConfig
from hybridflow.controller.actor import LinkedActor
from hybridflow.core.batch import Batch
from hybridflow.core.errors import ModelError
from hybridflow.core.roles import Role, Runtime
from hybridflow.core.seeding import torch_generator
from hybridflow.data.envs import EnvironmentConfig, rollout_source, spaces_of
from hybridflow.hooks import Evaluation
from hybridflow.models.nets import NetConfig, make_policy, make_q, make_value
from hybridflow.telemetry.result import mean_interval
from hybridflow.workers.env_sampler import EnvSampler
from hybridflow.workers.learner import Learner
from hybridflow.workers.networks import Networks
from hybridflow.workers.replica import Replica

__all__ = ["EnvironmentParts"]

WEIGHTS = "policy.safetensors"


class EnvironmentParts:
    """Makes actor and critic for the environment's spaces. The actor is "q" with its "target" for Q-learning."""

    failures: tuple[str, ...] = ()

    def __init__(self, config: RunConfig, environment: EnvironmentConfig, runtime: Runtime) -> None:
        self.config, self.environment, self.runtime = config, environment, runtime
        self.spaces = spaces_of(environment)
        self._slots = rollout_source(environment)

    def describe(self) -> str:
        """One line on the model and the environments."""
        return f"{self.actor.describe()}, {self.environment.num_envs} x {self.environment.id}"

    def source(self, step: int) -> Batch:
        return self._slots

    def makers(self) -> Mapping[str, Callable[[], Any]]:
        return {"actor": lambda: self.actor, "critic": self.critic, "scorers": tuple}

    @cached_property
    def actor(self) -> LinkedActor:
        """The policy, or the action values, with the sampler that steps the environments."""
        config, learns_values = self.config, self.config.algorithm == "dqn"
        build = partial(_actor_networks, self.spaces, config, learns_values)
        name = config.actor.model or _called(config.actor.net)
        networks = Networks(build, "q" if learns_values else "policy", ("observations", "actions"), name)
        exploration = config.exploration if learns_values else None
        args = {"networks": networks, **config.learner_args(config.actor)}
        learner = Role("actor", Learner, args, replica=partial(Replica.at, networks))
        args = {"config": self.environment, "seed": config.seed, "exploration": exploration}
        return LinkedActor(self.runtime, learner, Role("sampler", EnvSampler, args))

    def critic(self) -> Any:
        build = partial(_critic_networks, self.spaces, self.config)
        networks = Networks(build, "value", ("observations",), _called(self.config.critic.net))
        return self.runtime.role(
            Role("critic", Learner, {"networks": networks, **self.config.learner_args(self.config.critic)})
        )

    @property
    def evaluate(self) -> Callable[[], Evaluation]:
        return self._evaluate

    def _evaluate(self) -> Evaluation:
        """Mean return of whole episodes under the greedy policy."""
        returns = self.actor.sampler.evaluate(self.config.evaluation.limit)
        return Evaluation(*mean_interval(returns), len(returns))

    def export(self, folder: Path) -> None:
        """Write the policy's weights; ``[actor] model`` reads such a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        self.actor.learner.export(partial(save_model, filename=str(folder / WEIGHTS)))


def _called(net: NetConfig) -> str:
    return f"fresh {net.activation} {'-'.join(map(str, net.hidden))}"


def _actor_networks(spaces: tuple[Any, Any], config: RunConfig, learns_values: bool) -> dict[str, nn.Module]:
    make = make_q if learns_values else make_policy
    # The same generator twice: the target starts equal to the network that it follows.
    names, net = ("q", "target") if learns_values else ("policy",), config.actor.net
    networks: dict[str, nn.Module] = {name: make(*spaces, net, torch_generator(config.seed, "init", 0)) for name in names}
    if config.actor.model is not None:
        path = Path(config.actor.model) / WEIGHTS
        if not path.is_file():
            raise ModelError(f"actor.model: {path} is missing; expected the model folder of a run in this environment")
        for network in networks.values():
            load_model(network, str(path))
    return {name: network.to(config.torch_device) for name, network in networks.items()}


def _critic_networks(spaces: tuple[Any, Any], config: RunConfig) -> dict[str, nn.Module]:
    network = make_value(spaces[0], config.critic.net, torch_generator(config.seed, "init", 1))
    return {"value": network.to(config.torch_device)}
