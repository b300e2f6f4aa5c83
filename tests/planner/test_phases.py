"""Runs whose work changes: what each policy makes of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from test_allocation import scaling

from hybridflow.planner.allocation import Bidder, Units, best_static, even_split
from hybridflow.planner.auction import Auction
from hybridflow.planner.phases import Auctioned, Fixed, Phase, Played, Policy, Proportional, play

SLOTS = {"slots": 8.0}
EVEN = {"sim": 4, "learn": 4}
STEPS = 40
PHASES = (
    Phase("early", STEPS, (scaling("sim", 21), scaling("learn", 3))),
    Phase("late", STEPS, (scaling("sim", 3), scaling("learn", 21))),
)
EVERY, SWITCH_S = 5, 1.0


def played(policy: Policy, noise: float = 0.0, start: Units = EVEN) -> Played:
    return play(PHASES, policy, start, EVERY, SWITCH_S, noise)


def auctioned() -> Auctioned:
    return Auctioned(Auction(SLOTS, units=EVEN))


def test_a_static_split_takes_what_its_lanes_take() -> None:
    result = played(Fixed(EVEN))
    assert result.step_s == pytest.approx(np.full(2 * STEPS, 21 / 4)) and result.total_s == pytest.approx(
        2 * STEPS * 21 / 4
    )
    assert (result.switches, result.switching_s) == (0, 0.0)
    assert result.utilisation("slots", 8) == pytest.approx((21 + 3) / (8 * 21 / 4))


def test_the_auction_follows_the_work_with_a_delay_of_a_round() -> None:
    result = played(auctioned())
    best = {"sim": 7, "learn": 1}, {"sim": 1, "learn": 7}
    assert result.units[:EVERY] == (EVEN,) * EVERY and result.units[EVERY : STEPS + EVERY] == (best[0],) * STEPS
    assert result.units[STEPS + EVERY :] == (best[1],) * (STEPS - EVERY)
    assert result.switches == 2 and result.switching_s == 2 * SWITCH_S
    assert result.step_s[STEPS : STEPS + EVERY] == pytest.approx([21.0] * EVERY), "on the old allocation"
    assert result.total_s == pytest.approx(EVERY * 21 / 4 + EVERY * 21 + 2 * (STEPS - EVERY) * 3 + 2)


def test_with_noise_it_beats_every_static_split_and_nearly_the_best_of_each_phase() -> None:
    result = played(auctioned(), noise=0.05)
    static = played(Fixed(best_static([(STEPS, phase.bidders) for phase in PHASES], SLOTS)), 0.05)
    assert result.switches <= 4 and result.total_s < 0.85 * static.total_s
    assert result.utilisation("slots", 8) > 1.15 * static.utilisation("slots", 8)
    fixed = [played(Fixed(EVEN), noise=0.05).step_s for _ in range(2)]
    assert (fixed[0] == fixed[1]).all() and fixed[0].std() > 0


def test_shares_in_proportion_to_work_switch_for_every_noise() -> None:
    noisy = played(Proportional(SLOTS), noise=0.3)
    assert noisy.switches > 4 and noisy.total_s == pytest.approx(noisy.step_s.sum() + noisy.switches * SWITCH_S)
    assert played(Proportional(SLOTS)).units[10] == {"sim": 7, "learn": 1}


def test_a_policy_sees_work_that_was_measured_and_not_what_comes() -> None:
    seen: list[tuple[int, list[Bidder], float | None]] = []

    class Watching:
        def decide(self, step: int, bids: Sequence[Bidder], switch_s: float, measured_s: float | None) -> Units:
            seen.append((step, [*bids], measured_s))
            return EVEN

    played(Watching())
    assert [step for step, _, _ in seen] == [*range(5, 2 * STEPS + 1, 5)]
    work = [bids[0].seconds[1] for _, bids, _ in seen]
    assert work == pytest.approx([21.0] * 8 + [3.0] * 8)
    assert [measured for *_, measured in seen] == pytest.approx([21 / 4] * 16)


def test_phases_have_their_own_seconds() -> None:
    result = played(Fixed(even_split(PHASES[0].bidders, {"slots": 2.0})), start={"sim": 1, "learn": 1})
    assert result.phase_s("early") == pytest.approx(STEPS * 21.0) == result.phase_s("late")
