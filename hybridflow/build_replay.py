"""The replay buffer of a run: its index in the driver, and the role that holds its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from hybridflow.config import RunConfig
from hybridflow.core.batch import Batch
from hybridflow.core.errors import DataError
from hybridflow.core.roles import Role, Runtime
from hybridflow.data.envs import entry_types
from hybridflow.data.recorded import open_recorded
from hybridflow.models.memory import memory_size
from hybridflow.rollout.replay import Replay
from hybridflow.workers.replay_rows import ReplayWorker, unit_bytes

__all__ = ["replay_buffer", "replay_role"]


def replay_role(config: RunConfig, spaces: tuple[Any, Any]) -> Role[ReplayWorker]:
    """What holds the rows."""
    replay, types = config.replay, entry_types(spaces)
    if remembered := memory_size(spaces[0], config.actor.net):
        types["memory"] = np.dtype((np.float32, (remembered,)))
    args = {"capacity": replay.num_units, "types": types, "sequence": replay.sequence, "spill": replay.spill}
    return Role("replay", ReplayWorker, args, max_workers=replay.shards)


def replay_buffer(config: RunConfig, spaces: tuple[Any, Any], runtime: Runtime) -> Replay:
    """The buffer, empty. ResourceError: there is no room for it."""
    method: Any = config.method
    role, begin = replay_role(config, spaces), _recorded(config, spaces)
    rows = runtime.role(role)
    counts = {"num_draws": max(1, config.num_updates), "draws": config.draws_per_update}
    row_bytes = unit_bytes(role.args["types"], config.replay.sequence)
    return Replay(config.replay, config.seed, method.gamma, rows, **counts, row_bytes=row_bytes, begin=begin)


def _recorded(config: RunConfig, spaces: tuple[Any, Any]) -> Callable[[], Iterable[Batch]]:
    """What the buffer begins with. DataError: the dataset isn't there, doesn't fit, or is too large."""
    replay, environment = config.replay, config.environment
    if replay.dataset is None or environment is None:
        return tuple
    recorded = open_recorded(replay.dataset, environment.id, spaces)
    found = f"replay.dataset = {replay.dataset!r} has {recorded.num_steps} steps"
    if recorded.num_steps > replay.capacity:
        raise DataError(f"{found}, but replay.capacity = {replay.capacity}; raise it")
    if recorded.num_steps < replay.warmup and environment.steps_per_rollout == 0:
        raise DataError(f"{found} and none is added, but replay.warmup = {replay.warmup}; lower it")
    return recorded.batches
