"""Learners whose data-parallel ranks share weights, gradients and optimizer out.

One group of four processes goes through all meshes; every test looks at a part of what it brought back. That they compute
what one process computes is in tests/test_parity.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from conftest import save, saved_tensors
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import TIMEOUT, in_processes
from test_zero import CASES, SPEC, WORLD, Case, context_of, data, through_files
from test_zero import MESHES as ZERO_MESHES
from torch import Tensor, nn

from hybridflow.build_model import DecoderSource, critic_networks, policy_networks, text_networks
from hybridflow.controller.protocols import THREE_D
from hybridflow.core.batch import Batch, Ragged
from hybridflow.core.columns import take
from hybridflow.core.errors import UserError
from hybridflow.core.metrics import Metrics
from hybridflow.core.placement import Mesh
from hybridflow.core.roles import WorkerContext
from hybridflow.data.text import Tokenizer
from hybridflow.generation.request import SamplingParams
from hybridflow.models.policy import TextCritic
from hybridflow.models.weights import load_decoder, save_decoder
from hybridflow.parallel.mesh import ALONE, ProcessMesh
from hybridflow.workers.fsdp import FsdpOptimizer, fsdp_bytes, runs
from hybridflow.workers.learner import Learner, UpdatePlan
from hybridflow.workers.networks import Networks
from hybridflow.workers.optimizer import OptimizerConfig, freeze, training_bytes
from hybridflow.workers.parts import Lines
from hybridflow.workers.text_sampler import TextSampler
from hybridflow.workers.units import Units

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

MESHES = {**ZERO_MESHES, "dp2 x dp2": Mesh(dp=4, shard_ranks=2)}
KINDS = ("fp32", "bf16", "value")
CHECKPOINTING = "recomputed"


class Outcome(NamedTuple):
    """What a rank has after two updates, between which everything was put away and taken back."""

    metrics: Metrics
    first: dict[str, Tensor]
    saved: dict[str, Tensor]
    again: dict[str, dict[str, Tensor]]
    held: tuple[int, int, int]
    num_parameters: tuple[int, int]
    traffic: dict[str, int]
    summed: dict[str, int]
    forwards: int


def outcome(case: Case, mesh: Mesh, rank: int, lines: ProcessMesh, began: Path, folder: Path) -> Outcome:
    one = case.learner(context_of(mesh, rank, lines), "fsdp")
    assert one.fsdp is not None and isinstance(one.optimizer, FsdpOptimizer)
    with one.reading():
        first = {name: parameter.detach().clone() for name, parameter in one.model.named_parameters()}
    case.update(one)
    assert one.offload() > 0 and one.onload("update") > 0
    units = Units.of(data(case.rows), "row")
    forwards = [most for _, _, most in one._deal(one.plan.cut(units, one.seed, one.version, 0), units)]
    for line in (lines.shard, lines.replicate):
        line.traffic.clear()
    case.update(one)
    traffic, summed = dict(lines.shard.traffic), dict(lines.replicate.traffic)
    gradients = [master.grad for master in one.optimizer.masters.values() if master.grad is not None]
    held = storages(one.fsdp.tensors()), sum(x.nbytes for x in gradients), storages(one.optimizer.tensors())
    state, saved = through_files(lines, one, folder / "own")
    again, start = {}, {"version": 1, "optimizer_steps": {one.main: 2}}
    for name, path, told in (("none", folder / "own", state), ("zero1", folder / "own", state), ("fsdp", began, start)):
        other = case.learner(context_of(mesh, rank, lines), name)  # type: ignore[arg-type]
        other.load(path / "actor", told, ())
        told_again, again[name] = through_files(lines, other, folder / name)
        assert told_again == told
    one.export(partial(exported, folder=folder / "model"))
    lines.dp.all_reduce(torch.zeros(1))
    return Outcome(one.context.metrics, first, saved, again, held, one.num_parameters(), traffic, summed, sum(forwards))


def storages(tensors: Any) -> int:
    """Bytes of the memory of these tensors, but for single numbers."""
    found = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors if x.dim() and x.numel()}
    return sum(found.values())


def everything(folder: Path, rank: int) -> dict[tuple[str, str], Any]:
    results: dict[tuple[str, str], Any] = {}
    groups: dict[tuple[int, ...], Any] = {}
    for name, mesh in MESHES.items():
        lines = ProcessMesh(mesh, rank, TIMEOUT, groups)
        if rank >= mesh.size:
            continue
        for case in KINDS:
            own = folder / f"{name} {case}"
            results[name, case] = outcome(CASES[case], mesh, rank, lines, folder / case, own)
        if mesh.tp == mesh.pp == 1:
            results[name, "sampled"] = sampled(mesh, rank, lines)
        results[name, "few rows"] = few_rows(mesh, rank, lines)
        results[name, CHECKPOINTING] = recomputed(context_of(mesh, rank, lines), "fsdp")
    return results


def exported(model: Any, folder: Path) -> None:
    if isinstance(model, TextCritic):
        return  # of a critic nothing is written
    save_decoder(model.decoder, folder)


def few_rows(mesh: Mesh, rank: int, lines: ProcessMesh) -> dict[int, Any]:
    """Log-probabilities of one row, of five, of seven with two that have no action, and of none."""
    one, found = CASES["fp32"].learner(context_of(mesh, rank, lines), "fsdp"), {}
    for number in (1, 5, 7, 0):
        rows = data(7).rows(np.arange(number))
        own = rows.rows(THREE_D.distribute(rows.lengths, mesh)[rank])
        found[number] = one.compute_log_probs(own).columns["learner_log_probs"]
    return found


def recomputed(context: WorkerContext, shard: Any) -> float:
    """Mean norm of two updates with activation checkpointing."""
    source = DecoderSource("a model", SPEC, None, torch.float32, torch.device("cpu"), 3, activation_checkpointing=True)
    networks = text_networks(partial(policy_networks, source, 0.8), "policy", source.name)
    args: dict[str, Any] = {"plan": UpdatePlan(token_budget=20), "total_steps": 9, "seed": 1, "shard": shard}
    one = Learner(context, networks=networks, optimizer=OptimizerConfig(lr=0.003), **args)
    for _ in range(2):
        CASES["fp32"].update(one)
    return context.metrics.values()["grad_norm"]


def sampled(mesh: Mesh, rank: int, lines: ProcessMesh | None) -> list[dict[str, Any]]:
    """Rollouts before and after an update; the last rank has no prompt."""
    context = WorkerContext() if lines is None else context_of(mesh, rank, lines)
    one = CASES["fp32"].learner(context, "fsdp")
    sampler = TextSampler(
        WorkerContext(),
        tokenizer=Tokenizer.characters("0123456789"),
        params=SamplingParams(max_new_tokens=6),
        seed=1,
        max_slots=3,
        kv_cache_gb=None,
    )
    sampler.attach(one)
    prompts = Ragged.from_rows([[1, 2, 3], [4, 5], [6, 7, 8, 9], [2], [3, 3]], np.int64)
    batch = Batch({"prompt": prompts, "sample_id": np.arange(5), "expected_length": np.arange(5)})
    own = batch.rows(np.arange(rank, 5, mesh.dp - 1) if rank < mesh.dp - 1 else np.arange(0)) if mesh.dp > 1 else batch
    found = []
    for _ in range(2):
        out = sampler.rollout(own)
        found.append({int(i): out.ragged("log_probs").rows([n]).values for n, i in enumerate(own["sample_id"])})
        CASES["fp32"].update(one)
    assert sampler.source.version == 2
    return found


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one")
    for name in KINDS:
        one = CASES[name].learner(WorkerContext(), "none")
        CASES[name].update(one)
        save(one, folder / name / "actor")
    return folder


@pytest.fixture(scope="module")
def results(start: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[tuple[str, str], Any]]:
    return in_processes(partial(everything, start), WORLD, tmp_path_factory.mktemp("ranks"))


Results = list[dict[tuple[str, str], Any]]
each_mesh = pytest.mark.parametrize("mesh", MESHES)
each_case = pytest.mark.parametrize("case", KINDS)
each_dp = pytest.mark.parametrize("mesh", [name for name, mesh in MESHES.items() if mesh.tp == mesh.pp == 1])


@cache
def alone(case: str) -> Learner:
    one = CASES[case].learner(WorkerContext(), "none")
    CASES[case].update(one)
    CASES[case].update(one)
    return one


@each_case
@each_mesh
def test_putting_everything_away_between_updates_changes_nothing(results: Results, mesh: str, case: str) -> None:
    metrics = Metrics()
    for rank in MESHES[mesh].leaders:
        metrics.merge(results[rank][mesh, case].metrics)
    near = 1e-3 if CASES[case].dtype == torch.float32 else 0.05
    assert metrics.values() == pytest.approx(alone(case).context.metrics.values(), rel=near, abs=near / 10)


@each_case
@each_dp
def test_whole_weights_can_be_read_in_their_own_dtype(results: Results, mesh: str, case: str) -> None:
    expected = dict(CASES[case].learner(WorkerContext(), "none").model.named_parameters())
    for rank in range(MESHES[mesh].dp):
        found = results[rank][mesh, case].first
        assert found.keys() == expected.keys()
        assert all(x.dtype == expected[name].dtype and torch.equal(x, expected[name]) for name, x in found.items())


@each_case
@each_mesh
def test_checkpoints_go_from_one_mode_to_the_other_bit_for_bit(results: Results, start: Path, mesh: str, case: str) -> None:
    first = saved_tensors(start / case / "actor")
    for rank in range(MESHES[mesh].size):
        done: Outcome = results[rank][mesh, case]
        assert_same(done.saved, done.again["none"])
        assert_same(done.saved, done.again["zero1"])
        assert_same(first, done.again["fsdp"])
        assert first.keys() == done.saved.keys() and len(first) > 40
    assert any(name.startswith("master/") for name in first) == (CASES[case].dtype == torch.bfloat16)


@each_mesh
def test_any_mesh_exports_the_weights(results: Results, start: Path, mesh: str) -> None:
    for case in ("fp32", "bf16"):
        decoder = load_decoder(start / f"{mesh} {case}" / "model", CASES[case].dtype)
        saved = results[0][mesh, case].saved
        assert torch.equal(decoder.embed.weight, saved["policy.decoder.embed.weight"])
        assert torch.equal(decoder.get_parameter("layers.2.down.weight"), saved["policy.decoder.layers.2.down.weight"])


def assert_same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for path, value in one.items():
        assert value.dtype == other[path].dtype and torch.equal(value, other[path]), path


@each_case
@each_mesh
def test_a_rank_holds_its_part_of_everything(results: Results, mesh: str, case: str) -> None:
    layout = MESHES[mesh]
    for rank in range(layout.size):
        block, stage, slot = layout.coordinates(rank)
        place = Lines(tp=replace(ALONE, size=layout.tp, index=slot), pp=replace(ALONE, size=layout.pp, index=stage))
        module = sizes_at(CASES[case], place)
        most, held, first = fsdp_bytes(module, layout.sharing), results[rank][mesh, case].held, block % layout.sharing == 0
        assert held == most if first else all(a <= b for a, b in zip(held, most, strict=True)), (held, most, rank)
        whole = sum(x.numel() for x in module.parameters() if x.requires_grad)
        rows = sum(prod(x.shape[1:]) for x in module.parameters())  # at most one more of each matrix
        assert whole / layout.sharing * 4 <= most[1] <= (whole / layout.sharing + rows) * 4
        assert most[2] == 2 * most[1] and training_bytes(module)[0] == 4 * whole


def sizes_at(case: Case, place: Lines) -> nn.Module:
    source = DecoderSource("a model", SPEC, None, case.dtype, torch.device("cpu"), seed=3)
    (module,) = (critic_networks(source, place) if case.kind == "value" else policy_networks(source, 0.8, place)).values()
    freeze(module, case.freeze, whole=False)
    return module


@each_case
@each_mesh
def test_every_rank_knows_how_many_parameters_there_are(results: Results, mesh: str, case: str) -> None:
    expected = alone(case).num_parameters()
    assert all(results[rank][mesh, case].num_parameters == expected for rank in range(MESHES[mesh].size))


@each_dp
def test_bytes_sent_follow_the_formula(results: Results, mesh: str) -> None:
    """A microbatch gathers a layer's weights twice and all others once, and reduces all gradients once, in equal parts.
    A minibatch sums the shards, and whether a parameter has a gradient, over those who have the same."""
    dp, ranks, model = MESHES[mesh].dp, MESHES[mesh].sharing, alone("fp32").model
    sizes = {name: len(runs(x.shape, ranks)[0]) for name, x in model.named_parameters()}
    layers = sum(size for name, size in sizes.items() if ".layers." in name)
    total = sum(sizes.values())
    for rank in range(dp):
        done: Outcome = results[rank][mesh, "fp32"]
        assert done.forwards >= 2
        assert done.traffic["all_gather"] == done.forwards * (ranks - 1) * 4 * (total + layers)
        assert done.traffic["reduce_scatter"] == done.forwards * (ranks - 1) * 4 * total
        own = sum(len(runs(x.shape, ranks)[rank % ranks]) for x in model.parameters())
        assert done.summed.get("all_reduce", 0) == 2 * (2 * 4 * (own + len(sizes)) * (dp // ranks - 1) // (dp // ranks))


@each_mesh
def test_any_number_of_rows_is_scored_also_none(results: Results, mesh: str) -> None:
    one = CASES["fp32"].learner(WorkerContext(), "none")
    for number in (1, 5, 7):
        rows = data(7).rows(np.arange(number))
        expected = one.compute_log_probs(rows).columns["learner_log_probs"]
        for rank in MESHES[mesh].leaders:
            dealt = THREE_D.distribute(rows.lengths, MESHES[mesh])[rank]
            found = results[rank][mesh, "few rows"][number]
            assert len(found) == len(dealt)
            np.testing.assert_allclose(found.values, take(expected, dealt).values, rtol=1e-5, atol=1e-5)
    assert all(len(results[rank][mesh, "few rows"][0]) == 0 for rank in range(MESHES[mesh].size))


@each_mesh
def test_activations_may_be_recomputed(results: Results, mesh: str) -> None:
    expected = recomputed(WorkerContext(), "none")
    for rank in range(MESHES[mesh].size):
        assert results[rank][mesh, CHECKPOINTING] == pytest.approx(expected, rel=1e-4)


@each_dp
def test_a_sampler_reads_the_weights_in_place(results: Results, mesh: str) -> None:
    expected = sampled(Mesh(), 0, None)
    for turn in range(2):
        found = {i: x for rank in range(MESHES[mesh].dp) for i, x in results[rank][mesh, "sampled"][turn].items()}
        assert found.keys() == expected[turn].keys() == set(range(5))
        for i, log_probs in expected[turn].items():
            np.testing.assert_allclose(found[i], log_probs, rtol=1e-3, atol=1e-4)


def test_networks_other_than_decoders_are_refused() -> None:
    networks = Networks(lambda: {"policy": nn.Linear(1, 1)}, "policy", (), "a net of 2 layers")
    two = replace(ALONE, size=2)
    lines: Any = SimpleNamespace(dp=two, tp=ALONE, pp=ALONE, cp=ALONE, dp_cp=two, shard=two, replicate=ALONE)
    args: dict[str, Any] = {"plan": UpdatePlan(), "total_steps": 1, "seed": 1, "shard": "fsdp"}
    with pytest.raises(UserError, match='shard = "fsdp" shards decoders, not a net of 2 layers'):
        Learner(WorkerContext(lines=lines), networks=networks, optimizer=OptimizerConfig(), **args)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=3), st.integers(1, 7))
def test_runs_are_torchs_chunks(shape: list[int], ranks: int) -> None:
    numbers = torch.arange(prod(shape)).view(shape)
    chunks = [chunk.flatten().tolist() for chunk in torch.chunk(numbers, ranks)]
    found = [list(run) for run in runs(shape, ranks)]
    assert [run for run in found if run] == chunks
    assert len(found) == ranks and found[len(chunks) :] == [[]] * (ranks - len(chunks))
