"""Measuring this machine: what its cores or its GPU multiply and read, and what two processes send each other.

    each of ROUNDS:   products by dtype and threads, a big weight read by few rows, layers of a tiny and a small decoder
                      two processes: a large all-reduce, a small one, both read             ──> medians ──> Probe

Everything goes the ways that models go: products through ``ops.linear``, weights packed as the rollout engine packs them,
collectives over gloo (NCCL between GPUs). Under a minute on two cores.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from hybridflow.core.errors import ResourceError
from hybridflow.models.decoder import CausalAttention, Decoder
from hybridflow.models.spec import DecoderSpec
from hybridflow.ops.linear import can_pack, linear, pack
from hybridflow.planner.hardware import Fingerprint, Probe, fingerprint

__all__ = ["Rates", "measure", "pair_rates", "read_rate"]

ROUNDS = 5
DTYPES = (torch.float32, torch.bfloat16)
ROWS = 64
SETTLED_S = 0.15
"""in which the system gives each of a process's threads a core of its own, after their number has changed"""
ENOUGH_S = 0.1
LARGE_BYTES = 2**26
PEER_S = 60

Rates = dict[Any, list[float]]
"""an entry a round of everything that is measured"""


def measure(rounds: int = ROUNDS) -> Probe:
    """This machine, as it is now: other work on it makes it slower. ResourceError: two processes can't meet."""
    machine = fingerprint()
    device = torch.device("cuda" if machine.gpus else "cpu")
    threads = (1,) if machine.gpus else tuple(dict.fromkeys((1, machine.cores)))
    rates: Rates = defaultdict(list)
    with torch.inference_mode():
        for _ in range(rounds):
            _round(rates, device, threads)
    link, latency_s, read = pair_rates(machine, rounds)
    found = {key: statistics.median(values) for key, values in rates.items()}
    return Probe(
        machine,
        flops={_name(dtype): {n: found[dtype, n] for n in threads} for dtype in DTYPES},
        bandwidth={n: found["read", n] for n in threads},
        shared_bandwidth=max(read, *(found["read", n] for n in threads)),
        memory_bytes=float(_memory(device)),
        link=link,
        link_latency_s=latency_s,
        launch_s={n: _launch_s(found, n) for n in threads},
    )


def _launch_s(found: Mapping[Any, float], threads: int) -> float:
    """Of a layer, what is left of its seconds besides products that gain by ``threads`` what large ones gain."""
    gain = found[torch.float32, threads] / found[torch.float32, 1]
    return max(found["tiny"], found["rows", threads] - (found["rows", 1] - found["tiny"]) / gain)


def _round(rates: Rates, device: torch.device, threads: tuple[int, ...]) -> None:
    for number in threads:
        with _threads(number):
            for dtype in DTYPES:
                rates[dtype, number].append(_product_rate(device, dtype))
            rates["read", number].append(read_rate(device))
            rates["rows", number].append(_layer_s(device, DecoderSpec("llama", 512, 64, 1408, 4, 8, 8, 64, 128), ROWS))
    with _threads(1):
        rates["tiny"].append(_layer_s(device, DecoderSpec("llama", 32, 64, 128, 8, 4, 4, 16, 128), 8))


@contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of the product of some thousand tokens with a layer's matrix."""
    tokens, width = (8192, 4096) if device.type == "cuda" else (1024, 1024)
    x = torch.ones(tokens, width, dtype=dtype, device=device)
    weight = torch.ones(4 * width, width, dtype=dtype, device=device)
    return 2 * tokens * weight.numel() / _seconds(partial(linear, x, weight), device)


def _layer_s(device: torch.device, spec: DecoderSpec, rows: int) -> float:
    """Seconds of a layer for the next token of so many rows."""
    decoder, tokens = Decoder(spec).to(device), torch.zeros(rows, dtype=torch.int64, device=device)
    attend = CausalAttention(torch.ones_like(tokens))
    return _seconds(lambda: decoder(tokens, attend.positions, attend, None), device) / spec.num_layers


