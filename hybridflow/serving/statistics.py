"""What a policy server has done."""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

import numpy as np

__all__ = ["Statistics"]

RECENT = 10_000
QUANTILES = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999, "max": 1.0}


class Statistics:
    """Counts since the start; latencies of the last 10,000 answers, from when a request can have arrived until its answer
    was there."""

    def __init__(self) -> None:
        self.counts = Counter[str](dict.fromkeys(("answered", "busy", "late", "refused_connections", "malformed"), 0))
        self.observations = self.forwards = self.largest = self.updates = 0
        self._latencies_s: deque[float] = deque(maxlen=RECENT)

    def answered(self, seconds: float) -> None:
        self.counts["answered"] += 1
        self._latencies_s.append(seconds)

    def forward(self, observations: int) -> None:
        self.observations += observations
        self.forwards += 1
        self.largest = max(self.largest, observations)

    def snapshot(self) -> dict[str, Any]:
        """As plain data. ``latency_ms`` is empty before the first answer."""
        recent = 1000 * np.array(self._latencies_s)
        latency = {name: round(float(np.quantile(recent, q)), 3) for name, q in QUANTILES.items()} if len(recent) else {}
        mean = round(self.observations / self.forwards, 2) if self.forwards else 0.0
        batches = {"forwards": self.forwards, "observations": self.observations, "mean": mean, "largest": self.largest}
        return {"requests": dict(self.counts), "latency_ms": latency, "batches": batches, "updates": self.updates}
