"""Fitted constants are those that made the measurements, and say how sure they are."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.planner.calibrate import fit

WORK, STEPS = np.geomspace(1, 1e4, 12), np.tile([10.0, 100.0, 1000.0], 4)
START = {"rate": 10.0, "step": 1e-2}


def seconds(constants: Mapping[str, float]) -> np.ndarray:
    return WORK / constants["rate"] + STEPS * constants["step"]


@given(st.floats(2, 200), st.floats(1e-2, 0.5))
@settings(max_examples=20, deadline=None)
def test_constants_are_those_that_made_the_measurements(rate: float, step: float) -> None:
    found = fit(seconds, seconds({"rate": rate, "step": step}), START)
    assert found.values == pytest.approx({"rate": rate, "step": step}, rel=0.04)
    assert found.median_error < 0.02
    assert all(1 <= spread < 1.1 for spread in found.spread.values())
    assert found.determined == ("rate", "step")


def test_one_wild_measurement_changes_little_and_shows_as_the_worst_error() -> None:
    observed = seconds({"rate": 40.0, "step": 2e-2})
    observed[4] *= 5
    found = fit(seconds, observed, START)
    assert found.values == pytest.approx({"rate": 40.0, "step": 2e-2}, rel=0.08)
    assert found.worst_error == pytest.approx(0.8, abs=0.05)
    assert found.median_error < 0.05


def test_noise_shows_in_the_spread() -> None:
    noise = np.random.default_rng(0).normal(size=len(WORK))
    exact = seconds({"rate": 40.0, "step": 2e-2})
    little, much = (fit(seconds, exact * np.exp(size * noise), START) for size in (0.01, 0.08))
    for name in START:
        assert 1 < little.spread[name] < much.spread[name] < 1.3
        assert abs(np.log(much.values[name] / {"rate": 40.0, "step": 2e-2}[name])) < 4 * np.log(much.spread[name])


def test_a_constant_on_which_nothing_depends_stays_and_says_so() -> None:
    found = fit(seconds, seconds({"rate": 40.0, "step": 2e-2}), {**START, "network": 0.7})
    assert found.values["network"] == pytest.approx(0.7, rel=1e-3)
    assert found.determined == ("rate", "step")
    assert found.spread["network"] >= 10 * 0.999


def test_bounds_hold() -> None:
    found = fit(seconds, seconds({"rate": 40.0, "step": 2e-2}), START, bounds={"rate": (1.0, 20.0)})
    assert found.values["rate"] == pytest.approx(20.0)


def test_kinks_do_not_stop_a_fit() -> None:
    def slower(constants: Mapping[str, float]) -> np.ndarray:
        return np.maximum(WORK / constants["rate"], STEPS * constants["step"])

    found = fit(slower, slower({"rate": 3.0, "step": 0.1}), {"rate": 100.0, "step": 1.0})
    assert found.values == pytest.approx({"rate": 3.0, "step": 0.1}, rel=0.03)


def test_missing_predictions_are_far_off_but_no_error() -> None:
    def some(constants: Mapping[str, float]) -> np.ndarray:
        return np.where(np.arange(len(WORK)) == 0, np.nan, seconds(constants))

    found = fit(some, seconds({"rate": 40.0, "step": 2e-2}), START)
    assert found.values == pytest.approx({"rate": 40.0, "step": 2e-2}, rel=0.05)
    assert found.errors[0] == 3.0


def test_weights_say_what_counts() -> None:
    observed = np.where(
        np.arange(len(WORK)) % 2, seconds({"rate": 40.0, "step": 2e-2}), seconds({"rate": 20.0, "step": 2e-2})
    )
    weights = np.where(np.arange(len(WORK)) % 2, 1.0, 1e-3)
    assert fit(seconds, observed, START, weights=weights).values["rate"] == pytest.approx(40.0, rel=0.05)
