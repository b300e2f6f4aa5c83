"""The formulas against the counts of torch's own counter."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from hybridflow.models.decoder import CausalAttention, Decoder, init_weights
from hybridflow.models.spec import DecoderSpec
from hybridflow.planner.flops import backward_flops, decode_flops, forward_flops

SPEC = DecoderSpec("llama", 100, 64, 176, 3, 4, 2, 16, 2048)
ROWS, LENGTH, ACTIONS = 4, 16, 24


def attention(tokens: int) -> float:
    """What the formula counts for it: the causal half, which torch's counter doesn't know on a CPU."""
    return 2 * SPEC.num_heads * SPEC.head_dim * tokens * LENGTH * SPEC.num_layers


@pytest.mark.parametrize("frozen", [0, 2])
def test_products_of_a_step_are_those_that_torch_counts(frozen: int) -> None:
    decoder = Decoder(SPEC).to(torch.bfloat16)  # torch's counter doesn't see the products that we give to oneDNN
    init_weights(decoder, torch.Generator().manual_seed(0))
    for name, parameter in decoder.named_parameters():
        layer = int(name.split(".")[1]) if name.startswith("layers") else SPEC.num_layers
        parameter.requires_grad_(layer >= frozen and not (frozen and name.startswith("embed")))
    attend, tokens = CausalAttention(torch.tensor([LENGTH] * ROWS)), torch.zeros(ROWS * LENGTH, dtype=torch.int64)
    with FlopCounterMode(display=False) as forward:
        hidden = decoder(tokens, attend.positions, attend, torch.arange(ACTIONS))
        logits = hidden @ decoder.head_weight.T
    with FlopCounterMode(display=False) as backward:
        logits.float().sum().backward()
    work = (SPEC, ROWS * LENGTH, ACTIONS, LENGTH, True)
    counted = [counter.get_flop_counts()["Global"] for counter in (forward, backward)]
    products = [sum(n for op, n in one.items() if "attention" not in str(op)) for one in counted]
    assert forward_flops(*work) - attention(ROWS * LENGTH) == products[0]
    share = (SPEC.num_layers - frozen) / SPEC.num_layers
    assert backward_flops(*work, frozen, frozen == 0) - 2 * attention(ROWS * LENGTH) * share == pytest.approx(
        products[1], rel=0.1
    )


def test_decoding_a_response_costs_what_a_pass_over_it_does() -> None:
    whole = forward_flops(SPEC, 40, 40, 40, head=True)
    assert decode_flops(SPEC, 0, 40, 1) == pytest.approx(whole, rel=0.01)
    assert decode_flops(SPEC, 1000, 40, 1) > 1.5 * whole
