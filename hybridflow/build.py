"""The composition root: a configuration becomes roles, and roles become a trainer.

An algorithm's constructor names the parts that it needs (actor, critic, estimator, scorers, ...); ``TextParts``,
``PairParts`` and ``EnvironmentParts`` know how to make each. Cheap things come first, so that a wrong path or reward is
told before any model loads.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from hybridflow.algorithms import ALGORITHMS
from hybridflow.algorithms.policy_gradient import Objective
from hybridflow.build_environment import EnvironmentParts
from hybridflow.build_pairs import PairParts
from hybridflow.build_replay import replay_buffer
from hybridflow.build_text import TextParts
from hybridflow.checkpoint import Checkpoint
from hybridflow.config import RunConfig
from hybridflow.controller.actor import SplitActor
from hybridflow.controller.local_runtime import LocalRuntime
from hybridflow.core.batch import Batch
from hybridflow.core.errors import UserError
from hybridflow.core.roles import Algorithm, Role, Runtime
from hybridflow.hooks import Evaluation
from hybridflow.rollout.buffer import Buffer, Fifo, InformativeGroups
from hybridflow.rollout.schedule import Ahead, Asynchronous, DynamicSampling, Offline, Schedule, Synchronous
from hybridflow.train import Trainer
from hybridflow.workers.estimator import EstimatorWorker

__all__ = ["Parts", "Run", "build", "make_algorithm", "make_makers", "make_objective", "make_parts"]


class Parts(Protocol):
    """Makes what an algorithm needs, for language models or for environments.

    ``source`` is what rollouts start from; ``evaluate`` is None where nothing can be evaluated. ``failures``: columns in
    which scorers say on which rows they failed.
    """

    @property
    def failures(self) -> tuple[str, ...]: ...

    @property
    def evaluate(self) -> Callable[[], Evaluation] | None: ...

    def source(self, step: int, /) -> Batch: ...
    def describe(self) -> str: ...
    def makers(self) -> Mapping[str, Callable[[], Any]]: ...
    def export(self, folder: Path) -> None: ...


class Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any], /) -> None: ...


@dataclass
class Run:
    """A trainer with its runtime and its parts. ``beside``: by name, what changes no result, and is saved as well; it goes
    on from where it stood if a checkpoint has it. ``waiting``: around whatever waits for all that is under way."""

    config: RunConfig
    runtime: Runtime
    parts: Parts
    trainer: Trainer
    beside: dict[str, Stateful] = field(default_factory=dict)
    waiting: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext

    def save(self, folder: Path) -> dict[str, Any]:
        """Everything that resuming exactly needs: one entry for the loop and one for each role; roles with models begin to
        write to ``folder``, see ``Runtime.saved``."""
        with self.waiting():
            trainer = self.trainer.state_dict()
        beside = {name: one.state_dict() for name, one in self.beside.items()}
        return {"trainer": trainer, **beside, **self.runtime.save(folder)}

    def load(self, saved: Checkpoint) -> None:
        """Go on from a checkpoint. CheckpointError: it is of another run, or damaged."""
        with saved.explaining():
            self.trainer.load_state_dict(saved.state["trainer"])
            self.runtime.load(saved.path, saved.state, saved.files)
            for name in self.beside.keys() & saved.state.keys():
                self.beside[name].load_state_dict(saved.state[name])


def build(config: RunConfig) -> Run:
    """Make every part of a run."""
    with contextlib.ExitStack() as on_error:
        runtime = make_runtime(config)
        on_error.callback(runtime.stop)
        parts = make_parts(config, runtime)
        buffer, schedule = _buffer_and_schedule(config, parts, runtime)
        algorithm = make_algorithm(config, make_makers(config, parts, runtime))
        runtime.ready()
        trainer = Trainer(algorithm, parts.source, buffer, schedule, runtime)
        on_error.pop_all()
    return Run(config, runtime, parts, trainer, {"lengths": parts.prompts.expected} if isinstance(parts, TextParts) else {})


def make_runtime(config: RunConfig) -> Runtime:
    """What ``[runtime]`` asks for. Ray starts with the first role, so that mistakes in the data are told before."""
    if config.runtime.kind == "local":
        return LocalRuntime()
    if importlib.util.find_spec("ray") is None:
        raise UserError('runtime.kind = "ray" needs Ray, which is not installed: pip install "hybridflow[ray]"')
    from hybridflow.controller.ray_runtime import RayRuntime

    given = config.runtime
    return RayRuntime(
        config.placed,
        address=given.address,
        threads=config.num_threads,
        timeout_s=given.timeout_s,
        gpus=config.torch_device.type == "cuda",
        recovery=config.recovery,
    )


def make_makers(config: RunConfig, parts: Parts, runtime: Runtime) -> dict[str, Callable[[], Any]]:
    """What makes each part that an algorithm's constructor may name."""
    return {
        **parts.makers(),
        "estimator": lambda: runtime.role(Role("estimator", EstimatorWorker, max_workers=1)),
        "objective": lambda: make_objective(config, parts.failures),
    }


