"""Parts of models: where microbatches run, and full tensors of slices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from ranks import TIMEOUT, in_processes
from test_learner import batch
from torch import Tensor

from hybridflow.build_model import DecoderSource, critic_networks, policy_networks
from hybridflow.core.batch import Batch
from hybridflow.core.placement import Mesh
from hybridflow.core.roles import WorkerContext
from hybridflow.models.spec import DecoderSpec
from hybridflow.parallel.mesh import Line, ProcessMesh
from hybridflow.parallel.tensor import take
from hybridflow.workers.parts import WHOLE, Cut, Lines, run_microbatches

SPEC = DecoderSpec("qwen2", 19, 16, 21, 4, 6, 3, 4, 64, qkv_bias=True)
SOURCE = DecoderSource("a model", SPEC, None, torch.float32, torch.device("cpu"), seed=3)
MESHES = {(tp, pp): Mesh(tp=tp, pp=pp) for tp, pp in [(2, 1), (3, 1), (4, 1), (1, 2), (2, 2), (1, 4)]}
NUM_BATCHES = 3


def batches() -> list[Batch]:
    data = batch(6)
    return [data.rows(np.arange(first, first + 2)) for first in (0, 2, 4)]


def loss_of(number: int, seen: Batch, outputs: Any) -> Tensor:
    log_probs: Tensor = outputs["log_probs"]
    assert len(log_probs) == seen.ragged("response_mask").values.sum()
    return (log_probs * (number + 1)).sum() / 50


def measured(mesh: Mesh, rank: int, lines: Lines) -> dict[str, Any]:
    """What this rank computes, holds, joins and sends."""
    network = policy_networks(SOURCE, 1.0, lines)["policy"]
    losses = run_microbatches(network, batches(), loss_of, lines.pp, train=True)
    gradients = {name: p.grad for name, p in network.named_parameters()}
    found: dict[str, Any] = {"sent": {"tp": dict(lines.tp.traffic), "pp": dict(lines.pp.traffic)}, "trained": losses}
    outputs = run_microbatches(network, batches(), lambda *args: args[2]["log_probs"], lines.pp, train=False)
    found["log_probs"] = {number: x.clone() for number, x in outputs.items()}
    cut, named = Cut(network, lines), dict(network.named_parameters())
    full = cut.full({name: p.detach() for name, p in named.items()})
    found["full"] = {name: x.clone() for name, x in full.items()}
    found["taken"] = {name: torch.equal(take(x, cut.shards[name]), named[name]) for name, x in full.items()}
    found["names"], found["no gradient"] = set(named), [name for name, x in gradients.items() if x is None]
    critic = critic_networks(SOURCE, lines)["value"]
    found["critic"] = set(dict(critic.named_parameters()))
    found["head"] = Cut(critic, lines).full({n: p.detach().clone() for n, p in critic.named_parameters() if "head" in n})
    return found


def everything(rank: int) -> dict[tuple[int, int], dict[str, Any]]:
    found, groups = {}, {}  # type: ignore[var-annotated]
    for key, mesh in MESHES.items():
        context = WorkerContext(mesh=mesh, rank=rank, lines=ProcessMesh(mesh, rank, TIMEOUT, groups))
        if rank < mesh.size:
            found[key] = measured(mesh, rank, Lines.of(context))
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[tuple[int, int], dict[str, Any]]]:
    return in_processes(everything, 4, tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    network = policy_networks(SOURCE, 1.0)["policy"]
    outputs = run_microbatches(network, batches(), lambda *args: args[2]["log_probs"], WHOLE.pp, train=False)
    return {"log_probs": outputs, "full": {name: p.detach() for name, p in network.named_parameters()}}


each_mesh = pytest.mark.parametrize("key", MESHES, ids=lambda key: "x".join(map(str, key)))


def of_mesh(ranks: list[Any], key: tuple[int, int]) -> list[tuple[int, int, dict[str, Any]]]:
    """(stage, tensor-parallel rank, what it found)"""
    mesh = MESHES[key]
    return [(*mesh.coordinates(rank)[1:], ranks[rank][key]) for rank in range(mesh.size)]


@each_mesh
def test_the_last_stage_has_the_outputs_and_all_stages_take_part(ranks: Any, alone: Any, key: tuple[int, int]) -> None:
    for stage, _, found in of_mesh(ranks, key):
        assert sorted(found["log_probs"]) == (list(range(NUM_BATCHES)) if stage == key[1] - 1 else [])
        for number, x in found["log_probs"].items():
            torch.testing.assert_close(x, alone["log_probs"][number], rtol=1e-5, atol=1e-5)
        assert found["no gradient"] == []


@each_mesh
def test_slices_join_to_the_weights_of_one_process_bit_for_bit(ranks: Any, alone: Any, key: tuple[int, int]) -> None:
    joined: dict[str, Tensor] = {}
    for stage, tp, found in of_mesh(ranks, key):
        assert found["taken"] and all(found["taken"].values())
        assert tp or not (joined.keys() & found["full"].keys()), stage
        joined |= found["full"] if tp == 0 else {}
        for name, x in found["full"].items():
            assert torch.equal(x, alone["full"][name]), name
    assert joined.keys() == alone["full"].keys()


@each_mesh
def test_a_tied_head_is_a_copy_and_critics_have_none(ranks: Any, key: tuple[int, int]) -> None:
    for stage, _, found in of_mesh(ranks, key):
        first, last = stage == 0, stage == key[1] - 1
        assert ("decoder.embed.weight" in found["names"]) == (first or last)
        assert ("decoder.embed.weight" in found["full"]) == first
        assert ("decoder.embed.weight" in found["critic"]) == first
        assert ("head.weight" in found["critic"]) == last == ("head.weight" in found["head"])


@each_mesh
def test_ranks_send_what_the_page_says(ranks: Any, key: tuple[int, int]) -> None:
    """docs/parallel.md, its table of bytes."""
    (tp, pp), data = key, Batch.concat(batches())
    tokens, actions = len(data.ragged("tokens").values), int(data.ragged("response_mask").values.sum())
    hidden, layers = SPEC.hidden_size, SPEC.num_layers // pp
    for stage, _, found in of_mesh(ranks, key):
        first, last = stage == 0, stage == pp - 1
        states = 4 * layers * tokens - 3 * (tokens - actions) * last + tokens * first + actions * last
        sent = found["sent"]["tp"]
        assert sent.get("all_reduce", 0) == pytest.approx(2 * (tp - 1) / tp * 4 * hidden * states, rel=1e-3)
        assert sent.get("all_gather", 0) == 16 * (tp - 1) * actions * last
        sent = found["sent"]["pp"]
        assert sent.get("activation", 0) == 4 * hidden * tokens * (not last)
        assert sent.get("gradient", 0) == 4 * hidden * tokens * (not first)


def test_a_model_of_one_process_is_read_as_the_loss_asks() -> None:
    network = policy_networks(SOURCE, 1.0)["policy"]
    seen = run_microbatches(network, batches(), lambda n, b, read: (n, len(b), read), WHOLE.pp, train=False, read=len)
    assert seen == {0: (0, 2, 2), 1: (1, 2, 2), 2: (2, 2, 2)}


def test_lines_without_a_mesh_are_whole() -> None:
    assert Lines.of(WorkerContext()) is WHOLE and WHOLE.whole
    assert Lines(dp=Line(4)).whole and not Lines(tp=Line(2)).whole and not Lines(pp=Line(2)).whole
