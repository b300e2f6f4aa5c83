"""Groups of processes that hold a decoder together draw what one process draws.

One gloo group goes through all layouts; every test looks at a part of what it brought back.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

sys.path.append(str(Path(__file__).parents[1] / "workers"))  # as pytest does for the tests there

from ranks import TIMEOUT, in_processes

from hybridflow.core.batch import Batch, Ragged
from hybridflow.core.errors import ContractError, NonFiniteError, UserError
from hybridflow.core.placement import Mesh
from hybridflow.core.roles import WorkerContext
from hybridflow.data.text import Tokenizer
from hybridflow.generation import weights
from hybridflow.generation.engine import Engine
from hybridflow.generation.request import Completion, Request, SamplingParams
from hybridflow.models.decoder import CausalAttention, Decoder, Part, init_weights
from hybridflow.models.policy import TextPolicy
from hybridflow.models.spec import DecoderSpec
from hybridflow.parallel.mesh import ALONE, Line, ProcessMesh
from hybridflow.parallel.shard import cuts
from hybridflow.parallel.tensor import take
from hybridflow.workers.networks import Networks, as_array
from hybridflow.workers.parts import WHOLE, Lines
from hybridflow.workers.publish import Published, checksum
from hybridflow.workers.replica import Replica
from hybridflow.workers.text_sampler import TextSampler

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

WORLD = 4
VOCAB = 131
SPECS = {
    "llama, tied, 8/4 heads": DecoderSpec("llama", VOCAB, 24, 37, 2, 8, 4, 6, 200),
    "qwen2, biases": DecoderSpec("qwen2", VOCAB, 24, 30, 2, 4, 2, 6, 200, tied=False, qkv_bias=True, mlp_bias=True),
    "qwen3, norms": DecoderSpec("qwen3", VOCAB, 20, 26, 2, 4, 4, 8, 200, qk_norm=True, tied=False),
    "6/3 heads": DecoderSpec("llama", VOCAB, 24, 29, 3, 6, 3, 4, 200, output_bias=True),
    "8/1 heads": DecoderSpec("qwen3", VOCAB, 24, 32, 2, 8, 1, 4, 200, qk_norm=True),
}
LAYOUTS = [(2, 1), (1, 2), (2, 2), (4, 1)]
LARGE = {("llama, tied, 8/4 heads", 2), ("6/3 heads", 1), ("8/1 heads", 2)}
"""Of which, in so many pieces, groups of four are tried: they wait long for each other where they share processors."""


class Cell(NamedTuple):
    """A model on a group of tp x pp processes, its slices in so many pieces."""

    spec: str
    tp: int
    pp: int
    pieces: int


CELLS = [
    Cell(name, tp, pp, pieces)
    for name, spec in SPECS.items()
    for tp, pp in LAYOUTS
    for pieces in (1, 2)
    if tp * pieces <= spec.num_heads and (tp * pp < 4 or (name, pieces) in LARGE)
]


def decoder(spec: DecoderSpec, part: Part | None = None) -> Decoder:
    """With sharper distributions than a fresh model has, and biases and norms that matter."""
    made = Decoder(spec, part)
    init_weights(made, torch.Generator().manual_seed(0))
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if parameter.ndim == 2:
                parameter.mul_(3)
            else:
                full = torch.randn(made.shards[name].shape, generator=torch.Generator().manual_seed(len(name)))
                parameter.add_(0.3 * take(full, made.shards[name]))
    return made


def change(model: Decoder) -> None:
    """An optimizer's step."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.05)


def requests(longest: int) -> list[Request]:
    """Three responses each to prompts of which some begin alike, and one each to others."""
    rng = np.random.default_rng(3)
    system = rng.integers(0, VOCAB, 18)
    prompts = [rng.integers(0, VOCAB, 4), *(np.concatenate([system, rng.integers(0, VOCAB, size)]) for size in (3, 9))]
    prompts = [
        *np.repeat(np.array(prompts, object), 3),
        *(rng.integers(0, VOCAB, size) for size in (14, 1, 13, 15, 12, 14)),
    ]
    limits = rng.integers(2, longest + 1, 15)
    return [Request(prompt, index, int(limits[index])) for index, prompt in enumerate(prompts)]


@dataclass(frozen=True)
class Way:
    """How a call draws. ``repacks``: the weights, as for long responses."""

    params: SamplingParams
    prefill_tokens: int = 2048
    positions: int | None = None
    """room of the cache"""
    sequence_parallel: bool = False
    repacks: bool = False


