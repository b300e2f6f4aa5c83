"""What the calls of a context run on: the configuration that they add up to, the workers that are built from it, and what
is recorded of every epoch. ``context.py`` is what a program sees of it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from hybridflow import checkpoint
from hybridflow.algorithms.ppo import PPOConfig
from hybridflow.build import make_makers, make_parts, make_runtime
from hybridflow.build_environment import EnvironmentParts
from hybridflow.build_trace import place, workload
from hybridflow.config import RunConfig, resolved, validate
from hybridflow.config_sections import CheckpointConfig
from hybridflow.context_graph import ExecutionPlan, Graphs, Line, PhysicalGraph, contracted, shards_of
from hybridflow.controller.actor import LinkedActor
from hybridflow.controller.recording_runtime import RecordingRuntime
from hybridflow.controller.trace_runtime import TraceRuntime
from hybridflow.core.batch import Batch
from hybridflow.core.errors import UserError
from hybridflow.core.graph import Call, Graph
from hybridflow.core.metrics import Metrics, Span
from hybridflow.core.resident import MemoryMeter
from hybridflow.core.roles import Estimator, Runtime
from hybridflow.data.envs import EnvironmentConfig
from hybridflow.hooks import describe
from hybridflow.models.nets import NetConfig
from hybridflow.telemetry.graph_tables import memory
from hybridflow.telemetry.rundir import RunDirectory
from hybridflow.telemetry.tracker import Tracker
from hybridflow.workers.optimizer import OptimizerConfig

__all__ = ["NetworkRole", "Program", "Settings", "Workers"]

NetworkRole = Literal["actor", "critic"]


@dataclass(frozen=True)
class Settings:
    """What a context is given. ``workers``: that step environments, on Ray; 0: as many as there are cores."""

    runtime: Literal["local", "ray"]
    workers: int
    seed: int
    device: Literal["auto", "cpu", "cuda"]
    threads: int


class Workers(NamedTuple):
    """What the configuration comes to. ``critic``: None where the program has none."""

    runtime: RecordingRuntime
    parts: EnvironmentParts
    actor: LinkedActor
    critic: Any
    estimator: Estimator


@dataclass
class _Epoch:
    """From one collecting to the next."""

    source: Batch
    start_s: float
    lines: list[Line] = field(default_factory=list)
    metrics: Metrics = field(default_factory=Metrics)
    spans: list[Span] = field(default_factory=list)


class Program:
    """What was created, then what runs. ``records``: of the epochs that are over, one each."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.closed, self.first_epoch = settings, False, 0
        self.environment: EnvironmentConfig | None = None
        self.networks: dict[NetworkRole, NetConfig] = {}
        self.optimizer: OptimizerConfig | None = None
        self.plan = {"epochs": 1, "minibatches": 1}
        self.method = PPOConfig(gamma=0.99, value_clip=0.0)
        self.created: list[Line] = []
        self.records: list[dict[str, float]] = []
        self._epoch: _Epoch | None = None
        self._finished: _Epoch | None = None
        self._memory, self._running = MemoryMeter(), ExitStack()

    # What it is.

    def create(self, verb: str, told: str, *uses: tuple[str, int]) -> int:
        """Write down a call before the first epoch; its number."""
        number = len(self.created)
        self.created.append(Line(Call(number, "context", verb, "source", told, 0, 0, 0, ()), uses))
        return number

    def config(self, run_dir: str = "program", steps: int = 1) -> RunConfig:
        """The run of PPO that the program amounts to."""
        settings, environment, optimizer = self.settings, self.environment, self.optimizer
        assert environment is not None, "a context has a sampler before it has workers"
        moved = {} if optimizer is None else {"optimizer": optimizer.model_dump(exclude_unset=True)}
        data: dict[str, Any] = {
            "algorithm": "ppo",
            "run_dir": run_dir,
            "seed": settings.seed,
            "device": settings.device,
            "threads": settings.threads,
            "ppo": self.method.model_dump(),
            "environment": environment.model_dump(exclude_unset=True) | self._steps_per_rollout(),
            "train": {"steps": steps, **self.plan},
            **{role: {"net": net.model_dump(exclude_unset=True), **moved} for role, net in self.networks.items()},
        }
        return validate(data | (self._placed(environment) if settings.runtime == "ray" else {}), "program")

    def _steps_per_rollout(self) -> dict[str, int]:
        epoch = self._epoch or self._finished
        return {} if epoch is None else {"steps_per_rollout": int(epoch.source["num_steps"].max())}

    def _placed(self, environment: EnvironmentConfig) -> dict[str, Any]:
        """Sections of where roles run: environments in their workers, the critic beside the actor."""
        workers = min(self.settings.workers or cores(), environment.num_envs)
        if self._device.type == "cuda":  # a process has a GPU to itself
            pools, roles = {"main": min(workers, torch.cuda.device_count())}, {}
        else:
            apart = "critic" if "critic" in self.networks else "actor"
            pools = {"actor": 1, apart: 1, "environments": workers}
            roles = {"actor": "actor", "critic": apart, "estimator": apart, "sampler": "environments"}
        return {
            "runtime": {"kind": "ray"},
            "placement": {"pools": pools, "roles": roles},
        }

    @property
    def _device(self) -> torch.device:
        found = "cuda" if torch.cuda.is_available() else "cpu"
        return torch.device(found if self.settings.device == "auto" else self.settings.device)

    # What runs.

    @property
    def runs(self) -> bool:
        """Whether there are workers."""
        return "workers" in vars(self)

    @cached_property
    def workers(self) -> Workers:
        """Built when first asked for. What the spaces of the environment don't fit is told before any process starts."""
        config = self.config()
        trace = TraceRuntime(workload(config))
        self._make(config.model_copy(update={"device": "meta"}), trace)
        place(trace, config)
        with ExitStack() as running:
            runtime = RecordingRuntime(make_runtime(config), trace)
            running.callback(runtime.stop)
            made = Workers(runtime, *self._make(config, runtime))
            runtime.ready()
            self._running = running.pop_all()
        return made

    def _make(self, config: RunConfig, runtime: Runtime) -> tuple[EnvironmentParts, LinkedActor, Any, Estimator]:
        parts = make_parts(config, runtime)
        assert isinstance(parts, EnvironmentParts), "it has an [environment]"
        makers = make_makers(config, parts, runtime)
        critic = makers["critic"]() if "critic" in self.networks else None
        return parts, makers["actor"](), critic, makers["estimator"]()

    def begin(self, source: Batch) -> None:
        """The epoch before is over, another one starts from the slots of ``source``."""
        self.finish()
        self._epoch = _Epoch(source, time.perf_counter())
        self.workers.runtime.begin(source, float(source["num_steps"].mean()))

    @contextmanager
    def line(
        self, role: str, verb: str, told: str, uses: Mapping[str, int], changes: tuple[int, ...] = ()
    ) -> Iterator[None]:
        """A call of the program: what happens inside belongs to it."""
        first = len(self.workers.runtime.trace.graph.calls)
        yield
        calls = self.workers.runtime.trace.graph.calls
        worker, lines = calls[first], self._current.lines
        size = worker.rows, worker.tokens_in, worker.tokens_out
        call = Call(len(self.created) + len(lines), role, verb, worker.kind, told, *size, calls[-1].writes)
        lines.append(Line(call, tuple(uses.items()), changes, first, len(calls)))

    @property
    def _current(self) -> _Epoch:
        """The epoch that is going on, or the last one."""
        if (epoch := self._epoch or self._finished) is None:
            raise UserError("context: nothing has run yet; sampler.collect(actor, steps=...) begins the first epoch")
        return epoch

    def record(self) -> dict[str, float]:
        """What the epoch that is going on has measured so far, or the last one if none is. Waits for all calls."""
        epoch = self._epoch
        if epoch is None:
            return self.records[-1] if self.records else {}
        metrics, spans = self.workers.runtime.drain()
        epoch.metrics.merge(metrics)
        epoch.spans += spans
        end_s = max((span.start_s + span.duration_s for span in epoch.spans), default=epoch.start_s)
        return describe(epoch.metrics.values() | {"time/step_s": end_s - epoch.start_s}, epoch.spans, self._memory)

    def finish(self) -> None:
        """Nothing more belongs to the epoch."""
        if self._epoch is not None:
            self.records.append(self.record())
            self._finished, self._epoch = self._epoch, None

    @property
    def epochs(self) -> int:
        """How many have begun."""
        return self.first_epoch + len(self.records) + (self._epoch is not None)

    def close(self) -> None:
        """End the workers; what was recorded stays."""
        self.closed = True
        self._running.close()

    # What stays of it.

    def save(self, path: Path) -> None:
        """A run directory, as ``hybridflow train`` leaves it. CheckpointError: the folder is in use."""
        directory = RunDirectory.create(path, resolved(self.config(str(path), max(self.epochs, 1))))
        records = [*self.records, *([] if self._epoch is None else [self.record()])]
        with Tracker(directory) as tracker:
            for number, record in enumerate(records, self.first_epoch + 1):
                tracker.log(number, record)
        self.workers.parts.export(directory.path / "model")

    def save_checkpoint(self, folder: Path) -> Path:
        """All that going on exactly needs, in a folder in ``folder``, of which the newest two remain."""
        writing = checkpoint.Writing(folder, self.epochs)
        with writing.discarded_on_error():
            for name, state in self.workers.runtime.save(writing.partial).items():
                writing.add(name, state)
            return writing.commit(self.workers.runtime.saved(True) or {}, CheckpointConfig().keep)

    def load_checkpoint(self, path: Path) -> None:
        """Go on from there. CheckpointError: it is of another program, or damaged."""
        saved = checkpoint.load(path)
        with saved.explaining():
            self.workers.runtime.load(saved.path, saved.state, saved.files)
        self.first_epoch = saved.step

    # What it looks like.

    def graphs(self) -> Graphs:
        epoch, config = self._current, self.config()
        self.record()
        seen = self.workers.runtime.trace.graph
        given = (seen.roles, seen.calls, seen.edges, seen.pools)
        collected = next(iter(self.workers.runtime.new_bytes.values()), 0)
        return Graphs(
            contracted([*self.created, *epoch.lines], seen),
            PhysicalGraph(*given, shards_of(config, epoch.source, collected), self._chosen(config)),
            ExecutionPlan(*given, list(epoch.spans), fused(config), reused(seen)),
        )

    def _chosen(self, config: RunConfig) -> list[str]:
        """What the context has decided by itself, and why."""
        found = "found" if self._device.type == "cuda" else "no GPU here"
        why = "asked for" if self.settings.device != "auto" else found
        chosen = [f"models on {self._device} ({why}), {config.num_threads or 'all'} thread(s) of torch in a process"]
        if config.runtime.kind == "local":
            return [*chosen, 'every role in this process (runtime = "local")']
        environments = config.placed.pool_of("sampler")
        why = "asked for" if self.settings.workers else f"{cores()} cores"
        chosen.append(f"{environments.size} worker process(es) for environments ({why})")
        if len(config.placed.pools) > 1:
            chosen.append("actor and critic in processes of their own, so that their updates run side by side")
        return chosen


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def fused(config: RunConfig) -> list[str]:
    """What runs as one where several operations are written."""
    nets = {"actor": config.actor.net, "critic": config.critic.net}
    plain = {role: net.activation for role, net in nets.items() if net.kind == "mlp"}
    one_node = [role for role, activation in plain.items() if activation == "relu" or config.torch_device.type == "cpu"]
    facts = ["the policy sees all environments of a process in one forward"]
    facts += [f"all layers of the MLP are one node of autograd: {', '.join(one_node)}"] if one_node else []
    return [*facts, "Adam moves all parameters of a network in one kernel: actor, critic"]


def reused(graph: Graph) -> list[str]:
    """Memory that serves more than one purpose, instead of a copy."""
    [sampler] = [role for role in graph.roles if role.name == "sampler"]
    weights = "the sampler acts with the actor's own weights"
    if sampler.copy_of:
        weights = f"the sampler's copy of the actor's weights, published into its place: {memory(sampler.weight_bytes)}"
    inside = memory(sum(transfer.bytes for transfer in graph.transfers() if transfer.source == transfer.target))
    return [weights, f"columns that are read in the pool that wrote them, in place: {inside} in an epoch"]
