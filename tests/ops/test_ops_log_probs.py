import pytest
import torch
import torch.nn.functional as F

from hybridflow.ops import log_probs as module
from hybridflow.ops.log_probs import log_probs_and_entropy

N, D, V = 13, 5, 11
CHUNKS = [1, 4, 13, 100]


def inputs(dtype=torch.float64, n=N, v=V, scale=1.0):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(n, D, dtype=torch.float64, generator=generator) * scale
    weight = torch.randn(v, D, dtype=torch.float64, generator=generator)
    targets = torch.randint(v, (n,), generator=generator)
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets


def naive(hidden, weight, targets, temperature=1.0):
    distribution = torch.distributions.Categorical(logits=hidden @ weight.T / temperature)
    return distribution.log_prob(targets), distribution.entropy()


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.0])
@pytest.mark.parametrize("chunk_tokens", CHUNKS)
def test_equals_cross_entropy_and_the_entropy_of_a_categorical(chunk_tokens, temperature):
    hidden, weight, targets = inputs()
    log_probs, entropy = log_probs_and_entropy(
        hidden, weight, targets, temperature=temperature, chunk_tokens=chunk_tokens, entropy=True
    )
    torch.testing.assert_close(-log_probs, F.cross_entropy(hidden @ weight.T / temperature, targets, reduction="none"))
    expected_log_probs, expected_entropy = naive(hidden, weight, targets, temperature)
    torch.testing.assert_close(entropy, expected_entropy)
    coefs = torch.linspace(-1, 2, N, dtype=torch.float64)
    actual = torch.autograd.grad((coefs * log_probs + coefs.flip(0) * entropy).sum(), (hidden, weight))
    expected = torch.autograd.grad((coefs * expected_log_probs + coefs.flip(0) * expected_entropy).sum(), (hidden, weight))
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("chunk_tokens", [3, 100])
def test_gradcheck(chunk_tokens):
    hidden, weight, targets = inputs(n=7)

    def both(hidden, weight):
        return log_probs_and_entropy(hidden, weight, targets, temperature=0.8, chunk_tokens=chunk_tokens, entropy=True)

    assert torch.autograd.gradcheck(both, (hidden, weight))


@pytest.mark.parametrize("which", [0, 1])
def test_each_output_alone_has_its_gradient(which):
    hidden, weight, targets = inputs()
    outputs = log_probs_and_entropy(hidden, weight, targets, chunk_tokens=4, entropy=True)
    actual = torch.autograd.grad(outputs[which].sum(), (hidden, weight))
    expected = torch.autograd.grad(naive(hidden, weight, targets)[which].sum(), (hidden, weight))
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("chunk_tokens", [4, 100])
def test_frozen_weight_or_hidden_gets_no_gradient(chunk_tokens):
    hidden, weight, targets = inputs()
    for frozen, trained in ((hidden, weight), (weight, hidden)):
        frozen.requires_grad_(False)
        log_probs_and_entropy(hidden, weight, targets, chunk_tokens=chunk_tokens, entropy=False)[0].sum().backward()
        assert frozen.grad is None
        assert trained.grad.abs().sum() > 0
        frozen.requires_grad_(True)
        trained.grad = None


def test_without_entropy():
    hidden, weight, targets = inputs(torch.float32)
    log_probs, entropy = log_probs_and_entropy(hidden, weight, targets, entropy=False)
    assert entropy is None
    torch.testing.assert_close(log_probs, log_probs_and_entropy(hidden, weight, targets, entropy=True)[0], rtol=0, atol=0)


@pytest.mark.parametrize("chunk_tokens", [3, 100])
def test_a_graph_can_be_walked_twice(chunk_tokens):
    hidden, weight, targets = inputs()
    log_probs, entropy = log_probs_and_entropy(hidden, weight, targets, chunk_tokens=chunk_tokens, entropy=True)
    loss = log_probs.sum() + entropy.sum()
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(loss, (hidden, weight)), first, rtol=0, atol=0)


def test_bf16_inputs_are_normalised_in_fp32_and_summed_in_fp32():
    hidden, weight, targets = inputs(torch.bfloat16, n=4096, v=300)
    log_probs, entropy = log_probs_and_entropy(hidden, weight, targets, chunk_tokens=64, entropy=True)
    assert (log_probs.dtype, entropy.dtype) == (torch.float32, torch.float32)
    logits = (hidden @ weight.T).double()
    torch.testing.assert_close(
        log_probs.double(), logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0], rtol=1e-5, atol=1e-5
    )
    log_probs.sum().backward()
    assert (hidden.grad.dtype, weight.grad.dtype) == (torch.bfloat16, torch.bfloat16)
    exact_hidden, exact_weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    naive(exact_hidden, exact_weight, targets)[0].sum().backward()
    error = (weight.grad.double() - exact_weight.grad).norm() / exact_weight.grad.norm()
    assert error < 5e-3  # one rounding to bf16 is 2e-3; a sum in bf16 over 64 chunks is off by several times that


def test_fp32_weight_with_bf16_hidden_keeps_its_gradient_in_fp32():
    hidden, weight, targets = inputs(torch.bfloat16, n=256, v=50)
    weight = weight.detach().float().requires_grad_()
    log_probs_and_entropy(hidden, weight, targets, chunk_tokens=64, entropy=False)[0].sum().backward()
    assert weight.grad.dtype == torch.float32
    assert not torch.equal(weight.grad, weight.grad.bfloat16().float())


def test_extreme_logits_stay_finite():
    hidden, weight, targets = inputs(torch.float32, scale=1e4)
    log_probs, entropy = log_probs_and_entropy(hidden, weight, targets, chunk_tokens=4, entropy=True)
    (log_probs.sum() + entropy.sum()).backward()
    for x in (log_probs, entropy, hidden.grad, weight.grad):
        assert torch.isfinite(x).all()


def test_no_tokens():
    hidden, weight, targets = inputs(torch.float32, n=0)
    log_probs, entropy = log_probs_and_entropy(hidden, weight, targets, entropy=True)
    (log_probs.sum() + entropy.sum()).backward()
    assert log_probs.shape == entropy.shape == (0,)
    assert not weight.grad.any()


class Peak(torch.utils._python_dispatch.TorchDispatchMode):
    """The largest tensor that any operation returns, in elements."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor):
                self.largest = max(self.largest, x.numel())
        return out


def test_the_logits_of_all_tokens_never_exist(monkeypatch):
    hidden, weight, targets = inputs(torch.float32, n=200, v=40)
    monkeypatch.setitem(module.CHUNK_BYTES, "cpu", 4 * 40 * 30)  # 30 tokens a chunk
    with Peak() as peak:
        log_probs, entropy = log_probs_and_entropy(hidden, weight, targets, entropy=True)
        (log_probs.sum() + entropy.sum()).backward()
    assert peak.largest == 30 * 40  # more than hidden [200, 5] and weight [40, 5]
