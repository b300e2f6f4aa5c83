"""One method per file; a method reads like its paper and touches no worker, controller or buffer."""

from typing import NamedTuple

from hybridflow.algorithms.dqn import DQN, DQNConfig
from hybridflow.algorithms.grpo import GRPO, GRPOConfig
from hybridflow.algorithms.ppo import PPO, PPOConfig
from hybridflow.algorithms.sft import SFT, SFTConfig
from hybridflow.core.config import Config
from hybridflow.core.roles import Algorithm

__all__ = ["ALGORITHMS", "Method"]


class Method(NamedTuple):
    """An algorithm, its section, and what it can be run on ("data": prompts, "environment")."""

    algorithm: type[Algorithm]
    config: type[Config]
    inputs: tuple[str, ...]


ALGORITHMS: dict[str, Method] = {
    "sft": Method(SFT, SFTConfig, ("data",)),
    "grpo": Method(GRPO, GRPOConfig, ("data",)),
    "ppo": Method(PPO, PPOConfig, ("data", "environment")),
    "dqn": Method(DQN, DQNConfig, ("environment",)),
}
