"""Every algorithm traces without models, and its trace is what really happens."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from conftest import CARTPOLE, with_keys

from hybridflow import build as build_module
from hybridflow.algorithms import ALGORITHMS
from hybridflow.build_trace import trace
from hybridflow.config import RunConfig, validate
from hybridflow.controller.local_runtime import LocalRuntime
from hybridflow.controller.trace_runtime import TraceRuntime, Workload
from hybridflow.core.batch import Batch, Ragged
from hybridflow.core.errors import ContractError
from hybridflow.core.fields import FIELDS
from hybridflow.core.graph import Call, Graph
from hybridflow.core.roles import Role
from hybridflow.core.traced import Part, Traced
from hybridflow.ops.advantages import score_rewards, whiten
from hybridflow.workers.estimator import EstimatorWorker

WORDS = "hybridflow.rollout.scorers:words_over?limit=1"
TEXT: dict[str, Any] = {
    "threads": 1,
    "run_dir": "unused",
    "data": {"task": "addition"},
    "generation": {"max_new_tokens": 5},
    "train": {"prompts_per_step": 3, "group_size": 2, "minibatches": 2},
}
ONE_EACH = {"train__group_size": 1}
RUNS: dict[str, dict[str, Any]] = {
    "sft": ONE_EACH,
    "reward_model": ONE_EACH,
    "dpo": ONE_EACH,
    "dpo kto": {**ONE_EACH, "dpo__kind": "kto"},
    "grpo": {"kl__coef": 0.1},
    "grpo corrected": {"loss__correction": "truncate", "shaping__normalise": "batch"},
    "rloo": {},
    "reinforce_pp": {"kl__coef": 0.1},
    "remax": {"kl__coef": 0.1},
    "remax shaped": {"shaping": {"overlong_buffer": 2, "normalise": "batch"}},
    "ppo": {"kl__coef": 0.1},
    "safe_rlhf": {"cost__functions": [WORDS]},
    "safe_rlhf ptx": {"cost__functions": [WORDS], "safe_rlhf__ptx_coef": 0.1, "kl__coef": 0.1},
    "distill": {},
}
OFF_POLICY: dict[str, Any] = {
    "ppo": None,
    "environment__id": "Pendulum-v1",
    "environment__steps_per_rollout": 8,
    "replay": {"batch_size": 16, "warmup": 8},
    "train": {"updates_per_step": 2},
}
ENVIRONMENTS: dict[str, dict[str, Any]] = {
    "ppo": {"environment__num_envs": 3, "environment__steps_per_rollout": 40},
    "dqn": {
        "ppo": None,
        "critic": None,
        "environment__steps_per_rollout": 8,
        "replay": {"batch_size": 16, "warmup": 8},
        "train": {"updates_per_step": 2},
    },
    "dqn gru": {
        "ppo": None,
        "critic": None,
        "actor__net": {"kind": "gru", "hidden": [8]},
        "environment__num_envs": 2,
        "environment__steps_per_rollout": 8,
        "replay": {"batch_size": 4, "warmup": 8, "sequence": 4},
        "train": {"updates_per_step": 2},
    },
    "reinforce": {"ppo": None, "critic": None},
    "a2c": {"ppo": None},
    "a3c": {"ppo": None, "critic": None, "environment__workers": 1, "train": {"steps": 1}},
    "trpo": {"ppo": None},
    "impala": {"ppo": None},
    "q_learning": {
        "ppo": None,
        "critic": None,
        "environment__id": "FrozenLake-v1",
        "environment__steps_per_rollout": 1,
        "train": {"steps": 1},
    },
    "sac": OFF_POLICY,
    "td3": OFF_POLICY,
    "ddpg": OFF_POLICY,
}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    rows = [{"prompt": f"{i} + 1 = ", "chosen": str(i + 1), "rejected": "no" * (1 + i % 2)} for i in range(8)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(params=[*(f"{name} on data" for name in RUNS), *(f"{name} in CartPole" for name in ENVIRONMENTS)])
def config(request: pytest.FixtureRequest, tiny_model: Path, pairs: Path) -> RunConfig:
    name, _, world = request.param.rpartition(" ")
    name, algorithm = name.rpartition(" ")[0], request.param.split()[0]
    if world == "CartPole":
        return validate(with_keys(CARTPOLE, algorithm=algorithm, run_dir="unused", **ENVIRONMENTS[name]), "test")
    data = with_keys(TEXT, algorithm=algorithm, actor__model=str(tiny_model), **RUNS[name])
    if algorithm == "distill":
        data["teacher"] = {"model": str(tiny_model)}
    if ALGORITHMS[algorithm].records == "pairs":
        data = with_keys(data, data={"pairs": str(pairs)}, generation=None)
    if algorithm == "sft":
        data = with_keys(data, generation=None)
    return validate(data, "test")


def test_every_algorithm_is_traced_on_everything_that_it_runs_on() -> None:
    traced = {(name.split()[0], "data") for name in RUNS} | {(name.split()[0], "environment") for name in ENVIRONMENTS}
    assert traced == {(name, world) for name, method in ALGORITHMS.items() for world in method.inputs}


class Happened(NamedTuple):
    name: str
    kind: str
    rows: int
    reads: dict[str, int]
    writes: dict[str, int]


def num_bytes(batch: Batch) -> dict[str, int]:
    return {name: (c.values if isinstance(c, Ragged) else c).nbytes for name, c in batch.columns.items()}


class Recording(LocalRuntime):
    """What really happens in a step."""

    happened: list[Happened]

    def call(
        self, role: Any, name: str, verb: Any, batch: Batch, arguments: tuple[Any, ...], rank: int | None = None
    ) -> Batch:
        out = super().call(role, name, verb, batch, arguments)
        reads, writes = role.columns_of(verb, arguments)
        new = out.select([role.rename.get(column, column) for column in writes])
        seen = num_bytes(batch.select(reads))
        if role.name != "replay":  # of which a trace has one call
            self.happened.append(Happened(f"{role.name}.{name}", verb.kind, len(out), seen, num_bytes(new)))
        return out


def one_step(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> list[Happened]:
    monkeypatch.setattr(build_module, "LocalRuntime", Recording)
    Recording.happened = []
    run = build_module.build(config)
    try:
        run.trainer.train(1)
    finally:
        run.runtime.stop()
    return Recording.happened


def bytes_read(graph: Graph, call: Call) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for edge in graph.edges:
        if edge.reader == call.number and edge.bytes is not None:
            sizes[edge.column] = sizes.get(edge.column, 0) + edge.bytes
    return sizes


def calls_of(graph: Graph) -> list[Call]:
    """Those of roles: as often as they are made, without sources and buffers."""
    calls = [call for call in graph.calls if call.role not in ("data", "environment", "replay")]
    learning = [call for call in calls if call.times > 1]
    return [call for call in calls if call.times == 1] + learning * (learning[0].times if learning else 1)


def test_a_trace_is_what_happens(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    happened = one_step(config, monkeypatch)
    sampled = [call for call in happened if call.name == "sampler.rollout"]
    generated, text = sum(call.writes["response_mask"] for call in sampled), config.environment is None
    prompts = sum(call.reads.get("prompt", 0) for call in sampled) // 8
    mean = (generated - prompts) / max(sum(call.rows for call in sampled), 1)
    graph = trace(config, mean if text else None)
    calls = calls_of(graph)
    assert [(call.name, call.kind) for call in calls] == [(real.name, real.kind) for real in happened]
    for call, real in zip(calls, happened, strict=True):
        assert set(call.writes) == set(real.writes)
        pieces = not text and ("replay" not in config.sections() or call.kind == "generate")
        assert real.rows >= call.rows if pieces else real.rows == call.rows
        assert_sizes(bytes_read(graph, call), real, exact=len(sampled) < 2)


def assert_sizes(traced: dict[str, int], real: Happened, exact: bool) -> None:
    """Of time columns: equal up to rounding, where one mean is that of all rows; less where constants need no bytes."""
    for name, size in traced.items():
        assert name in real.reads
        if FIELDS[name].axis == "time" and "demonstrated" not in real.reads:
            assert (
                size == pytest.approx(real.reads[name], abs=16)
                if exact
                else size == pytest.approx(real.reads[name], rel=0.2)
            )
        else:
            assert size <= real.reads[name]
    constants = {"demonstrated"}
    assert {name for name in real.reads if FIELDS[name].axis != "object"} - constants == set(traced)


def test_every_column_that_is_read_was_written_before(config: RunConfig) -> None:
    graph = trace(config)
    assert [call.number for call in graph.calls] == list(range(len(graph.calls)))
    for edge in graph.edges:
        assert edge.writer < edge.reader and edge.column in graph.calls[edge.writer].writes
    readers = {edge.reader for edge in graph.edges}
    assert readers == {call.number for call in graph.calls if call.kind != "source"}
    idle = {role.name for role in graph.roles} - {call.role for call in graph.calls}
    waiting = {"sft": {"sampler"}, "dpo": set() if config.dpo.kind == "kto" else {"estimator"}}
    assert idle == waiting.get(config.algorithm, set())


def test_the_configuration_knows_the_roles(config: RunConfig) -> None:
    """Without making any of them; it can't know whether an evaluation needs a scorer of its own."""
    traced, roles = {role.name for role in trace(config).roles}, config.roles()
    assert {name for name, certain in roles.items() if certain} <= traced <= roles.keys()
    assert roles.keys() - traced <= {"examiner", *({"reward"} if config.algorithm == "sft" else ())}


