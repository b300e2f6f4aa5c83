"""Replay against a plain list: rows in one or several workers, in memory or in files, as transitions or sequences."""

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replays import make_replay, move, values

from hybridflow.core.batch import Batch, Ragged
from hybridflow.core.errors import CheckpointError, ContractError, ResourceError
from hybridflow.core.roles import WorkerContext
from hybridflow.rollout.replay import ReplayConfig
from hybridflow.rollout.replay_layout import BLOCK, Ring
from hybridflow.workers.replay_rows import ReplayWorker

GAMMA = 0.9


def pieces(lengths, start, random):
    """Pieces whose numbers all tell where they come from; some steps were not the actor's."""
    lengths = np.array(lengths, np.int64)
    steps = start + np.arange(int(lengths.sum()))
    ended = random.integers(0, 3, len(lengths))
    return Batch(
        {
            "sample_id": start * 1000 + np.arange(len(lengths)) * 2,
            "observations": Ragged(np.stack([steps, -steps], 1).astype(np.float32).reshape(-1, 2), lengths),
            "actions": Ragged(steps % 7, lengths),
            "rewards": Ragged(steps.astype(np.float32), lengths),
            "response_mask": Ragged(random.random(len(steps)) < 0.9, lengths),
            "terminated": ended == 1,
            "truncated": ended == 2,
            "final_observations": 1e5 + steps[np.cumsum(lengths) - 1, None].astype(np.float32) * np.ones(2, np.float32),
        }
    )


def plain(batch, length):
    """The definition: a piece's action steps, ``length`` at a time: (observations, actions, rewards, final, goes on)."""
    out = []
    for row in range(len(batch)):
        observations, mask = batch["observations"][row], batch["response_mask"][row]
        steps = np.flatnonzero(mask)
        for first in range(0, len(steps), length):
            at = steps[first : first + length]
            at_end = at[-1] == len(mask) - 1
            final = batch["final_observations"][row] if at_end else observations[at[-1] + 1]
            goes_on = not (at_end and batch["terminated"][row])
            unit = observations[at], batch["actions"][row][at], batch["rewards"][row][at], final, goes_on
            out.append(tuple(np.asarray(part).tolist() for part in unit))
    return out


def rows_of(batch):
    columns = [batch["observations"], batch["actions"], batch["rewards"]]
    return [
        tuple(
            np.asarray(part).tolist()
            for part in (
                *(column[row] for column in columns),
                batch["final_observations"][row],
                batch["discounts"][row] > 0,
            )
        )
        for row in range(len(batch))
    ]


CASES = st.tuples(
    st.integers(0, 10**6),
    st.lists(st.lists(st.integers(1, 90), min_size=1, max_size=3), min_size=1, max_size=5),
    st.integers(1, 300),
    st.integers(1, 4),
    st.integers(1, 5),
)


@settings(max_examples=30, deadline=None)
@given(CASES)
def test_nothing_is_lost_or_mixed_by_any_number_of_shards(case):
    seed, groups, capacity, sequence, shards = case
    random, expected, start = np.random.default_rng(seed), [], 0
    config = ReplayConfig(capacity=max(capacity, sequence), batch_size=40, warmup=1, sequence=sequence)
    one, several = (make_replay(config, 3, GAMMA, shards=number) for number in (1, shards))
    for lengths in groups:
        batch = pieces(lengths, start, random)
        start += sum(lengths)
        expected += plain(batch, sequence)
        for replay in (one, several):
            replay.add(batch, 0)
        sampled = several.sample(0)
        if sampled is None:
            assert not expected
            continue
        assert rows_of(sampled) == [expected[number] for number in sampled["sample_id"]]
        assert sampled["sample_id"].min() >= len(expected) - len(several)
        for (name, ours), theirs in zip(values(sampled).items(), values(one.sample(0)).values(), strict=True):
            np.testing.assert_array_equal(ours, theirs, err_msg=name)
    held = np.arange(max(0, len(expected) - one.capacity), len(expected))
    kept = several.rows.steps(None, held % one.capacity, np.array([len(expected[n][1]) for n in held], np.int64))
    assert kept["actions"].values.tolist() == [action for number in held for action in expected[number][1]]
    assert sum(len(worker.rows["final_observations"]) for worker in several.rows.workers) == one.capacity


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 1000), st.integers(1, 6))
def test_every_place_of_a_ring_is_one_rank_s(capacity, ranks):
    ring, places = Ring(capacity, ranks), np.arange(capacity)
    for rank in range(ranks):
        local = ring.local(places[ring.rank(places) == rank])
        assert local.tolist() == list(range(ring.size(rank)))
    assert max(map(ring.size, range(ranks))) - min(map(ring.size, range(ranks))) <= BLOCK


