import re
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from hybridflow.core.config import parse
from hybridflow.core.errors import ConfigError, RewardError
from hybridflow.rollout.rewards import RewardConfig, RewardPool, RewardSpec

FUNCTIONS = """
import os, sys, time
from dataclasses import dataclass
import helper_of_rewards

state = {"calls": 0}

@dataclass
class Point:
    x: int

def exact(response, answer): return response == answer
def length(prompt, response): return {"score": len(response), "prompt_length": len(prompt), "note": "x", "odd": 1e999}
def everything(**fields): return {"score": 1, "names": len(fields), **{k: v for k, v in fields.items() if k == "answer"}}
def defaulted(response, weight=3.0): return weight
def helped(response): return helper_of_rewards.VALUE
def numpy_scalar(response):
    import numpy as np
    return {"score": np.float32(0.5), "right": np.bool_(True)}
def loaded(response): return {"score": "torch" in sys.modules, "hybridflow": "pydantic" in sys.modules}
def prints(response):
    print("hello"); sys.stdout.flush(); os.write(1, b"raw\\n"); os.system("echo from a shell")
    return sys.stdin.read() == ""
def returns(response): return eval(response)
def raises(response): raise ValueError("no\\n  way")
def exits(response): sys.exit("bye")
def rarely(response, n):
    if n % 100 == 7: raise KeyError(n)
    return n
def hangs(response, n):
    while n == 2: pass
    return n
def sleeps_in_shell(response): os.system("sleep 61.37")
def dies(response, n):
    if n == 2: os._exit(3)
    return n
def crashes(response): os.abort()
def flaky(response, flag):
    if os.path.exists(flag): return 1.0
    open(flag, "w").close()
    raise RuntimeError("the first time")
def positional(response, /): return 1.0
def pid(seconds):
    time.sleep(seconds)
    return os.getpid()
not_a_function = 3
"""


@pytest.fixture(scope="module")
def rewards(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "helper_of_rewards.py").write_text("VALUE = 0.25\n")
    (folder / "rewards.py").write_text(FUNCTIONS)
    (folder / "broken.py").write_text("1 / 0\n")
    return folder / "rewards.py"


def run(rewards, *names, rows=1, responses=None, fields=None, **options):
    options = {"workers": 1, **options}
    fields = fields or [{"n": i, "answer": "7"} for i in range(rows)]
    responses = responses or ["7"] * len(fields)
    with RewardPool([RewardSpec(f"{rewards}:{name}") for name in names], **options) as pool:
        return pool.score(["3 + 4?"] * len(fields), responses, fields)


def test_scores_in_order_over_processes(rewards):
    fields = [{"n": i} for i in range(300)]
    results = run(rewards, "rarely", fields=fields, workers=3)
    failed = [i for i, result in enumerate(results) if result.failure]
    assert failed == [7, 107, 207]
    assert results[107].score is None and results[107].failure.endswith("rarely': raised KeyError: 107")
    assert all(result.score == i for i, result in enumerate(results) if i not in failed)


def test_functions_get_the_parameters_that_they_name(rewards):
    [result] = run(rewards, "exact")
    assert result.score == 1.0 and isinstance(result.score, float) and result.metrics == {}
    [result] = run(rewards, "everything", fields=[{"answer": 7, "prompt": "hidden by the real one"}])
    assert result.metrics == {"names": 3.0, "answer": 7.0}
    assert run(rewards, "defaulted")[0].score == 3.0
    assert run(rewards, "defaulted", fields=[{"weight": 5}])[0].score == 5.0
    assert run(rewards, "helped")[0].score == 0.25


def test_weighted_sum_and_metrics(rewards):
    specs = [RewardSpec(f"{rewards}:exact", 2.0), RewardSpec(f"{rewards}:length", -0.5)]
    with RewardPool(specs, workers=2) as pool:
        results = pool.score(["ab", "abc"], ["7", "seven"], [{"answer": "7"}] * 2)
    assert [result.score for result in results] == [1.5, -2.5]
    assert results[1].metrics == {"exact": 0.0, "length": 5.0, "length/prompt_length": 3.0}


