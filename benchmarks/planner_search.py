"""How long the search for a device mapping takes, beside the paper's Algorithm 1.

    python benchmarks/planner_search.py [--cases 7b:8,70b:128] [--json]

PPO with four models of one size and a sampler, 1,024 prompts and responses of 1,024 tokens, eight updates: the cases of
the paper's Figure 16 (HybridFlow, EuroSys 2025) on machines of 8 A100-80GB, and two on 1,024 of them. ``paper``: the
seconds that it published, of its processors, for its allocations and strategies. ``seconds``: CPU-seconds of one thread of
the whole search here, cost model included, in a process of its own, with every number of devices for every pool, and with
the optimum proven for each of the 15 placements. ``allocations``: how many there are; ``evaluated``: how many of them had
to be put together. ``peak_gb``: the most memory of the process, of which torch's import takes ``import_gb``.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context

from hybridflow.planner.cluster import parse_cluster
from hybridflow.planner.cost import CostModel, Efficiency
from hybridflow.planner.graph import Edge, ModelRole, Task, TaskGraph
from hybridflow.planner.search import search
from hybridflow.planner.sizes import find_model

PAPER_S = {
    "7b:8": 11,
    "7b:16": 33,
    "13b:24": 66,
    "13b:32": 112,
    "34b:48": 235,
    "34b:64": 395,
    "70b:96": 860,
    "70b:128": 1500,
    "7b:1024": None,
    "70b:1024": None,
}
ROWS, TOKENS, UPDATES = 1024, 1024, 8


@dataclass(frozen=True)
class Row:
    case: str
    seconds: float
    paper: int | None
    tokens_per_second: float
    optimal: bool
    allocations: int
    evaluated: int
    peak_gb: float
    import_gb: float


def ppo(size: str) -> TaskGraph:
    """Actor and critic in bf16 with gradients and moments in fp32, as the paper has them."""
    model, trained = find_model(size), {"gradient_bytes": 4.0, "optimizer_bytes": 8.0}
    roles = (
        ModelRole("actor", model, "policy", **trained),
        ModelRole("rollout", model, "policy", weights_of="actor"),
        ModelRole("critic", model, "value", **trained),
        ModelRole("reference", model, "policy"),
        ModelRole("reward", model, "score"),
    )

    def task(name: str, role: str, kind: str, minibatches: int = 1) -> Task:
        return Task(name, role, kind, ROWS, TOKENS, TOKENS, minibatches=minibatches)  # type: ignore[arg-type]

    prepare = [task(f"{role}_forward", role, "forward") for role in ("critic", "reference", "reward")]
    learn = [task(f"{role}_update", role, "train", UPDATES) for role in ("actor", "critic")]
    edges = [Edge("generate", one.name, 16.0 * ROWS * TOKENS) for one in prepare]
    edges += [Edge(one.name, other.name, 4.0 * ROWS * TOKENS) for one in prepare for other in learn]
    return TaskGraph(roles, (task("generate", "rollout", "generate"), *prepare, *learn), tuple(edges))


def peak_gb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def measure(case: str) -> Row:
    size, devices = case.split(":")
    before, graph, cluster = peak_gb(), ppo(f"llama-{size}"), parse_cluster(f"a100-80g:{int(devices) // 8}x8")
    start = time.process_time()
    result = search(graph, cluster, CostModel(graph, Efficiency()))
    seconds = time.process_time() - start
    return Row(
        case,
        seconds,
        PAPER_S.get(case),
        result.tokens_per_second,
        result.optimal,
        result.allocations,
        result.evaluated,
        peak_gb(),
        before,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(PAPER_S), help="size:GPUs, GPUs in machines of 8")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args()
    if not options.json:
        heads = f"{'models':>6} {'GPUs':>5} {'seconds':>8} {'paper':>6} {'ratio':>6}"
        print(f"{heads} {'allocations':>12} {'evaluated':>9} {'GB':>5}")
    for case in options.cases.split(","):
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            row = pool.submit(measure, case).result()
        if options.json:
            print(json.dumps(asdict(row)), flush=True)
            continue
        size, devices = case.split(":")
        paper, ratio = (f"{row.paper:,}", f"{row.paper / row.seconds:,.0f}") if row.paper else ("", "")
        counts = f"{row.allocations:12,} {row.evaluated:9,} {row.peak_gb:5.2f}"
        print(f"{size:>6} {devices:>5} {row.seconds:8.2f} {paper:>6} {ratio:>6} {counts}", flush=True)


if __name__ == "__main__":
    main()
