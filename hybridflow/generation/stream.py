"""Requests of several calls in one engine: they come in while others are served, and new weights between two tokens.

    begin ──> arrived ──> engine <── step ── take: the main thread, until its own requests have ended
                             ^
    new weights ──close──────┴──open

Whoever waits for its responses steps the engine, and with it what others wait for. New weights come from another thread,
which goes first: the next step waits until it is done.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from hybridflow.generation.engine import Engine
from hybridflow.generation.request import Completion, Request, SamplingParams

__all__ = ["Stream"]


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

    def begin(self, requests: Iterable[Request]) -> None:
        """Take them in; the next step serves them, too."""
        with self._changed:
            self._arrived.extend(requests)
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
            self._changed.wait_for(lambda: not self._closed and bool(self._arrived or self.engine.num_in_flight))
            arrived, self._arrived = self._arrived, deque()
            self._stepping = True
        try:
            self.engine.version = self.version()
            for request in arrived:
                self.engine.add(request, self.params)
            ended = {completion.sample_id: completion for completion in self.engine.step()}
        finally:
            with self._changed:
                self._stepping = False
                self._changed.notify_all()
        self._done |= ended

    def close(self) -> None:
        """No step from here on, until ``open``: weights change. Waits for the one that is under way."""
        with self._changed:
            self._changed.wait_for(lambda: not self._stepping and (self.partial or self._idle))
            self._closed = True

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
        self.open()
