"""Writes what a run measures: metrics.jsonl, samples.jsonl and TensorBoard files."""

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from hybridflow.telemetry.records import to_json
from hybridflow.telemetry.rundir import RunDirectory

__all__ = ["Tracker"]


class Tracker:
    """Appends the records of a run that stands at ``step`` (0: a new run); what it recorded after that is dropped.

    Every record is flushed to the operating system at once, so a killed process loses none.
    """

    def __init__(self, run: RunDirectory, step: int = 0) -> None:
        self._run = run
        self._open(step)

    def _open(self, step: int) -> None:
        # costs a second of imports, which a command that only reads runs shouldn't pay
        from torch.utils.tensorboard import SummaryWriter

        run = self._run
        run.keep_until(step)
        self._metrics = run.metrics.open("a", encoding="utf-8", errors="replace")
        self._samples = run.samples.open("a", encoding="utf-8", errors="replace")
        self._board = SummaryWriter(str(run.tensorboard), purge_step=step + 1 if step else None)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append the record of a step: ``{"step": step, **metrics}``. A number that is not finite is written as null."""
        self._metrics.write(to_json({"step": step, **metrics}) + "\n")
        self._metrics.flush()
        for name, value in metrics.items():
            self._board.add_scalar(name, value, step)
        self._board.flush()

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Append samples of a step: ``prompt``, ``response``, its ``tokens``, ``score``, ``group_id``, ``policy_version``
        and others."""
        self._samples.writelines(to_json({"step": step, **sample}) + "\n" for sample in samples)
        self._samples.flush()

    def rewind(self, step: int) -> None:
        """The run goes on after ``step`` again: what was recorded after it is dropped."""
        self.close()
        self._open(step)

    def close(self) -> None:
        self._metrics.close()
        self._samples.close()
        self._board.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
