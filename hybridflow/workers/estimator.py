"""The estimator: runs declared estimators (advantages, rewards with KL, baselines) over whole batches."""

from hybridflow.controller.protocols import ONE_TO_ALL
from hybridflow.core.batch import Batch
from hybridflow.core.roles import Fn, WorkerContext, remote
from hybridflow.ops.advantages import group_counts

__all__ = ["EstimatorWorker"]


class EstimatorWorker:
    """One process sees the whole batch, so group and batch statistics need no distributed mathematics."""

    def __init__(self, context: WorkerContext) -> None:
        self.context = context

    @remote(ONE_TO_ALL, kind="compute")
    def compute(self, batch: Batch, fn: Fn, /) -> Batch:
        """The columns that ``fn`` writes. If it compares the rows of groups, metrics tell in how many it can't."""
        columns = fn(batch)
        if fn.min_group > 1:
            mask = {name: column for name, column in columns.items() if name == "response_mask"}
            for name, count in group_counts(batch.with_columns(**mask)).items():
                self.context.metrics.count(name, count)
        return Batch(columns, len(batch))
