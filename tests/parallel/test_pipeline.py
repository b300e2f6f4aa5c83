"""A pipeline over processes computes what one process does, and holds what its plan says."""

from __future__ import annotations

import re
import time
import weakref
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import TIMEOUT, in_processes
from torch import Tensor, nn

from hybridflow.core.errors import ContractError, WorkerError
from hybridflow.core.seeding import torch_generator
from hybridflow.parallel.pipeline import Stage, Wire, run_pipeline
from hybridflow.parallel.pipeline_plan import Plan, forward_only, gpipe, interleaved, one_f_one_b
from hybridflow.parallel.shard import cuts

MOST, BROKEN, LAYERS, HIDDEN, VOCAB = 4, 3, 9, 6, 11
MICROBATCHES = (0, 1, 2, 4, 5, 7)
PLANS: dict[str, Callable[[int, int], Plan]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": lambda ranks, microbatches: interleaved(ranks, 2, microbatches),
}
RANKS = [(size, rank) for size in range(1, MOST + 1) for rank in range(size)]
Results = list[dict[Any, Any]]


class Line(NamedTuple):
    group: Any
    rank: int
    size: int


class Layer(nn.Module):
    """A residual that mixes tokens; the output of every other one has the strides of a transposed tensor."""

    def __init__(self, transposed: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)
        self.transposed = transposed

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(torch.tanh(self.up(x.cumsum(0) / 4)))
        return x.t().contiguous().t() if self.transposed else x


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB)
        self.layers = nn.ModuleList(Layer(layer % 2 == 0) for layer in range(LAYERS))
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                parameter.copy_(torch.randn(parameter.shape, generator=torch_generator(3, "toy", number)) / 3)
        self.to(dtype)

    def part(self, layers: range, tokens: Tensor, x: Tensor | None) -> Tensor:
        """The first stage embeds, the last one gives the log-probability of every token."""
        x = self.embed(tokens) if x is None else x
        for layer in layers:
            x = self.layers[layer](x)
        if layers.stop < LAYERS:
            return x
        return self.head(x).log_softmax(-1).gather(-1, tokens[:, None]).squeeze(-1)

    def gradients(self) -> dict[str, Tensor]:
        return {name: parameter.grad for name, parameter in self.named_parameters() if parameter.grad is not None}


class Held:
    """Of how many (chunk, microbatch) anything is saved for the way back, and how many outputs are in memory."""

    def __init__(self) -> None:
        self.now, self.saved, self.most = (0, 0), Counter[tuple[int, int]](), 0
        self.outputs: list[weakref.ref[Any]] = []
        self.most_outputs, self.traffic = 0, Counter[str]()

    def pack(self, tensor: Tensor) -> Saved:
        saved = Saved(self, tensor)
        self.most = max(self.most, len(self.saved))
        return saved

    def watch(self, output: Tensor) -> Tensor:
        self.outputs = [alive for alive in self.outputs if alive() is not None]
        self.outputs.append(weakref.ref(output.untyped_storage()))
        self.most_outputs = max(self.most_outputs, len(self.outputs))
        return output


class Saved:
    """A tensor that a graph holds, counted from when it is saved to when the graph lets go of it."""

    def __init__(self, held: Held, tensor: Tensor) -> None:
        self.saved, self.key, self.tensor = held.saved, held.now, tensor
        self.saved[self.key] += 1

    def __del__(self) -> None:
        self.saved[self.key] -= 1
        if not self.saved[self.key]:
            del self.saved[self.key]


def data(microbatches: int, seed: int) -> list[Tensor]:
    """Sequences of different lengths; the third one has no tokens."""
    rng = np.random.default_rng(seed)
    lengths = [0 if m == 2 else int(rng.integers(1, 9)) for m in range(microbatches)]
    return [torch.from_numpy(rng.integers(VOCAB, size=length)) for length in lengths]


def parts(plan: Plan, rank: int) -> list[range]:
    return [cuts(LAYERS, plan.stages)[chunk * plan.ranks + rank] for chunk in range(plan.chunks)]


def stages_of(model: Model, plan: Plan, rank: int, tokens: list[Tensor], held: Held) -> list[Stage]:
    total = sum(map(len, tokens))

    def run(chunk: int, layers: range, microbatch: int, received: Tensor | None) -> Tensor:
        held.now = chunk, microbatch
        out = held.watch(model.part(layers, tokens[microbatch], received))
        return -out.sum() / total if plan.trains and layers.stop == LAYERS else out

    return [partial(run, chunk, layers) for chunk, layers in enumerate(parts(plan, rank))]


def run_line(line: Line, plan: Plan, model: Model, tokens: list[Tensor], held: Held) -> dict[int, Tensor]:
    dtype = model.head.weight.dtype
    wire = Wire(
        line.group, line.rank, line.size, lambda m: (len(tokens[m]), HIDDEN), dtype, torch.device("cpu"), held.traffic
    )
    with torch.autograd.graph.saved_tensors_hooks(held.pack, lambda saved: saved.tensor):
        return run_pipeline(plan, stages_of(model, plan, line.rank, tokens, held), wire)


