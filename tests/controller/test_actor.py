"""How a batch is divided among samplers that stream."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.controller.actor import dealt, pieces
from hybridflow.core.batch import Batch


@given(st.lists(st.integers(1, 5), min_size=1, max_size=20), st.integers(1, 9))
def test_pieces_are_whole_groups_of_about_as_many_each(sizes: list[int], most: int) -> None:
    ids = np.repeat(np.arange(len(sizes)), sizes)
    found = pieces(Batch({"group_id": ids}), most)
    assert np.concatenate(found).tolist() == list(range(len(ids)))
    groups = [set(ids[rows].tolist()) for rows in found]
    assert sum(map(len, groups)) == len(sizes)
    assert len(found) == min(most, len(sizes))
    assert max(map(len, groups)) - min(map(len, groups)) <= 1


def test_the_heaviest_call_goes_first_to_who_has_least() -> None:
    assert [*dealt([3, 9, 3, 5], [4, 0])] == [(1, 1), (3, 0), (0, 0), (2, 1)]


@given(st.lists(st.integers(0, 99), min_size=1, max_size=20), st.lists(st.integers(0, 99), min_size=1, max_size=5))
def test_every_call_is_dealt_once_and_nobody_gets_one_too_many(weights: list[int], outstanding: list[int]) -> None:
    loads, places = list(outstanding), list[int]()
    for place, worker in dealt(weights, outstanding):
        assert loads[worker] == min(loads)
        loads[worker] += weights[place]
        places.append(place)
    assert sorted(places) == list(range(len(weights)))
    assert [weights[place] for place in places] == sorted(weights, reverse=True)
