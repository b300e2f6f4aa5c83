"""Graphs of tasks: what they refuse, stages, and how they change with models, lengths and rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.core.errors import ConfigError
from hybridflow.planner.graph import Edge, ModelRole, Task, TaskGraph
from hybridflow.planner.sizes import MODELS

LEARNER = ModelRole("learner", MODELS["smollm2-135m"], gradient_bytes=4.0, optimizer_bytes=12.0, frozen=15)
SAMPLER = ModelRole("sampler", MODELS["smollm2-135m"], weights_of="learner")
DRAW = Task("draw", "sampler", "generate", 64, 10.0, 6.0, group=4)
JUDGE = Task("judge", "judge", "reward", 64, 0.0, 0.0, seconds=0.5)
LEARN = Task("learn", "learner", "train", 80, 10.0, 6.0, minibatches=2)
EDGES = (Edge("draw", "judge"), Edge("draw", "learn", 9280.0, 64.0), Edge("judge", "learn", 256.0, 256.0))
GRAPH = TaskGraph((LEARNER, SAMPLER), (DRAW, JUDGE, LEARN), EDGES)


def test_a_task_is_a_stage_below_what_it_reads() -> None:
    assert GRAPH.stages == {"draw": 0, "judge": 1, "learn": 2}
    assert (GRAPH.tokens, LEARNER.trained, SAMPLER.trained) == (64 * 16, True, False)
    assert GRAPH.role_of(DRAW) is SAMPLER and GRAPH.role_of(JUDGE) is None


def test_models_change_by_role_and_the_same_share_stays_frozen() -> None:
    other = MODELS["llama-7b"]
    everywhere, one = GRAPH.with_model(other), GRAPH.with_model(other, ["sampler"])
    assert [role.size.name for role in everywhere.roles] == ["llama-7b"] * 2
    assert [role.size.name for role in one.roles] == ["smollm2-135m", "llama-7b"]
    assert everywhere.roles[0].frozen == 16 and everywhere.tasks == GRAPH.tasks and everywhere.edges == GRAPH.edges
    assert everywhere.roles[0].parameters == other.parameters()
    assert everywhere.roles[0].trained_parameters == other.trained_parameters("policy", 16, True)
    assert everywhere.roles[1].trained_parameters == 0


def test_edges_carry_more_with_longer_rows() -> None:
    longer = GRAPH.with_lengths(100.0, 60.0, deviation=5.0, longest=90.0)
    assert [task.tokens for task in longer.tasks] == [64 * 160, 0, 80 * 160]
    assert (longer.tasks[0].deviation, longer.tasks[0].longest, longer.tasks[1]) == (5.0, 90.0, JUDGE)
    assert [edge.bytes for edge in longer.edges] == [0.0, 64 + 10 * (9280 - 64), 256.0]


def test_more_rows_are_more_of_everything() -> None:
    more = GRAPH.with_rows(256)
    assert [task.rows for task in more.tasks] == [256, 256, 320]
    assert [edge.bytes for edge in more.edges] == [4 * edge.bytes for edge in EDGES]
    assert [edge.row_bytes for edge in more.edges] == [4 * edge.row_bytes for edge in EDGES]
    trained = replace(GRAPH, tasks=(JUDGE, LEARN), edges=(EDGES[2],))
    assert [task.rows for task in trained.with_rows(160).tasks] == [128, 160]


@settings(max_examples=30, deadline=None)
@given(prompt=st.floats(0, 1e6), response=st.floats(1, 1e6), rows=st.integers(1, 1000))
def test_the_order_of_changes_does_not_matter(prompt: float, response: float, rows: int) -> None:
    one = GRAPH.with_lengths(prompt, response).with_rows(4 * rows)
    other = GRAPH.with_rows(4 * rows).with_lengths(prompt, response)
    assert one.tasks == other.tasks and one.roles == other.roles
    assert [edge.bytes for edge in one.edges] == pytest.approx([edge.bytes for edge in other.edges])


def told(make: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        make()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"response": 0.0}, "draw draws responses of 0 tokens; expected more"),
        ({"prompt": -1.0}, "draw has prompt = -1; expected 0 or more"),
        ({"response": float("nan")}, "draw has response = nan; expected 0 or more"),
        ({"deviation": -2.0}, "draw has deviation = -2; expected 0 or more"),
        ({"longest": 5.0}, "draw has responses of 6 tokens in the mean, but of 5 at most"),
        ({"rows": 0}, "draw has rows = 0; expected 1 or more"),
    ],
)
def test_impossible_tasks_are_told(change: dict[str, Any], said: str) -> None:
    assert told(lambda: replace(GRAPH, tasks=(replace(DRAW, **change), JUDGE, LEARN))).endswith(f"task graph: {said}")


def test_impossible_graphs_and_changes_are_told() -> None:
    circle = (*EDGES, Edge("learn", "draw"))
    assert "is a circle; a task can't wait for itself" in told(lambda: replace(GRAPH, edges=circle))
    assert "names 'lern', which is no task" in told(lambda: replace(GRAPH, edges=(Edge("draw", "lern"),)))
    assert "criticc: no role with a model; those are learner, sampler" in told(
        lambda: GRAPH.with_model(MODELS["llama-7b"], ["criticc"])
    )
    assert "10 rows: expected a number above 0, and a multiple of 4" in told(lambda: GRAPH.with_rows(10))
    with pytest.raises(ConfigError, match="responses of 0 tokens"):
        GRAPH.with_lengths(10, 0)
