"""R2D2's loss against steps one after another."""

import numpy as np
import pytest
import torch
from gymnasium import spaces

from hybridflow.core.seeding import torch_generator
from hybridflow.models.nets import NetConfig, make_q
from hybridflow.ops.td import recurrent_dqn_loss


def recurrent_batch():
    """Sequences of 3, 1 and 4 steps; the second one ended its episode."""
    random = torch.Generator().manual_seed(0)
    lengths = [3, 1, 4]
    normal = lambda *shape: torch.randn(*shape, generator=random)  # noqa: E731
    return lengths, {
        "row_index": torch.repeat_interleave(torch.arange(3), torch.tensor(lengths)),
        "observations": normal(8, 2),
        "actions": torch.randint(3, (8,), generator=random),
        "rewards": normal(8),
        "discounts": torch.tensor([0.9, 0.0, 0.9]),
        "weights": torch.tensor([1.0, 0.5, 2.0]),
        "final_observations": normal(3, 2),
        "memory": normal(3, 5),
    }


def recurrent_networks(kind):
    net = NetConfig.model_validate({"kind": kind, "hidden": [6, 5]} | ({"context": 3} if kind == "attention" else {}))
    space = spaces.Box(-9, 9, (2,), np.float32)
    return {name: make_q(space, spaces.Discrete(3), net, torch_generator(1, name)) for name in ("q", "target")}


@pytest.mark.parametrize("kind", ["gru", "lstm", "attention"])
@pytest.mark.parametrize(
    ("n_steps", "double", "huber_delta"), [(1, True, None), (2, False, 0.1), (3, True, 0.1), (9, False, None)]
)
def test_recurrent_dqn_loss_is_that_of_one_step_after_another(kind, n_steps, double, huber_delta):
    networks, (lengths, columns) = recurrent_networks(kind), recurrent_batch()
    size = networks["q"].memory_size
    columns["memory"] = torch.zeros(3, size) if kind == "attention" else torch.randn(3, size)
    loss = recurrent_dqn_loss.bind(gamma=0.9, n_steps=n_steps, double=double, huber_delta=huber_delta)
    result = loss(networks, columns)
    start, terms, errors = 0, [], []
    for row, length in enumerate(lengths):
        seen = [*columns["observations"][start : start + length], columns["final_observations"][row]]
        values = {name: [] for name in networks}
        for name, network in networks.items():
            memory = columns["memory"][row : row + 1]
            for observation in seen:
                outputs, memory = network.advance(observation[None], memory)
                values[name].append(outputs[0])
        for t in range(length):
            ahead = min(n_steps, length - t)
            target = sum(0.9**i * columns["rewards"][start + t + i] for i in range(ahead))
            if t + ahead < length or columns["discounts"][row] > 0:
                best = values["q" if double else "target"][t + ahead].argmax()
                target = target + 0.9**ahead * values["target"][t + ahead][best]
            error = values["q"][t][columns["actions"][start + t]] - target.detach()
            size = error.abs()
            squared = 0.5 * error**2
            linear = squared if huber_delta is None else huber_delta * (size - huber_delta / 2)
            terms.append(columns["weights"][row] * (squared if huber_delta is None or size <= huber_delta else linear))
            errors.append(error.detach())
        start += length
    torch.testing.assert_close(result.columns["td_errors"], torch.stack(errors), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(result.terms, torch.stack(terms), atol=1e-6, rtol=1e-5)
    parameters = [*networks["q"].parameters()]
    ours = torch.autograd.grad(result.terms.sum(), parameters)
    theirs = torch.autograd.grad(torch.stack(terms).sum(), parameters)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_what_follows_an_ended_sequence_is_not_seen():
    networks, (_, columns) = recurrent_networks("gru"), recurrent_batch()
    loss, other = recurrent_dqn_loss.bind(gamma=0.9, n_steps=2), columns["final_observations"].clone()
    other[1] = 100.0
    with torch.no_grad():
        one, two = (
            loss(networks, columns | {"final_observations": final}) for final in (columns["final_observations"], other)
        )
    assert torch.equal(one.terms, two.terms)
    other[2] = 100.0
    assert not torch.equal(one.terms, loss(networks, columns | {"final_observations": other}).terms)
