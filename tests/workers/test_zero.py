"""Optimizer states shared out over a data-parallel line take the steps of the optimizer that every rank holds.

One group of four processes goes through all meshes; every test looks at a part of what it brought back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import save, saved_tensors
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import TIMEOUT, in_processes
from test_learner import batch
from torch import Tensor, nn

from hybridflow.build_model import DecoderSource, critic_networks, policy_networks, text_networks
from hybridflow.core.batch import Batch
from hybridflow.core.metrics import Metrics
from hybridflow.core.placement import Mesh
from hybridflow.core.roles import WorkerContext
from hybridflow.models.spec import DecoderSpec
from hybridflow.ops.losses import ppo_clip, value_loss
from hybridflow.parallel.mesh import Line, ProcessMesh
from hybridflow.parallel.shard import Shard, run_of
from hybridflow.workers.learner import Learner, UpdatePlan
from hybridflow.workers.optimizer import MOMENTS, Optimizer, OptimizerConfig
from hybridflow.workers.parts import Lines
from hybridflow.workers.zero import ShardedOptimizer, ShardMode, sharded_bytes, share_out

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

WORLD = 4
MESHES = {
    "dp2": Mesh(dp=2),
    "dp3": Mesh(dp=3),
    "dp4": Mesh(dp=4),
    "dp2 x tp2": Mesh(dp=2, tp=2),
    "dp2 x pp2": Mesh(dp=2, pp=2),
}
# One key-value head, of which both ranks of tp = 2 hold a copy; norms whose gradients they share; a tied embedding.
SPEC = DecoderSpec("qwen3", 19, 18, 23, 3, 4, 1, 6, 64, qk_norm=True)
MODES: tuple[ShardMode, ...] = ("none", "zero1")


class Case(NamedTuple):
    """What is trained, and how."""

    kind: str = "policy"
    dtype: torch.dtype = torch.float32
    freeze: tuple[str, ...] = ()
    max_grad_norm: float = 1e9
    sgd: bool = False
    rows: int = 7

    def learner(self, context: WorkerContext, shard: ShardMode) -> Learner:
        source = DecoderSource("a model", SPEC, None, self.dtype, torch.device("cpu"), seed=3)
        build: Any = partial(critic_networks, source) if self.kind == "value" else partial(policy_networks, source, 0.8)
        optimizer = OptimizerConfig(
            lr=0.01, weight_decay=0.1, freeze=self.freeze, max_grad_norm=self.max_grad_norm, schedule="linear"
        )
        plan, networks = UpdatePlan(minibatches=2, token_budget=20), text_networks(build, self.kind, source.name)
        one = Learner(context, networks=networks, optimizer=optimizer, plan=plan, total_steps=9, seed=1, shard=shard)
        if self.sgd and one.optimizer.masters:  # AdamW makes rounding errors of tiny gradients large
            one.optimizer.adamw = torch.optim.SGD(list(one.optimizer.masters.values()), 0.05)  # type: ignore[assignment]
        return one

    def update(self, one: Learner) -> None:
        one.update(
            data(self.rows), value_loss.bind() if self.kind == "value" else ppo_clip.bind(clip=0.2, entropy_coef=0.05)
        )


CASES = {
    "fp32": Case(),
    "bf16": Case(dtype=torch.bfloat16, freeze=("embed*", "layers.[01].*")),  # of two stages, all of the first
    "value": Case("value"),  # its head's bias is one number, and nothing else moves in the first step
    "clipped, sgd": Case(max_grad_norm=0.3, sgd=True),
    "few rows, sgd": Case(sgd=True, rows=2),  # in every minibatch only one block has any
}
ADAMW = [name for name, case in CASES.items() if not case.sgd]


def data(num_rows: int) -> Batch:
    """Of seven rows two are without action steps."""
    rows = batch(num_rows)
    mask = rows.ragged("response_mask")
    return rows.with_columns(response_mask=mask.like(mask.values & ~np.isin(mask.row_index, [2, 5])))


class Outcome(NamedTuple):
    """What a rank has after two updates of two minibatches."""

    metrics: Metrics
    parameters: dict[str, Tensor]
    traffic: dict[str, int]
    sizes: dict[str, int]
    held: int
    saved: dict[str, Tensor]
    again: dict[str, dict[str, Tensor]]


def in_order(dp: Line, x: Tensor) -> Tensor:
    """Summed as ``Line.reduce_scatter`` does, not as gloo's ring, so that nothing differs by rounding."""
    return x.copy_(dp.all_gather(x[None], [1] * dp.size).sum(0))


