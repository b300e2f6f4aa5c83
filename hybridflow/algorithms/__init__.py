"""One method per file; a method reads like its paper and touches no worker, controller or buffer."""

from typing import Literal, NamedTuple

from hybridflow.algorithms.a2c import A2C, A2CConfig
from hybridflow.algorithms.a3c import A3C, A3CConfig
from hybridflow.algorithms.ddpg import DDPG, DDPGConfig
from hybridflow.algorithms.distill import Distill, DistillConfig
from hybridflow.algorithms.dpo import DPO, DPOConfig
from hybridflow.algorithms.dqn import DQN, DQNConfig
from hybridflow.algorithms.grpo import GRPO, GRPOConfig
from hybridflow.algorithms.impala import Impala, ImpalaConfig
from hybridflow.algorithms.ppo import PPO, PPOConfig
from hybridflow.algorithms.q_learning import QLearning, QLearningConfig
from hybridflow.algorithms.reinforce import Reinforce, ReinforceConfig
from hybridflow.algorithms.reinforce_pp import ReinforcePP, ReinforcePPConfig
from hybridflow.algorithms.remax import ReMax, ReMaxConfig
from hybridflow.algorithms.reward_model import RewardModel, RewardModelConfig
from hybridflow.algorithms.rloo import RLOO, RLOOConfig
from hybridflow.algorithms.sac import SAC, SACConfig
from hybridflow.algorithms.safe_rlhf import SafeRLHF, SafeRLHFConfig
from hybridflow.algorithms.sft import SFT, SFTConfig
from hybridflow.algorithms.td3 import TD3, TD3Config
from hybridflow.algorithms.trpo import TRPO, TRPOConfig
from hybridflow.core.config import Config
from hybridflow.core.roles import Algorithm

__all__ = ["ALGORITHMS", "Method"]


class Method(NamedTuple):
    """An algorithm, its section, what it can be run on ("data", "environment"), what it is, which data it needs, and which
    sections it reads that no role of its constructor tells; those with "replay" learn from a replay buffer."""

    algorithm: type[Algorithm]
    config: type[Config]
    inputs: tuple[str, ...]
    summary: str
    records: Literal["prompts", "demonstrations", "pairs"] = "prompts"
    reads: tuple[str, ...] = ()


ALGORITHMS: dict[str, Method] = {
    "sft": Method(SFT, SFTConfig, ("data",), "supervised fine-tuning on demonstrations", "demonstrations"),
    "reward_model": Method(
        RewardModel, RewardModelConfig, ("data",), "a reward model, or a cost model, from preferences", "pairs"
    ),
    "dpo": Method(DPO, DPOConfig, ("data",), "direct preference optimisation; IPO and KTO by its kind", "pairs"),
    "grpo": Method(
        GRPO, GRPOConfig, ("data",), "group-relative policy optimisation; Dr. GRPO, DAPO, GSPO and CISPO by switches"
    ),
    "rloo": Method(RLOO, RLOOConfig, ("data",), "REINFORCE with the other responses' mean score as baseline"),
    "reinforce_pp": Method(
        ReinforcePP, ReinforcePPConfig, ("data",), "REINFORCE++: returns to go, whitened; or with the group's baseline"
    ),
    "remax": Method(ReMax, ReMaxConfig, ("data",), "REINFORCE with the greedy response's score as baseline"),
    "ppo": Method(
        PPO, PPOConfig, ("data", "environment"), "proximal policy optimisation with a critic, for tokens and environments"
    ),
    "safe_rlhf": Method(
        SafeRLHF, SafeRLHFConfig, ("data",), "PPO that keeps a mean cost within a budget, by a Lagrange multiplier"
    ),
    "distill": Method(Distill, DistillConfig, ("data",), "reverse KL to a teacher on the student's own responses"),
    "reinforce": Method(
        Reinforce, ReinforceConfig, ("environment",), "REINFORCE on episodes of environments, with or without a baseline"
    ),
    "a2c": Method(A2C, A2CConfig, ("environment",), "advantage actor-critic on short rollouts"),
    "a3c": Method(
        A3C,
        A3CConfig,
        ("environment",),
        "asynchronous advantage actor-critic: env workers make gradients, the learner applies them",
        reads=("critic",),
    ),
    "trpo": Method(TRPO, TRPOConfig, ("environment",), "natural gradient steps within a trust region"),
    "impala": Method(Impala, ImpalaConfig, ("environment",), "actor-critic on older rollouts, corrected by V-trace"),
    "q_learning": Method(QLearning, QLearningConfig, ("environment",), "Q-learning with a table", reads=("exploration",)),
    "dqn": Method(
        DQN,
        DQNConfig,
        ("environment",),
        "deep Q-learning with replay, double by default",
        reads=("replay", "exploration"),
    ),
    "sac": Method(
        SAC,
        SACConfig,
        ("environment",),
        "soft actor-critic with an automatic temperature, for continuous and discrete actions",
        reads=("replay", "critic"),
    ),
    "td3": Method(
        TD3,
        TD3Config,
        ("environment",),
        "twin delayed deterministic policy gradient, for continuous actions",
        reads=("replay", "critic", "exploration"),
    ),
    "ddpg": Method(
        DDPG,
        DDPGConfig,
        ("environment",),
        "deep deterministic policy gradient, for continuous actions",
        reads=("replay", "critic", "exploration"),
    ),
}
