"""The decoder's own shortcuts change nothing."""

import pytest
import torch
from torch import Tensor

from hybridflow.models.decoder import CausalAttention, Decoder, init_weights
from hybridflow.models.spec import DecoderSpec

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
