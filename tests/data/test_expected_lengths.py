"""How long responses are expected to be."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.data.lengths import DECAY, ExpectedLengths

PROMPTS = np.array([10, 20, 30, 40, 50])
ALL = np.arange(5)


def test_nothing_is_expected_before_the_first_response() -> None:
    assert ExpectedLengths(PROMPTS).of(ALL).tolist() == [0] * 5


def test_as_many_tokens_as_the_last_responses_to_the_prompt_had_in_the_mean() -> None:
    expected = ExpectedLengths(PROMPTS)
    expected.observe(np.array([1, 1, 3, 3]), [4, 8, 100, 102])
    expected.observe(np.array([3]), [7])
    assert expected.of(np.array([3, 1])).tolist() == [7, 6]


def test_of_other_prompts_what_a_line_through_the_lengths_says() -> None:
    expected = ExpectedLengths(PROMPTS)
    expected.observe(np.array([0, 0, 2, 2]), [24, 26, 64, 66])  # 2 x + 5
    assert expected.of(ALL).tolist() == [25, 45, 65, 85, 105]
    assert expected.of_others([0, 100]).tolist() == [5, 205]


def test_a_line_that_falls_ends_at_nothing() -> None:
    expected = ExpectedLengths(PROMPTS)
    expected.observe(np.array([0, 1]), [30, 10])
    assert expected.of(ALL).tolist() == [30, 10, 0, 0, 0]


def test_prompts_of_one_length_say_nothing() -> None:
    expected = ExpectedLengths(np.array([8, 8, 8]))
    expected.observe(np.array([0, 1]), [10, 20])
    assert expected.of(np.array([2])).tolist() == [15]


def test_earlier_responses_count_less_in_the_line() -> None:
    expected = ExpectedLengths(PROMPTS)
    for _ in range(2):
        expected.observe(np.array([0, 4]), [100, 100])
    for _ in range(60):
        expected.observe(np.array([0, 4]), [10, 50])
    weight = DECAY**60
    assert expected.of(np.array([2])) == pytest.approx(30 + 140 * weight, abs=0.51)


def test_a_step_that_has_learned_from_nothing_says_nothing() -> None:
    expected = ExpectedLengths(PROMPTS)
    expected.observe(np.array([1]), [4])
    expected.observe(np.array([], np.int64), np.array([], np.int64))
    assert expected.of(ALL).tolist() == [4] * 5


@given(st.lists(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 10_000)), min_size=1), max_size=6))
def test_it_goes_on_from_its_state(steps: list[list[tuple[int, int]]]) -> None:
    whole, first = ExpectedLengths(PROMPTS), ExpectedLengths(PROMPTS)
    for number, step in enumerate(steps):
        if number == len(steps) // 2:
            state, first = first.state_dict(), ExpectedLengths(PROMPTS)
            first.load_state_dict(state)
        for one in (whole, first):
            one.observe(np.array([record for record, _ in step]), [length for _, length in step])
    found = whole.of(ALL)
    assert found.tolist() == first.of(ALL).tolist() and (found >= 0).all()
