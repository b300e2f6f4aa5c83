"""On-policy distillation: the student samples, the teacher judges every token (GKD, Agarwal et al. 2024; MiniLLM, Gu et
al. 2024; Thinking Machines 2025). It minimises the reverse KL(student || teacher) on the student's own responses.
"""

from collections.abc import Sequence

from pydantic import Field

from hybridflow.algorithms.policy_gradient import Objective, PolicyGradient
from hybridflow.core.batch import Batch
from hybridflow.core.config import Config
from hybridflow.core.roles import Actor, Estimator, Fn, Scorer, chain
from hybridflow.ops.advantages import discounted_returns, teacher_rewards

__all__ = ["Distill", "DistillConfig"]


class DistillConfig(Config):
    """Keys of ``[distill]``."""

    gamma: float = Field(0.0, ge=0, le=1)
    """discount: 0 judges every token by itself, 1 also by what it leads to (MiniLLM)"""


class Distill(PolicyGradient):
    """Roles: actor, estimator, teacher (writes ``teacher_log_probs``), scorers (a reward, if there is one, is reported; the
    reference when there is a KL).
    """

    config: DistillConfig

    def __init__(
        self,
        config: DistillConfig,
        objective: Objective,
        actor: Actor,
        estimator: Estimator,
        teacher: Scorer,
        scorers: Sequence[Scorer],
    ) -> None:
        super().__init__(config, objective, actor, estimator, scorers)
        self.teacher = teacher

    def rollout(self, source: Batch) -> Batch:
        batch = self.actor.rollout(source)
        for scorer in self.scorers:
            batch = scorer.score(batch)
        return self.teacher.score(batch)

    def advantages(self) -> Fn:
        """A_t = sum over s >= t of γ^(s - t) (log π_teacher - log π)_s."""
        returns = discounted_returns.bind(gamma=self.config.gamma)
        return chain(teacher_rewards.bind(), *self.objective.token_kl(), returns, keep=("rewards", "advantages"))
