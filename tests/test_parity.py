"""Learners and scorers that are cut over a mesh compute what one process computes.

One group of eight processes goes through all meshes; every test looks at a part of what it brought back.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import Saved, save, saved_tensors
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parent / "workers"))  # as pytest does for the tests there

from ranks import TIMEOUT, in_processes

from hybridflow.build_model import DecoderSource, critic_networks, policy_networks, text_networks, trained_reward
from hybridflow.controller.protocols import THREE_D, THREE_D_PP_ONLY
from hybridflow.core.batch import Batch, Ragged
from hybridflow.core.columns import take
from hybridflow.core.metrics import Metrics
from hybridflow.core.placement import Mesh
from hybridflow.core.roles import Fn, Loss, WorkerContext, columns
from hybridflow.models.spec import DecoderSpec
from hybridflow.models.weights import load_decoder, load_reward, save_decoder
from hybridflow.ops.losses import cross_entropy, ppo_clip, value_loss
from hybridflow.ops.preference import dpo, pairwise
from hybridflow.parallel.mesh import ProcessMesh
from hybridflow.workers.learner import Learner, UpdatePlan
from hybridflow.workers.networks import Networks
from hybridflow.workers.optimizer import OptimizerConfig
from hybridflow.workers.parts import Lines
from hybridflow.workers.publish import Published, checksum
from hybridflow.workers.replica import Replica
from hybridflow.workers.scorer import ModelScorer, RewardModelScorer
from hybridflow.workers.zero import ShardedOptimizer, ShardMode

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

WORLD = 8
MESHES = {
    f"{dp}x{tp}x{pp}": Mesh(dp=dp, tp=tp, pp=pp)
    for dp, tp, pp in [
        (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2), (1, 2, 2), (2, 2, 2), (1, 4, 1), (1, 1, 4), (4, 1, 2), (4, 1, 1)
    ]
}  # fmt: skip
MESHES |= {
    f"{dp}x{tp}x{pp}x{cp}": Mesh(dp=dp, tp=tp, pp=pp, cp=cp)
    for dp, tp, pp, cp in [(1, 1, 1, 2), (1, 1, 1, 4), (2, 1, 1, 2), (1, 2, 1, 2), (1, 1, 2, 2), (2, 2, 1, 2)]
}
SHARED_OUT = {
    "4x1x1 fsdp": ("llama", "qwen2", "odd", "value", "one row", "partly frozen", "adamw", "bfloat16"),
    "2x2x1 fsdp": ("llama", "qwen3", "qwen3, sequence parallel", "odd", "value", "dpo", "one row"),
    "2x1x2 fsdp": ("llama", "qwen2", "value", "reward model", "one row", "lower layers frozen", "bfloat16"),
    "2x2x2 fsdp": ("llama, one microbatch", "odd"),
    "1x1x1x2 fsdp": ("llama", "value"),
    "2x1x1x2 fsdp": ("qwen2", "one row"),
    "4x1x1 zero1": ("llama",),
    "2x2x1 zero1": ("qwen3", "value"),
    "2x1x2 zero1": ("llama", "one row"),
    "2x2x2 zero1": ("odd",),
    "1x1x1x2 zero1": ("adamw",),
    "2x1x1x2 zero1": ("llama", "adamw"),
    "4x1x1 fsdp 2": ("llama", "odd", "one row", "partly frozen", "bfloat16"),
    "4x1x2 fsdp 2": ("qwen2", "value"),
    "2x2x1x2 fsdp 2": ("llama",),
    "4x1x1 zero1 2": ("llama", "odd", "one row", "bfloat16"),
    "2x2x1x2 zero1 2": ("adamw",),
}
"""The cases of meshes whose data-parallel ranks share more than rows out, all of them or groups of so many."""
MESHES |= {name: replace(MESHES[name.split()[0]], shard_ranks=int([*name.split(), 0][2])) for name in SHARED_OUT}
CHUNKED = {
    "1x1x2 none chunks": (
        "llama",
        "qwen2",
        "odd",
        "value",
        "value, untied",
        "reward model",
        "lower layers frozen",
        "adamw",
    ),
    "1x2x2 none chunks": ("llama", "qwen2", "qwen3, sequence parallel", "value", "dpo"),
    "2x1x2 none chunks": ("llama", "one row", "bfloat16"),
    "1x1x2x2 none chunks": ("llama",),
    "2x1x2 fsdp chunks": ("llama", "qwen2", "value", "one row"),
    "2x1x2 zero1 chunks": ("llama",),
}
"""The cases of meshes on which each rank of a pipeline runs two stages."""
MESHES |= {name: replace(MESHES[name.split()[0]], chunks=2) for name in CHUNKED}
SPECS = {
    "llama": DecoderSpec("llama", 31, 16, 26, 4, 4, 2, 4, 64),
    "qwen2": DecoderSpec("qwen2", 33, 16, 22, 4, 4, 4, 4, 64, tied=False, qkv_bias=True),
    "qwen3": DecoderSpec("qwen3", 30, 18, 23, 4, 4, 2, 6, 64, qk_norm=True),
    "odd": DecoderSpec("llama", 29, 20, 21, 5, 6, 3, 4, 64),
}
PPO = ppo_clip.bind(clip=0.2, entropy_coef=0.05, kl_coef=0.1)


@columns(reads=(), writes=("td_errors",))
def marked(outputs: Mapping[str, Tensor], columns: Mapping[str, Tensor]) -> Loss:
    """Cross-entropy that writes down what it saw of every step."""
    terms = -outputs["log_probs"]
    return Loss(terms, {}, {"td_errors": terms.detach()})


def batch(num_rows: int, vocab_size: int) -> Batch:
    """Pairs of rows of uneven lengths, with everything that any loss reads."""
    rng = np.random.default_rng(5)
    prompts, responses = rng.integers(1, 6, num_rows), rng.integers(1, 9, num_rows)
    lengths, total = prompts + responses, int((prompts + responses).sum())
    mask = np.concatenate([np.arange(n) >= p for p, n in zip(prompts, lengths, strict=True)])

    def normal(mean: float, deviation: float) -> Ragged:
        return Ragged(np.where(mask, rng.normal(mean, deviation, total), 0).astype(np.float32), lengths)

    return Batch(
        {
            "sample_id": np.arange(num_rows),
            "tokens": Ragged(rng.integers(0, vocab_size, total), lengths),
            "response_mask": Ragged(mask, lengths),
            "log_probs": normal(-3.4, 0.2),
            "ref_log_probs": normal(-3.4, 0.2),
            "advantages": normal(0, 1),
            "returns": normal(0, 1),
            "values": normal(0, 1),
            "group_id": np.arange(num_rows) // 2,
            "preferred": np.arange(num_rows) % 2 == 0,
        }
    )


class Case(NamedTuple):
    """What is trained, on what, and how."""

    spec: str
    loss: Fn
    rows: int = 5
    token_budget: int = 20
    sgd: bool = True
    minibatches: int = 2
    dtype: torch.dtype = torch.float32
    freeze: tuple[str, ...] = ()
    max_grad_norm: float = 0.5
    sequence_parallel: bool = False

    @property
    def data(self) -> Batch:
        return batch(self.rows, SPECS[self.spec].vocab_size)

    @property
    def networks(self) -> Networks:
        source = DecoderSource("a model", SPECS[self.spec], None, self.dtype, torch.device("cpu"), seed=3)
        source = replace(source, sequence_parallel=self.sequence_parallel)
        build, main = {
            "value_loss": (partial(warm_critic, source), "value"),
            "pairwise": (partial(trained_reward, source), "reward"),
        }.get(self.loss.name, (partial(policy_networks, source, 0.8), "policy"))
        return text_networks(build, main, source.name)

    def learner(self, context: WorkerContext, shard: ShardMode = "none") -> Learner:
        optimizer = OptimizerConfig(lr=0.003, max_grad_norm=self.max_grad_norm, weight_decay=0.01, freeze=self.freeze)
        plan = UpdatePlan(minibatches=self.minibatches, token_budget=self.token_budget)
        settings: dict[str, Any] = {"optimizer": optimizer, "plan": plan, "total_steps": 10, "seed": 1, "shard": shard}
        return Learner(context, networks=self.networks, **settings)


def warm_critic(source: DecoderSource, lines: Lines = Lines()) -> dict[str, nn.Module]:  # noqa: B008
    """A new critic's head is zero, and then no gradient reaches the decoder."""
    networks = critic_networks(source, lines)
    if networks["value"].head is not None:
        networks["value"].head.weight.data.normal_(generator=torch.Generator().manual_seed(2))  # type: ignore[operator, union-attr]
    return networks


