"""Prices against those by enumeration, budgets, and when a new allocation is taken."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_allocation import Market, markets, possible, scaling

from hybridflow.core.errors import ConfigError
from hybridflow.planner.allocation import Bidder, even_split, spent, step_time
from hybridflow.planner.auction import INCOME, TOLERANCE, Auction, Round
from hybridflow.telemetry.records import to_json

SLOTS = {"slots": 8.0}


def without(bidders: list[Bidder], name: str) -> list[Bidder]:
    """As if one took no time; it still has its units."""
    return [replace(one, seconds=dict.fromkeys(one.seconds, 0.0)) if one.name == name else one for one in bidders]


@settings(max_examples=30, deadline=None)
@given(markets(3))
def test_everybody_pays_what_it_costs_the_others_and_never_more_than_it_bids(market: Market) -> None:
    bidders, capacity = market
    result = Auction(capacity).round(1, bidders)
    everything = [*possible(bidders, capacity)]

    def shortest(given: list[Bidder], name: str, level: int) -> float:
        return min(step_time(given, units) for units in everything if units[name] == level)

    near = pytest.approx
    for bid, bidder in zip(result.bids, sorted(bidders, key=lambda one: one.name), strict=True):
        others = without(bidders, bid.name)
        harm = shortest(others, bid.name, bid.units) - shortest(others, bid.name, bidder.least)
        saves = shortest(bidders, bid.name, bidder.least) - step_time(bidders, result.units)
        close = 1e-5 * shortest(bidders, bid.name, bidder.least)
        assert bid.pays_s == near(harm, abs=close) and bid.saves_s == near(saves, abs=close)
        assert bid.bids_s == near(bid.pays_s + bid.saves_s) and 0 <= bid.pays_s <= bid.bids_s + close
        assert bid.seconds == bidder.seconds[bid.units] and bid.units == result.units[bid.name]
        assert bid.pays_s <= result.step_s * (1 + 1e-5), "one step pays for anything"


@settings(max_examples=10, deadline=None)
@given(markets(3), st.lists(st.tuples(st.floats(0.2, 5), st.floats(0.2, 5), st.floats(0.1, 300)), min_size=2, max_size=4))
def test_nothing_is_given_twice_and_nobody_loses_its_least(
    market: Market, rounds: list[tuple[float, float, float]]
) -> None:
    """Whatever changes from round to round, and whatever the steps then took."""
    bidders, capacity = market
    auction, again = Auction(capacity), Auction(capacity)
    for step, (first, others, measured) in enumerate(rounds):
        now = [
            replace(one, seconds={n: s * (first if one.name == "task0" else others) for n, s in one.seconds.items()})
            for one in bidders
        ]
        result = auction.round(step, now, switch_s=0.5, measured_s=measured)
        assert replace(again.round(step, now, 0.5, measured), solve_s=result.solve_s) == result
        assert all(used <= capacity[name] + 1e-9 for name, used in spent(now, result.units).items())
        assert all(result.units[one.name] >= one.least for one in now)
        fair = even_split(now, capacity)
        assert all(bid.units <= fair[bid.name] for bid in result.bids if bid.limited)
        assert all(0 <= bid.budget_s <= result.step_s * (1 + 1e-9) for bid in result.bids)


@settings(max_examples=6, deadline=None)
@given(st.data(), st.integers(2, 4))
def test_noise_below_the_tolerance_changes_an_allocation_at_most_once(data: st.DataObject, many: int) -> None:
    noise = st.floats(1 - TOLERANCE / 5, 1 + TOLERANCE / 5)
    works = data.draw(st.lists(st.floats(1, 50), min_size=many, max_size=many))
    auction = Auction(SLOTS, units=dict.fromkeys((f"task{number}" for number in range(many)), 1))
    results: list[Round] = []
    for step in range(5):
        bidders = [scaling(f"task{number}", work) for number, work in enumerate(works)]
        noisy = [replace(one, seconds={n: s * data.draw(noise) for n, s in one.seconds.items()}) for one in bidders]
        measured = step_time(bidders, results[-1].units) * data.draw(noise) if results else None
        results.append(auction.round(step, noisy, switch_s=0.0, measured_s=measured))
    assert sum(result.switched for result in results) <= 1
    assert not any(bid.limited for result in results for bid in result.bids)
    assert step_time(bidders, results[-1].units) <= step_time(bidders, Auction(SLOTS).round(0, bidders).units) * (
        1 + 2 * TOLERANCE
    )


def test_a_switch_has_to_pay_for_itself_within_the_horizon() -> None:
    bidders = [scaling("sim", 12), scaling("learn", 4)]
    held = {"sim": 4, "learn": 4}  # 3 s a step; at best 2 s, with 6 and 2
    gain = 3.0 - 2.0 - 3.0 * TOLERANCE
    dear = Auction(SLOTS, horizon=10, units=held).round(5, bidders, switch_s=10 * gain + 0.01)
    cheap = Auction(SLOTS, horizon=10, units=held).round(5, bidders, switch_s=10 * gain - 0.01)
    assert not dear.switched and dear.units == held and (dear.before_s, dear.step_s) == (3.0, 3.0)
    assert cheap.switched and cheap.units == {"sim": 6, "learn": 2} and (cheap.before_s, cheap.step_s) == (3.0, 2.0)


def test_resources_follow_the_work() -> None:
    auction = Auction(SLOTS)
    early, late = ([scaling("sim", sim), scaling("learn", learn)] for sim, learn in ((21, 2), (2, 21)))
    found = [auction.round(step, early if step < 3 else late, 0.1, 3.0).units for step in range(6)]
    assert found == [{"sim": 7, "learn": 1}] * 3 + [{"sim": 1, "learn": 7}] * 3


def test_prices_by_hand() -> None:
    """``learn`` on 6 of 8 slots: ``sim`` takes 2 s on 2, and would take 4/7 on the 7 that are left without it; ``learn``
    alone would take 12 s on one, so that nobody waits 10 s for it. ``score`` is content with its least and pays nothing."""
    bidders = [scaling("learn", 12), scaling("sim", 4), Bidder("score", {1: 0.1, 2: 0.05}, needs={"slots": 0.0})]
    result = Auction(SLOTS).round(1, bidders)
    learn, score, sim = result.bids
    assert result.units == {"learn": 6, "sim": 2, "score": 1}
    assert (learn.pays_s, learn.saves_s) == pytest.approx((2 - 4 / 7, 12 - 2))
    assert (sim.pays_s, sim.saves_s) == pytest.approx((2 - 12 / 7, 4 - 2))
    assert (score.bids_s, score.pays_s, score.saves_s) == (0, 0, 0)
    assert learn.budget_s == pytest.approx((1 - learn.pays_s / 2) * 2)


def liar(rounds: int, claimed: float = 40.0) -> list[Round]:
    """``liar`` says that it scales, and the step never becomes shorter than on an even split; ``sim`` does scale."""
    auction, results = Auction(SLOTS), list[Round]()
    for step in range(rounds):
        results.append(auction.round(step, [scaling("liar", claimed), scaling("sim", 4)], 0.0, claimed if step else None))
    return results


def test_who_promises_too_much_can_t_pay_for_long() -> None:
    """It pays at most what it had and what each round brings; then it has no more than its fair share until it can
    again."""
    results = liar(24)
    wins = [result.bids[0].units > result.bids[0].fair for result in results]
    assert wins[0] and results[0].units == {"liar": 7, "sim": 1}
    limited = [result for result in results if result.bids[0].limited]
    assert limited and all(result.units == {"liar": 4, "sim": 4} for result in limited)
    price = results[0].bids[0].pays_s / results[0].step_s
    assert 1 < sum(wins) <= (1 + 24 * INCOME) / price
    assert any(wins[10:]), "its budget lets it win again"


def test_who_keeps_its_promises_gets_its_payments_back() -> None:
    auction = Auction(SLOTS)
    for step in range(12):
        result = auction.round(step, [scaling("learn", 40), scaling("sim", 4)], 0.0, 40 / 7 if step else None)
        assert result.units == {"learn": 7, "sim": 1} and not any(bid.limited for bid in result.bids)
    assert auction.budgets["learn"] == pytest.approx(1 - result.bids[0].pays_s / result.step_s)


def test_a_promise_that_was_half_kept_is_half_paid_back() -> None:
    auction = Auction(SLOTS)
    bidders = [scaling("learn", 40), scaling("sim", 4)]
    first = auction.round(0, bidders)
    paid = first.bids[0].pays_s / first.step_s
    promised, alone = 40 / 7 * (1 + TOLERANCE), 40.0
    auction.round(1, bidders, measured_s=(promised + alone) / 2)
    assert auction.budgets["learn"] == pytest.approx(1 - paid + paid / 2 + INCOME - paid)


@pytest.mark.parametrize(
    "held", [{"sim": 5, "learn": 4}, {"sim": 4}, {"sim": 4, "learn": 3, "gone": 1}, {"sim": 9, "learn": 1}]
)
def test_what_can_t_hold_any_longer_is_replaced_whatever_that_costs(held: dict[str, int]) -> None:
    """More than there is, bidders that came or went, numbers of units that nobody knows the seconds of."""
    result = Auction(SLOTS, units=held).round(1, [scaling("sim", 4), scaling("learn", 4)], switch_s=1e9)
    assert result.switched and result.units == {"sim": 4, "learn": 4}
    assert (result.before, result.before_s) == (held, None)


def test_a_round_is_a_line_of_data() -> None:
    result = Auction(SLOTS, units={"sim": 4, "learn": 4}).round(30, [scaling("sim", 12), scaling("learn", 4)], 0.25, 3.1)
    found: dict[str, Any] = json.loads(to_json(result.record()))
    assert found.pop("solve_s") > 0
    assert [bid["name"] for bid in found["bids"]] == ["learn", "sim"] and found.pop("bids")[1]["units"] == 6
    assert found == {
        "step": 30,
        "units": {"sim": 6, "learn": 2},
        "step_s": 2.0,
        "before": {"sim": 4, "learn": 4},
        "before_s": 3.0,
        "measured_s": 3.1,
        "switch_s": 0.25,
        "switched": True,
        "capacity": {"slots": 8.0},
    }


def test_no_round_without_room_for_the_least() -> None:
    with pytest.raises(ConfigError, match="need 9 slots, and there are 8"):
        Auction(SLOTS).round(1, [scaling("sim", 1, 9, least=8), scaling("learn", 1)])
