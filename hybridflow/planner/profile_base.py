"""What calls of verbs took on a machine, in all runs: a SQLite file of few recent samples a size, and predictions.

    runs, ``hybridflow profile`` ──add──> samples: of each (task, model, device, threads, workers, size) the last ``KEPT``
    planner, schedules           <──predict── seconds, processor time and memory, for sizes that were not measured
    auctions             ──add──> scalings: what a run learned of a pool's work on more or fewer units, the last of each
                         <──scaling── what the next one begins with

Writers are short and wait for each other, and readers don't wait (write-ahead log), so runs side by side lose nothing. No
torch is needed here.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple

from hybridflow.core.errors import ProfileError, ResourceError, UnknownTaskError
from hybridflow.core.metrics import Span
from hybridflow.planner.profile_fit import Prediction, TaskFit

__all__ = ["Learned", "Prediction", "ProfileBase", "Sample", "sample_of"]

KEPT = 8
"""samples of a size that are kept, the newest"""
SIZES = 2
"""sizes in a doubling of rows, or of tokens, that are told apart"""
WAIT_S = 20.0
MADE_BY = int.from_bytes(b"hfpb", "big")
VERSION = 1
CELL = "verb, model, device, threads, workers, size"
SCALINGS = "CREATE TABLE IF NOT EXISTS scalings (work TEXT, units TEXT, parallel REAL, PRIMARY KEY (work, units))"


@dataclass(frozen=True)
class Sample:
    """A call of the ``verb`` "actor.update" by one worker. ``model``: what its role is, see ``build_profile``; ``device``:
    "cpu" or "cuda"; ``source``: the run directory, or "profile". All else is in ``Effort``."""

    verb: str
    kind: str
    model: str
    device: str
    threads: int
    workers: int
    rows: float
    tokens: float
    seconds: float
    cpu_s: float
    memory_bytes: float
    read_bytes: float = 0.0
    written_bytes: float = 0.0
    gpu_s: float = 0.0
    flops: float | None = None
    source: str = ""

    @property
    def size(self) -> str:
        """Samples of about the same rows and tokens, which share their place, have the same; those that were counted in,
        and whose seconds say nothing, are a kind of their own."""
        steps = [round(SIZES * math.log2(number)) if number > 0 else "none" for number in (self.rows, self.tokens)]
        return f"{steps[0]} {steps[1]}{'' if self.flops is None else ' counted'}"


class Learned(NamedTuple):
    """Of a pool's ``work`` (what its roles are), the share that more ``units`` of this kind divide."""

    work: str
    units: str
    parallel: float


COLUMNS = tuple(field.name for field in fields(Sample))
NUMBERS = tuple(field.name for field in fields(Sample) if field.type in ("int", "float"))


def sample_of(span: Span, model: str, device: str, source: str) -> Sample | None:
    """None: the call was not looked at."""
    effort = span.effort
    if effort is None or effort.rows <= 0:
        return None
    return Sample(span.name, span.kind, model, device, seconds=span.duration_s, source=source, **asdict(effort))


