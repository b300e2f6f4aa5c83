"""What a run shows while it runs: a live panel on a terminal, plain lines elsewhere.

step 12/40  reward 0.53  kl 0.0012  length 3.4  1520 tok/s  5.1s (gen 48% reward 3% learn 49%)  eta 2m20s
eval 10/40  score 0.62 [0.55, 0.69]  n 200
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Self

from rich.box import ROUNDED
from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hybridflow.telemetry.metrics import METRICS, TIME_SPLIT, format_number, format_seconds

__all__ = ["RunConsole", "step_words"]

Values = Mapping[str, float]

# key -> name on a plain line; what a step lacks is left out
NUMBERS = {
    "reward/mean": "reward",
    "cost/mean": "cost",
    "lambda": "lambda",
    "episode_return/mean": "return",
    "loss/policy": "loss",
    "kl": "kl",
    "response_length/mean": "length",
}
EVALUATION = ("eval/score", "eval/low", "eval/high", "eval/count")
SPEEDS = {"tokens_per_s": "tok/s", "env_steps_per_s": "steps/s"}
PARTS = {
    "time/generate_s": ("gen", "blue"),
    "time/reward_s": ("reward", "green"),
    "time/forward_s": ("forward", "yellow"),
    "time/learn_s": ("learn", "magenta"),
}
BARS = "▁▂▃▄▅▆▇█"
MAX_WIDTH = 100
MAX_CURVE = 32


class RunConsole:
    """Shows the steps ``start + 1 ... steps`` of a run. Use it as a context manager.

    Without a terminal it prints every ``every``-th step and the last. ``title`` heads the live panel.
    """

    def __init__(
        self,
        steps: int,
        *,
        start: int = 0,
        title: str = "",
        every: int = 1,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._steps, self._start, self._title, self._every = steps, start, title, every
        self._console, self._clock = console or Console(), clock
        self._began_s = clock()
        self._step, self._step_ended_s = start, self._began_s
        self._metrics: Values = {}
        self._curve: list[float] = []
        self._evaluations: list[tuple[int, Values]] = []
        self._warned: set[str] = set()
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(console=self._console, get_renderable=self._panel, refresh_per_second=2)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()

    def step(self, step: int, metrics: Values) -> None:
        """Show the metrics of a finished step, and warn once about each that is not finite."""
        self._step, self._step_ended_s, self._metrics = step, self._clock(), metrics
        value = metrics.get(_headline(metrics) or "", math.nan)
        if math.isfinite(value):
            self._curve = [*self._curve, value][-MAX_CURVE:]
        self._warn(step, metrics)
        if self._live:
            self._live.refresh()
        elif step % self._every == 0 or step == self._steps:
            self.note("  ".join(self._words()))

    def evaluation(self, step: int, metrics: Values) -> None:
        """Show ``eval/score`` with its interval and count, and what else was measured."""
        self._evaluations.append((step, metrics))
        words = [f"eval {step}/{self._steps}", f"score {_interval(metrics)}"]
        if "eval/count" in metrics:
            words.append(f"n {metrics['eval/count']:.0f}")
        others = {key: value for key, value in metrics.items() if key not in EVALUATION}
        words += [f"{key.removeprefix('eval/').replace('_', ' ')} {format_number(value)}" for key, value in others.items()]
        self.note("  ".join(words))

    def note(self, text: str, style: str = "") -> None:
        """Print a line; on a terminal it appears above the live panel."""
        self._console.print(Text(text, style=style), soft_wrap=True)

    def _warn(self, step: int, metrics: Values) -> None:
        known = {*self._warned, "eval/low", "eval/high"}  # which one episode doesn't have
        bad = [key for key, value in metrics.items() if not math.isfinite(value) and key not in known]
        self._warned.update(bad)
        if bad:
            self.note(f"warning: step {step}/{self._steps}: not finite: {', '.join(bad)}", style="yellow")

    def _words(self) -> Iterator[str]:
        yield f"step {self._step}/{self._steps}"
        yield from step_words(self._metrics)
        if self._step < self._steps:
            yield f"eta {self._eta()}"

    def _eta(self) -> str:
        """By the mean wall time of the steps so far, with all that happened between them."""
        done = self._step - self._start
        if not done:
            return "?"
        left_s = (self._step_ended_s - self._began_s) / done * (self._steps - self._step)
        return format_seconds(max(0.0, left_s - (self._clock() - self._step_ended_s)))

    def _panel(self) -> RenderableType:
        parts: list[RenderableType] = [self._progress()]
        if self._metrics:
            parts += [Text(), self._values()]
            if _shares(self._metrics):
                parts += [Text(), _split_bar(_shares(self._metrics), min(MAX_WIDTH, self._console.width) - 4)]
        if self._evaluations:
            parts += [Text(), self._evaluated()]
        width = min(MAX_WIDTH, self._console.width)
        title = Text(self._title, style="bold", overflow="ellipsis") if self._title else None
        return Panel(Group(*parts), title=title, title_align="left", box=ROUNDED, border_style="bright_black", width=width)

    def _progress(self) -> Table:
        row = Table.grid(padding=(0, 1), expand=True)
        for _ in range(4):
            row.add_column(no_wrap=True)
        row.columns[1].ratio = 1
        done, total = self._step - self._start, self._steps - self._start
        state = Text(f"eta {self._eta()}" if done < total else "done", style="cyan")
        if not done:
            state = Text("first step", style="cyan")
        row.add_row(
            Text(f"step {self._step}/{self._steps}", style="bold"),
            ProgressBar(total=max(total, 1), completed=done, complete_style="cyan", finished_style="green"),
            Text(format_seconds(self._clock() - self._began_s), style="dim"),
            state,
        )
        return row

    def _values(self) -> Columns:
        """Labels above values, in as many rows as the width needs; the curve is of the first value."""
        cells = [(name, format_number(value)) for name, value in _numbers(self._metrics).items()]
        cells += [("speed", word) for word in _speeds(self._metrics)]
        if "time/step_s" in self._metrics:
            cells.append(("step time", format_seconds(self._metrics["time/step_s"])))
        texts = [Text(f"{name}\n", style="dim").append(value, style="bold not dim") for name, value in cells]
        if cells and len(self._curve) > 1:
            texts.append(Text(f"{cells[0][0]} per step\n", style="dim").append(_curve(self._curve), style="cyan not dim"))
        return Columns(texts, padding=(0, 3))

    def _evaluated(self) -> Text:
        (first_step, first), (last_step, last) = self._evaluations[0], self._evaluations[-1]
        text = Text("eval  ", style="dim")
        if len(self._evaluations) > 1:
            text.append(f"{format_number(first['eval/score'])} → ", style="not dim")
        text.append(_interval(last), style="bold not dim")
        steps = f"steps {first_step} → {last_step}" if len(self._evaluations) > 1 else f"step {last_step}"
        return text.append(f"  {steps}")


def step_words(metrics: Values) -> Iterator[str]:
    """What a plain line tells of a step's metrics."""
    yield from (f"{name} {format_number(value)}" for name, value in _numbers(metrics).items())
    yield from _speeds(metrics)
    if "time/step_s" in metrics:
        parts = " ".join(f"{PARTS[key][0]} {share:.0%}" for key, share in _shares(metrics).items())
        yield format_seconds(metrics["time/step_s"]) + (f" ({parts})" if parts else "")


