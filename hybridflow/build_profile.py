"""What task profiles know of a run: what each of its roles is, and samples of its calls on their way to a machine's base.

What a call takes depends on its role's model and on how that works, but for sizes (rows, tokens) and processes (threads,
workers), which are measured. All of it is in the role's *model*: a name for people, and a digest of the rest. Seeds,
learning rates and folders are not in it, so that runs share what they measure.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from hybridflow.config import RunConfig
from hybridflow.config_sections import ModelConfig, TrainedConfig
from hybridflow.core.errors import UnknownTaskError, UserError
from hybridflow.planner.graph import TaskGraph
from hybridflow.planner.hardware import fingerprint
from hybridflow.planner.profile_base import Learned, Prediction, ProfileBase, Sample, sample_of
from hybridflow.rollout.reward_workers import default_workers
from hybridflow.train import Step

__all__ = [
    "Kept",
    "ProfileKeeper",
    "base_here",
    "base_if_any",
    "base_path",
    "kept_roles",
    "profiled",
    "run_workers",
    "with_own_seconds",
]

FILE = "tasks.sqlite"
KEEP_S = 30.0
"""how often a run writes what it has measured"""
SIZES = {"max_new_tokens", "num_envs", "steps_per_rollout", "workers"}


class Kept(NamedTuple):
    """What samples of a role say of it."""

    model: str
    device: str


def base_path() -> Path:
    """The base of this machine."""
    return fingerprint().folder / FILE


def base_here() -> ProfileBase:
    """What was measured on this machine. ProfileError: nothing was, or it can't be read."""
    return ProfileBase.open(base_path(), asdict(fingerprint()))


def base_if_any() -> ProfileBase | None:
    """None: nothing was measured yet."""
    return base_here() if base_path().exists() else None


def kept_roles(config: RunConfig) -> dict[str, Kept]:
    """Of all roles that the run may have."""
    return {role: _kept(config, role) for role in config.roles()}


def _kept(config: RunConfig, role: str) -> Kept:
    computes = role == "sampler" or role in config.models
    name, data = (_with_model if computes else _without_model)(config, role)
    digest = hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode()).hexdigest()
    return Kept(f"{name} #{digest[:6]}", config.torch_device.type if computes else "cpu")


def _with_model(config: RunConfig, role: str) -> tuple[str, Mapping[str, Any]]:
    """Roles that compute with a model of their own, and the sampler, which has the actor's."""
    section = config.actor if role == "sampler" else config.model_sections[role]
    dtype = config.dtype_of(section if isinstance(section, ModelConfig) else config.actor)
    data: dict[str, Any] = {"role": role, "dtype": dtype, "mesh": section.mesh.model_dump()}
    if role == "sampler":
        data |= {"generation": config.generation.model_dump(exclude=SIZES), "group": config.train.group_size}
        data |= {"mesh": config.actor.generation_mesh.model_dump()}
    else:
        data |= {"budget": config.token_budget_of(section)}
    if role in config.trained_sections:
        data |= _trained(config, config.trained_sections[role])
    if config.environment is not None:
        net = section.net if isinstance(section, TrainedConfig) else config.actor.net
        data |= {"environment": config.environment.model_dump(exclude=SIZES), "net": net.model_dump()}
        return f"{config.environment.id} {net.kind} {'-'.join(map(str, net.hidden))}", data
    model, fresh = section.model or config.actor.model, config.actor.fresh
    if model is None and fresh is not None:
        data |= {"fresh": fresh.model_dump(), "vocabulary": config.data and config.data.task}
        model = f"{fresh.family} {fresh.num_layers}x{fresh.hidden_size}"
    return f"{Path(str(model)).name}{'' if dtype == 'float32' else f' {dtype}'}", {**data, "model": model}


def _trained(config: RunConfig, section: TrainedConfig) -> dict[str, Any]:
    train = config.train
    return {
        "algorithm": config.algorithm,
        "minibatches": (train.minibatches, train.epochs),
        "drawn": (config.draws_per_update, config.replay.batch_size) if config.replays else (),
        "freeze": section.optimizer.freeze,
        "recompute": section.activation_checkpointing,
    }


