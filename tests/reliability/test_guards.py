"""Guards on trainings that go wrong in the way that each of them is for, and on healthy ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import CARTPOLE, REVERSE, with_keys

from hybridflow import checkpoint
from hybridflow.config import validate
from hybridflow.core.errors import ConfigError, GuardError, NonFiniteError
from hybridflow.launch import train
from hybridflow.telemetry.guards import GUARDS, Guards, GuardsConfig

TEXT = with_keys(REVERSE, train__minibatches=1, train__prompts_per_step=8, evaluation__limit=1, train__steps=200)


def run(folder: Path, data: dict[str, Any], resume: str | None = None, **keys: Any) -> int:
    return train(validate(with_keys(data, run_dir=str(folder / "run"), **keys), "test"), resume)


def rewarded(folder: Path, expression: str) -> dict[str, Any]:
    (folder / "own.py").write_text(f"def own(response):\n    return {expression}\n")
    return with_keys(TEXT, reward__functions=[f"{folder / 'own.py'}:own"])


def stopped(folder: Path, guard: str, data: dict[str, Any], **keys: Any) -> str:
    """What a run says that this guard alone stops."""
    rules = {name: "stop" if name == guard else "off" for name in GUARDS}
    with pytest.raises(GuardError) as raised:
        run(folder, data, guards={**rules, **keys.pop("guards", {})}, **keys)
    assert f"guards.{guard}: " in str(raised.value)
    return str(raised.value)


def test_a_reward_that_is_always_the_same(tmp_path: Path) -> None:
    told = stopped(tmp_path, "reward", rewarded(tmp_path, "0.25"))
    assert told.startswith("step 10: guards.reward: every score was 0.25 for 10 steps: equal scores have no advantages")


def test_a_policy_that_leaves_its_reference(tmp_path: Path) -> None:
    """This one is close to uniform over 15 tokens, from where KL can't be much above 2."""
    kl = {"limit": 1.0, "action": "stop"}
    stopped(tmp_path, "kl", TEXT, actor__optimizer__lr=0.3, kl__coef=1e-6, guards={"kl": kl})


def test_a_policy_that_changes_too_fast_for_its_sampler(tmp_path: Path) -> None:
    data = with_keys(CARTPOLE, algorithm="impala", ppo=None, train__epochs=1, train__steps=100)
    stopped(tmp_path, "mismatch", data, actor__optimizer__lr=0.3, schedule={"kind": "async", "max_staleness": 4})


def test_a_policy_that_says_nothing(tmp_path: Path) -> None:
    stopped(tmp_path, "empty", rewarded(tmp_path, "-len(response)"), actor__optimizer__lr=0.03)


def test_a_policy_that_does_not_end(tmp_path: Path) -> None:
    longer = with_keys(rewarded(tmp_path, "len(response)"), generation__max_new_tokens=32)
    rule = {"steps": 3, "action": "stop"}
    told = stopped(tmp_path, "truncated", longer, actor__optimizer__lr=0.01, guards={"truncated": rule})
    assert "of the responses, and " in told


def test_a_policy_that_always_does_the_same(tmp_path: Path) -> None:
    stopped(tmp_path, "entropy", rewarded(tmp_path, "float('7' in response)"), actor__optimizer__lr=0.3)


def test_weights_that_explode_stop_the_run_and_the_good_checkpoint_stays(tmp_path: Path) -> None:
    """The third step destroys the weights, the fourth shows it: the third isn't saved, either."""
    data = {**TEXT, "checkpoint": {"every": 1}}
    run(tmp_path, data, train__steps=2)
    with pytest.raises(NonFiniteError) as raised:
        run(tmp_path, data, resume="latest", actor__optimizer__lr=1e35)
    good = tmp_path / "run" / "checkpoints" / "step-00000002"
    assert str(raised.value).endswith(f"; the step wasn't saved: go on with --resume {good}")
    assert checkpoint.latest(good.parent) == good
    assert run(tmp_path, data, resume="latest", train__steps=4) == 0


