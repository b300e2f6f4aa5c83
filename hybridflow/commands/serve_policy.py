"""The serve command."""

from __future__ import annotations

import ipaddress
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from hybridflow.build_networks import WEIGHTS
from hybridflow.core.errors import ModelError, UserError
from hybridflow.models.exported import read_policy
from hybridflow.policy import Policy
from hybridflow.serving.server import Limits, PolicyServer
from hybridflow.telemetry.rundir import RunDirectory

__all__ = ["serve_policy"]

LOOK_S = 0.1
"""between looks at what a run has exported"""


def serve_policy(run: Path, address: tuple[str, int], limits: tuple[float, int, int], follow: bool) -> None:
    """Serve until SIGINT or SIGTERM, then answer what was asked. The line that tells the URL comes once it answers.

    ``limits``: budget in milliseconds, and the most observations of a forward and connections.
    """
    chosen = _checked(*limits)
    file = RunDirectory.open(run).model / WEIGHTS
    torch.set_num_threads(1)  # networks are small: several threads would wait for each other
    with _stopped_by_signals() as stop:
        if follow and not _there(file, stop):
            return
        seen = _stamp(file)
        policy = Policy.load(run)
        server = PolicyServer(policy.acting, policy.spaces, address, chosen, policy.version)
        _warn(address[0], server)
        with server:
            print(f"serving {run}, version {server.version}, at {server.url}; Ctrl-C stops", flush=True)
            while not stop.wait(LOOK_S):
                found = _stamp(file)
                if follow and found != seen:
                    _take(server, file)
                seen = found
        told = server.metrics()
    print(f"stopped after {told['requests']['answered']} answers, at version {told['policy_version']}", flush=True)


def _stamp(file: Path) -> tuple[int, int] | None:
    """Differs when a file has been replaced; None where there is none."""
    if not file.is_file():
        return None
    found = file.stat()
    return found.st_ino, found.st_mtime_ns


def _take(server: PolicyServer, file: Path) -> None:
    try:
        server.update(*read_policy(file))
    except ModelError as error:
        print(f"warning: {error}; version {server.version} goes on", file=sys.stderr, flush=True)


def _there(file: Path, stop: threading.Event) -> bool:
    """Wait until the run has exported a policy; False if ``stop`` comes first."""
    if not file.is_file():
        print(f"waiting for {file}, which checkpoint.export_every lets a run write", flush=True)
    while not file.is_file():
        if stop.wait(LOOK_S):
            return False
    return True


def _checked(budget_ms: float, max_batch: int, max_connections: int) -> Limits:
    for name, value in (("budget-ms", budget_ms), ("max-batch", max_batch), ("max-connections", max_connections)):
        if not value > 0:
            raise UserError(f"serve: --{name} {value:g}: expected more than 0")
    return Limits(budget_ms / 1000, max_batch, max_connections)


def _warn(host: str, server: PolicyServer) -> None:
    """Of what is allowed, and seldom meant."""
    try:
        alone = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # another name
        alone = False
    if not alone:
        told = f"warning: --host {host} lets other machines ask; there is no authentication and no encryption"
        print(told, file=sys.stderr, flush=True)
    taken, limits = server.forward_s, server.limits
    if 2 * taken > limits.budget_s:
        found = f"a forward of {limits.max_batch} observations takes {1000 * taken:.1f} ms here"
        told = f"warning: {found}, and a request may wait for one before its own; lower --max-batch or raise --budget-ms"
        print(told, file=sys.stderr, flush=True)


@contextmanager
def _stopped_by_signals() -> Iterator[threading.Event]:
    """An event that SIGINT and SIGTERM set, as long as the context lasts."""
    stop = threading.Event()
    before = {number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