def _without_model(config: RunConfig, role: str) -> tuple[str, Mapping[str, Any]]:
    """Reward functions, estimators, the rows of a replay."""
    data: dict[str, Any] = {"role": role, "algorithm": config.algorithm, "method": config.method.model_dump()}
    if role == "replay":
        return "rows", {"replay": config.replay.model_dump()}
    if role == "estimator":
        return config.algorithm, data
    section = config.cost if role == "cost" else config.reward
    own = list(config.evaluation.functions if role == "examiner" else section.functions)
    task = [] if config.data is None or own else [config.data.task or "prompts"]
    names = [Path(function.partition("?")[0]).name for function in own or task]
    return " ".join(map(str, names)), {"role": role, "functions": own or task}


# ------------------------------------------------------------------------------------------------------ what planners ask


def profiled(
    config: RunConfig, graph: TaskGraph, base: ProfileBase, workers: Mapping[str, int], threads: int
) -> dict[str, Prediction]:
    """One call of each task, by name, that the base knows. ``workers``: of each role with a model, 1 if it isn't named;
    ``threads`` of each of them."""
    roles, found = kept_roles(config), dict[str, Prediction]()
    processes = config.reward.workers or default_workers()
    for task in graph.tasks:
        verb, (model, device) = task.name.partition(" ")[0], roles[task.role]
        with contextlib.suppress(UnknownTaskError):
            found[task.name] = base.predict(
                verb,
                rows=task.rows,
                tokens=task.tokens,
                threads=threads,
                workers=workers.get(task.role, processes if task.kind == "reward" else 1),
                device=device,
                model=model,
            )
    return found


def run_workers(config: RunConfig) -> dict[str, int]:
    """Of each role with a model: how many share its rows."""
    meshes = {role: config.placed.mesh_of(role, None) for role in (*config.models, "sampler")}
    return {role: mesh.num_replicas if role == "sampler" else mesh.dp for role, mesh in meshes.items()}


def with_own_seconds(graph: TaskGraph, known: Mapping[str, Prediction]) -> TaskGraph:
    """Tasks without a model take what was profiled, where it was."""
    models = {role.name for role in graph.roles}
    own = {name: one.seconds for name, one in known.items()}
    tasks = (
        replace(task, seconds=own.get(task.name, task.seconds)) if task.role not in models else task for task in graph.tasks
    )
    return replace(graph, tasks=tuple(tasks))


# ------------------------------------------------------------------------------------------------------- what runs measure


class ProfileKeeper:
    """A hook that keeps what was measured of a step's calls, every ``KEEP_S`` seconds and at the end. A context.

    ``source``: the run directory; ``learned``: what auctions have learned until now. A base that can't be written ends no
    run: ``note`` gets a line, once.
    """

    def __init__(
        self,
        config: RunConfig,
        source: Path,
        note: Callable[[str], None],
        learned: Callable[[], Sequence[Learned]] = lambda: (),
    ) -> None:
        self._learned = learned
        self.path, self.machine = base_path(), asdict(fingerprint())
        self._roles, self._source, self._note = kept_roles(config), str(source.resolve()), note
        self._samples: list[Sample] = []
        self._written_s, self._works = time.monotonic(), True

    def __call__(self, step: Step) -> None:
        for span in [span for span in step.spans if span.effort is not None]:  # few of them, where calls are short
            if (kept := self._roles.get(span.name.partition(".")[0])) and (sample := sample_of(span, *kept, self._source)):
                self._samples.append(sample)
        if time.monotonic() - self._written_s > KEEP_S:
            self.write()

    def write(self) -> None:
        """Keep what has not been kept yet."""
        samples, self._samples, self._written_s = self._samples, [], time.monotonic()
        learned = self._learned()
        if (samples or learned) and self._works:
            try:
                ProfileBase.add(self.path, self.machine, samples, learned)
            except UserError as error:
                self._works = False
                self._note(f"task profiles of this run are not kept: {error}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.write()
