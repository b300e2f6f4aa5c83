"""Replay: n-step returns over pieces of episodes, and priorities, against the definitions."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replays import make_replay, move, values

from hybridflow.core.batch import Batch, Ragged
from hybridflow.rollout.replay import ReplayConfig

GAMMA = 0.9
make = partial(make_replay, observation=np.dtype((np.float32, (1,))))
SLOT = 10**9


class Episodes:
    """Slots whose episodes are cut into pieces at random, and the whole list of their steps."""

    def __init__(self, seed, slots):
        self.rng, self.slots = np.random.default_rng(seed), slots
        self.steps, self.pieces, self.open = [], [0] * slots, [[] for _ in range(slots)]
        self.count = 0

    def rollout(self, width):
        """``width`` steps of every slot; a step is (number, reward, following number or None, terminated, final)."""
        rows = []
        for slot in range(self.slots):
            left = width
            while left:
                length = int(self.rng.integers(1, left + 1))
                ends = left > length or self.rng.random() < 0.3
                rows.append(self.piece(slot, length, ends))
                left -= length
        lengths = np.array([len(rewards) for _, rewards, *_ in rows])
        total = int(lengths.sum())
        return Batch(
            {
                "sample_id": np.array([sample for sample, *_ in rows]),
                "observations": Ragged(np.arange(self.count - total, self.count, dtype=np.float32)[:, None], lengths),
                "actions": Ragged(np.zeros(total, np.int64), lengths),
                "rewards": Ragged(np.concatenate([rewards for _, rewards, *_ in rows]), lengths),
                "response_mask": Ragged(np.ones(total, bool), lengths),
                "terminated": np.array([terminated for *_, terminated, _ in rows]),
                "truncated": np.array([truncated for *_, truncated in rows]),
                "final_observations": np.array([[final] for _, _, final, _, _ in rows], np.float32),
            }
        )

    def piece(self, slot, length, ends):
        sample, final = slot * SLOT + self.pieces[slot], -1.0 - len(self.steps)
        self.pieces[slot] += 1
        terminated = bool(ends and self.rng.random() < 0.5)
        rewards = self.rng.integers(-5, 5, length).astype(np.float32)
        for t, reward in enumerate(rewards):
            number, last = self.count, t == length - 1
            if self.open[slot]:
                self.steps[self.open[slot].pop()]["following"] = number
            follows = final if last else float(number + 1)
            self.steps.append({"reward": reward, "final": follows, "terminated": terminated and last, "following": None})
            if not (last and ends):
                self.open[slot] = [number]
            self.count += 1
        return sample, rewards, final, terminated, bool(ends and not terminated)

    def returned(self, number, n):
        """(sum of rewards, discount, final observation) by walking on step by step."""
        total, discount = 0.0, 1.0
        for step in range(n):
            now = self.steps[number]
            total, discount = total + discount * float(now["reward"]), discount * GAMMA
            if now["following"] is None or step == n - 1:
                return total, 0.0 if now["terminated"] else discount, now["final"]
            number = now["following"]
        raise AssertionError


def check(replay, episodes, n):
    batch = replay.sample(0)
    for row, number in enumerate(batch["sample_id"].tolist()):
        total, discount, final = episodes.returned(number, n)
        assert batch["observations"].values[row] == number and batch["final_observations"][row] == final
        assert batch["rewards"].values[row] == pytest.approx(total, abs=1e-4)
        assert batch["discounts"][row] == pytest.approx(discount)
    assert set(batch["sample_id"]) <= set(range(max(0, episodes.count - replay.config.capacity), episodes.count))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 3), st.sampled_from([7, 30, 500]))
def test_n_step_returns_are_those_of_walking_on(seed, n, slots, capacity):
    episodes = Episodes(seed, slots)
    replay = make(ReplayConfig(capacity=capacity, batch_size=50, warmup=1, n_steps=n), 1, GAMMA)
    for _ in range(6):
        replay.add(episodes.rollout(4), 0)
        check(replay, episodes, n)


def prioritised(batch_size=4, **keys):
    return ReplayConfig(capacity=8, batch_size=batch_size, warmup=1, **({"priority": 0.5, "importance": 0.4} | keys))


def with_errors(batch, errors):
    return batch.with_columns(td_errors=Ragged(np.asarray(errors, np.float32), np.ones(len(batch), np.int64)))


def test_priorities_and_weights_by_hand():
    replay = make(prioritised(batch_size=2000), 1, GAMMA, num_draws=2)
    replay.add(Episodes(0, 1).rollout(4), 0)
    first = replay.sample(0)
    assert set(first["weights"]) == {1.0}, "all new ones alike"
    errors = np.array([4.0, 1.0, 0.0, 9.0])
    replay.learned(with_errors(first, errors[first["sample_id"]]))
    second = replay.sample(0)
    chances = (errors + 1e-6) ** 0.5 / ((errors + 1e-6) ** 0.5).sum()
    counts = np.bincount(second["sample_id"], minlength=4) / 2000
    assert counts == pytest.approx(chances, abs=2e-3), "stratified draws are nearly exact"
    drawn = np.unique(second["sample_id"])
    beta = 0.4 + 0.6 * 1 / 2
    weights = (4 * chances) ** -beta
    np.testing.assert_allclose(second["weights"], (weights / weights[drawn].max())[second["sample_id"]], rtol=1e-5)


def test_new_transitions_come_with_the_largest_priority_and_old_ones_are_forgotten():
    episodes, replay = Episodes(0, 1), make(prioritised(batch_size=1000), 1, GAMMA, num_draws=10)
    replay.add(episodes.rollout(8), 0)
    batch = replay.sample(0)
    replay.learned(with_errors(batch, np.where(batch["sample_id"] == 7, 4.0, 1.0)))
    replay.add(episodes.rollout(4), 0)
    replay.learned(with_errors(batch, np.full(1000, 100.0)).rows(batch["sample_id"] < 4))  # overwritten: no matter
    counts = np.bincount(replay.sample(0)["sample_id"], minlength=12) / 1000
    assert counts == pytest.approx(np.array([0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 2]) / 13, abs=5e-3)


@pytest.mark.parametrize("before", [1, 3])
def test_resuming_is_exact_with_returns_and_priorities(before, tmp_path):
    config = prioritised(n_steps=3)
    episodes, replay = Episodes(3, 2), make(config, 2, GAMMA, num_draws=20)

    def go_on(one, batch):
        one.add(batch, 0)
        sampled = one.sample(0)
        one.learned(with_errors(sampled, sampled["rewards"].values))
        return sampled

    for _ in range(before):
        go_on(replay, episodes.rollout(3))
    resumed = move(replay, make(config, 2, GAMMA, num_draws=20), tmp_path / "saved")
    for _ in range(4):
        batch = episodes.rollout(3)
        ours, theirs = go_on(replay, batch), go_on(resumed, batch)
        for (name, a), b in zip(values(ours).items(), values(theirs).values(), strict=True):
            assert np.array_equal(a, b), name
