"""How long a step takes, by the seconds of its pools in each stage.

"sync": a stage takes as long as its slowest pool, and stages follow each other (the paper's d_cost). "async", one step
stale: two steps are in flight, so that a step takes half of that, but no less than one pool works for it in all stages. A
pool's seconds are put into columns, the slowest pool counts in each, and a step is a monotone function of the slowest:

    sync     a column for each stage                                     their sum
    async    a column for half of each stage, one for all stages         their sum, or the last if that is longer
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hybridflow.planner.graph import TaskGraph
from hybridflow.planner.mapping import Schedule

__all__ = ["Columns"]

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Columns:
    """``shares``: by name of the task, how much of its seconds counts in each column."""

    shares: dict[str, Array]
    schedule: Schedule

    @classmethod
    def of(cls, graph: TaskGraph, schedule: Schedule) -> Columns:
        each = np.eye(1 + max(graph.stages.values()))
        if schedule == "async":
            each = np.concatenate([each / 2, np.ones((len(each), 1))], axis=1)
        return cls({name: each[stage] for name, stage in graph.stages.items()}, schedule)

    def __len__(self) -> int:
        return len(next(iter(self.shares.values())))

    def seconds(self, slowest: Array) -> Array:
        """Of a step [...], from those of the slowest pool [..., columns]."""
        if self.schedule == "sync":
            return np.asarray(slowest.sum(axis=-1))
        return np.asarray(np.maximum(slowest[..., :-1].sum(axis=-1), slowest[..., -1]))
