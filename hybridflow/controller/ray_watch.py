"""Who of the worker processes is still there: asked on their second lane, which answers whatever the first one computes."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayActorError, RayTaskError

__all__ = ["Key", "Silence", "Watch", "is_loss"]

Key = tuple[str, int]
"""(pool, rank) of a process"""
INTERVAL_S = 1.0


class Silence(NamedTuple):
    """Of a lost process: seconds since it was heard of, and what Ray knows of its death; None if it is only silent."""

    since_s: float
    error: RayActorError | None


def is_loss(error: BaseException) -> bool:
    """Whether a task's own process died, and not that of another one that it needed."""
    return isinstance(error, RayActorError) and not isinstance(error, RayTaskError)


class Watch:
    """Watches processes that have answered once. One that is silent for ``deadline_s`` is lost."""

    def __init__(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self._processes: Mapping[Key, Any] = {}
        self._asked: dict[Key, tuple[Any, float]] = {}
        self._heard: dict[Key, float] = {}
        self._looked_s = 0.0

    def begin(self, processes: Mapping[Key, Any]) -> None:
        """From now on these."""
        now = time.monotonic()
        self._processes, self._asked, self._looked_s = dict(processes), {}, now
        self._heard = dict.fromkeys(processes, now)

    def look(self) -> dict[Key, Silence]:
        """Who is lost. Doesn't wait, and does nothing if it was called a moment ago."""
        now = time.monotonic()
        away_s = now - self._looked_s
        if away_s < min(INTERVAL_S, self.deadline_s / 4):
            return {}
        self._looked_s = now
        if away_s > self.deadline_s / 2:  # the driver was busy itself: nobody is late whom nobody listened to
            self._asked = {key: (reference, now) for key, (reference, _) in self._asked.items()}
        lost = self._listen(0.0)
        lost |= {key: self._silence(key) for key, (_, sent_s) in self._asked.items() if now - sent_s > self.deadline_s}
        self._ask(self._processes.keys() - self._asked.keys() - lost.keys())
        return lost

    def check(self) -> dict[Key, Silence]:
        """Who is lost now: everybody is asked, and waited for."""
        self._asked = {}
        self._ask(self._processes.keys())
        lost, until = dict[Key, Silence](), time.monotonic() + self.deadline_s
        while self._asked and time.monotonic() < until:
            lost |= self._listen(until - time.monotonic())
        return lost | {key: self._silence(key) for key in self._asked}

    def _ask(self, keys: Collection[Key]) -> None:
        now = time.monotonic()
        self._asked |= {key: (self._processes[key].ping.remote(), now) for key in keys}

    def _listen(self, timeout_s: float) -> dict[Key, Silence]:
        """Take in the answers that are there, or the next one; whose process died."""
        keys = {reference: key for key, (reference, _) in self._asked.items()}
        if not keys:
            return {}
        ready, _ = ray.wait(list(keys), num_returns=1 if timeout_s else len(keys), timeout=max(0.0, timeout_s))
        lost = {}
        for reference in ready:
            key = keys[reference]
            del self._asked[key]
            try:
                ray.get(reference)
                self._heard[key] = time.monotonic()
            except RayActorError as error:
                lost[key] = self._silence(key, error)
        return lost

    def _silence(self, key: Key, error: RayActorError | None = None) -> Silence:
        return Silence(time.monotonic() - self._heard[key], error)
