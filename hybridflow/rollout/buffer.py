"""Buffers stand between rollout and learn: what was collected waits there until it is learned from.

rollout ──add(batch, version)──> buffer ──sample(version)──> learn ──learned(batch)──> buffer
"""

from collections import deque
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from pydantic import Field

from hybridflow.core.batch import Array, Batch, Ragged
from hybridflow.core.config import Config
from hybridflow.core.seeding import uniforms
from hybridflow.rollout.sum_tree import SumTree

__all__ = ["REPLAYED", "SAMPLED", "Buffer", "Fifo", "InformativeGroups", "Replay", "ReplayConfig"]

REPLAYED = (
    "sample_id",
    "observations",
    "actions",
    "rewards",
    "response_mask",
    "terminated",
    "truncated",
    "final_observations",
)
"""What a replay buffer reads of a batch."""

SAMPLED = ("sample_id", "observations", "actions", "rewards", "response_mask", "discounts", "weights", "final_observations")
"""What it gives."""

SMALLEST_ERROR = 1e-6
"""added to TD errors, so that everything is drawn now and then"""


class Buffer(Protocol):
    """``version``: the number of updates that the policy had seen at ``add``, that the learner has seen at ``sample``.
    ``learned`` gets what was sampled, with what learning wrote to it."""

    def add(self, batch: Batch, version: int, /) -> None: ...
    def sample(self, version: int, /) -> Batch | None: ...
    def learned(self, batch: Batch, /) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any], /) -> None: ...


class Fifo:
    """Every batch once, in order; those more than ``max_staleness`` updates old are dropped (``num_dropped`` batches)."""

    def __init__(self, max_staleness: int = 0) -> None:
        self.max_staleness, self.num_dropped = max_staleness, 0
        self._queue: deque[tuple[Batch, int]] = deque()

    def add(self, batch: Batch, version: int, /) -> None:
        self._queue.append((batch, version))

    def sample(self, version: int, /) -> Batch | None:
        """The oldest batch that is fresh enough; None if there is none."""
        while self._queue:
            batch, collected = self._queue.popleft()
            if version - collected <= self.max_staleness:
                return batch
            self.num_dropped += 1
        return None

    def learned(self, batch: Batch, /) -> None:
        return None

    def state_dict(self) -> dict[str, Any]:
        return {"queue": list(self._queue), "num_dropped": self.num_dropped}

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        self._queue, self.num_dropped = deque(state["queue"]), state["num_dropped"]


class InformativeGroups:
    """The groups (rows of equal ``group_id``) whose ``scores`` differ, of everything that was added since the last sample.

    Equal scores say nothing about which response is better, and nor does a group in which the scorer failed. Between the
    steps of a run it is empty.
    """

    def __init__(self) -> None:
        self._kept: list[Batch] = []
        self.num_groups = 0

    def add(self, batch: Batch, version: int, /) -> None:
        ids, groups = batch["group_id"], dict[Any, set[float]]()
        failed = set(ids[batch["score_failed"]].tolist())
        for key, score in zip(ids.tolist(), batch["scores"].tolist(), strict=True):
            groups.setdefault(key, set()).add(score)
        kept = {key for key, scores in groups.items() if len(scores) > 1 and key not in failed}
        self.num_groups += len(kept)
        self._kept += [batch.rows(np.array([key in kept for key in ids.tolist()], bool))] if kept else []

    def sample(self, version: int, /) -> Batch | None:
        """All kept groups, which are then forgotten; None if there is none."""
        kept, self._kept, self.num_groups = self._kept, [], 0
        return Batch.concat(kept) if kept else None

    def learned(self, batch: Batch, /) -> None:
        return None

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        self._kept, self.num_groups = [], 0


class ReplayConfig(Config):
    """Keys of ``[replay]``: experience replay."""

    capacity: int = Field(100_000, ge=1)
    """transitions kept; the oldest are overwritten"""
    batch_size: int = Field(128, ge=1)
    """transitions of one update"""
    warmup: int = Field(1_000, ge=1)
    """transitions collected before the first update; sac, td3 and ddpg draw their continuous actions evenly meanwhile"""
    n_steps: int = Field(1, ge=1)
    """steps whose rewards are added up before a value is bootstrapped"""
    priority: float = Field(0.0, ge=0)
    """draw in proportion to this power of the TD error, prioritised replay; 0: all alike"""
    importance: float = Field(0.4, ge=0, le=1)
    """power of the weights that make up for it; it rises to 1 over the run"""