WAYS = {
    "greedy": Way(SamplingParams(8, temperature=0)),
    "sampled, repacked": Way(SamplingParams(8, temperature=0.8), repacks=True),
    "sampled, tight, in chunks": Way(SamplingParams(8), prefill_tokens=15, positions=150),
    "greedy, tight, repacked": Way(SamplingParams(8, temperature=0), positions=150, repacks=True),
    "top-k": Way(SamplingParams(5, top_k=5)),
    "top-p": Way(SamplingParams(5, top_p=0.9, temperature=1.5), repacks=True),
    "tokens cut, too": Way(SamplingParams(5), prefill_tokens=20, sequence_parallel=True),
}


class Drawn(NamedTuple):
    completions: list[Completion]
    counts: dict[str, int]


def generate(way: Way, model: Decoder, pp: Line = ALONE) -> Drawn:
    settings: dict[str, Any] = {"seed": 4, "max_slots": 12, "prefill_tokens": way.prefill_tokens, "pp": pp}
    if way.positions is not None:
        settings["kv_cache_gb"] = way.positions * Engine(model, **settings).position_bytes / 1e9
    engine = Engine(model, **settings)
    with mock.patch.object(weights, "MIN_STEPS", 1 if way.repacks else 1000):
        completions = engine.generate(requests(way.params.max_new_tokens), way.params)
    return Drawn(completions, {"preempted": engine.num_preempted, "reused": engine.num_reused, "steps": engine.num_steps})


def stream(model: Decoder, pp: Line = ALONE) -> list[Completion]:
    """Requests come, one goes, and the weights change between two steps."""
    engine, params, done = Engine(model, seed=1, max_slots=8, pp=pp), SamplingParams(9, temperature=0.9), []
    for request in requests(9)[:9]:
        engine.add(request, params)
    for _ in range(3):
        done += engine.step()
    done.append(engine.abort(7))
    change(model)
    engine.version = 1
    for request in requests(9)[9:12]:
        engine.add(request, params)
    while engine.num_in_flight:
        done += engine.step()
    return sorted(done, key=lambda completion: completion.sample_id)


def broken(model: Decoder, breaks: bool, pp: Line) -> str:
    """What is told on every process when one has a NaN."""
    if breaks:
        with torch.no_grad():
            next(iter(model.layers.children())).out.weight[0, 0] = float("nan")
    engine = Engine(model, seed=1, pp=pp)
    try:
        engine.generate(requests(5), SamplingParams(5))
    except NonFiniteError as error:
        return str(error)
    return "nothing"


def rounded(model: Decoder, pp: Line = ALONE) -> dict[str, list[Completion]]:
    """At lower precisions."""
    params = SamplingParams(5)
    return {
        precision: Engine(model, seed=1, precision=precision, pp=pp).generate(requests(5), params)  # type: ignore[arg-type]
        for precision in ("bfloat16", "int8")
    }


def networks(spec: DecoderSpec, pieces: int) -> Networks:
    def build(lines: Lines = WHOLE) -> dict[str, nn.Module]:
        part = Part() if lines.whole else part_at(spec, lines.tp, lines.pp, pieces)
        return {"policy": TextPolicy(decoder(spec, part))}

    return Networks(build, "policy", ("tokens",), part=build)


def rollout(spec: DecoderSpec, lines: Lines, pieces: int = 1) -> dict[str, Any]:
    """Of a sampler whose weights came from a learner elsewhere."""
    whole = networks(spec, 1).build()["policy"]
    change(whole.decoder)  # type: ignore[arg-type]
    replica = Replica(networks(spec, pieces), lines)
    arrays = {f"policy/{name}": as_array(x) for name, x in whole.named_parameters()}
    replica.load([Published(arrays, checksum(arrays.values()), version=7, stepped=True)], last=True)
    sampler = TextSampler(
        WorkerContext(),
        tokenizer=Tokenizer.characters("0123456789abcdef"),
        params=SamplingParams(6),
        seed=1,
        max_slots=8,
        kv_cache_gb=1e-3,
    )
    sampler.attach(replica)
    asked = requests(6)[:4]
    prompts = Ragged.from_rows([request.prompt for request in asked], np.int64)
    with mock.patch.object(Tokenizer, "decode", lambda self, tokens: str(tokens)):
        out = sampler.rollout(Batch({"prompt": prompts, "sample_id": np.arange(4), "expected_length": np.arange(4)}))
    return {name: out.ragged(name).values for name in ("tokens", "log_probs", "policy_version")}


