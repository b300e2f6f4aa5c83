"""The call graph of one step as plain data: who runs which verb, where, on how much, and what passes from whom to whom."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from hybridflow.core.roles import Kind

__all__ = ["DRIVER", "Call", "Edge", "Graph", "PoolSize", "RoleSize", "Transfer"]

DRIVER = "driver"  # where sources and buffers are, and without pools every role


@dataclass(frozen=True)
class RoleSize:
    """A role and what it holds. Bytes: of the weights (in ``dtype``) of all its networks, and of the gradients and the
    optimizer of what is trained; activations and caches come on top.

    ``model``: whose weights it starts from, or which functions it runs. ``where``: the device, or what else runs it.
    ``minibatches`` and ``epochs``: of an update, 0 for roles that are not trained. ``pool`` and ``mesh``: whose processes
    run it, and how its ranks are laid out; each data-parallel rank holds all that is counted here. ``copy_of``: the learner
    whose weights, ``weight_bytes`` of them, it gets in every step.
    """

    name: str
    worker: str
    where: str
    model: str
    parameters: int = 0
    trained: int = 0
    dtype: str = ""
    weight_bytes: int = 0
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    minibatches: int = 0
    epochs: int = 0
    pool: str = DRIVER
    mesh: str = "1"
    copy_of: str = ""


@dataclass(frozen=True)
class PoolSize:
    """Worker processes, ``nodes[i]`` of them on one machine, and what the roles on them hold in a worker that has all of
    them, in bytes."""

    name: str
    nodes: tuple[int, ...]
    roles: tuple[str, ...]
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int


@dataclass(frozen=True)
class Call:
    """One verb of a role on one batch, or (``kind`` "source") where rows come from. Calls are numbered in their order.

    ``function``: the declared function that it is given, if any. ``tokens_in``: tokens (steps, in environments) of the rows
    that it reads, prompts alone where it generates; ``tokens_out``: those that it generates. ``times``: how often a step
    makes the call. ``protocol``: how its rows reach the ranks of the role, empty where no role is called.
    """

    number: int
    role: str
    verb: str
    kind: Kind | str
    function: str
    rows: int
    tokens_in: int
    tokens_out: int
    writes: tuple[str, ...]
    times: int = 1
    protocol: str = ""

    @property
    def name(self) -> str:
        return f"{self.role}.{self.verb}"


@dataclass(frozen=True)
class Edge:
    """A column from the call that wrote it to one that reads it, by their numbers. ``bytes``: None for text and objects."""

    column: str
    dtype: str
    bytes: int | None
    writer: int
    reader: int


@dataclass(frozen=True)
class Transfer:
    """Bytes that the roles of one pool (or the driver) read of what those of another, or of the same, wrote in a step.

    What a call reads is counted once for each time that it was written, however many ranks share it; text and objects are
    not. ``what``: "columns", or "weights", which a sampler on another pool than its learner gets.
    """

    source: str
    target: str
    what: str
    bytes: int


@dataclass
class Graph:
    """Calls and edges in the order in which the program makes them, the roles that it has, and their pools.

    Without ``pools`` everything is in one process.
    """

    roles: list[RoleSize] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)
    pools: list[PoolSize] = field(default_factory=list)

    @property
    def unit(self) -> str:
        """What the time axis counts."""
        return "steps" if self.calls[0].role == "environment" else "tokens"

    def read_by(self, call: Call) -> Iterator[tuple[Call, list[Edge]]]:
        """(writer, what it wrote) of everything that ``call`` reads."""
        edges = [edge for edge in self.edges if edge.reader == call.number]
        for number in dict.fromkeys(edge.writer for edge in edges):
            yield self.calls[number], [edge for edge in edges if edge.writer == number]

    def pool_of(self, call: Call) -> str:
        """Where it runs."""
        return next((role.pool for role in self.roles if role.name == call.role), DRIVER)

    def stages(self) -> list[list[Call]]:
        """The order of execution: a call starts when all that it reads is there and the calls before it on its pool are
        done, so the calls of one stage run side by side. Sources, which wait for nobody, are in no stage."""
        levels = self.levels(self.pool_of)
        calls = [call for call in self.calls if call.kind != "source"]
        return [
            [call for call in calls if levels[call.number] == level]
            for level in sorted({levels[call.number] for call in calls})
        ]

    def levels(self, turn: Callable[[Call], str]) -> dict[int, int]:
        """By call: below all that it reads from, and below the calls before it that have the same ``turn``."""
        levels: dict[int, int] = {}
        last: dict[str, int] = {}
        for call in self.calls:
            key = f"source {call.role}" if call.kind == "source" else turn(call)
            above = [levels[writer.number] for writer, _ in self.read_by(call)]
            levels[call.number] = last[key] = max([*above, last.get(key, -1)], default=-1) + 1
        return levels

    def transfers(self) -> list[Transfer]:
        """What passes between pools, and inside them, where source and target are the same."""
        sizes: dict[tuple[str, str, str], int] = {}
        for edge in self.edges:
            writer = self.calls[edge.writer]
            way = (self.pool_of(writer), self.pool_of(self.calls[edge.reader]), "columns")
            sizes[way] = sizes.get(way, 0) + (edge.bytes or 0) * writer.times
        pools = {role.name: role.pool for role in self.roles}
        for role in self.roles:
            if role.copy_of:
                sizes[pools[role.copy_of], role.pool, "weights"] = role.weight_bytes
        return [Transfer(*way, size) for way, size in sorted(sizes.items())]
