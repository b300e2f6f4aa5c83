"""The networks that a run in environments trains, by the algorithm: which there are, which of them train, and how."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_model
from torch import nn

from hybridflow.config import RunConfig
from hybridflow.config_sections import ModelConfig
from hybridflow.core.errors import DataError, ModelError
from hybridflow.core.roles import ActionSpace
from hybridflow.core.seeding import torch_generator
from hybridflow.data.agents import Agents, agents_of
from hybridflow.models.action_values import ActionValues, CategoricalQNet, DiscreteActionValues, DuellingMLP, Temperature
from hybridflow.models.actor_critic import ActorCritic
from hybridflow.models.agent_groups import GroupedPolicy
from hybridflow.models.continuous import DeterministicPolicy, SquashedGaussianPolicy
from hybridflow.models.memory import memory_size
from hybridflow.models.multi_discrete import MultiCategoricalPolicy
from hybridflow.models.nets import CategoricalPolicy, ObservationNet, make_policy, make_q, make_table
from hybridflow.models.values import ValueNet
from hybridflow.workers.learner import Trained

__all__ = [
    "WEIGHTS",
    "action_space",
    "actor_networks",
    "critic_input",
    "critic_networks",
    "main_network",
    "trained_besides",
]

WEIGHTS = "policy.safetensors"
Spaces = tuple[Any, Any]
Built = dict[str, nn.Module]


def main_network(config: RunConfig) -> str:
    """The network that acts."""
    return "q" if config.algorithm in ("dqn", "q_learning") else "policy"


def action_space(spaces: Spaces) -> ActionSpace:
    """What algorithms know of the space of actions."""
    space = spaces[1]
    return ActionSpace(True, int(space.n)) if _is_discrete(space) else ActionSpace(False, len(space.low.reshape(-1)))


def actor_networks(spaces: Spaces, config: RunConfig) -> Built:
    """What the actor's learner holds; those that start from ``[actor] model`` read it."""
    built = {
        "a3c": _actor_critic,
        "dqn": _dqn,
        "q_learning": _table,
        "sac": _sac,
        "td3": _deterministic,
        "ddpg": _deterministic,
    }
    if config.algorithm in built and _agents(config) is not None:
        raise DataError(f"agents whose spaces differ need a method without replay, such as ppo; found {config.algorithm}")
    networks = built.get(config.algorithm, _policy)(spaces, config)
    if config.actor.model is not None:
        path = Path(config.actor.model) / WEIGHTS
        if not path.is_file():
            raise ModelError(f"actor.model: {path} is missing; expected the model folder of a run in this environment")
        for name in {"q", "target", "policy", "target_policy"} & networks.keys():
            load_model(networks[name], str(path))
    return {name: _placed(network, config.actor, config) for name, network in networks.items()}


def _placed(network: nn.Module, model: ModelConfig, config: RunConfig) -> nn.Module:
    """On the run's device, learning in the dtype of its section."""
    for module in network.modules():
        if isinstance(module, ObservationNet):
            module.dtype = getattr(torch, config.dtype_of(model))
    return network.to(config.torch_device)


def critic_input(spaces: Spaces, config: RunConfig) -> tuple[Any, str]:
    """What a critic sees: a space, and the column that is of it."""
    if config.critic.input == "observations":
        return spaces[0], "observations"
    assert config.environment is not None, "validated"
    return agents_of(config.environment).state_space, "states"


def critic_networks(space: Any, column: str, config: RunConfig) -> Built:
    """What the critic's learner holds, of methods that have one."""
    random, remembered = torch_generator(config.seed, "init", 1), memory_size(space, config.actor.net)
    network = ValueNet(space, config.critic.net, random, column, remembered)
    return {"value": _placed(network, config.critic, config)}


def trained_besides(config: RunConfig, total_steps: int) -> Mapping[str, Trained]:
    """The networks besides the main one that the actor's learner trains."""
    if config.algorithm not in ("sac", "td3", "ddpg"):
        return {}
    others = {"critic": Trained(config.critic.optimizer, total_steps)}
    if config.algorithm == "sac" and config.sac.adapt:
        others["temperature"] = Trained(config.actor.optimizer.model_copy(update={"freeze": ()}), total_steps)
    return others


