"""Allocations against every one that there is, and the simpler ones beside them."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.core.errors import ConfigError, UserError
from hybridflow.planner.allocation import (
    Bidder,
    Units,
    allocate,
    best_static,
    even_split,
    lane_seconds,
    proportional_share,
    spent,
    step_time,
)

Market = tuple[list[Bidder], dict[str, float]]


def scaling(name: str, work: float, most: int = 8, fixed: float = 0.0, lane: str = "", least: int = 1) -> Bidder:
    """``work`` seconds that any number of units share."""
    return Bidder(name, {units: fixed + work / units for units in range(1, most + 1)}, lane, least)


@st.composite
def markets(draw: st.DrawFn, most: int = 4) -> Market:
    """Up to ``most`` bidders of any curves in up to three lanes, on two resources, with room for the least units."""
    bidders = []
    for number in range(draw(st.integers(1, most))):
        levels = draw(st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True))
        seconds = {units: draw(st.floats(0.001, 100)) for units in levels}
        needs = {"slots": 1.0, "device": draw(st.sampled_from([0.0, 0.25, 1.0]))}
        lane = draw(st.sampled_from(["", "a", "b"]))
        bidders.append(Bidder(f"task{number}", seconds, lane, draw(st.sampled_from(levels)), needs))
    few = spent(bidders, {bidder.name: bidder.least for bidder in bidders})
    return bidders, {name: used + draw(st.integers(0, 8)) for name, used in few.items()}


def possible(bidders: Sequence[Bidder], capacity: Mapping[str, float]) -> Iterator[Units]:
    for levels in itertools.product(*(bidder.levels for bidder in bidders)):
        units = {bidder.name: level for bidder, level in zip(bidders, levels, strict=True)}
        if all(used <= capacity[name] + 1e-9 for name, used in spent(bidders, units).items()):
            yield units


@settings(max_examples=30, deadline=None)
@given(markets())
def test_no_allocation_is_shorter_nor_as_short_with_fewer_units(market: Market) -> None:
    bidders, capacity = market
    found = allocate(bidders, capacity)
    everything = [*possible(bidders, capacity)]
    shortest = min(step_time(bidders, units) for units in everything)
    assert found in everything
    assert step_time(bidders, found) == pytest.approx(shortest, rel=3e-6)
    near = [units for units in everything if step_time(bidders, units) <= shortest * (1 + 1e-9)]
    assert sum(found.values()) <= min(sum(units.values()) for units in near)


@settings(max_examples=15, deadline=None)
@given(markets(), st.integers(1, 5), st.randoms(use_true_random=False))
def test_more_capacity_is_never_slower_and_order_plays_no_part(market: Market, more: int, order: object) -> None:
    bidders, capacity = market
    found = allocate(bidders, capacity)
    shuffled = sorted(bidders, key=lambda bidder: hash((bidder.name, str(order))))
    assert allocate(shuffled, capacity) == found == allocate(bidders, capacity)
    for name in capacity:
        larger = allocate(bidders, {**capacity, name: capacity[name] + more})
        assert step_time(bidders, larger) <= step_time(bidders, found) * (1 + 3e-6)


@settings(max_examples=30, deadline=None)
@given(markets())
def test_baselines_are_allocations_in_which_nothing_more_fits(market: Market) -> None:
    bidders, capacity = market
    for units in (even_split(bidders, capacity), proportional_share(bidders, capacity)):
        assert units in [*possible(bidders, capacity)]
        for bidder in bidders:
            for more in [level for level in bidder.levels if level > units[bidder.name]][:1]:
                used = spent(bidders, {**units, bidder.name: more})
                assert any(used[name] > capacity[name] for name in used)
        assert step_time(bidders, allocate(bidders, capacity)) <= step_time(bidders, units) * (1 + 3e-6)


@settings(max_examples=15, deadline=None)
@given(markets(3), st.lists(st.tuples(st.integers(1, 9), st.floats(0.1, 10), st.floats(0.1, 10)), min_size=1, max_size=3))
def test_the_best_static_split_is_the_best_of_all(market: Market, phases: list[tuple[int, float, float]]) -> None:
    bidders, capacity = market
    recorded = []
    for steps, first, others in phases:
        changed = [
            replace(one, seconds={n: s * (first if one.name == "task0" else others) for n, s in one.seconds.items()})
            for one in bidders
        ]
        recorded.append((steps, changed))

    def total(units: Units) -> float:
        return sum(steps * step_time(given, units) for steps, given in recorded)

    assert total(best_static(recorded, capacity)) == pytest.approx(min(map(total, possible(bidders, capacity))), rel=3e-6)


def test_long_phases_count_for_more() -> None:
    early, late = ([scaling("sim", sim), scaling("learn", learn)] for sim, learn in ((21, 3), (3, 21)))
    for steps, units in ((1, {"sim": 4, "learn": 4}), (99, {"sim": 1, "learn": 7})):
        assert best_static([(1, early), (steps, late)], {"slots": 8}) == units


def test_lanes_run_side_by_side_and_what_is_in_one_in_turns() -> None:
    bidders = [scaling("sim", 8), scaling("learn", 2, lane="train"), scaling("score", 2, lane="train")]
    assert lane_seconds(bidders, {"sim": 2, "learn": 1, "score": 2}) == {"sim": 4.0, "train": 3.0}
    assert step_time(bidders, {"sim": 2, "learn": 1, "score": 2}) == 4.0
    assert allocate(bidders, {"slots": 8}) == {"sim": 4, "learn": 2, "score": 2}


def test_splits_by_hand() -> None:
    bidders = [scaling("sim", 30), scaling("learn", 10), scaling("score", 0.5)]
    assert even_split(bidders, {"slots": 8}) == {"learn": 3, "score": 3, "sim": 2}
    assert proportional_share(bidders, {"slots": 8}) == {"sim": 5, "learn": 2, "score": 1}
    assert allocate(bidders, {"slots": 8}) == {"sim": 5, "learn": 2, "score": 1}


def test_numbers_of_any_scale_are_exact() -> None:
    """The solver's tolerance is relative to the result."""
    for scale in (1e-7, 1.0, 1e7):
        bidders = [scaling("slow", 100 * scale, 128), scaling("fast", scale * 99.9, 128)]
        assert allocate(bidders, {"slots": 128}) == {"slow": 64, "fast": 64}
        assert allocate(bidders, {"slots": 129}) == {"slow": 65, "fast": 64}


