"""What all policy-gradient methods share: the policy loss, the KL against the reference, the shaping of scores.

    objective = Objective(loss, kl, shaping, kl_where="reward", max_new_tokens=64, samples_per_step=128)
    objective.token_rewards()      # scores (and the KL) -> rewards, one declared function after another
    objective.shaped_scores()      # the same for methods that compare whole responses
    objective.policy_loss()        # the loss that the actor is updated with

A method adds where its advantages come from.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from hybridflow.core.batch import Batch
from hybridflow.core.config import Config
from hybridflow.core.roles import Actor, Algorithm, Declared, Estimator, Fn, Scorer, chain
from hybridflow.ops.advantages import (
    drop_failed,
    kl_into_scores,
    kl_penalty,
    normalise_scores,
    overlong_penalty,
    score_rewards,
)
from hybridflow.ops.kl import AdaptiveKL, KLKind
from hybridflow.ops.losses import Correction, cispo, gspo, in_one_update, ppo_clip, reinforce

__all__ = ["KLConfig", "LossConfig", "Objective", "PolicyGradient", "ShapingConfig", "Where", "conflicts"]

Where = Literal["loss", "reward"]

UNREAD = {
    "ppo_clip": (),
    "gspo": ("dual_clip",),
    "cispo": ("clip", "dual_clip"),
    "reinforce": ("clip", "clip_high", "dual_clip"),
}


class LossConfig(Config):
    """Keys of ``[loss]``: the policy loss."""

    kind: Literal["ppo_clip", "gspo", "cispo", "reinforce"] = "ppo_clip"
    """clipped ratios of tokens, of whole responses, clipped weights, or none; on policy their gradients are the same"""
    aggregation: Literal["token_mean", "sequence_mean", "constant"] | None = None
    """tokens weigh alike (token_mean, when left out); or sequences do (always in gspo); or a token 1 / max_new_tokens"""
    clip: float | None = Field(None, gt=0)
    """the ratio is clipped below at 1 - clip; 0.2 when left out, in gspo 3e-4"""
    clip_high: float | None = Field(None, gt=0)
    """and above at 1 + clip_high; clip when left out, in gspo 4e-4"""
    dual_clip: float | None = Field(None, gt=1)
    """bound of the loss of bad responses (Ye et al. 2020)"""
    entropy_coef: float = Field(0.0, ge=0)
    """weight of the entropy bonus"""
    correction: Correction | None = None
    """of samples of another policy: they weigh by the ratio of the learner's to theirs, cut or masked at the cap; when left
    out truncate if [schedule] begins rollouts early, else none"""
    correction_cap: float | None = Field(None, gt=1)
    """largest weight, and in mask its inverse the smallest; 2 when left out"""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in UNREAD[self.kind]:
            if getattr(self, name) is not None:
                raise ValueError(f'kind = "{self.kind}" has no use for {name} = {getattr(self, name)}; leave {name} out')
        if self.kind == "gspo" and self.aggregation not in (None, "sequence_mean"):
            raise ValueError(f'kind = "gspo" is one loss per response, so aggregation = "{self.aggregation}" means nothing')
        if self.correction == "none" and self.correction_cap is not None:
            raise ValueError('correction_cap has no effect with correction = "none"; set correction, or remove it')
        return self


class KLConfig(Config):
    """Keys of ``[kl]``: the pull towards the reference."""

    coef: float = Field(0.0, ge=0)
    """weight of the KL against the reference; above 0 it adds the reference model"""
    where: Where | None = None
    """a term of the loss, or taken off the reward; what the method's paper does when left out"""
    kind: KLKind | None = None
    """estimator of the KL (Schulman 2020); left out, k1 in the reward (unbiased only there) and k3 in the loss"""
    target: float | None = Field(None, gt=0)
    """adapt coef so that the KL per token stays near this"""
    horizon: int = Field(10_000, gt=0)
    """samples over which coef adapts"""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in ("where", "kind", "target"):
            if self.coef == 0 and getattr(self, name) is not None:
                raise ValueError(f"{name} = {getattr(self, name)} has no effect with coef = 0; set coef or remove {name}")
        return self


class ShapingConfig(Config):
    """Keys of ``[shaping]``: what happens to scores before advantages are made of them."""

    overlong_buffer: int = Field(0, ge=0)
    """the last tokens before max_new_tokens over which a penalty rises (DAPO)"""
    overlong_penalty: float = Field(1.0, ge=0)
    """what a response of full length loses; only with overlong_buffer"""
    normalise: Literal["none", "batch", "running"] = "none"
    """scores to mean 0 and deviation 1: of the step's batch, or of all steps before"""