def part_at(spec: DecoderSpec, tp: Line, pp: Line, pieces: int) -> Part:
    layers = cuts(spec.num_layers, pp.size)[pp.index]
    return Part(layers, first=pp.index == 0, last=pp.index == pp.size - 1, tp=tp, pieces=pieces)


class Outcome(NamedTuple):
    drawn: dict[str, Drawn]
    streamed: list[Completion]
    rounded: dict[str, list[Completion]]
    broken: str
    refused: str
    sent: dict[str, int]
    rollout: dict[str, Any]


def outcome(cell: Cell, lines: ProcessMesh) -> Outcome:
    spec, pp = SPECS[cell.spec], lines.pp
    part = part_at(spec, lines.tp, pp, cell.pieces)
    model = decoder(spec, part)
    cut = decoder(spec, replace(part, sequence_parallel=True))
    drawn = {name: generate(way, cut if way.sequence_parallel else model, pp) for name, way in WAYS.items()}
    for line in (lines.tp, pp):
        line.traffic.clear()
    Engine(model, seed=1, pp=pp).generate([Request(np.arange(5), 0)], SamplingParams(3))
    sent = dict(lines.tp.traffic + pp.traffic)
    low, refused = rounded(model, pp), ""
    try:
        Engine(model, seed=1, pp=pp, kv_cache_gb=1e-6).generate(requests(5), SamplingParams(5))
    except UserError as error:
        refused = str(error)
    sampled = rollout(spec, Lines(tp=lines.tp, pp=pp), cell.pieces)
    streamed = stream(model, pp)
    fails = broken(model, lines.tp.index == lines.tp.size - 1 and pp.index == 0, pp)
    return Outcome(drawn, streamed, low, fails, refused, sent, sampled)


Results = dict[Cell, Outcome]


def everything(rank: int) -> Results:
    groups: dict[tuple[int, ...], Any] = {}
    results: Results = {}
    for tp, pp in LAYOUTS:
        mesh = Mesh(dp=WORLD // (tp * pp), tp=tp, pp=pp)
        lines, block = ProcessMesh(mesh, rank, TIMEOUT, groups), mesh.coordinates(rank)[0]
        cells = [cell for cell in CELLS if (cell.tp, cell.pp) == (tp, pp)]
        results |= {cell: outcome(cell, lines) for cell in cells[block :: mesh.dp]}
    return results


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Results]:
    return in_processes(everything, WORLD, tmp_path_factory.mktemp("ranks"))


@cache
def alone(spec: str, way: str) -> Drawn:
    return generate(WAYS[way], decoder(SPECS[spec]))


@cache
def streamed_alone(spec: str) -> list[Completion]:
    return stream(decoder(SPECS[spec]))


def of(ranks: list[Results], cell: Cell) -> list[Outcome]:
    found = [results[cell] for results in ranks if cell in results]
    assert len(found) == cell.tp * cell.pp
    return found


def difference(ones: Sequence[Completion], others: Sequence[Completion]) -> tuple[int, float]:
    """(responses that part, greatest distance of log-probabilities before they do)."""
    parted, far = 0, [0.0]
    for one, other in zip(ones, others, strict=True):
        assert one.sample_id == other.sample_id
        length = min(len(one.tokens), len(other.tokens))
        differ = np.flatnonzero(one.tokens[:length] != other.tokens[:length])
        same = int(differ[0]) if len(differ) else length
        if len(differ) == 0:
            assert len(one.tokens) == len(other.tokens) and one.finish == other.finish
            assert one.versions.tolist() == other.versions.tolist()
        parted += len(differ) > 0
        far += [float(np.abs(one.log_probs[:same] - other.log_probs[:same]).max(initial=0))]
    return parted, max(far)


each = pytest.mark.parametrize("cell", CELLS, ids=str)


@each
def test_all_processes_of_a_group_have_the_same(ranks: list[Results], cell: Cell) -> None:
    first, *others = of(ranks, cell)
    for other in others:
        for way, drawn in first.drawn.items():
            assert drawn.counts == other.drawn[way].counts
            for one, two in zip(drawn.completions, other.drawn[way].completions, strict=True):
                assert np.array_equal(one.tokens, two.tokens) and np.array_equal(one.log_probs, two.log_probs)


@each
def test_what_one_process_draws(ranks: list[Results], cell: Cell) -> None:
    found, parted = of(ranks, cell)[0], 0
    for way, drawn in found.drawn.items():
        count, far = difference(alone(cell.spec, way).completions, drawn.completions)
        assert far < 1e-5, way
        parted += count
    assert parted <= 1  # of 105: a draw next to the border of two tokens