class ProfileBase:
    """Of one machine. ``machine``: what it was made of, as ``Fingerprint`` has it."""

    def __init__(
        self, path: Path, machine: Mapping[str, Any], samples: Sequence[Sample], scalings: Sequence[Learned] = ()
    ) -> None:
        self.path, self.machine, self.samples, self.scalings = path, machine, samples, scalings
        self._fits: dict[tuple[str, str, str], TaskFit] = {}

    @classmethod
    def open(cls, path: Path, machine: Mapping[str, Any] | None = None) -> ProfileBase:
        """Read all samples, the oldest first. ProfileError: there is no such file, it is damaged or something else, or of
        another ``machine``."""
        if not path.exists():
            raise ProfileError("no task was profiled on this machine yet; run: hybridflow profile CONFIG.toml")
        with _connected(path) as connection:
            found = _checked(connection, path, machine)
            rows = connection.execute(f"SELECT {', '.join(COLUMNS)} FROM samples ORDER BY id").fetchall()
            connection.execute(SCALINGS)
            learned = connection.execute("SELECT work, units, parallel FROM scalings").fetchall()
        samples, scalings = [Sample(*row) for row in rows], [Learned(*row) for row in learned]
        if not all(map(_sound, samples)) or not all(_is_share(one.parallel) for one in scalings):
            raise _damaged(path, "it has samples without sense")
        return cls(path, found, samples, scalings)

    @staticmethod
    def add(path: Path, machine: Mapping[str, Any], samples: Sequence[Sample], scalings: Sequence[Learned] = ()) -> None:
        """Keep ``samples`` in the file, which is made where there is none, and ``scalings`` in place of those that it had.
        ProfileError: as ``open``; ResourceError: there is no room, or it can't be written."""
        if not path.exists():
            _make(path, machine)
        with _connected(path) as connection:
            _checked(connection, path, machine)
            connection.execute("BEGIN IMMEDIATE")
            connection.execute(SCALINGS)
            connection.executemany("INSERT OR REPLACE INTO scalings VALUES (?, ?, ?)", scalings)
            names, marks = ", ".join((*COLUMNS, "size")), ", ".join("?" * (len(COLUMNS) + 1))
            rows = [(*astuple(sample), sample.size) for sample in samples]
            connection.executemany(f"INSERT INTO samples ({names}) VALUES ({marks})", rows)
            for sample in {(s.verb, s.model, s.device, s.threads, s.workers, s.size) for s in samples}:
                connection.execute(
                    f"DELETE FROM samples WHERE ({CELL}) = (?, ?, ?, ?, ?, ?) AND id NOT IN "
                    f"(SELECT id FROM samples WHERE ({CELL}) = (?, ?, ?, ?, ?, ?) ORDER BY id DESC LIMIT {KEPT})",
                    (*sample, *sample),
                )
            connection.execute("COMMIT")

    @property
    def cores(self) -> int:
        """Of the machine."""
        return int(self.machine.get("cores", 0)) or os.cpu_count() or 1

    def without(self, source: str) -> ProfileBase:
        """What other runs measured: of a run, predictions from its own samples would be none."""
        return ProfileBase(self.path, self.machine, [one for one in self.samples if one.source != source], self.scalings)

    def tasks(self) -> list[tuple[str, str, str]]:
        """(verb, model, device) of what was measured, in the order of their first samples."""
        return list(dict.fromkeys((sample.verb, sample.model, sample.device) for sample in self.samples))

    def predict(
        self,
        verb: str,
        *,
        rows: float,
        tokens: float,
        threads: int = 1,
        workers: int = 1,
        device: str = "cpu",
        model: str | None = None,
    ) -> Prediction:
        """Of a call on so many ``rows`` with so many ``tokens`` in all (of prompts and responses, or steps of
        environments), which ``workers`` share equally. ``model``: as samples have it, by default that of the verb's newest.
        UnknownTaskError: there are no samples."""
        return self.fit(verb, device, model).predict(rows, tokens, threads, workers)

    def fit(self, verb: str, device: str = "cpu", model: str | None = None) -> TaskFit:
        """What predictions of a task are made by. UnknownTaskError: there are no samples."""
        mine = [
            s
            for s in self.samples
            if s.verb == verb and s.device == device and model in (None, s.model) and s.flops is None
        ]
        if not mine:
            known = ", ".join(dict.fromkeys(sample.verb for sample in self.samples)) or "none"
            of = f" with {model}" if model else ""
            raise UnknownTaskError(
                f"{verb}{of} was not profiled on a {device} of this machine; profiled are {known}; "
                "run: hybridflow profile CONFIG.toml"
            )
        model = mine[-1].model
        if (verb, device, model) not in self._fits:
            self._fits[verb, device, model] = TaskFit([sample for sample in mine if sample.model == model], self.cores)
        return self._fits[verb, device, model]

    def scaling(self, work: str, units: str) -> float | None:
        """What an auction has learned of it. None: nothing yet."""
        return next((one.parallel for one in self.scalings if (one.work, one.units) == (work, units)), None)

    def ends(
        self, roles: Mapping[str, tuple[str, str]], units: Literal["threads", "workers"]
    ) -> tuple[tuple[int, float], tuple[int, float]] | None:
        """(units, seconds) on the fewest and on the most that verbs of ``roles``, by name their (model, device), were
        measured on: of a call of each, as large as its newest. None: of none with several."""
        timed = dict.fromkeys((one.verb, one.model, one.device) for one in self.samples if one.flops is None)
        mine = [
            self.fit(verb, device, model)
            for verb, model, device in timed
            if roles.get(verb.partition(".")[0]) == (model, device)
        ]
        fits = [fit for fit in mine if len({getattr(one, units) for one in fit.samples}) > 1]
        numbers = [getattr(one, units) for fit in fits for one in fit.samples]
        if not fits:
            return None
        few, many = ((n, sum(_on(fit, units, n) for fit in fits)) for n in (min(numbers), max(numbers)))
        return few, many


