"""A run whose work changes, played out: who has how many units, decided at publish points, and how long everything takes.

A policy sees what a run can see: the seconds that each bidder took of the steps since it was last asked, on the units that
it had, and how its seconds depend on units (the profile base), up to a factor: its work. So it learns of a new phase when
that has begun. Steps vary by ``noise``; switching takes time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from hybridflow.planner.allocation import Bidder, Units, proportional_share, step_time
from hybridflow.planner.auction import Auction

__all__ = ["Auctioned", "Fixed", "Phase", "Played", "Policy", "Proportional", "play"]


class Phase(NamedTuple):
    """``bidders``: with the seconds that they really take, but for noise; in all phases with the same names and levels."""

    name: str
    steps: int
    bidders: tuple[Bidder, ...]


class Policy(Protocol):
    def decide(self, step: int, bids: Sequence[Bidder], switch_s: float, measured_s: float | None) -> Units:
        """What holds after ``step``. ``bids``: with predicted seconds; ``measured_s``: of a step since the last time."""


@dataclass(frozen=True)
class Fixed:
    """A static split."""

    units: Units

    def decide(self, step: int, bids: Sequence[Bidder], switch_s: float, measured_s: float | None) -> Units:
        return self.units


@dataclass(frozen=True)
class Proportional:
    """Units in proportion to the work that was measured, each time anew."""

    capacity: Mapping[str, float]

    def decide(self, step: int, bids: Sequence[Bidder], switch_s: float, measured_s: float | None) -> Units:
        return proportional_share(bids, self.capacity)


@dataclass(frozen=True)
class Auctioned:
    auction: Auction

    def decide(self, step: int, bids: Sequence[Bidder], switch_s: float, measured_s: float | None) -> Units:
        return self.auction.round(step, bids, switch_s, measured_s).units


@dataclass(frozen=True)
class Played:
    """Of each step [steps]: its seconds without switching, its units, and ``busy_s``, unit-seconds of each resource in
    which somebody works. ``switching_s``: in all; ``switches``: how often units changed."""

    phases: tuple[str, ...]
    step_s: NDArray[np.float64]
    units: tuple[Units, ...]
    busy_s: Mapping[str, NDArray[np.float64]]
    switching_s: float
    switches: int

    @property
    def total_s(self) -> float:
        return float(self.step_s.sum()) + self.switching_s

    def phase_s(self, name: str) -> float:
        """Of all steps of a phase, without switching."""
        return float(self.step_s[[phase == name for phase in self.phases]].sum())

    def utilisation(self, resource: str, capacity: float) -> float:
        return float(self.busy_s[resource].sum()) / (capacity * self.total_s)


def play(
    phases: Sequence[Phase],
    policy: Policy,
    start: Units,
    every: int = 5,
    switch_s: float = 0.0,
    noise: float = 0.0,
    seed: int = 0,
) -> Played:
    """Ask ``policy`` after every so many steps, from ``start`` on. ``noise``: relative deviation of each bidder's seconds
    of a step."""
    rng = np.random.default_rng(seed)
    steps = [phase for phase in phases for _ in range(phase.steps)]
    units, switches, seen = start, 0, list[Sequence[Bidder]]()
    times, taken, busy = [], [], dict[str, list[float]]()
    for number, phase in enumerate(steps):
        noisy = [_scaled(bidder, max(0.0, 1 + noise * rng.standard_normal())) for bidder in phase.bidders]
        seen.append(noisy)
        times.append(step_time(noisy, units))
        taken.append(units)
        for name, seconds in _busy(noisy, units).items():
            busy.setdefault(name, []).append(seconds)
        if (number + 1) % every == 0:
            measured_s = float(np.mean(times[-every:]))
            new = policy.decide(number + 1, _bids(phases[0].bidders, seen, units), switch_s, measured_s)
            switches += new != units
            units, seen = new, []
    names = tuple(phase.name for phase in steps)
    arrays = {name: np.array(values) for name, values in busy.items()}
    return Played(names, np.array(times), tuple(taken), arrays, switches * switch_s, switches)


def _scaled(bidder: Bidder, factor: float) -> Bidder:
    return replace(bidder, seconds={units: seconds * factor for units, seconds in bidder.seconds.items()})


def _bids(known: Sequence[Bidder], seen: Sequence[Sequence[Bidder]], units: Units) -> list[Bidder]:
    """What is ``known`` of how seconds depend on units, times the work that the steps since then had."""
    factors = [
        np.mean([step[place].seconds[units[bidder.name]] for step in seen]) / (bidder.seconds[units[bidder.name]] or 1.0)
        for place, bidder in enumerate(known)
    ]
    return [_scaled(bidder, float(factor)) for bidder, factor in zip(known, factors, strict=True)]


def _busy(bidders: Sequence[Bidder], units: Units) -> dict[str, float]:
    used: dict[str, float] = {}
    for bidder in bidders:
        for name, need in bidder.needs.items():
            used[name] = used.get(name, 0.0) + need * units[bidder.name] * bidder.seconds[units[bidder.name]]
    return used