def read_rate(device: torch.device, num_bytes: int = LARGE_BYTES) -> float:
    """Bytes/s of weights that a decode step reads: products of a few rows, in float32, whose weights together are larger
    than a processor's caches."""
    width = 4096 if device.type == "cuda" else 1024
    weights = [torch.ones(width, width, device=device) for _ in range(max(1, num_bytes // (4 * width**2)))]
    read = sum(weight.nbytes for weight in weights)
    packed = [pack(weight) if can_pack(weight) else weight for weight in weights]
    x = torch.ones(8, width, device=device)
    return read / _seconds(lambda: [linear(x, weight) for weight in packed], device)


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """Of one of as many calls as take ENOUGH_S, after some that don't count."""
    _finished(call, device)
    settled_s = time.perf_counter() + SETTLED_S
    while True:
        once = _finished(call, device)
        if time.perf_counter() > settled_s:
            break
    number = max(1, round(ENOUGH_S / max(once, 1e-7)))
    return _finished(lambda: [call() for _ in range(number)], device) / number


def _finished(call: Callable[[], object], device: torch.device) -> float:
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(0).total_memory)
    return int(psutil.virtual_memory().total)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ------------------------------------------------------------------------------------------------------- two processes


def pair_rates(machine: Fingerprint, rounds: int) -> tuple[float, float, float]:
    """(bytes/s that each of two processes sends in a large all-reduce, seconds of a message in a small one, bytes/s of
    weights that both together read at the same time; 0 of GPUs, which don't share their memory).

    A machine with one GPU has no two that could talk: the copy from the host to it stands for that.
    """
    if len(machine.gpus) == 1:
        return _host_link(torch.device("cuda"), rounds)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        results: Any = context.Queue()
        arguments = (str(Path(folder, "store")), bool(machine.gpus), max(1, machine.cores // 2), rounds, results)
        peers = [context.Process(target=_peer, args=(rank, *arguments), daemon=True) for rank in range(2)]
        for peer in peers:
            peer.start()
        for peer in peers:
            peer.join(PEER_S)
        if any(peer.exitcode != 0 for peer in peers):
            for peer in peers:
                peer.kill()
            raise ResourceError("probe: two processes could not meet over gloo on this machine; see the errors above")
        found = [results.get(timeout=PEER_S) for _ in peers]
    (link, latency_s, _), read = found[0], 0.0 if machine.gpus else sum(one[2] for one in found)
    return float(link), float(latency_s), float(read)


def _peer(rank: int, store: str, gpus: bool, threads: int, rounds: int, results: Any) -> None:
    """An all-reduce among two sends all of its bytes once, in two messages a process."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(threads)
    backend, device = ("nccl", torch.device("cuda", rank)) if gpus else ("gloo", torch.device("cpu"))
    dist.init_process_group(backend, store=FileStore(store, 2), rank=rank, world_size=2)
    large, small = torch.ones(LARGE_BYTES // 4, device=device), torch.ones(16, device=device)
    times: Rates = {"large": [], "small": [], "read": []}
    for _ in range(rounds + 1):  # the first doesn't count
        times["large"].append(_together(large, 3, device) / 3)
        times["small"].append(_together(small, 50, device) / 50)
        dist.barrier()
        times["read"].append(read_rate(device))
    large_s, small_s, read = (statistics.median(values[1:]) for values in times.values())
    results.put((large.nbytes / max(large_s - small_s, 1e-9), small_s / 2, read))
    dist.destroy_process_group()


def _together(values: torch.Tensor, number: int, device: torch.device) -> float:
    """Seconds of some all-reduces in a row, from when both processes are there."""
    dist.barrier()
    return _finished(lambda: [dist.all_reduce(values) for _ in range(number)], device)


def _host_link(device: torch.device, rounds: int) -> tuple[float, float, float]:
    here = torch.ones(LARGE_BYTES // 4, pin_memory=True)
    small = torch.ones(16, pin_memory=True)
    large_s = statistics.median(_seconds(partial(here.to, device), device) for _ in range(rounds))
    small_s = statistics.median(_seconds(partial(small.to, device), device) for _ in range(rounds))
    return here.nbytes / large_s, small_s, 0.0
