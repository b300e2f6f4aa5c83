"""Outputs of several workers, put together by what they say of their rows."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.controller.manifest import Manifest, Output, describe, weights
from hybridflow.core.batch import Batch, Ragged, objects
from hybridflow.core.columns import Lazy, Loaded, take
from hybridflow.core.errors import ContractError
from hybridflow.core.placement import Rows

FEW = settings(max_examples=30, deadline=None)


def values(ids: np.ndarray) -> Batch:
    """Row i has i % 4 tokens and i % 3 of a prompt."""
    tokens = Ragged.from_rows([[i] * (i % 4) for i in ids], np.int64)
    prompt = Ragged.from_rows([[i] * (i % 3) for i in ids], np.int64)
    text = objects(f"text {i}" for i in ids)
    return Batch({"sample_id": ids, "tokens": tokens, "prompt": prompt, "response": text}, len(ids))


class Pieces:
    """The outputs of ranks; remembers what is fetched."""

    def __init__(self, pieces: list[Batch], rows: list[Rows] | None, call_rows: int | None = None) -> None:
        self.pieces, self.fetched = pieces, list[tuple[int, str, int]]()
        call_rows = sum(map(len, pieces)) if call_rows is None else call_rows
        self.manifests = [
            describe(piece, None if rows is None else rows[i], call_rows, "node", ("pool", i))
            for i, piece in enumerate(pieces)
        ]
        self.output = Output(self.manifests, self.fetch, "role.verb")

    def fetch(self, piece: int, name: str, rows: Rows) -> Loaded:
        self.fetched.append((piece, name, len(rows)))
        return take(self.pieces[piece][name], rows)

    def batch(self) -> Batch:
        return Batch({name: Lazy(((self.output, name),)) for name in self.pieces[0].columns})


def check(lazy: Batch, expected: Batch) -> None:
    assert len(lazy) == len(expected)
    for name in expected.columns:
        one, other = lazy[name], expected[name]
        if isinstance(other, Ragged):
            assert one.lengths.tolist() == other.lengths.tolist()
            one, other = one.values, other.values
        assert one.tolist() == other.tolist()


SPLITS = st.lists(st.integers(0, 3), max_size=9)  # the rank of every row


@FEW
@given(SPLITS, st.lists(st.integers(0, 99), max_size=6))
def test_any_split_over_ranks_is_put_in_order(ranks: list[int], wanted: list[int]) -> None:
    rows = [np.flatnonzero(np.array(ranks, int) == rank) for rank in range(4)]
    whole = values(np.arange(len(ranks)) + 5)
    pieces = Pieces([whole.rows(of_rank) for of_rank in rows], rows)
    check(pieces.batch(), whole)
    index = [i % len(ranks) for i in wanted] if ranks else []
    check(pieces.batch().rows(index), whole.rows(index))


@FEW
@given(SPLITS, st.randoms(use_true_random=False))
def test_rows_of_the_calls_own_are_ordered_by_their_ids(ranks: list[int], random: object) -> None:
    ids = np.arange(len(ranks)) * 3
    pieces = Pieces([values(ids[np.array(ranks, int) == rank][::-1]) for rank in range(4)], None)
    check(pieces.batch(), values(ids))
    assert pieces.output.known_rows == len(ranks)


def test_rows_and_lengths_are_known_without_values() -> None:
    rows = [np.array([0, 3]), np.array([], int), np.array([1, 2])]
    whole = values(np.arange(4) + 5)
    pieces = Pieces([whole.rows(of_rank) for of_rank in rows], rows)
    assert pieces.output.num_rows == 4
    assert pieces.output.lengths("tokens", None).tolist() == [1, 2, 3, 0]
    assert pieces.output.lengths("prompt", np.array([3, 0])).tolist() == [2, 2]
    assert pieces.output.lengths("sample_id", np.array([3, 0])).tolist() == [1, 1]
    assert pieces.batch().rows([3, 0]).lengths.tolist() == [0, 1]
    assert pieces.fetched == []


def test_only_the_wanted_rows_of_the_wanted_column_are_fetched() -> None:
    rows = [np.array([0, 3, 4]), np.array([1, 2])]
    whole = values(np.arange(5))
    pieces = Pieces([whole.rows(of_rank) for of_rank in rows], rows)
    assert pieces.batch().rows([4, 0])["response"].tolist() == ["text 4", "text 0"]
    assert pieces.fetched == [(0, "response", 2)]


@pytest.mark.parametrize("rows", [[[0, 1], [1, 2]], [[0, 1], [3, 4]], [[1, 2], [3, 4]], [[0, 0], [1, 2]], [[0, 1], [2, 3]]])
def test_a_protocol_that_loses_or_doubles_rows_is_refused(rows: list[list[int]]) -> None:
    dealt = [np.array(of_rank) for of_rank in rows]
    pieces = Pieces([values(of_rank) for of_rank in dealt], dealt, call_rows=5)
    told = r"^the protocol of role\.verb doesn't give every row to exactly one collected rank$"
    with pytest.raises(ContractError, match=told):
        pieces.output.load("tokens", None)
    with pytest.raises(ContractError, match=told):
        pieces.output.lengths("tokens", None)


def test_a_call_that_makes_rows_must_write_their_ids() -> None:
    with pytest.raises(ContractError, match="no column 'sample_id'"):
        describe(values(np.arange(2)).select(["tokens"]), None, 2, "node", ("pool", 0))


def test_a_manifest_holds_no_values() -> None:
    manifest = describe(values(np.arange(6)), np.arange(6), 6, "node", ("pool", 1))
    assert isinstance(manifest, Manifest)
    assert manifest.key is None
    assert sorted(manifest.lengths) == ["prompt", "time"]
    assert manifest.lengths["time"].tolist() == [0, 1, 2, 3, 0, 1]


def test_rows_weigh_their_tokens_or_their_prompts_or_one_each() -> None:
    whole = values(np.arange(4))
    assert weights(whole).tolist() == [0, 1, 2, 3]
    assert weights(whole.select(["sample_id", "prompt"])).tolist() == [0, 1, 2, 0]
    assert weights(whole.select(["sample_id", "response"])).tolist() == [1, 1, 1, 1]
    pieces = Pieces([whole], [np.arange(4)])
    assert weights(pieces.batch().rows([3, 1])).tolist() == [3, 1]
    assert pieces.fetched == []


def test_prompts_weigh_what_their_responses_are_expected_to_take() -> None:
    batch = Batch({"prompt": Ragged.from_rows([[1, 2], [3]], np.int64), "expected_length": np.array([5, 0])})
    assert weights(batch).tolist() == [7, 1] and weights(batch.select(["prompt"])).tolist() == [2, 1]
    drawn = batch.with_columns(tokens=Ragged.from_rows([[1, 2, 9], [3, 4]], np.int64))
    assert weights(drawn).tolist() == [3, 2], "what is known is not guessed"