def context_of(mesh: Mesh, rank: int, lines: ProcessMesh) -> WorkerContext:
    uncounted = replace(lines.dp, traffic=Counter())
    return WorkerContext(mesh=mesh, rank=rank, reduce=partial(in_order, uncounted), lines=lines)


def through_files(lines: ProcessMesh, one: Learner, folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What the ranks of a mesh save together: the driver's part, and all tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    state = one.save(folder / "actor")
    one.saved(True)
    for line in (lines.tp, lines.pp, lines.dp_cp):  # wait for all ranks
        line.all_reduce(torch.zeros(1))
    return state, saved_tensors(folder / "actor")


def states_of(optimizer: Optimizer, dp: Line) -> dict[str, Tensor]:
    """Of all ranks of the line together."""
    parts: list[Any] = [None] * dp.size
    dist.all_gather_object(parts, {f"{k}/{n}": x.clone() for k, n, x in optimizer.states()}, group=dp.group)
    assert not optimizer.sharded or sum(map(len, parts)) == len({name for part in parts for name in part})
    return {name: part[name] for part in parts for name in part}


def outcome(case: Case, shard: ShardMode, mesh: Mesh, rank: int, lines: ProcessMesh, given: Path, folder: Path) -> Outcome:
    one = case.learner(context_of(mesh, rank, lines), shard)
    case.update(one)
    if shard == "zero1":
        assert one.offload() > 0 and one.onload("update") > 0
    lines.dp.traffic.clear()
    case.update(one)
    traffic, sizes = dict(lines.dp.traffic), {name: p.numel() for name, p in one.optimizer.parameters.items()}
    held = sum(tensor.untyped_storage().nbytes() for tensor in one.optimizer.tensors() if tensor.dim())
    saved, again = {}, {}
    if not case.sgd:
        state, saved = through_files(lines, one, folder / "own")
        start = {"version": 1, "optimizer_steps": {one.main: 2}}
        for name, path, told in (("own", folder / "own", state), ("one process", given, start)):
            other = case.learner(context_of(mesh, rank, lines), "none" if shard == "zero1" else "zero1")
            other.load(path / "actor", told, ())
            told_again, again[name] = through_files(lines, other, folder / f"again {name}")
            assert told_again == told
    parameters = {name: p.detach().clone() for name, p in one.model.named_parameters()}
    return Outcome(one.context.metrics, parameters, traffic, sizes, held, saved, again)


def everything(folder: Path, rank: int) -> dict[tuple[str, str, str], Any]:
    results: dict[tuple[str, str, str], Any] = {}
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for name, mesh in MESHES.items():
        lines = ProcessMesh(mesh, rank, TIMEOUT, groups)
        if rank >= mesh.size:
            continue
        for case in CASES:
            for mode in MODES:
                own = folder / f"{name} {case} {mode}"
                results[name, case, mode] = outcome(CASES[case], mode, mesh, rank, lines, folder / case, own)
        if mesh.tp == mesh.pp == 1:
            results[name, "tiny", ""] = tiny(lines)
            results[name, "without", ""] = without_gradients(lines)
    return results


def tiny(lines: ProcessMesh) -> dict[str, Any]:
    """Two numbers on up to four ranks."""
    modules = {mode: nn.Linear(1, 1) for mode in MODES}
    optimizers = {}
    for mode, module in modules.items():
        nn.init.ones_(module.weight)
        nn.init.ones_(module.bias)
        optimizer = optimizers[mode] = make(module, lines, mode)
        for _ in range(3):
            optimizer.zero_grad()
            module(torch.full((1, 1), 1.0 + lines.dp.index)).sum().backward()
            optimizer.reduce_gradients(partial(in_order, lines.dp))
            optimizer.clip()
            optimizer.step()
    weights = {mode: [p.detach() for p in module.parameters()] for mode, module in modules.items()}
    return {"weights": weights, "states": {mode: states_of(optimizer, lines.dp) for mode, optimizer in optimizers.items()}}


def make(module: nn.Module, lines: ProcessMesh, mode: ShardMode, cut: None = None) -> Optimizer:
    config = OptimizerConfig(lr=0.01, weight_decay=0.1, max_grad_norm=1e9)
    if mode == "none":
        return Optimizer(module, config, 10, cut)
    return ShardedOptimizer(module, config, 10, cut, Lines(dp_cp=lines.dp_cp, shard=lines.shard))


def without_gradients(lines: ProcessMesh) -> dict[str, Any]:
    """Three layers have gradients, then the second on no rank and the first on the first rank alone; the fourth never."""
    out = {}
    for mode in MODES:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(3, 2), nn.Linear(2, 2))
        optimizer = make(module, lines, mode)
        module[:3](torch.ones(1, 4)).sum().backward()
        optimizer.reduce_gradients(partial(in_order, lines.dp))
        optimizer.clip()
        optimizer.step()
        before = {name: p.detach().clone() for name, p in module.named_parameters()}
        optimizer.zero_grad()
        (module[2](torch.ones(1, 3)).sum() + (module[0](torch.ones(1, 4)).sum() if lines.dp.index == 0 else 0)).backward()
        optimizer.reduce_gradients(partial(in_order, lines.dp))
        norm = optimizer.clip()
        optimizer.step()
        parameters = dict(module.named_parameters())
        still = [name for name, p in before.items() if torch.equal(p, parameters[name])]
        out[mode] = {"norm": norm, "parameters": parameters, "still": still, "state": states_of(optimizer, lines.dp)}
    return out


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Learner]]:
    folder, learners = tmp_path_factory.mktemp("one"), {}
    for name in ADAMW:
        learners[name] = CASES[name].learner(WorkerContext(), "zero1")
        CASES[name].update(learners[name])
        steps = {learners[name].main: 2}
        assert save(learners[name], folder / name / "actor").state == {"version": 1, "optimizer_steps": steps}
    return folder, learners


