"""A program that has several Ray nodes on this machine: ``python -m hybridflow.controller.ray_nodes NODES SLOTS``.

It prints their address and starts another node for each line on its standard input. The nodes end with that input.
"""

from __future__ import annotations

import logging
import os
import sys

from ray.cluster_utils import Cluster

__all__ = ["main"]

STORE_BYTES = 100_000_000
HEALTH = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1500,
    "health_check_failure_threshold": 4,
}
"""a node that doesn't answer four times, each time within 1.5 s, is lost; by default that takes most of a minute"""


def main(nodes: int, slots: int) -> None:
    logging.disable(logging.WARNING)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    size = {"num_cpus": slots, "object_store_memory": STORE_BYTES}
    head = {**size, "include_dashboard": False, "_system_config": HEALTH}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    for _ in range(nodes - 1):
        cluster.add_node(**size)
    print(cluster.address, flush=True)
    for _ in sys.stdin:
        cluster.add_node(wait=False, **size)
    cluster.shutdown()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
