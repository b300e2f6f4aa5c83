"""How many devices each pool of a placement gets: best-first branch and bound over boxes of allocations.

A box says from how many to how many devices every pool gets. Nothing in it beats the pools' lower bounds at the most that
each can have there, given the least that the others have. The most promising box is halved until it is one allocation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import comb, inf, prod
from time import monotonic
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybridflow.planner.fronts import Front, Fronts, Within
from hybridflow.planner.stepping import Columns

__all__ = ["Found", "Limits", "Placement"]

Array = NDArray[np.float64]
Indices = NDArray[np.int64]
AT_ONCE = 1024  # boxes
GROWTHS = (1.03, 1.1, 1.3, 2.0, 5.0, inf)
SLACK = 1e-9  # of the cost: what is no better than that isn't looked for


class Found(NamedTuple):
    """``picks``: of each pool's front, the way that is best. ``bound``: nothing costs less. ``evaluated``: allocations."""

    cost: float = inf
    bound: float = inf
    fronts: tuple[Front, ...] = ()
    picks: tuple[int, ...] = ()
    evaluated: int = 0


@dataclass(frozen=True)
class Limits:
    """``devices`` of each kind; ``prices`` of an hour of one, where price is what counts, else empty: then what isn't given
    to a pool would be lost, and all devices of a kind are given out. ``driver``: its seconds in each stage."""

    devices: Indices
    prices: Array
    driver: Array
    until: float


