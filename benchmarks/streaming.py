"""Steps in turns and with rollouts beside learning, simulated: on clusters that aren't there, and on a run's own record.

    python benchmarks/streaming.py [--lengths RUN] [--json]
    python benchmarks/streaming.py --run RUN [--json]

Without ``--run``: GRPO with a model of 7B on 128 machines. 64 x 8 A100 and 32 x 8 H100 draw 2,048 x 8 responses a step, in
replicas of two devices with ``--slots``; 32 x 8 H100 learn. Seconds of a decode step, of a row in it, of learning and of
publishing are the planner's. Lengths are gamma distributed (mean and deviation 1,024 tokens, 8,192 at most), half of it by
the prompt, which dealing "by expected lengths" knows; or as ``--lengths RUN`` recorded them, brought to that mean. With
``--run``: a run that took turns, on its lengths and the seconds that it needed; what is predicted for its own order stands
beside what it took.

``step``: seconds of a step; ``gain``: of the first row's; ``drawing``, ``learning``: shares of the time in which replicas
and learner work; ``staleness``: versions between weights that a response began with and the update that learned from it.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hybridflow.build_stream import recorded, recorded_lengths, streamed
from hybridflow.core.errors import UserError
from hybridflow.planner.cluster import PRESETS, Machine
from hybridflow.planner.cost import CostModel, Efficiency
from hybridflow.planner.graph import ModelRole, Task, TaskGraph
from hybridflow.planner.lengths import Lengths
from hybridflow.planner.mapping import Strategy
from hybridflow.planner.sizes import find_model
from hybridflow.planner.streaming import Order, Stream, engine_of, stream
from hybridflow.telemetry.graph_tables import aligned

ORDERS = {
    "in turns": Order(0, "even"),
    "in turns, by outstanding work": Order(0),
    "in turns, by expected lengths": Order(0, "expected"),
    "in turns, stealing": Order(0, "stealing"),
    "one step ahead": Order(1, "even"),
    "staleness 1": Order(1),
    "staleness 1, partial": Order(1, partial=True),
    "staleness 2, partial": Order(2, partial=True),
    "staleness 2, partial, by expected lengths": Order(2, "expected", partial=True),
    "staleness 2, partial, stealing": Order(2, "stealing", partial=True),
    "staleness 4, partial": Order(4, partial=True),
}
STEPS, GROUPS, ROWS = 12, 2048, 8
MEAN, LONGEST = 1024.0, 8192.0
DRAW, LEARN = Strategy(tp=2), 32


@dataclass(frozen=True)
class Row:
    order: str
    step_s: float
    gain: float
    drawing: float
    learning: float
    staleness: float


def cluster(lengths: Lengths, slots: int) -> Callable[[Order], Stream]:
    model = find_model("llama-7b")
    roles = (
        ModelRole("actor", model, gradient_bytes=4.0, optimizer_bytes=8.0),
        ModelRole("sampler", model, weights_of="actor"),
    )
    draw = Task("draw", "sampler", "generate", GROUPS * ROWS, 512.0, MEAN, deviation=MEAN, longest=LONGEST, group=ROWS)
    learn = Task("learn", "actor", "train", GROUPS * ROWS, 512.0, MEAN, minibatches=4)
    costs = CostModel(TaskGraph(roles, (draw, learn), ()), Efficiency())
    a100, h100 = PRESETS["a100-80g"], PRESETS["h100"]
    replicas = {64 * a100.devices // DRAW.devices: a100, 32 * h100.devices // DRAW.devices: h100}
    engines = [
        engine for number, machine in replicas.items() for engine in [engine_of(costs, draw, DRAW, machine, slots)] * number
    ]
    learn_s = _fastest(costs, roles[0], learn, h100, LEARN * h100.devices)
    publish_s = costs.publishing(roles[1], DRAW._replace(dp=256), a100).seconds
    drawn, expected = responses(lengths)
    return lambda order: stream(drawn, engines, learn_s, order, publish_s, expected)


def responses(lengths: Lengths) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """[steps, groups, rows] tokens, and [steps, groups] those that are expected. Recorded ones don't say what the prompt
    has to do with them."""
    rng = np.random.default_rng(0)
    if lengths.recorded:
        return lengths.draw(rng, (STEPS, GROUPS, ROWS)), np.full((STEPS, GROUPS), lengths.mean)
    shared = math.sqrt(math.sqrt(1 + (lengths.deviation / lengths.mean) ** 2) - 1)  # of prompts and rows, of mean 1
    of_prompt, of_row = (Lengths(1.0, shared).draw(rng, (STEPS, GROUPS, count)) for count in (1, ROWS))
    limit = lengths.longest or np.inf
    return np.minimum(lengths.mean * of_prompt * of_row, limit), np.minimum(lengths.mean * of_prompt[..., 0], limit)


def _fastest(costs: CostModel, role: ModelRole, task: Task, machine: Machine, devices: int) -> float:
    cuts = costs.strategies(role, machine, devices)
    return min(one.seconds for cut in cuts if (one := costs.seconds(task, cut, machine)) is not None)


def scaled(lengths: Lengths) -> Lengths:
    """To the mean of the workload."""
    factor = MEAN / lengths.mean
    if lengths.recorded:
        return Lengths.of(tuple(factor * length for length in lengths.recorded))
    return replace(lengths, mean=MEAN, deviation=factor * lengths.deviation, longest=factor * lengths.longest)


def rows_of(played: Callable[[Order], Stream]) -> Iterator[Row]:
    first = 0.0
    for name, order in ORDERS.items():
        found = played(order)
        first = first or found.step_s
        late = float(found.staleness[len(found.staleness) // 2 :].mean())
        yield Row(name, found.step_s, first / found.step_s, found.drawing, found.learning, late)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--run", type=Path, help="run directory of a run that took turns")
    parser.add_argument("--lengths", type=Path, metavar="RUN", help="run directory whose lengths of responses are taken")
    parser.add_argument("--slots", type=int, default=64, help="responses that a replica grows at a time")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    try:
        run = recorded(options.run) if options.run else None
        lengths = scaled(recorded_lengths(options.lengths)) if options.lengths else Lengths(MEAN, MEAN, LONGEST)
    except UserError as error:
        parser.error(str(error))
    rows = [*rows_of(cluster(lengths, options.slots) if run is None else lambda order: streamed(run, order))]
    measured = None if run is None else run.step_s
    if options.json:
        print(json.dumps({"measured_s": measured, "rows": [asdict(row) for row in rows]}, indent=2))
        return
    header = ("order", "step", "gain", "drawing", "learning", "staleness")
    table = [
        (
            row.order,
            f"{row.step_s:.3g} s",
            f"{row.gain:.2f}",
            f"{row.drawing:.0%}",
            f"{row.learning:.0%}",
            f"{row.staleness:.1f}",
        )
        for row in rows
    ]
    print("\n".join(aligned([header, *table], header[1:])))
    if measured is not None:
        print(f"measured, in turns: {measured:.3g} s a step")


if __name__ == "__main__":
    main()
