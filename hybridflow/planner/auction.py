"""The auction of a run's resources: at publish points, tasks bid for units with what these save of a step, in seconds.

The allocation is the one with the shortest step (``allocation.allocate``). What each pays is a second price, what its units
cost the others (Vickrey, Clarke, Groves). With g(n) the shortest step if a task has n units and all others what suits them
best, and h(n) the same if only the others' seconds counted, a task with x units, of which m are its least,

    bids    (g(m) - h(m)) - (g(x) - h(x))    seconds that others no longer wait for it
    pays    h(x) - h(m)                      seconds that they are slower without its units: never more than it bids
    saves   g(m) - g(x)                      the difference: seconds of a step

Prices are kept as shares of a step. A payment comes back as far as the step became as short as was promised, so that
a *budget* runs dry by promises that aren't kept. Each round replenishes it by ``INCOME``, up to one step, which is enough
for any price. Who can't pay gets what it would of an even split, and the others share the rest as if it took no time;
nobody gets less than its least.

A new allocation is taken if it saves, over ``horizon`` steps, more than switching costs, and more than ``TOLERANCE`` of
them: predictions are no better than that. So allocations don't swing with the noise of what is measured.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybridflow.planner.allocation import SLACK, Bidder, Programme, Units, spent, step_time

__all__ = ["INCOME", "TOLERANCE", "Auction", "Bid", "Round", "ending"]

INCOME = 0.1
"""of a budget, each round, in steps"""
TOLERANCE = 0.02
"""of a step: differences that are none"""


class Bid(NamedTuple):
    """What a bidder has after a round. ``seconds``: of a step, as predicted on its units; ``fair``: units of an even split;
    ``bids_s``, ``pays_s`` and ``saves_s`` as above; ``budget_s``: what it has left; ``limited``: it couldn't pay for
    more; ``source``: what seconds on other units are known from."""

    name: str
    lane: str
    units: int
    fair: int
    seconds: float
    bids_s: float
    pays_s: float
    saves_s: float
    budget_s: float
    limited: bool
    source: str = ""


@dataclass(frozen=True)
class Round:
    """``units`` are what holds from now on and ``before`` what did until now (None: nothing); ``step_s`` and ``before_s``:
    predicted seconds of a step with them (None: can't be had any more). ``measured_s``: of a step since the last round.
    ``switch_s``: what switching costs. ``solve_s``: that the auction took."""

    step: int
    units: Units
    step_s: float
    before: Units | None
    before_s: float | None
    measured_s: float | None
    switch_s: float
    capacity: Mapping[str, float]
    bids: tuple[Bid, ...]
    solve_s: float

    @property
    def switched(self) -> bool:
        return self.units != self.before

    def record(self) -> dict[str, Any]:
        """As data: a line of ``auction.jsonl``."""
        return asdict(self) | {"switched": self.switched, "bids": [bid._asdict() for bid in self.bids]}


def ending(step: int, measured_s: float) -> dict[str, Any]:
    """The last line of ``auction.jsonl``, of a run that ends with ``step``: what its last allocation came to."""
    return {"step": step, "measured_s": measured_s}


class _Price(NamedTuple):
    pays_s: float
    saves_s: float


@dataclass
class Auction:
    """``capacity`` of each resource; ``horizon``: steps that an allocation is expected to hold; ``units``: what holds at
    the beginning, None: nothing."""

    capacity: Mapping[str, float]
    horizon: int = 20
    units: Units | None = None
    budgets: dict[str, float] = field(default_factory=dict)
    """in steps"""
    _paid: dict[str, float] = field(default_factory=dict)
    _promised: dict[str, tuple[float, float]] = field(default_factory=dict)
    """by bidder: up to which seconds of a step it gets back all that it paid, and from which on nothing"""

    def round(self, step: int, bidders: Sequence[Bidder], switch_s: float = 0.0, measured_s: float | None = None) -> Round:
        """Decide who has what after ``step``. ``measured_s``: of a step since the last round, in the mean; None: not known.
        ConfigError: see ``allocate``."""
        began = time.perf_counter()
        names = sorted(bidder.name for bidder in bidders)
        back = {} if measured_s is None else self._returned(measured_s)
        self.budgets = {name: min(1.0, self.budgets.get(name, 1.0) + back.get(name, 0.0) + INCOME) for name in names}
        market = _Market(bidders, self.capacity)
        before, limited = self.units, set[str]()
        while True:
            units = self._chosen(market, limited, switch_s)
            predicted, prices = step_time(bidders, units), {name: market.price(name, units, limited) for name in names}
            poor = {name for name in names if prices[name].pays_s > (self.budgets[name] + SLACK) * predicted}
            poor = {name for name in poor if units[name] > market.fair[name]}
            if not poor:
                break
            limited |= poor
        self._charge(prices, predicted, switch_s)
        self.units = units
        bids = tuple(self._bid(market, name, units, prices[name], predicted, name in limited) for name in names)
        before_s = step_time(bidders, before) if before is not None and market.can_be(before, ()) else None
        took = time.perf_counter() - began
        return Round(step, units, predicted, before, before_s, measured_s, switch_s, self.capacity, bids, took)

    def state_dict(self) -> dict[str, Any]:
        """What the next round depends on."""
        return {"units": self.units, "budgets": self.budgets, "paid": self._paid, "promised": self._promised}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.units, self.budgets, self._paid = state["units"], state["budgets"], state["paid"]
        self._promised = {name: (kept, without) for name, (kept, without) in state["promised"].items()}

    def _chosen(self, market: _Market, limited: Collection[str], switch_s: float) -> Units:
        """The best allocation, or the one that holds if that is hardly worse."""
        best = market.best(limited)
        if self.units is None or not market.can_be(self.units, limited):
            return best
        now, then = (market.seconds(units, limited) for units in (self.units, best))
        return best if now - then > self._noise(now, switch_s) else self.units

    def _noise(self, step_s: float, switch_s: float) -> float:
        """Seconds of a step by which another one isn't better."""
        return switch_s / self.horizon + TOLERANCE * step_s

    def _charge(self, prices: Mapping[str, _Price], step_s: float, switch_s: float) -> None:
        kept = step_s + self._noise(step_s, switch_s)
        self._promised = {name: (kept, step_s + price.saves_s) for name, price in prices.items()}
        self._paid = {name: min(price.pays_s / (step_s or 1.0), self.budgets[name]) for name, price in prices.items()}
        self.budgets = {name: self.budgets[name] - paid for name, paid in self._paid.items()}

    def _returned(self, measured_s: float) -> dict[str, float]:
        """Of what was paid, the share that the step came of the way from what it would be to what was promised."""
        back = {}
        for name, (kept, without) in self._promised.items():
            way = max(0.0, without - measured_s) / (without - kept) if without > kept else 0.0
            back[name] = self._paid[name] * (1.0 if measured_s <= kept else way)
        return back

    def _bid(self, market: _Market, name: str, units: Units, price: _Price, step_s: float, limited: bool) -> Bid:
        bidder = market.by_name[name]
        has = (units[name], market.fair[name], bidder.seconds[units[name]])
        offers = (price.pays_s + price.saves_s, *price, self.budgets[name] * step_s)
        return Bid(name, bidder.runs_in, *has, *offers, limited, bidder.source)


class _Market:
    """What the shortest steps are if somebody has so many units. Who is ``limited`` has what it has of an even split, and
    nobody cares about the seconds that it claims."""

    def __init__(self, bidders: Sequence[Bidder], capacity: Mapping[str, float]) -> None:
        self.bidders, self.capacity = bidders, capacity
        self.by_name = {bidder.name: bidder for bidder in bidders}
        self.programme = Programme(bidders, capacity)

    @property
    def fair(self) -> Units:
        return self.programme.even

    def best(self, limited: Collection[str]) -> Units:
        programme = self.programme
        return programme.best([[programme.lanes_without(limited)], [programme.units[None]]], self._allowed(limited))

    def _allowed(self, limited: Collection[str], fixed: Mapping[str, int] | None = None) -> NDArray[np.bool_]:
        return self.programme.allowed({name: self.fair[name] for name in limited} | dict(fixed or {}))

    def seconds(self, units: Units, limited: Collection[str]) -> float:
        """Of a step."""
        return step_time([bidder for bidder in self.bidders if bidder.name not in limited], units)

    def can_be(self, units: Units, limited: Collection[str]) -> bool:
        """Whether all bidders, and no others, have a number of units that they can have, and there are so many."""
        if units.keys() != self.by_name.keys():
            return False
        if any(units[name] not in bidder.levels for name, bidder in self.by_name.items()):
            return False
        if any(units[name] > self.fair[name] for name in limited):
            return False
        return all(used <= self.capacity[name] * (1 + SLACK) for name, used in spent(self.bidders, units).items())

    def price(self, name: str, units: Units, limited: Collection[str]) -> _Price:
        """Of a bidder's units. Where the allocation isn't the best, they may cost more than they save: nobody pays more
        than it bids."""
        few = self.by_name[name].least
        if units[name] == few or name in limited:
            return _Price(0.0, 0.0)
        shortest, without = self.programme.shortest, self.programme.lanes_without
        has_few = self._allowed(limited, {name: few}), {**units, name: few}
        has_now = self._allowed(limited, {name: units[name]}), units
        saves = shortest(without(limited), *has_few) - self.seconds(units, limited)
        others = without({*limited, name})
        harm = shortest(others, *has_now) - shortest(others, *has_few)
        return _Price(max(0.0, harm + min(saves, 0.0)), saves)