@dataclass
class Placement:
    """``sets`` of roles on machines of ``kinds``; ``given``: devices of each, if that is fixed."""

    fronts: Fronts
    limits: Limits
    sets: tuple[tuple[str, ...], ...]
    kinds: tuple[int, ...]
    given: tuple[int, ...] | None = None
    anything: bool = False
    best: Found = field(default_factory=Found)

    def __post_init__(self) -> None:
        self.columns = self.fronts.ways.columns
        self.prices = self.limits.prices[[*self.kinds]] if self.limits.prices.size else None
        most = self.given or [int(self.limits.devices[kind]) for kind in self.kinds]
        pools = zip(self.sets, self.kinds, most, strict=True)
        self.known = [self.fronts.bounds(roles, kind, devices) for roles, kind, devices in pools]
        self.proven = 0.0
        self._start(inf)
        self.least, self.most = self.lo.sum(axis=0), self.hi.sum(axis=0)  # of one box, or none

    @property
    def allocations(self) -> int:
        """As many as an enumeration of those that leave no device out."""
        if self.given is not None:
            return 1
        pools = [self.kinds.count(kind) for kind in range(len(self.limits.devices))]
        return prod(comb(int(n) - 1, k - 1) for n, k in zip(self.limits.devices, pools, strict=True) if k)

    @property
    def bound(self) -> float:
        """Nothing costs less."""
        return min(self.best.cost, max(self.proven, float(self.bounds.min(initial=self.limit))))

    def solve(self, limit: float = inf, anything: bool = False) -> Found:
        """The best allocation that costs less than ``limit``, if there is time to find it; ``anything``: one that fits, in
        any case. What costs little more than the bound is looked for first: then little is wanted of the pools' fronts, and
        little has to be worked out."""
        start, self.anything = max(self.bound, SLACK), anything
        for growth in GROWTHS if start < limit else ():
            if self._late():
                break
            self._start(min(limit, start * growth))
            self._search()
            if self.best.cost < inf or start * growth >= limit:
                break
            if not self._late():
                self.proven = max(self.proven, start * growth)
        return self.best._replace(bound=self.bound)

    def _late(self) -> bool:
        return monotonic() >= self.limits.until and not (self.anything and self.best.cost == inf)

    def _start(self, limit: float) -> None:
        """Look for what costs less than ``limit``."""
        self.limit = limit
        self.exactly = [one.copy() for one in self.known]
        self.atmost = [np.minimum.accumulate(one, axis=0) for one in self.known]
        self.made: dict[tuple[int, int, bool], Front] = {}
        self.tried: set[tuple[int, ...]] = set()
        self.steps = [np.arange(len(one)) for one in self.known]
        self.lo, self.hi = self._root()
        self.bounds = self._bound(self.lo, self.hi)

    def _search(self) -> None:
        if len(self.lo):
            self._try(self._guess(self.lo[0], self.hi[0]))
        while len(self.bounds) and not self._late():
            first = int(np.argmin(self.bounds))
            if self.bounds[first] >= self._enough():
                break
            self._sharpen(self.lo[first], self.hi[first])
            one = slice(first, first + 1)
            self.lo[one], self.hi[one] = self._clipped(self.lo[one], self.hi[one])
            now = float(self._bound(self.lo[one], self.hi[one])[0])
            if now > self.bounds[first]:
                self.bounds[first] = now
            elif (self.lo[first] == self.hi[first]).all():
                self._try(self.lo[first])
                self.bounds[first] = inf
            else:
                self._split()

    # -------------------------------------------------------------------------------------------------------------- boxes

    def _root(self) -> tuple[Indices, Indices]:
        if self.given is not None:
            lo = hi = np.array([self.given])
        else:
            fits = [np.flatnonzero(np.isfinite(one).all(axis=1)) for one in self.atmost]
            total = self.limits.devices[[*self.kinds]]
            lo = np.array([[one[0] if len(one) else most + 1 for one, most in zip(fits, total, strict=True)]])
            hi = total[None]
        return self._clipped(lo, hi)

    def _clipped(self, lo: Indices, hi: Indices) -> tuple[Indices, Indices]:
        """Without what the number of devices rules out, and without empty boxes. Where devices that no pool has are lost,
        also without those at the end that a pool has no use for, and where it could have more whatever the others have."""
        lo, hi, kinds, saves = lo.copy(), hi.copy(), np.array(self.kinds), self.prices is not None or self.given is not None
        for kind in set(self.kinds):
            here = np.flatnonzero(kinds == kind)
            total = self.limits.devices[kind]
            hi[:, here] = np.minimum(hi[:, here], total - lo[:, here].sum(axis=1, keepdims=True) + lo[:, here])
            if not saves:
                useful = np.stack([self.steps[pool][np.maximum(hi[:, pool], 0)] for pool in here], axis=1)
                hi[:, here] = np.where(lo[:, here] <= hi[:, here], np.maximum(useful, lo[:, here]), hi[:, here])
                spare = total - hi[:, here].sum(axis=1, keepdims=True) + hi[:, here]
                lo[:, here] = np.maximum(lo[:, here], np.minimum(spare, hi[:, here]))
        some = (lo <= hi).all(axis=1)
        return lo[some], hi[some]

    def _bound(self, lo: Indices, hi: Indices) -> Array:
        slowest = np.repeat(self.limits.driver[None], len(lo), axis=0)
        for pool, (atmost, exactly) in enumerate(zip(self.atmost, self.exactly, strict=True)):
            least = atmost[hi[:, pool]]
            if self.prices is not None:
                one = lo[:, pool] == hi[:, pool]
                least[one] = exactly[hi[one, pool]]
            np.maximum(slowest, least, out=slowest)
        seconds = self.columns.seconds(slowest)
        return seconds if self.prices is None else seconds * (lo @ self.prices) / 3600

    def _enough(self) -> float:
        """What costs so much isn't looked for any more."""
        return min(self.limit, self.best.cost) * (1 - SLACK)

    def _split(self) -> None:
        """Halve the widest side of the boxes with the least bounds."""
        alive = self.bounds < self._enough()
        wide = np.flatnonzero((self.lo < self.hi).any(axis=1) & alive)
        if len(wide) > AT_ONCE:
            wide = wide[np.argpartition(self.bounds[wide], AT_ONCE)[:AT_ONCE]]
        lo, hi, row = self.lo[wide], self.hi[wide], np.arange(len(wide))
        side = np.argmax(hi / lo, axis=1)
        middle = (lo[row, side] + hi[row, side]) // 2
        below, above = hi.copy(), lo.copy()
        below[row, side], above[row, side] = middle, middle + 1
        lo, hi = self._clipped(np.concatenate([lo, above]), np.concatenate([below, hi]))
        alive[wide] = False
        self.bounds = np.concatenate([self.bounds[alive], self._bound(lo, hi)])
        self.lo, self.hi = np.concatenate([self.lo[alive], lo]), np.concatenate([self.hi[alive], hi])

    def _sharpen(self, lo: Indices, hi: Indices) -> None:
        """Work out what the pools can really do with the most devices of a box: their bounds grow there and below. Where
        price counts, only with exactly so many: with fewer a step may take longer than is of interest otherwise."""
        if self.prices is not None:
            if (lo == hi).all():
                for pool, number in enumerate(hi):
                    least = self._front(pool, number, exact=True).seconds.min(axis=0, initial=inf)
                    np.maximum(self.exactly[pool][number], least, out=self.exactly[pool][number])
            return
        for pool, number in enumerate(hi):
            if (pool, number, False) not in self.made:
                front = self._front(pool, number)
                least, used = front.seconds.min(axis=0, initial=inf), int(front.devices.max(initial=0))
                self.steps[pool][used : number + 1] = used
                np.maximum(self.atmost[pool][: number + 1], least, out=self.atmost[pool][: number + 1])

    def _front(self, pool: int, devices: int, exact: bool = False) -> Front:
        """What a pool can do with at most, or exactly, so many devices, as far as it can matter to any allocation."""
        key = pool, devices, exact
        if key not in self.made:
            roles, kind, within = (
                self.sets[pool],
                self.kinds[pool],
                self._within(pool, devices if exact else self.least[pool]),
            )
            if exact:
                self.made[key] = self.fronts.exact(roles, kind, devices, within)
            else:
                self.made[key] = self.fronts.upto(roles, kind, devices, within, self.known[pool])
        return self.made[key]

    def _within(self, pool: int, least: int) -> Within:
        """What is left for a pool of ``least`` devices or more by what the others take at least in time and price."""
        others = [number for number in range(len(self.sets)) if number != pool]
        floor = np.max([self.limits.driver, *(self.atmost[other][self.most[other]] for other in others)], axis=0)
        limit = min(self.limit, self.best.cost)
        if self.prices is not None:
            limit *= 3600 / (least * self.prices[pool] + sum(self.least[other] * self.prices[other] for other in others))
        return Within(limit, floor, self.columns)

    # -------------------------------------------------------------------------------------------------------- allocations

    def _guess(self, lo: Indices, hi: Indices) -> Indices:
        """From the least that each pool needs, by what the bounds say: give, then take and give."""
        now, step = lo.copy(), int(hi.max())
        moves = np.array(
            [give - take for give in np.eye(len(lo), dtype=int) for take in [0 * give, *np.eye(len(lo), dtype=int)]]
        )
        while step:
            tries = np.concatenate([now[None], now + step * moves])
            tries = tries[self._allowed(tries) & (tries >= lo).all(axis=1)]
            bounds = self._bound(tries, tries)
            best = int(np.lexsort((-tries.sum(axis=1), bounds))[0])
            step = step if (tries[best] != now).any() else step // 2
            now = tries[best]
        return now

    def _allowed(self, tries: Indices) -> NDArray[np.bool_]:
        used = np.stack(
            [tries[:, np.array(self.kinds) == kind].sum(axis=1) for kind in range(len(self.limits.devices))], axis=1
        )
        return np.asarray((used <= self.limits.devices).all(axis=1) & (tries > 0).all(axis=1))

    def _try(self, devices: Indices) -> None:
        """The best ways to use an allocation: one of each pool's front."""
        fronts = tuple(self._front(pool, int(n), self.prices is not None) for pool, n in enumerate(devices))
        same = tuple(int(steps[n]) for steps, n in zip(self.steps, devices, strict=True))
        if same in self.tried:
            return
        self.tried.add(same)
        self.best = self.best._replace(evaluated=self.best.evaluated + 1)
        if not all(len(front.devices) for front in fronts):
            return
        scale = 1.0 if self.prices is None else float(devices @ self.prices) / 3600
        picked = _together(fronts, self.limits.driver, self.columns, min(self.limit, self.best.cost) / scale)
        if picked is not None:
            self.best = self.best._replace(cost=picked[0] * scale, fronts=fronts, picks=picked[1])


def _together(
    fronts: tuple[Front, ...], driver: Array, columns: Columns, limit: float
) -> tuple[float, tuple[int, ...]] | None:
    """One way of each front, so that a step takes least, if it takes less than ``limit``."""
    rest = [driver]
    for front in fronts[:0:-1]:
        rest.append(np.maximum(rest[-1], front.seconds.min(axis=0)))
    partial, picks = driver[None], np.empty((1, 0), np.int64)
    for front, later in zip(fronts, reversed(rest), strict=True):
        m, f = len(partial), len(front.seconds)
        joined = np.maximum(partial[:, None], front.seconds[None]).reshape(m * f, len(driver))
        keep = np.flatnonzero(columns.seconds(np.maximum(joined, later)) < limit)
        partial = joined[keep]
        picks = np.concatenate([picks[keep // f], keep[:, None] % f], axis=1)
    if not len(partial):
        return None
    seconds = columns.seconds(partial)
    best = int(np.argmin(seconds))
    return float(seconds[best]), tuple(int(pick) for pick in picks[best])
