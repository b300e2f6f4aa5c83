import numpy as np
import pytest
import torch
from tiny_decoders import tiny_decoder

from hybridflow.generation.engine import Engine
from hybridflow.generation.request import Request, SamplingParams
from hybridflow.models.decoder import CausalAttention
from hybridflow.ops.linear import linear


def logits_of(decoder, head, tokens):
    attend = CausalAttention(torch.tensor([len(tokens)]))
    return linear(decoder(torch.from_numpy(tokens), attend.positions, attend), head)


def change(decoder):
    """An optimizer's step: in place, on every parameter."""
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.mul_(1.1)


def requests_of(count, limit, seed=0):
    rng = np.random.default_rng(seed)
    return [Request(rng.integers(0, 150, rng.integers(1, 20)), index, limit) for index in range(count)]


def uncached(decoder, request, completion):
    """Log-probabilities of a completion by the forward of training."""
    logits = logits_of(decoder, decoder.head_weight, np.concatenate([request.prompt, completion.tokens])).float()
    chosen = logits.log_softmax(-1)[len(request.prompt) - 1 : -1].gather(1, torch.from_numpy(completion.tokens)[:, None])
    return chosen[:, 0].detach().float().numpy()


def assert_true_to(decoder, requests, completions, mean_error=None):
    """Log-probabilities are those of the decoder as it is now."""
    for request, completion in zip(requests, completions, strict=True):
        expected = uncached(decoder, request, completion)
        if mean_error is None:
            np.testing.assert_allclose(completion.log_probs, expected, atol=1e-4)
        else:
            assert np.abs(completion.log_probs - expected).mean() < mean_error


@pytest.mark.parametrize("limit", [31, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("changes", [{}, {"tied": False, "qk_norm": True, "output_bias": True, "mlp_bias": True}])
def test_every_parameter_takes_part(changes, dtype, limit):
    decoder = tiny_decoder(**changes).to(dtype)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if name.endswith(("bias", "norm.weight")):
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))))
    requests = requests_of(4, None)
    completions = Engine(decoder, seed=2).generate(requests, SamplingParams(limit))
    assert_true_to(decoder, requests, completions, 0.05 if dtype == torch.bfloat16 else None)


def test_a_rollout_leaves_the_learner_alone():
    decoder = tiny_decoder()
    before = {name: (parameter.data_ptr(), parameter.clone()) for name, parameter in decoder.named_parameters()}
    Engine(decoder, seed=2).generate(requests_of(2, None), SamplingParams(40))
    assert [name for name, _ in decoder.named_parameters()] == list(before)
    for name, parameter in decoder.named_parameters():
        assert parameter.data_ptr() == before[name][0] and torch.equal(parameter, before[name][1])
        assert parameter.requires_grad and not parameter.is_mkldnn and not parameter.is_inference()
    logits_of(decoder, decoder.head_weight, np.arange(5)).sum().backward()
    assert all(parameter.grad is not None for parameter in decoder.parameters())


def test_many_steps_give_the_same_tokens_as_few():
    # The longest limit of a call decides about packing.
    decoder, requests = tiny_decoder(), requests_of(8, 31)
    few = Engine(decoder, seed=2).generate(requests, SamplingParams(31))
    longest = [*requests, Request(np.array([1, 2]), 99, 60)]
    many = Engine(decoder, seed=2).generate(longest, SamplingParams(31))
    for one, other in zip(few, many[:8], strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        np.testing.assert_allclose(one.log_probs, other.log_probs, atol=1e-4)


@pytest.mark.parametrize("limit", [31, 40])
def test_an_update_between_two_calls_is_seen(limit):
    decoder, requests, params = tiny_decoder(), requests_of(4, None), SamplingParams(limit)
    engine = Engine(decoder, seed=2)
    before = engine.generate(requests, params)
    change(decoder)
    after = engine.generate(requests, params)
    assert [c.tokens.tolist() for c in before] != [c.tokens.tolist() for c in after]
    assert_true_to(decoder, requests, after)
    for request, old in zip(requests, before, strict=True):
        assert np.abs(old.log_probs - uncached(decoder, request, old)).max() > 1e-2


@pytest.mark.parametrize("limit", [31, 40])
def test_an_update_between_two_steps_is_seen(limit):
    decoder, requests = tiny_decoder(), requests_of(4, None)
    engine, params, done = Engine(decoder, seed=2), SamplingParams(limit), []
    for request in requests:
        engine.add(request, params)
    for _ in range(10):
        done += engine.step()
    old = tiny_decoder()
    change(decoder)
    engine.version = 1
    while engine.num_in_flight:
        done += engine.step()
    assert len(done) == 4
    for completion in done:
        request = requests[completion.sample_id]
        assert completion.versions.tolist() == [0] * 10 + [1] * (limit - 10)
        expected = np.concatenate([uncached(old, request, completion)[:10], uncached(decoder, request, completion)[10:]])
        np.testing.assert_allclose(completion.log_probs, expected, atol=1e-4)


@pytest.mark.parametrize(("precision", "error"), [("bfloat16", 0.05), ("int8", 0.1)])
@pytest.mark.parametrize("limit", [20, 40])
def test_a_lower_precision_is_near_the_learner(precision, error, limit):
    decoder = tiny_decoder(tied=False, qk_norm=True, output_bias=True)
    requests = requests_of(8, None)
    engine = Engine(decoder, seed=2, precision=precision)
    completions = engine.generate(requests, SamplingParams(limit))
    assert_true_to(decoder, requests, completions, error)
    far = [abs(c.log_probs - uncached(decoder, r, c)).max() for r, c in zip(requests, completions, strict=True)]
    assert max(far) > 1e-4  # it is rounded
    change(decoder)
    assert_true_to(decoder, requests, engine.generate(requests, SamplingParams(limit)), error)


def test_int8_rows_do_not_depend_on_their_company():
    decoder, requests = tiny_decoder(), requests_of(12, None)
    together = Engine(decoder, seed=2, precision="int8").generate(requests, SamplingParams(20))
    alone = [Engine(decoder, seed=2, precision="int8").generate([r], SamplingParams(20))[0] for r in requests]
    for one, other in zip(together, alone, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        np.testing.assert_allclose(one.log_probs, other.log_probs, atol=2e-3)
