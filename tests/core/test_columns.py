"""Lazy columns give what the same operations give on values, and load nothing before someone looks."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from hybridflow.core.batch import Batch, Ragged, objects
from hybridflow.core.columns import Held, Lazy, Loaded, Places, assemble, join, take
from hybridflow.core.errors import ContractError
from hybridflow.core.placement import Rows

FEW = settings(max_examples=30, deadline=None)


def values(ids: list[int]) -> Batch:
    """Columns of every kind; row i has i % 4 tokens."""
    tokens = Ragged.from_rows([np.arange(i % 4) + i for i in ids], np.int64)
    columns = {
        "sample_id": np.array(ids, np.int64),
        "group_id": np.array([f"g{i // 2}" for i in ids], "U8"),
        "tokens": tokens,
        "response_mask": tokens.like(tokens.values % 2 == 0),
        "prompt": Ragged.from_rows([[i] * (i % 3) for i in ids], np.int64),
        "response": objects(f"text {i}" for i in ids),
        "final_observations": np.arange(2 * len(ids), dtype=np.float32).reshape(-1, 2) + np.array(ids).reshape(-1, 1),
    }
    return Batch(columns, len(ids))


class Counted:
    """A source that counts how often it is asked; ``known``: whether it says at once how many rows it has."""

    def __init__(self, batch: Batch, known: bool = True) -> None:
        self.batch, self.known_rows = batch, len(batch) if known else None
        self.loads: list[tuple[str, int]] = []
        self.waits = 0

    @property
    def num_rows(self) -> int:
        self.waits += self.known_rows is None
        return len(self.batch)

    def lengths(self, name: str, rows: Rows | None, /) -> NDArray[np.int64]:
        return Held(self.batch[name]).lengths(name, rows)

    def load(self, name: str, rows: Rows | None, /) -> Loaded:
        loaded = Held(self.batch[name]).load(name, rows)
        self.loads.append((name, len(loaded)))
        return loaded

    def lazy(self) -> Batch:
        return Batch({name: Lazy(((self, name),)) for name in self.batch.columns}, self.known_rows)


def same(one: Batch, other: Batch) -> None:
    assert list(one.columns) == list(other.columns)
    assert len(one) == len(other)
    for name in one.columns:
        equal(one[name], other[name])


def equal(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, Ragged):
        assert one.lengths.tolist() == other.lengths.tolist()
        one, other = one.values, other.values
    assert one.tolist() == other.tolist()
    assert one.dtype.kind == other.dtype.kind


Step = tuple[str, Any]
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("rows"), st.lists(st.integers(0, 99), max_size=6)),
        st.tuples(st.just("mask"), st.integers(0, 2**12)),
        st.tuples(st.just("repeat"), st.integers(1, 3)),
        st.tuples(st.just("concat"), st.lists(st.integers(0, 30), max_size=4)),
        st.tuples(st.just("with"), st.integers(0, 9)),
        st.tuples(st.just("fill"), st.just(0)),
        st.tuples(st.just("select"), st.just(0)),
        st.tuples(st.just("join"), st.just(0)),
        st.tuples(st.just("first"), st.just(0)),
    ),
    max_size=6,
)


def apply(batch: Batch, step: Step, lazily: bool) -> Batch:
    """One operation, whose other operands are lazy too if ``lazily``."""
    what, argument = step
    if what == "rows":
        return batch.rows([i % len(batch) for i in argument] if len(batch) else [])
    if what == "mask":
        return batch.rows(np.array([bool(argument >> i & 1) for i in range(len(batch))], bool))
    if what == "repeat":
        return batch.repeat(argument)
    if what == "concat":
        other = values(argument).select([name for name in batch.columns if name not in ADDED])
        other = Counted(other).lazy() if lazily else other
        return Batch.concat([batch.select(other.columns), other, batch.select(other.columns)])
    if what == "with":
        return batch.with_columns(scores=np.full(len(batch), argument, np.float32))
    if what == "fill":
        return batch.fill(demonstrated=True, advantages=0.5)
    if what == "select":
        return batch.select([name for name in batch.columns if name != "prompt"])
    if what == "first":
        return batch.first_of_groups()
    groups = batch.first_of_groups().with_columns(costs=np.arange(len(batch.first_of_groups()), dtype=np.float32))
    return batch.join_groups(groups, "costs")


ADDED = {"scores", "demonstrated", "advantages", "costs"}


@FEW
@given(st.lists(st.integers(0, 30), max_size=6), STEPS, st.booleans())
def test_operations_on_lazy_columns_give_what_they_give_on_values(ids: list[int], steps: list[Step], known: bool) -> None:
    plain = values(ids)
    lazy = Counted(plain, known).lazy()
    for step in steps:
        plain, lazy = apply(plain, step, False), apply(lazy, step, True)
    same(lazy, plain)
    assert lazy.lengths.tolist() == plain.lengths.tolist()
    for name, column in lazy.columns.items():
        if isinstance(column, Lazy) and isinstance(plain.columns[name], Ragged):
            assert column.lengths.tolist() == plain.ragged(name).lengths.tolist()
    same(lazy.load(), plain)
    if {"tokens", "response_mask"} <= plain.columns.keys():
        same(lazy.steps(), plain.steps())


def test_nothing_is_loaded_before_someone_looks_and_then_only_that() -> None:
    source, more = Counted(values(list(range(8)))), Counted(values([20, 21]))
    batch = Batch.concat([source.lazy(), more.lazy()]).repeat(2).rows([1, 0, 19, 2])
    batch = batch.select(["sample_id", "tokens", "response"]).fill(demonstrated=False)
    assert len(batch) == 4
    assert batch.lengths.tolist() == [0, 0, 1, 1]
    assert source.loads == more.loads == []
    assert batch["sample_id"].tolist() == [0, 0, 21, 1]
    assert source.loads == [("sample_id", 3)]
    assert more.loads == [("sample_id", 1)]


def test_sources_that_hold_no_row_are_not_asked() -> None:
    source, more = Counted(values([1, 2])), Counted(values([3]))
    batch = Batch.concat([source.lazy(), more.lazy()]).rows([2, 2])
    assert batch.ragged("tokens").values.tolist() == [3, 4, 5] * 2
    assert source.loads == []


def test_columns_of_one_batch_share_their_places() -> None:
    batch = Counted(values(list(range(6)))).lazy()
    cut = batch.rows([5, 0]).repeat(3).rows([1, 2, 3])
    places = {id(column.places) for column in cut.columns.values() if isinstance(column, Lazy)}
    assert len(places) == 1
    assert len(cut.columns) == len(batch.columns)


def test_the_rows_of_a_batch_that_is_not_made_yet_are_not_asked_for() -> None:
    source = Counted(values([4, 5]), known=False)
    batch = source.lazy()
    batch = batch.with_columns(costs=Lazy(((source, "final_observations"),)))
    assert batch.known_rows is None
    assert batch.select(["tokens"]).known_rows is None
    assert source.waits == 0
    assert len(batch) == 2
    assert batch.rows([1]).known_rows == 1


def test_a_known_length_must_fit() -> None:
    with pytest.raises(ContractError, match="column 'scores' has 3 rows, expected 2"):
        Counted(values([4, 5])).lazy().with_columns(scores=np.zeros(3, np.float32))


def test_freezing_and_printing_load_nothing() -> None:
    source = Counted(values([4, 5]))
    assert "2 rows" in repr(source.lazy().freeze())
    assert source.loads == []


@FEW
@given(st.data())
def test_assemble_puts_rows_of_parts_in_their_order(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=4))
    there = [(part, row) for part, size in enumerate(sizes) for row in range(size)]
    wanted = data.draw(st.lists(st.sampled_from(there), max_size=9)) if there else []
    parts = [
        Ragged.from_rows([[10 * part + row] * row for row in range(size)], np.int64) for part, size in enumerate(sizes)
    ]
    places = Places(np.array([p for p, _ in wanted], np.int32), np.array([r for _, r in wanted], np.int64))
    asked: list[int] = []

    def load(part: int, rows: Rows) -> Loaded:
        asked.append(part)
        return take(parts[part], rows)

    out = assemble(places, load)
    assert isinstance(out, Ragged)
    assert [row.tolist() for row in out] == [[10 * part + row] * row for part, row in wanted]
    assert asked == (sorted({part for part, _ in wanted}) or [0]), "each part once; of no rows the kind is asked for"


def test_taking_all_rows_in_order_copies_nothing() -> None:
    column = np.arange(5)
    assert take(column, np.arange(5)) is column
    assert take(column, np.array([0, 1, 2, 4, 3])).tolist() == [0, 1, 2, 4, 3]
    ragged = Ragged.from_rows([[1], [2, 3]])
    assert take(ragged, np.arange(2)) is ragged


def test_join_keeps_the_kind() -> None:
    equal(join([objects(["a"]), objects([]), objects([None])]), objects(["a", None]))
    equal(join([Ragged.from_rows([[1]]), Ragged.from_rows([[], [2, 3]])]), Ragged.from_rows([[1], [], [2, 3]]))
    assert join([np.zeros((0, 3)), np.ones((2, 3))]).shape == (2, 3)  # type: ignore[union-attr]


@pytest.mark.parametrize("length", [3, 300])
def test_short_and_long_rows_come_from_several_parts_in_the_order_asked_for(length: int) -> None:
    lengths = np.array([length, 0, length + 1, 2 * length])
    parts = [Ragged(np.arange(lengths.sum()) + 10_000 * part, lengths) for part in range(3)]
    places = Places(np.array([2, 0, 2, 1, 0], np.int32), np.array([3, 2, 0, 1, 2]))
    found = assemble(places, lambda part, rows: take(parts[part], rows))
    assert isinstance(found, Ragged)
    wanted = [parts[part][row] for part, row in zip(places.part.tolist(), places.row.tolist(), strict=True)]
    assert found.lengths.tolist() == [len(row) for row in wanted]
    assert np.array_equal(found.values, np.concatenate(wanted))