@pytest.mark.parametrize(("before", "after", "sequence"), [(1, 3, 1), (3, 2, 1), (2, 1, 3), (4, 4, 1)])
def test_resuming_with_another_number_of_shards_is_exact(before, after, sequence, tmp_path):
    random = np.random.default_rng(0)
    keys = {"capacity": 120, "batch_size": 20, "warmup": 1, "priority": 0.7, "n_steps": 3, "sequence": sequence}
    replay = make_replay(ReplayConfig(**keys), 3, GAMMA, shards=before)
    fresh = make_replay(ReplayConfig(**keys, spill=str(tmp_path)), 3, GAMMA, shards=after)
    replay.add(pieces([90, 10, 50], 0, random), 0)
    replay.sample(0)
    resumed = move(replay, fresh, tmp_path / "first")
    for step in range(5):
        batch = pieces([80, 60], 150 + 140 * step, random)
        drawn = []
        for one in (replay, resumed):
            one.add(batch, step)
            drawn.append(one.sample(step))
            one.learned(drawn[-1].with_columns(td_errors=drawn[-1]["rewards"]))
        for (name, ours), theirs in zip(values(drawn[0]).items(), values(drawn[1]).values(), strict=True):
            np.testing.assert_array_equal(ours, theirs, err_msg=name)
        assert replay.metrics() == resumed.metrics() or step == 0


def test_a_checkpoint_of_other_rows_is_refused(tmp_path):
    config = ReplayConfig(capacity=100, batch_size=4, warmup=1)
    replay = make_replay(config, 3, GAMMA, shards=2)
    replay.add(pieces([90], 0, np.random.default_rng(0)), 0)
    with pytest.raises(CheckpointError, match=r"replay\.capacity = 90: the run was saved with 100; set it back"):
        move(replay, make_replay(config.model_copy(update={"capacity": 90}), 3, GAMMA), tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"replay\.sequence = 2: the run was saved with 1; set it back"):
        move(replay, make_replay(config.model_copy(update={"sequence": 2}), 3, GAMMA), tmp_path / "sequences")
    (tmp_path / "whole").mkdir()
    states = [worker.save(tmp_path / "whole" / "replay") for worker in replay.rows.workers]
    files = [file for worker in replay.rows.workers for file in worker.saved(True)[0]]
    resumed = make_replay(config, 3, GAMMA).rows.workers[0]
    with pytest.raises(CheckpointError, match=r"of .* replayed rows are there"):
        resumed.load(tmp_path / "whole" / "replay", states[0], files[:1])
    path = tmp_path / "whole" / files[1].name
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="missing or damaged"):
        resumed.load(tmp_path / "whole" / "replay", states[0], files)


def remembered(lengths, start, random):
    """Pieces, each with a memory that tells which one it is."""
    batch = pieces(lengths, start, random)
    mask = Ragged(np.ones(int(sum(lengths)), bool), batch.lengths)
    return batch.with_columns(response_mask=mask, memory=batch["sample_id"][:, None] * np.ones(3, np.float32))


