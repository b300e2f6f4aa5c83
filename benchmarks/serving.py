"""A policy server under load: latency, updates while it answers, more than it can do, JSON against bytes.

    python benchmarks/serving.py [--sections load,updates,beyond,encoding] [--seconds 5] [--json]

The server is a process, and so is every client, which asks through ``PolicyClient`` on a connection of its own. Policies
have random weights, the observations and actions of Pendulum, and two hidden layers of 256. Latencies are the clients' own:
from before the request is made until the action is an array. CPU-microseconds are those of the server process, by request.
With other work on the machine latencies say little; the column ``load`` is the load average of the machine then.

``load``: each client asks at a fixed rate, as control loops do.

``updates``: the same while the server gets 100 other policies, evenly over the time. Afterwards the actions of every answer
are computed again by the policy of the version that it tells: with one observation a forward they must be the same bits, in
batches the same to rounding (1e-6; the policies' own actions differ by about 1). ``lost``: requests without an answer.

``beyond``: clients ask again at once, whatever they were told, of a policy with two hidden layers of 4096, at most four
observations a forward and a budget of 30 ms. ``busy`` and ``late`` are the server's refusals; latencies are of the answers.

``encoding``: what a request costs both sides as JSON and as bytes, of 3 numbers and of an image of 84 x 84 x 4 bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import multiprocessing
import os
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from hybridflow.core.errors import LateError
from hybridflow.serving.client import PolicyClient

CLIENTS, SERVERS = multiprocessing.get_context("fork"), multiprocessing.get_context("spawn")  # only servers have torch
WIDTH, WIDE, UPDATES = 256, 4096, 100


def acting(seed: int, width: int, shape: tuple[int, ...] = (3,), dtype: str = "float32") -> tuple[Any, tuple[Any, Any]]:
    """A policy whose actions depend on its observation and its seed, and its spaces."""
    import torch
    from gymnasium.spaces import Box

    from hybridflow.models.nets import NetConfig, make_policy
    from hybridflow.policy import Acting

    spaces = Box(0, 8, shape, np.dtype(dtype).type), Box(-2, 2, (1,), np.float32)
    random = torch.Generator().manual_seed(seed)
    network = make_policy(*spaces, NetConfig(hidden=()), random)
    sizes = (network.features.size, width, width, 1)
    network.mlp.layers = torch.nn.ModuleList(torch.nn.Linear(i, o) for i, o in itertools.pairwise(sizes))
    for layer in network.mlp.layers:
        torch.nn.init.normal_(layer.weight, std=layer.in_features**-0.5, generator=random)
        torch.nn.init.zeros_(layer.bias)
    return Acting(network, spaces[1]).eval().requires_grad_(False), spaces


def server(
    pipe: Connection, width: int, shape: tuple[int, ...], dtype: str, max_batch: int, budget_s: float, updates: int
) -> None:
    """Serves until told to end; takes ("update", version) and ("told",) meanwhile."""
    import torch

    from hybridflow.serving.server import Limits, PolicyServer

    torch.set_num_threads(1)
    made = [acting(version, width, shape, dtype)[0].network.state_dict() for version in range(updates)]
    with PolicyServer(*acting(0, width, shape, dtype), limits=Limits(budget_s, max_batch)) as running:
        pipe.send(running.url)
        while (message := pipe.recv())[0] != "end":
            if message[0] == "update":
                running.update(made[message[1]], message[1])
            else:
                pipe.send((time.process_time(), running.metrics()))


@contextlib.contextmanager
def serving(
    width: int = WIDTH,
    shape: tuple[int, ...] = (3,),
    dtype: str = "float32",
    max_batch: int = 64,
    budget_s: float = 0.008,
    updates: int = 0,
) -> Iterator[tuple[Connection, str]]:
    pipe, other = SERVERS.Pipe()
    process = SERVERS.Process(target=server, args=(other, width, shape, dtype, max_batch, budget_s, updates))
    process.start()
    try:
        yield pipe, received(pipe)
    finally:
        pipe.send(("end",))
        process.join()


def client(pipe: Connection, url: str, seed: int, rate: float, seconds: float) -> None:
    """Asks at ``rate`` (0: without a pause), beginning when it is told: latencies of answers, refusals, and the answers."""
    random = np.random.default_rng(seed)
    observations = random.uniform(0, 8, (200, 3)).astype(np.float32)
    latencies, refused, answers = [], 0, []
    with PolicyClient(url, timeout_s=30.0) as policy:
        with contextlib.suppress(LateError):
            policy.act(observations[0])
        pipe.send("ready")
        begin = pipe.recv() + (random.uniform() / rate if rate else 0.0)
        for number in range(int(rate * seconds) if rate else 10**9):
            due = begin + number / rate if rate else time.monotonic()
            time.sleep(max(0.0, due - time.monotonic()))
            asked = time.monotonic()
            if asked > begin + seconds:
                break
            try:
                action, version = policy.act(observations[number % 200])
            except LateError:
                refused += 1
                continue
            latencies.append(time.monotonic() - asked)
            answers.append((number % 200, action, version))
    pipe.send((latencies, refused, answers))


def measured(where: tuple[Connection, str], clients: int, rate: float, seconds: float, updates: int = 0) -> dict[str, Any]:
    """All clients at once; their answers, and what the server says of that time."""
    server_pipe, url = where
    pipes = [CLIENTS.Pipe() for _ in range(clients)]
    started = [CLIENTS.Process(target=client, args=(b, url, i, rate, seconds)) for i, (_, b) in enumerate(pipes)]
    for process in started:
        process.start()
    for pipe, _ in pipes:
        received(pipe)
    cpu, before = told(server_pipe)
    begin = time.monotonic() + 0.05
    for pipe, _ in pipes:
        pipe.send(begin)
    for version in range(updates):
        time.sleep(max(0.0, begin + (version + 1) * seconds / (updates + 1) - time.monotonic()))
        server_pipe.send(("update", version))
    found = [received(pipe) for pipe, _ in pipes]
    for process in started:
        process.join()
    cpu_after, after = told(server_pipe)
    latencies = 1000 * np.array([one for per_client, *_ in found for one in per_client])
    asked = len(latencies) + sum(refused for _, refused, _ in found)
    counted = {name: after["requests"][name] - before["requests"][name] for name in after["requests"]}
    forwards = {name: after["batches"][name] - before["batches"][name] for name in ("forwards", "observations")}
    row = {
        "clients": clients,
        "requests_s": asked / seconds,
        **{f"p{q}_ms": float(np.percentile(latencies, q)) for q in (50, 99, 99.9)},
        "over_8_ms": int((latencies > 8).sum()),
        "busy": counted["busy"],
        "late": counted["late"],
        "batch": forwards["observations"] / forwards["forwards"],
        "cpu_us": 1e6 * (cpu_after - cpu) / asked,
        "load": os.getloadavg()[0],
    }
    assert counted["answered"] == len(latencies) and sum(counted.values()) == asked, "every request has one answer"
    return {"row": row, "answers": [answers for *_, answers in found], "asked": asked, "counted": sum(counted.values())}


def received(pipe: Connection) -> Any:
    if not pipe.poll(120):
        raise TimeoutError("a client is silent")
    return pipe.recv()


def told(pipe: Connection) -> tuple[float, dict[str, Any]]:
    pipe.send(("told",))
    answer: tuple[float, dict[str, Any]] = received(pipe)
    return answer


def load(seconds: float) -> list[dict[str, Any]]:
    with serving() as where:
        return [measured(where, clients, rate, seconds)["row"] for clients, rate in ((1, 50), (8, 50), (16, 50), (16, 100))]


def updates(seconds: float) -> list[dict[str, Any]]:
    rows = []
    for max_batch in (1, 64):
        with serving(max_batch=max_batch, updates=UPDATES) as where:
            result = measured(where, 16, 50, seconds, UPDATES)
        checked = check(result["answers"], exact=max_batch == 1)
        rows.append({"max_batch": max_batch, **checked, "lost": result["asked"] - result["counted"], **result["row"]})
    return rows


def check(answers: list[list[tuple[int, Any, int]]], exact: bool) -> dict[str, Any]:
    """Versions never go back on a connection, and every action is that of the version told."""
    import torch

    policies, off = [acting(version, WIDTH)[0] for version in range(UPDATES)], 0.0
    for seed, per_client in enumerate(answers):
        observations = np.random.default_rng(seed).uniform(0, 8, (200, 3)).astype(np.float32)
        versions = [version for *_, version in per_client]
        assert versions == sorted(versions), "versions go back"
        for place, action, version in per_client:
            expected = policies[version](torch.from_numpy(observations[place : place + 1])).numpy()[0]
            off = max(off, float(np.abs(action - expected).max()))
    assert off == 0 if exact else off < 1e-6, f"an action is off by {off}"
    return {"versions": len({version for per in answers for *_, version in per}), "largest_difference": off}


def beyond(seconds: float) -> list[dict[str, Any]]:
    with serving(WIDE, max_batch=4, budget_s=0.03) as where:
        return [measured(where, clients, 0, seconds)["row"] for clients in (4, 8, 16, 32)]


def encoding(seconds: float) -> list[dict[str, Any]]:
    rows, number = [], int(50 * seconds)
    for shape, dtype in (((3,), "float32"), ((84, 84, 4), "uint8")):
        observation = np.random.default_rng(0).integers(0, 8, shape).astype(dtype)
        for form in ("json", "bytes"):
            width = WIDTH if len(shape) == 1 else 8
            with serving(width, shape, dtype, budget_s=60.0) as (pipe, url), asking(form, url) as ask:
                ask(observation)
                before, own = told(pipe)[0], time.process_time()
                for _ in range(number):
                    ask(observation)
                own = time.process_time() - own
                used = told(pipe)[0] - before
            cpu = {"server_cpu_us": 1e6 * used / number, "client_cpu_us": 1e6 * own / number}
            rows.append({"observation": "x".join(map(str, shape)), "form": form, **cpu})
    return rows


@contextlib.contextmanager
def asking(form: str, url: str) -> Iterator[Any]:
    if form == "bytes":
        with PolicyClient(url, timeout_s=30.0) as policy:
            yield policy.act
        return
    with contextlib.closing(HTTPConnection(url.partition("//")[2])) as connection:

        def ask(observation: Any) -> Any:
            body = json.dumps({"observations": [observation.tolist()]})
            connection.request("POST", "/act", body, {"Content-Type": "application/json"})
            return json.loads(connection.getresponse().read())

        yield ask


SECTIONS = {"load": load, "updates": updates, "beyond": beyond, "encoding": encoding}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", default=",".join(SECTIONS))
    parser.add_argument("--seconds", type=float, default=5.0, help="of each row; default: 5")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = {name: SECTIONS[name](options.seconds) for name in options.sections.split(",")}
    if options.json:
        return print(json.dumps(found))
    for name, rows in found.items():
        print(f"\n{name}\n" + " ".join(f"{column:>13}" for column in rows[0]))
        for row in rows:
            print(" ".join(f"{value:13.2f}" if isinstance(value, float) else f"{value!s:>13}" for value in row.values()))


if __name__ == "__main__":
    main()