CASES = {
    "llama": Case("llama", PPO),
    "llama, one microbatch": Case("llama", PPO, token_budget=1000),
    "qwen2": Case("qwen2", PPO, token_budget=12),
    "qwen3": Case("qwen3", PPO),
    "qwen3, sequence parallel": Case("qwen3", PPO, sequence_parallel=True),
    "odd": Case("odd", PPO),
    "value": Case("llama", value_loss.bind(clip=0.2)),
    "value, untied": Case("qwen2", value_loss.bind()),
    "dpo": Case("qwen2", dpo.bind(beta=0.3), rows=10, token_budget=30),
    "reward model": Case("odd", pairwise.bind(), rows=10, token_budget=30),
    "sft": Case("qwen3", cross_entropy.bind()),
    "written": Case("odd", marked.bind()),
    "one row": Case("llama", PPO, rows=1),
    "lower layers frozen": Case("llama", PPO, freeze=("embed*", "layers.[012].*")),
    "partly frozen": Case("odd", cross_entropy.bind(), freeze=("layers.[234].qkv.*", "norm*")),
    "adamw": Case("qwen2", PPO, sgd=False),
    "bfloat16": Case("llama", PPO, sgd=False, dtype=torch.bfloat16),
}


FEW = ("llama", "qwen2", "qwen3, sequence parallel", "odd", "value", "dpo")
"""The cases of meshes that are combinations of others, and slow: many processes that each wait for all others."""
SLOW = ("2x2x1", "1x2x2", "2x2x2", "1x4x1", "2x1x1x2", "1x2x1x2", "1x1x2x2", "2x2x1x2")
# Case by case: so ranks that a mesh has no use for don't wait long for the next mesh that they are in.
CELLS = [
    (mesh, case)
    for case in CASES
    for mesh in MESHES
    if case in {**SHARED_OUT, **CHUNKED}.get(mesh, FEW if mesh in SLOW else CASES.keys())
]