@pytest.mark.parametrize("shards", [1, 3])
def test_sequences_come_with_the_memory_that_they_began_with(shards, tmp_path):
    config = ReplayConfig(capacity=200 * 4, batch_size=500, warmup=1, sequence=4)
    memory, random = np.dtype((np.float32, (3,))), np.random.default_rng(0)
    replay, fresh = (make_replay(config, 3, GAMMA, memory=memory, shards=number) for number in (shards, 2))
    of_actions, start = {}, 0
    for _ in range(3):
        lengths = random.integers(1, 5, 90).tolist()
        batch = remembered(lengths, start, random)
        start += sum(lengths)
        of_actions |= {int(batch["rewards"][row][0]): batch["memory"][row].tolist() for row in range(90)}
        replay.add(batch, 0)
    replay = move(replay, fresh, tmp_path / "moved")
    drawn = replay.sample(0)
    assert [memory.tolist() for memory in drawn["memory"]] == [of_actions[int(rewards[0])] for rewards in drawn["rewards"]]
    assert len(np.unique(drawn["memory"][:, 0])) > 100
    with pytest.raises(ContractError, match="a piece has more than 4 steps, and a memory of its beginning alone"):
        replay.add(remembered([5], start, random), 0)


def test_the_ratio_of_draws_counts_the_steps_of_sequences():
    config = ReplayConfig(capacity=1000, batch_size=5, warmup=20, samples_per_insert=2.0, sequence=4)
    replay = make_replay(config, 1, GAMMA, draws=100)
    replay.add(remembered([4] * 35, 0, np.random.default_rng(0)), 0)
    drawn = replay.sample(0)
    assert len(drawn["rewards"].values) == 240 == 2.0 * (35 * 4 - 20)
    assert replay.metrics()["replay/samples_per_insert"] == 2.0 and replay.sample(0) is None


def test_sequences_have_priorities_of_largest_and_mean_errors():
    config = ReplayConfig(capacity=12, batch_size=3000, warmup=1, priority=1.0, sequence=3)
    replay = make_replay(config, 1, GAMMA, num_draws=5)
    batch = pieces([3, 3, 2], 0, np.random.default_rng(1))
    replay.add(batch.with_columns(response_mask=Ragged(np.ones(8, bool), batch.lengths)), 0)
    first = replay.sample(0)
    assert first.lengths.tolist() == [(3, 3, 2)[number] for number in first["sample_id"]]
    errors = [[1.0, -5.0, 0.0], [2.0, 2.0, 2.0], [0.0, 1.0]]
    replay.learned(first.with_columns(td_errors=Ragged.from_rows([errors[n] for n in first["sample_id"]], np.float32)))
    expected = np.array([0.9 * 5 + 0.1 * 2, 2.0, 0.9 + 0.05])
    counts = np.bincount(replay.sample(0)["sample_id"], minlength=3) / 3000
    assert counts == pytest.approx(expected / expected.sum(), abs=2e-3)


@settings(max_examples=30, deadline=None)
@given(st.floats(0.05, 40), st.integers(1, 40), st.integers(1, 60), st.integers(1, 30), st.integers(1, 3))
def test_no_row_is_drawn_more_often_than_samples_per_insert_and_no_draw_is_left_out(ratio, batch_size, width, warmup, most):
    config = ReplayConfig(capacity=500, batch_size=batch_size, warmup=warmup, samples_per_insert=ratio)
    replay, random = make_replay(config, 1, GAMMA, draws=most), np.random.default_rng(0)
    most_in_a_step = int(np.ceil(ratio * width / batch_size))
    for step in range(6):
        batch = pieces([width], step * width, random)
        replay.add(batch.with_columns(response_mask=Ragged(np.ones(width, bool), batch.lengths)), 0)
        before = replay.num_draws
        while (sampled := replay.sample(0)) is not None:
            assert len(sampled) % batch_size == 0 and len(sampled) <= most * batch_size
        allowed = ratio * max(0, (step + 1) * width - warmup)
        assert allowed - batch_size < replay.num_draws * batch_size <= allowed or replay.num_draws == allowed == 0
        assert replay.num_draws - before <= most_in_a_step


