"""A harness: one function in several processes that sum over gloo, as the ranks of a role do."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from hybridflow.core.placement import Mesh
from hybridflow.core.roles import WorkerContext

TIMEOUT = timedelta(seconds=30)
Results = dict[tuple[str, int], Any]


def on_blocks(cases: dict[str, Callable[[WorkerContext], Any]], most: int, folder: Path) -> list[Results]:
    """Each case on 1, 2, ... ``most`` data-parallel blocks: what each rank returned, by (case, blocks).

    A context of one block sums nothing, as in one process.
    """
    return in_processes(partial(_on_blocks, cases, most), most, folder)


def _on_blocks(cases: dict[str, Callable[[WorkerContext], Any]], most: int, rank: int) -> Results:
    results: Results = {}
    for blocks in range(1, most + 1):
        group: Any = dist.new_group(list(range(blocks)), TIMEOUT)

        def reduce(tensor: torch.Tensor, group: Any = group) -> None:
            assert tensor.is_contiguous()
            dist.all_reduce(tensor, group=group)

        for name, case in cases.items() if rank < blocks else ():
            mesh = Mesh(dp=blocks)
            results[name, blocks] = case(WorkerContext(mesh=mesh, rank=rank, reduce=reduce if blocks > 1 else None))
    return results


def in_processes(function: Callable[[int], Any], size: int, folder: Path) -> list[Any]:
    """What ``function(rank)`` returns in each of ``size`` processes, which are one gloo group."""
    with mock.patch.dict(os.environ, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo"):
        mp.spawn(_rank, (function, size, folder), size)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(size)]


def _rank(rank: int, function: Callable[[int], Any], size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    torch.save(function(rank), folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
