"""The training loop, the only one in the product.

for every step:  schedule: rollout -> buffer -> learn        (who, when)
                 runtime.drain() -> metrics                  (what happened)
                 algorithm.observe(metrics)                  (adaptive coefficients)
                 hooks: evaluate, report, checkpoint         (everything else)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hybridflow.core.batch import Batch
from hybridflow.core.metrics import Span
from hybridflow.core.roles import Algorithm, Runtime
from hybridflow.rollout.buffer import Buffer
from hybridflow.rollout.schedule import Schedule, Source

__all__ = ["Hook", "Step", "Trainer"]


@dataclass(frozen=True)
class Step:
    """What hooks see after a step: means by metric name, the spans that ran, and the batch that was learned from."""

    number: int
    metrics: dict[str, float]
    spans: Sequence[Span]
    batch: Batch | None


Hook = Callable[[Step], None]


@dataclass
class Trainer:
    """A run: the parts of the loop, and how far it is."""

    algorithm: Algorithm
    source: Source
    buffer: Buffer
    schedule: Schedule
    runtime: Runtime
    hooks: Sequence[Hook] = ()
    step: int = 0
    stop_requested: bool = field(default=False, init=False)

    def train(self, steps: int) -> None:
        """Train until ``steps`` steps are done, or until ``stop_requested`` is set; a step is never left half done."""
        while self.step < steps and not self.stop_requested:
            start = time.perf_counter()
            batch = self.schedule.step(self.step + 1, self.algorithm, self.source, self.buffer)
            metrics, spans = self.runtime.drain()
            self.step += 1
            means = {**metrics.values(), **self.buffer.metrics(), **self.schedule.metrics()}
            means |= self.algorithm.metrics()
            means |= {"time/step_s": time.perf_counter() - start, "policy_version": self.schedule.version}
            self.algorithm.observe(means)
            for hook in self.hooks:
                hook(Step(self.step, means, spans, batch))

    def state_dict(self) -> dict[str, Any]:
        """State of the loop itself; the runtime keeps that of the workers."""
        return {
            "step": self.step,
            "schedule": self.schedule.state_dict(),
            "algorithm": self.algorithm.state_dict(),
            "buffer": self.buffer.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.step = state["step"]
        self.schedule.load_state_dict(state["schedule"])
        self.algorithm.load_state_dict(state["algorithm"])
        self.buffer.load_state_dict(state["buffer"])
