"""The call graph of one step as plain data: who runs which verb, on how much, and which columns pass from whom to whom."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from hybridflow.core.roles import Kind

__all__ = ["Call", "Edge", "Graph", "RoleSize"]


@dataclass(frozen=True)
class RoleSize:
    """A role and what it holds. Bytes: of the weights (in ``dtype``) of all its networks, and of the gradients and the
    optimizer of what is trained; activations and caches come on top.

    ``model``: whose weights it starts from, or which functions it runs. ``where``: the device, or what else runs it.
    ``minibatches`` and ``epochs``: of an update, 0 for roles that are not trained.
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


@dataclass(frozen=True)
class Call:
    """One verb of a role on one batch, or (``kind`` "source") where rows come from. Calls are numbered in their order.

    ``function``: the declared function that it is given, if any. ``tokens_in``: tokens (steps, in environments) of the rows
    that it reads, prompts alone where it generates; ``tokens_out``: those that it generates. ``times``: how often a step
    makes the call.
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


@dataclass
class Graph:
    """Calls and edges in the order in which the program makes them, and the roles that it has."""

    roles: list[RoleSize] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)

    @property
    def unit(self) -> str:
        """What the time axis counts."""
        return "steps" if self.calls[0].role == "environment" else "tokens"

    def read_by(self, call: Call) -> Iterator[tuple[Call, list[Edge]]]:
        """(writer, what it wrote) of everything that ``call`` reads."""
        edges = [edge for edge in self.edges if edge.reader == call.number]
        for number in dict.fromkeys(edge.writer for edge in edges):
            yield self.calls[number], [edge for edge in edges if edge.writer == number]
