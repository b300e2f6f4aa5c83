"""What a pool can do: for a set of roles on some devices of one kind, the ways of cutting them that no other way beats.

A pool's roles take turns, so its seconds in a stage are the sum over them, and what crosses pools depends only on which
roles are not in it: a pool is a function of (roles, machine, devices). Memory ties its roles together (what all of them
hold and the most that one takes while it works must fit), and ties a sampler's seconds to what is left for its cache.
Hence a Pareto front: no way in it is as slow as another one in every stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from time import monotonic
from typing import NamedTuple

import numpy as np

from hybridflow.planner.mapping import Strategy
from hybridflow.planner.stepping import Columns
from hybridflow.planner.ways import Array, Indices, Roles, Ways, layouts, pareto, unbeaten

__all__ = ["Front", "Fronts", "Within"]


class Front(NamedTuple):
    """Seconds [ways, stages], how many devices work, and how each role is cut."""

    seconds: Array
    devices: Indices
    strategies: tuple[Mapping[str, Strategy], ...]


class Within(NamedTuple):
    """Which ways are wanted: steps of less than ``limit`` seconds, where no column is shorter than ``floor``."""

    limit: float
    floor: Array
    columns: Columns

    def covers(self, other: Within) -> bool:
        """Whether all that the other one wants is here."""
        return self.limit >= other.limit and bool((self.floor <= other.floor).all())

    def wants(self, seconds: Array) -> Array:
        """[...] of [..., stages]"""
        return np.asarray(self.columns.seconds(np.maximum(seconds, self.floor)) < self.limit)


class _Partial(NamedTuple):
    """Ways of cutting some roles. ``key``: how those are cut that have a sampler; ``picks`` [ways, roles] of options."""

    costs: Array
    key: Indices
    picks: Indices


class Fronts:
    """Fronts, as far as they were asked for."""

    def __init__(self, ways: Ways, hurry: float = np.inf) -> None:
        self.ways, self.hurry, self.skipped = ways, hurry, False
        self._exact: dict[tuple[Roles, int, int], tuple[Within, Front]] = {}
        self._lower: dict[tuple[Roles, int, int], Array] = {}

    def bounds(self, roles: Roles, kind: int, limit: int) -> Array:
        """[limit + 1, stages] no way that uses exactly n devices is faster in a stage. Infinite where nothing fits, and
        where there was no time to look, as ``skipped`` then says: powers of two come first, then multiples of a machine."""
        found, machine = np.full((limit + 1, self.ways.num_stages), np.inf), self.ways.machines[kind].devices
        for n in sorted(range(1, limit + 1), key=lambda n: (n & (n - 1) != 0, n % machine != 0, n)):
            if n & (n - 1) and monotonic() > self.hurry:
                self.skipped = True
                break
            if (roles, kind, n) not in self._lower:
                self._lower[roles, kind, n] = self.ways.lower(roles, kind, n)
            found[n] = self._lower[roles, kind, n]
        return found

    def fits(self, roles: Roles, kind: int, devices: int) -> bool:
        """Whether there is any way that uses all of the devices."""
        anything = Within(np.inf, np.zeros(self.ways.num_stages), self.ways.columns)
        possible = bool(np.isfinite(self.ways.lower(roles, kind, devices)).all())
        return possible and bool(self.exact(roles, kind, devices, anything).strategies)

    def upto(self, roles: Roles, kind: int, devices: int, within: Within, exactly: Array) -> Front:
        """The front of all ways that use at most so many devices: some stay idle, where a number is hard to divide.
        ``exactly``: ``bounds``."""
        seconds, parts = np.empty((0, self.ways.num_stages)), []
        wanted = np.flatnonzero(within.wants(exactly[: devices + 1]))
        for n in wanted[::-1]:
            if not (seconds <= exactly[n]).all(axis=1).any():
                parts.append(self.exact(roles, kind, int(n), within))
                seconds = np.concatenate([seconds, parts[-1].seconds])
        return _merged(parts, self.ways.num_stages)

    def exact(self, roles: Roles, kind: int, devices: int, within: Within) -> Front:
        """The front of all ways that use all of the devices; at least those that are wanted."""
        key = roles, kind, devices
        known = self._exact.get(key)
        if known is None or not known[0].covers(within):
            known = self._exact[key] = within, _Pool(self.ways, roles, kind, devices, within).front()
        return known[1]


class _Pool:
    """Roles on devices of one kind, all of which work."""

    def __init__(self, ways: Ways, roles: Roles, kind: int, devices: int, within: Within) -> None:
        self.ways, self.kind, self.devices, self.within = ways, kind, devices, within
        self.stages, self.usable = ways.num_stages, ways.usable[kind]
        self.samplers = [role for role in roles if ways.roles[role].weights_of]
        self.beside = {role: ways.roles[role].weights_of in roles for role in self.samplers}
        learners = {ways.roles[sampler].weights_of for sampler in self.samplers}
        # learners of samplers come last: ways with different layouts of their weights don't beat each other
        self.plain = sorted((role for role in roles if role not in self.samplers), key=lambda role: role in learners)
        self.options = [ways.options(role, kind, devices) for role in self.plain]
        self.layouts = [
            layouts(one.strategies) if role in learners else np.zeros(len(one.strategies), np.int64)
            for role, one in zip(self.plain, self.options, strict=True)
        ]
        self.transfers = ways.transfers(roles, kind, devices)

    def front(self) -> Front:
        partial = self._joined()
        if not len(partial.costs):
            return _merged([], self.stages)
        if self.samplers:
            seconds, rows, combos = self._sampled(partial)
        else:
            seconds, rows, combos = (
                partial.costs[:, : self.stages],
                np.arange(len(partial.costs)),
                [()] * len(partial.costs),
            )
        kept = pareto(seconds)
        picked = [self._strategies(partial.picks[rows[n]]) | dict(zip(self.samplers, combos[n], strict=True)) for n in kept]
        return Front(seconds[kept], np.full(len(kept), self.devices), tuple(picked))

    def _strategies(self, picks: Indices) -> dict[str, Strategy]:
        each = zip(self.plain, self.options, picks, strict=True)
        return {role: options.strategies[pick] for role, options, pick in each}

    def _joined(self) -> _Partial:
        """All ways of cutting all but the samplers that fit, less those that are beaten or aren't wanted."""
        start = np.concatenate([self.transfers, np.zeros(2)])
        partial = _Partial(start[None], np.zeros(1, np.int64), np.empty((1, 0), np.int64))
        fastest = [self.ways.fastest(role, self.kind, self.devices, self.beside[role]) for role in self.samplers]
        later = [np.append(sum(fastest, np.zeros(self.stages)), 0.0)]  # of seconds and of bytes held
        for one in self.options[:0:-1]:
            later.append(later[-1] + one.costs[:, :-1].min(axis=0, initial=np.inf))
        for number, (options, layout) in enumerate(zip(self.options, self.layouts, strict=True), 1):
            partial = self._join(partial, options.costs, layout, later[-number], number == len(self.options))
        return partial

    def _join(self, partial: _Partial, options: Array, layout: Indices, later: Array, last: bool) -> _Partial:
        """Each way of the roles so far with each of the next role."""
        m, k = len(partial.costs), len(options)
        left, right = np.repeat(np.arange(m), k), np.tile(np.arange(k), m)
        costs = partial.costs[left] + options[right]
        costs[:, -1] = np.maximum(partial.costs[left, -1], options[right, -1])
        fits = costs[:, -2] + later[-1] + costs[:, -1] <= self.usable
        fits &= self.within.wants(costs[:, :-2] + later[:-1])
        costs, left, right = costs[fits], left[fits], right[fits]
        if last:  # bytes don't matter any more, but for what they leave to samplers
            costs[:, -1] = 0.0
            costs[:, -2] *= bool(self.samplers)
        key = partial.key[left] * (layout.max(initial=0) + 1) + layout[right]
        kept = pareto(costs, key)
        picks = np.concatenate([partial.picks[left[kept]], right[kept, None]], axis=1)
        return _Partial(costs[kept], key[kept], picks)

    # --------------------------------------------------------------------------------------------------------- samplers

    def _sampled(self, partial: _Partial) -> tuple[Array, Indices, list[tuple[Strategy, ...]]]:
        """Seconds, rows of ``partial`` and strategies of samplers. What is left for caches differs from row to row, and to
        ask for seconds is dear: the most promising way is asked first, and what can't beat it isn't asked at all."""
        ways = [self.ways.generation(sampler, self.kind, self.devices) for sampler in self.samplers]
        combos = list(product(*ways))
        keys, first, key = np.unique(partial.key, return_index=True, return_inverse=True)
        moves = [[self._moved(combo, partial.picks[row]) for combo in combos] for row in first]
        base = np.array([[one[0] for one in row] for row in moves]).reshape(len(keys), len(combos), self.stages)
        shared = np.array([[one[1] for one in row] for row in moves]).reshape(len(keys), len(combos), len(self.samplers))
        most = self.usable - partial.costs[:, -2].min() + shared.max(axis=0, initial=0.0)
        least = np.array([self._drawn(combo, free) for combo, free in zip(combos, most, strict=True)])
        bounds = partial.costs[:, None, : self.stages] + (base + least.reshape(-1, self.stages))[key]
        row, combo = np.nonzero(self.within.wants(bounds))
        rest = bounds[row, combo]
        order = np.argsort(rest.sum(axis=1), kind="stable")
        rest, row, combo = np.ascontiguousarray(rest[order].T), row[order], combo[order]
        found: list[tuple[Array, int, tuple[Strategy, ...]]] = []
        while row.size:
            r, c, k = row[0], combo[0], key[row[0]]
            free = self.usable - partial.costs[r, -2] + shared[k, c]
            seconds = partial.costs[r, : self.stages] + base[k, c] + self._drawn(combos[c], free)
            keep = unbeaten(rest, seconds)
            keep[0] = False
            rest, row, combo = rest[:, keep], row[keep], combo[keep]
            if np.isfinite(seconds).all():
                found.append((seconds, r, combos[c]))
        seconds = np.array([one for one, _, _ in found]).reshape(-1, self.stages)
        return seconds, np.array([r for _, r, _ in found], np.int64), [one for _, _, one in found]

    def _drawn(self, combo: Sequence[Strategy], free: Array) -> Array:
        """Seconds of all samplers; infinite if one doesn't fit."""
        total = np.zeros(self.stages)
        for sampler, strategy, left in zip(self.samplers, combo, free, strict=True):
            seconds = self.ways.drawing(sampler, self.kind, strategy, float(left))
            total = total + (np.inf if seconds is None else seconds)
        return total

    def _moved(self, combo: Sequence[Strategy], picks: Indices) -> tuple[Array, list[float]]:
        """Seconds of weights on their way to the samplers, infinite if there is no way, and bytes that each shares."""
        total, shared = np.zeros(self.stages), []
        for sampler, strategy in zip(self.samplers, combo, strict=True):
            if self.beside[sampler]:
                place = self.plain.index(self.ways.roles[sampler].weights_of)
                training = self.options[place].strategies[picks[place]]
                seconds, same = self.ways.beside(sampler, training, strategy, self.kind)
            else:
                seconds, same = self.ways.publishing(sampler, strategy, self.kind), 0.0
            total = total + seconds
            shared.append(same)
        return total, shared


def _merged(parts: Sequence[Front], stages: int) -> Front:
    seconds = np.concatenate([np.empty((0, stages)), *(part.seconds for part in parts)])
    devices = np.concatenate([np.empty(0, np.int64), *(part.devices for part in parts)])
    strategies = [one for part in parts for one in part.strategies]
    kept = pareto(seconds)
    return Front(seconds[kept], devices[kept], tuple(strategies[number] for number in kept))
