"""Who gets how many units of what: the allocation that makes a step shortest, exactly, and simpler ones to compare it with.

A *bidder* is a task that runs on a number of equal units (worker processes, threads, shares of a device) and says how many
seconds of a step it takes on each number of them. Bidders of one *lane* run one after another, lanes side by side, so a
step takes as long as its longest lane.

    allocate           the shortest step, then the fewest units: a small integer programme, one binary a bidder and level
    even_split         one unit after the other to whoever has fewest
    proportional_share one after the other to whoever has most work for each of its units
    best_static        the one allocation that is best for a whole sequence of phases
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybridflow.core.errors import ConfigError, UserError

__all__ = ["Bidder", "Units", "allocate", "best_static", "even_split", "lane_seconds", "proportional_share", "step_time"]

Units = dict[str, int]
"""by name of the bidder"""
Array = NDArray[np.float64]
SLACK = 1e-9
"""relative; of sums of floats that should be equal"""


@dataclass(frozen=True)
class Bidder:
    """``seconds``: of a step, by units, as predicted; other numbers of units can't be had. ``lane``: bidders of one run one
    after another; by default it has one of its own. ``least``: units that it always has. ``needs``: of each resource, for a
    unit. ``source``: what ``seconds`` on other units are known from. ConfigError: what can't be, a line each."""

    name: str
    seconds: Mapping[int, float]
    lane: str = ""
    least: int = 1
    needs: Mapping[str, float] = field(default_factory=lambda: {"slots": 1.0})
    source: str = ""

    def __post_init__(self) -> None:
        wrong = [
            f"{units} units take {seconds} s"
            for units, seconds in self.seconds.items()
            if not (units >= 0 and isfinite(seconds) and seconds >= 0)
        ]
        wrong += [
            f"a unit needs {need} of {name}" for name, need in self.needs.items() if not (isfinite(need) and need >= 0)
        ]
        if problems := [f"bidder {self.name}: {found}; expected 0 or more" for found in wrong]:
            raise ConfigError(problems)
        if self.least not in self.seconds:
            known = ", ".join(map(str, sorted(self.seconds))) or "none"
            raise ConfigError(
                [f"bidder {self.name}: no seconds on its least units, {self.least}; those with seconds: {known}"]
            )

    @property
    def levels(self) -> list[int]:
        """Units that it can have, fewest first."""
        return sorted(units for units in self.seconds if units >= self.least)

    @property
    def runs_in(self) -> str:
        return self.lane or self.name


def lane_seconds(bidders: Sequence[Bidder], units: Mapping[str, int]) -> dict[str, float]:
    """Of a step, by lane."""
    lanes = dict.fromkeys((bidder.runs_in for bidder in bidders), 0.0)
    for bidder in bidders:
        lanes[bidder.runs_in] += bidder.seconds[units[bidder.name]]
    return lanes


def step_time(bidders: Sequence[Bidder], units: Mapping[str, int]) -> float:
    """Predicted seconds of a step: of its longest lane."""
    return max(lane_seconds(bidders, units).values(), default=0.0)


def allocate(bidders: Sequence[Bidder], capacity: Mapping[str, float]) -> Units:
    """The allocation with the shortest step and, of those, with the fewest units, all bidders' together. The order of
    ``bidders`` doesn't matter. ConfigError: not even the least units are there."""
    programme = Programme(bidders, capacity)
    return programme.best([[programme.lanes], [programme.units[None]]], programme.allowed({}))


def even_split(bidders: Sequence[Bidder], capacity: Mapping[str, float]) -> Units:
    """Everybody's least units, then one level more to whoever has fewest units, while there are any."""
    return _filled(bidders, capacity, dict.fromkeys((bidder.name for bidder in bidders), 1.0))


def proportional_share(bidders: Sequence[Bidder], capacity: Mapping[str, float]) -> Units:
    """Units in proportion to work, in seconds of one unit a step: what the fewest units are said to take, times their
    number."""
    work = {one.name: one.seconds[one.levels[0]] * max(one.levels[0], 1) for one in bidders}
    return _filled(bidders, capacity, work)


