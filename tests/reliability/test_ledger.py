"""Every sample is accounted for once, whatever happens to the run; what isn't is found."""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from conftest import CARTPOLE, REVERSE, with_keys
from hypothesis import given, settings
from hypothesis import strategies as st
from test_runs import ENVIRONMENTS, TEXT, run

from hybridflow.commands.ledger import balance, coverage
from hybridflow.core.batch import Batch
from hybridflow.core.errors import CheckpointError, WorkerError
from hybridflow.core.metrics import Metrics
from hybridflow.core.roles import Algorithm
from hybridflow.ledger import Ledger, ranges
from hybridflow.rollout.buffer import Fifo, InformativeGroups
from hybridflow.rollout.schedule import DynamicSampling, Schedule, Source, Synchronous
from hybridflow.train import Trainer

SIZE = 6


def draw(first: int, num_prompts: int) -> Batch:
    """Two samples of each prompt."""
    ids = 2 * first + np.arange(2 * num_prompts)
    return Batch({"sample_id": ids, "group_id": ids // 2})


class Scored(Algorithm):
    """Scores of every third group are equal, and the scorer fails on every seventh sample. ``fails`` says when learning
    does."""

    def __init__(self) -> None:
        self.fails = False

    def rollout(self, source: Batch, /) -> Batch:
        ids = source["sample_id"]
        scores = ((ids % 2) * (ids // 2 % 3 > 0)).astype(np.float32)
        return source.with_columns(scores=scores, score_failed=ids % 7 == 3)

    def learn(self, batch: Batch, /) -> Batch:
        if self.fails:
            raise WorkerError("it was killed")
        return batch


class Lagging(Synchronous):
    """Learns from what was collected ``lag`` rollouts before, which waits in the buffer meanwhile."""

    def __init__(self, lag: int) -> None:
        super().__init__()
        self.lag, self.num_waiting = lag, 0

    def step(self, step: int, algorithm: Algorithm, source: Source, buffer: Any, /) -> Batch | None:
        buffer.add(algorithm.rollout(source(step)), self.version)
        self.num_waiting += 1
        learned = self.learn(algorithm, buffer) if self.num_waiting > self.lag else None
        if learned is not None:
            self.num_waiting -= 1
        return learned

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "waiting": self.num_waiting}

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        super().load_state_dict(state)
        self.num_waiting = state["waiting"]


class Drained:
    """Of a runtime, what a trainer needs."""

    def drain(self) -> tuple[Metrics, list[Any]]:
        return Metrics(), []


def synchronous() -> tuple[Any, Schedule]:
    return Fifo(), Synchronous()


def lagging() -> tuple[Any, Schedule]:
    return Fifo(max_staleness=9), Lagging(2)


def too_old() -> tuple[Any, Schedule]:
    return Fifo(max_staleness=1), Lagging(2)


def dynamic() -> tuple[Any, Schedule]:
    buffer = InformativeGroups()
    return buffer, DynamicSampling(draw, buffer, 3, 1)


class Life:
    """A run that can be saved, killed and rewound."""

    def __init__(self, folder: Path, kind: Callable[[], tuple[Any, Schedule]]) -> None:
        self.path, self.kind = folder / "ledger.sqlite", kind
        self.saved: dict[int, Any] = {}
        self.start()

    def start(self, step: int = 0) -> None:
        """A new process."""
        self.algorithm = Scored()
        buffer, schedule = self.kind()
        source = lambda step: draw(SIZE // 2 * (step - 1), SIZE // 2)  # noqa: E731
        self.trainer = Trainer(self.algorithm, source, buffer, schedule, Drained())  # type: ignore[arg-type]
        self.saved.setdefault(0, self.trainer.state_dict())
        self.trainer.load_state_dict(self.saved[step])
        self.ledger = Ledger(self.path, self.trainer, ("score_failed",), sampled=False)
        self.trainer.hooks = [self.ledger]

    def train(self, steps: int) -> None:
        self.trainer.train(self.trainer.step + steps)

    def save(self) -> None:
        self.ledger.write(durable=True)
        self.saved[self.trainer.step] = self.trainer.state_dict()

    def kill(self, newest: bool) -> None:
        """What isn't written is lost; it goes on from a checkpoint."""
        self.ledger._file.close()
        self.start(max(self.saved) if newest else min(step for step in self.saved))
        self.forget_later()

    def fail(self) -> None:
        """In the middle of a step; the process goes on from its newest checkpoint."""
        self.algorithm.fails = True
        with suppress(WorkerError):
            self.train(1)
        self.algorithm.fails = False
        self.trainer.load_state_dict(self.saved[max(self.saved)])
        self.ledger.rewind(self.trainer.step)

    def forget_later(self) -> None:
        self.saved = {step: state for step, state in self.saved.items() if step <= self.trainer.step}


EVENTS = st.lists(st.sampled_from(["train", "write", "save", "kill", "kill back", "fail"]), max_size=12)


@pytest.mark.parametrize("kind", [synchronous, lagging, too_old, dynamic])
@settings(max_examples=12, deadline=None, derandomize=True)
@given(events=EVENTS)
def test_accounts_close_after_kills_failures_and_rewinds(
    kind: Callable[[], tuple[Any, Schedule]], events: list[str]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        life, undisturbed = Life(Path(folder), kind), Path(folder) / "undisturbed"
        for event in events:
            match event:
                case "train":
                    life.train(2)
                case "write":
                    life.ledger.write()
                case "save":
                    life.save()
                case "fail":
                    life.fail()
                case _:
                    life.kill(newest=event == "kill")
            life.ledger.write()
            assert balance(life.path).problems == []
        life.train(3)
        life.ledger.write()
        undisturbed.mkdir()
        other = Life(undisturbed, kind)
        other.train(life.trainer.step)
        other.ledger.write()
        found, expected = balance(life.path), balance(other.path)
        assert (found.problems, found.counts, found.last_step) == ([], expected.counts, life.trainer.step)
        starts = 1 + sum(event in ("kill", "kill back", "fail") for event in events)
        assert (found.attempts, expected.attempts, expected.redone) == (starts, 1, 0)


def counts(folder: Path, kind: Callable[[], tuple[Any, Schedule]], steps: int) -> dict[str, int]:
    life = Life(folder, kind)
    life.train(steps)
    life.ledger.write()
    found = balance(life.path)
    assert found.problems == []
    return found.counts


def test_every_drop_has_its_reason(tmp_path: Path) -> None:
    """Of 36 samples 3, 10, 17, 24 and 31 fail, so with their neighbours 10 aren't learned from."""
    for name in ("a", "b", "c", "d"):
        (tmp_path / name).mkdir()
    all_of = {"issued": 36, "generated": 36, "scored": 31}
    failed = {"dropped: failed reward": 10, "waiting": 0}
    assert counts(tmp_path / "a", synchronous, 6) == {**all_of, "trained": 26, **failed}
    learned = counts(tmp_path / "b", lagging, 6)
    assert learned["waiting"] == 12 and learned["trained"] + learned["dropped: failed reward"] == 24
    old = counts(tmp_path / "c", too_old, 6)
    assert old["issued"] == old["trained"] + old["dropped: failed reward"] + old.get("dropped: too old", 0) + old["waiting"]
    dropped = counts(tmp_path / "d", dynamic, 6)
    assert dropped["dropped: equal scores"] > 0 and dropped["dropped: failed reward"] > 0


class Losing(Scored):
    """Loses a row of each rollout."""

    def rollout(self, source: Batch, /) -> Batch:
        return super().rollout(source.rows(np.arange(1, len(source))))


class Repeating(Scored):
    """Makes a row of each rollout twice."""

    def rollout(self, source: Batch, /) -> Batch:
        return super().rollout(source.rows([0, *range(len(source))]))


class Again(Fifo):
    """Gives every batch twice."""

    def sample(self, version: int, /) -> Batch | None:
        batch = super().sample(version)
        return None if batch is None else Batch.concat([batch, batch])


class Hiding(Fifo):
    """Holds what it doesn't tell."""

    def waiting(self) -> list[Batch]:
        return []


class Wrong(Life):
    wrong: ClassVar[type[Algorithm]] = Scored

    def start(self, step: int = 0) -> None:
        super().start(step)
        self.ledger.trainer.algorithm.algorithm = type(self).wrong()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("algorithm", "buffer", "schedule", "problem"),
    [
        (Losing, Fifo(), Synchronous(), "2 samples are neither trained, dropped nor waiting, from 0 on"),
        (Repeating, Fifo(), Synchronous(), "2 samples are trained twice, from 0 on"),
        (Scored, Again(), Synchronous(), "8 samples are trained twice, from 0 on"),
        (Scored, Hiding(9), Lagging(1), "6 samples are neither trained, dropped nor waiting, from 6 on"),
    ],
)
def test_what_is_lost_or_counts_twice_is_found(
    algorithm: type[Algorithm], buffer: Any, schedule: Any, problem: str, tmp_path: Path
) -> None:
    class Found(Wrong):
        wrong = algorithm

    life = Found(tmp_path, lambda: (buffer, schedule))
    life.train(2)
    life.ledger.write()
    assert problem in balance(life.path).problems


@settings(max_examples=30, deadline=None, derandomize=True)
@given(arrays=st.lists(st.lists(st.integers(-5, 12), max_size=12), min_size=1, max_size=3))
def test_ranges_and_what_they_cover(arrays: list[list[int]]) -> None:
    found = ranges([np.array(array, np.int64) for array in arrays])
    for number, array in enumerate(arrays):
        there = [first + i for owner, first, count in found if owner == number for i in range(count)]
        assert sorted(there) == sorted(array)
    starts, lengths, covered = coverage([[row[1:] for row in found if row[0] == i] for i in range(len(arrays))])
    for place in range(-6, 14):
        at = [k for k in range(len(starts)) if starts[k] <= place < starts[k] + lengths[k]]
        expected = [array.count(place) for array in arrays]
        assert [int(covered[i][at[0]]) if at else 0 for i in range(len(arrays))] == expected


@pytest.mark.parametrize("name", ["grpo", "impala-cartpole", "dqn-switches"])
def test_a_run_that_went_back_is_the_whole_one(name: str, tmp_path: Path) -> None:
    data = with_keys({**TEXT, **ENVIRONMENTS}[name], checkpoint={"every": 4, "keep": 5})
    cut = run(data, tmp_path / "cut", train__steps=10)
    whole = balance(cut / "ledger.sqlite")
    resumed = run(data, cut, str(cut / "checkpoints" / "step-00000004"), train__steps=10)
    found = balance(resumed / "ledger.sqlite")
    assert whole.problems == found.problems == []
    assert found.counts == whole.counts and found.redone > 0 and (found.attempts, whole.attempts) == (2, 1)
    assert (found.first_step, found.last_step) == (1, 10)
    if name == "dqn-switches":
        assert found.counts["steps collected"] == found.counts["steps added"] > 50 and found.counts["rows drawn"] > 0


def test_a_run_that_kept_no_ledger_is_accounted_for_from_where_it_goes_on(tmp_path: Path) -> None:
    for name in ("impala-cartpole", "dqn-switches"):
        data = with_keys(ENVIRONMENTS[name], checkpoint={"every": 4})
        cut = run(data, tmp_path / name, train__steps=4)
        (cut / "ledger.sqlite").unlink()
        found = balance(run(data, cut, "latest", train__steps=8) / "ledger.sqlite")
        assert found.problems == [] and (found.first_step, found.last_step) == (5, 8)


def test_the_command_prints_the_balance_and_tells_what_is_wrong(hybridflow: Any, tmp_path: Path) -> None:
    out = run(REVERSE, tmp_path / "run")
    outcome = hybridflow("ledger", out)
    assert outcome.code == 0 and "closed: every sample is accounted for once" in outcome.out
    assert hybridflow("ledger", out, "--json").code == 0
    file = sqlite3.connect(out / "ledger.sqlite")
    file.execute("UPDATE events SET count = count - 1 WHERE event = 'trained' AND step = 2")
    file.commit()
    outcome = hybridflow("ledger", out)
    assert outcome.code == 1 and "1 samples are neither trained, dropped nor waiting, from 31 on" in outcome.out
    assert hybridflow("ledger", out, "--json").code == 1
    file.execute("UPDATE events SET first = first - 3 WHERE event = 'trained' AND step = 2")
    file.commit()
    assert "3 samples are trained twice, from 13 on" in hybridflow("ledger", out).out
    file.close()
    shutil.rmtree(out / "checkpoints")
    (out / "ledger.sqlite").write_bytes(b"no database" * 1000)
    assert "can't be read" in hybridflow("ledger", out).err
    (out / "ledger.sqlite").unlink()
    assert hybridflow("ledger", out).code == 2


def test_a_damaged_ledger_is_told_before_a_resumed_run_trains(tmp_path: Path) -> None:
    data = with_keys(CARTPOLE, checkpoint={"every": 2})
    out = run(data, tmp_path / "run")
    (out / "ledger.sqlite").write_bytes(b"no database" * 1000)
    with pytest.raises(CheckpointError, match=r"ledger.sqlite: damaged .* remove it and go on with --resume"):
        run(data, out, "latest", train__steps=4)
