"""Transfer protocols: which rows reach which rank, and which outputs make the result."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from hybridflow.controller.protocols import (
    ALL_TO_ALL,
    DP,
    ONE_TO_ALL,
    THREE_D,
    THREE_D_ALL_MICRO_DP,
    THREE_D_PP_ONLY,
    VIEW,
    blocks,
    deal,
)
from hybridflow.core.batch import Batch
from hybridflow.core.errors import ContractError
from hybridflow.core.placement import Mesh, Rows, TransferProtocol
from hybridflow.core.roles import remote, verb_of

Weights = NDArray[np.int64]


def divisors(number: int) -> list[int]:
    return [part for part in range(1, number + 1) if number % part == 0]


# every mesh of up to 16 ranks, with every way to generate
MESHES = [
    Mesh(dp, tp, pp, generation_tp, generation_pp, cp)
    for dp, tp, pp, cp in itertools.product(range(1, 17), repeat=4)
    if dp * tp * pp * cp <= 16
    for generation_tp, generation_pp in itertools.product(divisors(tp), divisors(pp))
]


def some_weights() -> st.SearchStrategy[Weights]:
    """None, few and many rows; weights that are zero, small, equal or huge."""
    size = st.just(0) | st.integers(0, 3) | st.integers(0, 2**40)
    rows = st.lists(size, max_size=40) | st.builds(lambda weight, n: [weight] * n, size, st.integers(0, 40))
    return rows.map(lambda row: np.array(row, np.int64))


def call(protocol: TransferProtocol, weights: Weights, mesh: Mesh) -> tuple[Rows, list[int]]:
    """What a group returns that marks each of its rows: (row, mark) of the collected ranks, one behind the other."""
    parts = protocol.distribute(weights, mesh)
    assert len(parts) == mesh.size
    outputs = {rank: [rank * 1000 + int(row) for row in rows] for rank, rows in enumerate(parts)}
    collected = protocol.collect(mesh)
    rows = np.concatenate([parts[rank] for rank in collected])
    return rows, [mark for rank in collected for mark in outputs[rank]]


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.sampled_from(MESHES), some_weights())
@pytest.mark.parametrize("protocol", [ONE_TO_ALL, DP, THREE_D, THREE_D_ALL_MICRO_DP, VIEW], ids=lambda p: p.name)
def test_distribute_then_collect_is_the_identity(protocol: TransferProtocol, mesh: Mesh, weights: Weights) -> None:
    rows, marks = call(protocol, weights, mesh)
    assert rows.dtype == np.int64 and sorted(rows.tolist()) == list(range(len(weights)))
    assert [mark % 1000 for mark in marks] == rows.tolist()
    again = protocol.distribute(weights.copy(), mesh)  # a rank works it out by itself
    assert all(np.array_equal(a, b) for a, b in zip(protocol.distribute(weights, mesh), again, strict=True))


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.sampled_from(MESHES), some_weights())
def test_ranks_that_work_together_get_the_same_rows(mesh: Mesh, weights: Weights) -> None:
    for protocol, group in ((THREE_D, mesh.coordinates), (THREE_D_ALL_MICRO_DP, mesh.replica)):
        parts = protocol.distribute(weights, mesh)
        rows_of: dict[int, set[tuple[int, ...]]] = defaultdict(set)
        for rank, rows in enumerate(parts):
            rows_of[group(rank)[0]].add(tuple(rows.tolist()))
        assert all(len(found) == 1 for found in rows_of.values())
        assert len(protocol.collect(mesh)) == len(rows_of)
    for protocol in (ONE_TO_ALL, VIEW):
        parts = protocol.distribute(weights, mesh)
        assert all(rows.tolist() == list(range(len(weights))) for rows in parts)


def test_results_come_from_the_ranks_that_have_them() -> None:
    for mesh in MESHES:
        last = [(d, mesh.pp - 1, 0) for d in range(mesh.dp)]
        assert [mesh.coordinates(rank) for rank in THREE_D.collect(mesh)] == last
        assert [mesh.coordinates(rank) for rank in VIEW.collect(mesh)] == last[:1]
        collected = [*THREE_D.collect(mesh), *VIEW.collect(mesh), *THREE_D_PP_ONLY.collect(mesh)]
        assert {mesh.context(rank) for rank in collected} == {0}
        replicas = [mesh.replica(rank) for rank in THREE_D_ALL_MICRO_DP.collect(mesh)]
        assert sorted(replicas) == [(index, mesh.generation[1] - 1, 0) for index in range(mesh.num_replicas)]
        stages = [mesh.coordinates(rank) for rank in THREE_D_PP_ONLY.collect(mesh)]
        assert stages == [(0, stage, 0) for stage in range(mesh.pp)]
        assert list(ONE_TO_ALL.collect(mesh)) == [0]
        assert list(DP.collect(mesh)) == list(ALL_TO_ALL.collect(mesh)) == list(range(mesh.size))


@settings(max_examples=30, deadline=None, derandomize=True)
@given(some_weights(), st.integers(1, 16))
def test_dealt_parts_differ_by_less_than_the_heaviest_row(weights: Weights, num_parts: int) -> None:
    """Round by round the order turns, so differences of two parts alternate in sign and can't add up to more."""
    parts = deal(weights, num_parts)
    sums, counts = [int(weights[rows].sum()) for rows in parts], [len(rows) for rows in parts]
    lightest = min(weights, default=0) if len(weights) % num_parts == 0 else 0  # an incomplete round lacks rows
    assert max(sums) - min(sums) <= max(weights, default=0) - lightest
    assert max(counts) - min(counts) <= 1
    assert all((np.diff(rows) > 0).all() for rows in parts)