def one_process(model: Model, tokens: list[Tensor]) -> list[Tensor]:
    total, losses = sum(map(len, tokens)), []
    for each in tokens:
        loss = -model.part(range(LAYERS), each, None).sum() / total
        loss.backward()
        losses.append(loss.detach())
    return losses


def differences(model: Model, reference: Model, layers: list[range]) -> list[str]:
    """Gradients that are missing, that belong elsewhere, or that differ by more than the order of a sum explains."""
    names = tuple(f"layers.{layer}." for part in layers for layer in part)
    names += ("embed.",) * any(part.start == 0 for part in layers) + ("head.",) * any(
        part.stop == LAYERS for part in layers
    )
    got, own = model.gradients(), {key: grad for key, grad in reference.gradients().items() if key.startswith(names)}
    wrong = sorted(got.keys() ^ own.keys())
    for key in got.keys() & own.keys():
        if float((got[key] - own[key]).abs().max()) > 1e-6 * float(own[key].abs().max()):
            wrong.append(key)
    return wrong


def compare(line: Line, microbatches: int, dtype: torch.dtype) -> dict[str, Any]:
    """Every plan on two batches of other lengths: what is wrong, and what was held, by plan."""
    reference, batches = Model(dtype), [data(microbatches, seed) for seed in (0, 1)]
    expected = [dict(enumerate(one_process(reference, tokens))) for tokens in batches]
    wrong: list[Any] = []
    held_of, outputs_of = Counter[str](), Counter[str]()
    for name, make in PLANS.items():
        plan, model = make(line.size, microbatches), Model(dtype)
        for tokens, losses in zip(batches, expected, strict=True):
            held = Held()
            got = run_line(line, plan, model, tokens, held)
            if got != (losses if line.rank == line.size - 1 else {}):
                wrong.append((name, got, losses))
            stages = [layers for layers in parts(plan, line.rank) if line.size > 1]
            sent = sum(map(len, tokens)) * HIDDEN * dtype.itemsize
            traffic = sent * sum(part.stop < LAYERS for part in stages), sent * sum(part.start > 0 for part in stages)
            if (held.traffic["activation"], held.traffic["gradient"]) != traffic:
                wrong.append((name, held.traffic, traffic))
            if held.saved:
                wrong.append((name, "left over", held.saved))
            held_of[name], outputs_of[name] = max(held_of[name], held.most), max(outputs_of[name], held.most_outputs)
        wrong += [(name, key) for key in differences(model, reference, parts(plan, line.rank))]
    return {"wrong": wrong, "held": held_of, "outputs": outputs_of}


def values(line: Line, chunks: int, microbatches: int) -> dict[str, Any]:
    """Log-probabilities, without a way back."""
    plan, model, tokens, held = forward_only(line.size, chunks, microbatches), Model(), data(microbatches, 5), Held()
    out = run_line(line, plan, model, tokens, held)
    expected = [model.part(range(LAYERS), each, None) for each in tokens] if line.rank == line.size - 1 else []
    wrong = [m for m, each in enumerate(expected) if out[m].requires_grad or not torch.equal(out[m], expected[m])]
    return {"wrong": wrong, "number": len(out), "saved": sum(held.saved.values()), "outputs": held.most_outputs}


def broken(line: Line) -> tuple[str, str, float]:
    """The second rank fails at its last microbatch: which error each rank raises, and after how long."""
    plan, tokens, model = one_f_one_b(line.size, 4), data(4, 0), Model()

    def fails(*_: object) -> Tensor:
        raise ZeroDivisionError("a stage broke")

    if line.rank == 1:
        model.part = lambda layers, each, x: fails() if each is tokens[3] else Model.part(model, layers, each, x)
    start = time.monotonic()
    try:
        run_line(line, plan, model, tokens, Held())
    except (ZeroDivisionError, WorkerError) as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "none", "", 0.0


def on_lines(rank: int) -> dict[Any, Any]:
    """Every case on lines of the first 1, 2, ... ranks; the broken one on a group of its own, which is of no use then."""
    results: dict[Any, Any] = {}
    for size in range(1, MOST + 1):
        group: Any = None if size in (1, MOST) else dist.new_group(list(range(size)), TIMEOUT)
        if rank < size:
            line = Line(group, rank, size)
            results["bfloat16", size] = compare(line, 5, torch.bfloat16)
            results["train", size] = {m: compare(line, m, torch.float32) for m in MICROBATCHES}
            results["values", size] = {(chunks, m): values(line, chunks, m) for chunks in (1, 2) for m in MICROBATCHES}
    dist.barrier()
    short: Any = dist.new_group(list(range(BROKEN)), timedelta(seconds=3))
    if rank < BROKEN:
        results["broken"] = broken(Line(short, rank, BROKEN))
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return in_processes(on_lines, MOST, tmp_path_factory.mktemp("pipeline"))


