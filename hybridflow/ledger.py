"""The ledger of a run: what became of every sample, in a SQLite file (WAL mode) that is written at most once a second.

    source ──issued──> rollout ──generated, scored──> buffer ──> learn ──trained──>
                                                       └─dropped: reason

A sample is known by its ``sample_id``, which no other sample of a run has; so a prompt's samples of different epochs are
different ones, and one that is trained twice in an epoch shows as an id that is trained twice. The ledger listens where
samples pass (``Accounted`` around the algorithm, the buffer's and the schedule's own word) and pulls nothing: ids are known
where batches are dealt. Rows that an env sampler makes are issued and generated at once, when the rollout is there.

    events     step, event, version of the policy, first, count: samples first, first + 1, ...; attempt, redone
    waiting    first, count: what the buffer held when the file was last written
    totals     name, value: of a replay buffer at that time
    attempts   attempt, step: the run began, or went on, after that step

When a run goes on from a step, the events of later steps are marked as redone, and nothing counts twice.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from hybridflow.core.batch import Batch
from hybridflow.core.errors import CheckpointError, ResourceError
from hybridflow.core.roles import Algorithm
from hybridflow.rollout.replay import Replay
from hybridflow.train import Step, Trainer

__all__ = ["DROPPED", "Accounted", "Ledger", "ranges"]

DROPPED = "dropped: "
"""begins the events of samples that are never learned from; the reason follows"""
WRITE_EVERY_S = 1.0
TABLES = """
CREATE TABLE IF NOT EXISTS attempts (attempt INTEGER PRIMARY KEY, step INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS events (
    step INTEGER NOT NULL, event TEXT NOT NULL, version INTEGER NOT NULL, first INTEGER, count INTEGER NOT NULL,
    attempt INTEGER NOT NULL, redone INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE IF NOT EXISTS waiting (first INTEGER NOT NULL, count INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS totals (name TEXT PRIMARY KEY, value INTEGER NOT NULL);
"""
Ids = NDArray[np.int64]


class Event(NamedTuple):
    """``ids`` of samples, or how many where they have none of their own: steps, and draws from a replay."""

    step: int
    event: str
    version: int
    ids: Ids | int


class Ledger:
    """Accounts for the samples of ``trainer`` in the file ``path``, from the step after which it stands: a hook.

    ``failures``: columns that say which rows a scorer failed on. ``sampled``: rows are made by an env sampler, instead of
    given by the source.
    """

    def __init__(self, path: Path, trainer: Trainer, failures: Sequence[str], sampled: bool) -> None:
        self.trainer, self.failures, self.sampled = trainer, failures, sampled
        self._replay = trainer.buffer if isinstance(trainer.buffer, Replay) else None
        self._events: list[Event] = []
        self._issued: list[Ids] = []
        self._made: list[tuple[Batch, int]] = []
        self._learned: list[Batch] = []
        self._waiting: list[Ids] = []
        self._totals: dict[str, int] = {}
        self._path, self._written_s, self.attempt = path, 0.0, 0
        with self._explained():
            self._file = sqlite3.connect(path, isolation_level=None)
            self._file.execute("PRAGMA journal_mode = WAL")
            self._file.executescript(TABLES)
        trainer.algorithm = Accounted(trainer.algorithm, self)
        self.rewind(trainer.step)

    # What the program tells, in the middle of a step.

    def issued(self, source: Batch) -> None:
        """Goes into a rollout."""
        if not self.sampled:
            self._issued.append(source["sample_id"])

    def made(self, batch: Batch) -> None:
        """Comes of a rollout, maybe later."""
        self._made.append((batch, self.trainer.schedule.version))

    def learned(self, batch: Batch) -> None:
        """Has been learned from."""
        self._learned.append(batch)

    # What becomes of it.

    def __call__(self, step: Step) -> None:
        """Account for a step that is done."""
        add = self._events.append
        version = self.trainer.schedule.version
        for ids in self._issued:
            add(Event(step.number, "issued", version, ids))
        on_their_way = [batch for batch, _ in self.trainer.schedule.waiting()]
        made, self._made = self._made, []
        for batch, made_by in made:
            if any(batch is waiting for waiting in on_their_way):
                self._made.append((batch, made_by))
            else:
                self._generated(step.number, batch, made_by)
        for batch in self._learned:
            self._trained(step.number, batch, version)
        for reason, ids in self.trainer.buffer.dropped():
            add(Event(step.number, DROPPED + reason, version, ids))
        self._issued, self._learned = [], []
        self._look()
        if time.monotonic() - self._written_s >= WRITE_EVERY_S:
            self.write()

    def _generated(self, step: int, batch: Batch, version: int) -> None:
        ids = batch["sample_id"]
        if self.sampled:
            self._events.append(Event(step, "issued", version, ids))
        self._events.append(Event(step, "generated", version, ids))
        if any(name in batch for name in self.failures):
            self._events.append(Event(step, "scored", version, ids[~self._failed(batch)]))
        if self._replay is not None:
            self._events.append(Event(step, "collected", version, int(batch.lengths.sum())))

    def _trained(self, step: int, batch: Batch, version: int) -> None:
        if self._replay is not None:
            self._events.append(Event(step, "drawn", version, len(batch)))
            return
        ids, failed = batch["sample_id"], self._failed(batch)
        if failed.any():  # estimators leave out the whole group
            failed = np.isin(batch["group_id"], batch["group_id"][failed])
            self._events.append(Event(step, f"{DROPPED}failed reward", version, ids[failed]))
        self._events.append(Event(step, "trained", version, ids[~failed]))

    def _failed(self, batch: Batch) -> NDArray[np.bool_]:
        failed = np.zeros(len(batch), bool)
        for name in self.failures:
            if name in batch:
                failed |= batch[name]
        return failed

    # The file.

    def write(self, durable: bool = False) -> None:
        """Write all steps that are done; ``durable``: wait for the disk, as a checkpoint does that goes on from here."""
        with self._transaction(durable):
            self._insert(self._events)
            self._insert_state()
        self._events, self._written_s = [], time.monotonic()

    def _look(self) -> None:
        """What is held after a step, or before the first."""
        self._waiting = [batch["sample_id"] for batch in self.trainer.buffer.waiting()]
        if not self.sampled:
            self._waiting += [batch["sample_id"] for batch, _ in self.trainer.schedule.waiting()]
        self._totals = {} if self._replay is None else self._replay.totals()

    def rewind(self, step: int) -> None:
        """The run begins, or goes on, after ``step``, with what its buffer and schedule hold by now.

        What was issued in a step that was never finished counts as redone too.
        """
        self.trainer.buffer.dropped()
        self._look()
        with self._transaction(durable=True):
            self._insert([*self._events, *(Event(step + 1, "issued", -1, ids) for ids in self._issued)])
            self._file.execute("UPDATE events SET redone = 1 WHERE step > ? AND redone = 0", (step,))
            (self.attempt,) = self._file.execute("SELECT COALESCE(MAX(attempt), 0) + 1 FROM attempts").fetchone()
            self._file.execute("INSERT INTO attempts VALUES (?, ?)", (self.attempt, step))
            if self.attempt == 1:
                self._insert(self._carried(step))
            self._insert_state()
        self._issued, self._learned, self._made = [], [], list(self.trainer.schedule.waiting())
        self._events, self._written_s = [], time.monotonic()

    def _carried(self, step: int) -> list[Event]:
        """What a run brings that kept no ledger until then; a new one brings nothing."""
        events = [Event(step, event, -1, ids) for ids in self._waiting for event in ("issued", "generated")]
        if totals := self._totals:
            events.append(Event(step, "collected", -1, totals["added"] - totals["given"]))
            events.append(Event(step, "drawn", -1, totals["drawn"]))
        return events

    def saving(self, save: Callable[[Path], Mapping[str, Any]]) -> Callable[[Path], Mapping[str, Any]]:
        """What a checkpoint goes on from is in the file before the checkpoint is there."""

        def begin(folder: Path) -> Mapping[str, Any]:
            self.write(durable=True)
            return save(folder)

        return begin

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.write(durable=True)
        self._file.close()

    def _insert(self, events: Sequence[Event]) -> None:
        named = [(event, event.ids) for event in events if not isinstance(event.ids, int)]
        rows: list[tuple[Any, ...]] = [
            (*event[:3], None, event.ids, self.attempt) for event in events if isinstance(event.ids, int)
        ]
        for number, first, count in ranges([ids for _, ids in named]):
            rows.append((*named[number][0][:3], first, count, self.attempt))
        columns = "step, event, version, first, count, attempt"
        self._file.executemany(f"INSERT INTO events ({columns}) VALUES (?, ?, ?, ?, ?, ?)", rows)

    def _insert_state(self) -> None:
        self._file.execute("DELETE FROM waiting")
        self._file.executemany("INSERT INTO waiting VALUES (?, ?)", [row[1:] for row in ranges(self._waiting)])
        self._file.executemany("REPLACE INTO totals VALUES (?, ?)", self._totals.items())

    @contextmanager
    def _transaction(self, durable: bool) -> Iterator[None]:
        with self._explained():
            self._file.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
            self._file.execute("BEGIN IMMEDIATE")
            with self._file:  # commits, or rolls back
                yield

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:
            hint = "free some space or wait for who holds it, then go on with --resume"
            raise ResourceError(f"{self._path}: can't be written ({error}); {hint}") from error
        except sqlite3.DatabaseError as error:
            hint = "remove it and go on with --resume; accounts then begin at that step"
            raise CheckpointError(f"{self._path}: damaged ({error}); {hint}") from error


class Accounted(Algorithm):
    """An algorithm that tells the ledger what goes into its rollouts, what comes of them, and what is learned from."""

    def __init__(self, algorithm: Algorithm, ledger: Ledger) -> None:
        self.algorithm, self.ledger = algorithm, ledger

    def rollout(self, source: Batch, /) -> Batch:
        self.ledger.issued(source)
        batch = self.algorithm.rollout(source)
        self.ledger.made(batch)
        return batch

    def learn(self, batch: Batch, /) -> Batch:
        learned = self.algorithm.learn(batch)
        self.ledger.learned(batch)
        return learned

    def metrics(self) -> dict[str, float]:
        return self.algorithm.metrics()

    def observe(self, metrics: Mapping[str, float], /) -> None:
        self.algorithm.observe(metrics)

    def state_dict(self) -> dict[str, Any]:
        return self.algorithm.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        self.algorithm.load_state_dict(state)


def ranges(arrays: Sequence[Ids]) -> list[tuple[int, int, int]]:
    """(number of the array, first, count): the runs of consecutive ids in each of ``arrays``; an id that is in one twice is
    in two of its runs."""
    if not arrays:
        return []
    owners, ids = np.repeat(np.arange(len(arrays)), [len(array) for array in arrays]), np.concatenate(arrays)
    order = np.lexsort((ids, owners))
    owners, ids = owners[order], ids[order]
    starts = np.flatnonzero(np.append(True, (np.diff(owners) != 0) | (np.diff(ids) != 1))[: len(ids)])
    counts = np.diff(np.append(starts, len(ids)))
    return list(zip(owners[starts].tolist(), ids[starts].tolist(), counts.tolist(), strict=True))