class Outcome(NamedTuple):
    """What a rank has after two updates of two minibatches."""

    metrics: Metrics
    norms: list[float]
    gradients: list[dict[str, Tensor]]
    parameters: dict[str, Tensor]
    columns: dict[str, Any]


def outcome(case: Case, context: WorkerContext, shard: ShardMode = "none") -> Outcome:
    one, data = case.learner(context, shard), case.data
    assert one.model.decoder.part.num_chunks == context.mesh.chunks
    norms, gradients, clip = list[float](), list[dict[str, Tensor]](), one.optimizer.clip

    def full(tensors: Mapping[str, Tensor], pieces: bool) -> dict[str, Tensor]:
        copies = {name: x.detach().clone() for name, x in tensors.items()}
        if shard == "fsdp":
            assert one.fsdp is not None
            copies = one.fsdp.full(copies, torch.float32)
        elif shard == "zero1" and pieces:
            assert isinstance(one.optimizer, ShardedOptimizer)
            copies = one.optimizer._joined(copies, one.optimizer.parameters, torch.float32)
        return copies if one.cut is None else one.cut.full(copies)

    def record() -> float:
        found = {name: m.grad for name, m in one.optimizer.masters.items() if m.grad is not None}
        gradients.append(full(found, pieces=True))
        norms.append(clip())
        return norms[-1]

    one.optimizer.clip = record  # type: ignore[method-assign]
    if case.sgd and one.optimizer.masters:
        one.optimizer.adamw = torch.optim.SGD(list(one.optimizer.masters.values()), 0.05)  # type: ignore[assignment]
    one.update(data, case.loss)
    written = one.update(data, case.loss)
    own = data.rows(THREE_D.distribute(data.lengths, context.mesh)[context.rank])
    columns = {**written.columns, **VERBS[one.main](one, own).columns, **scored(case, context, own)}
    return Outcome(context.metrics, norms, gradients, full(dict(one.model.named_parameters()), pieces=False), columns)


