"""Predictions of tasks from samples: sizes and threads that were not measured, outliers, what the samples leave open."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.planner.profile_base import Sample
from hybridflow.planner.profile_fit import TaskFit, _not_negative

CORES = 8
SIZES = ((4, 100), (8, 200), (8, 400), (16, 400), (16, 800), (32, 800))


def law(rows: float, tokens: float, threads: int) -> float:
    return 0.01 + 1e-3 * rows + 1e-4 * tokens * (0.25 + 0.75 / threads)


def sample(rows: float, tokens: float, threads: int, seconds: float, workers: int = 1, kind: str = "train") -> Sample:
    memory = 1e8 + 1e5 * tokens
    return Sample("actor.update", kind, "m", "cpu", threads, workers, rows, tokens, seconds, seconds * threads, memory)


def samples(noise: float = 0.03, threads: tuple[int, ...] = (1, 2, 4), seed: int = 0) -> list[Sample]:
    rng = np.random.default_rng(seed)
    return [
        sample(rows, tokens, number, law(rows, tokens, number) * math.exp(rng.normal(0, noise)))
        for rows, tokens in SIZES
        for number in threads
        for _ in range(3)
    ]


@pytest.mark.parametrize(("rows", "tokens", "threads"), [(12, 300, 1), (24, 1000, 2), (64, 2000, 4), (16, 500, 8)])
def test_sizes_and_threads_that_were_not_measured_are_predicted(rows: int, tokens: int, threads: int) -> None:
    fit, truth = TaskFit(samples(), CORES), law(rows, tokens, threads)
    found = fit.predict(rows, tokens, threads, 1)
    assert found.seconds == pytest.approx(truth, rel=0.06)
    low, high = found.interval
    assert low < truth < high and 1.03 < found.spread < 1.4
    assert found.memory_bytes == pytest.approx(1e8 + 1e5 * tokens, rel=0.05)
    assert found.cpu_seconds == pytest.approx(truth * threads, rel=0.35)
    assert found.samples == 54


def test_outliers_pull_no_harder_than_others() -> None:
    spoilt = samples()
    for index, times in {0: 10, 17: 0.1, 30: 0.1, 41: 10, 52: 0.1}.items():
        one = spoilt[index]
        spoilt[index] = sample(one.rows, one.tokens, one.threads, times * one.seconds)
    assert TaskFit(spoilt, CORES).predict(24, 1000, 2, 1).seconds == pytest.approx(law(24, 1000, 2), rel=0.1)


def test_what_samples_leave_open_is_wide() -> None:
    """Of one size alone, nothing says whether twice of it takes twice as long; of one number of threads, what others do."""
    alone = TaskFit([sample(16, 800, 1, 0.1 * factor) for factor in (0.99, 1.0, 1.01, 1.02)], CORES)
    here, twice, threads = alone.predict(16, 800, 1, 1), alone.predict(32, 1600, 1, 1), alone.predict(16, 800, 4, 1)
    assert here.seconds == pytest.approx(0.1, rel=0.03) and here.spread < 1.2
    assert 0.1 < twice.seconds <= 0.2 and twice.spread > 1.2
    assert 0.025 < threads.seconds < 0.1 and threads.spread > 1.2
    assert len(alone.errors) == 0


def test_the_spread_has_what_the_terms_cannot_express() -> None:
    """Seconds that grow with the square of the rows: sizes left out are off, and the spread says so."""
    grown = [sample(rows, tokens, 1, 1e-3 * rows**2) for rows, tokens in SIZES for _ in range(3)]
    assert TaskFit(grown, CORES).predict(16, 800, 1, 1).spread > 1.5
    assert TaskFit(samples(threads=(1,)), CORES).predict(16, 800, 1, 1).spread < 1.2


def test_the_spread_has_how_far_off_sizes_are_that_were_left_out() -> None:
    """Two sizes are met exactly, but neither would have been predicted by the other."""
    two = [sample(rows, tokens, 1, seconds) for rows, tokens, seconds in ((8, 200, 1.0), (64, 1600, 1.1)) for _ in range(8)]
    fit = TaskFit(two, CORES)
    assert fit.predict(8, 200, 1, 1).seconds == pytest.approx(1.0, rel=0.02)
    assert np.abs(fit.errors).min() > 0.5 and fit.predict(8, 200, 1, 1).spread > 2


def test_a_decode_step_costs_besides_its_tokens() -> None:
    def drawn(rows: float, length: float) -> float:
        return 0.02 + 1e-3 * length + 1e-5 * rows * length

    known = [
        sample(rows, rows * length, 1, drawn(rows, length), kind="generate") for rows in (4, 8, 16) for length in (8, 16)
    ]
    found = TaskFit(known, CORES).predict(32, 32 * 32, 1, 1)
    assert found.seconds == pytest.approx(drawn(32, 32), rel=0.05)


def test_workers_share_rows_and_cores() -> None:
    fit = TaskFit(samples(noise=0.0), CORES)
    one, four, sixteen = (fit.predict(32, 800, 1, workers) for workers in (1, 4, 16))
    assert four.seconds == pytest.approx(law(8, 200, 1), rel=0.05)
    assert sixteen.seconds == pytest.approx(2 * law(2, 50, 1), rel=0.15)  # two workers take turns on a core
    assert four.spread > one.spread  # nobody saw what workers do to each other
    slow = [sample(8, 200, 1, 1.5 * law(8, 200, 1), workers=4) for _ in range(4)]
    assert TaskFit([*samples(), *slow], CORES).predict(32, 800, 1, 4).seconds == pytest.approx(
        1.5 * law(8, 200, 1), rel=0.15
    )


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 9), st.integers(1, 12))
def test_least_squares_above_zero_are_the_best(seed: int, terms: int, rows: int) -> None:
    rng = np.random.default_rng(seed)
    a, b = rng.normal(size=(rows, terms)), rng.normal(size=rows)
    gram, right = a.T @ a + 1e-3 * np.eye(terms), a.T @ b
    x = _not_negative(gram, right)
    slope = gram @ x - right
    assert (x >= 0).all() and (slope > -1e-6).all() and np.abs(slope * x).max() < 1e-6


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000), st.floats(1, 1000), st.floats(1.0, 10.0), st.integers(1, 16))
def test_more_never_takes_less(seed: int, rows: float, times: float, threads: int) -> None:
    fit = TaskFit(samples(noise=0.3, seed=seed), CORES)
    one, more = fit.predict(rows, 20 * rows, threads, 1), fit.predict(times * rows, times * 20 * rows, threads, 1)
    assert more.seconds >= one.seconds > 0 and one.spread >= 1 and math.isfinite(more.spread)
    assert fit.predict(rows, 20 * rows, threads + 1, 1).seconds <= one.seconds * (1 + 1e-9)