def _on(fit: TaskFit, units: str, number: int) -> float:
    """Seconds of a call like the newest one, on so many units."""
    one = fit.samples[-1]
    spread = {"threads": one.threads, "workers": one.workers, units: number}
    return fit.predict(one.rows * one.workers, one.tokens * one.workers, **spread).seconds


def _is_share(number: Any) -> bool:
    return isinstance(number, float) and 0 <= number <= 1


def _sound(sample: Sample) -> bool:
    numbers = [getattr(sample, name) for name in NUMBERS]
    names = (sample.verb, sample.kind, sample.model, sample.device, sample.source)
    if not all(isinstance(number, int | float) and 0 <= number < math.inf for number in numbers):
        return False
    return all(isinstance(name, str) for name in names) and min(sample.threads, sample.workers, sample.rows) > 0


def _make(path: Path, machine: Mapping[str, Any]) -> None:
    """An empty base, whole or not at all; who comes second takes the first one's."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    with _telling(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.closing(sqlite3.connect(beside)) as connection:
            connection.executescript(
                f"PRAGMA application_id = {MADE_BY}; PRAGMA user_version = {VERSION}; PRAGMA journal_mode = WAL;"
                "CREATE TABLE machine (made_of TEXT);"
                f"CREATE TABLE samples (id INTEGER PRIMARY KEY, {', '.join(COLUMNS)}, size);"
                f"CREATE INDEX cells ON samples ({CELL});"
            )
            connection.execute("INSERT INTO machine VALUES (?)", (json.dumps(machine),))
            connection.commit()
        try:
            with contextlib.suppress(FileExistsError):
                os.link(beside, path)
        finally:
            beside.unlink()


@contextlib.contextmanager
def _connected(path: Path) -> Iterator[sqlite3.Connection]:
    with _telling(path), contextlib.closing(sqlite3.connect(path, timeout=WAIT_S, isolation_level=None)) as connection:
        connection.execute("PRAGMA synchronous = NORMAL")
        yield connection


@contextlib.contextmanager
def _telling(path: Path) -> Iterator[None]:
    """What SQLite and the system say, as what to do about it."""
    try:
        yield
    except (sqlite3.OperationalError, OSError) as error:
        raise ResourceError(f"{path}: task profiles can't be used ({error}); is its disk full, or not writable?") from None
    except sqlite3.DatabaseError as error:
        raise _damaged(path, str(error)) from None


def _damaged(path: Path, how: str) -> ProfileError:
    return ProfileError(f"{path}: a damaged base of task profiles, or another file ({how}); remove it")


def _checked(connection: sqlite3.Connection, path: Path, machine: Mapping[str, Any] | None) -> dict[str, Any]:
    """What the base's machine is made of."""
    made_by, version = (connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version"))
    if made_by != MADE_BY:
        raise ProfileError(f"{path}: a SQLite file of another program; expected task profiles, so move it away")
    if version != VERSION:
        raise ProfileError(f"{path}: has version {version} of task profiles, this program version {VERSION}; remove it")
    try:
        [(made_of,)] = connection.execute("SELECT made_of FROM machine")
        found: dict[str, Any] = dict(json.loads(made_of))
    except (ValueError, TypeError):
        raise _damaged(path, "it doesn't say of which machine") from None
    expected = None if machine is None else json.loads(json.dumps(machine))
    if expected is not None and found != expected:
        changed = ", ".join(
            f"{key} {found.get(key)!r}, not {expected.get(key)!r}" for key in expected if found.get(key) != expected[key]
        )
        raise ProfileError(
            f"{path}: task profiles of another machine ({changed}); profile this one: hybridflow profile CONFIG.toml"
        )
    return found
