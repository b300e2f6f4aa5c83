"""The estimator: runs declared estimators (advantages, rewards with KL, baselines) over whole batches."""

from hybridflow.core.batch import Batch
from hybridflow.core.roles import Fn, WorkerContext, remote

__all__ = ["EstimatorWorker"]


class EstimatorWorker:
    """One process sees the whole batch, so group and batch statistics need no distributed mathematics."""

    def __init__(self, context: WorkerContext) -> None:
        self.context = context

    @remote(kind="compute")
    def compute(self, batch: Batch, fn: Fn, /) -> Batch:
        """The columns that ``fn`` writes."""
        return Batch(fn(batch), len(batch))
