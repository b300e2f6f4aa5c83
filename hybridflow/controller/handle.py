"""Handles: what a program holds instead of a worker, on every runtime."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from hybridflow.core.batch import Batch
from hybridflow.core.errors import ContractError
from hybridflow.core.roles import Role, Verb, is_control, verb_of

__all__ = ["Handle", "check_reads"]


class Caller(Protocol):
    """What a runtime does when a handle is used."""

    def call(
        self, role: Role[Any], name: str, verb: Verb, batch: Batch, arguments: tuple[Any, ...], rank: int | None = None, /
    ) -> Batch: ...
    def control(self, role: Role[Any], name: str, method: Any, arguments: tuple[Any, ...], /) -> Any: ...


class Handle:
    """Looks like the role's worker: its verbs and control methods go to the runtime, and it has nothing else.

    ``rank``: verbs go to this process of the role alone.
    """

    def __init__(self, runtime: Caller, role: Role[Any], rank: int | None = None) -> None:
        self.runtime, self.role, self.rank = runtime, role, rank

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self.role.worker, name, None)
        verb = verb_of(method)
        if verb is not None:
            return lambda batch, *arguments: self.runtime.call(self.role, name, verb, batch, arguments, self.rank)
        if is_control(method):
            return lambda *arguments: self.runtime.control(self.role, name, method, arguments)
        raise AttributeError(f"role {self.role.name!r} has no verb {name!r}")


def check_reads(where: str, reads: Sequence[str], batch: Batch) -> None:
    """ContractError if ``batch`` lacks a column that the call ``where`` reads."""
    missing = [column for column in reads if column not in batch]
    if missing:
        raise ContractError(f"{where} reads {', '.join(missing)}; the batch has {', '.join(sorted(batch.columns))}")