def test_metrics_tell_what_passed_and_how_old_it_was():
    replay, random = make_replay(ReplayConfig(capacity=20, batch_size=4, warmup=1), 1, GAMMA, row_bytes=10), None
    random = np.random.default_rng(0)
    for version in (0, 3):
        batch = pieces([5], 5 * version, random)
        replay.add(batch.with_columns(response_mask=Ragged(np.ones(5, bool), batch.lengths)), version)
    numbers = np.concatenate([replay.sample(7)["sample_id"] for _ in range(2)])
    told = replay.metrics()
    assert told.pop("replay/samples_per_insert") == pytest.approx(8 / 9)
    assert told == {
        "replay/inserted": 10,
        "replay/drawn": 8,
        "replay/size": 10,
        "replay/occupancy": 0.5,
        "replay/bytes": 100,
        "replay/age_steps": pytest.approx(np.mean(10 - numbers)),
        "replay/age_updates": pytest.approx(np.mean(np.where(numbers < 5, 7, 4))),
    }
    assert "replay/drawn" not in replay.metrics()
    state = replay.state_dict()
    replay.sample(8)
    replay.load_state_dict(state)
    assert "replay/drawn" not in replay.metrics(), "of a step that comes again"


def worker(spill, capacity=1000):
    frame = np.dtype((np.uint8, (84, 84, 4)))
    types = {"observations": frame, "actions": np.dtype(np.int64), "final_observations": frame}
    return ReplayWorker(WorkerContext(), capacity=capacity, types=types, spill=str(spill))


def test_a_folder_that_cannot_hold_the_rows_is_refused_before_work(tmp_path):
    with pytest.raises(ResourceError, match=r"the rows take 5\d+\.\d GB, but .* GB are free there; lower replay\.capacity"):
        worker(tmp_path, 10**10)
    with pytest.raises(ResourceError, match=r"no such folder on .*; make it first"):
        worker(tmp_path / "none")
    assert os.listdir(tmp_path) == []


SPILLING = """
import resource, sys
import numpy as np
from hybridflow.core.batch import Batch, Ragged
from hybridflow.core.roles import WorkerContext
from hybridflow.workers.replay_rows import ReplayWorker

size = 4000
frame = np.dtype((np.uint8, (84, 84, 4)))
types = {"observations": frame, "actions": np.dtype(np.int64), "final_observations": frame}
own = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmData")) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (own + 100_000_000,) * 2)
try:
    ReplayWorker(WorkerContext(), capacity=size, types=types)
except MemoryError:
    print("226 MB are too much")
rows = ReplayWorker(WorkerContext(), capacity=size, types=types, spill=sys.argv[1])
for first in range(0, size, 100):
    lengths = np.array([100])
    frames = np.broadcast_to((first + np.arange(100)).astype(np.uint8)[:, None, None, None], (100, 84, 84, 4))
    columns = {"observations": Ragged(frames, lengths), "actions": Ragged(first + np.arange(100), lengths)}
    mask = Ragged(np.ones(100, bool), lengths)
    rows.insert(Batch({**columns, "response_mask": mask, "final_observations": np.zeros((1, 84, 84, 4), np.uint8)}), first)
drawn = rows.steps(None, np.arange(0, size, 40), np.ones(100, np.int64))
assert (drawn["observations"].values[:, 0, 0, 0] == np.arange(0, size, 40) % 256).all()
print("kept", size)
"""


def test_rows_that_do_not_fit_into_memory_fit_into_files(tmp_path):
    ran = subprocess.run([sys.executable, "-c", SPILLING, tmp_path], capture_output=True, text=True, timeout=60)
    assert ran.stdout == "226 MB are too much\nkept 4000\n", ran.stderr
    assert os.listdir(tmp_path) == []
