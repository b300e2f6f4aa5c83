"""Small workers for the tests of the Ray runtime: each does one thing that the runtime has to carry, or to survive."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import ray
import torch

from hybridflow.controller.protocols import (
    ALL_TO_ALL,
    DP,
    ONE_TO_ALL,
    THREE_D,
    THREE_D_ALL_MICRO_DP,
    THREE_D_PP_ONLY,
    VIEW,
)
from hybridflow.core.batch import Batch, Ragged, objects
from hybridflow.core.errors import ConfigError, RewardError
from hybridflow.core.placement import Mesh, TransferProtocol
from hybridflow.core.roles import Role, WorkerContext, control, remote

MARKS = {p.name: p for p in (ONE_TO_ALL, DP, THREE_D, THREE_D_ALL_MICRO_DP, VIEW)}
SUMMANDS = (1e16, 1.0, -1e16)  # their sum depends on the order


def _mark(protocol: TransferProtocol) -> Callable[..., Batch]:
    @remote(protocol, reads=("sample_id", "tokens"), writes=("slot",))
    def mark(self: Marker, batch: Batch, /) -> Batch:
        return self.see(batch)

    return mark


class Marker:
    """Tells who had which rows: writes its rank to ``slot``, and remembers the ``sample_id`` that it saw."""

    def __init__(self, context: WorkerContext) -> None:
        self.context, self.seen = context, list[int]()

    def see(self, batch: Batch) -> Batch:
        self.seen = batch["sample_id"].tolist()
        self.context.metrics.count("calls", 1)
        self.context.metrics.add("rank", self.context.rank)
        return Batch({"slot": np.full(len(batch), self.context.rank)}, len(batch))

    one_to_all, dp, three_d = _mark(ONE_TO_ALL), _mark(DP), _mark(THREE_D)
    replicas, view = _mark(THREE_D_ALL_MICRO_DP), _mark(VIEW)

    @control(ALL_TO_ALL)
    def all_seen(self) -> list[list[int]]:
        return [self.seen]

    @control(ALL_TO_ALL)
    def echo(self, entries: list[str], more: list[int]) -> list[tuple[int, str, int]]:
        (entry,), (number,) = entries, more
        return [(self.context.rank, entry, number)]

    @control(THREE_D_PP_ONLY)
    def stages(self) -> list[int]:
        return [self.context.rank]

    @control(ONE_TO_ALL)
    def everyone(self) -> list[tuple[int, str]]:
        return [(self.context.rank, "x"), (self.context.rank, "y")]

    @control
    def plain(self, what: str) -> str:
        return f"{what} {self.context.rank}"

    @control(ALL_TO_ALL)
    def sums(self) -> list[float]:
        """Over the blocks, of 2^rank: whose terms are in it can be read off the bits."""
        return [float(self.context.sum(torch.tensor([2.0**self.context.rank])))]


class Maker:
    """Makes columns of every kind from ``sample_id``, and reads them; also a learner with one number as its weights."""

    def __init__(self, context: WorkerContext, scale: float = 1.0) -> None:
        self.context, self.scale, self.version = context, scale, 0
        self.source: Any = None
        self.loads = 0

    @remote(THREE_D_ALL_MICRO_DP, reads=("sample_id",), writes=("tokens", "response", "scores"), kind="generate")
    def make(self, batch: Batch, /) -> Batch:
        """Row i has i % 4 tokens i; a text; i / 2 as its score."""
        ids = batch["sample_id"]
        tokens = Ragged.from_rows([[i] * (i % 4) for i in ids], np.int64)
        return Batch({"tokens": tokens, "response": objects(f"row {i}" for i in ids), "scores": (ids / 2).astype("f4")})

    @remote(THREE_D, reads=("sample_id", "tokens"), writes=("values",))
    def double(self, batch: Batch, /) -> Batch:
        tokens = batch.ragged("tokens")
        return Batch({"values": tokens.like(tokens.values.astype(np.float32) * 2 * self.scale)})

    @remote(THREE_D, reads=("response",), writes=("prompt_text",))
    def shout(self, batch: Batch, /) -> Batch:
        return Batch({"prompt_text": objects(text.upper() for text in batch["response"])}, len(batch))

    @remote(DP, reads=("sample_id",), writes=("sample_id", "scores"), rows="new")
    def split(self, batch: Batch, /) -> Batch:
        """Two rows for each row, that of ``sample_id`` i first; none for rows that 3 divides."""
        ids = np.concatenate([[10 * i, 10 * i + 1] for i in batch["sample_id"] if i % 3] or [np.zeros(0)]).astype(np.int64)
        return Batch({"sample_id": ids, "scores": (ids / 10).astype(np.float32)})

    @remote(VIEW, reads=("sample_id", "tokens", "scores"), kind="train")
    def update(self, batch: Batch, loss: None = None, /) -> Batch:
        """Adds the scores of rows i, i + blocks ... of block i; never looks at the tokens."""
        mine = batch.rows(np.arange(self.context.block, len(batch), self.context.mesh.dp))
        total = self.context.sum(torch.tensor([float(mine["scores"].sum())]))
        self.context.metrics.add("total", float(total))
        self.scale, self.version = float(total), self.version + 1
        return Batch({}, len(batch))

    @remote(THREE_D, reads=("scores",), writes=("costs",))
    def copy_scores(self, batch: Batch, /) -> Batch:
        return Batch({"costs": batch["scores"]})

    @remote(THREE_D, reads=("sample_id",), writes=("observations",))
    def fill_memory(self, batch: Batch, width: int, /) -> Batch:
        values = np.repeat(batch["sample_id"].astype(np.float32)[:, None], width, 1)
        return Batch({"observations": Ragged(values, np.ones(len(batch), np.int64))})

    @remote(THREE_D, reads=("observations",), writes=("scores",))
    def add_up(self, batch: Batch, /) -> Batch:
        return Batch({"scores": np.array([row.sum() for row in batch["observations"]], np.float32)}, len(batch))

    @remote(DP, reads=("sample_id",), writes=("slot",))
    def add_in_order(self, batch: Batch, slow: int, /) -> Batch:
        time.sleep(0.2 * (self.context.rank == slow))
        self.context.metrics.add("sum", SUMMANDS[self.context.rank], len(SUMMANDS) ** -1)
        return Batch({"slot": batch["sample_id"]})

    @control(ALL_TO_ALL)
    def pids(self) -> list[int]:
        return [os.getpid()]

    @control(ALL_TO_ALL)
    def nodes(self) -> list[str]:
        return [ray.get_runtime_context().get_node_id()]

    @control
    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "big": np.zeros(10)}

    @control
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale = state["scale"]

    # As learner and sampler.

    @remote(THREE_D, reads=("tokens",), writes=("learner_log_probs",))
    def compute_log_probs(self, batch: Batch, /) -> Batch:
        return Batch({"learner_log_probs": batch.ragged("tokens").like(np.zeros(batch.lengths.sum(), np.float32))})

    @control
    def read_version(self) -> int:
        version: int = self.source.version
        return version

    @control
    def num_buckets(self) -> int:
        return 2

    @control
    def weights(self, bucket: int) -> tuple[int, float, int]:
        return bucket, self.scale, self.version

    @control
    def attach(self, source: Any) -> None:
        self.source = source

    @remote(DP, reads=("sample_id",), writes=("scores", "slot"))
    def rollout(self, batch: Batch, /) -> Batch:
        """The weights that the sampler reads, and how often they came."""
        scale, loads = self.source.scale, self.source.loads
        return Batch({"scores": np.full(len(batch), scale, np.float32), "slot": np.full(len(batch), loads)})


class Drawer:
    """A sampler without state: which weights it reads, and which process it is."""

    def __init__(self, context: WorkerContext) -> None:
        self.context = context
        self.source: Any = None

    @control
    def attach(self, source: Any) -> None:
        self.source = source

    @remote(THREE_D_ALL_MICRO_DP, reads=("sample_id",), writes=("scores", "slot"))
    def rollout(self, batch: Batch, /) -> Batch:
        rank = np.full(len(batch), self.context.rank)
        return Batch({"scores": np.full(len(batch), self.source.scale, np.float32), "slot": rank})


class Copy:
    """What a sampler reads of a ``Maker`` elsewhere."""

    def __init__(self, context: WorkerContext) -> None:
        self.scale, self.version, self.loads = 0.0, 0, 0

    def load(self, parts: Sequence[tuple[int, float, int]], last: bool) -> None:
        ((bucket, scale, version),) = parts
        assert last == (bucket == 1), "buckets come in their order"
        if last:
            self.scale, self.version, self.loads = scale, version, self.loads + 1


class Counter:
    """Counts how often each row came, which goes with the row."""

    dealt = DP

    def __init__(self, context: WorkerContext) -> None:
        self.context, self.counts = context, dict[int, int]()

    @remote(DP, reads=("sample_id",), writes=("slot", "scores"))
    def count(self, batch: Batch, seconds: float = 0.0, /) -> Batch:
        """``slot``: how often; ``scores``: the rank. Takes ``seconds`` a row."""
        self.context.metrics.count("rows", len(batch))
        time.sleep(seconds * len(batch))
        for row in batch["sample_id"].tolist():
            self.counts[row] = self.counts.get(row, 0) + 1
        counts = np.array([self.counts[row] for row in batch["sample_id"].tolist()], np.int64)
        return Batch({"slot": counts, "scores": np.full(len(batch), self.context.rank, np.float32)}, len(batch))

    @control(ONE_TO_ALL)
    def state_dict(self) -> list[tuple[int, int]]:
        return sorted(self.counts.items())

    @control
    def load_state_dict(self, state: Sequence[tuple[int, int]]) -> None:
        self.counts = {row: count for row, count in state if self._is_mine(row)}

    def hand_over(self, mesh: Mesh, /) -> list[tuple[int, int]]:
        self.context.mesh = mesh
        given = [(row, count) for row, count in self.counts.items() if not self._is_mine(row)]
        self.counts = {row: count for row, count in self.counts.items() if self._is_mine(row)}
        return given

    def take_over(self, states: Sequence[tuple[int, int]], /) -> None:
        self.counts |= {row: count for row, count in states if self._is_mine(row)}

    def _is_mine(self, row: int) -> bool:
        """Of six rows."""
        rank = self.context.rank
        return rank < self.context.mesh.size and row in self.dealt.distribute(np.ones(6, np.int64), self.context.mesh)[rank]

    @control(ALL_TO_ALL)
    def pids(self) -> list[int]:
        return [os.getpid()]

    @control(ALL_TO_ALL)
    def threads(self) -> list[int]:
        return [torch.get_num_threads()]


class Roamer(Counter):
    """Rows are dealt as those of samplers are."""

    dealt = THREE_D_ALL_MICRO_DP


class Sleeper:
    """Takes known times."""

    def __init__(self, context: WorkerContext) -> None:
        self.context = context

    @remote(ONE_TO_ALL, reads=("sample_id",), writes=("scores",))
    def score(self, batch: Batch, seconds: float, /) -> Batch:
        time.sleep(seconds)
        return Batch({"scores": np.zeros(len(batch), np.float32)})

    @remote(ONE_TO_ALL, reads=("scores",), writes=("costs",))
    def judge(self, batch: Batch, seconds: float, /) -> Batch:
        time.sleep(seconds)
        return Batch({"costs": np.zeros(len(batch), np.float32)})

    @remote(ONE_TO_ALL, reads=("costs", "scores"), kind="train")
    def update(self, batch: Batch, seconds: float, /) -> Batch:
        time.sleep(seconds)
        return Batch({}, len(batch))

    @remote(ONE_TO_ALL)
    def spin(self, batch: Batch, seconds: float, /) -> Batch:
        """Never lets go of the interpreter by itself."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            pass
        return Batch({}, len(batch))

    @remote(ONE_TO_ALL)
    def walk(self, batch: Batch, steps: int, /) -> Batch:
        """Many short pieces of work."""
        for _ in range(steps):
            self.context.breathe()
            time.sleep(0.02)
        return Batch({}, len(batch))

    @remote(ONE_TO_ALL)
    def sleep(self, batch: Batch, seconds: float, /) -> Batch:
        time.sleep(seconds)
        return Batch({}, len(batch))


