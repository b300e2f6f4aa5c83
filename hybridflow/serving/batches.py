"""Dynamic batching under a deadline, in an event loop.

    while a forward runs, requests come          they are read together, and join one batch
    the next forward                             computes it, with one version of the policy
    their answers                                leave together

Nobody waits for company: a forward begins as soon as the last one has ended and what has come meanwhile is read.

A request's time runs from the earliest moment at which it can have arrived (``ArrivalClock``) until its answer is there. If
that can't be within the budget any more, by what waits before it, it is refused (BusyError); if it turns out not to be, its
answer is late (OverdueError), and thrown away.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from hybridflow.core.batch import Array
from hybridflow.serving.served import Actions

__all__ = ["ArrivalClock", "Batcher", "BusyError", "OverdueError"]


class BusyError(Exception):
    """Refused before anything was computed."""


class OverdueError(Exception):
    """Computed, but too late."""


class ArrivalClock(selectors.DefaultSelector):
    """Watches the sockets of an event loop, and knows since when requests can have waited: what comes while the loop is
    busy is seen when it looks again, and can have come just after it last looked."""

    def __init__(self) -> None:
        super().__init__()
        self._looked = self._events_since = self.arrived = time.monotonic()
        """``arrived``: the earliest arrival of a request whose handling begins now, one turn after its bytes were read"""

    def select(self, timeout: float | None = None) -> Any:
        started = time.monotonic()
        events = super().select(timeout)
        looked = time.monotonic()
        waited = timeout != 0 and looked - started > 1e-4  # nothing was there when it began to look
        self.arrived, self._events_since = self._events_since, looked if waited else self._looked
        self._looked = looked
        return events


class Batch:
    """Observations that go through one forward."""

    def __init__(self) -> None:
        self.parts: list[Array] = []
        self.size = 0
        self.forward: asyncio.Task[Actions]


class Batcher:
    """Gathers requests for ``act``. ``forwards``: called with the number of observations of each."""

    def __init__(
        self,
        act: Callable[[Array], Actions],
        budget_s: float,
        max_batch: int,
        forwards: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.act, self.budget_s, self.max_batch, self._forwards = act, budget_s, max_batch, forwards
        self._waiting: list[Batch] = []
        self._forward_s = 0.0
        """of a forward, on average"""

    async def answer(self, observations: Array, arrived: float) -> Actions:
        """Actions at observations [B, ...], at most ``max_batch``, that ``arrived`` then on the monotonic clock."""
        deadline, size = arrived + self.budget_s, len(observations)
        joins = bool(self._waiting) and self._waiting[-1].size + size <= self.max_batch
        ahead = len(self._waiting) - joins
        # With nothing before it, it is tried, however long forwards took: they may be shorter again.
        if time.monotonic() + (ahead + 1 if ahead else 0) * self._forward_s > deadline:
            waited = f"this request may have waited {1000 * (time.monotonic() - arrived):.1f} ms to be read"
            raise BusyError(f"busy: no action within {1000 * self.budget_s:g} ms: {waited}, {ahead} forwards are before it")
        if not joins:
            before = self._waiting[-1].forward if self._waiting else None
            self._waiting.append(batch := Batch())
            batch.forward = asyncio.get_running_loop().create_task(self._forward(batch, before))
        batch = self._waiting[-1]
        first = batch.size
        batch.parts.append(observations)
        batch.size += size
        actions, version = await asyncio.shield(batch.forward)  # whoever gives up takes nobody along
        if (late := time.monotonic() - deadline) > 0:
            raise OverdueError(f"late: {1000 * late:.1f} ms after the {1000 * self.budget_s:g} ms in which it was due")
        return Actions(actions[first : first + size], version)

    async def _forward(self, batch: Batch, before: asyncio.Task[Actions] | None) -> Actions:
        # A task begins in the loop's next turn: all that was read in this one has joined by then.
        if before is not None:
            await asyncio.wait([before])
            await asyncio.sleep(0)  # its answers leave, and what has come is read
        self._waiting.remove(batch)
        begun = time.monotonic()
        actions = self.act(batch.parts[0] if len(batch.parts) == 1 else np.concatenate(batch.parts))
        newest = 0.1 if self._forward_s else 1.0
        self._forward_s += newest * (time.monotonic() - begun - self._forward_s)
        self._forwards(batch.size)
        return actions
