"""The demo: a real language model learns to add, in a few minutes on a laptop."""

from __future__ import annotations

import importlib.resources
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from hybridflow.commands.show import add_model
from hybridflow.config import validate
from hybridflow.core.config import apply_overrides
from hybridflow.launch import train
from hybridflow.models import sources
from hybridflow.telemetry.records import read_records
from hybridflow.telemetry.report import write_report

__all__ = ["demo"]


def demo(overrides: Sequence[str]) -> int:
    """Fetch the model, train it, tell before and after."""
    console = Console()
    text = importlib.resources.files("hybridflow").joinpath("demo.toml").read_text(encoding="utf-8")
    data = apply_overrides(tomllib.loads(text), overrides)
    data["run_dir"] = str(_unused(Path(data["run_dir"])))
    config = validate(data, "demo.toml")
    if config.actor.model in sources.MODELS and config.actor.model not in sources.installed():
        console.print(f"fetching {config.actor.model}")
        add_model(config.actor.model)
    console.print(
        f"GRPO on {config.actor.model}: one-digit addition, {config.train.steps} steps of "
        f"{config.train.prompts_per_step} prompts x {config.train.group_size} responses; writing {config.run_dir}"
    )
    code = train(config)
    if code == 0:
        _tell(Path(config.run_dir), console)
    return code


def _unused(path: Path) -> Path:
    """The path, or the first of path-2, path-3, ... that is free."""
    numbered = (path.with_name(f"{path.name}-{number}") for number in range(2, 10_000))
    return path if not path.exists() else next(p for p in numbered if not p.exists())


def _tell(run: Path, console: Console) -> None:
    evaluations = [record for record in read_records(run / "metrics.jsonl") if "eval/score" in record]
    report = write_report([run], run / "report.html")
    console.print(
        f"\nheld-out sums   before  {_accuracy(evaluations[0])}\n                after   {_accuracy(evaluations[-1])}"
    )
    console.print(f"report          {report}", highlight=False)
    console.print(f"talk to it      hybridflow generate {run} 'What is 3 + 4? Answer:'", highlight=False)


def _accuracy(record: dict[str, Any]) -> str:
    score, low, high = (100 * record[f"eval/{name}"] for name in ("score", "low", "high"))
    return f"{score:3.0f} % right   (95 % confidence {low:.0f} to {high:.0f} %, n {record['eval/count']:.0f})"
