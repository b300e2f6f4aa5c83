"""The actor: a learner and a sampler with the same policy."""

from typing import Any

from hybridflow.core.batch import Batch
from hybridflow.core.roles import Fn, Role, Runtime

__all__ = ["LinkedActor", "SplitActor"]


class LinkedActor:
    """Learner and sampler as one role. Where they live in the same process the sampler reads the learner's weights in
    place; elsewhere they are published to it, at the first use of the sampler after an update.
    """

    def __init__(self, runtime: Runtime, learner: Role[Any], sampler: Role[Any]) -> None:
        self.runtime, self._names = runtime, (learner.name, sampler.name)
        self.learner, self._sampler = runtime.role(learner), runtime.role(sampler)
        runtime.share(*self._names)
        self.compute_log_probs, self._stale = self.learner.compute_log_probs, True

    @property
    def sampler(self) -> Any:
        """The sampler, with the newest weights."""
        if self._stale:
            self.runtime.publish(*self._names)
            self._stale = False
        return self._sampler

    def rollout(self, batch: Batch, *params: Any) -> Batch:
        out: Batch = self.sampler.rollout(batch, *params)
        return out

    def update(self, batch: Batch, loss: Fn, /, *others: Fn) -> Batch:
        self._stale = True
        out: Batch = self.learner.update(batch, loss, *others)
        return out

    def describe(self) -> str:
        """How large the policy is."""
        total, trained = self.learner.num_parameters()
        return f"policy of {total:,} parameters" + ("" if trained == total else f", {trained:,} trained")


class SplitActor(LinkedActor):
    """A learner, and the processes of a sampler, its env workers, each of which works by itself.

    ``turn_to`` says whose turn the next rollout is. It gets the newest weights right before it, and no other worker does.
    """

    def __init__(self, runtime: Runtime, learner: Role[Any], sampler: Role[Any], num_workers: int) -> None:
        super().__init__(runtime, learner, sampler)
        self._members = [runtime.member(self._sampler, rank) for rank in range(num_workers)]
        self._worker = 0

    def turn_to(self, worker: int) -> None:
        self._worker = worker

    def rollout(self, batch: Batch, *params: Any) -> Batch:
        self.runtime.publish(*self._names, self._worker)
        out: Batch = self._members[self._worker].rollout(batch, *params)
        return out

    def gradients(self, batch: Batch, estimate: Fn, /, *losses: Fn) -> Batch:
        """Those of the worker whose turn it is, of its own rollout."""
        out: Batch = self._members[self._worker].gradients(batch, estimate, *losses)
        return out

    def apply(self, batch: Batch, /) -> Batch:
        self._stale = True
        out: Batch = self.learner.apply(batch)
        return out
