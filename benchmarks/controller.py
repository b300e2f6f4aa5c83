"""What the controller costs: bytes through the driver, time for each verb, moving rows between groups, stages side by side.

    python benchmarks/controller.py [--sections traffic,verbs,regroup,local,overlap] [--sizes 10,100,1000] [--json]

The workers are toys that make and read arrays of the right sizes; the runtimes, the batches and PPO are the real ones.
One Ray on this machine serves all sections. What is compared takes turns, and a number is the median of its rounds.

``traffic``: a step like PPO's (rollout, values, reference, estimator, two updates) on pools of 3 and 2 processes, three
quarters of its bytes in ragged columns and the rest dense. Beside it, in the same processes, a controller through which all
rows pass: it gets every rank's output (mapped from the object store, so without a copy), joins the parts, cuts them for the
next ranks and sends them. What passes through the driver is counted twice, and neither count is the runtime's own:
``sockets`` are the bytes that its TCP connections sent and received, as the kernel counts them (small results,
arguments and all of Ray's messages); ``stored`` is what Ray serialised or deserialised in
the driver (each get, put and argument).
The peak of resident memory includes mapped pages of the object store; both start a step with none of them mapped.

``verbs``: eight workers. ``handle``: until the verb returns. ``round trip``: until all is drained. ``bare``: eight calls of
actors that do nothing and return as many values; ``bare, same inputs``: they are handed references to the same arrays and
get them. ``own batch``: the verb reads columns of the driver; ``regrouped``: it reads two columns of eight pieces.

``regroup``: the output of three workers read by two others. ``memcpy``: both readers copying half of the bytes each, at
the same time, into new memory.

``overlap``: PPO on two pools with stages that sleep, against the sum of the stages.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import re
import socket
import statistics
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import ray
from ray._private.serialization import SerializationContext

from hybridflow.algorithms.policy_gradient import KLConfig, LossConfig, Objective, ShapingConfig
from hybridflow.algorithms.ppo import PPO, PPOConfig
from hybridflow.controller.local_runtime import LocalRuntime
from hybridflow.controller.manifest import weights
from hybridflow.controller.protocols import ONE_TO_ALL, THREE_D, THREE_D_ALL_MICRO_DP, VIEW
from hybridflow.controller.ray_group import connect
from hybridflow.controller.ray_runtime import RayRuntime
from hybridflow.core.batch import Batch, Ragged
from hybridflow.core.placement import Placement, ResourcePool
from hybridflow.core.roles import Fn, Role, WorkerContext, control, remote, verb_of
from hybridflow.workers.estimator import EstimatorWorker

ROWS, ROUNDS = 512, {10: 6, 100: 5, 1000: 3}
BYTES_A_TOKEN = 8 + 1 + 5 * 4
REGROUPED_ROWS = 16_384
Row = dict[str, Any]


class Toy:
    """Makes columns of the right sizes and reads what it is given. ``width``: of the dense column; ``learns``: columns."""

    def __init__(self, context: WorkerContext, width: int = 1, learns: Sequence[str] = ()) -> None:
        self.context, self.width = context, width

    @remote(
        THREE_D_ALL_MICRO_DP,
        reads=("sample_id", "num_steps"),
        writes=("tokens", "response_mask", "log_probs", "final_observations"),
        kind="generate",
    )
    def rollout(self, batch: Batch, /) -> Batch:
        lengths = batch["num_steps"]
        tokens = Ragged(np.arange(lengths.sum()), lengths)
        mask, log_probs = np.ones(len(tokens.values), bool), np.ones(len(tokens.values), np.float32)
        dense = np.full((len(batch), self.width), 0.5, np.float32)
        new = {"tokens": tokens, "response_mask": tokens.like(mask), "log_probs": tokens.like(log_probs)}
        return Batch({**new, "final_observations": dense}, len(batch))

    @remote(THREE_D, reads=("tokens",), writes=("values", "bootstrap_values"))
    def compute_values(self, batch: Batch, /) -> Batch:
        tokens = batch.ragged("tokens")
        values = tokens.like(tokens.values.astype(np.float32))
        return Batch({"values": values, "bootstrap_values": np.zeros(len(batch), np.float32)}, len(batch))

    @remote(THREE_D, reads=("tokens",), writes=("ref_log_probs",))
    def score(self, batch: Batch, /) -> Batch:
        tokens = batch.ragged("tokens")
        return Batch({"ref_log_probs": tokens.like(tokens.values.astype(np.float32))}, len(batch))

    @remote(ONE_TO_ALL, reads=("log_probs", "ref_log_probs", "values"), writes=("advantages", "returns"), kind="compute")
    def compute(self, batch: Batch, /) -> Batch:
        values = batch.ragged("values")
        advantages = batch.ragged("log_probs").values - batch.ragged("ref_log_probs").values
        return Batch(
            {"advantages": values.like(advantages), "returns": values.like(advantages + values.values)}, len(batch)
        )

    @remote(VIEW, reads=lambda args: args["learns"], kind="train")
    def update(self, batch: Batch, /) -> Batch:
        self.learn(batch.rows(np.arange(self.context.block, len(batch), self.context.mesh.dp)).load())
        return Batch({}, len(batch))

    @remote(THREE_D, reads=("tokens", "log_probs", "ref_log_probs"))
    def read(self, batch: Batch, /) -> Batch:
        return Batch({}, len(batch))

    def learn(self, batch: Batch) -> Batch:
        for column in batch.columns.values():
            np.sum(column.values if isinstance(column, Ragged) else column)
        return Batch({}, len(batch))

    @control
    def work(self, verb: str, batch: Batch) -> Batch:
        """A verb for the controller that hands a rank its rows itself."""
        return self.learn(batch) if verb == "update" else getattr(self, verb)(batch)

    @control
    def copy_seconds(self, num_bytes: int) -> float:
        source = np.ones(num_bytes // 8)
        start = time.perf_counter()
        source.copy()
        return time.perf_counter() - start


class Sleeper:
    """Every verb takes as long as ``seconds`` says. ``writes``: what a scorer writes."""

    def __init__(self, context: WorkerContext, seconds: Mapping[str, float], writes: str = "") -> None:
        self.seconds, self.writes = seconds, writes

    @remote(THREE_D, reads=("sample_id",), writes=("tokens", "response_mask", "log_probs", "terminated"), kind="generate")
    def rollout(self, batch: Batch, /) -> Batch:
        time.sleep(self.seconds["rollout"])
        tokens = Ragged.from_rows([[1, 2, 3]] * len(batch), np.int64)
        mask, log_probs = tokens.like(np.ones(3 * len(batch), bool)), tokens.like(np.zeros(3 * len(batch), np.float32))
        ended = np.ones(len(batch), bool)
        return Batch({"tokens": tokens, "response_mask": mask, "log_probs": log_probs, "terminated": ended}, len(batch))

    @remote(THREE_D, reads=("tokens",), writes=lambda args: (args["writes"],))
    def score(self, batch: Batch, /) -> Batch:
        time.sleep(self.seconds["score"])
        if self.writes == "scores":
            return Batch({"scores": np.ones(len(batch), np.float32)}, len(batch))
        return Batch({"ref_log_probs": _ones_like(batch.ragged("tokens"))}, len(batch))

    @remote(THREE_D, reads=("tokens",), writes=("values", "bootstrap_values"))
    def compute_values(self, batch: Batch, /) -> Batch:
        time.sleep(self.seconds["values"])
        after = np.ones(len(batch), np.float32)
        return Batch({"values": _ones_like(batch.ragged("tokens")), "bootstrap_values": after}, len(batch))

    @remote(VIEW, kind="train")
    def update(self, batch: Batch, loss: Fn, /) -> Batch:
        time.sleep(self.seconds["update"])
        return Batch({}, len(batch))


def _ones_like(tokens: Ragged) -> Ragged:
    return tokens.like(np.ones(len(tokens.values), np.float32))


class Idle:
    """A bare actor."""

    def call(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        ray.get([value for value in inputs if isinstance(value, ray.ObjectRef)])
        return tuple(np.zeros(8, np.float32) for _ in range(4))


# What the driver has to do with.


class Driver:
    """Counters of this process."""

    def __init__(self) -> None:
        self.stored = 0
        serialize, deserialize = SerializationContext.serialize, SerializationContext.deserialize_objects

        def counted_serialize(context: Any, value: Any) -> Any:
            made = serialize(context, value)
            self.stored += made.total_bytes
            return made

        def counted_deserialize(context: Any, found: Any, *rest: Any) -> Any:
            self.stored += sum(len(data) for data, *_ in found if data is not None)
            return deserialize(context, found, *rest)

        SerializationContext.serialize = counted_serialize
        SerializationContext.deserialize_objects = counted_deserialize

    @contextlib.contextmanager
    def step(self) -> Iterator[dict[str, float]]:
        """Seconds, bytes and peak memory of what happens inside."""
        measured: dict[str, float] = {}
        _forget_store()
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # the peak starts again from what is resident now
        resident, sockets, stored, start = _resident("VmRSS"), _sockets(), self.stored, time.perf_counter()
        yield measured
        measured["seconds"] = time.perf_counter() - start
        measured["sockets"] = sum(count - sockets.get(key, 0) for key, count in _sockets().items())
        measured["stored"] = self.stored - stored
        measured["peak"], measured["growth"] = _resident("VmHWM"), _resident("VmHWM") - resident


def _resident(what: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(what))


def _sockets() -> dict[str, int]:
    """Bytes sent and received so far, of every TCP connection of this process (tcp_info: bytes_acked, bytes_received)."""
    counts = {}
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{entry}")
            if target.startswith("socket:"):
                with socket.socket(fileno=os.dup(int(entry))) as connection:
                    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                counts[target] = sum(struct.unpack_from("QQ", info, 120))
    return counts


def _forget_store() -> None:
    """Unmap the pages of the object store; its contents stay where they are."""
    libc = ctypes.CDLL(None)
    libc.malloc_trim(0)
    with open("/proc/self/maps") as file:
        for start, end in re.findall(r"^(\w+)-(\w+) .*plasma", file.read(), re.MULTILINE):
            libc.madvise(ctypes.c_void_p(int(start, 16)), ctypes.c_size_t(int(end, 16) - int(start, 16)), 4)


@contextlib.contextmanager
def runtime(pools: Mapping[str, int], roles: Mapping[str, str]) -> Iterator[RayRuntime]:
    placement = Placement(tuple(ResourcePool(n, (size,)) for n, size in pools.items()), roles, next(iter(pools)))
    made = RayRuntime(placement, address=None, threads=1, timeout_s=120.0, gpus=False)
    try:
        yield made
    finally:
        made.stop()


def drain(made: RayRuntime | LocalRuntime) -> dict[str, float]:
    return made.drain().metrics.values()


# Sections.

Stage = Sequence[tuple[str, str]]
STAGES: Sequence[Stage] = (
    [("actor", "rollout")],
    [("critic", "compute_values"), ("reference", "score")],
    [("estimator", "compute")],
    [("critic", "update"), ("actor", "update")],
)
LEARNS = {
    "actor": ("tokens", "response_mask", "log_probs", "advantages", "final_observations"),
    "critic": ("tokens", "values", "returns", "bootstrap_values"),
}


def traffic(driver: Driver, sizes: Sequence[int]) -> list[Row]:
    rows = []
    for size in sizes:
        width = size * 10**6 // 4 // 4 // ROWS
        with runtime({"main": 3, "side": 2}, {"critic": "side", "estimator": "side"}) as made:
            roles = {
                name: Role(name, Toy, {"width": width, "learns": LEARNS.get(name, ())}) for name in ("actor", "critic")
            }
            roles |= {"reference": Role("reference", Toy), "estimator": Role("estimator", Toy, max_workers=1)}
            handles = {name: made.role(role) for name, role in roles.items()}
            made.ready()
            source = _source(size)
            sides: dict[str, Callable[[], float]] = {
                "hybridflow": lambda handles=handles, source=source, made=made: _direct(handles, source, made),
                "gathered": lambda roles=roles, source=source, made=made: _gathered(roles, source, made),
            }
            measured: dict[str, list[Row]] = {name: [] for name in sides}
            for _ in range(ROUNDS.get(size, 3)):
                for name, side in sides.items():
                    with driver.step() as step:
                        own = side()
                    measured[name].append({**step, "own": own})
        rows += [_traffic_row(size, name, steps[1:], measured["gathered"][1:]) for name, steps in measured.items()]
    return rows


def _source(size: int) -> Batch:
    mean = size * 10**6 * 3 // 4 // BYTES_A_TOKEN // ROWS
    lengths = np.random.default_rng(0).integers(mean // 2, mean * 3 // 2, ROWS)
    return Batch({"sample_id": np.arange(ROWS), "num_steps": lengths})


def _direct(handles: Mapping[str, Any], batch: Batch, made: RayRuntime) -> float:
    for stage in STAGES:
        for role, verb in stage:
            batch = getattr(handles[role], verb)(batch)
    return drain(made)["driver/bytes"]


def _gathered(roles: Mapping[str, Role[Any]], batch: Batch, made: RayRuntime) -> float:
    """The same step with all rows in the driver; calls of a stage run side by side."""
    for stage in STAGES:
        asked = [_scatter(roles[role], verb, batch, made) for role, verb in stage]
        for references, rows in asked:
            new = Batch.concat(ray.get(references)).rows(np.argsort(rows))
            batch = batch.with_columns(**new.columns)
    return 0.0


def _scatter(role: Role[Any], name: str, batch: Batch, made: RayRuntime) -> tuple[list[Any], Any]:
    """Ask every rank for its part of a verb; references to the results, and which rows they are."""
    verb, mesh = verb_of(getattr(Toy, name)), made.mesh(role)
    assert verb is not None
    read = batch.select(role.columns_of(verb, ())[0])
    if verb.protocol.view:
        parts = [np.arange(rank, len(batch), mesh.size) for rank in range(mesh.size)]
    else:
        parts = list(verb.protocol.distribute(weights(read), mesh))
    processes = made.groups[made.placement.pool_of(role.name).name].processes
    asked = zip(processes, parts, strict=False)
    return [process.control.remote(role.name, "work", True, name, read.rows(rows)) for process, rows in asked], (
        np.concatenate(parts)
    )


def _traffic_row(size: int, name: str, steps: Sequence[Row], others: Sequence[Row]) -> Row:
    medians = {key: statistics.median(step[key] for step in steps) for key in steps[0]}
    through = medians["sockets"] + medians["stored"]
    row = {"batch MB": size, "controller": name, "step s": medians["seconds"], "peak MB": medians["peak"] / 1e6}
    row |= {
        "growth MB": medians["growth"] / 1e6,
        "sockets MB": medians["sockets"] / 1e6,
        "stored MB": medians["stored"] / 1e6,
    }
    if name == "gathered":
        return {**row, "own counter MB": None, "gathered / ours": None, "target MB": None, "of target": None}
    slower = statistics.median(b["seconds"] / a["seconds"] for a, b in zip(steps, others, strict=True))
    row |= {"own counter MB": medians["own"] / 1e6, "gathered / ours": slower}
    return {**row, "target MB": 1.0, "of target": through / 1e6}


def verbs(rounds: int = 40) -> list[Row]:
    with runtime({"main": 8}, {}) as made:
        actor = made.role(Role("actor", Toy))
        made.ready()
        idle = [ray.remote(Idle).options(num_cpus=0).remote() for _ in range(8)]
        calls = [actor_.call.options(num_returns=4) for actor_ in idle]
        source = Batch({"sample_id": np.arange(64), "num_steps": np.full(64, 32)})
        rolled = actor.rollout(source)
        drain(made)
        inputs = [reference for call in calls for reference in call.remote([])[:2]]
        ray.get(inputs)

        def bare(given: Sequence[Any]) -> tuple[float, float]:
            return _timed(lambda: [call.remote(given)[0] for call in calls], ray.get)

        sides = {
            "own batch": lambda: _timed(lambda: actor.rollout(source), lambda _: drain(made)),
            "bare": lambda: bare([]),
            "regrouped": lambda: _timed(lambda: actor.compute_values(rolled), lambda _: drain(made)),
            "bare, same inputs": lambda: bare(inputs),
        }
        times = {name: [side() for _ in range(1)] for name, side in sides.items()}
        for _ in range(rounds):
            for name, side in sides.items():
                times[name].append(side())
    medians = {
        name: [1e3 * statistics.median(column) for column in zip(*pairs[5:], strict=True)] for name, pairs in times.items()
    }
    rows: list[Row] = []
    for name in ("own batch", "regrouped"):
        handle, trip = medians[name]
        rows.append({"verb": name, "what": "handle", "ms": handle, "beside": "bare", "beside ms": medians["bare"][0]})
        rows[-1] |= {"target": 12.0, "of target": handle / 12}
        for other in ("bare", "bare, same inputs") if name == "regrouped" else ("bare",):
            beside = medians[other][1]
            rows.append({"verb": name, "what": "round trip", "ms": trip, "beside": other, "beside ms": beside})
            rows[-1] |= {"target": 1.5 * beside, "of target": trip / beside / 1.5}
    return rows


def _timed(ask: Callable[[], Any], finish: Callable[[Any], Any]) -> tuple[float, float]:
    start = time.perf_counter()
    asked = ask()
    returned = time.perf_counter()
    finish(asked)
    return returned - start, time.perf_counter() - start


def regroup(rounds: int = 5) -> list[Row]:
    with runtime({"main": 3, "side": 2}, {"critic": "side"}) as made:
        actor, critic = made.role(Role("actor", Toy)), made.role(Role("critic", Toy))
        lengths = np.random.default_rng(0).integers(500, 1500, REGROUPED_ROWS)
        batch = actor.rollout(Batch({"sample_id": np.arange(len(lengths)), "num_steps": lengths}))
        batch = actor.score(batch)
        drain(made)
        size, seconds, copied = 16 * int(lengths.sum()), [], []
        for _ in range(rounds):
            start = time.perf_counter()
            critic.read(batch)
            found = drain(made)
            seconds.append(time.perf_counter() - start)
            moved = sum(count for name, count in found.items() if name.startswith("moved/"))
            asked = [
                process.control.remote("critic", "copy_seconds", True, size // 2)
                for process in made.groups["side"].processes
            ]
            copied.append(max(ray.get(asked)))
    second, copy = statistics.median(seconds[1:]), statistics.median(copied[1:])
    row = {"MB": size / 1e6, "rows": len(lengths), "moved / size": moved / size, "s": second, "GB/s": size / second / 1e9}
    return [{**row, "memcpy s": copy, "memcpy GB/s": size / copy / 1e9, "memcpys": second / copy}]


def _repeat(verb: Callable[[Batch], Batch], batch: Batch, calls: int) -> None:
    for _ in range(calls):
        verb(batch)


def local(rounds: int = 7, calls: int = 300) -> list[Row]:
    class Nothing:
        def __init__(self, context: WorkerContext) -> None:
            self.out = Batch({"values": Ragged.from_rows([[0.0]] * 8, np.float32)})

        @remote(THREE_D, reads=("sample_id", "tokens"), writes=("values",))
        def forward(self, batch: Batch, /) -> Batch:
            return self.out

    made = LocalRuntime()
    handle, bare = made.role(Role("critic", Nothing)), Nothing(WorkerContext())
    batch = Batch({"sample_id": np.arange(8), "tokens": Ragged.from_rows([[1]] * 8, np.int64)})
    per_call: list[tuple[float, float]] = []
    for _ in range(rounds):
        each = [_timed(partial(_repeat, verb, batch, calls), lambda _: None)[0] for verb in (handle.forward, bare.forward)]
        per_call.append((each[0] / calls * 1e6, each[1] / calls * 1e6))
        made.drain()
    ours, theirs = (statistics.median(column) for column in zip(*per_call, strict=True))
    row = {"verb µs": ours, "method µs": theirs, "overhead µs": ours - theirs, "target µs": 30.0}
    return [{**row, "of target": (ours - theirs) / 30}]


SECONDS = {
    "actor": {"rollout": 0.4, "update": 0.4},
    "reference": {"score": 0.2},
    "reward": {"score": 0.1},
    "critic": {"values": 0.1, "update": 0.3},
}


def overlap(rounds: int = 3) -> list[Row]:
    side = dict.fromkeys(("critic", "reward", "estimator"), "side")
    with runtime({"main": 1, "side": 1}, side) as made:
        writes = {"reward": "scores", "reference": "ref_log_probs"}
        roles = {
            name: made.role(Role(name, Sleeper, {"seconds": seconds, "writes": writes.get(name, "")}))
            for name, seconds in SECONDS.items()
        }
        estimator = made.role(Role("estimator", EstimatorWorker, max_workers=1))
        kl = KLConfig(coef=0.1)
        objective = Objective(LossConfig(), kl, ShapingConfig(), kl_where="reward", max_new_tokens=3, samples_per_step=64)
        scorers = [roles["reward"], roles["reference"]]
        algorithm = PPO(PPOConfig(), objective, roles["actor"], roles["critic"], estimator, scorers)
        source, walls = Batch({"sample_id": np.arange(64)}), []
        for _ in range(rounds + 1):
            walls.append(_timed(lambda: algorithm.learn(algorithm.rollout(source)), lambda _: drain(made))[1])
    sequential = sum(value for seconds in SECONDS.values() for value in seconds.values())
    wall = statistics.median(walls[1:])
    row = {"sequential s": sequential, "wall s": wall, "ratio": wall / sequential, "target": 0.75}
    return [{**row, "of target": wall / sequential / 0.75}]


def show(section: str, rows: Sequence[Row]) -> None:
    """A table; what is at most 1 of its target has met it."""
    names = list(rows[0])
    cells = [[_cell(row[name]) for name in names] for row in rows]
    widths = [max(len(line[i]) for line in [names, *cells]) for i in range(len(names))]
    print(f"\n{section}")
    for line in [names, *cells]:
        print("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)), flush=True)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"
    return "" if value is None else str(value)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", default="traffic,verbs,regroup,local,overlap")
    parser.add_argument("--sizes", default="10,100,1000", help="of the batch of traffic, in MB")
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of the tables")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    connect(None, 16)
    driver, sizes = Driver(), [int(size) for size in args.sizes.split(",")]
    sections: dict[str, Callable[[], list[Row]]] = {
        "traffic": lambda: traffic(driver, sizes),
        "verbs": verbs,
        "regroup": regroup,
        "local": local,
        "overlap": overlap,
    }
    for section in args.sections.split(","):
        rows = sections[section]()
        if args.json:
            for row in rows:
                print(json.dumps({"section": section, **row}), flush=True)
        else:
            show(section, rows)
    ray.shutdown()


if __name__ == "__main__":
    main()