def has_env_workers(config: RunConfig) -> bool:
    return config.environment is not None and config.environment.workers > 0


def on_two_pools(config: RunConfig) -> RunConfig:
    """Two workers that learn and sample, three for the rest; methods with an actor alone get one pool. Env workers that
    work by themselves have a pool of their own."""
    if has_env_workers(config):
        apart = {"pools": {"train": 1, "rest": 1}, "roles": {"actor": "train", "sampler": "rest"}}
        given = {"runtime": {"kind": "ray"}, "placement": apart}
        return validate(config.model_dump(include=config.model_fields_set) | given, "test")
    rest = {name: "rest" for name in config.roles() if name not in ("actor", "sampler", "estimator")}
    placement = {"pools": {"train": 2, "rest": [1, 2]}, "roles": {"actor": "train", **rest}} if rest else {}
    given = {"runtime": {"kind": "ray"}, "placement": placement}
    return validate(config.model_dump(include=config.model_fields_set) | given, "test")


def test_every_algorithm_has_an_order_of_execution_on_pools(config: RunConfig) -> None:
    placed = on_two_pools(config).placed
    graph = trace(on_two_pools(config))
    stages = {call.number: number for number, stage in enumerate(graph.stages()) for call in stage}
    assert stages.keys() == {call.number for call in graph.calls if call.kind != "source"}
    for number, stage in enumerate(graph.stages()):
        pools = [graph.pool_of(call) for call in stage]
        assert len(pools) == len(set(pools)), "a pool does one thing at a time"
        for call in stage:
            writers = [writer.number for writer, _ in graph.read_by(call)]
            before = [c.number for c in graph.calls[: call.number] if graph.pool_of(c) == graph.pool_of(call)]
            waited = [stages[other] for other in (*writers, *before) if other in stages]
            assert max(waited, default=-1) < number
            assert number == 0 or max(waited) == number - 1, "nobody waits longer than it has to"
    assert {role.name: role.pool for role in graph.roles}.items() <= placed.roles.items()
    copied = sum(role.weight_bytes for role in graph.roles if role.copy_of)
    moved = sum((edge.bytes or 0) * graph.calls[edge.writer].times for edge in graph.edges)
    assert sum(t.bytes for t in graph.transfers()) == moved + copied
    assert all(call.protocol for call in calls_of(graph))