@pytest.fixture(scope="module")
def results(
    one_process: tuple[Path, dict[str, Learner]], tmp_path_factory: pytest.TempPathFactory
) -> list[dict[tuple[str, str, str], Any]]:
    return in_processes(partial(everything, one_process[0]), WORLD, tmp_path_factory.mktemp("ranks"))


Results = list[dict[tuple[str, str, str], Any]]
each_mesh = pytest.mark.parametrize("mesh", MESHES)
each_case = pytest.mark.parametrize("case", CASES)
each_dp = pytest.mark.parametrize("mesh", [name for name, mesh in MESHES.items() if mesh.dp == mesh.size])


def pairs(results: Results, mesh: str, case: str) -> list[tuple[Outcome, Outcome]]:
    """(none, zero1) of each rank."""
    return [(results[rank][mesh, case, "none"], results[rank][mesh, case, "zero1"]) for rank in range(MESHES[mesh].size)]


def assert_equal(a: Any, b: Any, where: str = "state") -> None:
    if isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_equal(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, list):
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_equal(x, y, f"{where}[{i}]")
    else:
        assert torch.equal(a, b) if isinstance(a, Tensor) else a == b, where


@each_case
@each_dp
def test_steps_are_those_of_whole_optimizers(results: Results, mesh: str, case: str) -> None:
    """Bit for bit, unless the gradient is scaled by a norm that was summed in another order."""
    exact = "clipped" not in case
    for none, zero in pairs(results, mesh, case):
        assert zero.metrics.values()["grad_norm"] == pytest.approx(none.metrics.values()["grad_norm"], rel=1e-6)
        for name, parameter in none.parameters.items():
            if exact:
                assert torch.equal(parameter, zero.parameters[name]), name
            else:
                torch.testing.assert_close(zero.parameters[name], parameter, rtol=1e-6, atol=1e-7)
    if exact and case in ADAMW:
        assert_equal(*(outcome.saved for outcome in pairs(results, mesh, case)[0]))


