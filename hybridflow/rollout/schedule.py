"""A schedule decides who calls rollout and learn, and when."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, Self

from pydantic import Field, model_validator

from hybridflow.core.batch import Batch
from hybridflow.core.config import Config
from hybridflow.core.placement import Rows
from hybridflow.core.roles import Algorithm
from hybridflow.rollout.buffer import Buffer, InformativeGroups

__all__ = [
    "Ahead",
    "Asynchronous",
    "Beginning",
    "Draw",
    "DynamicSampling",
    "Offline",
    "Schedule",
    "ScheduleConfig",
    "Source",
    "Synchronous",
]

Source = Callable[[int], Batch]
"""step (from 1) -> what ``rollout`` starts from; a pure function, so resuming needs no position"""

Draw = Callable[[int, int], Batch]
"""(number of the first prompt, how many) -> what ``rollout`` starts from; a pure function too"""


class ScheduleConfig(Config):
    """Keys of ``[schedule]``."""

    kind: Literal["sync", "one_step_off", "async"] = "sync"
    """sync: roll out, then learn; one_step_off: the next rollout meanwhile; async: those of the next max_staleness steps"""
    max_staleness: int = Field(1, ge=0)
    """of async: the most updates that come between the beginning of a rollout and the learning from it"""
    partial_rollouts: bool = True
    """of async: responses go on with new weights at their next token; else new weights wait until responses have ended"""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in ("max_staleness", "partial_rollouts"):
            if self.kind != "async" and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f'{name} has no effect with kind = "{self.kind}"; set kind = "async" or leave it out')
        return self

    @property
    def ahead(self) -> int:
        """Steps whose rollouts begin before they are learned from."""
        return {"sync": 0, "one_step_off": 1, "async": self.max_staleness}[self.kind]


class Beginning(Protocol):
    """An actor whose rollouts can begin before they are asked for: ``rollout`` then returns the oldest of ``begun``."""

    begun: deque[Batch]

    def begin(self, batch: Batch, /) -> None: ...


class Schedule(Protocol):
    """``version`` counts the updates of the learner. ``metrics``: numbers of the schedule's own about the last step.
    ``waiting``: rollouts that no buffer has yet, maybe not even made yet, and the version of the policy of each.
    ``take_back``: the last step failed before anything was learned in it; it will be made again."""

    version: int

    def step(self, step: int, algorithm: Algorithm, source: Source, buffer: Buffer, /) -> Batch | None: ...
    def metrics(self) -> dict[str, float]: ...
    def waiting(self) -> Sequence[tuple[Batch, int]]: ...
    def take_back(self) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any], /) -> None: ...


class _Learning:
    """What most schedules have: so many ``updates`` from the buffer, counted."""

    def __init__(self, updates: int = 1) -> None:
        self.updates, self.version, self._before = updates, 0, 0

    def take_back(self) -> None:
        self.version = self._before

    def learn(self, algorithm: Algorithm, buffer: Buffer) -> Batch | None:
        """Learn ``updates`` times; the last batch that was learned from, None if the buffer gave none."""
        learned = None
        for _ in range(self.updates):
            batch = buffer.sample(self.version)
            if batch is not None:
                learned = algorithm.learn(batch)
                buffer.learned(learned)
                self.version += 1
        return learned

    def metrics(self) -> dict[str, float]:
        return {}

    def waiting(self) -> Sequence[tuple[Batch, int]]:
        return ()

    def state_dict(self) -> dict[str, Any]:
        return {"version": self.version}

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        self.version = state["version"]


class Synchronous(_Learning):
    """Roll out with the newest weights, then learn ``updates`` times from the buffer."""

    def step(self, step: int, algorithm: Algorithm, source: Source, buffer: Buffer, /) -> Batch | None:
        """The last batch that was learned from; None while the buffer is warming up."""
        self._before = self.version
        buffer.add(algorithm.rollout(source(step)), self.version)
        return self.learn(algorithm, buffer)


class Offline(_Learning):
    """Learn ``updates`` times a step from what the buffer began with; nothing is collected."""

    def step(self, step: int, algorithm: Algorithm, source: Source, buffer: Buffer, /) -> Batch | None:
        """The last batch that was learned from; None if there is nothing to learn from."""
        return self.learn(algorithm, buffer)


class Ahead(_Learning):
    """Learn from the rollout of the step, while those of the next ``steps`` are under way: where the sampler has processes
    of its own, both happen at once.

    Rollouts are learned from in the order of their prompts, whoever is faster, so a run learns from what ``Synchronous``
    does, only with older weights, and short responses are no earlier than long ones. A rollout begins when the learner has
    made all but ``steps`` of the updates before its own: it is at most so many updates old, and what isn't there by then
    is waited for. Without any ``steps`` it is ``Synchronous``.

    Rollouts under way are part of the state: saving waits until they are done.
    """

    def __init__(self, actor: Beginning, steps: int, updates: int = 1) -> None:
        super().__init__(updates)
        self.actor, self.steps, self._versions = actor, steps, deque[int]()
        self._oldest: tuple[Batch, int] | None = None
        """the rollout that the last step learned from, and its version"""
        self._metrics: dict[str, float] = {}

    def step(self, step: int, algorithm: Algorithm, source: Source, buffer: Buffer, /) -> Batch | None:
        """The last batch that was learned from; None while the buffer is warming up."""
        while len(self._versions) <= self.steps:
            self.actor.begin(source(step + len(self._versions)))
            self._versions.append(self.version)
        begun_by = self._versions.popleft()
        self._before, self._oldest = self.version, (self.actor.begun[0], begun_by)
        self._metrics = {"staleness": self.version - begun_by}
        buffer.add(algorithm.rollout(source(step)), begun_by)
        return self.learn(algorithm, buffer)

    def metrics(self) -> dict[str, float]:
        """``staleness``: updates since the rollout began that the last step learned from, or stored."""
        return self._metrics

    def take_back(self) -> None:
        super().take_back()
        if self._oldest is not None:
            batch, begun_by = self._oldest
            self.actor.begun.appendleft(batch)
            self._versions.appendleft(begun_by)

    def state_dict(self) -> dict[str, Any]:
        begun = [batch.load() for batch in self.actor.begun]
        return {**super().state_dict(), "begun": begun, "versions": list(self._versions)}

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        super().load_state_dict(state)
        self.actor.begun, self._versions = deque(state["begun"]), deque(state["versions"])


class _Pending(NamedTuple):
    """What ``worker`` is at, since the learner had this ``version``."""

    worker: int
    batch: Batch
    version: int


class Asynchronous(_Learning):
    """Every env worker rolls out by itself, from its share of the source's rows; what is there first is learned from.

    Its worker then gets the newest weights and rolls out again, while the others go on. ``turn_to`` says whose turn the
    next rollout is, ``wait_any`` waits until one of several batches is there. In one process, where a rollout is done when
    it returns, that is the oldest, so workers take turns, and a rollout is as many updates old as there are other workers.

    Pending rollouts are part of the state: saving waits until they are done and keeps them, so nothing is lost or done
    twice. They were made with older weights, which nobody needs any more.
    """

    def __init__(
        self,
        wait_any: Callable[[Sequence[Batch]], int],
        turn_to: Callable[[int], None],
        shares: Sequence[Rows],
        updates: int = 1,
    ) -> None:
        super().__init__(updates)
        self.wait_any, self.turn_to, self.shares, self._pending = wait_any, turn_to, shares, list[_Pending]()
        self.order: Mapping[int, int] = {}
        """by step, whose rollout is learned from, whoever is there first: in a run that is repeated"""
        self._metrics: dict[str, float] = {}

    def step(self, step: int, algorithm: Algorithm, source: Source, buffer: Buffer, /) -> Batch | None:
        """The last batch that was learned from; None if the buffer gave none."""
        self._send(algorithm, source(step))
        if step in self.order:
            first = [pending.worker for pending in self._pending].index(self.order[step])
        else:
            first = self.wait_any([pending.batch for pending in self._pending])
        arrived = self._pending.pop(first)
        self._metrics = {"worker": arrived.worker, "staleness": self.version - arrived.version}
        buffer.add(arrived.batch, arrived.version)
        return self.learn(algorithm, buffer)

    def _send(self, algorithm: Algorithm, source: Batch) -> None:
        """A rollout of every worker that has none."""
        busy = {pending.worker for pending in self._pending}
        for worker, rows in enumerate(self.shares):
            if worker not in busy:
                self.turn_to(worker)
                self._pending.append(_Pending(worker, algorithm.rollout(source.rows(rows)), self.version))

    def metrics(self) -> dict[str, float]:
        """``worker``: whose rollout came in the last step; ``staleness``: updates since it began."""
        return self._metrics

    def waiting(self) -> Sequence[tuple[Batch, int]]:
        return [(batch, version) for _, batch, version in self._pending]

    def state_dict(self) -> dict[str, Any]:
        pending = [(worker, batch.load(), version) for worker, batch, version in self._pending]
        return {**super().state_dict(), "pending": pending}

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        super().load_state_dict(state)
        self._pending = [_Pending(*pending) for pending in state["pending"]]


class DynamicSampling:
    """Roll out until ``num_prompts`` groups have scores that differ, then learn from those (DAPO, Yu et al. 2025, 3.2).

    The buffer keeps the groups that say something; what is missing is refilled with the next prompts, at most
    ``max_refills`` times a step, so a step never takes a prompt twice or leaves one out. If groups are still missing, fewer
    are learned from; without any, the step is over.
    """

    def __init__(self, draw: Draw, buffer: InformativeGroups, num_prompts: int, max_refills: int) -> None:
        self.draw, self.buffer, self.num_prompts, self.max_refills = draw, buffer, num_prompts, max_refills
        self.version = self.num_drawn = 0
        self._before = 0, 0
        self._metrics: dict[str, float] = {}

    def step(self, step: int, algorithm: Algorithm, source: Source, buffer: Buffer, /) -> Batch | None:
        """The batch that was learned from; None if no group had scores that differ."""
        self._before = self.version, self.num_drawn
        before, rollouts, missing = self.num_drawn, 0, self.num_prompts
        while missing and rollouts <= self.max_refills:
            self.buffer.add(algorithm.rollout(self.draw(self.num_drawn, missing)), self.version)
            self.num_drawn += missing
            rollouts, missing = rollouts + 1, self.num_prompts - self.buffer.num_groups
        drawn = self.num_drawn - before
        self._metrics = {"refills": rollouts - 1, "groups_drawn": drawn, "groups_dropped": drawn - self.buffer.num_groups}
        batch = self.buffer.sample(self.version)
        if batch is None:
            return None
        self.version += 1
        return algorithm.learn(batch)

    def metrics(self) -> dict[str, float]:
        """``refills``, ``groups_drawn`` and ``groups_dropped`` of the last step."""
        return self._metrics

    def take_back(self) -> None:
        self.version, self.num_drawn = self._before
        self.buffer.sample(self.version)  # what the step has found is drawn again

    def waiting(self) -> Sequence[tuple[Batch, int]]:
        return ()

    def state_dict(self) -> dict[str, Any]:
        return {"version": self.version, "num_drawn": self.num_drawn}

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        self.version, self.num_drawn = state["version"], state["num_drawn"]
