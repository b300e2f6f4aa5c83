"""Replay buffers for tests, over rows in one worker or in several, as a runtime puts them together."""

from __future__ import annotations

import pickle
from functools import partial
from pathlib import Path

import numpy as np

from hybridflow.controller.manifest import Output, describe
from hybridflow.core.batch import Batch
from hybridflow.core.columns import Lazy, take
from hybridflow.core.placement import Mesh
from hybridflow.core.roles import WorkerContext
from hybridflow.rollout.replay import Replay
from hybridflow.workers.replay_rows import ReplayWorker

PAIRS = np.dtype((np.float32, (2,)))
NUMBER = np.dtype(np.int64)


class Rows:
    """What a handle of ``shards`` workers does, without processes between them."""

    def __init__(self, shards, **args):
        mesh = Mesh(dp=shards)
        self.workers = [ReplayWorker(WorkerContext(mesh=mesh, rank=rank), **args) for rank in range(shards)]

    def call(self, verb, batch, *arguments):
        outputs = [getattr(worker, verb)(batch, *arguments).freeze() for worker in self.workers]
        manifests = [describe(output, None, 0, "", ("", rank)) for rank, output in enumerate(outputs)]
        source = Output(manifests, lambda piece, name, rows: take(outputs[piece][name], rows), verb)
        return Batch({name: Lazy(((source, name),)) for name in outputs[0].columns})

    def __getattr__(self, verb):
        return partial(self.call, verb)


def make_replay(config, seed, gamma, *, observation=PAIRS, action=NUMBER, memory=None, shards=1, **others):
    types = {"observations": observation, "actions": action, "final_observations": observation}
    types |= {} if memory is None else {"memory": memory}
    args = {"capacity": config.num_units, "types": types, "sequence": config.sequence, "spill": config.spill}
    return Replay(config, seed, gamma, Rows(shards, **args), **others)


def move(replay: Replay, other: Replay, folder: Path) -> Replay:
    """``other`` goes on where ``replay`` is, through files."""
    folder.mkdir(parents=True)
    states = [worker.save(folder / "replay") for worker in replay.rows.workers]
    files = [file for worker in replay.rows.workers for files in worker.saved(True) for file in files]
    other.load_state_dict(pickle.loads(pickle.dumps(replay.state_dict())))
    for worker in other.rows.workers:
        worker.load(folder / "replay", states[0], files)
    return other


def values(batch: Batch):
    """All columns as plain arrays."""
    return {name: (c.values if hasattr(c := batch[name], "values") else c) for name in batch.columns}
