"""Classical RL as a short program: a sampler, networks and an optimizer, on the same core as everything else.

    with HybridFlowContext() as ctx:
        sampler = ctx.create_sampler({"env": "CartPole-v1"})
        critic = ctx.create_network("MLP", [256, 256])
        actor = ctx.create_network("MLP", [256, 256], policy_head=True)
        optimizer = ctx.create_optimizer("Adam", [actor, critic])
        for epoch in range(1000):
            experiences = sampler.collect(actor, steps=4096)
            advantages = compute_gae(experiences, critic)
            optimizer.update(actor, critic, experiences, advantages)
            print(ctx)  # epoch 7  return 184  ...

What a program creates adds up to a configuration (of PPO); the first call that needs workers builds them from it, as
``hybridflow train`` does. Experiences and advantages are batches: a program may read what they hold, and replace it.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NoReturn, Self, get_args

import numpy as np
import torch
from rich.console import Console
from rich.live import Live
from rich.text import Text

from hybridflow.algorithms.ppo import PPOConfig
from hybridflow.context_graph import Graphs
from hybridflow.context_program import NetworkRole, Program, Settings
from hybridflow.core.batch import Batch
from hybridflow.core.config import parse
from hybridflow.core.errors import ContractError, UserError
from hybridflow.core.roles import Fn, update
from hybridflow.data.envs import EnvironmentConfig, spaces_of
from hybridflow.hooks import Evaluation
from hybridflow.models.nets import NetConfig
from hybridflow.ops.advantages import gae, whiten
from hybridflow.ops.losses import ppo_clip, value_loss
from hybridflow.telemetry.console import step_words
from hybridflow.workers.optimizer import OptimizerConfig

__all__ = ["HybridFlowContext", "Network", "NetworkOptimizer", "Sampler", "compute_gae"]

NETWORKS = tuple(kind.upper() for kind in get_args(NetConfig.model_fields["kind"].annotation))
OPTIMIZERS: dict[str, dict[str, float]] = {"Adam": {}, "AdamW": {"weight_decay": 0.01}}
RUNTIMES = ("local", "ray")
DEVICES = ("auto", "cpu", "cuda")
COLLECTED = ("sample_id", "observations", "actions", "log_probs", "rewards", "response_mask", "final_observations")
POLICY_LOSS = ppo_clip.bind(clip=0.2)
VALUE_LOSS = value_loss.bind()  # returns of environments are large: clipped values would follow them slowly
ESTIMATED = ("values", "advantages", "returns")


class HybridFlowContext:
    """Creates the parts of a program, and knows what they do. UserError: a mistake, in one line, before any work.

    ``runtime``: "local" runs everything in this process, "ray" in worker processes, of which ``workers`` step environments
    (0: one for each core). ``seed``: all randomness derives from it. ``device``: of the networks, "auto" for the GPU if
    there is one. ``threads``: of torch in each process; more than one makes small networks slower.
    """

    def __init__(
        self,
        runtime: Literal["local", "ray"] = "local",
        *,
        workers: int = 0,
        seed: int = 1,
        device: Literal["auto", "cpu", "cuda"] = "auto",
        threads: int = 1,
    ) -> None:
        _among("HybridFlowContext: runtime", runtime, RUNTIMES)
        _among("HybridFlowContext: device", device, DEVICES)
        if workers and runtime == "local":
            _refuse(f'HybridFlowContext: workers = {workers} has no effect with runtime = "local"; set runtime = "ray"')
        for name, value, least in (("workers", workers, 0), ("seed", seed, 0), ("threads", threads, 1)):
            _whole(f"HybridFlowContext: {name}", value, least)
        if device == "cuda" and not torch.cuda.is_available():
            _refuse('HybridFlowContext: device = "cuda": torch finds no GPU here; use "auto" or "cpu"')
        self._program = Program(Settings(runtime, workers, seed, device, threads))
        self._live: Live | None = None

    # What a program is made of.

    def create_sampler(self, env_config: Mapping[str, Any] | EnvironmentConfig) -> Sampler:
        """Environments: ``{"env": "CartPole-v1"}`` and any key of ``[environment]``, such as ``num_envs``."""
        program = self._creating("create_sampler")
        if program.environment is not None:
            _refuse("create_sampler: this context has a sampler; use it, or another HybridFlowContext")
        if not isinstance(env_config, EnvironmentConfig):
            env_config = _environment(env_config)
        spaces_of(env_config)
        program.environment = env_config
        return Sampler(program, program.create("create_sampler", f"{env_config.num_envs} x {env_config.id}"), env_config)

    def create_network(self, kind: str, sizes: Sequence[int], policy_head: bool = False, **options: Any) -> Network:
        """A network with hidden layers of these ``sizes``, that gives values, or with ``policy_head`` actions.

        ``kind``: "MLP", "CNN" (images), "GRU", "LSTM" or "attention" (the last layer is a memory). ``options``: further
        keys of ``[actor.net]``, such as ``activation`` and ``normalise``.
        """
        program = self._creating("create_network")
        role: NetworkRole = "actor" if policy_head else "critic"
        _among("create_network: kind", str(kind).upper(), NETWORKS)
        _several("create_network: sizes", sizes, "[256, 256]")
        for size in sizes:
            _whole("create_network: a size", size, 1)
        if role in program.networks:
            head = "with a policy head" if policy_head else "that gives values"
            _refuse(f"create_network: this context has a network {head}; use it, or another HybridFlowContext")
        if "hidden" in options:
            _refuse("create_network: hidden is what the sizes say; leave it out")
        given = {"kind": kind.lower(), "hidden": tuple(sizes), **options}
        net = program.networks[role] = parse(NetConfig, given, "create_network")
        return Network(program, program.create("create_network", f"{role}, {kind} {'-'.join(map(str, sizes))}"), role, net)

    def create_optimizer(
        self,
        kind: str,
        networks: Sequence[Network],
        *,
        lr: float = 3e-4,
        epochs: int = 10,
        minibatches: int = 32,
        **options: Any,
    ) -> NetworkOptimizer:
        """What moves the ``networks``: ``update`` goes ``epochs`` times over its experiences, and each time takes one step
        on each of so many ``minibatches``.

        ``options``: further keys of ``[actor.optimizer]``, such as ``max_grad_norm`` (0.5 when left out).
        """
        program = self._creating("create_optimizer")
        _among("create_optimizer: kind", kind, tuple(OPTIMIZERS))
        _whole("create_optimizer: epochs", epochs, 1)
        _whole("create_optimizer: minibatches", minibatches, 1)
        if program.optimizer is not None:
            _refuse("create_optimizer: this context has an optimizer; name all of its networks in one")
        _several("create_optimizer: networks", networks, "[actor, critic]")
        if not networks:
            _refuse("create_optimizer: no networks; expected those that it moves, such as [actor, critic]")
        for network in networks:
            _check_network(program, "create_optimizer", network)
        if options.get("schedule", "constant") != "constant":
            _refuse("create_optimizer: a schedule needs the length of a run, which a program doesn't tell; leave it out")
        if kind == "Adam" and "weight_decay" in options:
            _refuse('create_optimizer: Adam has no weight_decay; use "AdamW"')
        config = parse(OptimizerConfig, {"lr": lr, "max_grad_norm": 0.5, **OPTIMIZERS[kind], **options}, "create_optimizer")
        program.optimizer, program.plan = config, {"epochs": epochs, "minibatches": minibatches}
        roles = [network.role for network in networks]
        told = f"{kind} of {', '.join(roles)}, {epochs} epochs of {minibatches} minibatches"
        number = program.create("create_optimizer", told, *((f"weights of {n.role}", n.number) for n in networks))
        return NetworkOptimizer(program, number, tuple(roles))

    def _creating(self, what: str) -> Program:
        program = self._open(what)
        if program.runs:
            _refuse(f"{what}: the program runs already; create everything before the first collect")
        return program

    def _open(self, what: str) -> Program:
        _check_open(self._program, what)
        return self._program

    # What it does.

    @property
    def epoch(self) -> int:
        """How many epochs have begun: one begins with each ``collect``."""
        return self._program.epochs

    @property
    def metrics(self) -> dict[str, float]:
        """What the last epoch measured, as in a run's metrics.jsonl: ``episode_return/mean``, ``env_steps_per_s`` ..."""
        return self._program.record()

    @property
    def graph(self) -> Graphs:
        """The last epoch as a program, on its processes, and in the order in which it ran; ``print(ctx.graph)``."""
        return self._program.graphs()

    def __str__(self) -> str:
        """The last epoch in one line."""
        return _line(self.epoch, self.metrics)

    def save(self, path: str | Path) -> None:
        """Write a run directory, which ``hybridflow eval`` and all other commands read: configuration, metrics and policy.

        CheckpointError if the folder is in use.
        """
        self._open("save").save(Path(path))

    def save_checkpoint(self, folder: str | Path) -> Path:
        """Write all that going on exactly needs into a folder of its own in ``folder``; the newest two remain."""
        return self._open("save_checkpoint").save_checkpoint(Path(folder))

    def load_checkpoint(self, path: str | Path) -> None:
        """Go on where ``save_checkpoint`` was, in a program that has created the same and collected nothing yet."""
        program = self._creating("load_checkpoint")
        if program.environment is None or "actor" not in program.networks:
            _refuse("load_checkpoint: create sampler, networks and optimizer before")
        program.load_checkpoint(Path(path))

    def close(self) -> None:
        """End all processes; metrics and graphs stay."""
        self._program.close()

    def __enter__(self) -> Self:
        # Where somebody watches, a line that follows the epochs; a program's own output is its own business.
        console = Console(stderr=True)
        if console.is_terminal and not console.is_dumb_terminal:
            self._live = Live(console=console, get_renderable=self._progress, refresh_per_second=2)
            self._live.start()
        return self

    def _progress(self) -> Text:
        program = self._program
        return Text(_line(program.first_epoch + len(program.records), program.records[-1]) if program.records else "")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._program.finish()
        finally:
            self.close()
            if self._live:
                self._live.stop()


