"""The eval command."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from hybridflow.build import make_parts
from hybridflow.build_networks import WEIGHTS
from hybridflow.build_pairs import PairParts
from hybridflow.config import load_config, load_run
from hybridflow.controller.local_runtime import LocalRuntime
from hybridflow.core.errors import UserError
from hybridflow.models.exported import read_policy
from hybridflow.telemetry.records import to_json
from hybridflow.telemetry.result import write_result
from hybridflow.telemetry.rundir import RunDirectory

__all__ = ["evaluate"]


def evaluate(source: Path, overrides: Sequence[str], as_json: bool, episodes: int | None = None) -> None:
    """Score the model of a configuration, or what a run has trained, on held-out prompts or ``episodes`` fresh episodes."""
    if episodes is not None:
        overrides = [*overrides, "--evaluation.limit", str(episodes)]
    config = load_run(source, overrides) if source.is_dir() else load_config(source, overrides)
    if episodes is not None and config.environment is None:
        raise UserError(f"{source}: a run on [data] has no episodes; give --evaluation.limit, a number of prompts, instead")
    runtime = LocalRuntime()
    try:
        parts = make_parts(config, runtime)
        if isinstance(parts, PairParts) and source.is_dir():
            parts.start_from(source / "model")
        if parts.evaluate is None:
            raise UserError(f"{source}: nothing to evaluate with: give data.eval_prompts (or a task) and reward.functions")
        result = parts.evaluate()
    finally:
        runtime.stop()
    record = {key: value for key, value in asdict(result).items() if key != "others"} | dict(result.others)
    if source.is_dir() and config.environment is not None:
        record["policy_version"] = read_policy(RunDirectory(source).model / WEIGHTS).version
    if source.is_dir():
        write_result(source, {"evaluation": record})
    if as_json:
        print(to_json(record))
    else:
        score = "score" if config.environment is None else "mean return"
        told = {name.replace("_", " "): f"{value:.3f}" for name, value in result.others.items()}
        told |= {"policy version": f"{record['policy_version']}"} if "policy_version" in record else {}
        others = "".join(f", {name} {value}" for name, value in told.items())
        known = math.isfinite(result.low)  # one alone tells nothing of others
        interval = f", 95 % confidence [{result.low:.3f}, {result.high:.3f}]" if known else ""
        print(f"{score} {result.score:.3f}{interval}, n {result.count}{others}")
