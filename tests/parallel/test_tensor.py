"""Tensor-parallel ranks compute what one process does: outputs, gradients, their norm, and the model that they hold.

One group of processes goes through all meshes and models; every test looks at a part of what it brought back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import TIMEOUT, in_processes
from torch import Tensor, nn

from hybridflow.core.batch import Batch, Ragged
from hybridflow.core.placement import Mesh
from hybridflow.core.seeding import torch_generator
from hybridflow.models.decoder import CausalAttention, Decoder, Part, init_weights, sum_tied
from hybridflow.models.policy import TextCritic, TextPolicy, TextReward, network_shards
from hybridflow.models.spec import DecoderSpec
from hybridflow.models.weights import load_decoder, save_decoder
from hybridflow.ops.log_probs import log_probs_and_entropy
from hybridflow.parallel.mesh import ALONE, Line, ProcessMesh
from hybridflow.parallel.shard import cuts
from hybridflow.parallel.tensor import VocabShard, gradient_norm, sum_shared, take
from hybridflow.workers.parts import Cut, Lines

MOST = 4
SPECS = {
    "llama, 9/3 heads": DecoderSpec("llama", 31, 20, 26, 2, 9, 3, 4, 64),
    "llama, untied, biases": DecoderSpec(
        "llama", 29, 16, 21, 2, 8, 4, 4, 64, tied=False, qkv_bias=True, output_bias=True, mlp_bias=True
    ),
    "qwen2": DecoderSpec("qwen2", 33, 16, 22, 2, 4, 2, 6, 64, tied=False, qkv_bias=True),
    "qwen3, 1 kv head": DecoderSpec("qwen3", 30, 18, 23, 2, 6, 1, 4, 64, qk_norm=True),
}
CASES = [(name, tp, sequence) for name in SPECS for tp in (2, 3, 4) for sequence in (False, True)]
ROWS = {"odd": ([5, 9, 3], 2), "even": ([4, 4, 4, 4], 1), "fewer tokens than ranks": ([3], 2)}


def rows(kind: str, vocab_size: int) -> Batch:
    lengths, prompt = np.array(ROWS[kind][0]), ROWS[kind][1]
    tokens = np.random.default_rng(7).integers(0, vocab_size, lengths.sum())
    mask = np.concatenate([np.arange(length) >= prompt for length in lengths])
    return Batch({"tokens": Ragged(tokens, lengths), "response_mask": Ragged(mask, lengths)})


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch_generator(seed, "test", *shape))


def weigh(outputs: dict[str, Tensor]) -> Tensor:
    """A loss that uses every output."""
    parts = [(value * random(*value.shape, seed=place)).mean() for place, value in enumerate(outputs.values())]
    return torch.stack(parts).sum()


def decoder(spec: DecoderSpec, part: Part | None = None) -> Decoder:
    """Norms and biases are random, too."""
    made = Decoder(spec, part)
    init_weights(made, torch.Generator().manual_seed(0))
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.endswith(("norm.weight", "bias")):
                shard = made.shards[name]
                parameter.add_(take(random(*shard.shape, seed=len(name)) * 0.3, shard))
    return made


def policy(body: Decoder) -> nn.Module:
    return TextPolicy(body, temperature=0.7)


def critic(body: Decoder) -> nn.Module:
    network = TextCritic(body)
    with torch.no_grad():
        network.head.weight.copy_(random(1, body.spec.hidden_size))
    return network


def reward(body: Decoder) -> nn.Module:
    return TextReward(body, random(1, body.spec.hidden_size, seed=3))


class Run(NamedTuple):
    loss: float
    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor]
    norm: float


def run(network: Any, kind: str, line: Line = ALONE) -> Run:
    outputs = network.outputs(rows(kind, network.decoder.spec.vocab_size))
    loss = weigh(outputs)
    loss.backward()
    gradients = {name: p.grad for name, p in network.named_parameters() if p.grad is not None}
    shards = network_shards(network)
    sum_shared(line, gradients, shards)
    norm = gradient_norm(gradients, shards, [line])
    return Run(float(loss), {name: value.detach() for name, value in outputs.items()}, gradients, float(norm))


@cache
def run_alone(spec: DecoderSpec, make: Any, kind: str) -> Run:
    return run(make(decoder(spec)), kind)


class Difference(NamedTuple):
    """Of a rank from one process: of the loss, of outputs, of gradients relative to their greatest number, of the norm."""

    loss: float
    outputs: float
    gradients: dict[str, float]
    norm: float


def difference(here: Run, alone: Run, shards: dict[str, Any]) -> Difference:
    assert here.gradients.keys() == alone.gradients.keys()
    gradients = {}
    for name, full in alone.gradients.items():
        error = (here.gradients[name] - take(full, shards[name])).abs()
        gradients[name] = float(error.max() / full.abs().max().clamp(min=1e-6)) if error.numel() else 0.0
    outputs = max(float((here.outputs[name] - value).abs().max()) for name, value in alone.outputs.items())
    norm = abs(here.norm / float(nn.utils.get_total_norm(alone.gradients.values())) - 1)
    return Difference(abs(here.loss - alone.loss) / max(1, abs(alone.loss)), outputs, gradients, norm)


OTHER_USES = {
    "llama, 9/3 heads": (("even", policy), ("odd", critic)),
    "llama, untied, biases": (("fewer tokens than ranks", policy), ("odd", reward)),
}

# ------------------------------------------------------------------------------------------------- what every rank brings


def equality(mesh: ProcessMesh, name: str, sequence: bool) -> dict[str, Any]:
    part, found = Part(tp=mesh.tp, sequence_parallel=sequence), {}
    for kind, make in (("odd", policy), *OTHER_USES.get(name, ())):
        spec = replace(SPECS[name], tied=True) if make is reward else SPECS[name]
        body = decoder(spec, part)
        body.activation_checkpointing = kind == "even"
        network = make(body)
        here = run(network, kind, mesh.tp)
        alone = run_alone(spec, make, kind)
        shards = network_shards(network)
        copies = {key: gradient for key, gradient in here.gradients.items() if shards[key].whole}
        found[f"{make.__name__}, {kind}"] = difference(here, alone, shards), here.outputs | copies
    return found


def model(mesh: ProcessMesh, name: str, folder: Path) -> dict[str, bool]:
    """Initial weights, those of a folder, and full tensors from slices: whether they are right to the last bit."""
    spec, part = SPECS[name], Part(tp=mesh.tp)
    whole, stored = Decoder(spec), load_decoder(folder / name)
    init_weights(whole, torch.Generator().manual_seed(3))
    fresh, loaded = Decoder(spec, part), load_decoder(folder / name, part=part)
    init_weights(fresh, torch.Generator().manual_seed(3))
    network, full = TextPolicy(loaded), dict(TextPolicy(stored).named_parameters())
    cut = Cut(network, Lines(tp=mesh.tp))
    moments = {key: x.detach() * 2 for key, x in network.named_parameters() if "norm" not in key}
    return {
        "init": same(fresh.named_parameters(), slices(whole, fresh)),
        "load": same(loaded.named_parameters(), slices(stored, loaded)),
        "gather": same(cut.full(dict(network.named_parameters())).items(), full.items()),
        "moments": same(cut.full(moments).items(), ((key, 2 * x) for key, x in full.items() if "norm" not in key)),
    }


def slices(whole: Decoder, part: Decoder) -> Iterator[tuple[str, Tensor]]:
    return ((name, take(parameter, part.shards[name])) for name, parameter in whole.named_parameters())


def same(left: Any, right: Any) -> bool:
    pairs = [*zip(left, right, strict=True)]
    return bool(pairs) and all(a[0] == b[0] and torch.equal(a[1], b[1]) for a, b in pairs)


def rounded(mesh: ProcessMesh, sequence: bool) -> Run:
    spec = SPECS["llama, 9/3 heads"]
    return run(policy(decoder(spec, Part(tp=mesh.tp, sequence_parallel=sequence)).bfloat16()), "odd", mesh.tp)


def stages(mesh: ProcessMesh, tied: bool) -> tuple[Difference, list[int]]:
    """Two pipeline stages over two lines of tensor-parallel ranks; the states and their gradients go between them."""
    spec = replace(SPECS["qwen2"], tied=tied)
    first = mesh.pp.index == 0
    part = Part(range(0, 1) if first else range(1, 2), first, not first, tp=mesh.tp, sequence_parallel=True)
    network = TextPolicy(decoder(spec, part), temperature=0.7)
    batch = rows("odd", spec.vocab_size)
    packed = network.pack(batch)
    peer = mesh.rank + (1 if first else -1) * mesh.mesh.tp
    if first:
        states = network.decoder(*packed)
        dist.send(states.detach(), peer)
        gradient = torch.empty_like(states)
        dist.recv(gradient, peer)
        states.backward(gradient)
        loss, outputs = 0.0, {}
    else:
        states = torch.empty(network.decoder.num_states(len(packed.tokens)), spec.hidden_size)
        dist.recv(states, peer)
        outputs = network.read(network.decoder(states.requires_grad_(), *packed[1:]), batch)
        weighed = weigh(outputs)
        weighed.backward()
        assert states.grad is not None
        dist.send(states.grad, peer)
        loss = float(weighed)
    gradients = {name: p.grad for name, p in network.named_parameters() if p.grad is not None}
    shards = network_shards(network)
    sum_shared(mesh.tp, gradients, shards)
    sum_tied(network.decoder, {name.removeprefix("decoder."): x for name, x in gradients.items()}, mesh.pp)
    norm = float(gradient_norm(gradients, shards, [mesh.tp, mesh.pp]))
    alone = run_alone(spec, policy, "odd")
    mine = {name: x for name, x in alone.gradients.items() if name in gradients}
    error = difference(
        Run(loss or alone.loss, outputs or alone.outputs, gradients, norm), alone._replace(gradients=mine), shards
    )
    norm_error = abs(norm / float(nn.utils.get_total_norm(alone.gradients.values())) - 1)
    return error._replace(norm=norm_error), [len(states), len(mine)]


def log_probs(mesh: ProcessMesh) -> dict[str, float]:
    """Against the whole vocabulary, in fp64; the targets of some ranks are rare, the logits far apart."""
    found, line = {}, mesh.tp
    hidden, weight, targets = random(13, 5, seed=4).double() * 9, random(11, 5).double(), torch.arange(13) % 5
    coefs = random(2, 13)
    rows = cuts(11, line.size)[line.index]
    for chunk in (None, 1, 5, 100):
        for entropy in (True, False):
            results = []
            for shard in (VocabShard(line, 11), None):
                x = hidden.clone().requires_grad_()
                matrix = (
                    weight.clone().requires_grad_() if shard is None else weight[rows.start : rows.stop].requires_grad_()
                )
                values = log_probs_and_entropy(
                    x, matrix, targets, temperature=0.7, chunk_tokens=chunk, shard=shard, entropy=entropy
                )
                sum((value * coef).sum() for value, coef in zip(values, coefs, strict=True) if value is not None).backward()
                gradient = matrix.grad if shard else matrix.grad[rows.start : rows.stop]
                results.append([value for value in (*values, x.grad, gradient) if value is not None])
            errors = [float((a - b).abs().max()) for a, b in zip(*results, strict=True)]
            found[f"{chunk}, {entropy}"] = max(errors)
    return found


def traffic(mesh: ProcessMesh, sequence: bool) -> dict[str, int]:
    """What a rank sends forward and backward through the decoder, by method: in units of tokens x hidden size / ranks."""
    spec, line = SPECS["llama, 9/3 heads"], mesh.tp
    body, attention = decoder(spec, Part(tp=line, sequence_parallel=sequence)), CausalAttention(torch.tensor([5, 7]))
    line.traffic.clear()
    body(torch.arange(12), attention.positions, attention).sum().backward()
    assert not any(count % (4 * 12 * spec.hidden_size // line.size) for count in line.traffic.values())
    return {method: count // (4 * 12 * spec.hidden_size // line.size) for method, count in line.traffic.items()}


def collectives(mesh: ProcessMesh) -> dict[str, bool]:
    """On tensors that don't lie row by row, of a line whose ranks have uneven parts, one of them none."""
    line, found = mesh.tp, {}
    sizes = [3, 0, 1, 2][: line.size]
    whole = [random(sum(sizes), 4, seed=rank) for rank in range(line.size)]
    mine = whole[line.index]
    expected = torch.stack(whole).sum(0)
    parts = [torch.split(x, sizes)[rank] for rank, x in enumerate(whole)]

    def close(a: Tensor, b: Tensor) -> bool:
        return torch.allclose(a, b, rtol=1e-6, atol=1e-6)

    def strided(x: Tensor) -> Tensor:
        """The same numbers; how they lie depends on the rank."""
        return x.t().contiguous().t() if line.index % 2 else x.clone()

    found["all-reduce"] = close(line.all_reduce(strided(mine)), expected)
    found["all-gather"] = torch.equal(line.all_gather(strided(parts[line.index]), sizes), torch.cat(parts))
    found["reduce-scatter"] = close(line.reduce_scatter(strided(mine), sizes), torch.split(expected, sizes)[line.index])
    peer = line.size - 1 if line.index == 0 else 0
    if line.index in (0, line.size - 1):
        found["add"] = close(line.add(strided(mine), peer), mine + whole[peer])
    return found


