"""Reward functions over HTTP; ``rollout.reward_service`` says what is asked and answered."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from hybridflow.core.errors import RewardError, UserError
from hybridflow.rollout.rewards import RewardPool

__all__ = ["RewardServer"]

MAX_REQUEST_BYTES = 2**26


class RewardServer(ThreadingHTTPServer):
    """Serves a pool's rewards until ``shutdown``; port 0 takes a free one. UserError if the address can't be had.

    Requests are scored one after the other, each by all of the pool's processes. There is no authentication: whoever
    reaches the port can call the functions.
    """

    def __init__(self, pool: RewardPool, host: str = "127.0.0.1", port: int = 0) -> None:
        self._pool, self._lock = pool, threading.Lock()
        try:
            super().__init__((host, port), _Handler)
        except (OSError, OverflowError) as error:
            raise UserError(f"serve-rewards: {host}:{port}: {error}; give another --host or --port") from None

    @property
    def url(self) -> str:
        """Where rows are scored."""
        host, port = self.server_address[:2]
        return f"http://{host!s}:{port}/score"

    def health(self) -> dict[str, Any]:
        return {"functions": [spec.function for spec in self._pool.specs], "fields": sorted(self._pool.fields)}

    def score(self, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The results of rows. RewardError if one lacks a field."""
        prompts, responses = ([row[name] for row in rows] for name in ("prompt", "response"))
        with self._lock:
            results = self._pool.score(prompts, responses, rows)
        return [
            {"failure": result.failure} if result.failure else {"score": result.score, "metrics": dict(result.metrics)}
            for result in results
        ]


class _Handler(BaseHTTPRequestHandler):
    server: RewardServer

    def do_HEAD(self) -> None:
        self._answer(HTTPStatus.OK if self.path in ("/score", "/health") else HTTPStatus.NOT_FOUND, None)

    def do_GET(self) -> None:
        if self.path == "/health":
            return self._answer(HTTPStatus.OK, self.server.health())
        self._refuse(HTTPStatus.NOT_FOUND, "there are GET /health and POST /score")

    def do_POST(self) -> None:
        if self.path != "/score":
            return self._refuse(HTTPStatus.NOT_FOUND, "there are GET /health and POST /score")
        try:
            size = int(self.headers.get("Content-Length", "0"))
            if not 0 <= size <= MAX_REQUEST_BYTES:
                self.close_connection = True
                return self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a request may have {MAX_REQUEST_BYTES} bytes")
            rows = _rows(self.rfile.read(size))
        except (ValueError, RecursionError) as error:
            return self._refuse(HTTPStatus.BAD_REQUEST, str(error))
        try:
            self._answer(HTTPStatus.OK, {"results": self.server.score(rows)})
        except RewardError as error:
            self._refuse(HTTPStatus.UNPROCESSABLE_ENTITY, str(error))

    def log_message(self, *_: Any) -> None:
        """Nothing: a run asks thousands of times, and what goes wrong is told to whoever asked."""

    def _refuse(self, status: HTTPStatus, problem: str) -> None:
        self._answer(status, {"error": problem})

    def _answer(self, status: HTTPStatus, content: dict[str, Any] | None) -> None:
        data = b"" if content is None else json.dumps(content).encode()
        with contextlib.suppress(ConnectionError):  # whoever asked has gone
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)


def _rows(data: bytes) -> list[dict[str, Any]]:
    """The rows of a request. ValueError says what is wrong with it."""
    content = json.loads(data)
    rows = content.get("rows") if isinstance(content, dict) else None
    if not isinstance(rows, list):
        raise ValueError('expected {"rows": [{"prompt": "...", "response": "...", fields}, ...]}')
    for i, row in enumerate(rows):
        if not isinstance(row, dict) or not all(isinstance(row.get(name), str) for name in ("prompt", "response")):
            raise ValueError(f"row {i} is no object with texts prompt and response")
    return rows
