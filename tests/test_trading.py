"""The trading example: its accounting, that it sees nothing of the future, and its report."""

from __future__ import annotations

import math
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Outcome

from hybridflow.config import load_config
from hybridflow.core.errors import DataError
from hybridflow.data.envs import EnvironmentConfig, make_environment, spaces_of

ROOT = Path(__file__).parent.parent / "examples" / "trading"
ID = f"{ROOT / 'market.py'}:Market-v0"
SHORT, FLAT, LONG = 0, 1, 2


def market(first: str = "2012-01-01", last: str = "2012-12-31", **options: Any) -> Any:
    return make_environment(EnvironmentConfig(id=ID, options={"first": first, "last": last, **options})).unwrapped


@pytest.fixture
def prices(monkeypatch: pytest.MonkeyPatch) -> Callable[[np.ndarray], Any]:
    """A market of other prices, from the first day on."""
    names = type(market()).__init__.__globals__

    def of(closes: np.ndarray, **options: Any) -> Any:
        days = np.datetime64("2000-01-01") + np.arange(len(closes))
        monkeypatch.setitem(names, "closes", lambda: (days, closes))
        return market("2000-01-01", "2001-01-01", **options)

    return of


def played(environment: Any, actions: list[int], seed: int = 0) -> tuple[np.ndarray, np.ndarray, bool]:
    observations, rewards, ended = [environment.reset(seed=seed)[0]], [], False
    for action in actions:
        observation, reward, _, ended, _ = environment.step(action)
        observations.append(observation)
        rewards.append(reward)
    return np.array(observations), np.array(rewards), ended


def test_rewards_are_the_growth_of_wealth_after_costs(prices: Any) -> None:
    closes = np.full(65, 100.0)
    closes[60:] = 100, 110, 99, 99, 198
    environment = prices(closes, cost=0.01)
    _, rewards, ended = played(environment, [LONG, SHORT, SHORT, FLAT])
    expected = [math.log(0.99 * 1.1), math.log(0.98 * 1.1), 0.0, math.log(0.99)]
    assert np.allclose(rewards, expected) and ended
    assert np.isfinite(played(prices(closes), [FLAT, FLAT, FLAT, SHORT])[1]).all()  # which lost everything


def test_the_future_changes_nothing_that_is_seen(prices: Any) -> None:
    rng = np.random.default_rng(0)
    closes = 100 * np.exp(np.cumsum(rng.normal(0, 0.02, 120)))
    other, day, actions = closes.copy(), 30, rng.integers(3, size=59).tolist()
    other[61 + day :] = 100 * np.exp(np.cumsum(rng.normal(0, 0.05, 59 - day)))  # all that follows that day is different
    (seen, rewards, _), (seen_other, rewards_other, _) = (played(prices(path), actions) for path in (closes, other))
    assert np.array_equal(seen[: day + 1], seen_other[: day + 1])
    assert np.array_equal(rewards[:day], rewards_other[:day])
    assert not np.array_equal(seen[day + 1], seen_other[day + 1]) and rewards[day] != rewards_other[day]


def test_what_is_seen_is_the_past_by_its_deviation_and_the_position(prices: Any) -> None:
    closes = 100 * np.exp(np.cumsum(np.random.default_rng(1).normal(0, 0.02, 90)))
    seen, _, _ = played(prices(closes), [LONG, SHORT])
    past = np.diff(np.log(closes[:63]))
    assert np.allclose(seen[2][:-1], past[-20:] / past[-60:].std(), atol=1e-5)
    assert seen[:, -1].tolist() == [0, 1, -1]


def test_periods_are_real_days_and_apart() -> None:
    config = load_config(ROOT / "trading.toml")
    assert config.environment is not None
    trained, later = config.environment.options, config.evaluation.options
    assert trained["first"] < trained["last"] < later["first"] < later["last"]
    whole = market(**{**trained, "days": 0})
    dates, closes = type(whole).__init__.__globals__["closes"]()
    start, end = whole.period
    assert str(dates[end]) == "2015-12-31"
    assert dates[market(**later).period[0]] == np.datetime64("2016-01-04")
    _, rewards, ended = played(whole, [LONG] * (end - start))
    assert ended and math.isclose(rewards.sum(), math.log(0.999 * closes[end] / closes[start]))


def test_episodes_begin_on_days_that_are_drawn() -> None:
    environment = market(days=50)
    starts = {environment.reset(seed=seed)[0].tobytes() for seed in range(20)}
    assert len(starts) > 10 and environment.period[0] <= environment.day <= environment.period[1] - 50
    _, _, ended = played(environment, [FLAT] * 50)
    assert ended
    whole = market()
    assert np.array_equal(whole.reset(seed=1)[0], whole.reset(seed=2)[0])


def test_mistakes_are_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="249 days can be traded, days = 300"):
        market(days=300)
    with pytest.raises(DataError, match=r"environment\.id: no file .*nowhere\.py; expected path/file\.py:Name-v0"):
        spaces_of(EnvironmentConfig(id=f"{tmp_path}/nowhere.py:Name-v0"))
    (tmp_path / "bad.py").write_text("import no_such_module")
    with pytest.raises(DataError, match=r"bad\.py can't be imported: No module named 'no_such_module'"):
        spaces_of(EnvironmentConfig(id=f"{tmp_path}/bad.py:Name-v0"))
    (tmp_path / "empty.py").touch()
    with pytest.raises(DataError, match=r"'.*empty\.py:Name-v0' is not registered"):
        spaces_of(EnvironmentConfig(id=f"{tmp_path}/empty.py:Name-v0"))


@pytest.mark.slow
def test_the_report_compares_with_what_anybody_could_do(
    hybridflow: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT.parent.parent)
    for seed in (1, 2):
        run = ("--run_dir", tmp_path / str(seed), "--seed", seed, "--train.steps", 1)
        trained = hybridflow("train", "examples/trading/trading.toml", *run)
        assert trained.code == 0 and "warning" not in trained.out, trained
    told = hybridflow("eval", tmp_path / "1").out
    assert told.startswith("mean return ") and "confidence" not in told and "episode length 66" in told
    monkeypatch.setattr("sys.argv", ["report.py", str(tmp_path / "1"), str(tmp_path / "2")])
    runpy.run_path(str(ROOT / "report.py"), run_name="__main__")
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert [row[1].strip().split(",")[0] for row in rows[2:8]] == [
        "buy and hold",
        "always flat",
        "by chance",
        "policy",
        "policy",
        "mean of 2 policies",
    ]
    later = {row[1].strip(): row[2:] for row in rows[8:]}
    assert later["always flat"][:2] == [" 1.00 ", " +0.000 [+0.000, +0.000] "]
    assert later["buy and hold"][0] == " 1.66 " and "+0.000 [+0.000, +0.000]" in later["buy and hold"][2]
    low, high = later["buy and hold"][1].split("[")[1].split("]")[0].split(", ")
    assert float(low) < float(later["buy and hold"][1].split("[")[0]) < float(high)