@dataclass(frozen=True, eq=False)
class Network:
    """A policy (``role`` "actor") or a value network (``role`` "critic"); ``number``: of the call that created it."""

    program: Program
    number: int
    role: NetworkRole
    net: NetConfig

    @property
    def use(self) -> dict[str, int]:
        return {f"weights of {self.role}": self.number}


@dataclass(frozen=True, eq=False)
class Sampler:
    """Environments of a program, which go on where they stood from one ``collect`` to the next."""

    program: Program
    number: int
    config: EnvironmentConfig

    def collect(self, actor: Network, steps: int) -> Batch:
        """``steps`` steps of all environments together, drawn from the ``actor``; a row is a piece of an episode."""
        _check_network(self.program, "collect", actor, "actor")
        _whole("collect: steps", steps, 1)
        program, slots, workers = self.program, np.arange(self.config.num_envs), self.program.workers
        num_steps = steps // len(slots) + (slots < steps % len(slots))
        source = Batch({"slot": slots, "num_steps": num_steps})
        program.begin(source)
        uses = {"environments": self.number, **actor.use}
        with program.line("sampler", "collect", f"with actor, steps={steps}", uses, (self.number,)):
            return workers.actor.rollout(source)

    def evaluate(self, actor: Network, episodes: int = 100) -> Evaluation:
        """Mean return (``score``) of whole ``episodes`` in fresh environments under the policy's likeliest actions, with
        its 95 % confidence interval (``low``, ``high``)."""
        _check_network(self.program, "evaluate", actor, "actor")
        _whole("evaluate: episodes", episodes, 1)
        return self.program.workers.parts.evaluated(episodes)