def best_static(phases: Sequence[tuple[float, Sequence[Bidder]]], capacity: Mapping[str, float]) -> Units:
    """``phases``: steps, and the bidders in them, of the same names and levels. The one allocation for all of them that
    takes the least time in all; of those that take the same in every phase, one with the fewest units."""
    first = Programme(phases[0][1], capacity)
    terms = []
    for steps, bidders in phases:
        programme = Programme(bidders, capacity)
        if programme.columns != first.columns:
            raise ConfigError(
                ["phases differ in their bidders or in the units that they can have; expected the same in all"]
            )
        terms.append(steps * programme.lanes)
    return first.best([terms, [first.units[None]]], first.allowed({}))


def _filled(bidders: Sequence[Bidder], capacity: Mapping[str, float], weights: Mapping[str, float]) -> Units:
    """Highest averages: the next level goes to the largest weight for a unit that it has, of equal ones to the first
    name."""
    given = least_units(bidders, capacity)
    ordered = sorted(bidders, key=lambda bidder: bidder.name)
    while True:
        left = {name: amount - spent(bidders, given).get(name, 0.0) for name, amount in capacity.items()}
        could = [(bidder, more) for bidder in ordered if (more := _next(bidder, given[bidder.name], left)) is not None]
        if not could:
            return given
        bidder, more = max(could, key=lambda one: weights[one[0].name] / max(given[one[0].name], SLACK))
        given[bidder.name] = more


def _next(bidder: Bidder, has: int, left: Mapping[str, float]) -> int | None:
    """The next level, if what is ``left`` suffices for it."""
    more = next((units for units in bidder.levels if units > has), None)
    if more is None or any((more - has) * need > left[name] + SLACK for name, need in bidder.needs.items()):
        return None
    return more


def spent(bidders: Sequence[Bidder], units: Mapping[str, int]) -> dict[str, float]:
    """Of each resource."""
    used: dict[str, float] = {}
    for bidder in bidders:
        for name, need in bidder.needs.items():
            used[name] = used.get(name, 0.0) + need * units[bidder.name]
    return used


def least_units(bidders: Sequence[Bidder], capacity: Mapping[str, float]) -> Units:
    """ConfigError: bidders of one name, a resource that isn't there, or too little of one."""
    units = {bidder.name: bidder.least for bidder in bidders}
    problems = []
    if len(units) < len(bidders):
        problems.append(f"{len(bidders)} bidders have {len(units)} names; expected one for each")
    for name, used in spent(bidders, units).items():
        if name not in capacity:
            problems.append(f"bidders need {name}, of which there is none; there is {', '.join(capacity) or 'nothing'}")
        elif used > capacity[name] * (1 + SLACK) + SLACK:
            problems.append(f"the least units of all bidders need {used:g} {name}, and there are {capacity[name]:g}")
    if problems:
        raise ConfigError([f"allocation: {problem}" for problem in problems])
    return units