class Troubled:
    """Fails in every way there is."""

    def __init__(self, context: WorkerContext, start_s: float = 0.0) -> None:
        self.context = context
        time.sleep(start_s)

    @control(ALL_TO_ALL)
    def pids(self) -> list[int]:
        return [os.getpid()]

    def _alone(self, what: Callable[[], Any]) -> Batch:
        """Rank 1 does it, the others wait for it in a sum."""
        if self.context.rank == 1:
            what()
        self.context.sum(torch.zeros(1))
        raise AssertionError("rank 1 has taken part")

    @remote(DP, reads=("sample_id",))
    def raise_alone(self, batch: Batch, /) -> Batch:
        return self._alone(lambda: int("no number"))

    @remote(DP, reads=("sample_id",))
    def die_alone(self, batch: Batch, /) -> Batch:
        return self._alone(lambda: os._exit(3))

    @remote(DP, reads=("sample_id",))
    def refuse_alone(self, batch: Batch, /) -> Batch:
        return self._alone(self._refuse)

    def _refuse(self) -> Batch:
        raise RewardError("reward.function: 'nobody' is not defined")

    @remote(ONE_TO_ALL, reads=("sample_id",), writes=("scores",))
    def refuse(self, batch: Batch, /) -> Batch:
        return self._refuse()

    @control
    def configure(self) -> int:
        raise ConfigError(["a.b: first", "c: second"])

    @remote(DP, reads=("sample_id",))
    def hang_alone(self, batch: Batch, /) -> Batch:
        return self._alone(lambda: time.sleep(1000))

    @control(ALL_TO_ALL)
    def patience_s(self) -> list[float]:
        """How long a sum waits for the other ranks."""
        return [torch.distributed.group.WORLD._get_backend(torch.device("cpu")).options._timeout.total_seconds()]

    @remote(ONE_TO_ALL, reads=("sample_id",), writes=("scores",))
    def undeclared(self, batch: Batch, /) -> Batch:
        return Batch({"scores": np.zeros(len(batch), np.float32), "slot": batch["sample_id"]})

    @remote(ONE_TO_ALL, reads=("sample_id",), writes=("scores", "slot"))
    def incomplete(self, batch: Batch, /) -> Batch:
        return Batch({"slot": batch["sample_id"]})

    @remote(ONE_TO_ALL, reads=("sample_id",), writes=("slot",))
    def shorter(self, batch: Batch, /) -> Batch:
        return Batch({"slot": batch["sample_id"][1:]})

    @remote(ONE_TO_ALL, reads=("sample_id",), writes=("slot",))
    def change(self, batch: Batch, /) -> Batch:
        batch["sample_id"][0] = 7
        return Batch({"slot": batch["sample_id"]})


def role(name: str, worker: Any, **args: Any) -> Role[Any]:
    return Role(name, worker, args)