@dataclass(frozen=True, eq=False)
class NetworkOptimizer:
    """Moves the networks of the ``roles``."""

    program: Program
    number: int
    roles: tuple[NetworkRole, ...]

    def update(
        self, actor: Network, critic: Network, experiences: Batch, advantages: Batch, *, loss: Fn | None = None
    ) -> None:
        """PPO: the actor by ``loss`` (ppo_clip, by default), on whitened advantages, and the critic by the squared
        error of its values, as ``algorithms/ppo.py`` does with ``value_clip = 0``."""
        program = self.program
        _check_network(program, "update", actor, "actor")
        _check_network(program, "update", critic, "critic")
        for network in (actor, critic):
            if network.role not in self.roles:
                _refuse(f"update: the {network.role} isn't in this optimizer; name it in create_optimizer")
        batch = _joined(experiences, advantages)
        if not isinstance(loss, Fn | None):
            _refuse("update: loss is no declared function with its parameters, such as reinforce.bind()")
        loss, workers = loss or POLICY_LOSS, program.workers
        uses = {**actor.use, **critic.use, "optimizer state": self.number}
        told = f"actor by {loss.name}, critic by value_loss"
        with program.line("optimizer", "update", told, uses, tuple(uses.values())):
            batch = workers.estimator.compute(batch, whiten.bind())
            update(batch, (workers.critic, VALUE_LOSS), (workers.actor, loss))


