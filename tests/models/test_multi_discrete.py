import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from hybridflow.build import build
from hybridflow.config import validate
from hybridflow.core.errors import DataError
from hybridflow.core.seeding import torch_generator
from hybridflow.models.multi_discrete import MultiCategorical, MultiCategoricalPolicy
from hybridflow.models.nets import NetConfig, joined

SIZES = (2, 3)


class Digits(gymnasium.Env):
    """Pays for every digit that is named; they are numbered from 1 and shown one-hot."""

    observation_space = spaces.Box(0, 1, (5,), np.float32)
    action_space = spaces.MultiDiscrete(SIZES, start=[1, 1])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._show(), {}

    def _show(self):
        self.digits = [int(self.np_random.integers(size)) for size in SIZES]
        return np.concatenate([np.eye(size)[digit] for size, digit in zip(SIZES, self.digits, strict=True)]).astype(
            np.float32
        )

    def step(self, action):
        assert self.action_space.contains(action)
        reward = float(sum(int(a - 1) == digit for a, digit in zip(action, self.digits, strict=True)))
        return self._show(), reward, False, False, {}


gymnasium.register("HybridflowDigits-v0", Digits, max_episode_steps=10)


def distribution(rows=4):
    draw = torch.Generator().manual_seed(0)
    parts = [torch.randn(rows, size, generator=draw).log_softmax(-1) for size in SIZES]
    return MultiCategorical(torch.cat(parts, -1), SIZES), [torch.distributions.Categorical(logits=part) for part in parts]


def test_it_is_independent_categoricals():
    ours, theirs = distribution()
    actions = torch.tensor([[0, 2], [1, 1], [0, 0], [1, 2]])
    torch.testing.assert_close(ours.log_prob(actions), sum(one.log_prob(actions[:, m]) for m, one in enumerate(theirs)))
    torch.testing.assert_close(ours.entropy(), sum(one.entropy() for one in theirs))
    assert torch.equal(ours.mode, torch.stack([one.logits.argmax(-1) for one in theirs], -1))
    assert not ours.kl(ours.detached()).abs().max() > 1e-6
    assert torch.equal(joined([ours, ours]).log_prob(actions.repeat(2, 1)), ours.log_prob(actions).repeat(2))


def test_each_action_is_drawn_from_a_number_of_its_own():
    ours, theirs = distribution(1)
    many = MultiCategorical(ours.log_probabilities.expand(4000, -1), SIZES)
    drawn = many.sample(torch.rand(4000, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))
    for m, one in enumerate(theirs):
        found = torch.bincount(drawn[:, m], minlength=SIZES[m]) / 4000
        torch.testing.assert_close(found, one.probs[0], atol=0.03, rtol=0)


def test_actions_in_a_table_are_refused():
    space = spaces.MultiDiscrete(np.array([[2, 2], [3, 3]]))
    with pytest.raises(DataError, match="in a row"):
        MultiCategoricalPolicy(spaces.Box(-1, 1, (3,)), space, NetConfig(), torch_generator(1, "init"))


def test_ppo_learns_several_actions_at_once():
    """Ten steps of two digits: 20 at best, 8.3 at random."""
    optimizer = {"optimizer": {"lr": 1e-2}}
    data = {"algorithm": "ppo", "run_dir": "unused", "threads": 1, "ppo": {"gamma": 0.0}, "evaluation": {"limit": 20}}
    data |= {"actor": optimizer, "critic": optimizer, "train": {"steps": 30, "epochs": 4}}
    environment = {"id": "HybridflowDigits-v0", "num_envs": 4, "steps_per_rollout": 40}
    made = build(validate({**data, "environment": environment}, "test"))
    try:
        made.trainer.train(30)
        evaluation = made.parts.evaluate
        assert evaluation is not None and evaluation().score > 19
    finally:
        made.runtime.stop()
