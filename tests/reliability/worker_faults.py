"""Faults that strike worker processes of a run in this process, at a call of the program's."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

from hybridflow.controller.ray_runtime import RayRuntime


class Fault(NamedTuple):
    """``signals`` to processes (pool, rank), ``after_s`` the ``number``-th time, from 1, that the driver asks for ``what``:
    "actor.update", "actor.save", "publish", "mend" ..."""

    what: str
    number: int
    who: Sequence[tuple[str, int]]
    signals: signal.Signals = signal.SIGKILL
    after_s: float = 0.0


@contextmanager
def striking(*faults: Fault, when: list[float] | None = None) -> Iterator[list[Fault]]:
    """Those that have struck; ``when`` they did, in Unix seconds, is added to the list."""
    counts: dict[str, int] = {}
    struck: list[Fault] = []

    def asked(runtime: RayRuntime, what: str) -> None:
        counts[what] = counts.get(what, 0) + 1
        for fault in faults:
            if (fault.what, fault.number) == (what, counts[what]):
                struck.append(fault)
                when.append(time.time()) if when is not None else None
                if fault.after_s:
                    threading.Timer(fault.after_s, strike, (dict(runtime.pids), fault)).start()
                else:
                    strike(runtime.pids, fault)

    with (
        spied("call", asked, lambda role, name, *_: f"{role.name}.{name}"),
        spied("control", asked, lambda role, name, *_: f"{role.name}.{name}"),
        spied("publish", asked, lambda *_: "publish"),
        spied("mend", asked, lambda *_: "mend"),
        spied("resize", asked, lambda role, *_: f"{role}.resize"),
    ):
        yield struck


def strike(pids: dict[tuple[str, int], int], fault: Fault) -> None:
    for key in fault.who:
        os.kill(pids[key], fault.signals)


def spied(method: str, asked: Any, name: Any) -> Any:
    """The method as it is, but ``asked`` is told of every call behind it."""
    before = getattr(RayRuntime, method)

    def call(runtime: RayRuntime, *arguments: Any) -> Any:
        result = before(runtime, *arguments)
        asked(runtime, name(*arguments))
        return result

    return mock.patch.object(RayRuntime, method, call)