class Replay:
    """Experience replay (Lin 1992): pieces of episodes become transitions in a ring of preallocated arrays.

    A sampled row is one transition: time columns of length 1, ``final_observations`` what followed, ``discounts`` what its
    value counts: ``gamma``, or 0 if the episode ended there. ``sample_id`` numbers transitions in the order of adding. A
    sample is ``draws`` draws, one below the other. Draw number n of ``num_draws`` depends on (seed, n) and the contents
    alone.

    With ``n_steps``, a row's ``rewards`` are r_0 + gamma r_1 + ... of up to so many steps (Sutton 1988): fewer where the
    episode ended, or where no more has been collected yet. A piece that neither terminated nor was truncated goes on in the
    one with the next ``sample_id``.

    With ``priority`` alpha, rows are drawn in proportion to |td_error|^alpha, those never learned from as the largest, and
    weigh (N P)^-beta, over the largest such weight of the batch (Schaul et al. 2016, proportional; beta is ``importance``).
    """

    def __init__(self, config: ReplayConfig, seed: int, gamma: float, num_draws: int = 1, draws: int = 1) -> None:
        self.config, self.seed, self.gamma, self._all_draws, self.draws = config, seed, gamma, num_draws, draws
        self.num_added = self.num_draws = 0
        self._ring: dict[str, Array] = {}
        self._going_on: dict[int, int] = {}
        """by the ``sample_id`` with which an episode goes on, its last transition so far"""
        self._tree = SumTree(config.capacity) if config.priority else None
        self._largest = 1.0

    def __len__(self) -> int:
        """Transitions held."""
        return min(self.num_added, self.config.capacity)

    def add(self, batch: Batch, version: int, /) -> None:
        """Append every action step of ``batch``."""
        transitions = _transitions(batch)
        count, capacity = len(transitions["rewards"]), self.config.capacity
        if self.config.n_steps > 1:
            transitions["following"] = self._following(batch)
        if not self._ring:
            self._ring = {name: np.zeros((capacity, *new.shape[1:]), new.dtype) for name, new in transitions.items()}
        kept = np.arange(max(0, count - capacity), count)
        places = (self.num_added + kept) % capacity
        for name, new in transitions.items():
            self._ring[name][places] = new[kept]
        if self._tree is not None:
            self._tree.set(places, self._largest)
        self.num_added += count

    def _following(self, batch: Batch) -> Array:
        """The number of the transition that follows each new one in its episode, -1 where there is none (yet)."""
        mask = batch.ragged("response_mask")
        counts = np.bincount(mask.row_index[mask.values], minlength=len(batch))
        ends = self.num_added + np.cumsum(counts)
        following = self.num_added + 1 + np.arange(int(counts.sum()))
        following[ends[counts > 0] - 1 - self.num_added] = -1
        goes_on = ~(batch["terminated"] | batch["truncated"])
        for row, sample in enumerate(batch["sample_id"].tolist()):
            last = self._going_on.pop(sample, None)
            if last is not None and counts[row]:
                self._continue(last, int(ends[row] - counts[row]), following)
            if goes_on[row] and counts[row]:
                self._going_on[sample + 1] = int(ends[row]) - 1
        return following

    def _continue(self, last: int, first: int, following: Array) -> None:
        """Transition ``first`` follows ``last``, which is held, among the new ones, or overwritten."""
        if last >= self.num_added:
            following[last - self.num_added] = first
        elif last >= self.num_added - len(self):
            self._ring["following"][last % self.config.capacity] = first

    def sample(self, version: int, /) -> Batch | None:
        """``draws`` times ``batch_size`` transitions drawn with replacement; None before ``warmup`` were added."""
        if self.num_added < self.config.warmup:
            return None
        places, weights = self._draw()
        self.num_draws += self.draws
        last, rewards, discounts = self._returns(places)
        ring, ones = self._ring, np.ones(len(places), np.int64)
        return Batch(
            {
                "sample_id": self._number(places),
                "observations": Ragged(ring["observations"][places], ones),
                "actions": Ragged(ring["actions"][places], ones),
                "rewards": Ragged(rewards, ones),
                "response_mask": Ragged(np.ones(len(places), bool), ones),
                "discounts": np.where(ring["terminated"][last], np.float32(0), discounts),
                "weights": weights,
                "final_observations": ring["final_observations"][last],
            }
        )

    def _draw(self) -> tuple[Array, Array]:
        """Places [B] in the ring, and their weights."""
        size, number = self.config.batch_size, self.num_draws + np.arange(self.draws)[:, None]
        random = uniforms(self.seed, "replay", number, np.arange(size))
        if self._tree is None:
            return (random * len(self)).astype(np.int64).ravel(), np.ones(random.size, np.float32)
        total = self._tree.total
        places = self._tree.find(((np.arange(size) + random) * (total / size)).ravel())
        progress = min(1.0, self.num_draws / self._all_draws)
        beta = self.config.importance + (1 - self.config.importance) * progress
        weights = (len(self) * self._tree.priorities[places] / total) ** -beta
        return places, (weights / weights.max()).astype(np.float32)

    def _returns(self, places: Array) -> tuple[Array, Array, Array]:
        """Of the transitions at ``places``: where their last steps are, the sums of rewards up to there, and gamma to the
        number of steps."""
        rewards, discounts = self._ring["rewards"][places], np.full(len(places), self.gamma, np.float32)
        for _ in range(self.config.n_steps - 1):
            following = self._ring["following"][places]
            goes_on = following >= 0
            places = np.where(goes_on, following % self.config.capacity, places)
            rewards += np.where(goes_on, discounts * self._ring["rewards"][places], np.float32(0))
            discounts = np.where(goes_on, discounts * np.float32(self.gamma), discounts)
        return places, rewards, discounts

    def learned(self, batch: Batch, /) -> None:
        """Priorities of what was learned from, by its ``td_errors``."""
        if self._tree is None:
            return
        numbers = batch["sample_id"]
        held = numbers >= self.num_added - len(self)
        errors = np.abs(batch.ragged("td_errors").values[held].astype(np.float64))
        priorities = (errors + SMALLEST_ERROR) ** self.config.priority
        self._largest = max(self._largest, float(priorities.max(initial=0.0)))
        self._tree.set(numbers[held] % self.config.capacity, priorities)

    def _number(self, places: Array) -> Array:
        """The number of the transition at each place of the ring: the largest below num_added that was written there."""
        last = self.num_added - 1
        numbers: Array = last - (last - places) % self.config.capacity
        return numbers

    def state_dict(self) -> dict[str, Any]:
        """Copies of what is held, and the counters."""
        state = {"ring": {name: ring[: len(self)].copy() for name, ring in self._ring.items()}}
        state |= {name: getattr(self, name) for name in ("num_added", "num_draws")}
        going_on = np.array([*self._going_on.items()], np.int64).reshape(-1, 2)
        priorities = None if self._tree is None else self._tree.priorities[: len(self)].copy()
        return {**state, "going_on": going_on, "priorities": priorities, "largest": self._largest}

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        self.num_added, self.num_draws = state["num_added"], state["num_draws"]
        self._ring = {}
        for name, held in state["ring"].items():
            self._ring[name] = np.zeros((self.config.capacity, *held.shape[1:]), held.dtype)
            self._ring[name][: len(held)] = held
        self._going_on, self._largest = dict(state["going_on"].tolist()), state["largest"]
        if self._tree is not None:
            self._tree = SumTree(self.config.capacity)
            self._tree.set(np.arange(len(self)), state["priorities"])


def _transitions(batch: Batch) -> dict[str, Array]:
    """Every action step with what followed it, [N, ...]."""
    observations = batch.ragged("observations")
    filled = np.flatnonzero(observations.lengths)
    last = observations.offsets[1:][filled] - 1
    following = np.roll(observations.values, -1, axis=0)
    following[last] = batch["final_observations"][filled]
    terminated = np.zeros(len(following), bool)
    terminated[last] = batch["terminated"][filled]
    steps = {
        "observations": observations.values,
        "actions": batch.ragged("actions").values,
        "rewards": batch.ragged("rewards").values,
        "terminated": terminated,
        "final_observations": following,
    }
    mask = batch.ragged("response_mask").values
    return {name: values[mask] for name, values in steps.items()}
