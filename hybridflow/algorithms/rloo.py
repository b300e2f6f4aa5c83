"""RLOO (Ahmadian et al. 2024, "Back to Basics"): REINFORCE with the mean score of the other responses as baseline."""

from hybridflow.algorithms.policy_gradient import PolicyGradient
from hybridflow.core.config import Config
from hybridflow.core.roles import Fn, chain
from hybridflow.ops.advantages import leave_one_out

__all__ = ["RLOO", "RLOOConfig"]


class RLOOConfig(Config):
    """RLOO has no keys of its own."""


class RLOO(PolicyGradient):
    """Every response against the mean of the others; roles and step are those of ``PolicyGradient``."""

    @classmethod
    def smallest_group(cls, config: RLOOConfig) -> int:
        return leave_one_out.min_group

    def advantages(self) -> Fn:
        """R(y_i, x) - mean of R of the others, where R = score - coef log π(y|x) / π_ref(y|x)."""
        return chain(*self.objective.shaped_scores(), leave_one_out.bind(), keep=("advantages",))