def scored(case: Case, context: WorkerContext, own: Batch) -> dict[str, Any]:
    """What a frozen model of the same kind says, if there is such a scorer."""
    other = replace(context, metrics=Metrics())
    if case.networks.main == "policy":
        out = ModelScorer(other, networks=case.networks, token_budget=case.token_budget).score(own)
    elif case.networks.main == "reward":
        settings = {"token_budget": case.token_budget, "end_tokens": (1,)}
        out = RewardModelScorer(other, networks=case.networks, **settings).score(own)  # type: ignore[arg-type]
    else:
        return {}
    context.metrics.merge(other.metrics, "scorer/")
    return {f"scorer's {name}": column for name, column in out.columns.items()}


VERBS: dict[str, Callable[[Learner, Batch], Batch]] = {
    "policy": lambda one, data: one.compute_log_probs(data),
    "value": lambda one, data: one.compute_values(data),
    "reward": lambda one, data: one.compute_scores(data),
}


def context_of(mesh: Mesh, rank: int, lines: ProcessMesh) -> WorkerContext:
    return WorkerContext(mesh=mesh, rank=rank, reduce=lines.dp.all_reduce if mesh.dp > 1 else None, lines=lines)


def shard_of(mesh: str) -> Any:
    return [*mesh.split(), "none"][1]


SAVED = "2x2x2"
GOES_ON = ("2x2x2", "4x1x1", "1x2x1", "1x1x4", "1x1x2x2", "1x2x2 none chunks")
KEPT = {
    "tied": Case("llama", PPO, sgd=False, minibatches=1),
    "untied, bfloat16": Case("qwen2", PPO, sgd=False, minibatches=1, dtype=torch.bfloat16),
    "critic, partly frozen": Case("odd", value_loss.bind(), sgd=False, minibatches=1, freeze=("layers.[04].*", "norm*")),
    "reward model": Case("qwen3", pairwise.bind(), rows=10, sgd=False, minibatches=1),
}


class Kept(NamedTuple):
    """What a rank has that went on from a checkpoint: its state at once, and the metrics of another update."""

    state: dict[str, Any]
    tensors: dict[str, Tensor]
    metrics: Metrics
    weights: dict[str, np.ndarray]
    parameters: tuple[int, int]


Results = dict[tuple[str, str], Outcome]
KeptResults = dict[tuple[str, str], Kept]


def went_on(case: Case, context: WorkerContext, saved: Saved, folder: Path) -> Kept:
    one = case.learner(context)
    one.load(*saved)
    if case.networks.main != "value":
        one.export(partial(export, folder=folder / "model"))
    state, tensors = through_files(one, folder / "actor")
    weights = {name: array.copy() for name, array in one.weights(0).arrays.items()}
    one.update(case.data, case.loss)
    return Kept(state.state, tensors, context.metrics, weights, one.num_parameters())