def compute_gae(experiences: Batch, critic: Network, gamma: float = 0.99, lam: float = 0.95) -> Batch:
    """``advantages`` (generalised advantage estimation, Schulman et al. 2016), ``returns`` and ``values`` of every step.

    ``gamma``: discount; ``lam``: 0 trusts the critic, 1 the rewards.
    """
    if not isinstance(critic, Network):
        _refuse(f"compute_gae: got {type(critic).__name__}, expected a network of ctx.create_network")
    program = critic.program
    _check_network(program, "compute_gae", critic, "critic")
    _check_columns("compute_gae: experiences", experiences, COLLECTED, "what sampler.collect gave")
    program.method = parse(PPOConfig, {**program.method.model_dump(), "gamma": gamma, "lam": lam}, "compute_gae")
    with program.line("critic", "compute_gae", f"gamma={gamma}, lam={lam}", critic.use):
        batch = program.workers.critic.compute_values(experiences)
        return program.workers.estimator.compute(batch, gae.bind(gamma=gamma, lam=lam)).select(ESTIMATED)


def _check_open(program: Program, what: str) -> None:
    if program.closed:
        _refuse(f"{what}: the context is closed; use it inside of its with block")


def _check_network(program: Program, what: str, network: object, role: NetworkRole | None = None) -> None:
    """UserError if it is no network of the program, or not one for this role."""
    _check_open(program, what)
    if not isinstance(network, Network):
        _refuse(f"{what}: got {type(network).__name__}, expected a network of ctx.create_network")
    if network.program is not program:
        _refuse(f"{what}: the {network.role} is a network of another context")
    if role == "actor" != network.role:
        _refuse(f"{what}: a network that gives values can't act; create it with policy_head=True")
    if role == "critic" != network.role:
        _refuse(f"{what}: a network with a policy head gives no values; create one without")


def _joined(experiences: Batch, advantages: Batch) -> Batch:
    _check_columns("update: experiences", experiences, COLLECTED, "what sampler.collect gave")
    _check_columns("update: advantages", advantages, ESTIMATED, "what compute_gae gave")
    try:
        return experiences.with_columns(**{name: advantages.columns[name] for name in ESTIMATED})
    except ContractError as error:
        _refuse(f"update: the advantages are not of these experiences: {error}")


def _check_columns(what: str, batch: object, names: Sequence[str], expected: str) -> None:
    if not isinstance(batch, Batch):
        _refuse(f"{what}: got {type(batch).__name__}, expected {expected}")
    if missing := [name for name in names if name not in batch]:
        _refuse(f"{what}: without {', '.join(missing)}; expected {expected}")


def _environment(given: Mapping[str, Any]) -> EnvironmentConfig:
    if not isinstance(given, Mapping):
        _refuse(f'create_sampler: {given!r}, expected a dict such as {{"env": "CartPole-v1"}}')
    if "env" not in given:
        _refuse(f'create_sampler: no "env" in {dict(given)}; expected the id of an environment: {{"env": "CartPole-v1"}}')
    rest = {key: value for key, value in given.items() if key != "env"}
    if "steps_per_rollout" in rest:
        _refuse("create_sampler: steps_per_rollout has no effect here; collect says how many steps")
    return parse(EnvironmentConfig, {"id": given["env"], **rest}, "create_sampler")


def _line(epoch: int, record: Mapping[str, float]) -> str:
    return "  ".join([f"epoch {epoch}", *step_words(record)])


def _whole(what: str, value: object, least: int) -> None:
    if type(value) is not int or value < least:
        _refuse(f"{what}: {value!r}, expected a whole number of at least {least}")


def _several(what: str, value: object, example: str) -> None:
    if not isinstance(value, Sequence) or isinstance(value, str):
        _refuse(f"{what}: {value!r}, expected a list such as {example}")


def _among(what: str, value: object, known: Collection[str]) -> None:
    if value not in known:
        near = difflib.get_close_matches(str(value), known, 1, 0.5)
        hint = f"did you mean {near[0]!r}? " if near else ""
        _refuse(f"{what} {value!r} is not known; {hint}known are {', '.join(known)}")


def _refuse(message: str) -> NoReturn:
    raise UserError(message)
