"""Rollouts of a decoder that is cut over processes, against one process: CPU-seconds a token, calls and bytes a step.

    python benchmarks/generation_parts.py [--model 20M] [--rows 4,16,64] [--rounds 5] [--json]

All sides draw the same responses of a random model: ``whole`` in one process; ``pieces`` in one process whose slices are
stored as two smaller ones; ``tp`` and ``pp`` on two processes over gloo, whose seconds are added up. Matrices are repacked,
as for responses of 32 tokens and more, or read in place. Sides take turns; a number is the least of the rounds, after a
first one. Beside them, the bytes that the first rank sends in a decode step.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from hybridflow.commands.bench import random_spec
from hybridflow.core.placement import Mesh
from hybridflow.generation.engine import Engine
from hybridflow.generation.request import Request, SamplingParams
from hybridflow.models.decoder import Decoder, Part, init_weights
from hybridflow.models.spec import DecoderSpec
from hybridflow.parallel.mesh import Line, ProcessMesh
from hybridflow.parallel.shard import cuts

TIMEOUT = timedelta(minutes=5)
SIDES = {"whole": Mesh(), "pieces": Mesh(), "tp": Mesh(tp=2), "pp": Mesh(pp=2)}
REPACKED, IN_PLACE = 32, 31  # new tokens: from 32 on matrices are repacked


def engine_of(spec: DecoderSpec, side: str, tp: Line, pp: Line) -> Engine:
    layers = cuts(spec.num_layers, pp.size)[pp.index]
    part = Part(layers, pp.index == 0, pp.index == pp.size - 1, tp=tp, pieces=2 if side == "pieces" else 1)
    decoder = Decoder(spec, part)
    init_weights(decoder, torch.Generator().manual_seed(0))
    return Engine(decoder, seed=0, pp=pp)


def requests(spec: DecoderSpec, rows: int, limit: int) -> list[Request]:
    rng = np.random.default_rng(0)
    return [Request(rng.integers(0, spec.vocab_size, 24), index, limit) for index in range(rows)]


def seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def measure(rank: int, model: str, rows: list[int], rounds: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=TIMEOUT)
    spec, engines, groups = random_spec(model), dict[str, Engine](), dict[tuple[int, ...], Any]()
    lines = {side: ProcessMesh(mesh, rank, TIMEOUT, groups) for side, mesh in SIDES.items()}
    for side, mesh in SIDES.items():
        if rank < mesh.size:
            engines[side] = engine_of(spec, side, lines[side].tp, lines[side].pp)
    found: dict[str, list[float]] = {}
    for number in rows:
        for limit in (REPACKED, IN_PLACE):
            for _ in range(rounds + 1):
                for side in SIDES:
                    dist.barrier()
                    if side in engines:
                        start = seconds()
                        engines[side].generate(requests(spec, number, limit), SamplingParams(limit))
                        spent = (seconds() - start) / (number * limit)
                        found.setdefault(f"{side} {number} {limit}", []).append(spent)
    sent = {side: traffic(spec, engines[side], lines[side]) for side in ("tp", "pp")}
    torch.save((found, sent), folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def traffic(spec: DecoderSpec, engine: Engine, lines: ProcessMesh) -> dict[str, float]:
    """Bytes that this rank sends in a decode step of 16 rows, by method."""
    for request in requests(spec, 16, 8):
        engine.add(request, SamplingParams(8))
    engine.step()
    for line in (lines.tp, lines.pp):
        line.traffic.clear()
    engine.step()
    sent = dict(lines.tp.traffic + lines.pp.traffic)
    while engine.num_in_flight:
        engine.step()
    return sent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="20M")
    parser.add_argument("--rows", default="4,16,64")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = [int(number) for number in options.rows.split(",")]
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        mp.spawn(measure, (options.model, rows, options.rounds, folder), 2)
        (first, sent), (second, _) = (torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2))
    table = []
    for number in rows:
        for limit in (REPACKED, IN_PLACE):
            keys = {side: f"{side} {number} {limit}" for side in SIDES}
            spent = {side: [a + b for a, b in zip(first[k], second.get(k, [0.0] * len(first[k])), strict=True)][1:]
                     for side, k in keys.items()}  # fmt: skip
            least = {side: 1e3 * min(values) for side, values in spent.items()}
            table.append({"rows": number, "weights": "repacked" if limit == REPACKED else "in place", **least})
    if options.json:
        print(json.dumps({"ms_per_token": table, "bytes_per_step": sent}))
        return
    print("CPU-ms a token     rows " + "".join(f"{side:>18}" for side in SIDES))
    for row in table:
        cells = "".join(f"{row[side]:9.3f} ({row[side] / row['whole']:5.2f}x)" for side in SIDES)
        print(f"{row['weights']:>18} {row['rows']:5} {cells}")
    for side, ways in sent.items():
        print(f"{side}: bytes that the first rank sends in a decode step of 16 rows: {ways}")


if __name__ == "__main__":
    main()
