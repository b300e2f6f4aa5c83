"""What a change from the training layout to the generation layout takes: HybridFlow's against four other ways.

    python benchmarks/reshard.py [--sections compare,sweep,rollout] [--models 20M,135M,smollm2] [--rounds 5] [--json]

Eight processes over gloo hold a model of random weights in float32, and eight more wait for the side that sends to other
devices. A number is the median of the rounds after a first one that isn't counted; in a round all sides take turns. All
move the same weights by the same sends and receives (``reshard.execute.exchange``), but ``full_tensor``, torch's DTensor.

``compare``: train 1-4-2, generate 1-2-2-2.
    hybridflow    to generation and back: receive what is missing into place, later drop it
    vanilla       gather the model from the data-parallel block, cut the generation slice out of it
    gather_all    the same from all ranks, of which each holds an eighth of the weights
    broadcast     every rank of another eight receives the model, in buckets, and cuts its slice out of them
    full_tensor   ``DTensor.full_tensor`` of every weight, cut before the next one
Wall seconds of the slowest rank, CPU-seconds of all of them; bytes received as counted against the plan's; how far the
resident memory of the fullest rank grew at its peak, with its training slices, against the plan's peak. vanilla and
gather_all hold the gathered model beside the training slices, which the plan's peak, as the paper's, counts as one.

``sweep``: train 1-8-1, generate on t_g = 8, 4, 2, 1: hybridflow alone.
``rollout``: the same with a rollout after the change: 64 prompts of 24 tokens, 16 new tokens each, shared
out over the replicas of t_g ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from hybridflow.core.placement import Mesh
from hybridflow.generation.engine import Engine
from hybridflow.generation.request import Request, SamplingParams
from hybridflow.models.decoder import Decoder, Part, init_weights
from hybridflow.models.spec import DecoderSpec
from hybridflow.parallel.mesh import ProcessMesh
from hybridflow.parallel.shard import cuts
from hybridflow.reshard.execute import BUCKET, HybridWeights, exchange
from hybridflow.reshard.layout import Place, slices
from hybridflow.reshard.plan import Move, Plan, Strategy, make_plan

RANKS, OTHERS = 8, 8
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 64, 24, 16
EXAMPLE = Mesh(dp=2, tp=4, generation_tp=2)
SWEEP = [Mesh(tp=8, generation_tp=size) for size in (8, 4, 2, 1)]
SPECS = {
    "20M": DecoderSpec("llama", 8192, 512, 1376, 6, 8, 4, 64, 2048),
    "135M": DecoderSpec("llama", 49152, 576, 1536, 30, 8, 4, 72, 2048),
    "smollm2": DecoderSpec("llama", 49152, 576, 1536, 30, 9, 3, 64, 2048),
}
SIDES = ("hybridflow", "vanilla", "gather_all", "broadcast", "full_tensor")
TARGETS = {"vanilla": 0.4, "gather_all": 0.3, "broadcast": 0.3, "full_tensor": 0.2}
TIMEOUT = timedelta(seconds=600)
Row = dict[str, Any]


class Rank:
    """A process: ranks up to ``RANKS`` train, the others wait to be sent to."""

    def __init__(self, spec: DecoderSpec, mesh: Mesh, rank: int, groups: Any) -> None:
        self.spec, self.mesh, self.rank, self.trains = spec, mesh, rank, rank < mesh.size
        lines = ProcessMesh(mesh, rank, TIMEOUT, groups)
        self.weights = self._weights(lines) if self.trains else None

    def _weights(self, lines: ProcessMesh) -> HybridWeights:
        decoder = Decoder(self.spec, Part(tp=lines.tp))
        self.shards = decoder.shards
        init_weights(decoder, torch.Generator().manual_seed(0))
        return HybridWeights(decoder, lines)

    def own(self, plan: Plan) -> Callable[[str], Tensor]:
        """The training slice, or the share of it that the plan takes from this rank."""
        assert self.weights is not None
        memory, (d, dp) = self.weights.memory, plan.training[self.rank].share

        def read(name: str) -> Tensor:
            flat = memory.own(name)
            part = cuts(len(flat), dp)[d]
            return flat[part.start : part.stop]

        return read

    def hybridflow(self) -> int:
        received = self.to_generation()
        self.to_training()
        return received

    def draw(self) -> int:
        """This replica's share of a rollout, in the generation layout."""
        if self.weights is None:
            return 0
        engine = Engine(self.weights.generation_decoder, seed=0, pp=self.weights.generation_pp)
        prompts = np.random.default_rng(0).integers(0, self.spec.vocab_size, (PROMPTS, PROMPT_TOKENS))
        share = cuts(PROMPTS, self.mesh.num_replicas)[self.mesh.replica(self.rank)[0]]
        done = engine.generate([Request(prompts[i], i) for i in share], SamplingParams(NEW_TOKENS))
        assert sum(len(completion.tokens) for completion in done) == len(share) * NEW_TOKENS
        return 0

    def to_generation(self) -> int:
        if self.weights is None:
            return 0
        self.weights.generation()
        return self.weights.transition.received

    def to_training(self) -> int:
        if self.weights is not None:
            self.weights.training()
        return 0

    def rollout(self) -> list[Row]:
        return [measured(act) for act in (self.to_generation, self.draw, self.to_training)]

    def gathered(self, plan: Plan, bucket: int) -> int:
        """Receive whole weights in buckets, or all at once, and cut the generation slice out of them."""
        whole, kept, received = dict[str, Tensor](), dict[str, Tensor](), 0
        sizes = {name: piece.runs[-1].stop for name, piece in slices(self.spec, Place()).items()}
        wanted = slices(self.spec, plan.generation[self.rank]) if self.rank in plan.generation else {}

        def land(name: str) -> Tensor:
            if name not in whole:
                whole[name] = torch.empty(sizes[name])
            return whole[name]

        own = self.own(plan) if self.rank in plan.training else land
        for moves in self._buckets(plan, bucket, sizes):
            received += exchange(moves, self.rank, own, land, torch.float32)[1]
            for name in [*whole]:
                flat = whole.pop(name)
                kept[name] = torch.cat([flat[run.start : run.stop] for run in wanted[name].runs])
        return received

    def _buckets(self, plan: Plan, size: int, sizes: dict[str, int]) -> Iterator[list[Move]]:
        """The moves of consecutive weights of together about ``size`` bytes."""
        bucket, held, last = list[Move](), 0, ""
        for move in plan.moves(self.rank):
            if move.parameter != last:
                if held >= size:
                    yield bucket
                    bucket, held = [], 0
                last, held = move.parameter, held + 4 * sizes[move.parameter]
            bucket.append(move)
        yield bucket

    def distributed(self, mesh: Any) -> dict[str, DTensor]:
        """Every weight as torch cuts it: along the same axis, in equal parts, whatever they are of."""
        assert self.weights is not None
        found = {}
        for name, shard in self.shards.items():
            cut = Replicate() if shard.whole else Shard(shard.dim)
            local = torch.empty(shard.shape).chunk(self.mesh.tp, shard.dim)[self.rank % self.mesh.tp].clone()
            local = torch.empty(shard.shape) if shard.whole else local
            stride = torch.empty(shard.shape, device="meta").stride()
            shape = torch.Size(shard.shape)
            found[name] = DTensor.from_local(local, mesh, (Replicate(), cut), run_check=False, shape=shape, stride=stride)
        return found

    def full_tensor(self, weights: dict[str, DTensor]) -> int:
        """Also cut the generation slice's share of each."""
        kept = {}
        for name, weight in weights.items():
            full, dim = weight.full_tensor(), 0 if weight.placements[1].is_replicate() else weight.placements[1].dim
            kept[name] = full.narrow(dim, 0, -(-full.shape[dim] // self.mesh.generation[0])).clone()
        return 0


def resident(peak: bool = False) -> int:
    """Bytes of this process, now or at most since ``forget_peak``."""
    text = Path("/proc/self/status").read_text()
    return int(text.split("VmHWM:" if peak else "VmRSS:")[1].split()[0]) * 1024


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def measured(act: Callable[[], int]) -> Row:
    """Of this rank."""
    dist.barrier()
    forget_peak()
    before, cpu, wall = resident(), time.process_time(), time.perf_counter()
    received = act()
    wall, cpu, peak = time.perf_counter() - wall, time.process_time() - cpu, resident(peak=True)
    dist.barrier()
    return {"wall": wall, "cpu": cpu, "received": received, "grown": peak - before}


def acts(rank: Rank, device_mesh: Any) -> dict[str, Callable[[], int]]:
    def gathering(strategy: Strategy, bucket: int) -> Callable[[], int]:
        plan = make_plan(rank.spec, rank.mesh, strategy, itemsizes=(4, 4))
        takes_part = rank.rank in plan.ranks
        return lambda: rank.gathered(plan, bucket) if takes_part else 0

    weights = rank.distributed(device_mesh) if rank.trains else {}
    return {
        "hybridflow": rank.hybridflow,
        "vanilla": gathering("vanilla", 2**62),
        "gather_all": gathering("gather_all", 2**62),
        "broadcast": gathering("broadcast", BUCKET),
        "full_tensor": lambda: rank.full_tensor(weights),
    }


def compare(model: str, rounds: int, rank: int, groups: Any) -> list[list[Row]]:
    """By side and round."""
    this = Rank(SPECS[model], EXAMPLE, rank, groups)
    device_mesh = groups["device mesh"]
    sides = acts(this, device_mesh)
    results: dict[str, list[Row]] = {side: [] for side in SIDES}
    for number in range(rounds + 1):
        for side in SIDES:
            row = measured(sides[side])
            if number:
                results[side].append(row)
    return [results[side] for side in SIDES]


def sweep(model: str, rounds: int, rank: int, groups: Any) -> list[list[Row]]:
    """By mesh and round."""
    ranks = [Rank(SPECS[model], mesh, rank, groups) for mesh in SWEEP]
    results: list[list[Row]] = [[] for _ in SWEEP]
    for number in range(rounds + 1):
        for this, rows in zip(ranks, results, strict=True):
            row = measured(this.hybridflow)
            if number:
                rows.append(row)
    return results


def rollout(model: str, rounds: int, rank: int, groups: Any) -> list[list[Row]]:
    """By mesh and part, and round."""
    ranks = [Rank(SPECS[model], mesh, rank, groups) for mesh in SWEEP]
    results: list[list[Row]] = [[] for _ in SWEEP for _ in range(3)]
    for number in range(rounds + 1):
        for place, this in enumerate(ranks):
            for part, row in enumerate(this.rollout()):
                if number:
                    results[3 * place + part].append(row)
    return results


def work(rank: int, folder: str, sections: list[str], models: list[str], rounds: int) -> None:
    torch.set_num_threads(1)
    store, size = dist.FileStore(f"{folder}/store", RANKS + OTHERS), RANKS + OTHERS
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    groups: dict[Any, Any] = {"device mesh": init_device_mesh("cpu", (size // 4, 4))}
    found = {}
    with torch.no_grad():
        for section in sections:
            for model in models:
                groups = {"device mesh": groups["device mesh"]}
                found[section, model] = {"compare": compare, "sweep": sweep, "rollout": rollout}[section](
                    model, rounds, rank, groups
                )
    torch.save(found, f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def summed(ranks: list[list[Row]]) -> Row:
    """Of one side: ``ranks[rank][round]``."""
    rounds = [*zip(*ranks, strict=True)]
    return {
        "wall_s": statistics.median(max(row["wall"] for row in rows) for rows in rounds),
        "cpu_s": statistics.median(sum(row["cpu"] for row in rows) for rows in rounds),
        "received": [row["received"] for row in rounds[0]],
        "grown": max(max(row["grown"] for row in rows) for rows in rounds),
    }


def compared(model: str, ranks: list[list[list[Row]]]) -> Iterator[Row]:
    ours = summed([rank[0] for rank in ranks])
    for place, side in enumerate(SIDES):
        row = summed([rank[place] for rank in ranks])
        told: Row = {"model": model, "side": side, "wall_s": row["wall_s"], "cpu_s": row["cpu_s"]}
        told |= {f"hybridflow / it, {unit}": ours[unit] / row[unit] for unit in ("wall_s", "cpu_s")}
        told["target"] = TARGETS.get(side, "")
        if side != "full_tensor":
            plan = make_plan(SPECS[model], EXAMPLE, side, itemsizes=(4, 4))  # type: ignore[arg-type]
            planned = {account.rank: account for account in plan.accounts}
            received = [planned[rank].received.total if rank in planned else 0 for rank in range(len(ranks))]
            told["received, MB"] = max(received) / 1e6
            told["as planned"] = received == row["received"]
            training = plan.accounts[0].training.total if side not in ("broadcast",) else 0
            told["peak of the plan, MB"] = max(account.peak.total for account in plan.accounts) / 1e6
            told["peak by RSS, MB"] = (row["grown"] + training) / 1e6
            told["redundant, MB"] = max(account.redundant.total for account in plan.accounts) / 1e6
        else:
            told["peak by RSS, MB"] = (
                row["grown"] + make_plan(SPECS[model], EXAMPLE, itemsizes=(4, 4)).accounts[0].training.total
            ) / 1e6
        yield told


def swept(model: str, ranks: list[list[list[Row]]]) -> Iterator[Row]:
    for place, mesh in enumerate(SWEEP):
        row = summed([rank[place] for rank in ranks])
        plan = make_plan(SPECS[model], mesh, itemsizes=(4, 4))
        received = [account.received.total for account in plan.accounts]
        yield {
            "model": model,
            "t_g": mesh.generation[0],
            "transition, wall_s": row["wall_s"],
            "cpu_s": row["cpu_s"],
            "received, MB": max(received) / 1e6,
            "as planned": received == row["received"][:RANKS],
            "peak of the plan, MB": max(account.peak.total for account in plan.accounts) / 1e6,
            "peak by RSS, MB": (row["grown"] + plan.accounts[0].training.total) / 1e6,
        }


def drawn(model: str, ranks: list[list[list[Row]]]) -> Iterator[Row]:
    for place, mesh in enumerate(SWEEP):
        change, draw, back = (summed([rank[3 * place + part] for rank in ranks]) for part in range(3))
        told: Row = {"model": model, "t_g": mesh.generation[0], "replicas": mesh.num_replicas}
        for unit in ("cpu_s", "wall_s"):
            transition = change[unit] + back[unit]
            told |= {f"transition, {unit}": transition, f"generation, {unit}": draw[unit]}
            told[f"sum, {unit}"] = transition + draw[unit]
        yield told


def table(rows: list[Row]) -> None:
    names = list(dict.fromkeys(name for row in rows for name in row))
    print("| " + " | ".join(names) + " |\n|" + "---|" * len(names))
    for row in rows:
        cells = (row.get(name, "") for name in names)
        print("| " + " | ".join(f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", default="compare,sweep,rollout")
    parser.add_argument("--models", default="20M,135M,smollm2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    sections, models = options.sections.split(","), options.models.split(",")
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "MALLOC_MMAP_THRESHOLD_": "131072"}
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, environment):
        mp.spawn(work, (folder, sections, models, options.rounds), RANKS + OTHERS)  # type: ignore[no-untyped-call]
        found = [torch.load(f"{folder}/{rank}.pt", weights_only=False) for rank in range(RANKS + OTHERS)]
    for section in sections:
        rows = [
            row
            for model in models
            for row in {"compare": compared, "sweep": swept, "rollout": drawn}[section](
                model, [rank[section, model] for rank in found]
            )
        ]
        if options.json:
            print(json.dumps(rows))
        else:
            table(rows)
            print()


if __name__ == "__main__":
    main()