def test_what_a_guard_doubts_is_not_saved(tmp_path: Path) -> None:
    """Scores differ until the fifth step; the guard waits for three equal ones."""
    (tmp_path / "own.py").write_text(
        "calls = []\ndef own(response):\n    calls.append(0)\n    return len(calls) % 7 * (len(calls) <= 128)\n"
    )
    keys = {"reward__workers": 1, "checkpoint__every": 1, "checkpoint__keep": 9}
    data = with_keys(TEXT, reward__functions=[f"{tmp_path / 'own.py'}:own"], **keys)
    with pytest.raises(
        GuardError, match=r"step 7: guards\.reward: every score was 0 for 3 steps.*--resume \S+step-00000004$"
    ):
        run(tmp_path, data, guards={"reward": {"steps": 3, "action": "stop"}})


def test_a_guard_is_told_once_and_healthy_runs_are_quiet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path / "healthy", with_keys(TEXT, kl__coef=0.01), train__steps=15) == 0
    assert run(tmp_path / "pole", CARTPOLE, train__steps=15) == 0
    assert "guards." not in capsys.readouterr().out
    assert run(tmp_path, rewarded(tmp_path, "0.0"), train__steps=15) == 0
    assert capsys.readouterr().out.count("guards.reward: every score was 0 for 10 steps") == 1


def test_a_solved_task_is_no_collapse() -> None:
    solved = {"reward/mean": 1.0, "reward/std": 0.0}
    guards = Guards(GuardsConfig())
    guards.look(1, {"reward/mean": 0.8, "reward/std": 0.4})
    assert [guards.look(step, solved) for step in range(2, 30)] == [[]] * 28
    worse = [guards.look(step, solved | {"reward/mean": 0.5}) for step in range(30, 60)]
    assert [len(found) for found in worse] == [0] * 9 + [1] + [0] * 20


def test_every_guard_has_its_metric_and_says_what_to_do(tmp_path: Path) -> None:
    """Of a run with a reference all of them are there, by the names that they are documented with."""
    run(tmp_path, with_keys(TEXT, kl__coef=0.01), train__steps=1)
    record = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[1]
    for guard in GUARDS.values():
        assert f'"{guard.metric}": ' in record
        assert guard.means and guard.fix


@pytest.mark.parametrize(
    ("guards", "problem"),
    [
        ({"kll": "stop"}, "guards: no guard 'kll'; there are non_finite, reward, kl, mismatch, empty, truncated, entropy"),
        ({"kl": "skip"}, 'guards: kl = "skip": it is known after the step; use off, warn or stop'),
        ({"non_finite": "warn"}, 'guards: non_finite = "warn": such a step can be skipped or stop the run'),
        ({"kl": {"limit": "high"}}, "guards.kl.limit = 'high': input should be a valid number"),
        ({"kl": {"steps": 0}}, "guards.kl.steps = 0: input should be greater than or equal to 1"),
        ({"kl": {"max": 3}}, "unknown key guards.kl.max"),
        ({"kl": "panic"}, "guards.kl.action = 'panic': input should be 'off', 'warn', 'skip' or 'stop'"),
        ("stop", "guards = 'stop'"),
    ],
)
def test_mistakes_are_told(guards: Any, problem: str) -> None:
    with pytest.raises(ConfigError) as raised:
        validate({**TEXT, "run_dir": "runs/x", "guards": guards}, "test")
    assert problem in str(raised.value)


def test_a_table_changes_what_it_names() -> None:
    guards = validate({**TEXT, "run_dir": "runs/x", "guards": {"kl": {"limit": 2}, "reward": "stop"}}, "test").guards
    assert guards.kl == GUARDS["kl"].rule.model_copy(update={"limit": 2.0})
    assert guards.reward == GUARDS["reward"].rule.model_copy(update={"action": "stop"})


def test_the_page_has_the_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reliability.md").read_text()
    for name, guard in GUARDS.items():
        rule = f"{guard.rule.limit:g} | {guard.rule.steps} | {guard.rule.action}"
        assert f"| `{name}` | {guard.fires} | {rule} | {guard.means} | {guard.fix} |" in page