def _headline(metrics: Values) -> str | None:
    """The key of the first number that is shown."""
    return next((key for key in NUMBERS if key in metrics), None)


def _numbers(metrics: Values) -> dict[str, float]:
    """Name -> value. The loss says little in reinforcement learning: it is shown when there's no reward or return."""
    rewarded = _headline(metrics) in ("reward/mean", "episode_return/mean")
    return {name: metrics[key] for key, name in NUMBERS.items() if key in metrics and not (rewarded and name == "loss")}


def _speeds(metrics: Values) -> list[str]:
    return [f"{format_number(metrics[key])} {unit}" for key, unit in SPEEDS.items() if key in metrics]


def _shares(metrics: Values) -> dict[str, float]:
    """Key -> share of the step's time, for the parts of a step that took any."""
    total_s = metrics.get("time/step_s", 0.0)
    return {key: metrics[key] / total_s for key in TIME_SPLIT if total_s > 0 and metrics.get(key, 0.0) > 0}


def _interval(metrics: Values) -> str:
    score, low, high = (metrics.get(key, math.nan) for key in ("eval/score", "eval/low", "eval/high"))
    known = math.isfinite(low) and math.isfinite(high)
    return format_number(score) + (f" [{format_number(low)}, {format_number(high)}]" if known else "")


def _curve(values: list[float]) -> str:
    """A line of block characters, lowest to highest."""
    low, spread = min(values), max(values) - min(values)
    return "".join(BARS[round((value - low) / spread * (len(BARS) - 1)) if spread else 0] for value in values)


def _split_bar(shares: Mapping[str, float], width: int) -> Group:
    """A bar of coloured pieces and its legend. Parts that overlap in time add up to more than one: then all shrink."""
    scale = width / max(1.0, sum(shares.values()))
    bar, legend = Text(no_wrap=True, overflow="crop"), Text()
    for key, share in shares.items():
        bar.append("━" * round(share * scale), style=PARTS[key][1])
        legend.append("■ ", style=PARTS[key][1]).append(f"{METRICS[key].label} {share:.0%}   ", style="dim")
    bar.append("━" * (width - len(bar)), style="bright_black")
    return Group(bar, legend)
