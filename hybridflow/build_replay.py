"""The replay buffer of a run: its index in the driver, and the role that holds its rows."""

from __future__ import annotations

from typing import Any

from hybridflow.config import RunConfig
from hybridflow.core.roles import Role, Runtime
from hybridflow.data.envs import entry_types
from hybridflow.rollout.replay import Replay
from hybridflow.workers.replay_rows import ReplayWorker, unit_bytes

__all__ = ["replay_buffer", "replay_role"]


def replay_role(config: RunConfig, spaces: tuple[Any, Any]) -> Role[ReplayWorker]:
    """What holds the rows."""
    replay = config.replay
    args = {"capacity": replay.capacity, "types": entry_types(spaces), "spill": replay.spill}
    return Role("replay", ReplayWorker, args, max_workers=replay.shards)


def replay_buffer(config: RunConfig, spaces: tuple[Any, Any], runtime: Runtime) -> Replay:
    """The buffer, empty. ResourceError: there is no room for it."""
    method: Any = config.method
    role = replay_role(config, spaces)
    rows, row_bytes = runtime.role(role), unit_bytes(role.args["types"], 1)
    num_draws = max(1, config.num_updates)
    return Replay(config.replay, config.seed, method.gamma, rows, num_draws=num_draws, row_bytes=row_bytes)