def everything(folder: Path, rank: int) -> dict[Any, Any]:
    """Meshes of 1 to 4 tensor-parallel ranks; where there are few, several lines do the same."""
    found: dict[Any, Any] = {}
    groups: dict[tuple[int, ...], Any] = {}
    for tp in (1, 2, 3, 4):
        mesh = ProcessMesh(Mesh(dp=MOST // tp, tp=tp), rank, TIMEOUT, groups)
        found["lines", tp] = [(line.size, line.index) for line in (mesh.dp, mesh.tp, mesh.pp)]
        if rank >= mesh.mesh.size:
            continue
        for name, _, sequence in (case for case in CASES if case[1] == tp):
            found[name, tp, sequence] = equality(mesh, name, sequence)
        for name in SPECS:
            found["model", name, tp] = model(mesh, name, folder)
        for sequence in (False, True):
            found["bf16", tp, sequence] = rounded(mesh, sequence)
        found["log_probs", tp] = log_probs(mesh)
        if tp > 1:
            found["collectives", tp] = collectives(mesh)
            found["traffic", tp] = [traffic(mesh, sequence) for sequence in (False, True)]
    mesh = ProcessMesh(Mesh(pp=2, tp=2), rank, TIMEOUT, groups)
    found["lines", "pp"] = [(line.size, line.index) for line in (mesh.dp, mesh.tp, mesh.pp)]
    for tied in (False, True):
        found["stages", tied] = stages(mesh, tied)
    found["groups"] = [group for group in groups if groups[group] is dist.group.WORLD]
    return found


# ---------------------------------------------------------------------------------------------------------------- tests


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    for name, spec in SPECS.items():
        save_decoder(decoder(spec), folder / name)
    return in_processes(partial(everything, folder), MOST, folder)


@pytest.mark.parametrize(("name", "tp", "sequence"), CASES)
def test_outputs_and_gradients_are_those_of_one_process(
    ranks: list[dict[Any, Any]], name: str, tp: int, sequence: bool
) -> None:
    members = ranks[: MOST // tp * tp]
    assert len(members) >= tp
    for found in members:
        for what, (error, same_everywhere) in found[name, tp, sequence].items():
            assert error.loss < 1e-6 and error.outputs < 3e-6, (what, error)
            assert {key: x for key, x in error.gradients.items() if not x < 1e-5} == {}, what
            assert error.norm < 1e-6, (what, error.norm)
            others = members[0][name, tp, sequence][what][1]
            assert len(others) > 6
            assert [key for key, value in same_everywhere.items() if not torch.equal(value, others[key])] == [], what


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
@pytest.mark.parametrize("name", SPECS)
def test_weights_do_not_depend_on_the_mesh(ranks: list[dict[Any, Any]], name: str, tp: int) -> None:
    right = {"init": True, "load": True, "gather": True, "moments": True}
    assert [found["model", name, tp] for found in ranks[: MOST // tp * tp]] == [right] * (MOST // tp * tp)


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("tp", [2, 3, 4])
def test_bfloat16_differs_by_its_rounding(ranks: list[dict[Any, Any]], tp: int, sequence: bool) -> None:
    alone, here = ranks[0]["bf16", 1, False], ranks[0]["bf16", tp, sequence]
    assert float((here.outputs["log_probs"] - alone.outputs["log_probs"]).abs().max()) < 0.1
    assert here.norm == pytest.approx(alone.norm, rel=0.05)


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_log_probs_need_no_logits_of_other_ranks(ranks: list[dict[Any, Any]], tp: int) -> None:
    for found in ranks[: MOST // tp * tp]:
        assert {what: error for what, error in found["log_probs", tp].items() if not error < 1e-10} == {}


@pytest.mark.parametrize("tp", [2, 3, 4])
def test_collectives(ranks: list[dict[Any, Any]], tp: int) -> None:
    for found in ranks[: MOST // tp * tp]:
        assert all(found["collectives", tp].values()), found["collectives", tp]


@pytest.mark.parametrize("tp", [2, 3, 4])
def test_what_is_sent_is_what_the_formula_says(ranks: list[dict[Any, Any]], tp: int) -> None:
    """An all-reduce sends 2 (tp - 1) / tp of a tensor, the others half of it. Each of the two layers has two forward and
    two backward, or twice that of the others; the embedding and the end of the decoder have one each."""
    layers, unit = 2, tp - 1
    whole = {"all_reduce": (4 * layers + 1) * 2 * unit}
    cut = {"reduce_scatter": (4 * layers + 1) * unit, "all_gather": (4 * layers + 2) * unit}
    assert [found["traffic", tp] for found in ranks[: MOST // tp * tp]] == [[whole, cut]] * (MOST // tp * tp)


@pytest.mark.parametrize("tied", [False, True])
def test_stages_of_a_pipeline_with_sequence_parallelism(ranks: list[dict[Any, Any]], tied: bool) -> None:
    for rank, found in enumerate(ranks):
        error, (num_states, num_gradients) = found["stages", tied]
        assert num_states == (8, 9)[rank % 2]
        assert num_gradients == (8 if rank < 2 else 9)
        assert error.loss < 1e-6 and error.outputs < 3e-6 and error.norm < 1e-6, error
        assert {key: x for key, x in error.gradients.items() if not x < 1e-5} == {}


def test_lines_of_a_mesh(ranks: list[dict[Any, Any]]) -> None:
    assert [found["lines", 2] for found in ranks] == [[(2, d), (2, t), (1, 0)] for d in (0, 1) for t in (0, 1)]
    assert [found["lines", 3] for found in ranks] == [[(1, 0), (3, t), (1, 0)] for t in range(3)] + [[(1, 0)] * 3]
    assert [found["lines", "pp"] for found in ranks] == [[(1, 0), (2, t), (2, p)] for p in (0, 1) for t in (0, 1)]
    assert [found["groups"] for found in ranks] == [[(0, 1, 2, 3)]] * MOST


def test_a_line_of_one_needs_no_processes() -> None:
    mesh = ProcessMesh(Mesh(), 0, TIMEOUT)
    assert mesh.dp == mesh.tp == mesh.pp == ALONE
    x = random(3)
    assert ALONE.all_reduce(x) is x and ALONE.all_gather(x, [3]) is x and ALONE.reduce_scatter(x, [3]) is x
