"""Transfer protocols: how rows reach the ranks of a mesh, and whose outputs make the result (HybridFlow, table 3).

    protocol              a rank gets                               the result comes from
    ONE_TO_ALL            all rows                                  rank 0 (of control methods: every rank)
    DP                    the rows of its rank                      every rank
    THREE_D               the rows of its data-parallel block       the last stage, ranks 0 of tp and cp, of every block
    THREE_D_ALL_MICRO_DP  the rows of its generation replica        the last stage, tensor rank 0 of every replica
    VIEW                  a view of all rows, to deal by itself     the first of these
    SHARES                a view of all rows, to deal by itself     every rank
    THREE_D_PP_ONLY       what every rank gets                      the first rank of every pipeline stage
    ALL_TO_ALL            what the caller names for it              every rank

The last two move no rows: they are for control methods (see ``core.roles.control``). A protocol of your own is another
``TransferProtocol``, given to ``remote``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from hybridflow.core.errors import ContractError
from hybridflow.core.placement import Mesh, Rows, TransferProtocol

__all__ = [
    "ALL_TO_ALL",
    "DP",
    "ONE_TO_ALL",
    "SHARES",
    "THREE_D",
    "THREE_D_ALL_MICRO_DP",
    "THREE_D_PP_ONLY",
    "VIEW",
    "blocks",
    "deal",
]

Weights = NDArray[np.int64]


def deal(weights: Weights, num_parts: int) -> list[Rows]:
    """Rows to parts of about equal weight, each part in ascending order: heaviest first, there and back."""
    order = np.argsort(-weights, kind="stable")
    turn = np.arange(len(weights)) % (2 * num_parts)
    part = np.where(turn < num_parts, turn, 2 * num_parts - 1 - turn)
    by_part = order[np.argsort(part, kind="stable")]
    return [np.sort(rows) for rows in np.split(by_part, np.cumsum(np.bincount(part, minlength=num_parts))[:-1])]


def blocks(weights: Weights, num_parts: int, speeds: Sequence[float] = ()) -> list[Rows]:
    """Rows to parts of about equal weight, neighbours together: responses to one prompt share its prefill. With ``speeds``,
    the parts' weights are in proportion to them."""
    if not weights.any():
        weights = np.ones_like(weights)  # then by their number
    ends = np.cumsum(weights)
    middles = ends - weights / 2
    if speeds:
        part = np.searchsorted(np.cumsum(speeds)[:-1] / sum(speeds), middles / weights.sum(), side="right")
    else:
        part = np.minimum((middles * num_parts / weights.sum()).astype(np.int64), num_parts - 1)
    return [np.flatnonzero(part == index) for index in range(num_parts)]


def _all(weights: Weights, mesh: Mesh) -> list[Rows]:
    return [np.arange(len(weights))] * mesh.size


def _by_rank(weights: Weights, mesh: Mesh) -> list[Rows]:
    return deal(weights, mesh.size)


def _by_block(weights: Weights, mesh: Mesh) -> list[Rows]:
    parts = deal(weights, mesh.dp)
    return [parts[mesh.coordinates(rank)[0]] for rank in range(mesh.size)]


def _by_replica(weights: Weights, mesh: Mesh) -> list[Rows]:
    parts = blocks(weights, mesh.num_replicas, mesh.speeds)
    return [parts[mesh.replica(rank)[0]] for rank in range(mesh.size)]


def _replica_leaders(mesh: Mesh) -> list[int]:
    last = mesh.generation[1] - 1
    return [rank for rank in range(mesh.size) if mesh.replica(rank)[1:] == (last, 0)]


def _stages(mesh: Mesh) -> list[int]:
    return [stage * mesh.tp for stage in range(mesh.pp)]


def _ranks(mesh: Mesh) -> Sequence[int]:
    return range(mesh.size)


def _moving_no_rows(name: str, collect: Callable[[Mesh], Sequence[int]]) -> TransferProtocol:
    def distribute(weights: Weights, mesh: Mesh) -> list[Rows]:
        raise ContractError(f"{name} moves no rows: declare the method with control({name}), not with remote")

    return TransferProtocol(name, distribute, collect)


ONE_TO_ALL = TransferProtocol("ONE_TO_ALL", _all, lambda mesh: (0,))
DP = TransferProtocol("DP", _by_rank, _ranks)
THREE_D = TransferProtocol("THREE_D", _by_block, lambda mesh: mesh.leaders)
THREE_D_ALL_MICRO_DP = TransferProtocol("THREE_D_ALL_MICRO_DP", _by_replica, _replica_leaders)
VIEW = TransferProtocol("VIEW", _all, lambda mesh: mesh.leaders[:1], view=True)
SHARES = TransferProtocol("SHARES", _all, _ranks, view=True)
THREE_D_PP_ONLY = _moving_no_rows("THREE_D_PP_ONLY", _stages)
ALL_TO_ALL = _moving_no_rows("ALL_TO_ALL", _ranks)
