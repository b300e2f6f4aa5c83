"""Worker groups: the processes of each pool, from finding room for them to their end. Ray starts and watches them."""

from __future__ import annotations

import os
import socket
import time
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from hybridflow.controller.cores import Share
from hybridflow.controller.ray_process import RAY_INLINES, STREAM, Process, Setup
from hybridflow.core.errors import UserError
from hybridflow.core.placement import ResourcePool

__all__ = ["WorkerGroup", "connect", "homes", "reserve", "shares"]

RESERVE_S = 10  # Ray cuts it to whole seconds
FEW_RECORDS = {
    "RAY_task_events_max_num_task_in_gcs": "1000",
    "RAY_task_events_max_dropped_task_attempts_tracked_per_job_in_gcs": "1000",
}
"""of tasks that are done: Ray keeps a hundred times as many for its dashboard, which isn't started"""
ENVIRONMENT = {"RAY_max_direct_call_object_size": str(RAY_INLINES)}
WORKER = "HYBRIDFLOW_WORKER"
"""in a worker's environment, for those who look at it from outside: pool/rank"""
PING_S = 2.0
RETRY_S = 1.0
KNOCK_S = 5.0


def connect(address: str | None, slots: int) -> bool:
    """Join the Ray cluster at ``address``, or start one on this machine alone, with room for ``slots`` workers.

    Returns whether it was started here, so has to be shut down.
    """
    if ray.is_initialized():
        return False
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # the first is raised, the others are its consequences
    quiet = {"logging_level": "ERROR", "log_to_driver": True}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if address is not None:
            try:
                _knock(address)
                ray.init(address=address, **quiet)
            except (OSError, ValueError, RuntimeError) as error:
                hint = 'start one with "ray start --head", or leave runtime.address out'
                told = str(error).strip().splitlines()[0]
                raise UserError(f"runtime.address = {address!r}: no Ray cluster answers there ({told}); {hint}") from None
            return True
        for name, value in FEW_RECORDS.items():
            os.environ.setdefault(name, value)
        local = {"num_cpus": slots, "include_dashboard": False, "_node_ip_address": "127.0.0.1"}
        ray.init(address="local", **local, **quiet)
    return True


def _knock(address: str) -> None:
    """OSError if nobody listens at "host:port": Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), KNOCK_S).close()


def reserve(pools: Sequence[ResourcePool], resource: str) -> dict[str, PlacementGroup]:
    """Room for every pool, all or nothing. ``resource``: "CPU" or "GPU", of which each worker gets one.

    UserError if the cluster is too small, or if others use what is left.
    """
    _check_room(pools, resource)
    reserved: dict[str, PlacementGroup] = {}
    for pool in pools:
        bundles = [{"CPU": float(count)} | ({"GPU": float(count)} if resource == "GPU" else {}) for count in pool.nodes]
        group = placement_group(bundles, strategy="STRICT_SPREAD" if len(bundles) > 1 else "PACK")
        reserved[pool.name] = group
        if not group.wait(RESERVE_S):
            free = int(ray.available_resources().get(resource, 0))
            for taken in reserved.values():
                remove_placement_group(taken)
            raise UserError(
                f"placement.pools: no room for {pool.name} = {list(pool.nodes)}, {free} {resource} slots are free; "
                "another job may be using the rest: wait for it, or ask for fewer workers"
            )
    return reserved


def reserve_again(
    rooms: Mapping[str, PlacementGroup], pools: Sequence[ResourcePool], resource: str, patience_s: float
) -> dict[str, PlacementGroup]:
    """New rooms for those of ``pools`` that were on a machine which is gone. UserError if there are none within
    ``patience_s``: a machine may come back, or another one join."""
    there, until = {node["NodeID"] for node in ray.nodes() if node["Alive"]}, time.monotonic() + patience_s
    gone = [pool for pool in pools if not there.issuperset(homes({"": rooms[pool.name]})[""])]
    for pool in gone:
        remove_placement_group(rooms[pool.name])
    while True:
        try:
            return reserve(gone, resource)
        except UserError:
            if time.monotonic() > until:
                raise
            time.sleep(RETRY_S)


def _check_room(pools: Sequence[ResourcePool], resource: str) -> None:
    nodes = sorted((int(node["Resources"].get(resource, 0)) for node in ray.nodes() if node["Alive"]), reverse=True)
    wanted, there = sum(pool.size for pool in pools), sum(nodes)
    told = " + ".join(map(str, nodes))
    if wanted > there:
        hint = "add machines, or ask for fewer"
        raise UserError(f"placement.pools ask for {wanted} workers, but Ray has {there} {resource} slots ({told}); {hint}")
    for pool in pools:
        sizes = sorted(pool.nodes, reverse=True)
        if len(sizes) > len(nodes) or any(size > room for size, room in zip(sizes, nodes, strict=False)):
            found = f"placement.pools: {pool.name} = {list(pool.nodes)} needs {len(sizes)} machines with so many slots each"
            raise UserError(f"{found}; Ray has machines with {told} {resource} slots")


def homes(rooms: Mapping[str, PlacementGroup]) -> dict[str, list[str]]:
    """By pool: the Ray node of each of its machines."""
    tables = {pool: placement_group_table(room)["bundles_to_node_id"] for pool, room in rooms.items()}
    return {pool: [table[bundle] for bundle in sorted(table)] for pool, table in tables.items()}


def shares(pools: Sequence[ResourcePool], homes: Mapping[str, Sequence[str]]) -> dict[str, list[Share]]:
    """By pool, of each rank: which of its machine's workers it is."""
    ranks = [
        (pool.name, home) for pool in pools for home, n in zip(homes[pool.name], pool.nodes, strict=True) for _ in range(n)
    ]
    there, dealt = Counter(home for _, home in ranks), Counter[str]()
    found: dict[str, list[Share]] = {pool.name: [] for pool in pools}
    for pool, home in ranks:
        found[pool].append(Share(dealt[home], there[home]))
        dealt[home] += 1
    return found


