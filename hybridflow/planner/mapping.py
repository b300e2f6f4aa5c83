"""Which roles run on which devices and how each is cut: what the planner searches for, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from hybridflow.planner.cluster import Machine
from hybridflow.reshard.plan import Strategy as Reshard

__all__ = ["OURS", "DeviceMapping", "Pool", "Practice", "Schedule", "Strategy"]

Schedule = Literal["sync", "async"]
"""async: rollouts of the next steps run beside learning"""


class Strategy(NamedTuple):
    """How a role runs on the devices of its pool: pp x tp x dp of them.

    ``shard``: of optimizer states (zero1) or everything (fsdp) over dp. ``rows``: sequences in a microbatch of one
    replica. For a sampler pp, tp and dp are those of generation: dp replicas of the engine.
    """

    pp: int = 1
    tp: int = 1
    dp: int = 1
    shard: Literal["none", "zero1", "fsdp"] = "none"
    recompute: bool = False
    rows: int = 1

    @property
    def devices(self) -> int:
        return self.pp * self.tp * self.dp


class Pool(NamedTuple):
    """``devices`` of machines of one kind, and the roles on them, which take turns."""

    name: str
    machine: Machine
    devices: int
    roles: tuple[str, ...]


class Practice(NamedTuple):
    """What a system does in its own way.

    ``reshard``: how a sampler gets the learner's weights, by the words of ``reshard.plan``; on another pool they are
    published, or all of them sent to every rank ("broadcast"). None: training and generation are cut alike, and nothing
    moves. ``kv_cache`` is False where all tokens are computed again for each new one. ``batch``: responses that a device
    draws, scores and trains on before the next ones; 0: all of a step. ``rescores``: generation doesn't tell
    log-probabilities, so learners take a pass over what was drawn.
    """

    reshard: Reshard | None = "hybridflow"
    kv_cache: bool = True
    batch: int = 0
    rescores: bool = False


OURS = Practice()


@dataclass(frozen=True)
class DeviceMapping:
    """``strategies`` by role. ``staleness``: of the schedule "async", how many steps' rollouts begin early."""

    pools: tuple[Pool, ...]
    strategies: Mapping[str, Strategy]
    schedule: Schedule = "sync"
    practice: Practice = OURS
    staleness: int = 1

    def pool_of(self, role: str) -> Pool:
        return next(pool for pool in self.pools if role in pool.roles)