def through_files(one: Learner, folder: Path) -> tuple[Saved, dict[str, Tensor]]:
    """What the ranks of a mesh save together, and its tensors."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    state, files = one.save(folder), one.saved(True)
    for line in (one.lines.tp, one.lines.pp, one.lines.dp_cp):  # wait for all ranks
        line.all_reduce(torch.zeros(1))
    return Saved(folder, state, files[0] or []), saved_tensors(folder)


def export(model: Any, folder: Path) -> None:
    save_decoder(model.decoder, folder, score=getattr(model, "score", None), pad_token_id=0)


def checkpoints(rank: int, lines: Mapping[str, ProcessMesh], folder: Path) -> KeptResults:
    """Saved on one mesh, after two updates, and gone on from on others."""
    kept = {}
    for case, settings in KEPT.items():
        one = settings.learner(context_of(MESHES[SAVED], rank, lines[SAVED]))
        one.update(settings.data, settings.loss)
        one.update(settings.data, settings.loss)
        saved, _ = through_files(one, folder / case / "actor")
        files: list[Any] = [None] * WORLD
        dist.all_gather_object(files, saved.files)
        saved = saved._replace(files=[file for own in files for file in own])
        torch.save(saved, folder / f"{case} {rank}.pt")
        for name in GOES_ON:
            if rank < MESHES[name].size:
                context = context_of(MESHES[name], rank, lines[name])
                kept[name, case] = went_on(settings, context, saved, folder / f"{case} {name}")
    return kept


def everything(folder: Path, rank: int) -> tuple[Results, KeptResults]:
    groups: dict[tuple[int, ...], Any] = {}
    lines = {name: ProcessMesh(mesh, rank, TIMEOUT, groups) for name, mesh in MESHES.items()}
    results = {
        (name, case): outcome(CASES[case], context_of(MESHES[name], rank, lines[name]), shard_of(name))
        for name, case in CELLS
        if rank < MESHES[name].size
    }
    return results, checkpoints(rank, lines, folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[tuple[Results, KeptResults]]:
    return in_processes(partial(everything, folder), WORLD, folder)


@pytest.fixture(scope="module")
def results(ranks: list[Any]) -> list[Results]:
    return [rank[0] for rank in ranks]


@pytest.fixture(scope="module")
def kept(ranks: list[Any]) -> list[KeptResults]:
    return [rank[1] for rank in ranks]


@cache
def alone(case: str) -> Outcome:
    return outcome(CASES[case], WorkerContext())


exact = pytest.mark.parametrize(("mesh", "case"), [cell for cell in CELLS if CASES[cell[1]].sgd])
each = pytest.mark.parametrize(("mesh", "case"), CELLS)


def stages(results: list[Results], mesh: str, case: str) -> list[Outcome]:
    """Of the first rank of every pipeline stage, whose tensors are full."""
    return [results[rank][mesh, case] for rank in THREE_D_PP_ONLY.collect(MESHES[mesh])]


def together(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors of all stages; none is there twice."""
    names = [name for part in parts for name in part]
    assert len(names) == len(set(names))
    return {name: x for part in parts for name, x in part.items()}


def measured(results: list[Results], mesh: str, case: str) -> dict[str, float]:
    """The metrics as the runtime counts them."""
    metrics = Metrics()
    for rank in MESHES[mesh].leaders:
        metrics.merge(results[rank][mesh, case].metrics)
    return metrics.values()


@exact
def test_gradients_are_those_of_one_process(results: list[Results], mesh: str, case: str) -> None:
    one, many = alone(case), stages(results, mesh, case)
    steps = [together(step) for step in zip(*(stage.gradients for stage in many), strict=True)]
    assert len(steps) == len(one.gradients) > 0
    for mine, theirs in zip(one.gradients, steps, strict=True):
        assert mine.keys() == theirs.keys()
        scale = max(float(g.abs().max()) for g in mine.values())
        for name, gradient in mine.items():
            near = 1e-5 * float(gradient.abs().max()) + 1e-6 * scale
            assert float((theirs[name] - gradient).abs().max()) <= near, name
    for stage in many:
        assert stage.norms == pytest.approx(one.norms, rel=1e-5)


@exact
def test_parameters_are_those_of_one_process(results: list[Results], mesh: str, case: str) -> None:
    one, many = alone(case).parameters, together([stage.parameters for stage in stages(results, mesh, case)])
    assert one.keys() == many.keys()
    for name, parameter in one.items():
        torch.testing.assert_close(many[name], parameter, rtol=1e-5, atol=1e-6)


@exact
def test_metrics_are_those_of_one_process(results: list[Results], mesh: str, case: str) -> None:
    expected = alone(case).metrics.values()
    assert measured(results, mesh, case) == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert {"loss", "grad_norm", "learning_rate"} <= expected.keys()
    assert (CASES[case].loss is PPO) == ("effective_samples" in expected)


