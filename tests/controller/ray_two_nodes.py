"""Two Ray nodes on this machine, as a program of its own: prints what happened on them as JSON."""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
import ray
from ray._private import internal_api
from ray.cluster_utils import Cluster
from ray_workers import Maker, Marker, role

from hybridflow.controller.ray_runtime import RayRuntime
from hybridflow.core.batch import Batch
from hybridflow.core.errors import UserError
from hybridflow.core.placement import Placement, ResourcePool

ROWS, WIDTH = 20, 62_500  # of 250 kB
ALL = ROWS * 250_000 * 1.01


def main() -> None:
    settings = {"include_dashboard": False, "object_store_memory": 100_000_000}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, **settings})
    cluster.add_node(num_cpus=2, object_store_memory=100_000_000)
    pools = ResourcePool("makers", (1, 1)), ResourcePool("readers", (1, 1))
    placement = Placement(pools, {"b": "readers"}, "makers")
    runtime = RayRuntime(placement, address=cluster.address, threads=1, timeout_s=60, gpus=False)
    told: dict[str, Any] = {}
    try:
        a, b, marker = runtime.role(role("a", Maker)), runtime.role(role("b", Maker)), runtime.role(role("m", Marker))
        told["nodes"] = [len(set(a.nodes())), len(set(b.nodes()))]
        told["sums over blocks"] = marker.sums()
        told["values"] = small(runtime, a, b)
        told |= big(runtime, a, b)
        told["refused"] = refused(cluster.address)
    finally:
        runtime.stop()
        cluster.shutdown()
    print(json.dumps(told))


def small(runtime: RayRuntime, a: Any, b: Any) -> list[Any]:
    out = b.shout(b.double(a.make(Batch({"sample_id": np.arange(9)}))))
    b.update(out)
    total = runtime.drain().metrics.values()["b/total"]
    return [[row.tolist() for row in out["values"]], out["prompt_text"].tolist(), total]


def big(runtime: RayRuntime, a: Any, b: Any) -> dict[str, Any]:
    """5 MB, of which half is on each node; readers want two rows, then the driver does, then the readers want all."""
    ids = Batch({"sample_id": np.arange(ROWS)})
    made = a.fill_memory(ids, WIDTH)
    runtime.drain()
    stored = [used_bytes(ALL)]
    ends = [0, ROWS - 1, ROWS - 1, 0]  # every reader gets rows of either node
    sums = [b.add_up(made.rows(ends[i : i + 2]))["scores"].tolist() for i in (0, 2)]
    moved = runtime.drain().metrics.values()["moved/a.fill_memory-b.add_up"]
    stored.append(used_bytes(ALL))
    in_driver = [float(made.rows([row])["observations"].values.sum()) for row in range(ROWS)]
    stored.append(used_bytes(ALL))
    whole = b.add_up(made.rows(np.repeat(np.arange(ROWS), 2)))["scores"].tolist()
    stored.append(used_bytes(2 * ALL))
    return {"stored": stored, "sums": sums, "moved": moved, "in_driver": in_driver, "whole": whole}


def used_bytes(most: float) -> int:
    """Of the object stores of both nodes; replies that were read are freed within seconds, so that ``most`` are left."""
    state = internal_api.get_state_from_address(ray.get_runtime_context().gcs_address)
    end = time.monotonic() + 8
    while (used := int(internal_api.get_memory_info_reply(state).store_stats.object_store_bytes_used)) > most:
        if time.monotonic() > end:
            break
        time.sleep(0.1)
    return used


def refused(address: str) -> str:
    placement = Placement((ResourcePool("wide", (1, 1, 1)),), {}, "wide")
    try:
        RayRuntime(placement, address=address, threads=1, timeout_s=5, gpus=False).start()
    except UserError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    main()
