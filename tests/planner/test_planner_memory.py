"""The formulas against what autograd saves and what torch allocates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import in_processes
from torch import Tensor, nn
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

from hybridflow.core.batch import Batch, Ragged
from hybridflow.core.placement import Mesh
from hybridflow.core.roles import WorkerContext
from hybridflow.models.decoder import Decoder, Part, init_weights
from hybridflow.models.policy import TextCritic, TextPolicy, TextReward
from hybridflow.models.spec import DecoderSpec
from hybridflow.ops.losses import ppo_clip
from hybridflow.parallel.mesh import ProcessMesh
from hybridflow.parallel.pipeline_plan import interleaved, one_f_one_b
from hybridflow.planner.memory import Head, Microbatch, Stage, activation_bytes, forward_bytes, peak_bytes
from hybridflow.workers.learner import Learner, UpdatePlan
from hybridflow.workers.networks import Networks
from hybridflow.workers.optimizer import OptimizerConfig

SPECS = {
    "llama": DecoderSpec("llama", 100, 64, 176, 3, 4, 2, 16, 2048),
    "qwen2": DecoderSpec("qwen2", 100, 64, 176, 3, 6, 2, 16, 2048, qkv_bias=True, tied=False),
    "qwen3": DecoderSpec("qwen3", 100, 64, 176, 3, 4, 4, 32, 2048, qk_norm=True),
}
LENGTHS = {"equal": [8] * 4, "varied": [8, 8, 7, 5], "long": [300, 300], "long varied": [300, 200]}
PROMPT = 3


def batch_of(lengths: list[int], vocab: int) -> tuple[Batch, Microbatch]:
    total, draw = sum(lengths), np.random.default_rng(0)
    mask = np.concatenate([np.arange(n) >= PROMPT for n in lengths])
    like = partial(Ragged, lengths=np.array(lengths))
    batch = Batch(
        {
            "sample_id": np.arange(len(lengths)),
            "tokens": like(draw.integers(0, vocab, total)),
            "response_mask": like(mask),
            "log_probs": like(np.full(total, -1.0, np.float32)),
            "advantages": like(draw.normal(size=total).astype(np.float32)),
        }
    )
    return batch, Microbatch(len(lengths), max(lengths), total, int(mask.sum()))


def network(spec: DecoderSpec, head: Head, dtype: torch.dtype, part: Part | None = None) -> Any:
    decoder = Decoder(spec, part)
    init_weights(decoder, torch.Generator().manual_seed(0))
    decoder = decoder.to(dtype)
    if head == "policy":
        return TextPolicy(decoder)
    return TextCritic(decoder) if head == "value" else TextReward(decoder, torch.ones(1, spec.hidden_size))


def saved_by(model: nn.Module, call: Callable[[], object]) -> int:
    """Bytes that autograd saves, those of parameters aside."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved: dict[int, Tensor] = {}

    def keep(x: Tensor) -> Tensor:
        saved[x.untyped_storage().data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = call()
    assert out is not None
    return sum(x.untyped_storage().nbytes() for place, x in saved.items() if place not in weights)


@pytest.mark.parametrize("family", SPECS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("head", ["policy", "value"])
def test_activations_are_what_autograd_saves(family: str, dtype: torch.dtype, lengths: list[int], head: Head) -> None:
    spec = SPECS[family]
    (batch, micro), model = batch_of(lengths, spec.vocab_size), network(SPECS[family], head, dtype)
    stage = Stage(spec, spec.num_layers, head, itemsize=dtype.itemsize)
    assert activation_bytes(stage, micro) == saved_by(model, lambda: model.outputs(batch))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_stages_of_a_pipeline_save_their_own(dtype: torch.dtype) -> None:
    spec, (batch, micro) = SPECS["llama"], batch_of(LENGTHS["varied"], 100)
    received = torch.randn(micro.tokens, spec.hidden_size, dtype=dtype, requires_grad=True)
    first = network(spec, "policy", dtype, Part(range(0, 2), last=False))
    last = network(spec, "policy", dtype, Part(range(2, 3), first=False))
    stages = [Stage(spec, 2, "policy", last=False, itemsize=dtype.itemsize)]
    stages += [Stage(spec, 1, "policy", first=False, itemsize=dtype.itemsize)]

    def run(model: Any, *inputs: Tensor) -> Any:
        tokens, *rest = model.pack(batch)
        hidden = model.decoder(*(inputs or (tokens,)), *rest)
        return model.read(hidden, batch) if model.decoder.part.last else hidden

    assert activation_bytes(stages[0], micro) == saved_by(first, lambda: run(first))
    held = received.nbytes if dtype == torch.bfloat16 else 0  # no node saves it; the pipeline holds it
    assert activation_bytes(stages[1], micro) == saved_by(last, lambda: run(last, received)) + held


def test_chunks_of_a_rank_save_their_own_and_a_plan_says_how_many_there_are() -> None:
    spec, (batch, micro) = SPECS["llama"], batch_of(LENGTHS["varied"], 100)
    model = network(spec, "policy", torch.float32, Part((range(1, 2), range(2, 3)), first=False))
    stages = Stage(spec, 2, "policy", first=False, chunks=(1, 1)).stages
    received = torch.randn(micro.tokens, spec.hidden_size, requires_grad=True)
    saved = [activation_bytes(stage, micro) for stage in stages]
    assert saved == [saved_by(model, lambda c=c: model.outputs(batch, received, c)) for c in range(2)]
    assert interleaved(2, 2, 4).in_flight(1, saved) == 2 * saved[0] + max(saved)
    assert interleaved(2, 2, 1).in_flight(1, saved) == sum(saved)
    embedded = Stage(spec, 3, "policy", last=False, frozen=3, chunks=(1, 2)).stages
    assert [(one.layers, one.frozen, one.first, one.last) for one in embedded] == [
        (1, 1, True, False),
        (2, 0, False, False),
    ]


def test_frozen_layers_at_the_beginning_save_nothing() -> None:
    spec, (batch, micro) = SPECS["qwen2"], batch_of(LENGTHS["equal"], 100)
    model = network(spec, "policy", torch.float32)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(("decoder.embed", "decoder.layers.0", "decoder.layers.1")))
    stage = Stage(spec, 3, "policy", frozen=2)
    counted = saved_by(model, lambda: model.outputs(batch))
    assert activation_bytes(stage, micro) == counted
    assert activation_bytes(replace(stage, frozen=0), micro) > 1.5 * counted


def _save_on_mesh(rank: int) -> list[tuple[int, int]]:
    found, groups = [], {}
    for (family, spec), sequence, dtype in product(SPECS.items(), (False, True), (torch.float32, torch.bfloat16)):
        line = ProcessMesh(Mesh(tp=2), rank, timedelta(seconds=30), groups).tp
        batch, micro = batch_of(LENGTHS["varied" if family == "llama" else "equal"], spec.vocab_size)
        model = network(spec, "policy", dtype, Part(tp=line, sequence_parallel=sequence))
        stage = Stage(spec, 3, "policy", tp=2, rank=rank, sequence_parallel=sequence, itemsize=dtype.itemsize)
        found.append((activation_bytes(stage, micro), saved_by(model, lambda m=model, b=batch: m.outputs(b))))
    return found


@pytest.mark.slow
def test_ranks_of_tensor_parallelism_save_their_slices(tmp_path: Path) -> None:
    for predicted, counted in chain(*in_processes(_save_on_mesh, 2, tmp_path)):
        assert predicted == pytest.approx(counted, rel=0.02)


@pytest.mark.parametrize("ranks", range(1, 5))
def test_one_forward_one_backward_holds_as_many_microbatches_as_stages_follow(ranks: int) -> None:
    for microbatches, rank in product(range(1, 7), range(ranks)):
        assert one_f_one_b(ranks, microbatches).in_flight(rank) == min(ranks - rank, microbatches)


# ------------------------------------------------------------------------------------------------------------------- peaks

WIDE = DecoderSpec("llama", 4096, 128, 344, 4, 4, 2, 32, 2048)


def allocated(call: Callable[[], object]) -> int:
    """The most that torch allocates at once in a call, beyond what was there; what was there before may be freed."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        call()
    results = recorded.profiler.kineto_results
    pending, events = list(results.experimental_event_tree()), []
    while pending:
        event = pending.pop()
        pending += event.children
        if event.tag == _EventType.Allocation:
            events.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
    sizes: dict[int, int] = {}
    live = most = 0
    for _, place, size in sorted(events, key=lambda event: event[0]):
        live += size if size > 0 else -sizes.pop(place, 0)
        if size > 0:
            sizes[place] = size
        most = max(most, live)
    return most


def learner(head: Head, dtype: torch.dtype, checkpointing: bool, token_budget: int) -> Learner:
    def build() -> dict[str, nn.Module]:
        model = network(WIDE, head, dtype)
        model.decoder.activation_checkpointing = checkpointing
        return {"main": model}

    networks, plan = Networks(build, "main", ("tokens",)), UpdatePlan(token_budget=token_budget)
    return Learner(WorkerContext(), networks=networks, optimizer=OptimizerConfig(), plan=plan, total_steps=10, seed=0)


@pytest.mark.parametrize(
    ("dtype", "checkpointing", "budget"),
    [
        (torch.float32, False, 1024),
        (torch.float32, False, 256),
        (torch.float32, True, 1024),
        (torch.float32, True, 256),
        (torch.bfloat16, False, 256),
        (torch.bfloat16, False, 4096),
    ],
)
def test_a_step_allocates_what_is_predicted(dtype: torch.dtype, checkpointing: bool, budget: int) -> None:
    worker = learner("policy", dtype, checkpointing, budget)
    batch, whole = batch_of([32] * 32, WIDE.vocab_size)
    worker.update(batch, ppo_clip.bind(clip=0.2))  # makes the optimizer's states
    gradients = 4 * sum(parameter.numel() for parameter in worker.model.parameters())
    rows = min(whole.rows, budget // whole.width)
    micro = Microbatch(rows, whole.width, rows * whole.width, rows * (whole.width - PROMPT))
    stage = Stage(WIDE, 4, "policy", itemsize=dtype.itemsize, checkpointing=checkpointing)
    predicted = peak_bytes(stage, micro, gradients, one_f_one_b(1, whole.rows // rows), 0)
    # The gradients of the step before were there already, and are dropped first.
    assert allocated(lambda: worker.update(batch, ppo_clip.bind(clip=0.2))) == pytest.approx(predicted, rel=0.1)


@pytest.mark.parametrize(
    ("head", "dtype"), [("policy", torch.float32), ("value", torch.float32), ("policy", torch.bfloat16)]
)
def test_a_pass_without_gradients_allocates_what_is_predicted(head: Head, dtype: torch.dtype) -> None:
    worker = learner(head, dtype, False, 4096)
    batch, micro = batch_of([32] * 32, WIDE.vocab_size)
    verb = worker.compute_log_probs if head == "policy" else worker.compute_values
    predicted = forward_bytes(Stage(WIDE, 4, head, itemsize=dtype.itemsize), micro)
    assert allocated(lambda: verb(batch)) == pytest.approx(predicted, rel=0.1)
