"""The actor: a learner and a sampler that share the policy."""

from typing import Any

from hybridflow.core.roles import Role, Runtime

__all__ = ["InPlaceActor"]


class InPlaceActor:
    """Learner and sampler in one process: the sampler reads the learner's weights where they are, nothing is published."""

    def __init__(self, runtime: Runtime, learner: Role[Any], sampler: Role[Any]) -> None:
        self.learner, self.sampler = runtime.role(learner), runtime.role(sampler)
        runtime.share(learner.name, sampler.name)
        self.rollout, self.update, self.blend = self.sampler.rollout, self.learner.update, self.learner.blend
        self.compute_log_probs = self.learner.compute_log_probs

    def describe(self) -> str:
        """How large the policy is."""
        total, trained = self.learner.num_parameters()
        return f"policy of {total:,} parameters" + ("" if trained == total else f", {trained:,} trained")