def test_a_bidder_without_work_needs_nothing() -> None:
    idle = Bidder("idle", {0: 0.0}, least=0)
    assert allocate([idle, scaling("busy", 1)], {"slots": 3}) == {"idle": 0, "busy": 3}


def test_what_can_t_be_is_told_in_a_line_each() -> None:
    with pytest.raises(ConfigError, match=r"^bidder sim: no seconds on its least units, 2; those with seconds: 1, 4$"):
        Bidder("sim", {4: 1.0, 1: 3.0}, least=2)
    with pytest.raises(ConfigError, match=r"^bidder sim: 1 units take nan s; expected 0 or more$"):
        Bidder("sim", {1: float("nan")})
    with pytest.raises(ConfigError, match=r"^bidder sim: a unit needs -1 of slots; expected 0 or more$"):
        Bidder("sim", {1: 1.0}, needs={"slots": -1})
    both = [scaling("sim", 1, least=3), Bidder("learn", {1: 1.0}, needs={"gpus": 1})]
    for solve in (allocate, even_split):
        with pytest.raises(ConfigError) as caught:
            solve(both, {"slots": 2})
        assert caught.value.problems == (
            "allocation: the least units of all bidders need 3 slots, and there are 2",
            "allocation: bidders need gpus, of which there is none; there is slots",
        )
    with pytest.raises(ConfigError, match=r"^allocation: 2 bidders have 1 names; expected one for each$"):
        allocate([scaling("sim", 1), scaling("sim", 2)], {"slots": 8})
    with pytest.raises(ConfigError, match="phases differ"):
        best_static([(1, [scaling("sim", 1)]), (1, [scaling("sim", 1, most=4)])], {"slots": 8})


def test_without_scipy_a_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(UserError, match=r'^the auction needs scipy \(.*\): pip install "hybridflow\[auction\]"$'):
        allocate([scaling("sim", 1)], {"slots": 2})
