"""Buffers stand between rollout and learn: what was collected waits there until it is learned from.

rollout ──add(batch, version)──> buffer ──sample(version)──> learn
"""

from collections import deque
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from pydantic import Field

from hybridflow.core.batch import Array, Batch, Ragged
from hybridflow.core.config import Config
from hybridflow.core.seeding import generator

__all__ = ["REPLAYED", "SAMPLED", "Buffer", "Fifo", "InformativeGroups", "Replay", "ReplayConfig"]

REPLAYED = ("observations", "actions", "rewards", "response_mask", "terminated", "final_observations")
"""What a replay buffer reads of a batch."""

SAMPLED = ("sample_id", "observations", "actions", "rewards", "response_mask", "discounts", "weights", "final_observations")
"""What it gives."""


class Buffer(Protocol):
    """``version``: the number of updates that the policy had seen at ``add``, that the learner has seen at ``sample``."""

    def add(self, batch: Batch, version: int, /) -> None: ...
    def sample(self, version: int, /) -> Batch | None: ...
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

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        self._kept, self.num_groups = [], 0


class ReplayConfig(Config):
    """Uniform experience replay."""

    capacity: int = Field(100_000, ge=1)
    """transitions kept; the oldest are overwritten"""
    batch_size: int = Field(128, ge=1)
    """transitions of one update"""
    warmup: int = Field(1_000, ge=1)
    """transitions collected before the first update"""


class Replay:
    """Uniform experience replay (Lin 1992): pieces of episodes become transitions in a ring of preallocated arrays.

    A sampled row is one transition: time columns of length 1, ``final_observations`` what followed that step, ``discounts``
    what its value counts: ``gamma``, or 0 if the episode ended there. ``sample_id`` numbers transitions in the order of
    adding. Draw number n depends on (seed, n) and the contents alone.
    """

    def __init__(self, config: ReplayConfig, seed: int, gamma: float) -> None:
        self.config, self.seed, self.gamma = config, seed, gamma
        self.num_added = self.num_draws = 0
        self._ring: dict[str, Array] = {}

    def __len__(self) -> int:
        """Transitions held."""
        return min(self.num_added, self.config.capacity)

    def add(self, batch: Batch, version: int, /) -> None:
        """Append every action step of ``batch``."""
        transitions = _transitions(batch)
        count, capacity = len(transitions["rewards"]), self.config.capacity
        if not self._ring:
            self._ring = {name: np.zeros((capacity, *new.shape[1:]), new.dtype) for name, new in transitions.items()}
        kept = np.arange(max(0, count - capacity), count)
        places = (self.num_added + kept) % capacity
        for name, new in transitions.items():
            self._ring[name][places] = new[kept]
        self.num_added += count

    def sample(self, version: int, /) -> Batch | None:
        """``batch_size`` transitions drawn with replacement; None before ``warmup`` transitions were added."""
        if self.num_added < self.config.warmup:
            return None
        size = self.config.batch_size
        places = generator(self.seed, "replay", self.num_draws).integers(0, len(self), size)
        self.num_draws += 1
        taken = {name: ring[places] for name, ring in self._ring.items()}
        ones = np.ones(size, np.int64)
        return Batch(
            {
                "sample_id": self._number(places),
                "observations": Ragged(taken["observations"], ones),
                "actions": Ragged(taken["actions"], ones),
                "rewards": Ragged(taken["rewards"], ones),
                "response_mask": Ragged(np.ones(size, bool), ones),
                "discounts": np.where(taken["terminated"], 0.0, self.gamma).astype(np.float32),
                "weights": np.ones(size, np.float32),
                "final_observations": taken["final_observations"],
            }
        )

    def _number(self, places: Array) -> Array:
        """The number of the transition at each place of the ring: the largest below num_added that was written there."""
        last = self.num_added - 1
        numbers: Array = last - (last - places) % self.config.capacity
        return numbers

    def state_dict(self) -> dict[str, Any]:
        """Copies of what is held, and the counters."""
        ring = {name: ring[: len(self)].copy() for name, ring in self._ring.items()}
        return {"ring": ring, "num_added": self.num_added, "num_draws": self.num_draws}

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        self.num_added, self.num_draws = state["num_added"], state["num_draws"]
        self._ring = {}
        for name, held in state["ring"].items():
            self._ring[name] = np.zeros((self.config.capacity, *held.shape[1:]), held.dtype)
            self._ring[name][: len(held)] = held


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
