"""A run whose work changes, simulated: the auction of its resources beside an even split, shares in proportion to measured
work, and the best static split there is, found knowing all that comes.

    python benchmarks/auction.py [--seeds 3] [--steps 200] [--json]

``slots``: environments, a reward and a learner on 8 CPU slots; at first simulating is most of the work, later learning.
``nodes``: PPO with models of 7B on 128 machines (48 x 8 A100, 48 x 8 H100, 32 CPU machines of 112 cores), environments,
tools and verifiers on the CPUs; seconds of models on so many machines are the planner's. At first episodes need many
seconds of simulation, later experience is learned from four times over. Nothing is run on such machines.

``time``: that the fixed number of steps takes, switching included, over that of the best static split. ``1``, ``2``: of a
phase's steps, over the best static split of that phase alone: 0.95 is 5 % slower. ``utilisation``: share of the time in
which units of a resource work. Every allocation is decided on seconds that were measured before, with noise. All in the
mean of ``--seeds`` seeds of that noise."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from hybridflow.core.roles import Kind
from hybridflow.planner.allocation import Bidder, allocate, best_static, even_split
from hybridflow.planner.auction import Auction
from hybridflow.planner.cluster import PRESETS, Machine
from hybridflow.planner.cost import CostModel, Efficiency
from hybridflow.planner.graph import ModelRole, Task, TaskGraph
from hybridflow.planner.phases import Auctioned, Fixed, Phase, Played, Policy, Proportional, play
from hybridflow.planner.sizes import find_model
from hybridflow.telemetry.graph_tables import aligned

NOISE = 0.05
KINDS = {"a100": "a100-80g", "h100": "h100"}
LEVELS = (1, 2, 3, 4, 6, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48)
"""machines that a task can have"""


@dataclass(frozen=True)
class Workload:
    name: str
    capacity: Mapping[str, float]
    phases: tuple[Phase, ...]
    switch_s: float
    every: int
    """steps between rounds"""


@dataclass(frozen=True)
class Row:
    workload: str
    policy: str
    time: float
    phases: tuple[float, ...]
    switches: float
    utilisation: dict[str, float]


def scaling(name: str, work: float, lane: str, serial: float = 0.0, most: int = 8, **needs: float) -> Bidder:
    """``work`` seconds of one unit, of which a share doesn't become faster with more (Amdahl)."""
    seconds = {units: work * (serial + (1 - serial) / units) for units in range(1, most + 1)}
    return Bidder(name, seconds, lane, needs=needs or {"slots": 1.0})


def slots(steps: int) -> Workload:
    def phase(name: str, environments: float, reward: float, learner: float) -> Phase:
        rollouts = scaling("environments", environments, "rollouts", 0.02), scaling("reward", reward, "rollouts", 0.02)
        return Phase(name, steps, (*rollouts, scaling("learner", learner, "learning", 0.1)))

    return Workload("slots", {"slots": 8.0}, (phase("1", 20.0, 2.0, 3.0), phase("2", 4.0, 2.0, 20.0)), 2.0, 2)


@dataclass(frozen=True)
class Load:
    """Of a phase: mean tokens of a response, epochs of learning, judgements of a response; seconds of a core that an
    episode takes to simulate, a verification, and evaluating."""

    response: float
    epochs: int
    judgements: int
    episode_s: float
    verify_s: float
    evaluate_s: float


LOADS = {"1": Load(2048.0, 1, 4, 60.0, 10.0, 4.0), "2": Load(512.0, 6, 1, 6.0, 2.0, 40.0)}
MODELS = {"sampler": "a100", "reference": "a100", "reward": "a100", "critic": "a100"}
MODELS |= {"cost": "h100", "judge": "h100", "actor": "h100"}
"""kinds of machines that models are on"""
ROWS, PROMPT, CORES = 4096, 512.0, 2 * 56


def nodes(steps: int) -> Workload:
    capacity = {"a100": 48.0, "h100": 48.0, "cpu": 32.0}
    return Workload("nodes", capacity, tuple(_nodes(name, steps, load) for name, load in LOADS.items()), 60.0, 1)


def _nodes(name: str, steps: int, load: Load) -> Phase:
    graph = _graph(load)
    costs, tasks = CostModel(graph, Efficiency()), {task.name: task for task in graph.tasks}
    bidders = []
    for role in graph.roles:
        kind = MODELS[role.name]
        seconds = _curve(costs, role, tasks[role.name], PRESETS[KINDS[kind]])
        bidders.append(Bidder(role.name, seconds, role.name if role.trained else "rollouts", min(seconds), {kind: 1.0}))
    works = {"environments": load.episode_s, "verifier": load.verify_s, "evaluation": load.evaluate_s}
    for task, cpu_s in works.items():
        seconds = {number: cpu_s / 8 + ROWS * cpu_s / (number * CORES) for number in LEVELS if number <= 32}
        bidders.append(Bidder(task, seconds, "evaluation" if task == "evaluation" else "rollouts", 1, {"cpu": 1.0}))
    return Phase(name, steps, tuple(bidders))


