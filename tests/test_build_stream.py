"""What a run that took turns says about rollouts beside its learning."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import REVERSE, Outcome, with_keys, written

from hybridflow.build_stream import Recorded, recorded, recorded_lengths, streamed
from hybridflow.core.errors import ConfigError
from hybridflow.core.metrics import Span
from hybridflow.planner.lengths import Lengths
from hybridflow.planner.streaming import Engine, Order
from hybridflow.telemetry.records import append_record
from hybridflow.telemetry.rundir import RunDirectory
from hybridflow.telemetry.timeline import Timeline

ENGINE, LEARN_S, STEPS = Engine(16, 0.01, 0.002), 0.5, 30
DRAWN = Lengths(50.0, 30.0, 200.0).draw(np.random.default_rng(1), (STEPS, 16)).round()


def made(folder: Path, **keys: Any) -> RunDirectory:
    return RunDirectory.create(folder / "run", written(folder, with_keys(REVERSE, **keys)).read_text())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """4 x 4 responses a step, drawn by a known engine, 5 of which were kept as samples; one step met another program."""
    directory = made(tmp_path_factory.mktemp("runs"))
    timeline = Timeline(directory.timeline)
    for step, lengths in enumerate(DRAWN, 1):
        generate_s = lengths.max() * ENGINE.step_s + lengths.sum() * ENGINE.row_s + (9.0 if step in (1, 7) else 0.0)
        record = {"mean": lengths.mean(), "std": lengths.std(), "max": lengths.max()}
        named = {f"response_length/{name}": value for name, value in record.items()}
        append_record(directory.metrics, {"step": step, "time/step_s": generate_s + LEARN_S, **named})
        timeline.add(
            step,
            [
                Span("sampler.rollout", "generate", 0.0, generate_s, ""),
                Span("actor.update", "train", generate_s, LEARN_S, ""),
            ],
        )
        for tokens in lengths[:5]:
            append_record(directory.samples, {"step": step, "tokens": int(tokens)})
    timeline.close()
    return directory.path


def test_a_run_tells_its_engine_its_lengths_and_its_learning(run: Path) -> None:
    found = recorded(run)
    assert (found.groups, found.rows, found.replicas, found.engine.slots) == (4, 4, 1, 16)
    assert (found.engine.step_s, found.engine.row_s, found.learn_s) == pytest.approx((0.01, 0.002, LEARN_S), rel=1e-3)
    assert len(found.lengths.recorded) == 5 * STEPS and found.lengths.longest <= 200.0


def test_in_turns_steps_take_what_they_took_and_beside_learning_less(run: Path) -> None:
    found = recorded(run)
    in_turns, ahead = (streamed(found, order, 200).step_s for order in (Order(0, "even"), Order(2, partial=True)))
    assert in_turns == pytest.approx(found.step_s, rel=0.1)
    assert found.lengths.mean * 16 * (ENGINE.row_s + ENGINE.step_s / 16) * 0.95 < ahead < in_turns - 0.9 * LEARN_S


def test_without_samples_lengths_have_the_mean_and_deviation_of_the_steps(run: Path, tmp_path: Path) -> None:
    directory = made(tmp_path)
    directory.metrics.write_bytes((run / "metrics.jsonl").read_bytes())
    lengths = recorded_lengths(directory.path)
    assert not lengths.recorded and lengths.longest == DRAWN.max()
    assert (lengths.mean, lengths.deviation) == pytest.approx((DRAWN.mean(), DRAWN.std()))


def test_equal_lengths_are_explained_by_one_kind_of_work(run: Path, tmp_path: Path) -> None:
    directory = made(tmp_path)
    directory.timeline.write_bytes((run / "timeline.json").read_bytes())
    for line in (run / "metrics.jsonl").read_text().splitlines():
        alike = {"response_length/mean": 5.0, "response_length/max": 5.0, "response_length/std": 0.0}
        append_record(directory.metrics, {**json.loads(line), **alike})
    found = recorded(directory.path)
    assert min(found.engine.step_s, found.engine.row_s) >= 0
    assert streamed(found, Order(0, "even"), 20).step_s == pytest.approx(found.step_s, rel=0.05)


def test_a_real_run_is_read(hybridflow: Callable[..., Outcome], tmp_path: Path) -> None:
    config = written(tmp_path, with_keys(REVERSE, train__steps=7))
    assert hybridflow("train", config, "--run_dir", tmp_path / "run").code == 0
    found = recorded(tmp_path / "run")
    assert isinstance(found, Recorded) and (found.groups, found.rows, found.replicas) == (4, 4, 1)
    assert 1 <= found.lengths.mean <= 4 and found.lengths.longest <= 4
    assert streamed(found, Order(0, "even"), 20).step_s > 0 and 0 < found.learn_s < found.step_s


def test_runs_that_say_nothing_are_told_in_a_line(tmp_path: Path) -> None:
    directory = made(tmp_path)
    with pytest.raises(ConfigError, match=r"^.*run: 0 steps after the first in which responses were drawn; expected 5$"):
        recorded(directory.path)
    with pytest.raises(
        ConfigError, match=r"^.*run: no lengths of responses in metrics.jsonl; expected a run that draws text$"
    ):
        recorded_lengths(directory.path)
