"""Where roles run, as plain data: meshes of ranks, pools of worker processes, and which role uses which pool.

A *mesh* lays the ranks of one role out over data (dp), context (cp), pipeline (pp) and tensor (tp) parallelism. A *pool*
is a set of worker processes on one or several nodes; roles that share a pool share its processes and take turns, roles on
different pools run side by side. A *transfer protocol* says how the rows of a batch reach the ranks of a mesh, and which
ranks' outputs make the result (HybridFlow, section 4.1 and table 3).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from hybridflow.core.config import Config
from hybridflow.core.errors import ContractError

__all__ = ["Mesh", "MeshConfig", "Placement", "ResourcePool", "Rows", "TransferProtocol"]

Rows = NDArray[np.int64]


@dataclass(frozen=True)
class Mesh:
    """``dp x cp x pp x tp`` ranks; rank = ((d cp + c) pp + p) tp + t, so tensor-parallel ranks are neighbours.

    A data-parallel block is the cp pp tp ranks with the same d: they see the same rows, and cp cuts the tokens of each. The
    pp tp ranks with the same d and c hold one copy of the model.

    ``generation_tp`` and ``generation_pp`` are how the same ranks generate: every copy, of pp tp ranks, becomes
    pp tp / (generation_pp generation_tp) replicas of the model. Where they divide tp and pp the layouts are
    ``nested``: generation groups are strided, so that the training shard of a rank is part of its generation shard:
    t = t_g tp / generation_tp + a and p = p_g pp / generation_pp + b, where (a, b) says which replica of the copy it
    belongs to (section 5.3). Else the ranks of a replica are neighbours.

    ``shard_ranks``: so many neighbouring copies share weights or optimizer states out, where a role does so; 0: all.
    ``chunks``: stages of the training pipeline on each of its ranks. ``speeds``: of each replica while generating, relative
    to the others: prompts and environments are dealt in proportion; none: all are equally fast.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    generation_tp: int | None = None
    generation_pp: int | None = None
    cp: int = 1
    shard_ranks: int = 0
    chunks: int = 1
    speeds: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for axis in fields(self)[:-1]:
            size = getattr(self, axis.name)
            if size is not None and size < (0 if axis.name == "shard_ranks" else 1):
                raise ContractError(f"mesh: {axis.name} = {size}; expected at least one rank on every axis")
        generation_tp, generation_pp = self.generation
        if self.copies % self.sharing:
            raise ContractError(f"mesh {self}: shard_ranks = {self.shard_ranks} doesn't divide {self.copies} copies")
        if self.tp * self.pp % (generation_tp * generation_pp):
            raise ContractError(
                f"mesh {self}: generation_tp x generation_pp = {generation_tp} x {generation_pp} = "
                f"{generation_tp * generation_pp} doesn't divide tp x pp = {self.tp} x {self.pp} = {self.tp * self.pp}"
            )
        if self.speeds and (len(self.speeds) != self.num_replicas or min(self.speeds) <= 0):
            expected = f"expected one above 0 for each of {self.num_replicas} replicas"
            raise ContractError(f"mesh {self}: speeds = {list(self.speeds)}; {expected}")

    @property
    def generation(self) -> tuple[int, int]:
        """(tp, pp) while generating; those of training when left out."""
        tp, pp = self.generation_tp, self.generation_pp
        return self.tp if tp is None else tp, self.pp if pp is None else pp

    @property
    def size(self) -> int:
        return self.dp * self.cp * self.pp * self.tp

    @property
    def copies(self) -> int:
        """Copies of the model while training."""
        return self.dp * self.cp

    @property
    def sharing(self) -> int:
        """Copies among which there is one whole set of weights or optimizer states, where they are shared out."""
        return self.shard_ranks or self.copies

    @property
    def by_copies(self) -> Mesh:
        """The same ranks in the same places, each copy of the model a data-parallel block of its own."""
        return replace(self, dp=self.copies, cp=1, shard_ranks=0)

    @property
    def while_generating(self) -> Mesh:
        """The ranks as they generate: each replica of the model a data-parallel block of its own."""
        tp, pp = self.generation
        return Mesh(self.num_replicas, tp, pp)

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """(d, p, t) of a rank; c is its ``context``."""
        return rank // (self.cp * self.pp * self.tp), rank // self.tp % self.pp, rank % self.tp

    def context(self, rank: int) -> int:
        """c of a rank: which tokens of its block's rows it has."""
        return self.copy(rank) % self.cp

    def copy(self, rank: int) -> int:
        """Which of the ``copies`` a rank holds a part of."""
        return rank // (self.pp * self.tp)

    @cached_property
    def leaders(self) -> tuple[int, ...]:
        """The rank of each data-parallel block that has its outputs: the last pipeline stage, ranks 0 of tp and cp."""
        return tuple(d * self.cp * self.pp * self.tp + (self.pp - 1) * self.tp for d in range(self.dp))

    @property
    def nested(self) -> bool:
        """Whether generation cuts are training cuts, so that no weight is held twice."""
        generation_tp, generation_pp = self.generation
        return self.tp % generation_tp == 0 and self.pp % generation_pp == 0

    @property
    def num_replicas(self) -> int:
        """Copies of the model while generating (the paper's micro data-parallel size times dp, and cp)."""
        generation_tp, generation_pp = self.generation
        return self.size // (generation_tp * generation_pp)

    def replica(self, rank: int) -> tuple[int, int, int]:
        """(replica, p_g, t_g): which copy of the model a rank belongs to while generating, and its place in that copy."""
        if not self.nested:
            return self.neighbouring_replica(rank)
        (_, p, t), (generation_tp, generation_pp) = self.coordinates(rank), self.generation
        stride_t, stride_p = self.tp // generation_tp, self.pp // generation_pp
        return (self.copy(rank) * stride_p + p % stride_p) * stride_t + t % stride_t, p // stride_p, t // stride_t

    def neighbouring_replica(self, rank: int) -> tuple[int, int, int]:
        """``replica`` if replicas were ranks in a row, as in Megatron-LM: the vanilla grouping."""
        generation_tp, generation_pp = self.generation
        replica, place = divmod(rank, generation_tp * generation_pp)
        return replica, place // generation_tp, place % generation_tp

    def __str__(self) -> str:
        axes = {"dp": self.dp, "cp": self.cp, "tp": self.tp, "pp": self.pp}
        shown = [f"{name} {size}" for name, size in axes.items() if size > 1]
        return " x ".join(shown) or "1"