@each_case
@each_mesh
def test_losses_norms_and_parameters_stay_near_on_every_mesh(results: Results, mesh: str, case: str) -> None:
    near = 1e-6 if CASES[case].sgd else 1e-3 if CASES[case].dtype == torch.float32 else 0.05
    for none, zero in pairs(results, mesh, case):
        assert zero.metrics.values() == pytest.approx(none.metrics.values(), rel=near, abs=near / 10)
        for name, parameter in none.parameters.items():
            torch.testing.assert_close(zero.parameters[name], parameter, rtol=near, atol=near)


@each_case
@each_mesh
def test_ranks_of_a_line_keep_the_same_parameters_bit_for_bit(results: Results, mesh: str, case: str) -> None:
    layout = MESHES[mesh]
    for rank in range(layout.size):
        _, stage, slot = layout.coordinates(rank)
        first, own = (results[r][mesh, case, "zero1"] for r in (stage * layout.tp + slot, rank))
        assert first.parameters.keys() == own.parameters.keys()
        assert all(torch.equal(p, own.parameters[name]) for name, p in first.parameters.items())


@each_case
@each_mesh
def test_a_rank_holds_its_part_of_the_states(results: Results, mesh: str, case: str) -> None:
    size = 12 if CASES[case].dtype == torch.bfloat16 else 8
    layout = MESHES[mesh]
    for none, zero in pairs(results, mesh, case) if not CASES[case].sgd else ():
        whole = size * sum(none.sizes.values())
        assert none.held == whole
        assert abs(zero.held - whole / layout.dp) < 17 * size
    lines = [r for r in range(layout.size) if layout.coordinates(r)[1:] == (0, 0)]
    held = [results[rank][mesh, case, "zero1"].held for rank in lines]
    if not CASES[case].sgd:
        assert sum(held) == results[0][mesh, case, "none"].held


@each_dp
def test_predicted_bytes_are_those_that_are_held(results: Results, mesh: str) -> None:
    for case in ADAMW:
        model = CASES[case].learner(WorkerContext(), "none").model
        held = [results[rank][mesh, case, "zero1"].held for rank in range(MESHES[mesh].dp)]
        assert max(held) == sharded_bytes(model, MESHES[mesh].dp)