def make_parts(config: RunConfig, runtime: Runtime) -> Parts:
    """The parts of a run without an algorithm, as evaluating and generating need them."""
    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    if config.environment is not None:
        return EnvironmentParts(config, config.environment, runtime)
    assert config.data is not None, "validated"
    if ALGORITHMS[config.algorithm].records == "pairs":
        return PairParts(config, config.data, runtime)
    return TextParts(config, config.data, runtime)


def _buffer_and_schedule(config: RunConfig, parts: Parts, runtime: Runtime) -> tuple[Buffer, Schedule]:
    train, ahead, updates = config.train, config.schedule.ahead, config.updates_per_step // config.draws_per_update
    buffer: Buffer = Fifo(max_staleness=ahead)
    if isinstance(parts, EnvironmentParts) and config.replays:
        buffer = replay_buffer(config, parts.spaces, runtime)
    if isinstance(parts, EnvironmentParts) and isinstance(parts.actor, SplitActor):
        schedule = Asynchronous(runtime.wait_any, parts.actor.turn_to, parts.shares, updates)
        return buffer if config.replays else Fifo(max_staleness=sys.maxsize), schedule
    if config.environment is not None and config.environment.steps_per_rollout == 0:
        return buffer, Offline(updates)
    if train.max_refills and isinstance(parts, TextParts):
        groups = InformativeGroups()
        return groups, DynamicSampling(parts.draw, groups, train.prompts_per_step, train.max_refills)
    if ahead and isinstance(parts, EnvironmentParts | TextParts):
        return buffer, Ahead(parts.actor, ahead, updates)
    return buffer, Synchronous(updates)


def make_objective(config: RunConfig, failures: tuple[str, ...] = ()) -> Objective:
    """The policy loss, the KL and the shaping that policy-gradient methods share."""
    algorithm: Any = ALGORITHMS[config.algorithm].algorithm
    correction = config.loss.correction or ("truncate" if config.schedule.ahead else "none")
    return Objective(
        config.loss.model_copy(update={"correction": correction}),
        config.kl,
        config.shaping,
        kl_where=algorithm.kl_where,
        max_new_tokens=config.generation.max_new_tokens,
        samples_per_step=config.train.prompts_per_step * config.train.group_size,
        one_update=config.train.minibatches * config.train.epochs == 1,
        failures=failures,
    )


def make_algorithm(config: RunConfig, makers: Mapping[str, Callable[[], Any]]) -> Algorithm:
    """The algorithm with those of the parts that its constructor names."""
    algorithm: Any = ALGORITHMS[config.algorithm].algorithm
    left_out = {"config"} if algorithm.needs_critic(config.method) else {"config", "critic"}
    names = [name for name in inspect.signature(algorithm).parameters if name not in left_out]
    # Scorers first: they are quick to make, and a wrong reward should not wait for a model to load.
    quick = ("scorers", "cost", "baseline", "demonstrations")
    made = {name: makers[name]() for name in sorted(names, key=lambda name: name not in quick)}
    made_algorithm: Algorithm = algorithm(config.method, **made)
    return made_algorithm
