import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.core.metrics import Metrics


def test_means_weigh_the_parts() -> None:
    metrics, other = Metrics(), Metrics()
    metrics.add("loss", 6.0, 3)
    other.add("loss", 4.0, 1)
    other.add("empty", 0.0, 0)
    metrics.merge(other)
    assert metrics.values() == {"loss": 2.5}


def test_merge_prefixes_names() -> None:
    metrics, other = Metrics(), Metrics()
    other.add("loss", 1.0)
    metrics.merge(other, prefix="actor/")
    assert metrics.values() == {"actor/loss": 1.0}
    metrics.clear()
    assert metrics.values() == {}


def test_counts_add_up_and_maxima_stay() -> None:
    metrics, other = Metrics(), Metrics()
    for part, tokens, gap in ((metrics, 3, -2.0), (other, 4, -1.0), (other, 5, -3.0)):
        part.count("tokens", tokens)
        part.maximum("gap", gap)
    metrics.merge(other)
    assert metrics.values() == {"tokens": 12.0, "gap": -1.0}
    metrics.merge(other, prefix="b/")
    assert metrics.values() == {"tokens": 12.0, "gap": -1.0, "b/tokens": 9.0, "b/gap": -1.0}


def parts_of(values: np.ndarray, cuts: list[int]) -> list[Metrics]:
    parts = [Metrics() for _ in range(len(cuts) + 1)]
    for part, some in zip(parts, np.split(values, cuts), strict=True):
        part.deviation("std", some)
    return parts


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30), st.lists(st.integers(0, 30), max_size=4))
def test_the_deviation_of_parts_is_that_of_the_whole(numbers: list[float], cuts: list[int]) -> None:
    values, merged = np.array(numbers), Metrics()
    for part in parts_of(values, sorted(cuts)):
        merged.merge(part)
    assert merged.values()["std"] == pytest.approx(values.std(), rel=1e-12, abs=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_the_deviation_of_one_part_is_numpys_to_the_last_bit(seed: int) -> None:
    values = np.random.default_rng(seed).normal(1e3, 1, 999)
    merged = Metrics()
    for part in parts_of(values, [0, 999]):
        merged.merge(part, prefix="reward/")
    assert merged.values() == {"reward/std": values.std()}


def test_a_deviation_of_nothing_is_no_metric() -> None:
    metrics = Metrics()
    metrics.deviation("std", np.zeros(0))
    assert metrics.values() == {}
    metrics.deviation("std", np.array([5.0]))
    assert metrics.values() == {"std": 0.0}
