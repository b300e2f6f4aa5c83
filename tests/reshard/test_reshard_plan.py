"""Plans: every generation slice is filled once and from owners, and costs what the paper says."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.core.placement import Mesh
from hybridflow.models.spec import DecoderSpec
from hybridflow.reshard.layout import Place, Runs, slices
from hybridflow.reshard.plan import STRATEGIES, Plan, Size, Strategy, make_plan, model_size, table2

EVEN = DecoderSpec("llama", 32, 16, 32, 16, 16, 16, 2, 64, tied=False)
FEW_KV = DecoderSpec("qwen2", 37, 6, 19, 16, 16, 4, 2, 64, qkv_bias=True, output_bias=True, mlp_bias=True)
ODD = DecoderSpec("qwen3", 35, 6, 21, 17, 18, 6, 2, 64, tied=False, qk_norm=True)

ALL = [
    Mesh(dp, tp, pp, generation_tp, generation_pp)
    for dp, tp, pp in itertools.product(range(1, 17), repeat=3)
    if dp * tp * pp <= 16
    for generation_tp, generation_pp in itertools.product(range(1, 17), repeat=2)
    if tp * pp % (generation_tp * generation_pp) == 0
]
"""All (p, t, d) and (p_g, t_g) of up to 16 ranks."""
NESTED = [mesh for mesh in ALL if mesh.nested]


def numbers(runs: Runs) -> np.ndarray:
    return np.concatenate([np.arange(run.start, run.stop) for run in runs] or [np.arange(0)])


@lru_cache(maxsize=64)
def arrays(spec: DecoderSpec, place: Place) -> dict[str, np.ndarray]:
    return {name: numbers(piece.runs) for name, piece in slices(spec, place).items()}


def check(plan: Plan) -> None:
    """Moves carry from owners what belongs to a place, once to every place, and cost what the accounts say."""
    own = {rank: arrays(plan.spec, place) for rank, place in plan.training.items()}
    want = {rank: arrays(plan.spec, place) for rank, place in plan.landing.items()}
    landed = {rank: {name: np.full_like(x, -1) for name, x in slices.items()} for rank, slices in want.items()}
    sent, received = Counter[int](), Counter[int]()
    for source, target, name, there, here, count in plan.moves():
        taken, place = own[source][name][there : there + count], landed[target][name][here : here + count]
        assert len(taken) == len(place) == count > 0 and (place == -1).all()
        place[:] = taken
        if source != target:
            sent[source] += count
            received[target] += count
    for rank, expected in want.items():
        assert all(np.array_equal(landed[rank][name], x) for name, x in expected.items())
    for account in plan.accounts:
        itemsize = plan.itemsizes[1]
        assert (account.sent.total, account.received.total) == (
            sent[account.rank] * itemsize,
            received[account.rank] * itemsize,
        )


def check_places(plan: Plan) -> None:
    """Training slices that are said to be parts of generation slices are, and no others are."""
    for account in plan.accounts:
        own, block = (arrays(plan.spec, places[account.rank]) for places in (plan.training, plan.generation))
        shared = plan.shared(account.rank)
        for name, start in shared.items():
            assert np.array_equal(block[name][start : start + len(own[name])], own[name])
        size = sum(len(own[name]) for name in shared) * plan.itemsizes[0]
        assert account.in_place.total == size
        assert account.redundant.total == account.training.total - size
        assert account.peak.total == account.generation.total + account.redundant.total


def fill(mesh: Mesh) -> None:
    plan = make_plan(replace(FEW_KV, num_layers=max(mesh.pp, mesh.generation[1])), mesh)
    check(plan)
    check_places(plan)


@given(st.sampled_from(ALL))
@settings(max_examples=30, deadline=None)
def test_every_slice_is_filled_once_from_owners(mesh: Mesh) -> None:
    fill(mesh)


@pytest.mark.slow
def test_every_slice_is_filled_once_from_owners_on_all_meshes() -> None:
    for mesh in ALL:
        fill(mesh)


@given(st.sampled_from(ALL), st.sampled_from((EVEN, FEW_KV, ODD)), st.sampled_from(STRATEGIES), st.sampled_from((2, 4)))
@settings(max_examples=30, deadline=None)
def test_every_strategy_fills_what_it_lands_once(mesh: Mesh, spec: DecoderSpec, strategy: Strategy, itemsize: int) -> None:
    check(make_plan(spec, mesh, strategy, itemsizes=(4, itemsize)))


@given(st.sampled_from(ALL), st.sampled_from((EVEN, FEW_KV, ODD)))
@settings(max_examples=30, deadline=None)
def test_nothing_is_held_twice_where_layouts_are_nested(mesh: Mesh, spec: DecoderSpec) -> None:
    plan = make_plan(spec, mesh)
    check_places(plan)
    if mesh.nested:
        assert all(account.redundant == Size() and account.in_place == account.training for account in plan.accounts)


def formula(plan: Plan) -> tuple[Fraction, ...]:
    size = model_size(plan.spec, plan.mesh.tp, plan.mesh.pp).cut * plan.itemsizes[1]
    return tuple(part * size for part in table2(plan.strategy, plan.mesh))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_rank_s_bytes_are_table_2_without_a_pipeline(strategy: Strategy) -> None:
    for mesh in (mesh for mesh in NESTED if mesh.pp == 1 and 16 % mesh.tp == 0 and 16 % mesh.dp == 0):
        plan = make_plan(EVEN, mesh, strategy)
        received, peak, redundant = formula(plan)
        for account in (account for account in plan.accounts if account.rank in plan.generation):
            assert account.received.cut == received
            if strategy == "broadcast":
                assert peak < account.peak.cut <= peak + plan._largest.cut
            else:
                assert account.peak.cut == peak
            assert account.redundant.cut == redundant or (strategy == "vanilla" and account.redundant.cut == 0)


@given(st.sampled_from([mesh for mesh in NESTED if mesh.pp > 1]), st.sampled_from((EVEN, ODD)), st.sampled_from(STRATEGIES))
@settings(max_examples=30, deadline=None)
def test_bytes_are_table_2_on_average_over_stages(mesh: Mesh, spec: DecoderSpec, strategy: Strategy) -> None:
    """Of weights that are cut; heads are as many as nothing is replicated for."""
    plan = make_plan(replace(spec, num_kv_heads=spec.num_heads), mesh, strategy)
    received, peak, redundant = formula(plan)
    accounts = [account for account in plan.accounts if account.rank in plan.generation]
    assert sum(account.received.cut for account in accounts) == received * len(accounts)
    if strategy in ("hybridflow", "publish"):
        assert sum(account.peak.cut for account in accounts) == peak * len(accounts)
    if strategy != "vanilla":
        assert sum(account.redundant.cut for account in accounts) == redundant * len(accounts)


def test_the_worked_example_s_second_copies() -> None:
    """Ranks 2, 3, 6 and 7 of the paper keep a second copy in the vanilla grouping, none in HybridFlow's."""
    mesh = Mesh(dp=2, tp=4, pp=1, generation_tp=2)
    size = model_size(EVEN, 4).cut * 2
    vanilla, own = make_plan(EVEN, mesh, "vanilla").accounts, make_plan(EVEN, mesh).accounts
    assert [account.redundant.cut for account in vanilla] == [0, size // 4, size // 4, 0] * 2
    assert [account.redundant.cut for account in own] == [0] * 8
    assert [account.received.cut for account in own] == [size // 4] * 8
    assert {link for link in make_plan(EVEN, mesh).links if link[0] != link[1]} == {
        pair for rank in range(0, 8, 2) for pair in ((rank, rank + 1), (rank + 1, rank))
    }


def test_norms_and_copied_heads_are_counted_apart() -> None:
    mesh = Mesh(dp=1, tp=8, pp=2, generation_tp=2, generation_pp=1)
    spec = replace(FEW_KV, tied=False)
    size, width = model_size(spec, 8, 2), spec.hidden_size
    kv = 2 * spec.num_kv_heads * spec.head_dim * (width + 1)
    assert size.replicated == spec.num_layers * (kv + 4 * width) + width
    assert size.total == sum(
        prod(s.shard.shape) for s in slices(spec, make_plan(spec, mesh, "vanilla").landing[0]).values()
    )
    for account in make_plan(spec, mesh).accounts:
        assert account.received.replicated > 0 and account.redundant.total == 0


def test_a_tied_head_s_copy_is_counted_apart() -> None:
    assert (
        model_size(FEW_KV, 2, 2).replicated - model_size(FEW_KV, 2, 1).replicated == FEW_KV.vocab_size * FEW_KV.hidden_size
    )


def test_another_type_for_generation_shares_nothing() -> None:
    mesh = Mesh(dp=1, tp=4, pp=1, generation_tp=2)
    plan = make_plan(EVEN, mesh, itemsizes=(4, 2))
    size = model_size(EVEN, 4)
    for account in plan.accounts:
        assert account.redundant == account.training and account.in_place == Size()
        assert account.received.cut == size.cut * 2 // 4
        assert account.peak.cut == size.cut * 2 // 2 + size.cut * 4 // 4


def test_general_layouts_report_what_is_held_twice() -> None:
    """p_g t_g need only divide p t: pipelines become tensor parallelism here."""
    plan = make_plan(EVEN, Mesh(dp=1, tp=2, pp=2, generation_tp=4, generation_pp=1))
    check(plan)
    size = model_size(EVEN, 2, 2).cut * 2
    assert sum(account.redundant.cut for account in plan.accounts) > 0
    assert sum(account.generation.cut for account in plan.accounts) == size


def test_every_rank_knows_its_own_moves() -> None:
    plan = make_plan(FEW_KV, Mesh(dp=2, tp=4, pp=2, generation_tp=2, generation_pp=1))
    moves = [*plan.moves()]
    for rank in plan.ranks:
        assert [*plan.moves(rank)] == [move for move in moves if rank in (move.source, move.target)]


def test_70b_on_128_ranks_is_planned_in_a_second() -> None:
    spec = DecoderSpec("llama", 32000, 8192, 28672, 80, 64, 8, 128, 4096, tied=False)
    start = time.process_time()
    plan = make_plan(spec, Mesh(dp=2, tp=8, pp=8, generation_tp=2, generation_pp=1))
    received = [account.received.total for account in plan.accounts]
    moves = [*plan.moves(5)]
    assert time.process_time() - start < 1
    assert moves and len(received) == 128
    expected = table2("hybridflow", plan.mesh)[0] * model_size(spec, 8, 8).cut * 2
    assert sum(account.received.cut for account in plan.accounts) == expected * 128


def test_ranks_that_share_sequences_are_copies_of_the_model() -> None:
    mesh = Mesh(dp=2, tp=4, cp=2, generation_tp=2)
    plan = make_plan(EVEN, mesh)
    check(plan)
    check_places(plan)
    assert plan.accounts == make_plan(EVEN, Mesh(dp=4, tp=4, generation_tp=2)).accounts
