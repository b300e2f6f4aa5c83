"""``train --replay RUN``: a run whose result depended on what came first is repeated, bit for bit, whoever is slow."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count, pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from conftest import CARTPOLE, REVERSE, Outcome, with_keys, written
from test_runs import assert_equal, run, state
from test_schedules import ASYNC, PPO, on_pools, sampled
from test_worker_groups import learned

from hybridflow.arrivals import read_recording
from hybridflow.commands.ledger import balance
from hybridflow.config import resolved, validate
from hybridflow.launch import train

TEXT = with_keys(
    on_pools(with_keys(PPO, schedule=ASYNC, evaluation={"every": 4, "limit": 8}, checkpoint={"every": 4}), 2),
    train__steps=8,
    train__prompts_per_step=8,
    data__options__length=6,
    generation__max_new_tokens=40,
)
A3C = with_keys(
    CARTPOLE,
    algorithm="a3c",
    ppo=None,
    critic=None,
    actor={"net": {"hidden": [8]}, "optimizer": {"lr": 1e-2}},
    environment={"id": "CartPole-v1", "num_envs": 4, "workers": 2, "steps_per_rollout": 8},
    train={"steps": 8},
    runtime={"kind": "ray", "timeout_s": 60},
    placement={"pools": {"train": 1, "draw": 2}, "roles": {"actor": "train", "sampler": "draw"}},
    checkpoint={"every": 8},
)
IMPALA = with_keys(
    A3C, algorithm="impala", critic={"net": {"hidden": [8]}}, placement__roles__critic="train", train__minibatches=None
)


@contextmanager
def disturbed(rank: int, every: int = 2, stopped_s: float = 0.1, killed: int = -1) -> Iterator[None]:
    """Sampler ``rank`` stands still for a moment every so many times that a learner is asked to learn, or is ``killed`` at
    one of these times."""
    from hybridflow.controller.ray_runtime import RayRuntime

    call, times = RayRuntime.call, count()

    def stopping(runtime: RayRuntime, role: Any, name: str, *arguments: Any) -> Any:
        if name in ("update", "apply") and (time := next(times)) % every == 0:
            pid = runtime.pids["draw", rank]
            if time == killed:
                os.kill(pid, signal.SIGKILL)
            else:
                os.kill(pid, signal.SIGSTOP)
                threading.Timer(stopped_s, os.kill, (pid, signal.SIGCONT)).start()
        return call(runtime, role, name, *arguments)

    with mock.patch.object(RayRuntime, "call", stopping):
        yield


def repeated(data: dict[str, Any], of: Path, path: Path, **keys: Any) -> Path:
    config = validate(with_keys(data, run_dir=str(path), **keys), "test")
    assert train(config, recording=read_recording(of, config)) == 0
    assert (path / "config.toml").read_text().startswith(f"# a replay of {of}\n")
    return path


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "arrivals.jsonl").read_text().splitlines()]


def tapes(path: Path) -> list[Any]:
    """Those of both samplers, and who was dealt what."""
    told = [line for line in lines(path) if "tapes" in line]
    ranks = [[entry for line in told for entry in line["tapes"][rank]] for rank in range(2)]
    return [*ranks, [worker for line in told for worker in line["dealt"]]]


def assert_same(one: Path, other: Path) -> None:
    assert learned(one) == learned(other)
    assert_equal(state(one), state(other))
    assert balance(one / "ledger.sqlite") == balance(other / "ledger.sqlite")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize(
    "partial", [pytest.param(True, id="partial"), pytest.param(False, id="whole", marks=pytest.mark.long)]
)
def test_an_asynchronous_run_is_repeated_whoever_is_slow(partial: bool, tmp_path: Path) -> None:
    data = with_keys(TEXT, schedule__partial_rollouts=partial)
    with disturbed(0):
        whole = run(data, tmp_path / "whole")
    with disturbed(1):
        replay = repeated(data, whole, tmp_path / "replay")
        other = run(data, tmp_path / "other")
    assert_same(whole, replay)
    assert tapes(whole) == tapes(replay) != tapes(other)
    changes = [new for path in (whole, other) for tape in tapes(path)[:2] for old, new in pairwise(tape) if new[3] > old[3]]
    assert any(in_flight for _, in_flight, *_ in changes) == partial, (
        "new weights came in the middle of responses, or never"
    )
    assert sampled(whole) == sampled(replay)
    # A shorter one, which ends where the whole one had more under way, and one of a replay, which goes on longer.
    short = repeated(data, whole, tmp_path / "short", train__steps=6, checkpoint__keep=1)
    assert [without_evaluation(line) for line in learned(short)] == [without_evaluation(x) for x in learned(whole)[:7]]
    longer = repeated(data, replay, tmp_path / "longer", train__steps=9)
    assert [without_evaluation(line) for line in learned(longer)[:-1]] == [without_evaluation(x) for x in learned(whole)]


def without_evaluation(line: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in line.items() if not key.startswith("eval/")}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("ray_cluster")
def test_a_run_that_was_cut_and_resumed_is_repeated_as_a_whole(tmp_path: Path) -> None:
    with disturbed(0):
        run(TEXT, tmp_path / "halves", train__steps=5)
        halves = run(TEXT, tmp_path / "halves", resume="latest")
    whole = repeated(TEXT, halves, tmp_path / "whole")
    assert_equal(state(halves), state(whole))
    assert sampled(halves) == sampled(whole)
    assert tapes(halves) == tapes(whole)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("ray_cluster")
def test_a_run_that_lost_a_sampler_is_repeated_as_a_whole_and_one_that_died_as_far_as_it_came(tmp_path: Path) -> None:
    with disturbed(0, killed=12):
        lost = run(TEXT, tmp_path / "lost")
    assert len((lost / "recoveries.jsonl").read_text().splitlines()) == 1
    whole = repeated(TEXT, lost, tmp_path / "whole")
    assert_equal(state(lost), state(whole))
    assert sampled(lost) == sampled(whole) and tapes(lost) == tapes(whole)
    kept = [line for line in lines(whole) if line["step"] < 6]
    (whole / "arrivals.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    with disturbed(1):
        again = repeated(TEXT, whole, tmp_path / "again")
    assert learned(again)[:6] == learned(whole)[:6] and len(learned(again)) == 9


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("data", [pytest.param(A3C, id="a3c"), pytest.param(IMPALA, id="impala", marks=pytest.mark.long)])
def test_env_workers_come_in_the_recorded_order(data: dict[str, Any], tmp_path: Path) -> None:
    with disturbed(0, every=6):
        whole = run(data, tmp_path / "whole")
    with disturbed(1, every=6):
        replay = repeated(data, whole, tmp_path / "replay")
        other = run(data, tmp_path / "other")
    orders = [[line["worker"] for line in learned(path) if "worker" in line] for path in (whole, replay, other)]
    assert orders[0] == orders[1] != orders[2] and set(orders[0]) == {0, 1}
    assert_same(whole, replay)
    assert not (replay / "arrivals.jsonl").exists()


def recorded(folder: Path, data: dict[str, Any], **files: str) -> Path:
    """The directory of a run that has recorded something."""
    folder.mkdir()
    (folder / "config.toml").write_text(resolved(validate({**data, "run_dir": str(folder)}, "test")))
    for name, text in files.items():
        (folder / f"{name}.jsonl").write_text(text)
    return folder


ARRIVALS = '{"step": 1, "dealt": [0, 1], "tapes": [[[0, 0, 1, 0]], [[0, 0, 1, 0]]], "rests": [3, 4]}\n'
THREE = {"train": 1, "draw": 3}


@pytest.mark.parametrize(
    ("data", "keys", "files", "told"),
    [
        (TEXT, {}, {}, "it has recorded no step; expected a run that made some"),
        (TEXT, {"train__prompts_per_step": 2}, {"arrivals": ARRIVALS}, "train.prompts_per_step = 2, but in that run 8;"),
        (
            TEXT,
            {"placement__pools": THREE},
            {"arrivals": ARRIVALS},
            "placement.pools.draw = 3, but in that run 2",
        ),
        (TEXT, {"schedule__kind": "one_step_off", "schedule__max_staleness": None}, {}, "the order of such a run is fixed"),
        (TEXT, {"threads": "auction"}, {}, 'threads = "auction" moves workers by the seconds'),
        (REVERSE, {}, {}, "the order of such a run is fixed, so it repeats itself; leave --replay out"),
        (A3C, {}, {}, "it has recorded no step"),
        (A3C, {"environment__workers": 1, "placement__pools__draw": 1}, {}, "the order of such a run is fixed"),
        (
            A3C,
            {"environment__steps_per_rollout": 9},
            {"metrics": ""},
            "steps_per_rollout = 9, but in that run 8",
        ),
    ],
)
def test_what_can_t_be_repeated_is_told_in_one_line(
    data: dict[str, Any],
    keys: dict[str, Any],
    files: dict[str, str],
    told: str,
    tmp_path: Path,
    hybridflow: Callable[..., Outcome],
) -> None:
    of = recorded(tmp_path / "of", data, **files)
    outcome = hybridflow("train", written(tmp_path, with_keys(data, **keys)), "--replay", of)
    assert outcome.code == 2 and outcome.out == ""
    (line,) = outcome.err.splitlines()
    assert line.startswith(f"error: --replay {of}: ") and told in line, line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("schedule", ["constant", "linear"])
def test_more_or_fewer_steps_are_the_same_run_unless_the_learning_rate_depends_on_them(
    schedule: str, tmp_path: Path, hybridflow: Callable[..., Outcome]
) -> None:
    data = with_keys(TEXT, actor__optimizer__schedule=schedule)
    of = recorded(tmp_path / "of", data, arrivals=ARRIVALS)
    config = validate(with_keys(data, train__steps=9, run_dir=str(tmp_path / "run"), checkpoint__keep=7), "test")
    if schedule == "constant":
        recording = read_recording(of, config)
        assert (recording.steps, recording.dealt, recording.rests) == (1, [0, 1], [3, 4])
        assert recording.tapes == [[(0, 0, 1, 0)]] * 2
        return
    outcome = hybridflow("train", written(tmp_path, data), "--train.steps", 9, "--replay", of)
    assert outcome.code == 2 and "train.steps = 9, but in that run 8" in outcome.err


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--replay", "nowhere"], "nowhere: no such run directory"),
        (["--replay", "x", "--resume"], "--replay repeats a run from its start on; leave out --resume and --restarts"),
        (["--replay", "x", "--restarts", "2"], "--replay repeats a run from its start on"),
    ],
)
def test_options_that_make_no_sense_are_told(
    options: list[str], told: str, tmp_path: Path, hybridflow: Callable[..., Outcome]
) -> None:
    outcome = hybridflow("train", written(tmp_path, TEXT), *options)
    assert outcome.code == 2 and told in outcome.err and len(outcome.err.splitlines()) == 1
