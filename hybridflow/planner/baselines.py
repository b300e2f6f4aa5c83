"""How other systems would run a task graph: as device mappings, so that the same formulas tell how fast (the paper's §6).

    DeepSpeed-Chat   all roles on all devices; training as ZeRO-3, generation in tensor-parallel replicas, for which every
                     device gathers the whole model; 4 responses a device are drawn, scored and trained on, as in its
                     recipes for such models, before the next 4; log-probabilities of responses are another pass of the
                     learner (generate_experience in its ppo_trainer.py), which in the others' pools costs nothing, as it
                     runs beside the critic's
    OpenRLHF         each role on devices of its own, training as ZeRO-3; so is the sampler, a second copy of its learner,
                     to which the whole model is broadcast
    NeMo-Aligner     language models on one half of the devices, the others on the other half; training and generation cut
                     alike, and no key-value cache

What they fix is fixed here; what they leave to their users (tensor-parallel sizes, microbatches, recomputing, how many
devices each pool gets) is searched for, so that a comparison is with each of them at its best.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from hybridflow.core.errors import ConfigError
from hybridflow.planner.cluster import Cluster, Machine
from hybridflow.planner.cost import CostModel
from hybridflow.planner.graph import ModelRole, TaskGraph
from hybridflow.planner.mapping import DeviceMapping, Practice, Strategy
from hybridflow.planner.search import search

__all__ = ["baselines"]


class _System(CostModel):
    """A cost model of what a system offers: fewer strategies, and its own practice."""

    def __init__(self, cost: CostModel) -> None:
        super().__init__(cost.graph, cost.efficiency, cost.without, cost.max_pp, even_stages=cost.even_stages)

    def offers(self, role: ModelRole, strategy: Strategy) -> bool:
        raise NotImplementedError

    def pools(self) -> list[list[str]]:
        """Which roles share devices."""
        raise NotImplementedError

    def devices(self, cluster: Cluster) -> list[int] | None:
        """Of the pools; None: as many as are best."""
        return None

    def strategies(self, role: ModelRole, machine: Machine, devices: int) -> list[Strategy]:
        return [one for one in super().strategies(role, machine, devices) if self.offers(role, one)]


class _Zero3(_System):
    def _variants(self, role: ModelRole, pp: int, tp: int, dp: int) -> list[Strategy]:
        """Also what isn't trained is shared out over all copies."""
        found = super()._variants(role, pp, tp, dp)
        return found if role.trained or dp == 1 else [one._replace(shard="fsdp") for one in found]

    def offers(self, role: ModelRole, strategy: Strategy) -> bool:
        if role.weights_of:
            return strategy.pp == 1
        return strategy.pp == strategy.tp == 1 and (strategy.dp == 1 or strategy.shard == "fsdp")


class _DeepSpeedChat(_Zero3):
    practice = Practice("gather_all", batch=4, rescores=True)

    def _variants(self, role: ModelRole, pp: int, tp: int, dp: int) -> list[Strategy]:
        found = super()._variants(role, pp, tp, dp)
        return [*dict.fromkeys(one._replace(rows=min(one.rows, self.practice.batch)) for one in found)]

    def pools(self) -> list[list[str]]:
        return [[role.name for role in self.graph.roles]]


class _OpenRLHF(_Zero3):
    practice = Practice("broadcast")

    def pools(self) -> list[list[str]]:
        return [[role.name] for role in self.graph.roles]


class _NeMoAligner(_System):
    practice = Practice(None, kv_cache=False)

    def offers(self, role: ModelRole, strategy: Strategy) -> bool:
        return strategy.shard != "fsdp"

    def pools(self) -> list[list[str]]:
        language = [role.name for role in self.graph.roles if role.head == "policy"]
        others = [role.name for role in self.graph.roles if role.head != "policy"]
        return [pool for pool in (language, others) if pool]

    def devices(self, cluster: Cluster) -> list[int] | None:
        count = len(self.pools())
        share = cluster.devices // count
        return [cluster.devices - share * (count - 1)] + [share] * (count - 1)


SYSTEMS: Mapping[str, type[_System]] = {
    "DeepSpeed-Chat": _DeepSpeedChat,
    "OpenRLHF": _OpenRLHF,
    "NeMo-Aligner": _NeMoAligner,
}


def baselines(graph: TaskGraph, cluster: Cluster, cost: CostModel) -> dict[str, DeviceMapping | str]:
    """By name of a system, its best mapping of ``graph``, or why it has none. ``cost`` tells the seconds of each, as of any
    mapping. Of a cluster with several kinds of machines, the kind with most devices is taken."""
    _, most = max((number * machine.devices, index) for index, (number, machine) in enumerate(cluster.machines))
    kind = Cluster((cluster.machines[most],))
    return {name: _mapping(graph, kind, system(cost)) for name, system in SYSTEMS.items()}


def _mapping(graph: TaskGraph, cluster: Cluster, system: _System) -> DeviceMapping | str:
    pools, devices = system.pools(), system.devices(cluster)
    if len(pools) > cluster.devices:
        return f"needs a device for each of its {len(pools)} pools"
    allocations: Sequence[Sequence[int]] | None = None if devices is None else [devices]
    try:
        found = search(graph, cluster, system, placements=[pools], allocations=allocations)
    except ConfigError as error:
        return str(error.problems[0])
    assert found.best.mapping is not None
    return replace(found.best.mapping, practice=system.practice)
