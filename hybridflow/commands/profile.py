"""``hybridflow profile``: run a configuration for a few steps at several sizes, so that the base of this machine knows its
tasks; and show what the base knows."""

from __future__ import annotations

import gc
import json
import math
import os
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from hybridflow.build import Run, build
from hybridflow.build_profile import base_here, base_path, kept_roles
from hybridflow.config import RunConfig, load_config, resolved, validate
from hybridflow.controller.local_runtime import LocalRuntime
from hybridflow.core.errors import ConfigError
from hybridflow.core.metrics import Span
from hybridflow.planner.hardware import fingerprint
from hybridflow.planner.profile_base import Learned, ProfileBase, Sample, sample_of
from hybridflow.telemetry.graph_tables import aligned, count, memory

__all__ = ["profile", "show"]

STEPS, ENOUGH_S = 2, 1.0
"""that are measured of each size with each number of threads: so many, or more if they are over sooner"""
WARM_S = 20.0
"""in which learning begins"""
LONG = 10**6
"""steps of a run that is given up: what depends on how far it is is at its beginning"""
SOURCE = "profile"
Task = tuple[str, str, str]
"""verb, model, device"""


class Size(NamedTuple):
    """Of a step, as shares of the configuration's: prompts or environments, and the most tokens or steps of each."""

    rows: float
    tokens: float


SIZES = (Size(0.25, 1), Size(0.5, 0.5), Size(0.5, 1), Size(1, 0.5), Size(1, 1), Size(2, 1))
"""the smallest first, as a process keeps memory that it once had"""


def profile(source: Path, overrides: Sequence[str], as_json: bool) -> None:
    """Run, keep what was measured, print what the base then knows of these tasks. ConfigError: it can't run."""
    config = load_config(source, overrides)
    path, machine, tasks = base_path(), asdict(fingerprint()), set[Task]()
    for number, (told, scaled) in enumerate(_scaled(config).items()):
        samples = list[Sample]()
        for how, steps in _measured(scaled, counted=number == 0):
            samples += _samples(scaled, [span for spans in steps for span in spans])
            if not as_json:
                print(f"{told}{how}: {np.median([*map(_seconds, steps)]):.3f} s a step", flush=True)
        ProfileBase.add(path, machine, samples)
        tasks |= {(sample.verb, sample.model, sample.device) for sample in samples}
    base = base_here()
    _print(base, [task for task in base.tasks() if task in tasks], as_json)


def show(as_json: bool) -> None:
    """Print all tasks that the base of this machine knows, and how work on pools scales. ProfileError: it knows none."""
    base = base_here()
    _print(base, base.tasks(), as_json, base.scalings)


# ------------------------------------------------------------------------------------------------------------- measuring


def _scaled(config: RunConfig) -> dict[str, RunConfig]:
    """Configurations of several sizes, by what they are: in one process and, if it runs in several, in these."""
    found: dict[str, RunConfig] = {}
    if not config.cuts:
        found = {f"rows x {size.rows:g}, lengths x {size.tokens:g}": one for size, one in _sizes(config, local=True)}
    if config.runtime.kind == "ray":
        found |= {
            f"on its pools, rows x {size.rows:g}": one for size, one in _sizes(config, local=False) if size.tokens == 1
        }
    return found


def _sizes(config: RunConfig, local: bool) -> Iterator[tuple[Size, RunConfig]]:
    """Those sizes that differ and are possible; its own has to be, as it runs."""
    seen = list[RunConfig]()
    for size in SIZES:
        try:
            one = _with_size(config, size, local)
        except ConfigError:
            if size == Size(1, 1) and local == (config.runtime.kind == "local"):
                raise
            continue
        if one not in seen:
            seen.append(one)
            yield size, one


def _with_size(config: RunConfig, size: Size, local: bool) -> RunConfig:
    left_out = {"schedule"} | ({"runtime", "placement", "recovery"} if local else set())  # calls by themselves
    data = {name: section for name, section in tomllib.loads(resolved(config)).items() if name not in left_out}
    data["train"]["steps"], data["threads"] = LONG, config.num_threads
    environment, scaled = data.get("environment"), dict[tuple[str, str], float]()
    if environment is not None:
        scaled = {("environment", "num_envs"): size.rows}
        scaled |= {("environment", "steps_per_rollout"): size.tokens} if environment["steps_per_rollout"] else {}
    else:
        scaled = {("train", "prompts_per_step"): size.rows}
        scaled |= {("generation", "max_new_tokens"): size.tokens} if "generation" in data else {}
    for (section, key), share in scaled.items():
        data[section][key] = max(1, round(share * data[section][key]))
    return validate(data, config.run_dir)


