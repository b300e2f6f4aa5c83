"""Seconds and bytes of every task on its devices, from sizes alone: an analytic model with few efficiency constants.

An ``Estimate`` is a sum of parts by name, each of which is one physical effect, so that a term can be left out:

    compute     products of a pass at ``compute`` of the peak, or reading weights, if that is longer; on CPUs, both
    launch      the device's, a layer and microbatch imbalance   the slowest stage of a pipeline, over the mean one
    recompute   the way forward once more
    bubble      stages that wait (p - 1 microbatches) pipeline   messages between stages
    tensor      all-reduces of tensor parallelism    data        gradients and weights between data-parallel copies
    optimizer   its states through memory            call        ``call_s`` a call, or an update
    prefill     prompts                              decode      weights and cache through memory, or computing, each step
    steps       ``decode_step_s`` a decode step      rows        ``decode_row_s`` a row and step
    copy        weights put together for generation  gather      their way there; both of them: transition
    own         seconds of roles without a model     transfer    columns of other pools
    rescoring   of other systems (``Practice``): the learner's forward pass over what was drawn

``CostModel(graph, efficiency, without={"bubble"})`` leaves parts out. Other terms go with a constant: the shared network
with ``network = inf``, the limit of the cache and its waves with ``cache_limit = False``, pipelines with ``max_pp = 1``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from math import ceil, inf
from typing import Literal

from hybridflow.core.errors import ConfigError
from hybridflow.planner.cluster import Machine
from hybridflow.planner.drawing import Pace, cacheless_parts, draw_parts, least_bytes
from hybridflow.planner.footprint import held_bytes, working_bytes
from hybridflow.planner.graph import Edge, ModelRole, Task, TaskGraph
from hybridflow.planner.links import Links
from hybridflow.planner.mapping import OURS, DeviceMapping, Pool, Practice, Strategy
from hybridflow.planner.moving import nested, reshard_traffic
from hybridflow.planner.passes import Speeds, forward_parts, train_parts
from hybridflow.planner.profile import Profile

__all__ = ["ROWS", "CostModel", "Efficiency", "Estimate", "batches"]

GIB = 2**30
Shard = Literal["none", "zero1", "fsdp"]
ROWS = (1, 2, 4, 8)
"""sequences of a microbatch, where the planner may choose; of short ones so many times more that 8 have ``TOKENS``"""
TOKENS = 4096


@dataclass(frozen=True)
class Efficiency:
    """What formulas can't know: shares of peaks that are reached, and seconds that a call takes besides. The first six are
    fitted (``calibrate``), the others are fixed. Defaults are those of the HybridFlow paper's A100 cluster, fitted to its
    bars by ``python benchmarks/planner.py --fit 4``.

    ``compute``: of the peak of matrix products; ``decode_step_s`` and ``decode_row_s``: of a decode step and of each row in
    it; ``call_s``: of a remote call, or of an update; ``network``: of a machine's; ``copy``: bytes/s at which generation
    weights are put together. ``bandwidth`` and ``link``: of memory's and a link's; ``overlap``: the share of computing
    during which fsdp's weights arrive; ``memory``: of a device, for what is counted (others: contexts, buffers of
    collectives, fragments); ``cache_limit``: whether a cache has to fit. ``device``: whose kernels save activations.
    """

    compute: float = 0.58
    decode_step_s: float = 7e-3
    decode_row_s: float = 4.7e-5
    call_s: float = 1.47
    network: float = 0.799
    copy: float = 4.55e9
    bandwidth: float = 0.85
    link: float = 0.75
    overlap: float = 0.5
    memory: float = 0.9
    cache_limit: bool = True
    device: Literal["cuda", "cpu"] = "cuda"


@dataclass(frozen=True)
class Estimate:
    """Seconds of a task in a step, and what they are made of, by name."""

    parts: dict[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


class CostModel:
    """Times and bytes of a graph's tasks. Everything depends on a task, its strategy and its pool alone, so that what was
    worked out once holds for every mapping.

    ``without``: names of parts that are left out. Of strategies, pipelines of more than ``max_pp`` stages aren't proposed,
    and no ways to share out than ``shards``; with ``even_stages`` all stages have equally many layers, as systems that
    can't cut otherwise want it. ``practice``: of mappings that don't bring theirs.
    """

    practice = OURS

    def __init__(
        self,
        graph: TaskGraph,
        efficiency: Efficiency,
        without: Collection[str] = (),
        max_pp: int = 16,
        shards: tuple[Shard, ...] = ("zero1", "fsdp"),
        even_stages: bool = False,
    ) -> None:
        self.graph, self.efficiency = graph, efficiency
        self.without = frozenset(without) | ({"copy", "gather"} if "transition" in without else set())
        self.max_pp, self.shards, self.even_stages = max_pp, shards, even_stages
        self.roles = {role.name: role for role in graph.roles}
        self._profiles = {role.name: Profile(role, efficiency.device) for role in graph.roles}
        self._tasks = {name: [task for task in graph.tasks if task.role == name] for name in self.roles}
        self._places: dict[tuple[int, int], tuple[Machine, Speeds, Links]] = {}  # machines stay, so that their ids do
        self._seconds: dict[tuple[object, ...], Estimate | None] = {}
        self._pace = Pace(efficiency.decode_step_s, efficiency.decode_row_s, efficiency.copy)

    def strategies(self, role: ModelRole, machine: Machine, devices: int) -> list[Strategy]:
        """All that use all ``devices``, can be cut so and hold a microbatch in memory when alone. Left out are those that
        never win: optimizer states that every copy holds, fsdp in a pipeline, recomputing where nothing is trained."""
        profile, found = self._profiles[role.name], []
        for tp in range(1, min(devices, machine.devices, profile.max_tp) + 1):
            if devices % tp or (devices > machine.devices and machine.devices % tp):
                continue
            copies = devices // tp
            stages = [pp for pp in range(1, min(copies, self.max_pp, profile.layers) + 1) if copies % pp == 0]
            even = [pp for pp in stages if profile.layers % pp == 0 or not self.even_stages]
            found += [s for pp in even for s in self._variants(role, pp, tp, copies // pp)]
        usable = self.usable_bytes(machine)
        return [s for s in found if self.resident_bytes(role, s) + self.working_bytes(role, s) <= usable]

    def _variants(self, role: ModelRole, pp: int, tp: int, dp: int) -> list[Strategy]:
        if role.weights_of:
            return [Strategy(pp, tp, dp)]
        if role.token_budget is not None or not self._tasks[role.name]:
            options = [1]
        else:
            block = max(ceil(ceil(task.rows / task.minibatches) / dp) for task in self._tasks[role.name])
            length = max(task.prompt + task.response for task in self._tasks[role.name])
            times = max(1, int(TOKENS / max(ROWS) / max(1.0, length)))
            options = [times * rows for rows in ROWS if times * rows <= block] or [block]
        again = (False, True) if role.trained and role.token_budget is None else (role.recompute,)
        shards: tuple[Shard, ...] = ("none",)
        if role.trained and dp > 1:
            shards = tuple(shard for shard in self.shards if pp == 1 or shard != "fsdp")
        return [Strategy(pp, tp, dp, shard, recompute, rows) for shard in shards for recompute in again for rows in options]

    def resident_bytes(self, role: ModelRole, strategy: Strategy) -> float:
        """On a device, also while other roles of the pool work: weights, and of trained roles gradients and optimizer. A
        sampler has none of its own anywhere: its weights and cache are there while it generates only."""
        if role.weights_of:
            return 0.0
        return held_bytes(self._profiles[role.name], strategy)

    def working_bytes(self, role: ModelRole, strategy: Strategy) -> float:
        """What the role takes at most on top while it works (activations, logits, buffers). 0 for a sampler: ``seconds``
        says whether it fits into what is free."""
        if role.weights_of:
            return 0.0
        profile = self._profiles[role.name]
        return max((working_bytes(profile, task, strategy) for task in self._tasks[role.name]), default=0.0)

    def usable_bytes(self, machine: Machine) -> float:
        """Of a device's memory, for what is counted."""
        return machine.device.memory_bytes * self.efficiency.memory

    def seconds(
        self,
        task: Task,
        strategy: Strategy,
        machine: Machine,
        free_bytes: float = 0.0,
        practice: Practice | None = None,
    ) -> Estimate | None:
        """Of all ``times``. ``free_bytes``: what a sampler may take (its weights and cache): ``usable_bytes`` less what the
        roles of its pool hold, plus its ``shared_bytes``. More of it never makes it slower. None: it doesn't fit."""
        role, practice = self.roles.get(task.role), practice or self.practice
        _, kv_cache, batch, rescores = practice
        draws = role is not None and task.kind == "generate"
        key = task.name, task.kind, strategy, id(machine), free_bytes if draws else 0.0, kv_cache, batch, rescores
        if key not in self._seconds:
            if draws and batch:
                task = replace(task, slots=batch * strategy.pp * strategy.tp)
            parts = self._parts(role, task, strategy, machine, free_bytes, kv_cache)
            if parts and role is not None and task.kind != "train":
                parts["call"] *= batches(task, strategy, batch)
            if parts and rescores and task.kind == "train" and any(one.weights_of == task.role for one in self.graph.roles):
                scored = self.seconds(replace(task, kind="forward"), strategy, machine, practice=practice)
                parts["rescoring"] = scored.seconds if scored else 0.0
            self._seconds[key] = None if parts is None else self._estimate(parts)
        return self._seconds[key]

    def _parts(
        self, role: ModelRole | None, task: Task, s: Strategy, machine: Machine, free_bytes: float, kv_cache: bool
    ) -> dict[str, float] | None:
        if role is None:
            return {"own": task.seconds * task.times}
        profile = self._profiles[role.name]
        speeds, links = self._place(role, machine)
        if task.kind == "train":
            return train_parts(profile, task, s, speeds, links)
        if task.kind != "generate":
            return forward_parts(profile, task, s, speeds, links)
        if not kv_cache:
            return cacheless_parts(profile, task, s, speeds, self._pace)
        return draw_parts(profile, task, s, speeds, links, self._pace, free_bytes if self.efficiency.cache_limit else inf)

    def _estimate(self, parts: Mapping[str, float]) -> Estimate:
        return Estimate({name: value for name, value in parts.items() if value and name not in self.without})

    def _place(self, role: ModelRole, machine: Machine) -> tuple[Speeds, Links]:
        key = id(machine), role.itemsize
        if key not in self._places:
            e, device = self.efficiency, machine.device
            dtype = "float32" if role.itemsize == 4 else "bfloat16"
            if dtype not in device.flops:
                known = ", ".join(device.flops)
                raise ConfigError(
                    [f"{device.name}: no flops of {dtype}, in which {role.name} computes, but of {known}; give them"]
                )
            flops = device.flops[dtype]
            speeds = Speeds(
                flops * e.compute, device.bandwidth * e.bandwidth, device.launch_s, e.call_s, e.overlap, e.device == "cpu"
            )
            self._places[key] = machine, speeds, Links(machine, e.link, e.network)
        return self._places[key][1:]

    def shared_bytes(
        self, sampler: ModelRole, training: Strategy, generation: Strategy, practice: Practice | None = None
    ) -> float:
        """Of a sampler's weights on a device, those that are the learner's in the same place, beside it on one pool."""
        same = (training.pp, training.tp) == (generation.pp, generation.tp)
        if not nested(training, generation) or ((practice or self.practice).reshard != "hybridflow" and not same):
            return 0.0
        return self._profiles[sampler.name].numbers(training.pp, training.tp) * sampler.itemsize

    def transition(
        self,
        sampler: ModelRole,
        training: Strategy,
        generation: Strategy,
        machine: Machine,
        practice: Practice | None = None,
    ) -> Estimate | None:
        """Of the weights, from training to generation and back, on one pool, as often as there are batches. None: what is
        trained so can't generate so (pp x tp of generation must divide that of training)."""
        reshard, _, batch, _ = practice or self.practice
        if reshard is None:
            return Estimate() if training[:3] == generation[:3] else None
        gathers = training.shard == "fsdp" and training.dp > 1
        if not gathers and training.pp * training.tp % (generation.pp * generation.tp):
            return None
        traffic = reshard_traffic(training, generation, reshard, machine.devices)
        size, (_, links) = self._size(sampler), self._place(sampler, machine)
        outside = traffic.outside * min(machine.devices, training.devices) / traffic.wanted
        gather = size * ((traffic.received - traffic.outside) * links.link + outside * links.network)
        times = max((batches(task, generation, batch) for task in self._tasks[sampler.name]), default=1)
        once = self._moved(size * traffic.assembled, gather)
        return Estimate({name: times * seconds for name, seconds in once.parts.items()})

    def publishing(
        self, sampler: ModelRole, generation: Strategy, machine: Machine, practice: Practice | None = None
    ) -> Estimate:
        """Of the weights, to a sampler on another pool; the pool that takes them is what limits it, so that a pool's cost
        depends on nothing but its own roles."""
        size, (_, links) = self._size(sampler), self._place(sampler, machine)
        own = 1 / (generation.pp * generation.tp)
        if (
            practice or self.practice
        ).reshard == "broadcast":  # the whole model comes to a machine once, and all of its devices take it
            return self._moved(size, size * links.network)
        arriving = min(machine.devices, generation.devices) * own
        return self._moved(size * own, size * arriving * links.network)

    def _moved(self, assembled: float, gather: float) -> Estimate:
        """A call, in which bytes of weights are put together while the next ones arrive."""
        if not assembled:
            return Estimate()
        copy = 0.0 if "copy" in self.without else assembled / self.efficiency.copy
        return self._estimate({"call": self.efficiency.call_s, "copy": copy, "gather": max(0.0, gather - copy)})

    def _size(self, role: ModelRole) -> float:
        return self._profiles[role.name].numbers(1, 1) * role.itemsize

    def transfer(self, edge: Edge, machine: Machine, devices: int) -> float:
        """Seconds in which a pool pulls what it reads from another one."""
        if "transfer" in self.without or not edge.bytes:
            return 0.0
        machines = ceil(devices / machine.devices)
        return edge.bytes / machines / (machine.network * self.efficiency.network) + machine.network_latency_s

    def estimates(self, mapping: DeviceMapping) -> dict[str, Estimate]:
        """Of every task, with its transitions and transfers as parts. ConfigError: a pool's roles don't fit its memory."""
        problems = [problem for pool in mapping.pools if (problem := self._shortage(mapping, pool))]
        if problems:
            raise ConfigError(problems)
        pools = {role: pool for pool in mapping.pools for role in pool.roles}
        made: dict[str, Estimate] = {}
        prepared: set[str] = set()
        for task in self.graph.tasks:
            if task.role not in self.roles:
                made[task.name] = Estimate({"own": task.seconds * task.times})
                continue
            parts = dict(self._own(mapping, task).parts)
            role, pool = self.roles[task.role], pools[task.role]
            if role.weights_of and task.role not in prepared:
                prepared.add(task.role)
                parts |= {"transition": self._weights(mapping, role).seconds}
            parts["transfer"] = sum(
                self.transfer(edge, pool.machine, pool.devices)
                for edge in self.graph.edges
                if edge.reader == task.name and pools.get(self._role_of(edge.writer)) not in (pool, None)
            )
            made[task.name] = self._estimate(parts)
        return made

    def _role_of(self, name: str) -> str:
        return next(task.role for task in self.graph.tasks if task.name == name)

    def _own(self, mapping: DeviceMapping, task: Task) -> Estimate:
        pool, s = mapping.pool_of(task.role), mapping.strategies[task.role]
        free = self._free(mapping, self.roles[task.role], pool) if task.kind == "generate" else 0.0
        estimate = self.seconds(task, s, pool.machine, free, mapping.practice)
        if estimate is None:
            raise ConfigError(
                [
                    f"{_named(pool)}: {max(0.0, free) / GIB:.1f} GiB a device are left for {task.role}, which needs "
                    f"{least_bytes(self._profiles[task.role], task, s) / GIB:.1f} GiB for weights and one response"
                ]
            )
        return estimate

    def _free(self, mapping: DeviceMapping, sampler: ModelRole, pool: Pool) -> float:
        held = sum(
            self.resident_bytes(self.roles[name], mapping.strategies[name]) for name in pool.roles if name in self.roles
        )
        free = self.usable_bytes(pool.machine) - held
        if sampler.weights_of in pool.roles:
            training = mapping.strategies[sampler.weights_of]
            free += self.shared_bytes(sampler, training, mapping.strategies[sampler.name], mapping.practice)
        return free

    def _weights(self, mapping: DeviceMapping, sampler: ModelRole) -> Estimate:
        pool, generation = mapping.pool_of(sampler.name), mapping.strategies[sampler.name]
        if sampler.weights_of not in pool.roles:
            return self.publishing(sampler, generation, pool.machine, mapping.practice)
        training = mapping.strategies[sampler.weights_of]
        found = self.transition(sampler, training, generation, pool.machine, mapping.practice)
        if found is None:
            raise ConfigError(
                [
                    f"{sampler.name}: pp x tp = {generation.pp} x {generation.tp} doesn't divide {training.pp} x "
                    f"{training.tp}, those of {sampler.weights_of}; choose a divisor"
                ]
            )
        return found

    def _shortage(self, mapping: DeviceMapping, pool: Pool) -> str:
        """What is wrong if the roles of a pool don't fit; "" if they do."""
        roles = [self.roles[name] for name in pool.roles if name in self.roles]
        held = {role.name: self.resident_bytes(role, mapping.strategies[role.name]) for role in roles}
        works = {role.name: self.working_bytes(role, mapping.strategies[role.name]) for role in roles}
        need, there = sum(held.values()) + max(works.values(), default=0.0), self.usable_bytes(pool.machine)
        if need <= there:
            return ""
        most = max(held, key=lambda name: held[name] + works[name])
        return (
            f"{_named(pool)}: needs {need / GIB:.1f} GiB a device, but {there / GIB:.1f} GiB are usable; {most} takes "
            f"most, {(held[most] + works[most]) / GIB:.1f} GiB: cut it further, or give the pool more devices"
        )


def batches(task: Task, strategy: Strategy, batch: int) -> int:
    """Into how many a task's rows are divided, if a device takes ``batch`` of them at a time: calls and, of what is drawn,
    transitions."""
    return ceil(task.rows / (batch * strategy.devices)) if batch else 1


def _named(pool: Pool) -> str:
    return f"pool {pool.name} ({pool.devices} x {pool.machine.device.name})"
