"""Training slices inside generation slices: one copy, whose foreign pages exist only while generating."""

from __future__ import annotations

import gc
import io
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import nn

from hybridflow.core.errors import ContractError
from hybridflow.core.placement import Mesh
from hybridflow.models.decoder import CausalAttention, Decoder, init_weights
from hybridflow.models.spec import DecoderSpec
from hybridflow.parallel.mesh import ProcessMesh
from hybridflow.reshard.execute import HybridWeights
from hybridflow.reshard.memory import Arena, Memory, Reallocated, Slot
from hybridflow.workers.optimizer import Optimizer, OptimizerConfig

MIB = 2**20
FP32 = (torch.float32, torch.float32)
CPU = torch.device("cpu")
SLOTS = [
    Slot("large", 5 * MIB, 10 * MIB, 3 * MIB),  # 20 MiB in the middle of 40
    Slot("whole", 100, 100, 0),
    Slot("beside", 1000, 3000, None),
    Slot("elsewhere", 500, None, None),
    Slot("foreign", None, 2 * MIB, None),
    Slot("empty", 0, 0, 0),
]
SPEC = DecoderSpec("llama", 40, 16, 24, 2, 4, 2, 4, 64)
KINDS = pytest.mark.parametrize("kind", [Arena, Reallocated])


def resident() -> int:
    return int(Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0]) * 1024


def filled(kind: type[Arena] | type[Reallocated]) -> Memory:
    memory = kind(SLOTS, FP32, CPU)
    for number, slot in enumerate(SLOTS):
        if slot.own:
            memory.own(slot.name).copy_(torch.arange(slot.own) + number)
    return memory


def intact(memory: Memory) -> bool:
    return all(
        torch.equal(memory.own(slot.name), torch.arange(slot.own).float() + number)
        for number, slot in enumerate(SLOTS)
        if slot.own
    )


@KINDS
def test_training_slices_survive_and_are_inside(kind: type[Arena] | type[Reallocated]) -> None:
    memory = filled(kind)
    for _ in range(2):
        for slot in SLOTS:
            if slot.block is not None:
                block = memory.open(slot.name)
                assert block.numel() == slot.block
                if slot.place is not None:
                    assert torch.equal(block[slot.place : slot.place + slot.own], memory.own(slot.name))
                    block[: slot.place], block[slot.place + slot.own :] = 7, 7
                else:
                    block.fill_(7)
        assert intact(memory)
        memory.close()
        assert intact(memory)


def test_foreign_pages_are_there_while_generating_alone() -> None:
    gc.collect()
    before = resident()
    memory = filled(Arena)
    training = resident() - before
    memory.open("large").add_(1)
    memory.open("foreign").fill_(1)
    generating = resident() - before
    memory.close()
    after = resident() - before
    assert 20 * MIB < training < 22 * MIB
    assert 48 * MIB < generating < 50 * MIB
    assert 20 * MIB < after < 22 * MIB
    assert memory.peak == 4 * (12 * MIB + 100 + 3000 + 1000 + 500)


def test_the_peak_where_slices_move_is_counted() -> None:
    memory = filled(Reallocated)
    training = 4 * (5 * MIB + 100 + 1000 + 500)
    assert memory.peak == training
    memory.open("large")  # both are there while one is copied into the other
    assert memory.peak == 4 * (10 * MIB + 5 * MIB + 100 + 1000 + 500)
    memory.open("foreign")
    memory.close()  # and again when it is copied out
    assert memory.peak == 4 * (12 * MIB + 5 * MIB + 100 + 1000 + 500)
    memory.open("whole")
    memory.close()
    assert memory.peak == 4 * (12 * MIB + 5 * MIB + 100 + 1000 + 500)


def test_an_arena_leaves_memory_and_comes_back() -> None:
    gc.collect()
    memory = filled(Arena)
    before = resident()
    size = 4 * (5 * MIB + 100 + 1000 + 500)
    assert memory.put_away() == size and memory.put_away() == 0
    assert before - resident() > 19 * MIB
    assert memory.take_back() == size and memory.take_back() == 0
    assert intact(memory)


def test_weights_that_generate_stay() -> None:
    memory = filled(Arena)
    memory.open("whole")
    with pytest.raises(ContractError, match="weights that generate can't leave memory"):
        memory.put_away()


def test_saving_a_training_slice_saves_nothing_else() -> None:
    saved = io.BytesIO()
    torch.save(filled(Arena).own("beside"), saved)
    assert saved.tell() < 4 * 1000 + 2000


@pytest.fixture
def lines() -> Iterator[ProcessMesh]:
    yield ProcessMesh(Mesh(), 0, timedelta(seconds=1))


def decoder() -> Decoder:
    made = Decoder(SPEC)
    init_weights(made, torch.Generator().manual_seed(0))
    return made


def step(module: Decoder, optimizer: Optimizer) -> None:
    attend = CausalAttention(torch.tensor([5, 4]))
    optimizer.zero_grad()
    (module(torch.arange(9), attend.positions, attend) * torch.arange(16.0)).square().mean().backward()
    optimizer.reduce_gradients(lambda flat: flat)
    optimizer.clip()
    optimizer.step()


@KINDS
def test_training_goes_on_as_without_it(lines: ProcessMesh, kind: type[Arena] | type[Reallocated]) -> None:
    """AdamW's steps on weights that are stored transposed, with generation in between."""
    plain, hybrid = decoder(), decoder()
    objects = [id(parameter) for parameter in hybrid.parameters()]
    weights = HybridWeights(hybrid, lines, memory=kind)
    assert not hybrid.layers[0].out.weight.is_contiguous() and hybrid.layers[0].out.weight.t().is_contiguous()
    optimizers = [Optimizer(module, OptimizerConfig(lr=0.01), 10) for module in (plain, hybrid)]
    for _ in range(3):
        for module, optimizer in zip((plain, hybrid), optimizers, strict=True):
            step(module, optimizer)
        generation = weights.generation()
        for name, parameter in generation.named_parameters():
            assert torch.equal(parameter, hybrid.get_parameter(name)) and not parameter.requires_grad
        weights.training()
    assert [id(parameter) for parameter in hybrid.parameters()] == objects
    for a, b in zip(plain.parameters(), hybrid.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_without_weights_the_generation_decoder_is_of_no_use(lines: ProcessMesh) -> None:
    weights = HybridWeights(decoder(), lines)
    generation = weights.generation()
    assert weights.generates
    weights.training()
    assert not weights.generates and all(parameter.numel() == 0 for parameter in generation.parameters())


def test_another_part_than_the_mesh_has_is_refused(lines: ProcessMesh) -> None:
    other = Decoder(DecoderSpec("llama", 40, 16, 24, 2, 4, 2, 4, 64))
    del other.layers[1]
    with pytest.raises(ContractError, match=r"hybrid engine: the decoder holds .* which is not rank 0 of 1"):
        HybridWeights(other, lines)


def test_parameters_are_ordinary_parameters(lines: ProcessMesh) -> None:
    hybrid = decoder()
    HybridWeights(hybrid, lines)
    assert all(isinstance(parameter, nn.Parameter) and parameter.is_leaf for parameter in hybrid.parameters())
