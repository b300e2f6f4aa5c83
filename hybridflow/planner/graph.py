"""What a step does, for a planner: tasks of roles on numbers of tokens, and what passes between them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from math import isfinite

from hybridflow.core.errors import ConfigError
from hybridflow.core.roles import Kind
from hybridflow.planner.sizes import Head, ModelSize

__all__ = ["Edge", "ModelRole", "Task", "TaskGraph"]


@dataclass(frozen=True)
class ModelRole:
    """A role with a model. Bytes a parameter: ``itemsize`` of weights and activations; ``gradient_bytes`` and
    ``optimizer_bytes`` of ``trained_parameters``, in the mean, 0 for roles that aren't trained.

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

    @property
    def parameters(self) -> int:
        return self.size.parameters(self.head)

    @property
    def trained_parameters(self) -> int:
        return self.size.trained_parameters(self.head, self.frozen, self.trains_head) if self.trained else 0

    def with_size(self, size: ModelSize) -> ModelRole:
        """Another model, of which the same share of layers is frozen."""
        return replace(self, size=size, frozen=round(self.frozen * size.spec.num_layers / self.size.spec.num_layers))


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
    """``bytes`` that ``reader`` takes of what ``writer`` wrote in a step, both names of tasks; ``row_bytes`` of them don't
    grow with the lengths of rows."""

    writer: str
    reader: str
    bytes: float = 0.0
    row_bytes: float = 0.0


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
        if problems := [f"task graph: {task.name} {problem}" for task in self.tasks for problem in _problems(task)]:
            raise ConfigError(problems)
        _ = self.stages

    def role_of(self, task: Task) -> ModelRole | None:
        """None: it has no model."""
        return next((role for role in self.roles if role.name == task.role), None)

    def with_model(self, size: ModelSize, roles: Collection[str] | None = None) -> TaskGraph:
        """With another model in some ``roles``, or in all of them."""
        known = [role.name for role in self.roles]
        for name in roles or ():
            if name not in known:
                raise ConfigError([f"{name}: no role with a model; those are {', '.join(known)}"])
        changed = known if roles is None else [*roles]
        return replace(self, roles=tuple(role.with_size(size) if role.name in changed else role for role in self.roles))

    def with_lengths(self, prompt: float, response: float, deviation: float = 0.0, longest: float = 0.0) -> TaskGraph:
        """With other mean lengths of prompts and responses; what has no tokens keeps none. ``deviation``, ``longest``: of
        responses, see ``Task``."""

        def changed(task: Task) -> Task:
            return replace(task, prompt=prompt, response=response, deviation=deviation, longest=longest)

        return self._with_tasks(tuple(changed(task) if task.tokens else task for task in self.tasks))

    def with_rows(self, rows: int) -> TaskGraph:
        """With so many responses in a step, or, where none is drawn, rows to train on; other tasks in proportion."""
        drawn = [task for task in self.tasks if task.kind == "generate"] or list(self.tasks)
        before, group = max(task.rows for task in drawn), max(task.group for task in drawn)
        if rows < 1 or rows % group:
            raise ConfigError([f"{rows} rows: expected a number above 0, and a multiple of {group} responses to a prompt"])
        return self._with_tasks(tuple(replace(task, rows=max(1, round(task.rows * rows / before))) for task in self.tasks))

    def _with_tasks(self, tasks: tuple[Task, ...]) -> TaskGraph:
        """Edges carry as much more as what they come from has more rows and tokens."""
        before, after = ({task.name: task for task in found} for found in (self.tasks, tasks))
        edges = []
        for edge in self.edges:
            old, new = before[edge.writer], after[edge.writer]
            row_bytes = edge.row_bytes * new.rows / old.rows
            growing = (edge.bytes - edge.row_bytes) * (new.tokens / old.tokens if old.tokens else new.rows / old.rows)
            edges.append(replace(edge, bytes=row_bytes + growing, row_bytes=row_bytes))
        return replace(self, tasks=tasks, edges=tuple(edges))

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


def _problems(task: Task) -> Iterator[str]:
    numbers = {
        "prompt": task.prompt,
        "response": task.response,
        "deviation": task.deviation,
        "longest": task.longest,
        "seconds": task.seconds,
    }
    for name, number in numbers.items():
        if not isfinite(number) or number < 0:
            yield f"has {name} = {number:g}; expected 0 or more"
    for name, count in {"rows": task.rows, "times": task.times, "group": task.group}.items():
        if count < 1:
            yield f"has {name} = {count}; expected 1 or more"
    if task.kind == "generate" and task.response == 0:
        yield "draws responses of 0 tokens; expected more"
    if 0 < task.longest < task.response:
        yield f"has responses of {task.response:g} tokens in the mean, but of {task.longest:g} at most"
