"""What a control loop asks a policy server with.

with PolicyClient("http://127.0.0.1:8001") as client:
    action, version = client.act(observation)
"""

from __future__ import annotations

import json
import time
from http.client import HTTPConnection, HTTPException, HTTPResponse
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import numpy as np

from hybridflow.core.batch import Array
from hybridflow.core.errors import DataError, LateError, UserError

__all__ = ["PolicyClient"]

BINARY = "application/octet-stream"


class PolicyClient:
    """One connection to the policy server at ``url``, which stays open; for one thread. UserError: no server is there.

    ``memory_size``: numbers that the policy remembers of an episode. ``timeout_s``: from asking until the action is there;
    what comes later is none.
    """

    def __init__(self, url: str, timeout_s: float = 1.0) -> None:
        self.url, self.timeout_s = url, timeout_s
        self._connection = HTTPConnection(*_host_and_port(url), timeout=timeout_s)
        try:
            health = json.loads(self._ask("GET", "/health"))
            self.memory_size = int(health["memory_size"])
            self._shape, self._dtype = _shape_and_type(health["observations"])
            self._action_shape, self._action_dtype = _shape_and_type(health["actions"])
        except (ValueError, KeyError, TypeError):
            self.close()
            raise UserError(f"policy server {url}: answers otherwise; is it a policy server?") from None

    def act(self, observations: Any) -> tuple[Array, int]:
        """The action at one observation, or [B, ...] at each of [B, ...], and the version of the policy that chose; see
        ``step``, with which policies that have a memory are asked."""
        if self.memory_size:
            raise DataError(
                f"policy server {self.url}: the policy remembers; call step(observation, memory), at first None"
            )
        actions, _, version = self.step(observations)
        return actions, version

    def step(self, observations: Any, memory: Array | None = None) -> tuple[Array, Array, int]:
        """The actions, the memory [M] or [B, M] for the next step, and the version. Episodes begin with None.

        LateError: there is no action in time, since the server is busy (503), late (504) or doesn't answer. DataError: the
        server can't use the observations (400, 413). UserError: the server has gone.
        """
        seen = np.asarray(observations)
        if seen.dtype != self._dtype and not np.can_cast(seen.dtype, self._dtype, "same_kind"):
            raise DataError(f"policy server {self.url}: observations of {seen.dtype}, expected {self._dtype.name}")
        if seen.shape not in (self._shape, (*seen.shape[:1], *self._shape)):
            raise DataError(f"policy server {self.url}: observations of shape {seen.shape}, expected {self._shape}")
        one = seen.shape == self._shape
        number = 1 if one else len(seen)
        given = np.zeros((number, self.memory_size)) if memory is None else memory
        if np.size(given) != number * self.memory_size:
            raise DataError(
                f"policy server {self.url}: memory of shape {np.shape(given)}, expected that of the last answer"
            )
        body = np.ascontiguousarray(seen, self._dtype).tobytes() + np.ascontiguousarray(given, "<f4").tobytes()
        answer = self._ask("POST", "/act", body)
        acted = len(answer) - 4 * number * self.memory_size
        actions = np.frombuffer(answer[:acted], self._action_dtype).astype(self._action_dtype.newbyteorder("="))
        after = np.frombuffer(answer[acted:], "<f4").astype(np.float32).reshape(number, self.memory_size)
        actions = actions.reshape(number, *self._action_shape)
        return (actions[0], after[0], self._version) if one else (actions, after, self._version)

    def metrics(self) -> dict[str, Any]:
        """Counts, latencies and sizes of batches, of all clients."""
        found: dict[str, Any] = json.loads(self._ask("GET", "/metrics"))
        return found

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _ask(self, method: str, path: str, body: bytes | None = None) -> bytes:
        begun, open_before = time.monotonic(), self._connection.sock is not None
        try:
            try:
                response, data = self._exchange(method, path, body)
            except ConnectionError:  # the server has closed what was open; it may be there all the same
                self._connection.close()
                if not open_before:
                    raise
                response, data = self._exchange(method, path, body)
        except TimeoutError:
            self._connection.close()  # or the next answer would be this one
            raise LateError(f"policy server {self.url}: no answer within {1000 * self.timeout_s:g} ms") from None
        except (OSError, HTTPException) as error:
            self._connection.close()
            raise UserError(f"policy server {self.url}: {error or type(error).__name__}; is it running?") from None
        if time.monotonic() - begun > self.timeout_s:
            raise LateError(f"policy server {self.url}: the answer came after {1000 * self.timeout_s:g} ms")
        if response.status != 200:
            raise _problem(self.url, response.status, data)
        self._version = int(response.headers.get("Policy-Version", -1))
        return data

    def _exchange(self, method: str, path: str, body: bytes | None) -> tuple[HTTPResponse, bytes]:
        self._connection.request(method, path, body, {"Content-Type": BINARY} if body is not None else {})
        response = self._connection.getresponse()
        return response, response.read()


def _shape_and_type(told: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
    return tuple(told["shape"]), np.dtype(told["dtype"]).newbyteorder("<")


def _host_and_port(url: str) -> tuple[str, int | None]:
    try:
        parts = urlsplit(url)
        if parts.scheme == "http" and parts.hostname and parts.path in ("", "/"):
            return parts.hostname, parts.port
    except ValueError:  # no number of a port
        pass
    raise UserError(f"policy server {url!r}: expected a URL like http://127.0.0.1:8001")


def _problem(url: str, status: int, data: bytes) -> Exception:
    try:
        told = str(json.loads(data)["error"])
    except (ValueError, KeyError, TypeError):
        told = f"answered {status}; is it a policy server?"
    kind = {400: DataError, 413: DataError, 503: LateError, 504: LateError}.get(status, UserError)
    return kind(f"policy server {url}: {told}")