@each
def test_preemption_and_shared_prefixes_take_place(ranks: list[Results], cell: Cell) -> None:
    drawn = of(ranks, cell)[0].drawn
    assert all(drawn[way].counts["preempted"] > 0 for way, settings in WAYS.items() if settings.positions)
    assert all(counts["reused"] > 0 for _, counts in drawn.values())
    for way, settings in WAYS.items():
        if settings.positions is None:
            assert drawn[way].counts == alone(cell.spec, way).counts


@each
def test_requests_that_come_and_go_while_the_weights_change(ranks: list[Results], cell: Cell) -> None:
    parted, far = difference(streamed_alone(cell.spec), of(ranks, cell)[-1].streamed)
    assert parted == 0 and far < 1e-5
    assert [c.finish for c in of(ranks, cell)[0].streamed].count("abort") == 1


@each
def test_a_sampler_reads_its_part_of_a_learners_weights(ranks: list[Results], cell: Cell) -> None:
    expected = rollout(SPECS[cell.spec], WHOLE)
    for found in of(ranks, cell):
        assert np.array_equal(found.rollout["tokens"], expected["tokens"])
        np.testing.assert_allclose(found.rollout["log_probs"], expected["log_probs"], atol=1e-5)
        assert set(found.rollout["policy_version"].tolist()) == {0, 7}


@each
def test_a_nan_of_one_process_is_told_by_all(ranks: list[Results], cell: Cell) -> None:
    for found in of(ranks, cell):
        assert found.broken.startswith("generate: the log-probabilities of samples [0, 1, 2")


@each
def test_a_cache_that_is_too_small_is_told_by_all(ranks: list[Results], cell: Cell) -> None:
    told = {found.refused for found in of(ranks, cell)}
    assert len(told) == 1 and "over kv_cache_gb 1e-06" in told.pop()


@each
def test_lower_precisions_are_near(ranks: list[Results], cell: Cell) -> None:
    """To what their own tokens have in fp32, in one process."""
    model = decoder(SPECS[cell.spec])
    for precision, completions in of(ranks, cell)[0].rounded.items():
        far = []
        for request, completion in zip(requests(5), completions, strict=True):
            tokens = torch.from_numpy(np.concatenate([request.prompt, completion.tokens]))
            attend = CausalAttention(torch.tensor([len(tokens)]))
            with torch.no_grad():
                logits = decoder_logits(model, tokens, attend)
            exact = logits.log_softmax(-1)[len(request.prompt) - 1 : -1]
            exact = exact.gather(1, torch.from_numpy(completion.tokens)[:, None])[:, 0]
            far.append(np.abs(exact.numpy() - completion.log_probs))
        errors = np.concatenate(far)
        assert errors.mean() < 0.15 and errors.max() > 1e-4, precision


def decoder_logits(model: Decoder, tokens: torch.Tensor, attend: CausalAttention) -> torch.Tensor:
    return model(tokens, attend.positions, attend) @ model.head_weight.T


@each
def test_what_is_sent(ranks: list[Results], cell: Cell) -> None:
    """For a prompt of 5 tokens and 3 new ones: sums of what follows attention and MLP and of embeddings, and for each draw
    the shares of the ranks, its token and its log-probability."""
    spec, states = SPECS[cell.spec], SPECS[cell.spec].hidden_size * 4
    for place, found in enumerate(of(ranks, cell)):
        stage = place // cell.tp
        first, last = stage == 0, stage == cell.pp - 1
        layers = cuts(spec.num_layers, cell.pp)[stage]
        tokens = [5, 1, 1] * first + [n for layer in layers for n in [5 if layer < spec.num_layers - 1 else 1, 1, 1] * 2]
        sums = [n * states for n in tokens] + [8 * cell.tp, 16] * 3 * last
        expected = {
            "all_reduce": sum(2 * size * (cell.tp - 1) // cell.tp for size in sums),
            "send": 0 if last else 7 * states,
            "broadcast": 3 * 16 if last and cell.pp > 1 else 0,
        }
        assert found.sent == {way: size for way, size in expected.items() if size}


def test_an_engine_knows_its_stage() -> None:
    model = decoder(SPECS["qwen2, biases"], Part(range(1), last=False))
    with pytest.raises(ContractError, match="Engine: pp is rank 0 of 1, but the decoder holds"):
        Engine(model, seed=0)
