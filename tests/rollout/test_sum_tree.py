import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.rollout.sum_tree import SumTree


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 40), st.integers(0, 10**6))
def test_places_are_found_by_their_running_sums(capacity, seed):
    rng, tree, expected = np.random.default_rng(seed), SumTree(capacity), np.zeros(capacity)
    for _ in range(3):
        places = rng.integers(0, capacity, 5)
        priorities = rng.integers(0, 4, 5).astype(float)
        tree.set(places, priorities)
        for place, priority in zip(places, priorities, strict=True):
            expected[place] = priority
        assert tree.priorities.tolist() == expected.tolist() and tree.total == expected.sum()
    if tree.total:
        sums = rng.random(20) * tree.total
        assert tree.find(sums).tolist() == np.searchsorted(np.cumsum(expected), sums, side="right").tolist()


def test_draws_follow_the_priorities_and_never_find_a_place_without():
    tree = SumTree(1000)
    tree.set(np.array([3, 500, 999]), np.array([1.0, 2.0, 1.0]))
    found = tree.find(np.random.default_rng(0).random(4000) * tree.total)
    places, counts = np.unique(found, return_counts=True)
    assert places.tolist() == [3, 500, 999] and counts / 4000 == pytest.approx([0.25, 0.5, 0.25], abs=0.03)
    assert tree.find(np.array([np.nextafter(tree.total, 0), tree.total])).tolist() == [999, 999]