@exact
def test_columns_are_those_of_one_process(results: list[Results], mesh: str, case: str) -> None:
    one, data = alone(case).columns, CASES[case].data
    dealt = THREE_D.distribute(data.lengths, MESHES[mesh])
    assert sorted(row for rank in MESHES[mesh].leaders for row in dealt[rank].tolist()) == list(range(len(data)))
    for rank in MESHES[mesh].leaders:
        columns = results[rank][mesh, case].columns
        assert columns.keys() == one.keys()
        for name, column in columns.items():
            rows = dealt[rank] if name not in CASES[case].loss.writes else np.arange(len(data))
            expected = take(one[name], rows)
            assert len(column) == len(expected)
            near = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
            near(*((x.values if isinstance(x, Ragged) else x) for x in (column, expected)))


@each
def test_ranks_with_the_same_layers_stay_equal_bit_for_bit(results: list[Results], mesh: str, case: str) -> None:
    layout = MESHES[mesh]
    for rank in range(layout.size):
        _, stage, _ = layout.coordinates(rank)
        first, other = (results[r][mesh, case] for r in (stage * layout.tp, rank))
        assert first.norms == other.norms and first.parameters.keys() == other.parameters.keys()
        assert all(torch.equal(x, other.parameters[name]) for name, x in first.parameters.items())


@pytest.mark.parametrize(("mesh", "case"), [cell for cell in CELLS if not CASES[cell[1]].sgd])
def test_adamw_and_bfloat16_stay_near(results: list[Results], mesh: str, case: str) -> None:
    near = 0.05 if case == "bfloat16" else 1e-3
    one, many = alone(case), stages(results, mesh, case)
    assert measured(results, mesh, case) == pytest.approx(one.metrics.values(), rel=near, abs=near)
    for stage in many:
        assert stage.norms[0] == pytest.approx(one.norms[0], rel=max(1e-5, near / 10))
        assert stage.norms == pytest.approx(one.norms, rel=near)


@pytest.mark.parametrize(("mesh", "case"), [cell for cell in CELLS if CASES[cell[1]].freeze])
def test_frozen_weights_stay_and_all_others_move(results: list[Results], mesh: str, case: str) -> None:
    before = dict(CASES[case].learner(WorkerContext()).model.named_parameters())
    after = together([stage.parameters for stage in stages(results, mesh, case)])
    moved = {name for name, x in after.items() if not torch.equal(x, before[name])}
    assert moved == {name for name, x in before.items() if x.requires_grad} < before.keys()


each_kept = pytest.mark.parametrize(("mesh", "case"), [(mesh, case) for mesh in GOES_ON for case in KEPT])


@cache
def kept_alone(case: str, folder: Path) -> Kept:
    return went_on(KEPT[case], WorkerContext(), saved(case, folder), folder / f"{case} alone")


def saved(case: str, folder: Path) -> Saved:
    found: Saved = torch.load(folder / f"{case} 0.pt", weights_only=False)
    return found


