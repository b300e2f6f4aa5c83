"""Other systems' mappings: what each fixes, on any graph, and that the planner's own is faster."""

from __future__ import annotations

from dataclasses import replace

import pytest
from costs import A100, DRAW, FROZEN, LEARN, LEARNER, SAMPLER, SCORE

from hybridflow.planner.baselines import baselines
from hybridflow.planner.cluster import Cluster
from hybridflow.planner.cost import CostModel, Efficiency
from hybridflow.planner.graph import Edge, ModelRole, TaskGraph
from hybridflow.planner.mapping import DeviceMapping, Practice
from hybridflow.planner.search import pool_seconds, search, step_seconds
from hybridflow.planner.sizes import MODELS

TUTOR = replace(LEARNER, name="tutor", head="value")
GRAPH = TaskGraph(
    (LEARNER, SAMPLER, FROZEN, TUTOR),
    (DRAW, SCORE, LEARN, replace(LEARN, name="teach", role="tutor")),
    (Edge("draw", "score", 1e6), Edge("score", "learn", 1e6), Edge("score", "teach", 1e6)),
)
CLUSTER = Cluster(((2, A100),))


def mapped(graph: TaskGraph = GRAPH, cluster: Cluster = CLUSTER) -> dict[str, DeviceMapping]:
    found = baselines(graph, cluster, CostModel(graph, Efficiency()))
    return {name: one for name, one in found.items() if isinstance(one, DeviceMapping)}


def seconds(cost: CostModel, mapping: DeviceMapping) -> float:
    return step_seconds(pool_seconds(cost.graph, mapping, cost.estimates(mapping)), mapping.schedule)


def test_deepspeed_chat_shares_everything_out_over_all_devices() -> None:
    mapping = mapped()["DeepSpeed-Chat"]
    [pool] = mapping.pools
    assert pool.devices == 16 and {*pool.roles} == {"learner", "sampler", "frozen", "tutor"}
    for name in ("learner", "frozen", "tutor"):
        assert mapping.strategies[name][:4] == (1, 1, 16, "fsdp") and mapping.strategies[name].rows <= 4
    assert mapping.strategies["sampler"].pp == 1
    assert mapping.practice == Practice("gather_all", batch=4, rescores=True)


def test_openrlhf_gives_each_role_devices_of_its_own() -> None:
    mapping = mapped()["OpenRLHF"]
    assert [pool.roles for pool in mapping.pools] == [("learner",), ("sampler",), ("frozen",), ("tutor",)]
    assert sum(pool.devices for pool in mapping.pools) <= 16
    assert all(mapping.strategies[name][:2] == (1, 1) for name in ("learner", "frozen", "tutor"))
    assert mapping.practice == Practice("broadcast")


def test_nemo_aligner_has_two_halves_and_generates_as_it_trains() -> None:
    mapping = mapped()["NeMo-Aligner"]
    assert [({*pool.roles}, pool.devices) for pool in mapping.pools] == [
        ({"learner", "sampler", "frozen"}, 8),
        ({"tutor"}, 8),
    ]
    assert mapping.strategies["sampler"][:3] == mapping.strategies["learner"][:3]
    assert mapping.practice == Practice(None, kv_cache=False)


def test_short_rows_go_in_small_batches_too() -> None:
    short = GRAPH.with_lengths(8, 8)
    assert all(mapped(short)["DeepSpeed-Chat"].strategies[name].rows <= 4 for name in ("learner", "frozen", "tutor"))


def test_without_other_heads_nemo_aligner_has_one_pool() -> None:
    graph = TaskGraph((LEARNER, SAMPLER, FROZEN), (DRAW, SCORE, LEARN), GRAPH.edges[:2])
    [pool] = mapped(graph)["NeMo-Aligner"].pools
    assert pool.devices == 16


def test_the_planner_s_own_mapping_is_faster_than_any() -> None:
    cost, found = CostModel(GRAPH, Efficiency()), mapped()
    assert [*found] == ["DeepSpeed-Chat", "OpenRLHF", "NeMo-Aligner"]
    own = search(GRAPH, CLUSTER, cost).best.seconds
    assert all(own < seconds(cost, one) for one in found.values())
    # each token anew costs far more than all that the others do
    assert seconds(cost, found["NeMo-Aligner"]) > 10 * own


def test_batches_of_a_device_take_more_steps_and_transitions() -> None:
    cost, mapping = CostModel(GRAPH, Efficiency()), mapped()["DeepSpeed-Chat"]
    few, many = (
        cost.estimates(replace(mapping, practice=mapping.practice._replace(batch=batch)))["draw"].parts for batch in (4, 8)
    )
    assert few["steps"] == 2 * many["steps"] and few["transition"] == pytest.approx(2 * many["transition"])
    whole = cost.estimates(replace(mapping, practice=mapping.practice._replace(batch=0)))["draw"].parts
    assert many["transition"] == pytest.approx(8 * whole["transition"])  # 1024 rows, 16 devices


def test_learners_that_score_again_take_a_forward_pass_more() -> None:
    cost, mapping = CostModel(GRAPH, Efficiency()), mapped()["DeepSpeed-Chat"]
    found = cost.estimates(mapping)
    scored = cost.seconds(replace(SCORE, role="learner"), mapping.strategies["learner"], A100, practice=mapping.practice)
    assert scored is not None and found["learn"].parts["rescoring"] == pytest.approx(scored.seconds)
    assert "rescoring" not in found["teach"].parts  # nobody draws with its weights
    once = cost.estimates(replace(mapping, practice=mapping.practice._replace(rescores=False)))
    assert found["learn"].seconds - once["learn"].seconds == pytest.approx(scored.seconds)


def test_on_several_kinds_of_machines_the_kind_with_most_devices_is_taken() -> None:
    other = replace(A100, devices=4)
    for mapping in mapped(cluster=Cluster(((1, other), (2, A100)))).values():
        assert {pool.machine.devices for pool in mapping.pools} == {8}


def test_what_does_not_fit_says_why() -> None:
    cost = CostModel(GRAPH, Efficiency())
    alone = baselines(GRAPH, Cluster(((1, replace(A100, devices=1)),)), cost)
    assert alone["OpenRLHF"] == "needs a device for each of its 4 pools"
    assert "no mapping fits into the memory of 1 machines of 1 x a100-80g" in str(alone["DeepSpeed-Chat"])
    large = TaskGraph(tuple(role.with_size(MODELS["llama-70b"]) for role in GRAPH.roles), GRAPH.tasks, GRAPH.edges)
    found = baselines(large, CLUSTER, CostModel(large, Efficiency()))
    assert all(isinstance(why, str) and "memory" in why for why in found.values())


def test_names_of_roles_say_nothing() -> None:
    names = {role.name: f"role {number}" for number, role in enumerate(GRAPH.roles)}

    def renamed(role: ModelRole) -> ModelRole:
        return replace(role, name=names[role.name], weights_of=names[role.weights_of] if role.weights_of else "")

    tasks = tuple(replace(task, role=names[task.role]) for task in GRAPH.tasks)
    other = mapped(TaskGraph(tuple(map(renamed, GRAPH.roles)), tasks, GRAPH.edges))
    for name, mapping in mapped().items():
        assert {names[role]: one for role, one in mapping.strategies.items()} == other[name].strategies
