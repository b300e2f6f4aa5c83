"""What saving costs a step, and how much memory saving and exporting take.

    python benchmarks/checkpoint.py [--model 20M] [--sections step,memory] [--rounds 5] [--folder FOLDER] [--json]

``step``: an optimizer step by itself, after a save that is waited for, and beside one that is written meanwhile; the three
take turns in one process, of one thread for training. Medians of the seconds before the step begins, of those that the step
itself takes longer, and CPU-seconds, in which those of the writing thread are counted until the file is on disk.

``memory``: on pp 2 x tp 2, four processes: how far the resident memory of each grows while it saves, and while all export,
against what it writes and against the model.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from parallel import in_processes, networks_of, on_mesh, resident, rows

from hybridflow.commands.bench import random_spec
from hybridflow.core.placement import Mesh
from hybridflow.models.spec import DecoderSpec
from hybridflow.models.weights import save_decoder
from hybridflow.ops.losses import ppo_clip
from hybridflow.workers.learner import Learner

SMOLLM2 = DecoderSpec("llama", 49152, 576, 1536, 30, 9, 3, 64, 8192)
Row = dict[str, Any]


def spec_of(model: str) -> DecoderSpec:
    return SMOLLM2 if model == "135M" else random_spec(model)


def step(args: argparse.Namespace) -> Iterator[Row]:
    one = on_mesh(partial(networks_of, spec_of(args.model)), Mesh(), 0, {})
    assert one is not None
    batch = rows(args.rows, one.model.decoder.spec.vocab_size, varied=True)
    learn = partial(one.update, batch, ppo_clip.bind(clip=0.2))
    learn()
    found: dict[str, list[tuple[float, float, float]]] = {"step": [], "saved first": [], "saved meanwhile": []}
    for _ in range(args.rounds):
        for kind, times in found.items():
            times.append(measured(one, learn, kind, args.folder))
    medians = {kind: [statistics.median(column) for column in zip(*times, strict=True)] for kind, times in found.items()}
    _, alone, cpu = medians.pop("step")
    yield {
        "section": "step",
        "model": args.model,
        "bytes": sum(path.stat().st_size for path in args.folder.rglob("*.safetensors")),
        "step_s": alone,
        "waits_s": {kind: waits for kind, (waits, _, _) in medians.items()},
        "slower_s": {kind: step - alone for kind, (_, step, _) in medians.items()},
        "cpu_s": {kind: total - cpu for kind, (_, _, total) in medians.items()},
    }


def measured(one: Learner, learn: Callable[[], Any], kind: str, folder: Path) -> tuple[float, float, float]:
    """(seconds until the step begins, seconds of the step, CPU-seconds until all is done)"""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    os.sync()
    start, cpu = time.perf_counter(), time.process_time()
    if kind != "step":
        one.save(folder / "actor")
    if kind == "saved first":
        one.saved(True)
    begun = time.perf_counter()
    learn()
    done = time.perf_counter()
    one.saved(True)
    return begun - start, done - begun, time.process_time() - cpu


def memory(args: argparse.Namespace) -> Iterator[Row]:
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "131072"
    yield from in_processes(partial(grow, args.model, args.folder), 4)


def grow(model: str, folder: Path, rank: int) -> Row:
    one = on_mesh(partial(networks_of, spec_of(model)), Mesh(tp=2, pp=2), rank, {})
    assert one is not None
    spec = one.model.decoder.spec
    one.update(rows(4, spec.vocab_size, varied=True), ppo_clip.bind(clip=0.2))
    one.optimizer.zero_grad()
    folder.mkdir(parents=True, exist_ok=True)
    row: Row = {"section": "memory", "model": model, "rank": rank, "resident": resident()}
    with Peak() as saving:
        one.save(folder / "actor")
        (files,) = one.saved(True)
    with Peak() as exporting:
        one.export(lambda policy: save_decoder(policy.decoder, folder / "model"))
    held = sum(parameter.nbytes for parameter in one.model.parameters())
    sizes = {"size": 4 * one.num_parameters()[0], "largest_tensor": 4 * spec.vocab_size * spec.hidden_size, "held": held}
    took = {"written": sum(f.num_bytes for f in files or ()), "saving": saving.bytes, "exporting": exporting.bytes}
    return {**row, **sizes, **took}


class Peak:
    """How far the resident memory grows inside of it."""

    def __enter__(self) -> Peak:
        Path("/proc/self/clear_refs").write_text("5")
        self.before = resident()
        return self

    def __exit__(self, *_: object) -> None:
        self.bytes = resident("VmHWM") - self.before


def line_of(row: Row) -> str:
    if row["section"] == "step":
        told = ", ".join(
            f"{kind}: it waits {waits:.2f} s, takes {row['slower_s'][kind]:+.2f} s, {row['cpu_s'][kind]:.2f} CPU-s in all"
            for kind, waits in row["waits_s"].items()
        )
        return f"{row['model']}, {row['bytes'] / 2**20:.0f} MiB, a step of {row['step_s']:.2f} s; {told}"
    keys = ("size", "held", "written", "saving", "exporting", "largest_tensor")
    size, held, written, saving, exporting, largest = (f"{row[key] / 2**20:.0f}" for key in keys)
    return (
        f"{row['model']} on pp 2 x tp 2, rank {row['rank']}: of {size} MiB it holds {held}; saving {written} MiB takes "
        f"{saving}, exporting {exporting} (largest tensor {largest})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="20M", help="5M, 20M, ... or 135M")
    parser.add_argument("--sections", default="step,memory")
    parser.add_argument("--rows", type=int, default=16, help="of a step")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to write; by default a temporary folder")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for section in args.sections.split(","):
            args.folder = Path(folder) / section
            for row in {"step": step, "memory": memory}[section](args):
                print(json.dumps(row) if args.json else line_of(row), flush=True)


if __name__ == "__main__":
    main()
