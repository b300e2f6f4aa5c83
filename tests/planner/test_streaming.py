"""Rollouts beside learning, against what can be reckoned by hand and what no schedule can beat."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from hybridflow.planner.lengths import Lengths
from hybridflow.planner.streaming import Engine, Order, stream

Dealing = Literal["even", "outstanding", "expected", "stealing"]
Array = NDArray[np.float64]
SYNC = Order(0, "even")


def skewed(steps: int = 40, groups: int = 8, rows: int = 4, seed: int = 0) -> Array:
    return Lengths(100.0, 150.0, 1000.0).draw(np.random.default_rng(seed), (steps, groups, rows))


def test_in_turns_a_step_is_the_slowest_replica_and_the_learner() -> None:
    """Two replicas of two slots, 1 s a decode step and 0.5 s a row in it; groups of two rows, the second group of a replica
    after the first; 3 s of learning, 0.25 s of weights, 0.125 s for a row to begin."""
    lengths = np.array([[[2.0, 4.0], [1.0, 1.0], [3.0, 3.0], [5.0, 1.0]]] * 3)
    result = stream(lengths, [Engine(2, 1.0, 0.5, 0.125)] * 2, 3.0, SYNC, 0.25)
    # the first: 2 steps with 2 rows, 1 with 2 (row 3 took the place of row 1), 1 with 2 (row 4), then none
    first = 4 * 2.0 + 4 * 0.125
    second = 4 * 2.0 + 4 * 1.5 + 4 * 0.125  # 3 with 2, row 4's 1 with 2, row 3's other 4 alone
    later = second + 3 + 0.25
    assert first < second and result.ends == pytest.approx([second + 3 + number * later for number in range(3)])
    assert result.drawing_s == pytest.approx([3 * first, 3 * second])
    assert result.learning_s == 9.0 and result.staleness.tolist() == [0, 0, 0]
    assert result.step_s == pytest.approx(later)


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 1000),
    st.integers(0, 3),
    st.sampled_from(get_args(Dealing)),
    st.booleans(),
    st.integers(1, 4),
    st.integers(1, 6),
    st.floats(0, 300),
)
def test_nothing_is_lost_nothing_is_staler_than_allowed_and_nobody_works_faster_than_it_can(
    seed: int, staleness: int, dealing: Dealing, partial: bool, replicas: int, slots: int, learn_s: float
) -> None:
    lengths = skewed(6, 5, 3, seed)
    engine = Engine(slots, 0.5, 0.25, 1.0)
    result = stream(lengths, [engine] * replicas, learn_s, Order(staleness, dealing, partial), 2.0)
    assert len(result.ends) == 6 and (np.diff(result.ends) >= learn_s - 1e-9).all()
    assert (result.staleness >= -1e-9).all() and (result.staleness <= staleness + 1e-9).all()
    fewest, most = (lengths.sum() * engine.token_s(rows) / rows for rows in (slots, 1))
    begun = lengths.size * engine.begin_s
    again = 6 * replicas * slots * engine.begin_s if partial else 0.0
    assert fewest + begun <= result.drawing_s.sum() * (1 + 1e-9)
    assert result.drawing_s.sum() <= (most + begun + again) * (1 + 1e-9)
    assert (result.drawing_s <= result.ends[-1] + 1e-9).all() and 0 < result.drawing <= 1 and 0 <= result.learning <= 1
    longest = lengths.max(axis=(1, 2)) * engine.token_s(1)
    assert result.ends[0] >= longest[0] + learn_s - 1e-9
    assert (
        stream(lengths, [engine] * replicas, learn_s, Order(staleness, dealing, partial), 2.0).ends == result.ends
    ).all()


def test_ahead_and_balanced_a_step_takes_the_longer_of_drawing_and_learning() -> None:
    alike = np.full((30, 8, 4), 100.0)
    engines = [Engine(16, 0.1)] * 2
    in_turns = stream(alike, engines, 10.0, SYNC)
    assert in_turns.step_s == pytest.approx(20.0) and in_turns.drawing == pytest.approx(0.5)
    beside = stream(alike, engines, 10.0, Order(1, "even"))
    assert beside.step_s == pytest.approx(10.0) and beside.staleness[5:].tolist() == [1.0] * 25


def test_long_responses_hide_behind_the_next_steps() -> None:
    """With weights put in place at token boundaries nobody waits for the longest response; without, a replica that takes
    weights waits for its own; in turns everybody waits."""
    lengths, engines = skewed(), [Engine(16, 0.05, 0.005)] * 2
    learn_s = 20.0
    found = {
        name: stream(lengths, engines, learn_s, order, 0.5).step_s
        for name, order in {
            "in turns": SYNC,
            "one step ahead": Order(1, "even"),
            "two": Order(2),
            "two, partial": Order(2, partial=True),
        }.items()
    }
    assert found["two, partial"] < found["two"] < found["one step ahead"] < found["in turns"]
    assert found["two, partial"] >= learn_s


def test_weights_in_the_middle_of_rows_cost_beginning_them_anew() -> None:
    lengths = np.array([[[10.0]], [[60.0]], [[10.0]]])
    slow, fast = (stream(lengths, [Engine(4, 1.0, 0.0, begin)], 1.0, Order(1, partial=True), 0.5) for begin in (2.0, 0.0))
    assert fast.ends[:2] == pytest.approx([11.0, 60.0 + 0.5 + 1.0]), "both rows run; the longer one is interrupted once"
    assert slow.ends[:2] == pytest.approx([10 + 4 + 1, 60 + 4 + 2 + 2 + 0.5 + 1]), "the third row begins beside it, too"


def test_work_goes_to_who_is_fast() -> None:
    lengths, mixed = skewed(20, 24, 2), [Engine(4, 0.02), Engine(4, 0.06)]
    even, outstanding = (stream(lengths, mixed, 0.0, Order(0, one)).step_s for one in ("even", "outstanding"))
    assert outstanding < 0.75 * even, "by speed, a quarter of the rows goes to the slow one"


def test_who_has_none_left_takes_some() -> None:
    lengths = Lengths(100.0, 80.0, 300.0).draw(np.random.default_rng(0), (20, 48, 2))
    alike = [Engine(4, 0.02)] * 4
    even, outstanding, expected, stealing = (stream(lengths, alike, 0.0, Order(0, one)).step_s for one in get_args(Dealing))
    assert stealing < 0.95 * min(outstanding, even) and expected < 0.95 * min(outstanding, even)


def test_long_groups_are_dealt_first_and_each_to_who_has_least() -> None:
    """Two replicas that draw row by row: 7 + 2 and 5 + 4 tokens, and with a wrong idea of them 7 + 5 and 4 + 2; as they
    come 2 + 5 and 4 + 7."""
    lengths, alike = np.array([[[2.0], [4.0], [5.0], [7.0]]]), [Engine(1, 1.0)] * 2
    first = {
        name: stream(lengths, alike, 0.0, Order(0, "expected"), 0.0, known).ends[0]
        for name, known in {"right": None, "wrong": [[1.0, 2.0, 3.0, 3.5]], "alike": [[3.0] * 4]}.items()
    }
    assert first["right"] == 9.0 and first["wrong"] == 9.0 and first["alike"] == 11.0
    assert stream(lengths, alike, 0.0, Order(0)).ends[0] == 11.0


def test_the_last_rows_are_drawn_faster() -> None:
    """A decode step costs less with fewer rows in it, so a long response isn't as long as it looks."""
    lengths = np.array([[[10.0] * 7 + [100.0]]])
    flat, steep = (stream(lengths, [engine], 0.0, SYNC).ends[0] for engine in (Engine(8, 1.6), Engine(8, 0.0, 0.2)))
    assert flat == pytest.approx(160.0) and steep == pytest.approx(10 * 1.6 + 90 * 0.2)
