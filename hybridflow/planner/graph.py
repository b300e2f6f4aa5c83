"""What a step does, for a planner: tasks of roles on numbers of tokens, and what passes between them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter

from hybridflow.core.errors import ConfigError
from hybridflow.core.roles import Kind
from hybridflow.planner.memory import Head
from hybridflow.planner.sizes import ModelSize

__all__ = ["Edge", "ModelRole", "Task", "TaskGraph"]


@dataclass(frozen=True)
class ModelRole:
    """A role with a model. Bytes a parameter: ``itemsize`` of weights and activations; ``gradient_bytes`` and
    ``optimizer_bytes`` of trained ones, 0 for roles that aren't trained.

    ``weights_of``: a sampler, the learner whose weights it draws with. ``frozen``: layers at the beginning before which
    nothing is trained; ``trains_head``: whether the matrix of the vocabulary is. ``token_budget``: tokens of a
    microbatch; None leaves microbatches and recomputing to the planner, else ``recompute`` says it.
    """

    name: str
    size: ModelSize
    head: Head = "policy"
    itemsize: int = 2
    gradient_bytes: float = 0.0
    optimizer_bytes: float = 0.0
    weights_of: str = ""
    frozen: int = 0
    trains_head: bool = True
    token_budget: int | None = None
    recompute: bool = False

    @property
    def trained(self) -> bool:
        return self.gradient_bytes > 0


@dataclass(frozen=True)
class Task:
    """A verb of a role in a step: ``rows`` of ``prompt`` + ``response`` tokens each in the mean, ``times`` over.

    kind "generate" reads prompts and draws responses; "forward" and "train" read both. ``deviation``: standard deviation
    of the lengths of responses, ``longest``: the most that there can be (0: all are equally long). ``group``:
    neighbouring rows that share a prompt. ``minibatches`` and ``epochs``: of an update. ``slots``: responses that a
    replica grows side by side at most (0: as many as fit). ``seconds``: of a task of a role without a model.
    """

    name: str
    role: str
    kind: Kind
    rows: int
    prompt: float
    response: float
    times: int = 1
    deviation: float = 0.0
    longest: float = 0.0
    group: int = 1
    minibatches: int = 1
    epochs: int = 1
    slots: int = 0
    seconds: float = 0.0

    @property
    def tokens(self) -> float:
        """Of prompts and responses, once."""
        return self.rows * (self.prompt + self.response)


@dataclass(frozen=True)
class Edge:
    """``bytes`` that ``reader`` takes of what ``writer`` wrote in a step, both names of tasks."""

    writer: str
    reader: str
    bytes: float = 0.0


@dataclass(frozen=True)
class TaskGraph:
    """Tasks in the order of the program. Tasks of roles that are not among ``roles`` have no model and run in the driver's
    turn. ConfigError: edges that name no task, or go in a circle."""

    roles: tuple[ModelRole, ...]
    tasks: tuple[Task, ...]
    edges: tuple[Edge, ...]

    def __post_init__(self) -> None:
        names = [task.name for task in self.tasks]
        for name in (name for edge in self.edges for name in (edge.writer, edge.reader) if name not in names):
            raise ConfigError([f"task graph: an edge names {name!r}, which is no task; the tasks are {', '.join(names)}"])
        _ = self.stages

    @cached_property
    def stages(self) -> dict[str, int]:
        """By task: below all that it reads from. Tasks of one stage don't depend on each other."""
        before = {task.name: {edge.writer for edge in self.edges if edge.reader == task.name} for task in self.tasks}
        stages: dict[str, int] = {}
        try:
            for name in TopologicalSorter(before).static_order():
                stages[name] = max((stages[other] + 1 for other in before[name]), default=0)
        except CycleError as error:
            raise ConfigError(
                [f"task graph: {' -> '.join(error.args[1])} is a circle; a task can't wait for itself"]
            ) from None
        return stages

    @property
    def tokens(self) -> float:
        """Of a step, as throughput counts them: prompts and responses of what is drawn, else of what is trained on."""
        drawn = [task.tokens * task.times for task in self.tasks if task.kind == "generate" and task.response]
        return sum(drawn) or max(task.tokens for task in self.tasks)
