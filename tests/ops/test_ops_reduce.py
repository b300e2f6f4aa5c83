import math

import pytest
import torch

from hybridflow.ops.reduce import masked_mean, masked_sum, masked_whiten

BAD = [math.nan, math.inf, -math.inf]
MASK = torch.tensor([[True, False, True], [False, True, False]])


def values(bad):
    return torch.tensor([[1.0, bad, 2.0], [bad, 6.0, bad]], requires_grad=True)


@pytest.mark.parametrize("bad", BAD)
def test_sum_and_mean_ignore_what_is_masked(bad):
    x = values(bad)
    assert masked_sum(x, MASK).item() == 9
    assert masked_mean(x, MASK).item() == 3
    masked_mean(x, MASK).backward()
    torch.testing.assert_close(x.grad, MASK / 3)


def test_means_of_parts_under_one_normaliser_add_up():
    x = values(math.nan)
    parts = [masked_mean(x[i], MASK[i], normaliser=3) for i in range(2)]
    assert sum(parts).item() == masked_mean(x, MASK).item()


@pytest.mark.parametrize("bad", BAD)
def test_whiten_by_hand(bad):
    x = values(bad)
    whitened = masked_whiten(x, MASK)
    std = math.sqrt(14 / 3)  # of 1, 2, 6
    torch.testing.assert_close(whitened, torch.tensor([[-2 / std, 0, -1 / std], [0, 3 / std, 0]]))
    (whitened**3).sum().backward()
    assert torch.isfinite(x.grad).all()
    assert not x.grad[~MASK].any()
    assert x.grad[MASK].abs().sum() > 0


@pytest.mark.parametrize("x", [[0.1, 0.1, math.nan], [5.0, math.nan, math.nan], [math.nan] * 3])
def test_whitened_equal_values_are_zero(x):
    x = torch.tensor(x)
    assert masked_whiten(x, ~x.isnan()).tolist() == [0, 0, 0]


def test_nothing_is_chosen():
    x = torch.full((3,), math.nan)
    none = torch.zeros(3, dtype=torch.bool)
    assert masked_sum(x, none).item() == 0
    assert masked_mean(x, none).item() == 0
    assert masked_mean(x[:0], none[:0]).item() == 0
