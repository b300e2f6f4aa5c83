"""Direct preference optimisation (Rafailov et al. 2023) and its family: the policy learns from pairs, without reward model.

| kind      | loss of a pair                                                     | paper                  |
|-----------|--------------------------------------------------------------------|------------------------|
| "sigmoid" | -log σ of the difference of the implicit rewards                   | Rafailov et al. 2023   |
| "ipo"     | squared distance of the difference of log-ratios from 1 / 2 beta   | Azar et al. 2023       |
| "kto"     | every response by itself, against an estimate of the KL            | Ethayarajh et al. 2024 |
"""

from typing import Literal, Protocol

from pydantic import Field, model_validator

from hybridflow.core.batch import Batch
from hybridflow.core.config import Config
from hybridflow.core.roles import Actor, Algorithm, Estimator, Fn, Scorer
from hybridflow.ops.preference import dpo, ipo, kto, kto_reference_points, mismatched

__all__ = ["DPO", "DPOConfig", "PreferenceActor"]


class DPOConfig(Config):
    """Keys of ``[dpo]``."""

    kind: Literal["sigmoid", "ipo", "kto"] = "sigmoid"
    """the loss; the table in hybridflow/algorithms/dpo.py says which method each is"""
    beta: float = Field(0.1, gt=0)
    """how strongly the policy is held to the reference: the implicit reward is beta x its log-ratio against it"""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """share of preferences taken to be wrong (conservative DPO); only for kind = "sigmoid" """

    @model_validator(mode="after")
    def _smoothing_needs_sigmoid(self) -> "DPOConfig":
        if self.label_smoothing and self.kind != "sigmoid":
            raise ValueError(f'label_smoothing belongs to kind = "sigmoid", but kind is {self.kind!r}; remove it')
        return self


class PreferenceActor(Actor, Protocol):
    """An actor that can say how likely any response is under its current policy."""

    def compute_log_probs(self, batch: Batch, /) -> Batch: ...


class DPO(Algorithm):
    """Roles: actor, reference, estimator (for KTO)."""

    def __init__(self, config: DPOConfig, actor: PreferenceActor, reference: Scorer, estimator: Estimator) -> None:
        self.actor, self.reference, self.estimator = actor, reference, estimator
        self.loss, self.unpaired = preference_loss(config), config.kind == "kto"

    @classmethod
    def needs_reference(cls, config: DPOConfig) -> bool:
        return True

    def rollout(self, source: Batch) -> Batch:
        return self.reference.score(source)

    def learn(self, batch: Batch) -> Batch:
        if self.unpaired:
            batch = self.with_reference_points(batch)
        self.actor.update(batch, self.loss)
        return batch

    def with_reference_points(self, batch: Batch) -> Batch:
        """What KTO compares with: the KL of policy and reference, estimated on responses to other prompts."""
        others = self.estimator.compute(batch.select(("tokens", "response_mask")), mismatched.bind())
        others = self.reference.score(self.actor.compute_log_probs(others))
        points = self.estimator.compute(others, kto_reference_points.bind())
        return batch.with_columns(reference_points=points["reference_points"])


def preference_loss(config: DPOConfig) -> Fn:
    """The loss of ``kind``."""
    if config.kind == "kto":
        return kto.bind(beta=config.beta)
    if config.kind == "ipo":
        return ipo.bind(beta=config.beta)
    return dpo.bind(beta=config.beta, label_smoothing=config.label_smoothing)
