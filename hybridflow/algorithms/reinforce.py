"""REINFORCE (Williams 1992) on episodes of environments, with or without a baseline (Sutton and Barto 2018, 13.3, 13.4)."""

from typing import Any, Literal

from pydantic import Field

from hybridflow.core.batch import Batch
from hybridflow.core.config import Config
from hybridflow.core.roles import Actor, Algorithm, Critic, Estimator, Fn, chain
from hybridflow.ops.advantages import discounted_returns, drop_cut, gae, whiten
from hybridflow.ops.losses import reinforce, value_loss

__all__ = ["Reinforce", "ReinforceConfig"]


class ReinforceConfig(Config):
    """Keys of ``[reinforce]``."""

    gamma: float = Field(0.99, ge=0, le=1)
    """discount per step"""
    baseline: Literal["none", "mean", "value"] = "mean"
    """what returns are compared with: nothing, those of the batch (whitened), or what the critic expects"""
    entropy_coef: float = Field(0.0, ge=0)
    """weight of the entropy bonus"""


class Reinforce(Algorithm):
    """Roles: actor, estimator, and with a baseline of values the critic. Without one, steps of episodes that the rollout's
    limit cuts aren't learned from: their returns aren't known. The rest of those episodes, in the next rollout, is."""

    def __init__(self, config: ReinforceConfig, actor: Actor, estimator: Estimator, critic: Critic | None = None) -> None:
        self.config, self.actor, self.critic, self.estimator = config, actor, critic, estimator
        self.policy_loss, self.value_loss = reinforce.bind(entropy_coef=config.entropy_coef), value_loss.bind()

    @classmethod
    def needs_critic(cls, config: Any, /) -> bool:
        return bool(config.baseline == "value")

    def rollout(self, source: Batch, /) -> Batch:
        return self.actor.rollout(source)

    def learn(self, batch: Batch, /) -> Batch:
        if self.critic is not None:
            batch = self.critic.compute_values(batch)
        batch = self.estimator.compute(batch, self.advantages())
        if self.critic is not None:
            self.critic.update(batch, self.value_loss)
        self.actor.update(batch, self.policy_loss)
        return batch

    def advantages(self) -> Fn:
        """Returns, less the baseline."""
        gamma, kept = self.config.gamma, ("advantages", "returns")
        if self.critic is not None:
            return chain(gae.bind(gamma=gamma, lam=1.0), whiten.bind(), keep=kept)
        whitened = (whiten.bind(),) if self.config.baseline == "mean" else ()
        return chain(drop_cut.bind(), discounted_returns.bind(gamma=gamma), *whitened, keep=(*kept, "response_mask"))