@pytest.mark.parametrize(("size", "rank"), RANKS)
def test_losses_and_gradients_are_those_of_one_process(results: Results, size: int, rank: int) -> None:
    assert {m: case["wrong"] for m, case in results[rank]["train", size].items()} == {m: [] for m in MICROBATCHES}
    assert results[rank]["bfloat16", size]["wrong"] == []


@pytest.mark.parametrize(("size", "rank"), RANKS)
def test_a_rank_holds_the_activations_that_its_plan_says(results: Results, size: int, rank: int) -> None:
    for m, case in results[rank]["train", size].items():
        assert case["held"]["gpipe"] == m
        assert case["held"]["1f1b"] == min(m, size - rank)
        assert case["held"]["interleaved"] == interleaved(size, 2, m).in_flight(rank)


@pytest.mark.parametrize(("size", "rank"), RANKS)
def test_outputs_are_freed_once_they_are_sent(results: Results, size: int, rank: int) -> None:
    for m, case in results[rank]["train", size].items():
        assert max(case["outputs"].values()) <= min(2 * m, 3)  # a new one beside two that are under way


@pytest.mark.parametrize(("size", "rank"), RANKS)
def test_forward_only_gives_what_one_process_gives_and_holds_nothing(results: Results, size: int, rank: int) -> None:
    last = rank == size - 1
    for (_, m), case in results[rank]["values", size].items():
        assert (case["wrong"], case["number"], case["saved"]) == ([], m if last else 0, 0)
        assert last or case["outputs"] <= 3


def test_an_error_stops_its_stage_and_the_others_at_the_timeout(results: Results) -> None:
    errors = [results[rank]["broken"] for rank in range(BROKEN)]
    assert errors[1][:2] == ("ZeroDivisionError", "a stage broke")
    for rank, what in {0: "gradient", 2: "activation"}.items():
        kind, message, seconds = errors[rank]
        assert kind == "WorkerError"
        # What rank 1 was still sending when it broke is lost with it: which microbatch is missed first is up to timing.
        assert re.match(
            rf"pipeline rank {rank}: the {what} of microbatch [0-3] from rank 1 for rank {rank} never came", message
        )
        assert 2 < seconds < TIMEOUT.seconds


def here(shape: tuple[int, ...] = (2, HIDDEN), dtype: torch.dtype = torch.float32) -> Wire:
    return Wire(None, 0, 1, lambda m: shape, dtype, torch.device("cpu"))


def test_a_stage_that_nothing_is_trained_in_has_no_way_back() -> None:
    weight, seen = torch.ones(HIDDEN, requires_grad=True), []

    def second(microbatch: int, received: Tensor | None) -> Tensor:
        assert received is not None
        seen.append(received)
        return (received * weight).sum()

    losses = run_pipeline(interleaved(1, 2, 2), [lambda m, received: torch.full((2, HIDDEN), m + 1.0), second], here())
    assert [losses[m].item() for m in (0, 1)] == [12, 24] and not losses[0].requires_grad
    assert weight.grad is not None and weight.grad.tolist() == [6] * HIDDEN
    assert all(x.grad is not None for x in seen)


def test_what_a_stage_does_not_use_has_a_gradient_of_zero() -> None:
    weight = torch.ones(2, HIDDEN, requires_grad=True)
    stages: list[Stage] = [lambda m, received: weight * 2, lambda m, received: torch.ones((), requires_grad=True) * 3]
    run_pipeline(interleaved(1, 2, 1), stages, here())
    assert weight.grad is not None and not weight.grad.any()


def test_an_output_that_was_not_promised_is_refused() -> None:
    x = torch.ones(2, HIDDEN, requires_grad=True)
    plan, loss = interleaved(1, 2, 1), lambda m, received: received.sum()
    with pytest.raises(
        ContractError, match=r"stage 0, microbatch 0: returned \[2, 6\] of torch.float32; expected \[3, 6\]"
    ):
        run_pipeline(plan, [lambda m, received: x, loss], here((3, HIDDEN)))
    with pytest.raises(ContractError, match=r"returned \[2, 6\] of torch.float32; expected \[2, 6\] of torch.bfloat16"):
        run_pipeline(plan, [lambda m, received: x, loss], here(dtype=torch.bfloat16))
    with pytest.raises(ContractError, match=r"stage 1, microbatch 0: returned \[2, 6\] of torch.float32; expected \[\] of"):
        run_pipeline(plan, [lambda m, received: x, lambda m, received: received * 2], here())
    with pytest.raises(ContractError, match="plan for 1 ranks x 2 chunks on 1 ranks x 1 chunks"):
        run_pipeline(plan, [loss], here())