def _copies(names: tuple[str, ...], make: Callable[[], nn.Module]) -> Built:
    """Equal networks: targets start as those that they follow."""
    return {name: make() for name in names}


def _agents(config: RunConfig) -> Agents | None:
    """Who acts, if there are several agents whose spaces differ."""
    if config.environment is None or not config.environment.shared:
        return None
    agents = agents_of(config.environment)
    return agents if len(agents.groups) > 1 else None


def _policy(spaces: Spaces, config: RunConfig) -> Built:
    if (agents := _agents(config)) is not None:
        return {"policy": _of_groups(agents, config)}
    several = type(spaces[1]).__name__ == "MultiDiscrete"
    make: Callable[..., nn.Module] = MultiCategoricalPolicy if several else make_policy
    return {"policy": make(*spaces, config.actor.net, torch_generator(config.seed, "init", 0))}


def _actor_critic(spaces: Spaces, config: RunConfig) -> Built:
    value = critic_networks(*critic_input(spaces, config), config)["value"]
    return {"policy": ActorCritic(_policy(spaces, config)["policy"], value)}


def _of_groups(agents: Agents, config: RunConfig) -> GroupedPolicy:
    if config.actor.net.kind != "mlp":
        raise DataError(f'agents whose spaces differ need actor.net.kind = "mlp", found "{config.actor.net.kind}"')
    networks = []
    for number, group in enumerate(agents.groups):
        observed, done = agents.spaces_of(group)
        random = torch_generator(config.seed, "init", 0, number)
        networks.append(CategoricalPolicy(observed, int(done.n), 0.01, config.actor.net, random))
    widths = [agents.observed[group[0]].shape[0] for group in agents.groups]
    return GroupedPolicy(networks, agents.groups, widths, int(agents.spaces[1].n), agents.agent_id)


def _q(spaces: Spaces, config: RunConfig) -> nn.Module:
    """Action values with the switches of ``[dqn]``."""
    chosen, net, random = config.dqn, config.actor.net, torch_generator(config.seed, "init", 0)
    q: Any = make_q(*spaces, net, random)
    if chosen.atoms is not None and chosen.v_min is not None and chosen.v_max is not None:
        support = (chosen.v_min, chosen.v_max, chosen.atoms)
        q = CategoricalQNet(spaces[0], int(spaces[1].n), net, random, support)
    if chosen.duelling:
        features = net.hidden[-1] if net.memory else q.features.size
        q.mlp = DuellingMLP(features, int(spaces[1].n), chosen.atoms or 1, net, random)
    network: nn.Module = q
    return network


def _dqn(spaces: Spaces, config: RunConfig) -> Built:
    return _copies(("q", "target"), lambda: _q(spaces, config))


def _table(spaces: Spaces, config: RunConfig) -> Built:
    return {"q": make_table(*spaces)}


def _sac(spaces: Spaces, config: RunConfig) -> Built:
    observed, done = spaces
    net, seed = config.critic.net, config.seed
    built: Built = {"temperature": Temperature(config.sac.temperature)}
    if _is_discrete(done):
        built |= _policy(spaces, config)
        number = int(done.n)
        make = lambda: DiscreteActionValues(observed, number, net, torch_generator(seed, "init", 1), 2)  # noqa: E731
        return built | _copies(("critic", "target_critic"), make)
    built["policy"] = SquashedGaussianPolicy(*spaces, config.actor.net, torch_generator(seed, "init", 0))
    return built | _critics(spaces, config, 2)


def _deterministic(spaces: Spaces, config: RunConfig) -> Built:
    make = lambda: DeterministicPolicy(*spaces, config.actor.net, torch_generator(config.seed, "init", 0))  # noqa: E731
    return _copies(("policy", "target_policy"), make) | _critics(spaces, config, 1 if config.algorithm == "ddpg" else 2)


def _critics(spaces: Spaces, config: RunConfig, members: int) -> Built:
    make = lambda: ActionValues(*spaces, config.critic.net, torch_generator(config.seed, "init", 1), members)  # noqa: E731
    return _copies(("critic", "target_critic"), make)


def _is_discrete(space: Any) -> bool:
    return type(space).__name__ == "Discrete"