class WorkerGroup:
    """The processes of one pool. Make all groups, then ``start`` them together: ``peers`` are the processes of all."""

    def __init__(self, pool: ResourcePool, room: PlacementGroup, setups: Sequence[Setup], gpus: bool) -> None:
        self.pool, self.room = pool, room
        self.processes: list[Any] = []
        remote: Any = ray.remote(concurrency_groups={"lane": 2, STREAM: 1})(Process)
        for bundle, count in enumerate(pool.nodes):
            strategy = PlacementGroupSchedulingStrategy(room, placement_group_bundle_index=bundle)
            for _ in range(count):
                who = {WORKER: f"{pool.name}/{len(self.processes)}"}
                options = {
                    "num_cpus": 1,
                    "num_gpus": int(gpus),
                    "scheduling_strategy": strategy,
                    "runtime_env": {"env_vars": {**ENVIRONMENT, **who}},
                }
                self.processes.append(remote.options(**options).remote(setups[len(self.processes)]))

    def listen(self) -> Any:
        """A reference to the address at which the group's processes meet; None for a single one."""
        return self.processes[0].listen.remote() if self.pool.size > 1 else None

    def join(self, address: Any, peers: dict[tuple[str, int], Any]) -> list[Any]:
        """References that are there when a process is ready."""
        return [process.join.remote(address, peers) for process in self.processes]

    def meet(self, peers: dict[tuple[str, int], Any]) -> list[Any]:
        """As ``join``, for processes that were there before."""
        return [process.meet.remote(peers) for process in self.processes]

    def name(self, rank: int) -> str:
        return f"worker {rank} of pool {self.pool.name!r}"

    def ping(self, rank: int) -> str | None:
        """What a process is doing, empty if it waits for work; None if it doesn't answer."""
        return _answer(self.processes[rank].ping.remote())

    def stacks(self, rank: int) -> str:
        """Where a process stands."""
        return _answer(self.processes[rank].stacks.remote()) or "it does not answer"

    def end(self) -> None:
        """End the processes at once; their room stays."""
        for process in self.processes:
            ray.kill(process)


def _answer(reference: Any) -> str | None:
    try:
        answer: str = ray.get(reference, timeout=PING_S)
    except (ray.exceptions.GetTimeoutError, ray.exceptions.RayActorError):
        return None
    return answer
