import numpy as np
import pytest

from hybridflow.planner.lengths import Lengths


def test_lengths_are_drawn_as_they_were_recorded() -> None:
    lengths = Lengths.of((2.0, 2.0, 8.0, 400.0))
    drawn = lengths.draw(np.random.default_rng(0), (40, 100))
    values, counts = np.unique(drawn, return_counts=True)
    assert values.tolist() == [2.0, 8.0, 400.0] and counts / 4000 == pytest.approx([0.5, 0.25, 0.25], abs=0.03)
    assert (lengths.mean, lengths.longest) == (103.0, 400.0) and lengths.deviation == pytest.approx(np.std([2, 2, 8, 400]))


def test_without_a_record_they_have_a_mean_a_deviation_and_a_longest() -> None:
    rng = np.random.default_rng(0)
    drawn = Lengths(100.0, 50.0).draw(rng, (20_000,))
    assert (drawn.mean(), drawn.std()) == pytest.approx((100.0, 50.0), rel=0.03) and drawn.max() > 300
    assert Lengths(100.0, 50.0, 120.0).draw(rng, (500,)).max() == 120.0
    assert (Lengths(100.0).draw(rng, (3, 2)) == 100.0).all()
