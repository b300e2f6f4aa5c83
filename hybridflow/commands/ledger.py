"""``hybridflow ledger RUN``: whether every sample of a run is accounted for, once.

samples that are learned from once      issued = trained + dropped (by reason) + waiting
samples that a replay buffer takes      steps collected + given = added; rows drawn are those that it gave
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from hybridflow.core.errors import CheckpointError
from hybridflow.ledger import DROPPED
from hybridflow.telemetry.rundir import RunDirectory

__all__ = ["Balance", "balance", "ledger"]

PASSED = ("issued", "generated", "scored", "trained")
Range = tuple[int, int]
"""first, count"""


@dataclass(frozen=True)
class Balance:
    """Of all events that were not redone: ``counts`` of samples by event, of a replay also of steps and rows.

    ``problems``: a line for each way in which it doesn't close. ``first_step``: the first that is accounted for.
    """

    first_step: int
    last_step: int
    attempts: int
    redone: int
    counts: dict[str, int]
    problems: list[str] = field(default_factory=list)


def ledger(run: Path, as_json: bool) -> int:
    """Print the balance; 1 if it doesn't close."""
    found = balance(RunDirectory.open(run).ledger)
    if as_json:
        print(json.dumps({**asdict(found), "closed": not found.problems}))
        return 1 if found.problems else 0
    console = Console(highlight=False, soft_wrap=True)
    table = Table("samples", "count", title=f"{run}: steps {found.first_step} to {found.last_step}", title_justify="left")
    table.columns[1].justify = "right"
    for name, count in found.counts.items():
        table.add_row(name, f"{count:,}")
    console.print(table)
    if found.attempts > 1:
        console.print(f"attempts: {found.attempts}; {found.redone:,} samples were issued again, and count once")
    for problem in found.problems:
        console.print(f"doesn't close: {problem}", style="red")
    if not found.problems:
        console.print("closed: every sample is accounted for once", style="green")
    return 1 if found.problems else 0


def balance(path: Path) -> Balance:
    """Of a ledger's file. CheckpointError if there is none."""
    if not path.is_file():
        raise CheckpointError(f"{path}: no ledger; a run that trains writes it")
    file = sqlite3.connect(path)
    try:
        return _balance(file)
    except sqlite3.DatabaseError as error:
        raise CheckpointError(f"{path}: can't be read ({error})") from None
    finally:
        file.close()


def _balance(file: sqlite3.Connection) -> Balance:
    events, counted = dict[str, list[Range]](), dict[str, int]()
    for event, first, count in file.execute("SELECT event, first, count FROM events WHERE redone = 0 ORDER BY rowid"):
        if first is None:
            counted[event] = counted.get(event, 0) + count
        else:
            events.setdefault(event, []).append((first, count))
    waiting = list(file.execute("SELECT first, count FROM waiting"))
    totals = dict(file.execute("SELECT name, value FROM totals"))
    attempts, began = file.execute("SELECT COUNT(*), MIN(step) FROM attempts").fetchone()
    (last,) = file.execute("SELECT COALESCE(MAX(step), 0) FROM events WHERE redone = 0").fetchone()
    (redone,) = file.execute("SELECT COALESCE(SUM(count), 0) FROM events WHERE redone AND event = 'issued'").fetchone()
    dropped = {event: ranges for event, ranges in sorted(events.items()) if event.startswith(DROPPED)}
    if totals:
        counts, problems = _of_replay(events, counted, totals)
    else:
        ends = [events.get("trained", []), [range_ for ranges in dropped.values() for range_ in ranges], waiting]
        problems = _of_once([events.get("issued", []), events.get("generated", []), *ends])
        shown: dict[str, list[Range]] = {
            name: events[name] for name in ("issued", "generated", "scored", "trained") if name in events
        }
        shown.update({**dropped, "waiting": waiting})
        counts = {name: sum(count for _, count in ranges) for name, ranges in shown.items()}
    return Balance(began + 1, last, attempts, redone, counts, problems)


def _of_once(sets: Sequence[Sequence[Range]]) -> list[str]:
    """``sets``: what was issued, generated, trained, dropped, and what waits."""
    starts, lengths, (issued, generated, trained, dropped, waiting) = coverage(sets)
    ended = trained + dropped
    rules = {
        "issued twice": issued > 1,
        "generated twice": generated > 1,
        "trained twice": trained > 1,
        "dropped twice": dropped > 1,
        "trained and dropped": (trained > 0) & (dropped > 0),
        "waiting, and trained or dropped": (waiting > 0) & (ended > 0),
        "neither trained, dropped nor waiting": (issued > 0) & (ended + waiting == 0),
        "trained, dropped or waiting, and never issued": (issued == 0) & (ended + waiting > 0),
        "trained or dropped, and never generated": (generated == 0) & (ended > 0),
    }
    return [_line(name, starts[broken], lengths[broken]) for name, broken in rules.items() if broken.any()]


def _line(rule: str, starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> str:
    return f"{int(lengths.sum()):,} samples are {rule}, from {int(starts[0])} on"


def _of_replay(
    events: dict[str, list[Range]], counted: dict[str, int], totals: dict[str, int]
) -> tuple[dict[str, int], list[str]]:
    pieces = events.get("generated", [])
    starts, lengths, (generated,) = coverage([pieces])
    problems = []
    if (generated > 1).any():
        problems.append(_line("generated twice", starts[generated > 1], lengths[generated > 1]))
    collected, drawn = counted.get("collected", 0), counted.get("drawn", 0)
    if collected + totals["given"] != totals["added"]:
        problems.append(f"{collected:,} steps collected and {totals['given']:,} given, but {totals['added']:,} added")
    if drawn != totals["drawn"]:
        problems.append(f"{drawn:,} rows learned from, but {totals['drawn']:,} drawn")
    counts = {"pieces generated": sum(count for _, count in pieces), "steps collected": collected}
    counts |= {"steps given to begin with": totals["given"], "steps added": totals["added"]}
    counts |= {f"transitions or sequences {name}": totals[name] for name in ("held", "overwritten")}
    return {**counts, "rows drawn": drawn}, problems


def coverage(sets: Sequence[Sequence[Range]]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Pieces of the line of ids, by their starts [N] and lengths [N], and how many ranges of each of the S sets have them
    [S, N]."""
    arrays = [np.array(ranges, np.int64).reshape(-1, 2) for ranges in sets]
    places = [np.concatenate([array[:, 0], array.sum(axis=1)]) for array in arrays]
    owners = np.repeat(np.arange(len(sets)), [len(place) for place in places])
    changes = np.concatenate([np.repeat([1, -1], len(array)) for array in arrays])
    at = np.concatenate(places)
    order = np.argsort(at, kind="stable")
    at = at[order]
    counts = np.zeros((len(sets), len(at)), np.int64)
    counts[owners[order], np.arange(len(at))] = changes[order]
    counts = counts.cumsum(axis=1)[:, :-1]
    lengths = np.diff(at)
    there = lengths > 0
    return at[:-1][there], lengths[there], counts[:, there]
