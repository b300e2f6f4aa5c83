"""The console: stable lines for files, a live panel for terminals."""

import io
import math
from collections.abc import Iterator

import pytest
from rich.console import Console

from hybridflow.telemetry.console import RunConsole
from hybridflow.telemetry.metrics import METRICS, TIME_SPLIT, format_number, format_seconds, metric_of

STEP = {
    "reward/mean": 0.53,
    "loss/policy": -0.01,
    "kl": 0.0012,
    "response_length/mean": 3.4,
    "tokens_per_s": 1520.2,
    "time/step_s": 5.1,
    "time/generate_s": 2.45,
    "time/reward_s": 0.15,
    "time/learn_s": 2.5,
}


def plain(
    steps: int, every: int = 1, start: int = 0, clock: Iterator[float] | None = None
) -> tuple[RunConsole, io.StringIO]:
    out = io.StringIO()
    ticks = clock or iter(range(0, 1000))
    return RunConsole(steps, start=start, every=every, console=Console(file=out, width=40), clock=lambda: next(ticks)), out


def test_a_line_of_a_step() -> None:
    console, out = plain(40, clock=iter([0.0, 60.0, 60.0]))
    with console:
        console.step(12, STEP)
    assert out.getvalue() == (
        "step 12/40  reward 0.53  kl 0.0012  length 3.4  1520 tok/s  5.1s (gen 48% reward 3% learn 49%)  eta 2m20s\n"
    )


def test_the_last_step_and_what_is_not_measured_are_left_out() -> None:
    console, out = plain(2, every=10)
    with console:
        console.step(1, {"episode_return/mean": 21.0, "env_steps_per_s": 5312.0})
        console.step(2, {"episode_return/mean": 21.5, "env_steps_per_s": 5312.0})
    assert out.getvalue() == "step 2/2  return 21.5  5312 steps/s\n"


def test_a_run_without_reward_shows_its_loss() -> None:
    console, out = plain(1)
    with console:
        console.step(1, {"loss/policy": 2.5})
    assert out.getvalue() == "step 1/1  loss 2.5\n"


def test_eta_of_a_resumed_run_counts_its_own_steps() -> None:
    console, out = plain(20, start=10, clock=iter([0.0, 30.0, 30.0]))
    with console:
        console.step(12, {})
    assert out.getvalue() == "step 12/20  eta 2m00s\n"


def test_evaluations() -> None:
    console, out = plain(40)
    with console:
        console.evaluation(10, {"eval/score": 0.62, "eval/low": 0.55, "eval/high": 0.69, "eval/count": 200})
        console.evaluation(20, {"eval/score": 0.7, "eval/low": -math.inf, "eval/high": math.inf, "eval/count": 1})
    assert out.getvalue() == "eval 10/40  score 0.62 [0.55, 0.69]  n 200\neval 20/40  score 0.7  n 1\n"


def test_numbers_that_are_not_finite_are_warned_of_once() -> None:
    console, out = plain(9)
    with console:
        console.step(1, {"kl": math.nan, "grad_norm": math.inf})
        console.step(2, {"kl": math.nan})
    lines = out.getvalue().splitlines()
    assert [line for line in lines if "warning" in line] == ["warning: step 1/9: not finite: kl, grad_norm"]
    assert "kl nan" in lines[1]


@pytest.mark.parametrize("width", [50, 110])
def test_the_live_panel(width: int) -> None:
    out = io.StringIO()
    terminal = Console(
        file=out, force_terminal=True, width=width, height=40, legacy_windows=False, _environ={"TERM": "xterm"}
    )
    with RunConsole(4, title="addition · grpo", console=terminal) as console:
        console.evaluation(0, {"eval/score": 0.2, "eval/low": 0.1, "eval/high": 0.3, "eval/count": 50})
        for step in (1, 2, 3):
            console.step(step, {**STEP, "reward/mean": step / 4})
        console.evaluation(3, {"eval/score": 0.6, "eval/low": 0.5, "eval/high": 0.7, "eval/count": 50})
    shown = Console(record=True, file=io.StringIO(), width=width)
    shown.print(console._panel())
    text = shown.export_text()
    for word in (
        "addition · grpo",
        "step 3/4",
        "reward",
        "0.75",
        "1520 tok/s",
        "▁▅█",
        "generate 48%",
        "0.2 → 0.6 [0.5, 0.7]",
    ):
        assert word in text
    assert max(map(len, text.splitlines())) <= min(width, 100)
    assert "eval 3/4  score 0.6 [0.5, 0.7]  n 50" in out.getvalue()


def test_a_terminal_that_can_not_be_redrawn_gets_lines() -> None:
    out = io.StringIO()
    dumb = Console(file=out, force_terminal=True, width=80, color_system=None, _environ={"TERM": "dumb"})
    with RunConsole(1, console=dumb) as console:
        console.step(1, {"reward/mean": 1.0})
    assert out.getvalue() == "step 1/1  reward 1\n"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.034, "34ms"), (0.996, "1.0s"), (5.06, "5.1s"), (51.2, "51s"), (59.7, "1m00s"), (140, "2m20s"), (3900, "1h05m")],
)
def test_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"), [(0.531, "0.531"), (0.00123, "0.00123"), (1520.4, "1520"), (2e-5, "2e-05"), (3, "3")]
)
def test_numbers(number: float, text: str) -> None:
    assert format_number(number) == text


def test_every_metric_is_described() -> None:
    assert set(TIME_SPLIT) < set(METRICS)
    assert all(metric.label and metric.meaning for metric in METRICS.values())
    moved = metric_of("moved/sampler.rollout-actor.update")
    assert moved and moved.title == "moved (bytes)"
    assert moved.meaning == "bytes that actor.update pulled in the step of what sampler.rollout wrote"
    assert metric_of("kl") == METRICS["kl"] and metric_of("custom/key") is None
    assert METRICS["kl"].title == "KL (nats/token)" and METRICS["step"].title == "step"