def assert_same_bits(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype and torch.equal(tensor, other[name]), name


@pytest.mark.parametrize("case", KEPT)
def test_a_checkpoint_of_a_mesh_is_one_of_one_process(
    kept: list[KeptResults], folder: Path, tmp_path: Path, case: str
) -> None:
    found = saved(case, folder)
    assert len(found.tensors()) > 40
    assert_same_bits(found.tensors(), kept_alone(case, folder).tensors)
    assert found.state == kept_alone(case, folder).state
    trained = KEPT[case].learner(WorkerContext())
    trained.update(KEPT[case].data, KEPT[case].loss)
    trained.update(KEPT[case].data, KEPT[case].loss)
    own = save(trained, tmp_path / "run" / "actor")
    assert own.state == found.state
    tensors, near = found.tensors(), 0.02 if KEPT[case].dtype == torch.bfloat16 else 2e-3
    for name, tensor in own.tensors().items():
        torch.testing.assert_close(tensors.pop(name), tensor, rtol=near, atol=near)
    assert not tensors


@pytest.mark.parametrize("case", KEPT)
def test_every_rank_writes_its_part_and_nothing_twice(kept: list[KeptResults], folder: Path, case: str) -> None:
    found = saved(case, folder)
    assert {file.name for file in found.files} == {f"actor/{rank}.safetensors" for rank in range(WORLD)}
    tensors = found.tensors()
    assert not {"qkv", "gate_up"} & {part for name in tensors for part in name.split(".")}
    assert {"q", "k", "v", "gate", "up"} <= {part for name in tensors for part in name.split(".")}
    total, most = sum(x.nbytes for x in tensors.values()), max(file.num_bytes for file in found.files)
    header = 20_000
    assert total < sum(file.num_bytes for file in found.files) < total + WORLD * header
    assert most - header < total / 2


@each_kept
def test_a_checkpoint_is_the_same_on_every_mesh(kept: list[KeptResults], folder: Path, mesh: str, case: str) -> None:
    for rank in range(MESHES[mesh].size):
        assert kept[rank][mesh, case].state == saved(case, folder).state
        assert_same_bits(saved(case, folder).tensors(), kept[rank][mesh, case].tensors)


@each_kept
def test_training_goes_on_from_a_checkpoint_as_in_one_process(
    kept: list[KeptResults], folder: Path, mesh: str, case: str
) -> None:
    metrics = Metrics()
    for rank in MESHES[mesh].leaders:
        metrics.merge(kept[rank][mesh, case].metrics)
    near = 0.02 if KEPT[case].dtype == torch.bfloat16 else 2e-6
    assert metrics.values() == pytest.approx(kept_alone(case, folder).metrics.values(), rel=5 * near, abs=near)


@each_kept
def test_every_rank_knows_how_many_parameters_there_are(
    kept: list[KeptResults], folder: Path, mesh: str, case: str
) -> None:
    model = KEPT[case].learner(WorkerContext()).model
    sizes = [(x.numel(), x.numel() * x.requires_grad) for x in model.parameters()]
    expected = tuple(map(sum, zip(*sizes, strict=True)))
    assert kept_alone(case, folder).parameters == expected
    assert all(kept[rank][mesh, case].parameters == expected for rank in range(MESHES[mesh].size))


@each_kept
def test_the_weights_of_all_stages_load_into_a_replica(kept: list[KeptResults], folder: Path, mesh: str, case: str) -> None:
    parts = [kept[rank][mesh, case].weights for rank in THREE_D_PP_ONLY.collect(MESHES[mesh])]
    assert sum(map(len, parts)) == len({name for part in parts for name in part})
    replica = Replica(KEPT[case].networks)
    replica.load([Published(part, checksum(part.values()), version=2, stepped=True) for part in parts], last=True)
    expected = KEPT[case].learner(WorkerContext())
    expected.load(*saved(case, folder))
    for name, parameter in replica.networks[replica.main].named_parameters():
        assert torch.equal(parameter, expected.model.get_parameter(name)), name


@pytest.mark.parametrize("case", [case for case in KEPT if KEPT[case].networks.main != "value"])
@pytest.mark.parametrize("mesh", GOES_ON)
def test_any_mesh_exports_the_folder_of_one_process(kept: list[KeptResults], folder: Path, mesh: str, case: str) -> None:
    """To the last byte, but that each stage of a pipeline writes a file of its own."""
    kept_alone(case, folder)
    paths = [folder / f"{case} {how}" / "model" for how in ("alone", mesh)]
    one, many = ({file.name: file.read_bytes() for file in path.iterdir()} for path in paths)
    load = load_reward if KEPT[case].networks.main == "reward" else load_decoder
    models = [load(path, KEPT[case].dtype) for path in paths]
    (first, score), (second, same) = (model if isinstance(model, tuple) else (model, torch.zeros(1)) for model in models)
    assert score is not None and same is not None
    assert_same_bits({**first.state_dict(), "score": score}, {**second.state_dict(), "score": same})
    if MESHES[mesh].pp == 1:
        assert one == many and {"config.json", "model.safetensors"} <= one.keys()
    else:
        shards = {f"model-{n:05}-of-{MESHES[mesh].pp:05}.safetensors" for n in range(1, MESHES[mesh].pp + 1)}
        assert many.keys() - one.keys() == {*shards, "model.safetensors.index.json"}
        assert one["config.json"] == many["config.json"]
