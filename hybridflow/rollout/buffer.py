"""Buffers stand between rollout and learn: what was collected waits there until it is learned from.

rollout ──add(batch, version)──> buffer ──sample(version)──> learn ──learned(batch)──> buffer
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from hybridflow.core.batch import Array, Batch

__all__ = ["Buffer", "Dropped", "Fifo", "InformativeGroups"]


Dropped = tuple[str, Array]
"""a reason, and the ``sample_id`` of rows"""


class Buffer(Protocol):
    """``version``: the number of updates that the policy had seen at ``add``, that the learner has seen at ``sample``.
    ``learned`` gets what was sampled, with what learning wrote to it. ``metrics``: numbers of the buffer's own about the
    last step. ``waiting``: batches that are held to be learned from once. ``dropped``: why, and the ``sample_id`` of what
    will never be sampled, since the last call."""

    def add(self, batch: Batch, version: int, /) -> None: ...
    def sample(self, version: int, /) -> Batch | None: ...
    def learned(self, batch: Batch, /) -> None: ...
    def metrics(self) -> dict[str, float]: ...
    def waiting(self) -> Sequence[Batch]: ...
    def dropped(self) -> list[Dropped]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any], /) -> None: ...


class Fifo:
    """Every batch once, in order; those more than ``max_staleness`` updates old are dropped (``num_dropped`` batches)."""

    def __init__(self, max_staleness: int = 0) -> None:
        self.max_staleness, self.num_dropped = max_staleness, 0
        self._queue: deque[tuple[Batch, int]] = deque()
        self._dropped: list[Batch] = []

    def add(self, batch: Batch, version: int, /) -> None:
        self._queue.append((batch, version))

    def sample(self, version: int, /) -> Batch | None:
        """The oldest batch that is fresh enough; None if there is none."""
        while self._queue:
            batch, collected = self._queue.popleft()
            if version - collected <= self.max_staleness:
                return batch
            self.num_dropped += 1
            self._dropped.append(batch)
        return None

    def learned(self, batch: Batch, /) -> None:
        return None

    def metrics(self) -> dict[str, float]:
        return {}

    def waiting(self) -> Sequence[Batch]:
        return [batch for batch, _ in self._queue]

    def dropped(self) -> list[Dropped]:
        dropped, self._dropped = self._dropped, []
        return [("too old", batch["sample_id"]) for batch in dropped]

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
        self._dropped: list[tuple[str, Batch]] = []
        self.num_groups = 0

    def add(self, batch: Batch, version: int, /) -> None:
        ids, groups = batch["group_id"], dict[Any, set[float]]()
        failed = set(ids[batch["score_failed"]].tolist())
        for key, score in zip(ids.tolist(), batch["scores"].tolist(), strict=True):
            groups.setdefault(key, set()).add(score)
        kept = {key for key, scores in groups.items() if len(scores) > 1 and key not in failed}
        self.num_groups += len(kept)
        chosen = np.array([key in kept for key in ids.tolist()], bool)
        self._kept += [batch.rows(chosen)] if kept else []
        of_failed = np.array([key in failed for key in ids.tolist()], bool)
        left_out = {"failed reward": of_failed, "equal scores": ~chosen & ~of_failed}
        self._dropped += [(reason, batch.rows(rows)) for reason, rows in left_out.items() if rows.any()]

    def sample(self, version: int, /) -> Batch | None:
        """All kept groups, which are then forgotten; None if there is none."""
        kept, self._kept, self.num_groups = self._kept, [], 0
        return Batch.concat(kept) if kept else None

    def learned(self, batch: Batch, /) -> None:
        return None

    def metrics(self) -> dict[str, float]:
        return {}

    def waiting(self) -> Sequence[Batch]:
        return self._kept

    def dropped(self) -> list[Dropped]:
        dropped, self._dropped = self._dropped, []
        return [(reason, batch["sample_id"]) for reason, batch in dropped]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        self._kept, self.num_groups = [], 0