def _graph(load: Load) -> TaskGraph:
    model, trained = find_model("llama-7b"), {"gradient_bytes": 4.0, "optimizer_bytes": 8.0}
    roles = (
        ModelRole("sampler", model, weights_of="actor"),
        ModelRole("reference", model),
        ModelRole("reward", model, "score"),
        ModelRole("cost", model, "score"),
        ModelRole("judge", find_model("llama-34b"), "score"),
        ModelRole("actor", model, **trained),
        ModelRole("critic", model, "value", **trained),
    )

    def task(role: ModelRole) -> Task:
        kind: Kind = "train" if role.trained else "generate" if role.weights_of else "forward"
        once = Task(role.name, role.name, kind, ROWS, PROMPT, load.response, deviation=0.4 * load.response)
        if role.trained:
            return replace(once, minibatches=8, epochs=load.epochs)
        return replace(once, times=load.judgements if role.name == "judge" else 1, longest=4 * load.response)

    return TaskGraph(roles, tuple(map(task, roles)), ())


def _curve(costs: CostModel, role: ModelRole, task: Task, machine: Machine) -> dict[int, float]:
    """Seconds on so many machines, cut in the best way; without numbers on which it doesn't fit."""
    found = {}
    for number in LEVELS:
        times = [
            estimate.seconds + (costs.publishing(role, cut, machine).seconds if role.weights_of else 0.0)
            for cut in costs.strategies(role, machine, number * machine.devices)
            if (estimate := costs.seconds(task, cut, machine, costs.usable_bytes(machine))) is not None
        ]
        if times:
            found[number] = min(times)
    return found


def policies(work: Workload) -> dict[str, Callable[[], Policy]]:
    phases = [(float(phase.steps), phase.bidders) for phase in work.phases]
    even, best = even_split(phases[0][1], work.capacity), best_static(phases, work.capacity)
    return {
        "best static split": lambda: Fixed(best),
        "auction": lambda: Auctioned(Auction(work.capacity, units=even)),
        "proportional share": lambda: Proportional(work.capacity),
        "even split": lambda: Fixed(even),
    }


def rows_of(work: Workload, seeds: int) -> list[Row]:
    even = even_split(work.phases[0].bidders, work.capacity)
    played: dict[str, list[Played]] = {}
    for name, policy in policies(work).items():
        made = policy()
        start = made.units if isinstance(made, Fixed) else even
        played[name] = [play(work.phases, policy(), start, work.every, work.switch_s, NOISE, seed) for seed in range(seeds)]
    alone = [_alone(work, phase, seeds) for phase in work.phases]
    best = statistics.mean(one.total_s for one in played["best static split"])
    return [
        Row(
            work.name,
            name,
            statistics.mean(one.total_s for one in several) / best,
            tuple(
                seconds / statistics.mean(one.phase_s(phase.name) for one in several)
                for phase, seconds in zip(work.phases, alone, strict=True)
            ),
            statistics.mean(one.switches for one in several),
            {
                name: statistics.mean(one.utilisation(name, amount) for one in several)
                for name, amount in work.capacity.items()
            },
        )
        for name, several in played.items()
    ]


def _alone(work: Workload, phase: Phase, seeds: int) -> float:
    """Seconds of a phase on the best static split of its own."""
    units = allocate(phase.bidders, work.capacity)
    return statistics.mean(
        play(work.phases, Fixed(units), units, work.every, 0.0, NOISE, seed).phase_s(phase.name) for seed in range(seeds)
    )


def solve_s(work: Workload) -> dict[str, float]:
    """CPU-milliseconds of an allocation and of a round with its prices, medians of five."""
    bidders: Sequence[Bidder] = work.phases[0].bidders
    solvers: dict[str, Callable[[], object]] = {
        "allocation": lambda: allocate(bidders, work.capacity),
        "round": lambda: Auction(work.capacity).round(1, bidders),
    }
    return {name: 1e3 * statistics.median(_cpu_s(solve) for _ in range(5)) for name, solve in solvers.items()}


def _cpu_s(solve: Callable[[], object]) -> float:
    began = time.process_time()
    solve()
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200, help="of each phase")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    works = [slots(options.steps), nodes(options.steps)]
    rows = [row for work in works for row in rows_of(work, options.seeds)]
    solved = {work.name: solve_s(work) for work in works}
    if options.json:
        print(json.dumps({"rows": [asdict(row) for row in rows], "solve_ms": solved}, indent=2))
        return
    header = ("workload", "policy", "time", "1", "2", "switches", "utilisation")
    table = [
        (
            row.workload,
            row.policy,
            f"{row.time:.3f}",
            *(f"{share:.3f}" for share in row.phases),
            f"{row.switches:.1f}",
            ", ".join(f"{name} {share:.0%}" for name, share in row.utilisation.items()),
        )
        for row in rows
    ]
    print("\n".join(aligned([header, *table], header[2:6])))
    for name, times in solved.items():
        print(f"{name}: an allocation in {times['allocation']:.0f} CPU-ms, a round with prices in {times['round']:.0f}")


if __name__ == "__main__":
    main()
