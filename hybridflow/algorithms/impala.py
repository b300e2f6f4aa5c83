"""IMPALA (Espeholt et al. 2018): actor-critic on rollouts of older policies, corrected by V-trace."""

from pydantic import Field

from hybridflow.core.batch import Batch
from hybridflow.core.config import Config
from hybridflow.core.roles import Actor, Algorithm, Critic, Estimator, chain, update
from hybridflow.ops.advantages import v_trace
from hybridflow.ops.losses import reinforce, value_loss

__all__ = ["Impala", "ImpalaConfig"]


class ImpalaConfig(Config):
    """Keys of ``[impala]``."""

    gamma: float = Field(0.99, ge=0, le=1)
    """discount per step"""
    entropy_coef: float = Field(0.01, ge=0)
    """weight of the entropy bonus"""
    rho_clip: float = Field(1.0, gt=0)
    """largest weight of a step's own error: what the value converges to"""
    c_clip: float = Field(1.0, gt=0)
    """largest weight of the errors that follow: how fast it does"""


class Impala(Algorithm):
    """Roles: actor, critic, estimator. Rollouts are older than the policy where a schedule or env workers make them so."""

    def __init__(self, config: ImpalaConfig, actor: Actor, critic: Critic, estimator: Estimator) -> None:
        self.actor, self.critic, self.estimator = actor, critic, estimator
        self.v_trace = chain(v_trace.bind(gamma=config.gamma, rho_clip=config.rho_clip, c_clip=config.c_clip))
        self.policy_loss, self.value_loss = reinforce.bind(entropy_coef=config.entropy_coef), value_loss.bind()

    def rollout(self, source: Batch, /) -> Batch:
        return self.actor.rollout(source)

    def learn(self, batch: Batch, /) -> Batch:
        batch = self.critic.compute_values(self.actor.compute_log_probs(batch))
        batch = self.estimator.compute(batch, self.v_trace)
        update(batch, (self.critic, self.value_loss), (self.actor, self.policy_loss))
        return batch
