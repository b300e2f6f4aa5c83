"""Requests of several calls in one engine: they come in while others are served, and new weights between two tokens.

    begin ──> arrived ──> engine <── step ── take: the main thread, until its own requests have ended
                             ^
    new weights ──close──────┴──open

Whoever waits for its responses steps the engine, and with it what others wait for. New weights come from another thread,
which goes first: the next step waits until it is done.

At which step requests and weights come is up to the machine, and all else follows: the same ones before the same steps are
the same responses, bit for bit. So a stream tells when they came, its *tape*, and repeats one that it ``follow``s.
Nobody waits for ever then. Order all that happened in the recorded run by when it did: what the driver sent before a step
of an engine depended only on what had happened before, so when all of that has been repeated, it has been sent again. On
its way it is held up by nothing but new weights of its lane that were sent before it, which come in before their step.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from hybridflow.core.errors import WorkerError
from hybridflow.generation.engine import Engine
from hybridflow.generation.request import Completion, Request, SamplingParams

__all__ = ["Entry", "Stream"]


class Entry(NamedTuple):
    """Of a tape: ``after`` so many steps since the entry before, with so many requests ``in_flight`` (0: as soon as there
    are none, however many steps that takes), ``arrived`` more came in, and weights were those of ``version`` from then on.
    """

    after: int
    in_flight: int
    arrived: int
    version: int


class Stream:
    """``version``: of the weights that the engine reads. ``partial``: new weights come at the next token; else when all
    responses that have begun with the old ones have ended. ``breathe`` is called before every step, and waits while the
    process is paused."""

    def __init__(
        self,
        engine: Engine,
        params: SamplingParams,
        version: Callable[[], int],
        partial: bool,
        breathe: Callable[[], None],
    ) -> None:
        self.engine, self.params, self.version, self.partial, self.breathe = engine, params, version, partial, breathe
        self._changed = threading.Condition()
        self._arrived, self._done = deque[Request](), dict[int, Completion]()
        self._stepping = self._closed = False
        self._coming: int | None = None
        """version of weights that wait to come in"""
        self._recorded, self._tape = list[Entry](), deque[Entry]()
        self._since = self._rest = 0
        """steps since the last entry; those that a tape has after its own last one"""

    def begin(self, requests: Sequence[Request]) -> None:
        """Take them in; the next step serves them, too, those first that are expected to be longest."""
        with self._changed:
            self._arrived.extend(requests[place] for place in Request.longest_first(requests))
            self._changed.notify_all()

    def take(self, sample_ids: Sequence[int]) -> list[Completion]:
        """The responses to requests that have begun, or will: step until they are there."""
        while not self._done.keys() >= set(sample_ids):
            self.breathe()
            self._step()
        return [self._done.pop(sample_id) for sample_id in sample_ids]

    def _step(self) -> None:
        """A token for all that are being served."""
        with self._changed:
            self._changed.wait_for(self._may_step)
            arrived = self._come_in()
            self._stepping = True
        try:
            for request in arrived:
                self.engine.add(request, self.params)
            ended = {completion.sample_id: completion for completion in self.engine.step()}
        finally:
            with self._changed:
                self._stepping = False
                self._changed.notify_all()
        self._done |= ended

    def _may_step(self) -> bool:
        if entry := self._next():
            come = len(self._arrived) >= entry.arrived and self.version() == entry.version
        else:
            come = bool(self.engine.num_in_flight or (self._arrived and not self._directed))
        gives_way = self._coming is not None and self.partial and self._lets_in(self._coming)
        return come and not self._closed and not gives_way

    def _come_in(self) -> list[Request]:
        """What the next step serves besides; an entry of the tape tells of it, and of new weights."""
        entry, in_flight, version = self._next(), self.engine.num_in_flight, self.version()
        count = entry.arrived if entry else 0 if self._directed else len(self._arrived)
        if entry:
            self._tape.popleft()
        if count or version != self.engine.version:
            self._recorded.append(Entry(self._since if in_flight else 0, in_flight, count, version))
            self._since = 0
        self._since += 1
        self.engine.version = version
        return [self._arrived.popleft() for _ in range(count)]

    def close(self, version: int) -> None:
        """No step from here on, until ``open``: weights change to those of ``version``. Waits for the step that is under
        way, and for all that a tape has before them."""
        with self._changed:
            self._coming = version
            self._changed.wait_for(lambda: not self._stepping and (self.partial or self._idle) and self._lets_in(version))
            self._closed, self._coming = True, None

    @property
    def _idle(self) -> bool:
        return not self._arrived and not self.engine.num_in_flight

    def open(self) -> None:
        with self._changed:
            self._closed = False
            self._changed.notify_all()

    def abandon(self) -> None:
        """Nobody waits for anything any more; call it when no other thread is at work here."""
        for sample_id in self.engine.sample_ids:
            self.engine.abort(sample_id)
        self._arrived, self._done = deque(), {}
        self._recorded, self._tape, self._rest = [], deque(), 0
        self.open()

    # Tapes.

    def recorded(self) -> tuple[list[Entry], int]:
        """The tape since it was asked for last, and how many steps were made, or begun, after its last entry."""
        with self._changed:
            recorded, self._recorded = self._recorded, []
            return recorded, self._since

    def follow(self, tape: Iterable[Entry], rest: int) -> None:
        """Repeat a tape from here on, and then so many steps in which nothing comes; go on freely after that."""
        with self._changed:
            self._tape, self._rest = deque(tape), rest
            self._changed.notify_all()

    @property
    def _directed(self) -> bool:
        return bool(self._tape) or (self._since < self._rest and self.engine.num_in_flight > 0)

    def _next(self) -> Entry | None:
        """What the tape says of the next step; None: nothing new comes. WorkerError if it is the tape of another run."""
        if not self._tape:
            return None
        entry, in_flight = self._tape[0], self.engine.num_in_flight
        if in_flight and (not entry.in_flight or self._since < entry.after):
            return None
        if entry.in_flight and (self._since, in_flight) != (entry.after, entry.in_flight):
            raise WorkerError(
                f"replay: {in_flight} responses are under way {self._since} steps of the engine after others came in, "
                f"{entry.in_flight} after {entry.after} in the run that is repeated: machine, threads, data, packages or "
                "code are others than there"
            )
        return entry

    def _lets_in(self, version: int) -> bool:
        if not self._directed or version <= self.version():
            return True
        entry = self._next()
        return entry is not None and entry.version >= version