def test_the_bound_of_the_deal_is_tight() -> None:
    assert [rows.tolist() for rows in deal(np.array([7]), 2)] == [[0], []]  # 7 - 0
    assert [rows.tolist() for rows in deal(np.array([3, 7]), 2)] == [[1], [0]]  # 7 - 3
    assert [rows.tolist() for rows in deal(np.array([1, 2, 3, 4, 5, 6]), 2)] == [[1, 2, 5], [0, 3, 4]]  # 11 and 10


@settings(max_examples=30, deadline=None, derandomize=True)
@given(some_weights(), st.integers(1, 16))
def test_blocks_keep_neighbours_together(weights: Weights, num_parts: int) -> None:
    parts = blocks(weights, num_parts)
    assert len(parts) == num_parts
    assert np.concatenate(parts).tolist() == list(range(len(weights)))
    share, heaviest = weights.sum() / num_parts, max(weights, default=0)
    assert all(abs(weights[rows].sum() - share) <= heaviest for rows in parts)


@pytest.mark.parametrize("weight", [0, 1, 2**40])
def test_equal_rows_make_equal_blocks(weight: int) -> None:
    assert [rows.tolist() for rows in blocks(np.full(6, weight), 3)] == [[0, 1], [2, 3], [4, 5]]


@settings(max_examples=30, deadline=None, derandomize=True)
@given(some_weights(), st.lists(st.floats(0.1, 10), min_size=1, max_size=8))
def test_blocks_are_in_proportion_to_speeds(weights: Weights, speeds: list[float]) -> None:
    parts = blocks(weights, len(speeds), speeds)
    assert np.concatenate(parts).tolist() == list(range(len(weights)))
    if weights.any():
        shares = np.array(speeds) / sum(speeds) * weights.sum()
        assert all(
            abs(weights[rows].sum() - share) <= max(weights) + 1e-6 for rows, share in zip(parts, shares, strict=True)
        )


def test_a_fast_replica_gets_more_rows() -> None:
    parts = THREE_D_ALL_MICRO_DP.distribute(np.ones(8, np.int64), Mesh(dp=3, speeds=(1.0, 2.0, 1.0)))
    assert [rows.tolist() for rows in parts] == [[0, 1], [2, 3, 4, 5], [6, 7]]
    for speeds in ((1.0,), (1.0, 0.0, 1.0)):
        with pytest.raises(ContractError, match=r"mesh dp 3: speeds = .*; expected one above 0 for each of 3 replicas"):
            Mesh(dp=3, speeds=speeds)


def test_replicas_get_neighbouring_rows() -> None:
    """Training 1-4-2, generation 1-2-2-2: ranks [1, 3] and [2, 4] are the replicas of the first block."""
    parts = THREE_D_ALL_MICRO_DP.distribute(np.ones(8, np.int64), Mesh(dp=2, tp=4, generation_tp=2))
    assert [rows.tolist() for rows in parts] == [[0, 1], [2, 3], [0, 1], [2, 3], [4, 5], [6, 7], [4, 5], [6, 7]]


def test_the_data_path_from_actor_to_critic() -> None:
    """HybridFlow, section 4.1: actor (p, t, d) = (1, 2, 3), critic (2, 1, 2); who pulls which rows from whom."""
    actor, critic, weights = Mesh(dp=3, tp=2, pp=1), Mesh(dp=2, tp=1, pp=2), np.ones(6, np.int64)
    held = {rank: set(THREE_D.distribute(weights, actor)[rank].tolist()) for rank in THREE_D.collect(actor)}
    assert held == {0: {0, 5}, 2: {1, 4}, 4: {2, 3}}
    wanted = [set(rows.tolist()) for rows in THREE_D.distribute(weights, critic)]
    pulled = [{source: rows & wanted[rank] for source, rows in held.items()} for rank in range(critic.size)]
    first, second = {0: {0}, 2: {4}, 4: {3}}, {0: {5}, 2: {1}, 4: {2}}
    assert pulled == [first, first, second, second]  # both stages of a block need the same rows
    assert {row for part in (*first.values(), *second.values()) for row in part} == set(range(6))


def test_a_protocol_of_ones_own() -> None:
    """Rows in turn to the stages of the first block: pure functions are all that it takes."""

    def in_turn(weights: Weights, mesh: Mesh) -> Sequence[Rows]:
        return [np.arange(rank, len(weights), mesh.size) for rank in range(mesh.size)]

    own = TransferProtocol("IN_TURN", in_turn, lambda mesh: range(mesh.size))

    class Worker:
        @remote(own, reads=("tokens",), writes=("values",))
        def compute(self, batch: Batch) -> Batch:
            return batch

    verb = verb_of(Worker.compute)
    assert verb is not None and verb.protocol is own
    rows, marks = call(verb.protocol, np.ones(5, np.int64), Mesh(dp=3))
    assert rows.tolist() == [0, 3, 1, 4, 2] and marks == [0, 3, 1001, 1004, 2002]


@pytest.mark.parametrize("protocol", [THREE_D_PP_ONLY, ALL_TO_ALL], ids=lambda p: p.name)
def test_protocols_of_control_methods_move_no_rows(protocol: TransferProtocol) -> None:
    with pytest.raises(ContractError) as error:
        protocol.distribute(np.ones(4, np.int64), Mesh(pp=2))
    name = protocol.name
    assert str(error.value) == f"{name} moves no rows: declare the method with control({name}), not with remote"
