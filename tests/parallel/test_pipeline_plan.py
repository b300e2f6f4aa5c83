"""Plans of a pipeline: valid for any size, as much memory and idle time as the papers say."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.core.errors import ContractError
from hybridflow.parallel.pipeline_plan import (
    Action,
    Backward,
    Forward,
    Message,
    Plan,
    bubble,
    forward_only,
    gpipe,
    interleaved,
    one_f_one_b,
)

PLANS: dict[str, Callable[[int, int, int], Plan]] = {
    "gpipe": lambda ranks, chunks, microbatches: gpipe(ranks, microbatches),
    "1f1b": lambda ranks, chunks, microbatches: one_f_one_b(ranks, microbatches),
    "interleaved": interleaved,
    "forward_only": forward_only,
}
any_plan = st.builds(
    lambda name, *sizes: PLANS[name](*sizes),
    st.sampled_from(sorted(PLANS)),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(0, 9),
)


def one(stage: int, microbatch: int) -> float:
    return 1.0


def two(stage: int, microbatch: int) -> float:
    return 2.0


def run_blocking(plan: Plan, choose: Callable[[int], int]) -> list[tuple[str, int, int]]:
    """(kind, stage, microbatch) in the order in which ranks run them, when each waits for its input and ``choose`` picks
    who of those that can go on does so."""
    last, arrived, history = plan.stages - 1, set(), []
    left = [list(actions) for actions in plan.actions]

    def key(rank: int, action: Action) -> tuple[str, int, int]:
        return type(action).__name__, action.chunk * plan.ranks + rank, action.microbatch

    def waits(rank: int) -> bool:
        kind, stage, _ = awaited = key(rank, left[rank][0])
        return stage != (0 if kind == "Forward" else last) and awaited not in arrived

    while any(left):
        able = [rank for rank, actions in enumerate(left) if actions and not waits(rank)]
        assert able, f"ranks wait for each other:\n{plan}"
        rank = able[choose(len(able))]
        kind, stage, microbatch = done = key(rank, left[rank].pop(0))
        history.append(done)
        arrived.add((kind, stage + (1 if kind == "Forward" else -1), microbatch))
    return history


@settings(max_examples=30, deadline=None)
@given(any_plan, st.randoms(use_true_random=False))
def test_any_plan_runs_everything_once_whoever_is_fastest(plan: Plan, random) -> None:
    history = run_blocking(plan, random.randrange)
    microbatches = {microbatch for _, _, microbatch in history}
    kinds = ("Forward", "Backward") if plan.trains else ("Forward",)
    assert len(history) == len(set(history)) == len(kinds) * plan.stages * len(microbatches)
    assert microbatches == set(range(len(microbatches)))
    place = {done: index for index, done in enumerate(history)}
    for kind, stage, microbatch in history:
        if kind == "Backward":
            assert place["Forward", stage, microbatch] < place[kind, stage, microbatch]


@settings(max_examples=30, deadline=None)
@given(any_plan)
def test_messages_come_in_an_order_in_which_every_rank_can_post_them(plan: Plan) -> None:
    """Before an action that reads a message, a rank has made all that it sends before it: so no rank waits for ever."""
    place = {(rank, action): i for rank, actions in enumerate(plan.actions) for i, action in enumerate(actions)}
    made = {plan.message(rank, action): (rank, action) for rank, action in place}
    assert len(set(plan.messages)) == len(plan.messages) == (plan.stages - 1) * len(place) // plan.stages
    for index, message in enumerate(plan.messages):
        reads = place[message.target, message.action]
        for sent in plan.messages[:index]:
            if sent.source == message.target:
                assert place[made[sent]] < reads


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 6), st.integers(1, 12), st.sampled_from(["gpipe", "1f1b"]))
def test_the_bubble_is_that_of_the_papers(ranks: int, microbatches: int, name: str) -> None:
    plan = PLANS[name](ranks, 1, microbatches)
    assert bubble(plan, one, two) == pytest.approx((ranks - 1) / (microbatches + ranks - 1))


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 5), st.integers(2, 4), st.integers(1, 4))
def test_chunks_divide_the_time_that_is_lost(ranks: int, chunks: int, groups: int) -> None:
    def lost(plan: Plan) -> float:
        share = bubble(plan, one, two)
        return share / (1 - share)

    whole, parts = one_f_one_b(ranks, groups * ranks), interleaved(ranks, chunks, groups * ranks)
    assert lost(parts) == pytest.approx(lost(whole) / chunks)


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 5), st.integers(2, 3), st.integers(1, 12))
def test_short_groups_lose_no_more_than_without_chunks(ranks: int, chunks: int, microbatches: int) -> None:
    assert bubble(interleaved(ranks, chunks, microbatches), one, two) <= bubble(one_f_one_b(ranks, microbatches), one, two)


def test_groups_that_are_not_full_are_alike() -> None:
    order = [(action.chunk, action.microbatch) for action in forward_only(3, 2, 7).actions[0]]
    assert [m for chunk, m in order] == [0, 1, 0, 1, 2, 3, 2, 3, 4, 5, 6, 4, 5, 6]
    assert [chunk for chunk, m in order] == [0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 0, 1, 1, 1]
    assert bubble(interleaved(3, 2, 7), one, two) < 0.17  # 0.19 with groups of 3, 3 and 1


def test_the_bubble_counts_uneven_stages_and_microbatches() -> None:
    # Rank 0: F0 0-1, F1 1-3, waits to 5, B0 5-6, waits to 9, B1 9-11. Rank 1: F0 1-3, B0 3-5, F1 5-7, B1 7-9.
    tokens = [1, 2]
    uneven = bubble(
        one_f_one_b(2, 2), lambda stage, m: 2 if stage else tokens[m], lambda stage, m: 2 if stage else tokens[m]
    )
    assert uneven == pytest.approx(1 - (6 + 8) / (2 * 11))
    assert bubble(gpipe(3, 0), one, one) == 0


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 6), st.integers(0, 12))
def test_memory_in_flight(ranks: int, microbatches: int) -> None:
    for rank in range(ranks):
        assert gpipe(ranks, microbatches).in_flight(rank) == microbatches
        assert one_f_one_b(ranks, microbatches).in_flight(rank) == min(microbatches, ranks - rank)
        assert forward_only(ranks, 2, microbatches).in_flight(rank) == 0
        warm_up = 2 * (ranks - rank - 1) + ranks
        assert interleaved(ranks, 2, microbatches).in_flight(rank) <= min(2 * microbatches, warm_up + 1)


def test_a_plan_shows_its_order() -> None:
    assert str(one_f_one_b(2, 3)) == "rank 0: F0 F1 B0 F2 B1 B2\nrank 1: F0 B0 F1 B1 F2 B2"
    assert str(interleaved(2, 2, 2)) == (
        "rank 0: F0.0 F0.1 F1.0 F1.1 B1.0 B1.1 B0.0 B0.1\nrank 1: F0.0 F0.1 F1.0 B1.0 F1.1 B1.1 B0.0 B0.1"
    )
    assert gpipe(2, 1).messages == (Message(0, 1, Forward(0, 0)), Message(1, 0, Backward(0, 0)))
    assert not forward_only(2, 1, 1).trains


def test_a_plan_that_waits_for_ever_is_refused() -> None:
    crossed = Plan(1, ((Forward(0, 0), Backward(0, 0), Forward(0, 1)), (Forward(0, 1), Forward(0, 0), Backward(0, 0))))
    with pytest.raises(ContractError, match="for ever: rank 0 at B0, rank 1 at F1"):
        crossed.order  # noqa: B018
    with pytest.raises(ContractError, match="rank 0 at B0"):
        Plan(1, ((Backward(0, 0), Forward(0, 0)),)).order  # noqa: B018