def test_the_same_program_is_traced_wherever_it_runs(config: RunConfig) -> None:
    local, split = trace(config), trace(on_two_pools(config))
    assert (local.calls, local.edges) == (split.calls, split.edges)
    meshes = {role.name: role.mesh for role in split.roles}
    copies = has_env_workers(config)
    assert (
        meshes["actor"] == ("dp 2" if len(split.pools) > 1 and not copies else "1") and meshes.get("estimator", "1") == "1"
    )
    assert meshes.get("critic", "dp 3") == "dp 3" and {role.mesh for role in local.roles} == {"1"}
    held = {pool.name: pool.weight_bytes + pool.optimizer_bytes for pool in split.pools}
    sizes = {role.name: role for role in local.roles}
    copied = sizes["actor"].weight_bytes if copies else 0
    assert sum(held.values()) == sum(role.weight_bytes + role.optimizer_bytes for role in local.roles) + copied


def test_sizes_of_the_roles_are_those_of_the_models(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {role.name: role for role in trace(config).roles}
    run = build_module.build(config)
    try:
        workers = run.runtime._workers
        assert workers.keys() == sizes.keys()
        for name, worker in workers.items():
            networks = [*worker.networks.values()] if "networks" in vars(worker) else [vars(worker).get("model")]
            weights = [weight for network in networks if network is not None for weight in network.parameters()]
            assert sizes[name].parameters == sum(weight.numel() for weight in weights)
            assert sizes[name].weight_bytes == sum(weight.nbytes for weight in weights)
            if "optimizer" in vars(worker):
                optimizers = worker.optimizers.values()
                trained = sum(weight.numel() for one in optimizers for weight in one.parameters.values())
                assert sizes[name].trained == trained
    finally:
        run.runtime.stop()


def traced_batch() -> Batch:
    mask = Ragged.from_rows([[False, True], [True]], bool)
    columns = {"scores": np.array([1, 2], np.float32), "response_mask": mask, "group_id": np.array([7, 7])}
    return Batch(columns).traced(0)


@pytest.mark.parametrize(
    "read",
    [
        lambda column: column.values,
        lambda column: column.tolist(),
        lambda column: column.astype(np.int64),
        lambda column: column[0],
        lambda column: list(column),
        lambda column: bool(column),
        lambda column: float(column),
        lambda column: np.asarray(column),
        lambda column: np.mean(column),
        lambda column: np.zeros(2) + column,
        lambda column: column > 0,
        lambda column: column == 1,
        lambda column: ~column,
        lambda column: 2.0 * column,
        lambda column: 1 in column,
    ],
)
def test_reading_a_value_is_refused(read: Callable[[Any], object]) -> None:
    with pytest.raises(ContractError, match=r"values of column 'scores' .* rollout and learn may not depend on values"):
        read(traced_batch()["scores"])


def test_reading_lengths_and_masks_is_refused() -> None:
    for read in (
        lambda b: b.ragged("response_mask"),
        lambda b: b.lengths,
        lambda b: b.steps(),
        lambda b: b.rows(b["scores"]),
    ):
        with pytest.raises(ContractError, match="may not depend on values"):
            read(traced_batch())


def test_traced_batches_answer_what_shapes_can_answer() -> None:
    batch = traced_batch()
    assert len(batch) == 2 and "scores" in batch and "1 rows" in repr(batch.rows([1]))
    assert len(batch.repeat(3)) == 6 and batch.repeat(3)["response_mask"].entries == 9
    assert len(batch.first_of_groups()) == 1
    groups = batch.first_of_groups().with_columns(
        greedy_scores=Traced("greedy_scores", np.dtype(np.float32), (Part(4, 1, 1),))
    )
    joined = batch.join_groups(groups, "greedy_scores")["greedy_scores"]
    assert joined.parts == (Part(4, 2, 1.0),)
    both = Batch.concat([batch.fill(values=0.0), batch.fill(values=1.0)])
    assert both["scores"].parts == (Part(0, 2, 1.0), Part(0, 2, 1.0)) and both["values"].parts[0].writer is None
    assert both.rows([3, 3, 0])["scores"].parts == (Part(0, 1, 1.0), Part(0, 2, 1.0))
    with pytest.raises(ContractError, match="different lengths"):
        batch.with_columns(values=Traced("values", np.dtype(np.float32), (Part(1, 2, 9.0),)))
    with pytest.raises(ContractError, match="type float64, expected float32"):
        batch.with_columns(scores=Traced("scores", np.dtype(np.float64), (Part(1, 2, 1.0),)))


def test_calls_are_checked_as_when_they_run() -> None:
    runtime = TraceRuntime(Workload(3))
    estimator = runtime.role(Role("estimator", EstimatorWorker))
    out = estimator.compute(traced_batch(), score_rewards.bind())
    assert runtime.graph.calls[0].function == "score_rewards" and "rewards" in out
    with pytest.raises(ContractError, match=r"estimator.compute reads advantages; the batch has"):
        estimator.compute(out, whiten.bind())
    with pytest.raises(ContractError, match="two roles are called 'estimator'"):
        runtime.role(Role("estimator", EstimatorWorker))
    with pytest.raises(AttributeError, match="no verb 'update'"):
        estimator.update(out)  # type: ignore[attr-defined]
