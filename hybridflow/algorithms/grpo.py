"""GRPO (Shao et al. 2024) and what grew out of it, by switches.

| method                              | keys                                                                             |
|-------------------------------------|----------------------------------------------------------------------------------|
| GRPO (Shao et al. 2024, eq. 3)      | loss.aggregation = "sequence_mean", kl.coef = 0.04                               |
| Dr. GRPO (Liu et al. 2025)          | grpo.scale = "none", loss.aggregation = "constant"                               |
| DAPO (Yu et al. 2025, eq. 8, 13)    | loss.clip_high = 0.28, shaping.overlong_buffer, train.max_refills                |
| GSPO (Zheng et al. 2025, eq. 5)     | loss.kind = "gspo"                                                               |
| CISPO (MiniMax-M1 2025, eq. 4)      | loss.kind = "cispo"                                                              |
"""

from typing import ClassVar, Literal

from hybridflow.algorithms.policy_gradient import PolicyGradient, Where
from hybridflow.core.config import Config
from hybridflow.core.roles import Fn, chain
from hybridflow.ops.advantages import group_centred

__all__ = ["GRPO", "GRPOConfig"]


class GRPOConfig(Config):
    """Keys of ``[grpo]``."""

    scale: Literal["std", "none"] = "std"
    """divide by the group's standard deviation, or not"""


class GRPO(PolicyGradient):
    """Every response against the others to its prompt; roles and step are those of ``PolicyGradient``."""

    config: GRPOConfig
    kl_where: ClassVar[Where] = "loss"

    @classmethod
    def smallest_group(cls, config: GRPOConfig) -> int:
        return group_centred.min_group

    def advantages(self) -> Fn:
        """Scores against the mean of their group (eq. 3 with outcome supervision, 4.1.2)."""
        return chain(*self.objective.shaped_scores(), group_centred.bind(scale=self.config.scale), keep=("advantages",))
