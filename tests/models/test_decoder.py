"""The decoder's own shortcuts change nothing."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hybridflow.build_model import part_at
from hybridflow.core.batch import Batch, Ragged
from hybridflow.core.errors import ContractError
from hybridflow.models.decoder import CausalAttention, Decoder, Part, init_weights
from hybridflow.models.policy import TextCritic, TextPolicy, TextReward
from hybridflow.models.spec import DecoderSpec
from hybridflow.models.weights import hf_state, load_hf_state, save_decoder
from hybridflow.parallel.mesh import Line
from hybridflow.parallel.tensor import take
from hybridflow.workers.parts import Lines

SPEC = DecoderSpec(
    family="qwen3",
    vocab_size=50,
    hidden_size=32,
    intermediate_size=48,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_positions=64,
    qk_norm=True,
)
LENGTHS = torch.tensor([5, 9, 3])
WANTED = torch.tensor([16, 2, 4, 13])


@pytest.mark.parametrize("recompute", [False, True])
def test_states_that_nobody_wants_are_spared(recompute: bool) -> None:
    decoder = Decoder(SPEC)
    init_weights(decoder, torch.Generator().manual_seed(0))
    decoder.activation_checkpointing = recompute
    tokens = torch.randint(0, 50, (17,), generator=torch.Generator().manual_seed(1))
    weights = torch.randn(len(WANTED), 32, generator=torch.Generator().manual_seed(2))

    def run(outputs: Tensor | None) -> tuple[Tensor, list[Tensor]]:
        attention = CausalAttention(LENGTHS)
        hidden = decoder(tokens, attention.positions, attention, outputs)
        hidden = hidden[WANTED] if outputs is None else hidden
        decoder.zero_grad()
        (hidden * weights).sum().backward()
        return hidden.detach(), [parameter.grad.clone() for parameter in decoder.parameters() if parameter.grad is not None]

    whole, gradients = run(None)
    spared, same = run(WANTED)
    torch.testing.assert_close(spared, whole, rtol=1e-6, atol=1e-6)
    assert len(same) == len(gradients) == len(list(decoder.parameters()))
    for one, other in zip(same, gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5 * float(other.abs().max()))


STAGES = (Part(range(1), last=False), Part(range(1, 2), first=False, last=False), Part(range(2, 3), first=False))
# The last stage has no layer.
FOUR = (*STAGES[:2], Part(range(2, 3), first=False, last=False), Part(range(3, 3), first=False))


def network(kind: str, body: Decoder) -> Any:
    if kind == "policy":
        return TextPolicy(body, temperature=0.9)
    made = TextReward(body, torch.full((1, 32), 0.2)) if kind == "reward" else TextCritic(body)
    if isinstance(made, TextCritic) and made.head is not None:
        torch.nn.init.constant_(made.head.weight, 0.3)
    return made


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("parts", [STAGES, FOUR])
@pytest.mark.parametrize(("kind", "tied"), [("policy", True), ("policy", False), ("critic", False), ("reward", True)])
def test_stages_one_after_another_are_the_whole(kind: str, tied: bool, parts: tuple[Part, ...], recompute: bool) -> None:
    spec = replace(SPEC, tied=tied)
    whole = Decoder(spec)
    init_weights(whole, torch.Generator().manual_seed(0))
    stages = [network(kind, Decoder(spec, part if kind == "policy" else replace(part, head=False))) for part in parts]
    for stage in stages:
        stage.decoder.activation_checkpointing = recompute
        load_hf_state(stage.decoder, hf_state(whole))
    lengths = LENGTHS.numpy()
    mask = np.concatenate([np.arange(length) >= 2 for length in lengths])
    tokens = np.random.default_rng(0).integers(0, 50, lengths.sum())
    batch = Batch({"tokens": Ragged(tokens, lengths), "response_mask": Ragged(mask, lengths)})

    states, *rest = stages[0].pack(batch)
    for stage in stages:
        states = stage.decoder(states, *rest)
    found, alone = stages[-1].read(states, batch), network(kind, whole)
    expected = alone.outputs(batch)
    assert {name: torch.equal(value, expected[name]) for name, value in found.items()} == dict.fromkeys(expected, True)

    for outputs in (found, expected):
        torch.stack([value.square().sum() for value in outputs.values()]).sum().backward()
    gradients: dict[str, Tensor] = {}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            assert parameter.grad is not None, name
            gradients[name] = gradients[name] + parameter.grad if name in gradients else parameter.grad
    for name, parameter in alone.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(gradients.pop(name), parameter.grad, rtol=1e-5, atol=1e-6)
    assert not gradients


@pytest.mark.parametrize("kind", ["policy", "critic"])
def test_chunks_in_turns_are_the_whole(kind: str) -> None:
    spec = replace(SPEC, num_layers=5)
    parts = [part_at(spec, Lines(pp=Line(2, rank), chunks=2)) for rank in range(2)]
    assert [part.layers for part in parts] == [(range(0, 1), range(2, 3)), (range(1, 2), range(3, 5))]
    made = [Decoder(spec, replace(part, head=kind == "policy")) for part in [*parts, Part()]]
    for decoder in made:
        init_weights(decoder, torch.Generator().manual_seed(0))
    *ranks, alone = [network(kind, decoder) for decoder in made]
    lengths = LENGTHS.numpy()
    mask = np.concatenate([np.arange(length) >= 2 for length in lengths])
    tokens = np.random.default_rng(0).integers(0, 50, lengths.sum())
    batch = Batch({"tokens": Ragged(tokens, lengths), "response_mask": Ragged(mask, lengths)})
    states: Any = None
    for chunk, rank in product(range(2), ranks):
        states = rank.outputs(batch, states, chunk)
    expected = alone.outputs(batch)
    assert {name: torch.equal(value, expected[name]) for name, value in states.items()} == dict.fromkeys(expected, True)


def test_a_part_is_not_saved_as_the_model(tmp_path: Path) -> None:
    with pytest.raises(ContractError, match=r"holds Part.*let its learner export it"):
        save_decoder(Decoder(SPEC, STAGES[0]), tmp_path / "model")
    save_decoder(Decoder(SPEC, Part(range(3))), tmp_path / "model")


@pytest.mark.parametrize("heads", [(4, 2), (4, 4), (4, 1), (6, 3)])
@pytest.mark.parametrize("pieces", [2, 3, 4])
def test_a_decoder_in_pieces_is_the_whole(heads: tuple[int, int], pieces: int) -> None:
    """Also where the key-value heads are fewer, or don't divide; values and gradients."""
    spec = replace(SPEC, num_heads=heads[0], num_kv_heads=heads[1], qkv_bias=True, mlp_bias=True, tied=False)
    tokens = torch.randint(0, 50, (17,), generator=torch.Generator().manual_seed(1))
    attention, made = CausalAttention(LENGTHS), [Decoder(spec), Decoder(spec, Part(pieces=pieces))]
    outs = []
    for decoder in made:
        init_weights(decoder, torch.Generator().manual_seed(0))
        with torch.no_grad():
            for name, parameter in decoder.named_parameters():
                if name.endswith("bias"):
                    full = torch.randn(decoder.shards[name].shape, generator=torch.Generator().manual_seed(3))
                    parameter.copy_(take(full, decoder.shards[name]))
        outs.append(decoder(tokens, attention.positions, attention))
        outs[-1].square().sum().backward()
    whole, cut = made
    torch.testing.assert_close(outs[1], outs[0], rtol=1e-5, atol=1e-5)
    assert cut.layers[0].qkv.weight.shape != whole.layers[0].qkv.weight.shape or pieces <= heads[1]
    name = "layers.1.gate_up.weight"
    parameters = [dict(decoder.named_parameters())[name] for decoder in made]
    assert not torch.equal(*parameters)
    torch.testing.assert_close(parameters[1].grad, take(parameters[0].grad, cut.shards[name]), rtol=1e-4, atol=1e-4)
    again = Decoder(spec, cut.part)
    load_hf_state(again, hf_state(whole))
    assert all(torch.equal(x, y) for x, y in zip(again.parameters(), cut.parameters(), strict=True))
