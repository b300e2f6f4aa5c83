"""A policy over HTTP.

    POST /act       {"observations": [[...], ...]}           →  {"actions": [...], "policy_version": 7}
                    application/octet-stream: their numbers,    their actions' numbers, and the header Policy-Version: 7
                    little-endian, one behind the other
    GET  /health    shapes and types of observations and actions, limits, the version
    GET  /metrics   counts, latencies, sizes of batches, the version

    400 what is wrong with the request    413 it is too large    503 busy: too many connections, or no action can be there
    504 the action came too late          within the budget; nothing was computed

Policies with a memory are asked with it, and answer it (``"memory": [[...], ...]``, or its numbers behind the others): the
server keeps nothing of an episode. Without it, an episode begins.

One thread reads requests, acts and answers; ``batches`` says how requests come together and what the budget is. A
connection asks for one thing at a time, so a limit of connections bounds how many requests wait, wherever they do.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np
from torch import Tensor

from hybridflow.core.batch import Array
from hybridflow.core.errors import UserError
from hybridflow.serving.batches import ArrivalClock, Batcher, BusyError, OverdueError
from hybridflow.serving.observations import Observations
from hybridflow.serving.served import ActingNetwork, Actions, Asked, ServedPolicy
from hybridflow.serving.statistics import Statistics

try:
    from aiohttp import web
except ImportError:
    raise UserError('a policy server needs aiohttp, which is not installed: pip install "hybridflow[serve]"') from None

__all__ = ["Limits", "PolicyServer"]

BINARY = "application/octet-stream"
GRACE_S = 0.1
"""for what was sent before a client could know that the server stops"""
LONGEST_S = 10.0
"""for what is being answered then"""


@dataclass(frozen=True)
class Limits:
    """``budget_s``: from when a request can have arrived until its answer is there. ``max_batch``: observations of a
    forward, and of a request."""

    budget_s: float = 0.008
    max_batch: int = 64
    max_connections: int = 64


class PolicyServer:
    """Serves a policy while a ``with`` block lasts; its end answers what has been asked, then closes.

    ``act`` and ``update`` may be called from any thread of the process, inside of the block and outside. ``spaces``: of
    observations and actions (Gymnasium's). ``address``: host and port, 0 takes a free one. UserError: it can't be had.
    ``forward_s``: what a full forward took when nobody asked; a request may wait for one, and take another.
    """

    def __init__(
        self,
        acting: ActingNetwork,
        spaces: tuple[Any, Any],
        address: tuple[str, int] = ("127.0.0.1", 0),
        limits: Limits | None = None,
        version: int = 0,
    ) -> None:
        self.limits = limits or Limits()
        self._policy, self._address = ServedPolicy(acting, version), address
        self._observations = Observations(spaces[0], self.limits.max_batch, self._policy.memory_size)
        self._actions = {"shape": list(spaces[1].shape or ()), "dtype": str(np.dtype(spaces[1].dtype))}
        self._statistics = Statistics()
        self._batcher = Batcher(self._policy.act, self.limits.budget_s, self.limits.max_batch, self._statistics.forward)
        self.forward_s = self._slowest_forward()

    @property
    def url(self) -> str:
        """Where it answers."""
        host, port = self._address
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    @property
    def version(self) -> int:
        return self._policy.version

    def act(self, observations: Array, memory: Array | None = None) -> Actions:
        """In process, at once: actions [B, ...] at observations [B, ...] of the space's type, and ``memory`` [B, M] of
        their episodes, for policies that have one; None where they begin."""
        asked = self._observations.beginning(observations)
        return self._policy.act(asked if memory is None else Asked(observations, memory))

    def update(self, weights: Mapping[str, Tensor | Array], version: int) -> None:
        """Answer with other weights from the next forward on; see ``ServedPolicy.update``."""
        self._policy.update(weights, version)
        self._statistics.updates += 1

    def metrics(self) -> dict[str, Any]:
        """What ``GET /metrics`` answers."""
        return {**self._statistics.snapshot(), "policy_version": self.version}

    def _slowest_forward(self) -> float:
        """Seconds of a full one; what is computed for the first time takes longer, and isn't counted."""
        full, taken = self._observations.example(self.limits.max_batch), []
        for _ in range(4):
            begun = time.perf_counter()
            self._policy.act(full)
            taken.append(time.perf_counter() - begun)
        return min(taken)

    def health(self) -> dict[str, Any]:
        """What ``GET /health`` answers."""
        observed = {"shape": list(self._observations.shape), "dtype": str(self._observations.dtype)}
        spaces = {"observations": observed, "actions": self._actions}
        limits = {"budget_ms": 1000 * self.limits.budget_s, "max_batch": self.limits.max_batch}
        told = {"status": "ok", "policy_version": self.version, "memory_size": self._policy.memory_size}
        return {**told, **spaces, **limits}

    def __enter__(self) -> Self:
        self._started, self._clock, self._stopping = Future[None](), ArrivalClock(), False
        self._thread = threading.Thread(target=self._run, name="policy-server")
        self._thread.start()
        try:
            self._started.result()
        except (OSError, OverflowError) as error:
            host, port = self._address
            raise UserError(f"serve: {host}:{port}: {error}; give another --host or --port") from None
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(self._clock)) as runner:
                runner.run(self._serve())
        finally:
            if not self._started.done():
                self._started.set_exception(RuntimeError("the policy server has not started"))

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application(client_max_size=self._observations.max_bytes)
        app.add_routes([web.post("/act", self._act), web.get("/health", self._told), web.get("/metrics", self._told)])
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=LONGEST_S)
        await runner.setup()
        assert runner.server is not None
        self._server, site = runner.server, web.TCPSite(runner, *self._address, backlog=1024)
        try:
            await site.start()
        except (OSError, OverflowError) as error:
            await runner.cleanup()
            return self._started.set_exception(error)
        self._address = runner.addresses[0][:2]
        self._started.set_result(None)
        await self._stop.wait()
        self._stopping = True  # from now on an answer is its connection's last
        await site.stop()
        await asyncio.sleep(GRACE_S)
        await runner.cleanup()

    async def _act(self, request: web.Request) -> web.Response:
        if request.protocol not in self._server.connections[: self.limits.max_connections]:
            problem = f"busy: more than {self.limits.max_connections} connections; close this one"
            return self._refused("refused_connections", 503, problem, last=True)
        try:
            return await self._acted(request)
        except ValueError as error:
            return self._refused("malformed", 400, str(error))
        except web.HTTPRequestEntityTooLarge:
            problem = f"over {self._observations.max_bytes} bytes; expected at most {self.limits.max_batch} observations"
            return self._refused("malformed", 413, problem, last=True)
        except BusyError as error:
            return self._refused("busy", 503, str(error))
        except OverdueError as error:
            return self._refused("late", 504, str(error))

    async def _acted(self, request: web.Request) -> web.Response:
        body = await request.read()
        arrived, binary = self._clock.arrived, request.headers.get("Content-Type") == BINARY
        asked = self._observations.from_bytes(body) if binary else self._observations.from_json(body)
        actions, version, memory = await self._batcher.answer(asked, arrived)
        self._statistics.answered(self._loop.time() - arrived)
        if not binary:
            remembered = {"memory": memory.tolist()} if self._policy.memory_size else {}
            return self._answer({"actions": actions.tolist(), "policy_version": version, **remembered})
        numbers = b"".join(part.astype(part.dtype.newbyteorder("<")).tobytes() for part in (actions, memory))
        response = web.Response(body=numbers, headers={"Policy-Version": str(version)}, content_type=BINARY)
        return self._closing(response, self._stopping)

    async def _told(self, request: web.Request) -> web.Response:
        return self._answer(self.health() if request.path == "/health" else self.metrics())

    def _refused(self, counted: str, status: int, problem: str, last: bool = False) -> web.Response:
        self._statistics.counts[counted] += 1
        return self._answer({"error": problem}, status, last)

    def _answer(self, content: Mapping[str, Any], status: int = 200, last: bool = False) -> web.Response:
        response = web.Response(body=json.dumps(content).encode(), status=status, content_type="application/json")
        return self._closing(response, last or self._stopping)

    def _closing(self, response: web.Response, last: bool) -> web.Response:
        if last:
            response.force_close()
        return response
