"""REINFORCE++ (Hu et al. 2025): REINFORCE with PPO's tricks and without a critic, and its variant with a group baseline."""

from pydantic import Field

from hybridflow.algorithms.policy_gradient import PolicyGradient
from hybridflow.core.config import Config
from hybridflow.core.roles import Fn, chain
from hybridflow.ops.advantages import discounted_returns, group_baseline, whiten

__all__ = ["ReinforcePP", "ReinforcePPConfig"]


class ReinforcePPConfig(Config):
    """Keys of ``[reinforce_pp]``."""

    gamma: float = Field(1.0, ge=0, le=1)
    """discount per token"""
    group_baseline: bool = False
    """take the mean score of the group off first (REINFORCE++-baseline)"""


class ReinforcePP(PolicyGradient):
    """Returns to go, whitened; roles and step are those of ``PolicyGradient``."""

    config: ReinforcePPConfig

    @classmethod
    def smallest_group(cls, config: ReinforcePPConfig) -> int:
        return group_baseline.min_group if config.group_baseline else 1

    def advantages(self) -> Fn:
        """A_t = sum over s >= t of r_s, r with the KL of each token, whitened over the batch."""
        baseline = [group_baseline.bind()] if self.config.group_baseline else []
        returns = discounted_returns.bind(gamma=self.config.gamma)
        rewards = self.objective.token_rewards(*baseline)
        return chain(*rewards, returns, whiten.bind(), keep=("rewards", "advantages"))
