"""How a batch is divided among samplers that stream."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.controller.actor import pieces
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
