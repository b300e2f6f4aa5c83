"""Products through oneDNN equal torch's own, forward and backward."""

import pytest
import torch
import torch.nn.functional as F

from hybridflow.ops.linear import linear, pack, product

LARGE, SMALL = (64, 160, 128), (3, 5, 4)  # rows, inputs, outputs: above and below the size from which oneDNN is taken
NARROW = (96, 3, 80)  # products of this size are taken transposed


def inputs(n, i, o, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shapes = ((n, i), (o, i), (o,), (n, o))
    x, weight, bias, grad = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    return x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), grad


@pytest.fixture
def onednn_calls(monkeypatch):
    calls = []
    original = torch.ops.mkldnn._linear_pointwise
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", lambda *args: calls.append(args) or original(*args))
    return calls


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize(("sizes", "calls"), [(LARGE, 3), (SMALL, 0)])
def test_values_and_gradients_are_those_of_f_linear(sizes, calls, with_bias, onednn_calls):
    x, weight, bias, grad = inputs(*sizes)
    wanted = (x, weight, bias) if with_bias else (x, weight)
    out, expected = linear(*wanted), F.linear(*(t.double() for t in wanted))
    got = torch.autograd.grad(out, wanted, grad)
    assert len(onednn_calls) == calls  # forward, input, weight
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-4)
    for mine, theirs in zip(got, torch.autograd.grad(expected, wanted, grad.double()), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("frozen", ["x", "weight"])
def test_what_is_frozen_costs_no_product(frozen, onednn_calls):
    x, weight, _, grad = inputs(*LARGE)
    {"x": x, "weight": weight}[frozen].requires_grad_(False)
    linear(x, weight).backward(grad)
    assert len(onednn_calls) == 2
    assert (x.grad is None) == (frozen == "x")
    assert (weight.grad is None) == (frozen == "weight")


def test_without_gradients_the_values_are_the_same():
    x, weight, bias, _ = inputs(*LARGE)
    with torch.no_grad():
        assert torch.equal(linear(x, weight, bias), linear(x.clone(), weight, bias))
    assert torch.equal(linear(x, weight, bias).detach(), linear(x.detach(), weight.detach(), bias.detach()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types_go_the_ordinary_way(dtype, onednn_calls):
    x, weight, bias, grad = inputs(*LARGE, dtype=dtype)
    out = linear(x, weight, bias)
    assert torch.equal(out, F.linear(x, weight, bias))
    with torch.no_grad():
        assert torch.equal(product(grad, weight), grad @ weight)
    assert not onednn_calls


@pytest.mark.parametrize("sizes", [LARGE, SMALL, NARROW])
def test_product_takes_transposed_views(sizes):
    x, weight, _, grad = (t.detach() for t in inputs(*sizes))
    for left, right in ((grad, weight), (grad.T, x), (x.T, grad), (x, weight.T)):
        torch.testing.assert_close(product(left, right).double(), left.double() @ right.double(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("sizes", [LARGE, SMALL])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_that_is_stored_transposed_gives_the_same_and_keeps_its_layout(sizes, dtype):
    x, weight, bias, grad = inputs(*sizes, dtype=dtype)
    stored = weight.detach().T.contiguous().T.requires_grad_()
    assert stored.stride() == (1, len(weight))
    outs = [linear(x, w, bias) for w in (weight, stored)]
    for out in outs:
        out.backward(grad)
    torch.testing.assert_close(outs[1], outs[0], rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(stored.grad, weight.grad, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-4)
    assert stored.grad.stride() == stored.stride()
    with torch.no_grad():
        assert torch.equal(linear(x, pack(stored)), linear(x, pack(weight)))