class Programme:
    """The integer programme: a binary for each bidder and level, ``columns``. Of each of them ``lanes`` has the seconds
    that it adds to each lane, ``uses`` what it takes of each resource."""

    def __init__(self, bidders: Sequence[Bidder], capacity: Mapping[str, float]) -> None:
        self.even = even_split(bidders, capacity)
        self.bidders = sorted(bidders, key=lambda bidder: bidder.name)
        chosen = [(bidder, units) for bidder in self.bidders for units in bidder.levels]
        self.columns = [(bidder.name, units) for bidder, units in chosen]
        self.units = np.array([float(units) for _, units in chosen])
        self.one = np.array([[float(name == bidder.name) for name, _ in self.columns] for bidder in self.bidders])
        names = dict.fromkeys(bidder.runs_in for bidder in self.bidders)
        self.lanes = np.array([[one.seconds[n] * (one.runs_in == lane) for one, n in chosen] for lane in names])
        self.uses = np.array([[units * bidder.needs.get(name, 0.0) for bidder, units in chosen] for name in capacity])
        self.capacity = np.array([float(amount) for amount in capacity.values()])

    def lanes_without(self, names: Collection[str]) -> Array:
        """As if some bidders took no time."""
        return np.where([name not in names for name, _ in self.columns], self.lanes, 0.0)

    def allowed(self, fixed: Mapping[str, int]) -> NDArray[np.bool_]:
        """Columns of those units, of bidders that have them for certain."""
        return np.array([units == fixed.get(name, units) for name, units in self.columns])

    def shortest(self, lanes: Array, allowed: NDArray[np.bool_], start: Mapping[str, int]) -> float:
        """The least seconds that the longest of ``lanes`` can take."""
        return _largest(lanes, self._chosen(self.best([[lanes]], allowed, start)))

    def best(
        self, objectives: Sequence[Sequence[Array]], allowed: NDArray[np.bool_], start: Mapping[str, int] | None = None
    ) -> Units:
        """Each objective is the sum of the largest rows of its matrices; a later one decides between allocations that are
        equal in all matrices before. ``start``: an allocation that is ``allowed`` and possible; by default of the most
        units that are allowed and no more than an even split's. Exact to 1e-6, the solver's tolerance."""
        one, rows, limits = self.one[:, allowed], [self.uses[:, allowed]], [self.capacity]
        chosen = self._chosen(self._below(allowed) if start is None else start)[allowed]
        for terms in objectives:
            given = [term[:, allowed] for term in terms]
            while True:  # until the scale is that of the result, which the tolerance is relative to
                scale = sum(_largest(term, chosen) for term in given)
                scaled = [term / (scale or 1.0) for term in given]
                chosen = _solved(one, np.concatenate(rows), np.concatenate(limits), scaled)
                if 2 * sum(_largest(term, chosen) for term in given) >= scale:
                    break
            for term in given:
                largest = _largest(term, chosen)
                rows.append(term / (largest or 1.0))
                limits.append(np.full(len(term), float(largest > 0) + SLACK))
        return dict(self.columns[place] for place in np.flatnonzero(allowed)[chosen > 0])

    def _below(self, allowed: NDArray[np.bool_]) -> Units:
        there = [column for column, fits in zip(self.columns, allowed, strict=True) if fits]
        below = {name: [n for other, n in there if other == name and n <= most] for name, most in self.even.items()}
        return {name: max(levels) for name, levels in below.items()}

    def _chosen(self, units: Mapping[str, int]) -> Array:
        return np.array([float(units[name] == level) for name, level in self.columns])


def _largest(term: Array, chosen: Array) -> float:
    return float((term @ chosen).max())


def _solved(one: Array, rows: Array, limits: Array, terms: Sequence[Array]) -> Array:
    """Binaries [columns]: minimise the sum of the largest rows of ``terms``, which needn't be more than 1; one column for
    each row of ``one``, and ``rows`` within ``limits``."""
    optimize = _scipy()
    columns, many = one.shape[1], len(terms)

    def beside(matrix: Array, term: int | None = None) -> Array:
        largest = np.zeros((len(matrix), many))
        if term is not None:
            largest[:, term] = -1.0
        return np.concatenate([matrix, largest], axis=1)

    constraints = [optimize.LinearConstraint(beside(one), 1, 1), optimize.LinearConstraint(beside(rows), -inf, limits)]
    constraints += [optimize.LinearConstraint(beside(matrix, term), -inf, 0) for term, matrix in enumerate(terms)]
    binary = np.repeat([1, 0], [columns, many])
    found = optimize.milp(
        1.0 - binary,
        integrality=binary,
        bounds=optimize.Bounds(0, np.where(binary, 1.0, 1.0 + SLACK)),
        constraints=constraints,
        options={"mip_rel_gap": 0.0, "presolve": False},  # HiGHS 1.12's presolve ends with vector::reserve on some
    )
    if found.x is None:
        raise RuntimeError(f"the solver found no allocation: {found.message}")
    return np.asarray(found.x[:columns].round())


def _scipy() -> Any:
    try:
        from scipy import optimize
    except ImportError as error:
        raise UserError(f'the auction needs scipy ({error}): pip install "hybridflow[auction]"') from error
    return optimize
