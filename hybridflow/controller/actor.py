"""The actor: a learner and a sampler with the same policy."""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from hybridflow.controller.manifest import weights
from hybridflow.core.batch import Batch
from hybridflow.core.placement import Rows
from hybridflow.core.roles import Fn, Role, Runtime

__all__ = ["LinkedActor", "SplitActor", "StreamingActor"]


class LinkedActor:
    """Learner and sampler as one role. Where they live in the same process the sampler reads the learner's weights in
    place; elsewhere they are published to it, at the first use of the sampler after an update.
    """

    def __init__(self, runtime: Runtime, learner: Role[Any], sampler: Role[Any]) -> None:
        self.runtime, self._names = runtime, (learner.name, sampler.name)
        self.learner, self._sampler = runtime.role(learner), runtime.role(sampler)
        runtime.share(*self._names)
        self.compute_log_probs, self._stale = self.learner.compute_log_probs, True
        self.begun = deque[Batch]()
        """rollouts that have begun before they were asked for, the oldest first"""

    @property
    def sampler(self) -> Any:
        """The sampler, with the newest weights."""
        self.renew()
        return self._sampler

    def renew(self) -> None:
        """The sampler gets the newest weights, unless it has them."""
        if self._stale:
            self.runtime.publish(*self._names)
            self._stale = False

    def begin(self, batch: Batch) -> None:
        """Begin a rollout that ``rollout`` will be asked for, after all that have begun before."""
        self.begun.append(self.rolled_out(batch))

    def rollout(self, batch: Batch, *params: Any) -> Batch:
        """What has begun, or else begins now, as do all with ``params`` of their own."""
        return self.begun.popleft() if self.begun and not params else self.rolled_out(batch, *params)

    def rolled_out(self, batch: Batch, *params: Any) -> Batch:
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

    def rolled_out(self, batch: Batch, *params: Any) -> Batch:
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


CALLS = 4
"""into which a batch is divided for each of several samplers: each costs the driver milliseconds"""


class StreamingActor(LinkedActor):
    """A learner, and samplers that take in prompts while they are at others: those of a few groups go to the sampler that
    has fewest tokens to draw, so who is slow, or draws long responses, gets fewer. Those that are expected to be longest
    are dealt first.

    New weights reach all samplers before the next rollout begins, in the middle of what they are at.
    """

    def __init__(self, runtime: Runtime, learner: Role[Any], sampler: Role[Any], num_workers: int) -> None:
        super().__init__(runtime, learner, sampler)
        self._members = [runtime.member(self._sampler, rank) for rank in range(num_workers)]
        self._open: list[list[Batch]] = [[] for _ in self._members]
        self.dealt = list[int]()
        """the sampler of each call"""
        self.directed = deque[int]()
        """those of the next calls, as they were in a run that is repeated"""

    def begin(self, batch: Batch) -> None:
        self.renew()
        workers = self.runtime.num_workers(self._names[1])
        self._open = [self.runtime.pending(batches) for batches in self._open]
        asked = [batch.rows(rows) for rows in pieces(batch, CALLS * workers if workers > 1 else 1)]
        outstanding = [sum(map(tokens, batches)) for batches in self._open[:workers]]
        calls = dict[int, Batch]()
        for place, worker in dealt([tokens(call) for call in asked], outstanding):
            worker = self.directed.popleft() if self.directed else worker
            self.dealt.append(worker)
            calls[place] = self._members[worker].rollout(asked[place])
            self._open[worker].append(calls[place])
        self.begun.append(Batch.concat([calls[place] for place in range(len(asked))]))


def dealt(weights: Sequence[int], outstanding: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Calls, the heaviest first, each with the worker that has least by then: (place of the call, worker)."""
    loads = list(outstanding)
    for place in sorted(range(len(weights)), key=lambda place: -weights[place]):
        worker = loads.index(min(loads))
        loads[worker] += weights[place]
        yield place, worker


def tokens(batch: Batch) -> int:
    """Of prompts, and of the responses that are expected."""
    return int(weights(batch.select(("prompt", "expected_length"))).sum())


def pieces(batch: Batch, most: int) -> list[Rows]:
    """At most so many pieces of about as many groups each, whose rows are neighbours."""
    ids = batch["group_id"]
    begins = np.flatnonzero(np.r_[True, ids[1:] != ids[:-1]])
    cuts = begins[np.unique(np.arange(most) * len(begins) // most)]
    return np.split(np.arange(len(ids)), cuts[1:])
