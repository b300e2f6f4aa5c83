"""``hybridflow auction explain RUN``: every round's bids, prices and allocations, and what they came to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from hybridflow.core.errors import CheckpointError
from hybridflow.planner.auction import Bid, Round
from hybridflow.telemetry.graph_tables import aligned
from hybridflow.telemetry.records import read_records, to_json
from hybridflow.telemetry.rundir import RunDirectory

__all__ = ["Outcome", "explain", "outcomes"]

OFFER = ("step", "task", "lane", "units", "from", "seconds", "bids", "pays", "saves", "budget")
HEADER = (*OFFER, "predicted", "measured", "gained")
LEGEND = """\
from: what is known of other units: constants alone, a profile of this machine on several of them, changes of earlier runs,
changes of this run. All behind it are seconds of a step. bids: others no longer wait for it so long; pays: they are slower
without its units; saves: the difference, by which its units make the step shorter; budget: what it has left; *: it couldn't
pay for more. predicted, measured: a step with this allocation; gained: a step was longer before."""


@dataclass(frozen=True)
class Outcome:
    """A round and what came of it: ``realised_s`` of a step until the next one, None if the run didn't get there."""

    round: Round
    realised_s: float | None

    @property
    def gained_s(self) -> float | None:
        """Of a step, measured after against measured before a switch."""
        if not self.round.switched or self.realised_s is None or self.round.measured_s is None:
            return None
        return self.round.measured_s - self.realised_s

    @property
    def promised_s(self) -> float | None:
        """... as predicted."""
        return self.round.before_s - self.round.step_s if self.round.switched and self.round.before_s is not None else None


def explain(run: Path, as_json: bool) -> None:
    """Print all rounds. CheckpointError: no such run, no auction in it, or a damaged record of it."""
    found = outcomes(RunDirectory.open(run).auction)
    if as_json:
        print(to_json({"rounds": [_data(outcome) for outcome in found]}))
        return
    last = found[-1].round
    there = ", ".join(f"{amount:g} {name}" for name, amount in last.capacity.items())
    print(f"{run}: {len(found)} rounds, after steps {found[0].round.step} to {last.step}; {there}")
    rows = [row for outcome in found for row in _rows(outcome)]
    print("\n".join(aligned([HEADER, *rows], (HEADER[0], *HEADER[5:]))))
    print(LEGEND)
    print(_summary(found))


def outcomes(path: Path) -> list[Outcome]:
    """Of a run's ``auction.jsonl``."""
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file; the run held no auction")
    records = read_records(path)
    found = []
    for number, (record, following) in enumerate(zip(records, [*records[1:], {}], strict=False), 1):
        if "bids" in record:
            realised = _checked(float | None, path, number + 1, following.get("measured_s"))
            found.append(Outcome(_checked(Round, path, number, record), realised))
    if not found:
        raise CheckpointError(f"{path}: no round of an auction in it yet")
    return found


def _checked(kind: Any, path: Path, number: int, value: Any) -> Any:
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        first = error.errors()[0]
        what = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise CheckpointError(f"{path}: line {number} is no round of an auction ({what}); delete the line") from None


def _data(outcome: Outcome) -> dict[str, Any]:
    came = {"realised_s": outcome.realised_s, "gained_s": outcome.gained_s, "promised_s": outcome.promised_s}
    return outcome.round.record() | came


def _rows(outcome: Outcome) -> Iterator[tuple[str, ...]]:
    """One for each bidder; what is of the step stands in the first."""
    one = outcome.round
    told = [str(one.step), _seconds(one.step_s), _seconds(outcome.realised_s), _seconds(outcome.gained_s)]
    for bid in one.bids:
        step, *came = told
        money = (bid.seconds, bid.bids_s, bid.pays_s, bid.saves_s, bid.budget_s)
        yield step, bid.name, bid.lane, _units(one, bid), bid.source, *map(_seconds, money), *came
        told = [""] * len(told)


def _units(one: Round, bid: Bid) -> str:
    before = (one.before or {}).get(bid.name, bid.units)
    return (f"{before} -> {bid.units}" if before != bid.units else str(bid.units)) + ("*" if bid.limited else "")


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _summary(found: Sequence[Outcome]) -> str:
    switched = [outcome for outcome in found if outcome.round.switched]
    known = [(one.promised_s, one.gained_s) for one in switched if one.promised_s is not None and one.gained_s is not None]
    text = f"{len(switched)} of {len(found)} rounds changed who has what"
    if not known:
        return text
    promised, gained = (sum(values) for values in zip(*known, strict=True))
    return f"{text}; {len(known)} of them promised {promised:.3g} s a step in all, and {gained:.3g} s were gained"
