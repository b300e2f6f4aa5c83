import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.core.batch import Batch, Ragged, objects
from hybridflow.core.errors import ContractError

INT_ROW = Ragged.from_rows([[1]], np.int64)


def example() -> Batch:
    return Batch(
        {
            "sample_id": np.array([10, 11, 12]),
            "tokens": Ragged.from_rows([[1, 2, 3], [], [4, 5]], np.int64),
            "response_mask": Ragged.from_rows([[False, True, True], [], [False, True]], bool),
            "prompt": Ragged.from_rows([[1], [9, 9], [4]], np.int64),
            "response": objects(["ab", "", "c"]),
        }
    )


def test_ragged_pads_and_packs() -> None:
    tokens = example().ragged("tokens")
    assert tokens.padded(-1).tolist() == [[1, 2, 3], [-1, -1, -1], [4, 5, -1]]
    assert Ragged.from_padded(tokens.padded(-1), tokens.lengths).values.tolist() == [1, 2, 3, 4, 5]
    assert tokens.row_index.tolist() == [0, 0, 0, 2, 2]
    assert [row.tolist() for row in tokens] == [[1, 2, 3], [], [4, 5]]
    assert tokens[2].tolist() == [4, 5]


def test_rows_take_any_order_with_repeats_and_booleans() -> None:
    taken = example().rows([2, 0, 2])
    assert [row.tolist() for row in taken.ragged("tokens")] == [[4, 5], [1, 2, 3], [4, 5]]
    assert taken["response"].tolist() == ["c", "ab", "c"]
    assert example().rows(np.array([True, False, True]))["sample_id"].tolist() == [10, 12]
    assert len(example().rows([])) == 0


def test_repeat_puts_copies_side_by_side() -> None:
    assert example().repeat(2)["sample_id"].tolist() == [10, 10, 11, 11, 12, 12]


def test_steps_explode_the_action_steps() -> None:
    steps = example().steps()
    assert steps.ragged("tokens").values.tolist() == [2, 3, 5]
    assert steps["sample_id"].tolist() == [10, 10, 12]
    assert steps.lengths.tolist() == [1, 1, 1]


def test_concat_restores_a_split_and_refuses_other_columns() -> None:
    whole = Batch.concat([example().rows([0]), example().rows([1, 2])])
    assert [row.tolist() for row in whole.ragged("tokens")] == [[1, 2, 3], [], [4, 5]]
    with pytest.raises(ContractError, match="differ in columns response"):
        Batch.concat([example(), example().select(["sample_id", "tokens", "response_mask", "prompt"])])


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"no_such": np.zeros(2)}, "unknown column 'no_such'"),
        ({"scores": np.zeros(2)}, "type float64, expected float32"),
        ({"tokens": np.zeros(2, np.int64)}, "on the time axis"),
        ({"scores": Ragged.from_rows([[1.0]], np.float32)}, "on the row axis"),
        ({"sample_id": np.zeros(2, np.int64), "scores": np.zeros(3, np.float32)}, "3 rows, expected 2"),
        ({"tokens": INT_ROW, "log_probs": Ragged.from_rows([[1, 2]], np.float32)}, "different lengths"),
        ({}, "needs num_rows"),
    ],
)
def test_wrong_columns_are_refused(columns: dict, message: str) -> None:
    with pytest.raises(ContractError, match=message):
        Batch(columns)


def test_ragged_lengths_must_fit_the_values() -> None:
    with pytest.raises(ContractError, match="lengths sum to 3"):
        Ragged(np.zeros(2), np.array([3]))


def test_a_missing_column_names_those_there_are() -> None:
    with pytest.raises(ContractError, match=r"no column 'scores'; the batch has prompt, response"):
        example()["scores"]


def test_frozen_arrays_refuse_writes() -> None:
    batch = example().freeze()
    with pytest.raises(ValueError, match="read-only"):
        batch["tokens"].values[0] = 7


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=6), st.randoms(use_true_random=False))
def test_rows_of_a_permutation_invert(rows: list[list[int]], random: object) -> None:
    ragged = Ragged.from_rows(rows, np.int64)
    order = np.arange(len(rows))
    random.shuffle(order)  # type: ignore[attr-defined]
    back = ragged.rows(order).rows(np.argsort(order))
    assert [row.tolist() for row in back] == rows
    assert Ragged.from_padded(ragged.padded(), ragged.lengths).values.tolist() == ragged.values.tolist()


def test_filled_columns_have_the_vocabulary_s_types() -> None:
    filled = example().fill(demonstrated=True, advantages=0.5)
    assert filled["demonstrated"].tolist() == [True, True, True]
    assert filled["advantages"].values.tolist() == [0.5] * 5 and filled["advantages"].values.dtype == np.float32
    assert filled["advantages"].lengths.tolist() == [3, 0, 2]
    with pytest.raises(ContractError, match="unknown column 'no_such'"):
        example().fill(no_such=1)
    with pytest.raises(ContractError, match="'advantages' is on the time axis"):
        Batch({"sample_id": np.arange(2)}).fill(advantages=0)
    with pytest.raises(ContractError, match="'prompt' is on the prompt axis"):
        example().fill(prompt=0)


def test_groups_give_their_first_rows_and_take_what_was_found_for_them() -> None:
    batch = Batch({"group_id": np.array(["b", "b", "a", "b", "a"]), "sample_id": np.arange(5)})
    first = batch.first_of_groups()
    assert first["sample_id"].tolist() == [0, 2]
    joined = batch.join_groups(first.with_columns(greedy_scores=np.array([7, 5], np.float32)), "greedy_scores")
    assert joined["greedy_scores"].tolist() == [7, 7, 5, 7, 5] and joined["sample_id"].tolist() == [0, 1, 2, 3, 4]