def conflicts(loss: LossConfig, kl: KLConfig, kl_where: Where, given: str) -> Iterator[str]:
    """What can't be combined, each naming both keys. ``given``: "data" or "environment"."""
    if kl.kind == "k1" and (kl.where or kl_where) == "loss":
        yield 'kl.kind = "k1" with kl.where = "loss": its expected gradient is zero; use k2 or k3, or kl.where = "reward"'
    if given == "environment":
        if loss.kind == "gspo":
            yield 'loss.kind = "gspo" on [environment]: its ratio is one for a whole response; use another kind'
        if loss.aggregation not in (None, "token_mean"):
            yield f'loss.aggregation = "{loss.aggregation}" on [environment]: steps are dealt singly; use "token_mean"'


class Objective:
    """Builds the policy loss and the shaping of scores and rewards; holds the adaptive KL coefficient.

    ``kl_where``: where the method's paper has the KL. ``samples_per_step``: responses that a step adds to the measured KL.
    ``one_update``: a batch makes one optimizer step. ``failures``: the columns in which scorers say on which rows they
    failed.
    """

    def __init__(
        self,
        loss: LossConfig,
        kl: KLConfig,
        shaping: ShapingConfig,
        *,
        kl_where: Where,
        max_new_tokens: int,
        samples_per_step: int,
        one_update: bool = False,
        failures: tuple[str, ...] = (),
    ) -> None:
        self.loss, self.shaping, self.max_new_tokens = loss, shaping, max_new_tokens
        self.correction: Correction = loss.correction or "none"
        self.one_update, self.failures = one_update, failures
        self.kl, self.samples_per_step = AdaptiveKL(kl.coef, kl.target, kl.horizon), samples_per_step
        self.kl_where: Where = kl.where or kl_where
        self.kl_kind: KLKind = kl.kind or ("k1" if self.kl_where == "reward" else "k3")
        self.scores_seen = RunningMoments()

    def scored(self, advantages: Fn) -> Fn:
        """``advantages`` of the groups that all scorers could score; the others influence nothing from here on."""
        if not self.failures:
            return advantages
        kept = (*advantages.writes, "response_mask")
        return chain(drop_failed.bind(failures=self.failures), advantages, keep=kept)

    def shaped_scores(self) -> tuple[Fn, ...]:
        """Scores with penalties, normalised, and with the KL of the whole response if it belongs to the reward."""
        return (*self.penalties(), *self._normalised(normalise_scores), *self._in_reward(kl_into_scores.bind))

    def token_rewards(self, *baseline: Fn, normalise: Declared = normalise_scores) -> tuple[Fn, ...]:
        """Scores with penalties, normalised, then what ``baseline`` makes of them, as reward of the last token, and the KL
        of each token if it belongs there."""
        return (*self.penalties(), *self._normalised(normalise), *baseline, score_rewards.bind(), *self.token_kl())

    def token_kl(self, sign: float = 1.0) -> tuple[Fn, ...]:
        """The KL of each token off its reward, if it belongs there."""
        return tuple(self._in_reward(kl_penalty.bind, sign))

    def token_costs(self) -> tuple[Fn, ...]:
        """A cost as reward of the last token; the KL of each token, if it belongs there, is added."""
        return (score_rewards.bind(), *self.token_kl(sign=-1.0))

    def penalties(self) -> tuple[Fn, ...]:
        """What is taken off the scores of responses."""
        shaping, tokens = self.shaping, self.max_new_tokens
        if not shaping.overlong_buffer:
            return ()
        penalty = shaping.overlong_penalty
        return (overlong_penalty.bind(max_tokens=tokens, buffer_tokens=shaping.overlong_buffer, penalty=penalty),)

    def _normalised(self, normalise: Declared) -> Iterator[Fn]:
        if self.shaping.normalise == "batch":
            yield normalise.bind()
        elif self.shaping.normalise == "running":
            yield normalise.bind(**self.scores_seen.moments())

    def _in_reward(self, bind: Callable[..., Fn], sign: float = 1.0) -> Iterator[Fn]:
        if self.kl.coef > 0 and self.kl_where == "reward":
            yield bind(coef=sign * self.kl.coef, kind=self.kl_kind)

    def prepare(self, actor: Actor, batch: Batch) -> Batch:
        """Before anything is updated: for a correction, what the learner itself thinks of the samples."""
        return batch if self.correction == "none" or self.one_update else actor.compute_log_probs(batch)

    def policy_loss(self) -> Fn:
        """The loss of ``[loss]``, with the KL term of ``[kl]`` if it belongs there."""
        loss = self._policy_loss()
        return in_one_update.bind(functions=(loss,)) if self.correction != "none" and self.one_update else loss

    def _policy_loss(self) -> Fn:
        loss = self.loss
        params: dict[str, Any] = {"entropy_coef": loss.entropy_coef, "correction": self.correction}
        params["correction_cap"] = loss.correction_cap or 2.0
        if self.kl.coef > 0 and self.kl_where == "loss":
            params |= {"kl_coef": self.kl.coef, "kl_kind": self.kl_kind}
        if loss.kind == "gspo":
            return gspo.bind(**params, clip=loss.clip or 3e-4, clip_high=loss.clip_high or loss.clip or 4e-4)
        params["aggregation"] = loss.aggregation or "token_mean"
        if loss.aggregation == "constant":
            params["max_tokens"] = self.max_new_tokens
        if loss.kind == "cispo":
            return cispo.bind(**params, clip_high=loss.clip_high or 0.2)
        if loss.kind == "reinforce":
            return reinforce.bind(**params)
        return ppo_clip.bind(**params, clip=loss.clip or 0.2, clip_high=loss.clip_high, dual_clip=loss.dual_clip)

    def metrics(self) -> dict[str, float]:
        return {} if self.kl.target is None else {"kl_coef": self.kl.coef}

    def observe(self, metrics: Mapping[str, float]) -> None:
        """After a step: steer the coefficient of the KL, remember the scores. What was not measured changes nothing."""
        if "reference/kl" in metrics:
            self.kl.update(metrics["reference/kl"], self.samples_per_step)
        if "reward/mean" in metrics:
            self.scores_seen.add(metrics["reward/mean"], metrics["reward/std"])

    def state_dict(self) -> dict[str, Any]:
        return {"kl": self.kl.state_dict(), "scores_seen": self.scores_seen.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.kl.load_state_dict(state["kl"])
        self.scores_seen.load_state_dict(state["scores_seen"])


class RunningMoments:
    """Mean and deviation of all scores so far, from those of each step; every step weighs alike."""

    def __init__(self) -> None:
        self.steps, self.mean, self.variance = 0, 0.0, 0.0

    def add(self, mean: float, std: float) -> None:
        self.steps += 1
        off = mean - self.mean
        self.mean += off / self.steps
        self.variance += (std**2 + off * (mean - self.mean) - self.variance) / self.steps

    def moments(self) -> dict[str, float]:
        """``mean`` and ``std``; nothing as long as all scores were equal: such a step is normalised by itself."""
        return {"mean": self.mean, "std": self.variance**0.5} if self.variance else {}

    def state_dict(self) -> dict[str, float]:
        return {"steps": self.steps, "mean": self.mean, "variance": self.variance}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps, self.mean, self.variance = state["steps"], state["mean"], state["variance"]


class PolicyGradient(Algorithm):
    """Sample, score, estimate advantages, update: a method without a critic says only where its ``advantages`` come from.

    Roles: actor, estimator, scorers (reward, and the reference when there is a KL). The ``Objective`` is all of its state.
    """

    kl_where: ClassVar[Where] = "reward"

    def __init__(
        self, config: Any, objective: Objective, actor: Actor, estimator: Estimator, scorers: Sequence[Scorer]
    ) -> None:
        self.config, self.objective = config, objective
        self.actor, self.estimator, self.scorers = actor, estimator, scorers

    def rollout(self, source: Batch, /) -> Batch:
        batch = self.actor.rollout(source)
        for scorer in self.scorers:
            batch = scorer.score(batch)
        return batch

    def learn(self, batch: Batch, /) -> Batch:
        batch = self.objective.prepare(self.actor, batch)
        batch = self.estimator.compute(batch, self.objective.scored(self.advantages()))
        self.actor.update(batch, self.objective.policy_loss())
        return batch

    @abstractmethod
    def advantages(self) -> Fn:
        """Scores -> ``advantages``, as declared functions."""

    def metrics(self) -> dict[str, float]:
        return self.objective.metrics()

    def observe(self, metrics: Mapping[str, float], /) -> None:
        self.objective.observe(metrics)

    def state_dict(self) -> dict[str, Any]:
        return self.objective.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        self.objective.load_state_dict(state)
