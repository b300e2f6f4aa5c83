"""A small workload of a learner, its sampler and a frozen model, and devices that reach their peaks."""

from __future__ import annotations

from math import inf
from typing import Any

from hybridflow.planner.cluster import PRESETS, Device, Machine
from hybridflow.planner.cost import CostModel, Efficiency, Estimate
from hybridflow.planner.graph import Edge, ModelRole, Task, TaskGraph
from hybridflow.planner.mapping import Strategy
from hybridflow.planner.sizes import MODELS

BILLION = 1e9
EXACT = Efficiency(1.0, 0.0, 0.0, 0.0, 1.0, inf, 1.0, 1.0, 0.0, 1.0)
"""peaks reached, and nothing besides"""
DEVICE = Device("d", {"bfloat16": 100e12, "float32": 10e12}, 80 * BILLION, 2e12, launch_s=0.0)
MACHINE = Machine(DEVICE, 8, 200e9, 25e9, 0.0, 0.0)
A100 = PRESETS["a100-80g"]
SPEC = MODELS["llama-7b"].spec
LEARNER = ModelRole("learner", MODELS["llama-7b"], "policy", 2, 4.0, 8.0)
SAMPLER = ModelRole("sampler", MODELS["llama-7b"], "policy", 2, weights_of="learner")
FROZEN = ModelRole("frozen", MODELS["llama-7b"], "policy", 2)
DRAW = Task("draw", "sampler", "generate", 1024, 1024.0, 1024.0)
SCORE = Task("score", "frozen", "forward", 1024, 1024.0, 1024.0)
LEARN = Task("learn", "learner", "train", 1024, 1024.0, 1024.0, minibatches=8)
GRAPH = TaskGraph(
    (LEARNER, SAMPLER, FROZEN), (DRAW, SCORE, LEARN), (Edge("draw", "score", 1e9), Edge("score", "learn", 1e9))
)
WORK = SPEC, 1024 * 2048, 1024 * 1024, 2048, True
"""of a pass over all rows"""


def model(efficiency: Efficiency = EXACT, graph: TaskGraph = GRAPH, **keys: Any) -> CostModel:
    return CostModel(graph, efficiency, **keys)


def timed(
    costs: CostModel, task: Task, strategy: Strategy, free: float = 64 * BILLION, machine: Machine = MACHINE
) -> Estimate:
    found = costs.seconds(task, strategy, machine, free)
    assert found is not None
    return found


def of(task: Task, *others: Task) -> TaskGraph:
    return TaskGraph(GRAPH.roles, (task, *others), ())
