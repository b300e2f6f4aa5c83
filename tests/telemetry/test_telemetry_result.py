"""Confidence intervals against published values, and result.json."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.telemetry.result import mean_interval, wilson_interval, write_result

# two-sided 95 % quantiles of Student's t, from the usual tables
QUANTILES = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 9: 2.262, 30: 2.042, 100: 1.984, 120: 1.980, 1000: 1.962}


def test_wilson_by_hand() -> None:
    low, high = wilson_interval(5, 10)
    z2 = 1.959963984540054**2
    center, margin = (0.5 + z2 / 20) / (1 + z2 / 10), math.sqrt(z2) / (1 + z2 / 10) * math.sqrt(0.25 / 10 + z2 / 400)
    assert (low, high) == pytest.approx((center - margin, center + margin), abs=1e-12)
    assert (low, high) == pytest.approx((0.2366, 0.7634), abs=1e-4)


def test_wilson_at_the_ends() -> None:
    assert wilson_interval(0, 0) == (0.0, 1.0)
    assert wilson_interval(0, 10) == (0.0, pytest.approx(0.2775, abs=1e-4))
    assert wilson_interval(10, 10) == (pytest.approx(0.7225, abs=1e-4), 1.0)
    with pytest.raises(ValueError, match="3 successes of 2"):
        wilson_interval(3, 2)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 60), st.integers(0, 60), st.floats(0.5, 0.99))
def test_wilson_holds_the_rate(successes: int, failures: int, confidence: float) -> None:
    low, high = wilson_interval(successes, successes + failures, confidence)
    rate = successes / max(1, successes + failures)
    assert 0 <= low <= rate <= high <= 1
    mirrored = wilson_interval(failures, successes + failures, confidence)
    assert (low, high) == pytest.approx((1 - mirrored[1], 1 - mirrored[0]), abs=1e-9)


@pytest.mark.parametrize(("freedom", "quantile"), QUANTILES.items())
def test_mean_interval_is_student_t(freedom: int, quantile: float) -> None:
    values = [float((-1) ** i) for i in range(freedom + 1)]
    mean, low, high = mean_interval(values)
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / freedom)
    assert high - mean == pytest.approx(quantile * deviation / math.sqrt(freedom + 1), rel=4e-4)
    assert mean - low == pytest.approx(high - mean)


def test_mean_interval_of_few_values() -> None:
    assert mean_interval([3.0]) == (3.0, -math.inf, math.inf)
    assert mean_interval([2.0, 2.0, 2.0]) == (2.0, 2.0, 2.0)
    with pytest.raises(ValueError, match="at least one"):
        mean_interval([])


def test_higher_confidence_is_wider() -> None:
    values = [1.0, 2.0, 4.0]
    assert mean_interval(values, 0.99)[2] > mean_interval(values, 0.95)[2] > mean_interval(values, 0.5)[2]


def test_write_result(tmp_path: Path) -> None:
    path = write_result(tmp_path, {"accuracy": 0.5, "high": math.inf, "before": {"count": 3}})
    assert path == tmp_path / "result.json"
    assert json.loads(path.read_text()) == {"accuracy": 0.5, "high": None, "before": {"count": 3}}
    write_result(tmp_path, {"accuracy": 0.75})
    assert json.loads(path.read_text()) == {"accuracy": 0.75, "high": None, "before": {"count": 3}}
    assert [entry.name for entry in tmp_path.iterdir()] == ["result.json"]
