import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replays import make_replay, move

from hybridflow.core.batch import Batch, Ragged
from hybridflow.rollout.buffer import Fifo
from hybridflow.rollout.replay import ReplayConfig

GAMMA = 0.9


def pieces(lengths, start=0, masked=()):
    """Pieces whose observations count up, so that every transition tells where it came from."""
    lengths = np.array(lengths, np.int64)
    total = int(lengths.sum())
    steps = start + np.arange(total)
    mask = ~np.isin(np.repeat(np.arange(len(lengths)), lengths), masked)
    return Batch(
        {
            "sample_id": np.arange(len(lengths)),
            "observations": Ragged(np.stack([steps, -steps], 1).astype(np.float32).reshape(-1, 2), lengths),
            "actions": Ragged(steps % 3, lengths),
            "rewards": Ragged(steps.astype(np.float32) / 2, lengths),
            "response_mask": Ragged(mask, lengths),
            "terminated": np.arange(len(lengths)) % 2 == 0,
            "truncated": np.zeros(len(lengths), bool),
            "final_observations": (1000.0 + start + np.arange(len(lengths) * 2)).astype(np.float32).reshape(-1, 2),
        }
    )


def slow_transitions(batch):
    """The definition, one step at a time."""
    out = []
    for row in range(len(batch)):
        observations = batch["observations"][row]
        for t in range(len(observations)):
            last = t == len(observations) - 1
            following = batch["final_observations"][row] if last else observations[t + 1]
            ended = bool(batch["terminated"][row]) and last
            if batch["response_mask"][row][t]:
                values = (batch["actions"][row][t], batch["rewards"][row][t], ended, *following)
                out.append((*observations[t].tolist(), *map(float, values)))
    return out


def rows_of(batch):
    columns = [batch[name].values for name in ("observations", "actions", "rewards")]
    columns += [batch["discounts"] == 0, batch["final_observations"]]
    return [tuple(float(x) for column in columns for x in np.ravel(column[row])) for row in range(len(batch))]


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4), min_size=1, max_size=5),
    st.integers(1, 9),
    st.booleans(),
)
def test_replay_holds_the_last_transitions_of_a_slow_twin(groups, capacity, drop_first_piece):
    replay = make_replay(ReplayConfig(capacity=capacity, batch_size=300, warmup=1), 3, GAMMA)
    expected, start = [], 0
    for lengths in groups:
        batch = pieces(lengths, start, masked=(0,) if drop_first_piece else ())
        replay.add(batch, 0)
        expected += slow_transitions(batch)
        start += sum(lengths)
    sampled = replay.sample(0)
    assert len(replay) == min(len(expected), capacity)
    if not expected:
        assert sampled is None
        return
    numbers = sampled["sample_id"]
    assert rows_of(sampled) == [expected[number] for number in numbers]
    assert set(numbers) == set(range(max(0, len(expected) - capacity), len(expected)))


def test_replay_waits_for_the_warmup_and_gives_single_steps():
    replay = make_replay(ReplayConfig(capacity=100, batch_size=4, warmup=5), 1, GAMMA)
    replay.add(pieces([4]), 0)
    assert replay.sample(0) is None
    replay.add(pieces([1]), 0)
    batch = replay.sample(0)
    assert batch.lengths.tolist() == [1] * 4 and batch["response_mask"].values.all()
    assert (
        batch["rewards"].values.dtype == np.float32
        and set(batch["weights"]) == {1.0}
        and batch["discounts"][0] == np.float32(GAMMA)
    )


def test_replay_draws_uniformly_and_differently_every_time():
    replay = make_replay(ReplayConfig(capacity=10, batch_size=5000, warmup=1), 1, GAMMA)
    replay.add(pieces([10]), 0)
    first, second = replay.sample(0)["sample_id"], replay.sample(0)["sample_id"]
    assert not np.array_equal(first, second)
    counts = np.bincount(first, minlength=10)
    assert counts.min() > 400 and counts.max() < 600


def test_a_full_ring_does_not_change_what_was_sampled():
    replay = make_replay(ReplayConfig(capacity=4, batch_size=8, warmup=1), 1, GAMMA)
    replay.add(pieces([4]), 0)
    sampled = replay.sample(0)
    before = rows_of(sampled)
    replay.add(pieces([4], start=50), 0)
    assert rows_of(sampled) == before


@pytest.mark.parametrize("before_save", [3, 12])
def test_replay_resumes_exactly(before_save, tmp_path):
    config = ReplayConfig(capacity=8, batch_size=6, warmup=1)
    replay = make_replay(config, 2, GAMMA)
    replay.add(pieces([before_save]), 0)
    replay.sample(0)
    resumed = move(replay, make_replay(config, 2, GAMMA), tmp_path / "saved")
    for buffer in (replay, resumed):
        buffer.add(pieces([2, 3], start=70), 0)
    for _ in range(3):
        ours, theirs = replay.sample(0), resumed.sample(0)
        assert rows_of(ours) == rows_of(theirs)
        assert np.array_equal(ours["sample_id"], theirs["sample_id"])


def test_a_saved_state_does_not_follow_the_buffer():
    replay = make_replay(ReplayConfig(capacity=4, batch_size=2, warmup=1), 1, GAMMA)
    replay.add(pieces([4]), 0)
    state = replay.state_dict()
    replay.add(pieces([4], start=50), 0)
    assert state["index"]["rewards"].tolist() == [0.0, 0.5, 1.0, 1.5]


def test_fifo_gives_each_batch_once_in_order_and_drops_stale_ones():
    fifo, first, second, third = Fifo(max_staleness=1), pieces([1]), pieces([2]), pieces([3])
    for version, batch in enumerate([first, second, third]):
        fifo.add(batch, version)
    assert fifo.sample(1) is first
    assert fifo.sample(3) is third and fifo.num_dropped == 1
    assert fifo.sample(3) is None


def test_fifo_resumes():
    fifo = Fifo()
    fifo.add(pieces([2, 1]), 5)
    fifo.add(pieces([4]), 6)
    assert fifo.sample(6)["observations"].lengths.tolist() == [4]
    fifo.add(pieces([3]), 7)
    resumed = Fifo()
    resumed.load_state_dict(pickle.loads(pickle.dumps(fifo.state_dict())))
    assert resumed.num_dropped == 1
    assert resumed.sample(7)["observations"].lengths.tolist() == [3] and resumed.sample(7) is None
