"""A run on two of three Ray nodes on this machine, of which one is lost, as a program of its own: prints what became of it
as JSON. ``python three_nodes.py CONFIG``"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.cluster_utils import Cluster
from worker_faults import spied

from hybridflow.config import load_config
from hybridflow.controller.ray_runtime import RayRuntime
from hybridflow.launch import train

QUICK = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 3}
STRUCK = 3


def main(config: Path) -> None:
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_IGNORE_UNHANDLED_ERRORS="1")
    settings = {"include_dashboard": False, "object_store_memory": 100_000_000}
    head = {"num_cpus": 0, "_system_config": QUICK, **settings}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    nodes = [cluster.add_node(num_cpus=1, object_store_memory=100_000_000) for _ in range(3)]
    ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)
    before, calls = list[str](), [0]

    def asked(runtime: RayRuntime, what: str) -> None:
        calls[0] += what == "actor.update"
        if calls[0] == STRUCK and not before:
            before.extend(runtime.nodes())
            sockets = {node["NodeID"]: node["ObjectStoreSocketName"] for node in ray.nodes()}
            lost = next(node for node in nodes if node.plasma_store_socket_name == sockets[before[1]])
            (raylet,) = lost.all_processes["raylet"]
            workers = psutil.Process(raylet.process.pid).children(recursive=True)
            cluster.remove_node(lost, allow_graceful=False)
            for worker in workers:  # they outlive their raylet by a second or more, in which the run could end
                with contextlib.suppress(psutil.NoSuchProcess):
                    worker.kill()

    after: list[str] = []
    ended = RayRuntime.stop

    def stop(runtime: RayRuntime) -> None:
        after.extend(runtime.nodes())
        ended(runtime)

    RayRuntime.stop = stop  # type: ignore[method-assign]
    with spied("call", asked, lambda role, name, *_: f"{role.name}.{name}"):
        code = train(load_config(config, ["--runtime.address", cluster.address]))
    left = [path.name for path in Path("/dev/shm").glob("hybridflow-*")]
    told: dict[str, Any] = {"code": code, "before": before, "after": after, "left": left}
    ray.shutdown()
    cluster.shutdown()
    print(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