def test_any_failing_function_fails_the_row(rewards):
    [result] = run(rewards, "exact", "raises", "length")
    assert result.score is None and result.metrics == {}
    assert result.failure == f"reward '{rewards}:raises': raised ValueError: no way"


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("None", r"returned None \(NoneType\), expected a finite number"),
        ("'0.5'", r"returned '0\.5' \(str\), expected a finite number"),
        ("float('nan')", "returned nan, expected a finite number"),
        ("float('-inf')", "returned -inf, expected a finite number"),
        ("1e39", r"returned 1e\+39, expected a finite number"),
        ("10 ** 400", r"returned 10+\.\.\., expected a finite number"),
        ("{'reward': 1}", "returned a dict without 'score', with 'reward'"),
        ("{}", "returned a dict without 'score', with no entries"),
        ("{'score': None}", r"returned None \(NoneType\)"),
        ("[1.0]", r"returned \[1\.0\] \(list\)"),
    ],
)
def test_what_is_no_score_is_a_failure(rewards, value, reason):
    with RewardPool([RewardSpec(f"{rewards}:returns")], workers=1) as pool:
        bad, good = pool.score(["p"] * 2, [value, "1"], [{}] * 2)
    assert bad.score is None and good.score == 1.0
    assert bad.failure is not None and re.search(reason, bad.failure)


@pytest.mark.parametrize(("value", "score"), [("True", 1.0), ("3", 3.0), ("-0.5", -0.5), ("{'score': 2}", 2.0)])
def test_what_is_a_score(rewards, value, score):
    assert run(rewards, "returns", responses=[value])[0].score == score


def test_numpy_scalars_are_numbers(rewards):
    [result] = run(rewards, "numpy_scalar")
    assert result.score == 0.5 and result.metrics == {"right": 1.0}


def test_sys_exit_is_a_failure(rewards):
    assert [r.failure and "raised SystemExit: bye" in r.failure for r in run(rewards, "exits", rows=2)] == [True, True]


@pytest.mark.parametrize("workers", [1, 2])
def test_an_endless_loop_is_killed_in_time(rewards, workers):
    start = time.monotonic()
    results = run(rewards, "hangs", rows=40, timeout_s=0.5, workers=workers)
    assert time.monotonic() - start < 5.0
    assert [i for i, result in enumerate(results) if result.failure] == [2]
    assert results[2].failure == f"reward '{rewards}:hangs': timed out after 0.5 s"
    assert [result.score for result in results[3:]] == [float(i) for i in range(3, 40)]


def test_what_a_hanging_function_started_is_killed_too(rewards):
    [result] = run(rewards, "sleeps_in_shell", timeout_s=0.3)
    assert result.failure is not None and "timed out" in result.failure
    deadline = time.monotonic() + 5.0
    while _running("sleep 61.37") and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _running("sleep 61.37")


def _running(command: str) -> bool:
    return command in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout.splitlines()


def pids(results):
    return {int(result.score) for result in results}


def test_processes_are_added_and_removed_between_two_batches(rewards):
    rows = [{"seconds": 0.05}] * 12
    with RewardPool([RewardSpec(f"{rewards}:pid")], workers=2) as pool:

        def score():
            return pids(pool.score([""] * len(rows), [""] * len(rows), rows))

        two = score()
        pool.resize(1)
        (one,) = score()
        assert one in two and not any(psutil.pid_exists(other) for other in two - {one})
        pool.resize(3)
        three = score()
        assert one in three and len(three) == 3 and not three & (two - {one})
        share = psutil.virtual_memory().total // 3
        assert {psutil.Process(pid).rlimit(psutil.RLIMIT_DATA) for pid in three} == {(share, share)}
        assert len(score()) == 3
    assert not any(psutil.pid_exists(pid) for pid in three)


def test_a_process_that_dies_is_replaced(rewards):
    results = run(rewards, "dies", rows=40)
    assert [i for i, result in enumerate(results) if result.failure] == [2]
    assert results[2].failure == f"reward '{rewards}:dies': its process ended with exit code 3"
    assert results[39].score == 39.0
    [crash] = run(rewards, "crashes")
    assert crash.failure is not None and "its process died of SIGABRT" in crash.failure


def test_retries(rewards, tmp_path):
    flags = [{"flag": str(tmp_path / name)} for name in ("a", "b")]
    assert [result.score for result in run(rewards, "flaky", fields=flags, retries=1)] == [1.0, 1.0]
    [result] = run(rewards, "raises", retries=3)
    assert result.failure is not None and "no way" in result.failure


def test_prints_and_input_do_not_disturb_the_reports(rewards, capfd):
    assert [result.score for result in run(rewards, "prints", rows=3)] == [1.0, 1.0, 1.0]
    captured = capfd.readouterr()
    assert captured.out == "" and captured.err.count("hello") == captured.err.count("from a shell") == 3