@each_case
@each_mesh
def test_bytes_sent_follow_the_formula(results: Results, mesh: str, case: str) -> None:
    """(size - 1) / size of the gradients in fp32 and of the weights, a rank and minibatch, and a flag for each piece."""
    layout, minibatches = MESHES[mesh], 2
    for rank in range(layout.size):
        zero, block = results[rank][mesh, case, "zero1"], layout.coordinates(rank)[0]
        shares = share_out(zero.sizes, layout.dp)
        numbers, flags = [sum(map(len, share.values())) for share in shares], [len(share) for share in shares]
        others = [i for i in range(layout.dp) if i != block]
        sent = {
            "reduce_scatter": minibatches * 4 * sum(numbers[i] + flags[i] for i in others),
            "all_gather": minibatches * CASES[case].dtype.itemsize * len(others) * numbers[block],
            "all_reduce": minibatches * (2 * 8 * len(others) // layout.dp),  # squares of the norm
        }
        assert Counter(zero.traffic) == Counter(sent)
        total = sum(numbers)
        for count in (sum(numbers[i] for i in others), len(others) * numbers[block]):
            assert abs(count - len(others) / layout.dp * total) < 17 * layout.dp


@pytest.mark.parametrize("case", ADAMW)
@each_mesh
def test_checkpoints_go_from_one_mode_to_the_other_and_back_bit_for_bit(
    results: Results, one_process: tuple[Path, dict[str, Learner]], mesh: str, case: str
) -> None:
    start = saved_tensors(one_process[0] / case / "actor")
    for rank in range(MESHES[mesh].size):
        for mode in MODES:
            done: Outcome = results[rank][mesh, case, mode]
            assert_equal(done.saved, done.again["own"])
            assert_equal(start, done.again["one process"])
    keys = {name.partition("/")[0] for name in start if "/" in name}
    assert keys == {"step", *MOMENTS, *(["master"] if CASES[case].dtype == torch.bfloat16 else [])}


@each_dp
def test_a_rank_may_own_nothing(results: Results, mesh: str) -> None:
    for rank in range(MESHES[mesh].dp):
        found = results[rank][mesh, "tiny", ""]
        assert_equal(found["weights"]["none"], found["weights"]["zero1"])
        assert_equal(found["states"]["none"], found["states"]["zero1"])
        assert all(float(x) < 0.98 for x in found["weights"]["zero1"])


@each_dp
def test_what_no_rank_has_a_gradient_for_stays(results: Results, mesh: str) -> None:
    for rank in range(MESHES[mesh].dp):
        found = results[rank][mesh, "without", ""]
        assert found["zero1"]["still"] == found["none"]["still"] == ["1.weight", "1.bias", "3.weight", "3.bias"]
        assert found["zero1"]["norm"] == pytest.approx(found["none"]["norm"], rel=1e-6)
        for key in ("parameters", "state"):
            assert_equal(found["none"][key], found["zero1"][key])
        steps = {name: x for name, x in found["zero1"]["state"].items() if name.startswith("step/")}
        counts = {name.removeprefix("step/"): float(count) for name, count in steps.items()}
        assert counts == {f"{i}.{kind}": 1.0 if i == 1 else 2.0 for i in range(3) for kind in ("weight", "bias")}


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 99), min_size=1, max_size=6), st.integers(1, 7))
def test_shares_are_even_and_cover_everything_once(sizes: list[int], ranks: int) -> None:
    named = {str(i): size for i, size in enumerate(sizes)}
    shares = share_out(named, ranks)
    lengths = [sum(map(len, share.values())) for share in shares]
    assert len(shares) == ranks and all(abs(length - sum(sizes) / ranks) < 17 for length in lengths)
    row = [(name, i) for share in shares for name, run in share.items() for i in run]
    assert row == [(name, i) for name, size in named.items() for i in range(size)]
    assert all(run.start % 16 == 0 and (run.stop % 16 == 0 or run.stop == named[n]) for s in shares for n, run in s.items())


@settings(max_examples=30, deadline=None)
@given(st.data(), st.lists(st.tuples(st.integers(1, 3), st.booleans()), min_size=1, max_size=4), st.integers(1, 3))
def test_a_run_of_a_shard_is_owned_where_the_shard_is(data: Any, rows: list[tuple[int, bool]], width: int) -> None:
    total = sum(n for n, _ in rows)
    starts = np.cumsum([0, *(n for n, _ in rows)]).tolist()
    ranges = tuple(range(a, b) for a, b in pairwise(starts))
    shard = Shard((total, width), 0, ranges, tuple(own for _, own in rows))
    start = data.draw(st.integers(0, total * width - 1))
    run = range(start, data.draw(st.integers(start + 1, total * width)))
    flat = run_of(shard, run)
    owned = [own for _, place, own in flat.places for _ in place]
    assert owned == [own for n, own in rows for _ in range(n * width)][run.start : run.stop]
    assert sum(map(len, flat.ranges)) == len(run)
    assert all(flat.owned) or [i for cut in flat.ranges for i in cut] == list(run)


def test_one_process_has_nothing_to_share_out() -> None:
    kinds: dict[str, Callable[[], Learner]] = {
        "alone": lambda: CASES["fp32"].learner(WorkerContext(), "zero1"),
        "a line of one": lambda: CASES["fp32"].learner(WorkerContext(lines=Lines()), "zero1"),
    }
    assert [type(make().optimizer) for make in kinds.values()] == [Optimizer, Optimizer]
