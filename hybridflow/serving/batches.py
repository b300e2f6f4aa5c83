"""Dynamic batching under a deadline, in an event loop.

    while a forward runs, requests come     they are read together when it has ended
    the next forward                        is for all of them, with one version of the policy
    their answers                           leave, what has come meanwhile is read, and so on

Nobody waits for company: a forward begins as soon as the last one has ended and what has come meanwhile is read.

A request's time runs from the earliest moment at which it can have arrived (``ArrivalClock``) until its answer is there. If
that can't be within the budget any more, by what waits before it, it is refused (BusyError); if it turns out not to be, its
answer is late (OverdueError), and thrown away. How long forwards take is known from the last ones.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import selectors
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from hybridflow.serving.served import Actions, Asked

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
        events = super().select(0)
        if waited := not events and timeout != 0:  # nothing was there when it began to look
            events = super().select(timeout)
        looked = time.monotonic()
        self.arrived, self._events_since = self._events_since, looked if waited else self._looked
        self._looked = looked
        return events


class Waiting(NamedTuple):
    """A request that waits: ``done`` gets its actions."""

    asked: Asked
    deadline: float
    done: asyncio.Future[Actions]

    @property
    def size(self) -> int:
        return len(self.asked.observations)


class Batcher:
    """Gathers requests for ``act``. ``forwards``: called with the number of observations of each."""

    def __init__(
        self,
        act: Callable[[Asked], Actions],
        budget_s: float,
        max_batch: int,
        forwards: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.act, self.budget_s, self.max_batch, self._forwards = act, budget_s, max_batch, forwards
        self._waiting: list[Waiting] = []
        self._forward_s, self._turn_s = Mean(), Mean()
        """what a forward takes; from the end of one to that of the next, when requests wait"""
        self._running: asyncio.Task[None] | None = None

    async def answer(self, asked: Asked, arrived: float) -> Actions:
        """Actions at observations, at most ``max_batch``, that ``arrived`` then on the monotonic clock."""
        loop, deadline = asyncio.get_running_loop(), arrived + self.budget_s
        before = sum(one.size for one in self._waiting)
        turns = math.ceil((before + len(asked.observations)) / self.max_batch) if before else 0
        if time.monotonic() + turns * self._turn_s.value > deadline:
            raise self._busy()
        request = Waiting(asked, deadline, loop.create_future())
        self._waiting.append(request)
        if self._running is None:
            # A task begins in the loop's next turn: all that was read in this one has joined by then.
            self._running = loop.create_task(self._run())
        actions = await request.done
        if (late := time.monotonic() - deadline) > 0:
            raise OverdueError(f"late: {1000 * late:.1f} ms after the {1000 * self.budget_s:g} ms in which it was due")
        return actions

    async def _run(self) -> None:
        """Forwards, one after the other, as long as requests wait."""
        ended = time.monotonic()
        while batch := self._taken():
            begun = time.monotonic()
            self._answer(batch)
            begun_before, ended = ended, time.monotonic()
            self._forward_s.add(ended - begun)
            self._turn_s.add(ended - begun_before)
            for _ in range(3):  # answers leave, what has come is read, and joins
                await asyncio.sleep(0)
        self._running = None

    def _taken(self) -> list[Waiting]:
        """The next batch. Who can't be answered in time any more is told so, for a forward would be lost on it; but one is
        tried in any case: forwards may have become shorter."""
        soonest, waiting = time.monotonic() + self._forward_s.value, [one for one in self._waiting if not one.done.done()]
        hopeless = [one for one in waiting if one.deadline < soonest]
        waiting = [one for one in waiting if one.deadline >= soonest] or [hopeless.pop() for _ in hopeless[:1]]
        for one in hopeless:
            one.done.set_exception(self._busy())
        sizes = itertools.accumulate(one.size for one in waiting)
        number = sum(size <= self.max_batch for size in sizes)
        self._waiting = waiting[number:]
        return waiting[:number]

    def _answer(self, batch: Sequence[Waiting]) -> None:
        try:
            actions, version, memory = self.act(
                Asked(*map(np.concatenate, zip(*(one.asked for one in batch), strict=True)))
            )
        except Exception as error:  # theirs who wait; others may still be answered
            for one in batch:
                one.done.set_exception(error)
            return
        self._forwards(len(actions))
        ends = np.cumsum([one.size for one in batch])[:-1]
        for one, acted, remembered in zip(batch, np.split(actions, ends), np.split(memory, ends), strict=True):
            one.done.set_result(Actions(acted, version, remembered))

    def _busy(self) -> BusyError:
        return BusyError(
            f"busy: no action within {1000 * self.budget_s:g} ms; {len(self._waiting)} requests wait before it"
        )


class Mean:
    """Of the last ten or so."""

    def __init__(self) -> None:
        self.value = 0.0

    def add(self, value: float) -> None:
        self.value += (0.1 if self.value else 1.0) * (value - self.value)