@dataclass(frozen=True)
class TransferProtocol:
    """``distribute(weights [B], mesh)``: the rows of each rank. ``collect(mesh)``: the ranks whose outputs make the result.

    ``weights`` are the rows' tokens. Both are pure, so every rank works out the same answer by itself. ``view``: a rank
    sees the whole batch and pulls what it reads of it by itself, instead of being handed its rows.
    """

    name: str
    distribute: Callable[[NDArray[np.int64], Mesh], Sequence[Rows]]
    collect: Callable[[Mesh], Sequence[int]]
    view: bool = False


class MeshConfig(Config):
    """How one model is cut over worker processes; the rest of its pool is data-parallel."""

    tp: int = Field(1, ge=1)
    """tensor parallelism: so many processes hold a slice of every weight"""
    pp: int = Field(1, ge=1)
    """pipeline parallelism: so many processes hold some of the layers"""
    cp: int = Field(1, ge=1)
    """context parallelism, for long sequences: so many processes have some tokens of every sequence"""


@dataclass(frozen=True)
class ResourcePool:
    """Worker processes: ``nodes[i]`` of them on one machine, for each machine. Each has one slot, a CPU share or a GPU."""

    name: str
    nodes: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.nodes or min(self.nodes) < 1:
            raise ContractError(
                f"pool {self.name!r} has {list(self.nodes)} workers on its nodes; expected at least one on each"
            )

    @property
    def size(self) -> int:
        return sum(self.nodes)


@dataclass(frozen=True)
class Placement:
    """Pools, and the pool of each role by name. ``default``: the pool of roles that are not named. ``offload``: roles whose
    weights and optimizer states leave memory while other roles of their pool work. ``meshes``: of roles that are cut, all
    axes of ``Mesh`` that aren't its defaults but dp, which the pool gives."""

    pools: tuple[ResourcePool, ...] = (ResourcePool("main", (1,)),)
    roles: Mapping[str, str] = field(default_factory=dict)
    default: str = "main"
    offload: tuple[str, ...] = ()
    meshes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    def pool_of(self, role: str) -> ResourcePool:
        name = self.roles.get(role, self.default)
        return next(pool for pool in self.pools if pool.name == name)

    def mesh_of(self, role: str, max_workers: int | None) -> Mesh:
        """A role fills its pool with data parallelism, or takes the first ``max_workers`` processes of it."""
        size = self.pool_of(role).size
        axes: Mapping[str, Any] = self.meshes.get(role, {})
        block = axes.get("tp", 1) * axes.get("pp", 1) * axes.get("cp", 1)
        return Mesh(dp=(size if max_workers is None else min(size, max_workers)) // block, **axes)