def test_processes_start_light_and_fast(rewards):
    start = time.monotonic()
    [result] = run(rewards, "loaded")
    assert time.monotonic() - start < 1.5
    assert result.score == 0.0 and result.metrics == {"hybridflow": 0.0}


def test_too_many_failures_stop_at_once_and_leave_the_pool_usable(rewards):
    with RewardPool([RewardSpec(f"{rewards}:hangs")], timeout_s=0.2, workers=2) as pool:
        rows = [{"n": 2}] * 60
        start = time.monotonic()
        with pytest.raises(RewardError, match=r"of 60 rows failed, 3 may; the first: reward .*timed out after 0\.2 s"):
            pool.score(["p"] * 60, ["r"] * 60, rows, max_failures=3)
        assert time.monotonic() - start < 5.0
        assert [result.score for result in pool.score(["p"] * 4, ["r"] * 4, [{"n": 5}] * 4)] == [5.0] * 4


def test_no_rows(rewards):
    with RewardPool([RewardSpec(f"{rewards}:exact")], workers=1) as pool:
        assert pool.score([], [], []) == []


def test_a_missing_field_is_told_before_anything_runs(rewards):
    with RewardPool([RewardSpec(f"{rewards}:exact")], workers=1) as pool:
        pool.check({"answer", "other"})
        message = r"exact': requires a parameter 'answer', but there are prompt, response, solution; rename the parameter"
        with pytest.raises(RewardError, match=message):
            pool.check({"solution"})
        with pytest.raises(RewardError, match=message):
            pool.score(["p"] * 2, ["r"] * 2, [{"answer": "1"}, {"solution": "1"}])


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("{folder}/rewards.py:exakt", r"has no function 'exakt'; did you mean exact\?"),
        ("{folder}/rewards.py:zzz", "has no function 'zzz'; it has .*exact, length"),
        ("{folder}/rewards.py:not_a_function", "not_a_function is a int, expected a function"),
        ("{folder}/rewards.py:positional", "parameter 'response' is positional-only"),
        ("{folder}/rewardz.py:exact", r"no file /.*rewardz\.py; did you mean .*rewards\.py\?"),
        ("{folder}/nowhere/rewards.py:exact", r"no file /.*nowhere/rewards\.py$"),
        ("{folder}/broken.py:exact", "running .*broken.py failed: ZeroDivisionError: division by zero"),
        ("no_such_package.module:exact", "no module 'no_such_package' in /.* or the Python path"),
        ("json.no_such:loads", r"no module 'json\.no_such'"),
        ("json:lods", "json has no function 'lods'; did you mean loads"),
        ("exact", 'expected "package.module:function" or "path/file.py:function"'),
        ("rewards.py:", 'expected "package.module:function"'),
    ],
)
def test_functions_that_cannot_be_loaded(rewards, spec, message):
    with pytest.raises(RewardError, match=message) as caught:
        RewardPool([RewardSpec(spec.format(folder=rewards.parent))], workers=2)
    assert "\n" not in str(caught.value)


def test_modules_are_found_in_the_working_folder(rewards, monkeypatch):
    monkeypatch.chdir(rewards.parent)
    for spec in ("rewards:helped", "rewards.py:helped"):
        with RewardPool([RewardSpec(spec)], workers=1) as pool:
            monkeypatch.chdir("/")  # a replaced process starts where the first one did
            assert pool.score(["p"], ["r"], [{}])[0].score == 0.25
            monkeypatch.chdir(rewards.parent)


def test_no_functions():
    with pytest.raises(RewardError, match="no reward function is given"):
        RewardPool([])


def test_config():
    config = parse(RewardConfig, {"functions": ["a:f", "b:g"], "weights": [1.0, -0.5]}, "run.toml")
    assert config.specs() == (RewardSpec("a:f", 1.0), RewardSpec("b:g", -0.5))
    assert parse(RewardConfig, {"functions": ["a:f"]}, "run.toml").specs() == (RewardSpec("a:f"),)
    bad: list[tuple[dict[str, object], str]] = [
        ({"functions": ["a:f"], "weights": [1, 2]}, "2 weights for 1 functions"),
        ({"functions": ["a:f", "a:f"]}, "given twice"),
        ({"timeout_s": 0}, "greater than 0"),
        ({"on_failure": "zero"}, "'raise' or 'drop_group'"),
        ({"max_failed_fraction": 1.5}, "less than or equal to 1"),
        ({"timeout": 3}, "did you mean timeout_s"),
    ]
    for data, message in bad:
        with pytest.raises(ConfigError, match=message):
            parse(RewardConfig, data, "run.toml")
