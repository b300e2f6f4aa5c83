import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.workers.microbatch import plan_microbatches


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 50), max_size=30), st.integers(1, 120))
def test_every_row_once_within_the_budget(lengths: list[int], budget: int) -> None:
    plan = list(plan_microbatches(lengths, budget))
    assert sorted(np.concatenate(plan).tolist() if plan else []) == list(range(len(lengths)))
    for index in plan:
        rows = [lengths[i] for i in index]
        assert len(rows) == 1 or len(rows) * max(rows) <= budget or max(rows) == 0


def test_rows_of_like_length_go_together() -> None:
    assert [index.tolist() for index in plan_microbatches([2, 9, 3, 8], 18)] == [[1, 3], [2, 0]]