def _measured(config: RunConfig, counted: bool) -> Iterator[tuple[str, list[Sequence[Span]]]]:
    """Spans of some steps, in one process with 1, 2, 4 ... threads. ``counted``: and of one of which they are counted."""
    run, before = build(config), torch.get_num_threads()
    try:
        meter = run.runtime.meter if isinstance(run.runtime, LocalRuntime) else None
        _warm_up(run)
        if meter is None:
            yield "", _some(run)
            return
        meter.share = math.inf
        for threads in _threads():
            torch.set_num_threads(threads)
            yield f", {threads} thread{'s' * (threads > 1)}", _some(run)
        if counted:
            meter.counts = True
            yield ", operations counted", [_step(run)]
    finally:
        run.runtime.stop()
        torch.set_num_threads(before)
        gc.collect()


def _seconds(spans: Sequence[Span]) -> float:
    """From the first call of a step to the end of the last."""
    return max(span.start_s + span.duration_s for span in spans) - min(span.start_s for span in spans)


def _threads() -> list[int]:
    cores = os.cpu_count() or 1
    return sorted({cores, *(2**power for power in range(cores.bit_length()) if 2**power < cores)})


def _step(run: Run) -> Sequence[Span]:
    spans = list[Span]()
    run.trainer.hooks = [lambda step: spans.extend(step.spans)]
    run.trainer.train(run.trainer.step + 1)
    return spans


def _some(run: Run) -> list[Sequence[Span]]:
    start, steps = time.perf_counter(), list[Sequence[Span]]()
    while len(steps) < STEPS or time.perf_counter() - start < ENOUGH_S:
        steps.append(_step(run))
    return steps


def _warm_up(run: Run) -> None:
    """Until it learns, which a replay may put off."""
    start = time.perf_counter()
    while not any(span.kind == "train" for span in _step(run)) and time.perf_counter() - start < WARM_S:
        pass


def _samples(config: RunConfig, spans: Sequence[Span]) -> Iterator[Sample]:
    roles = kept_roles(config)
    for span in spans:
        kept = roles.get(span.name.partition(".")[0])
        if kept is not None and (sample := sample_of(span, *kept, SOURCE)) is not None:
            yield sample


# --------------------------------------------------------------------------------------------------------------- showing


def _print(base: ProfileBase, tasks: Sequence[Task], as_json: bool, scalings: Sequence[Learned] = ()) -> None:
    rows = [_row(base, *task) for task in tasks]
    if as_json:
        known = {"tasks": rows, "scalings": [one._asdict() for one in scalings]}
        print(json.dumps({"file": str(base.path), "machine": base.machine, **known}, indent=2))
        return
    header = ("task", "model", "device", "samples", "threads", "workers", "rows", "tokens", "seconds", "CPU-s", "memory")
    table = [(*header, "FLOPs/token", "left out"), *map(_shown, rows)]
    print("\n".join(aligned(table, right=table[0][3:])))
    print("rows, tokens and seconds: of a worker's calls, least and most; CPU-s: processor seconds for each second")
    print("left out: how far off a size is predicted by the others, in the median")
    for work, units, parallel in scalings:
        print(f"{work}: more {units} divide {parallel:.0%} of its work, as the last auction learned")
    print(f"kept in {base.path}; hybridflow plan for cluster here:1xN and plan RUN --compare read it")


def _row(base: ProfileBase, verb: str, model: str, device: str) -> dict[str, Any]:
    mine = [sample for sample in base.samples if (sample.verb, sample.model, sample.device) == (verb, model, device)]
    timed = [sample for sample in mine if sample.flops is None]
    flops = [sample.flops / (sample.tokens or sample.rows) for sample in mine if sample.flops is not None]
    row: dict[str, Any] = {"task": verb, "kind": mine[0].kind, "model": model, "device": device, "samples": len(timed)}
    for name in ("threads", "workers"):
        row[name] = sorted({getattr(sample, name) for sample in timed})
    for name in ("rows", "tokens", "seconds"):
        row[name] = [pick((getattr(sample, name) for sample in timed), default=None) for pick in (min, max)]
    row["cpu_share"] = sum(sample.cpu_s for sample in timed) / (sum(sample.seconds for sample in timed) or 1.0)
    row["memory_bytes"] = max((sample.memory_bytes for sample in timed), default=None)
    row["flops_per_token"] = float(np.median(flops)) if flops else None
    fit = base.fit(verb, device, model) if timed else None
    row["seconds_of"] = fit.coefficients if fit else {}
    row["left_out_error"] = float(np.median(np.abs(np.expm1(fit.errors)))) if fit and len(fit.errors) else None
    return row


def _shown(row: dict[str, Any]) -> tuple[str, ...]:
    rows, tokens, seconds = (_between(row[name]) for name in ("rows", "tokens", "seconds"))
    listed = [", ".join(map(str, row[name])) for name in ("threads", "workers")]
    flops, error = row["flops_per_token"], row["left_out_error"]
    return (
        *(row["task"], row["model"], row["device"], str(row["samples"]), *listed, rows, tokens, seconds),
        *(f"{row['cpu_share']:.1f}", memory(int(row["memory_bytes"] or 0))),
        *("" if flops is None else count(round(flops)), "" if error is None else f"{error:.0%}"),
    )


def _between(ends: Sequence[float | None]) -> str:
    low, high = ("" if end is None else f"{end:.3g}" for end in ends)
    return low if low == high else f"{low} - {high}"
