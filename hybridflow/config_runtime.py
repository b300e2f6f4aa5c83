"""Where roles run: the sections ``[runtime]`` and ``[placement]``, and what they may say about the roles of a run."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from hybridflow.core.config import Config
from hybridflow.core.placement import Placement, ResourcePool

__all__ = ["FOLLOWS", "PlacementConfig", "RuntimeConfig"]

# Roles that are where another one is, unless they are placed.
FOLLOWS = {
    "sampler": "actor",
    "estimator": "actor",
    "replay": "actor",
    "cost_critic": "critic",
    "baseline": "reward",
    "examiner": "reward",
}


class RuntimeConfig(Config):
    """Keys of ``[runtime]``."""

    kind: Literal["local", "ray"] = "local"
    """local: every role in this process; ray: in worker processes, by placement.pools and placement.roles"""
    address: str | None = None
    """of a Ray cluster to join, auto: the one of this machine; left out, a Ray of its own is started here"""
    timeout_s: float = Field(1800, gt=0)
    """how long starting, or one call, may take before the run stops and says who is missing"""

    @model_validator(mode="after")
    def _check(self) -> Self:
        fields = type(self).model_fields
        changed = [name for name in ("address", "timeout_s") if getattr(self, name) != fields[name].default]
        if self.kind == "local" and changed:
            raise ValueError(f'{", ".join(changed)} has no effect with kind = "local"; set kind = "ray" or leave it out')
        return self


class PlacementConfig(Config):
    """Keys of ``[placement]``."""

    pools: dict[str, int | tuple[int, ...]] = Field(default_factory=dict)
    """worker processes of each pool; a list: so many on each of several machines; left out: one pool "main" with one"""
    roles: dict[str, str] = Field(default_factory=dict)
    """the pool of each role; with one pool it can be left out"""
    offload: tuple[str, ...] = ()
    """roles whose weights and optimizer states leave memory while others of their pool work: to the host, or to files"""

    @field_validator("pools", mode="before")
    @classmethod
    def _check(cls, pools: Any) -> Any:
        for name, workers in pools.items() if isinstance(pools, Mapping) else ():
            if not re.fullmatch(r"[\w-]+", name):
                raise ValueError(f"pool {name!r}: expected a name of letters, digits, - and _")
            nodes = workers if isinstance(workers, (list, tuple)) else [workers]
            if not nodes or not all(type(size) is int and size > 0 for size in nodes):
                raise ValueError(
                    f"{name} = {workers!r}: expected how many worker processes, 1 or more, or a list of such numbers"
                )
        return pools

    def placement(self, roles: Collection[str]) -> Placement:
        """A pool for each of the ``roles``; call it when there are no ``conflicts``."""
        pools = tuple(ResourcePool(name, nodes) for name, nodes in self._nodes.items())
        placed = {role: self._pool_of(role) for role in roles}
        return Placement(pools, placed, self._pool_of("actor"), self.offload)

    def conflicts(self, algorithm: str, roles: Mapping[str, bool], models: Collection[str]) -> Iterator[str]:
        """``roles``: of the run; False for those that it may turn out not to have. ``models``: those with a model of their
        own."""
        pools = self._nodes
        unknown = [*self._unknown(algorithm, roles)]
        yield from unknown
        if len(pools) > 1 and not unknown:
            needed = [role for role, certain in roles.items() if certain and role not in FOLLOWS]
            missing = [role for role in needed if role not in self.roles]
            if missing:
                yield f"placement.roles: no pool for {', '.join(missing)}; name one of {', '.join(pools)} for each"
            for pool in [pool for pool in pools if pool not in self.roles.values()]:
                yield f"placement.pools.{pool}: no role is on it; name it in placement.roles or remove the pool"
        for role in self.offload:
            if role not in roles:
                yield f"placement.offload: {algorithm} has no role {role!r} here{_nearest(role, roles, 'roles')}"
            elif role not in models:
                yield f"placement.offload: {role} holds no model of its own here; name some of {', '.join(models)}"

    def _unknown(self, algorithm: str, roles: Collection[str]) -> Iterator[str]:
        for role, pool in self.roles.items():
            if role not in roles:
                yield f"placement.roles.{role}: {algorithm} has no such role here{_nearest(role, roles, 'roles')}"
            if pool not in self._nodes:
                yield f"placement.roles.{role} = {pool!r}: there is no such pool{_nearest(pool, self._nodes, 'pools')}"

    @property
    def _nodes(self) -> dict[str, tuple[int, ...]]:
        """Of each pool: workers on each machine."""
        return {name: size if isinstance(size, tuple) else (size,) for name, size in (self.pools or {"main": 1}).items()}

    def _pool_of(self, role: str) -> str:
        while role not in self.roles and role in FOLLOWS:
            role = FOLLOWS[role]
        return self.roles.get(role) or self.roles.get("actor") or next(iter(self._nodes))


def _nearest(name: str, known: Collection[str], what: str) -> str:
    near = difflib.get_close_matches(name, known, 1, 0.6)
    return (f"; did you mean {near[0]}? The" if near else "; the") + f" {what} are {', '.join(known)}"
