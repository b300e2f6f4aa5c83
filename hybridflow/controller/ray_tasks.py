"""What processes have been asked to do and have not done yet, and what becomes of a run when one of them can't.

Whatever the driver waits for, it watches everything that is open: the first task that fails is told, a process that dies or
falls silent is lost, and where nothing gets done any more it is told who waits for whom.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import ObjectLostError, RayActorError, RayError

from hybridflow.controller.ray_group import WorkerGroup
from hybridflow.controller.ray_watch import Key, Silence, Watch, is_loss
from hybridflow.controller.recovery import RecoveryConfig
from hybridflow.core.errors import HybridFlowError, LostWorkersError, UserError, WorkerError

__all__ = ["OpenTasks", "Task", "ignore"]

BLAME_S = 0.5
SHOWN = 8


def ignore(result: Any) -> None:
    """For tasks that have none."""


@dataclass(frozen=True)
class Task:
    """Something that a process was asked to do. ``done`` gets its result.

    ``alone``: a member's own, which nobody waits for at the end of a step. ``single``: no other process works on it.
    ``needs``: calls whose outputs it reads, with the columns.
    """

    what: str
    group: WorkerGroup
    rank: int
    done: Callable[[Any], None] = ignore
    alone: bool = False
    single: bool = False
    needs: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def who(self) -> str:
        return f"{self.what} in {self.group.name(self.rank)}"

    @property
    def key(self) -> Key:
        return self.group.pool.name, self.rank


class OpenTasks:
    """The tasks of all processes. ``end`` ends all of them, when an error leaves nothing to go on with.

    With ``recovery.max_restarts``, lost workers are a LostWorkersError, and those that are left stay.
    """

    def __init__(self, timeout_s: float, recovery: RecoveryConfig, end: Callable[[], None]) -> None:
        self.timeout_s, self.recovery, self._end = timeout_s, recovery, end
        self.watch, self.paused = Watch(recovery.deadline_s), False
        self._open: dict[Any, Task] = {}

    def add(self, reference: Any, task: Task) -> None:
        self._open[reference] = task

    def wait(self, references: Collection[Any] | None = None) -> None:
        """Until these tasks are done, or all but those of members. An error of any open task is raised."""
        if references is None:
            references = [reference for reference, task in self._open.items() if not task.alone]
        self.wait_first([references])

    def wait_first(self, tasks: Sequence[Collection[Any]]) -> int:
        """Until all tasks of one of these collections are done; its number. See ``wait``."""
        since = time.monotonic()
        while True:
            missing = [[ref for ref in references if ref in self._open] for references in tasks]
            if [] in missing:
                return missing.index([])
            ready, _ = ray.wait(list(self._open), num_returns=1, timeout=1.0, fetch_local=False)
            if ready:
                self.settle()
            if lost := self.watch.look():
                raise self._loss(lost)
            if ready or self.paused:
                since = time.monotonic()
            elif time.monotonic() - since > self.timeout_s:
                raise self._stall([ref for references in missing for ref in references])

    def settle(self) -> None:
        """Take in all that is done."""
        references = list(self._open)
        ready, _ = ray.wait(references, num_returns=len(references), timeout=0, fetch_local=False)
        try:
            values = ray.get(ready)
        except RayError:
            values = [self._result(reference) for reference in ready]
        for reference, value in zip(ready, values, strict=True):
            self._open.pop(reference).done(value)

    def _result(self, reference: Any) -> Any:
        """Of a task that is done; if it failed, its blame is raised."""
        try:
            return ray.get(reference)
        except RayError as error:
            raise self._blame(reference, error) from None

    def _blame(self, reference: Any, error: Exception) -> Exception:
        """Of the errors that come together, the one that is the cause: a loss, or else the first in the program's order.

        The other ranks of a group fail too when one does, or wait for it for ever, so this ends all processes. Only a
        user's mistake that lets all others finish harms nobody else: what was learned can still be saved.
        """
        errors = self._errors({reference: error})
        task, cause = next((task, errors[ref]) for ref, task in self._open.items() if ref in errors)
        own = getattr(cause, "cause", None)
        if isinstance(own, UserError) and self._others_finish(self.timeout_s if task.single else BLAME_S):
            self._open.clear()
            return own
        died = {self._open[ref].key: Silence(0.0, e) for ref, e in errors.items() if is_loss(e)}
        if lost := self.watch.check() or died:
            return self._loss(lost)
        if self.recovery.max_restarts and isinstance(own or cause, ObjectLostError | RayActorError):
            return LostWorkersError(f"{task.who} misses what a lost worker had made", ())
        return self._ended(own if isinstance(own, HybridFlowError) else WorkerError(f"{task.who} failed: {cause}"))

    def _errors(self, errors: dict[Any, Exception]) -> dict[Any, Exception]:
        """Those that come within a moment, with the ones that are there; until one is a loss."""
        deadline = time.monotonic() + BLAME_S
        while time.monotonic() < deadline and not any(map(is_loss, errors.values())):
            others = [ref for ref in self._open if ref not in errors]
            ready, _ = ray.wait(others, num_returns=1, timeout=0.05, fetch_local=False) if others else ([], [])
            for ref in ready:
                try:
                    value = ray.get(ref)
                except RayError as another:
                    errors[ref] = another
                else:
                    self._open.pop(ref).done(value)
        return errors

    def _others_finish(self, timeout_s: float) -> bool:
        """Whether all that is open ends, well or not: what depends on a failed call fails by itself."""
        ready, _ = ray.wait(list(self._open), num_returns=len(self._open), timeout=timeout_s, fetch_local=False)
        return len(ready) == len(self._open)

    def _ended(self, error: Exception) -> Exception:
        self._end()
        return error

    # Losses.

    @contextlib.contextmanager
    def blaming(self) -> Iterator[None]:
        """Whatever the driver itself fetches from processes: says who is lost if it can't be had."""
        try:
            yield
        except RayError as error:
            if lost := self.watch.check():
                raise self._loss(lost) from None
            if self.recovery.max_restarts and isinstance(error, ObjectLostError):
                raise LostWorkersError(f"what a lost worker had made is missing: {_told(error)}", ()) from None
            raise

    def _loss(self, lost: Mapping[Key, Silence]) -> Exception:
        doing = {task.key: task for task in reversed(list(self._open.values()))}
        told = [_loss_told(key, silence, doing.get(key)) for key, silence in lost.items()]
        more = f" and {len(told) - SHOWN} more" if len(told) > SHOWN else ""
        return self._lost("; ".join(told[:SHOWN]) + more, [pool for pool, _ in lost], max(s.since_s for s in lost.values()))

    def _lost(self, message: str, pools: Sequence[str], seen_s: float) -> Exception:
        if self.recovery.max_restarts:
            return LostWorkersError(message, tuple(dict.fromkeys(pools)), seen_s)
        return self._ended(WorkerError(message))

    def _stall(self, missing: Collection[Any]) -> Exception:
        """Who waits for whom. The late ones are those that are at something, or don't answer."""
        tasks = [task for ref, task in self._open.items() if ref in missing]
        lines = [f"nothing was done for {self.timeout_s:g} s (runtime.timeout_s); still missing:"]
        late, depths = list[str](), Counter(task.key for task in self._open.values())
        for task in tasks[:SHOWN]:
            doing = task.group.ping(task.rank)
            late += [task.group.pool.name] if doing != "" else []
            state = "does not answer" if doing is None else f"is at {doing}" if doing else _waits(task)
            lines.append(f"{task.who}, which {state}")
            lines += [task.group.stacks(task.rank)] if doing else []
        queues = ", ".join(
            f"{depth} in worker {rank} of {pool!r}" for (pool, rank), depth in sorted(depths.items())[:SHOWN]
        )
        lines.append(f"open tasks: {queues}")
        return self._lost("\n".join(lines), late or [task.group.pool.name for task in tasks], self.timeout_s)

    def unfit(self, lost: Collection[str]) -> set[str]:
        """Forget what is open; of the pools that are not ``lost``, those that can't go on: which don't end their tasks, or
        failed in the middle of one. A task whose input is missing was never begun."""
        others = {ref: task for ref, task in self._open.items() if task.group.pool.name not in lost}
        self._open.clear()
        if not others:
            return set()
        wanted = {"num_returns": len(others), "timeout": self.recovery.deadline_s, "fetch_local": False}
        ready, hanging = ray.wait(list(others), **wanted)
        return {others[ref].group.pool.name for ref in [*hanging, *filter(_failed, ready)]}

    def clear(self) -> None:
        self._open.clear()

    def __contains__(self, reference: Any) -> bool:
        return reference in self._open

    @property
    def references(self) -> tuple[Any, ...]:
        return tuple(self._open)


def _failed(reference: Any) -> bool:
    try:
        ray.get(reference)
    except RayError as error:
        return not isinstance(getattr(error, "cause", None), RayError)
    return False


def _waits(task: Task) -> str:
    needs = "; ".join(f"{', '.join(columns)} of {writer}" for writer, columns in task.needs.items())
    return "is waiting for its inputs" + (f" ({needs})" if needs else "")


def _loss_told(key: Key, silence: Silence, task: Task | None) -> str:
    pool, rank = key
    where, during = f"worker {rank} of pool {pool!r}", f" during {task.what}" if task else ""
    if silence.error is None:
        return f"{where} has not answered for {silence.since_s:.0f} s (recovery.deadline_s){during}"
    return f"{where} died{during}: {_told(silence.error)}"


def _told(error: Exception) -> str:
    """What Ray knows of a death, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in lines if "exit" in line or "memory" in line or "died" in line), lines[0])
