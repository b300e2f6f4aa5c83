"""Safe RLHF (Dai et al. 2024): PPO on the Lagrangian of maximising the reward while the mean cost stays within a budget.

max over θ, min over λ ≥ 0 of   J_R(θ) - λ (J_C(θ) - d)
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import Field

from hybridflow.algorithms.policy_gradient import Objective, PolicyGradient
from hybridflow.algorithms.ppo import PPOConfig
from hybridflow.core.batch import Batch
from hybridflow.core.roles import Actor, Critic, Estimator, Fn, Scorer, chain, renamed, update
from hybridflow.ops.advantages import gae, lagrangian
from hybridflow.ops.losses import value_loss, with_demonstrations

__all__ = ["SafeRLHF", "SafeRLHFConfig"]

COST = {
    "scores": "costs",
    "rewards": "cost_rewards",
    "values": "cost_values",
    "bootstrap_values": "cost_bootstrap_values",
    "advantages": "cost_advantages",
    "returns": "cost_returns",
}
"""The columns of the cost stream, by the names that they have in the reward stream."""


class SafeRLHFConfig(PPOConfig):
    """Keys of ``[safe_rlhf]``."""

    budget: float = 0.0
    """d: the mean cost of a response that is allowed"""
    lambda_init: float = Field(1.0, gt=0)
    """the multiplier at the start"""
    lambda_lr: float = Field(0.1, gt=0)
    """step size of log lambda"""
    lambda_max: float = Field(10.0, gt=0)
    """the multiplier stays below"""
    ptx_coef: float = Field(0.0, ge=0)
    """weight of a demonstration's token in the actor's loss (a response's token has 1); above 0 [data] demonstrates"""


class SafeRLHF(PolicyGradient):
    """Roles: actor, critic and cost critic, estimator, scorers (reward, and the reference when there is a KL), cost.

    ``demonstrations``: number of an update -> rows to imitate, for ``ptx_coef``.
    """

    config: SafeRLHFConfig

    def __init__(
        self,
        config: SafeRLHFConfig,
        objective: Objective,
        actor: Actor,
        critic: Critic,
        cost_critic: Critic,
        estimator: Estimator,
        scorers: Sequence[Scorer],
        cost: Scorer,
        demonstrations: Callable[[int], Batch],
    ) -> None:
        super().__init__(config, objective, actor, estimator, scorers)
        self.critic, self.cost_critic, self.cost, self.demonstrations = critic, cost_critic, cost, demonstrations
        self.log_lambda, self.num_updates = math.log(config.lambda_init), 0
        self.value_loss = value_loss.bind(clip=config.value_clip or None)
        self.cost_loss = renamed(self.value_loss, COST)

    def rollout(self, source: Batch) -> Batch:
        batch = self.actor.rollout(source)
        for scorer in self.scorers:
            batch = scorer.score(batch)
        return self.cost.score(batch)

    def learn(self, batch: Batch) -> Batch:
        batch = self.objective.prepare(self.actor, batch)
        batch = self.critic.compute_values(batch)
        batch = self.cost_critic.compute_values(batch)
        batch = self.estimator.compute(batch, self.objective.scored(self.advantages()))
        update(batch, (self.critic, self.value_loss), (self.cost_critic, self.cost_loss))
        self.actor.update(*self.with_demonstrations(batch, self.objective.policy_loss()))
        return batch

    def advantages(self) -> Fn:
        """A = (A_R - λ A_C) / (1 + λ), each by GAE; the KL is taken off the reward and added to the cost."""
        advantages = gae.bind(gamma=self.config.gamma, lam=self.config.lam)
        rewards = self.objective.token_rewards()
        costs = [renamed(fn, COST) for fn in (*self.objective.token_costs(), advantages)]
        keep = ("rewards", "advantages", "returns", "cost_rewards", "cost_returns")
        return chain(*rewards, advantages, *costs, lagrangian.bind(multiplier=math.exp(self.log_lambda)), keep=keep)

    def with_demonstrations(self, batch: Batch, loss: Fn) -> tuple[Batch, Fn]:
        """The pretraining term: demonstrations join the batch, their cross-entropy the actor's loss."""
        if self.config.ptx_coef == 0:
            return batch, loss
        names = ("sample_id", "tokens", "response_mask", *loss.reads)
        sampled = batch.select(names).fill(demonstrated=False)
        # What else the loss reads means nothing for demonstrations.
        imitated = self.demonstrations(self.num_updates).fill(demonstrated=True, **dict.fromkeys(loss.reads, 0.0))
        return Batch.concat([sampled, imitated]), with_demonstrations.bind(functions=(loss,), coef=self.config.ptx_coef)

    def metrics(self) -> dict[str, float]:
        return {**super().metrics(), "lambda": math.exp(self.log_lambda)}

    def observe(self, metrics: Mapping[str, float], /) -> None:
        """Gradient ascent on λ (J_C - d), in log λ so that λ stays above 0; nothing if no response had a cost."""
        super().observe(metrics)
        self.num_updates += 1
        if "cost/mean" in metrics:
            step = self.config.lambda_lr * math.exp(self.log_lambda) * (metrics["cost/mean"] - self.config.budget)
            self.log_lambda = min(self.log_lambda + step, math.log(self.config.lambda_max))

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "log_lambda": self.log_lambda, "num_updates": self.num_updates}

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        super().load_state_dict(state)
        self.log_lambda, self.num_updates = state["log_lambda"], state["num_updates"]
