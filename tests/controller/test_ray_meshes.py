"""Every transfer protocol on eight processes."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from ray_workers import MARKS, Marker, role

from hybridflow.controller.ray_runtime import RayRuntime
from hybridflow.core.batch import Batch, Ragged
from hybridflow.core.placement import Mesh, Placement, ResourcePool
from hybridflow.core.roles import Role

MESHES = {
    "flat": Mesh(dp=8),
    "cube": Mesh(dp=2, tp=2, pp=2, generation_tp=1, generation_pp=2),
    "few": Mesh(dp=3),
    "blocks": Mesh(dp=4, tp=2),
    "one": Mesh(tp=2, pp=4),
    "context": Mesh(dp=2, pp=2, cp=2),
}
VERBS = {"ONE_TO_ALL": "one_to_all", "DP": "dp", "THREE_D": "three_d", "THREE_D_ALL_MICRO_DP": "replicas", "VIEW": "view"}


class Laid(RayRuntime):
    """Roles are laid out as ``MESHES`` says."""

    def widest(self, role: Role[Any]) -> Mesh:
        return MESHES[role.name]


@pytest.fixture(scope="module")
def runtime(ray_cluster: None) -> Iterator[Laid]:
    placement = Placement((ResourcePool("main", (8,)),))
    runtime = Laid(placement, address=None, threads=1, timeout_s=60, gpus=False)
    for name in MESHES:
        setattr(runtime, name, runtime.role(role(name, Marker)))
    runtime.ready()
    yield runtime
    runtime.stop()


def rows(count: int, seed: int = 0) -> Batch:
    lengths = np.random.default_rng(seed).integers(1, 9, count)
    return Batch({"sample_id": np.arange(100, 100 + count), "tokens": Ragged(np.zeros(lengths.sum(), np.int64), lengths)})


@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize("protocol", VERBS)
def test_each_rank_has_the_rows_that_the_protocol_gives_it(runtime: Laid, name: str, protocol: str) -> None:
    mesh, rule, handle = MESHES[name], MARKS[protocol], getattr(runtime, name)
    for count in (0, 1, 5, 23):
        batch = rows(count)
        runtime.drain()
        out = getattr(handle, VERBS[protocol])(batch)
        dealt = rule.distribute(batch.lengths, mesh)
        assert handle.all_seen() == [batch["sample_id"][index].tolist() for index in dealt]
        maker = np.full(count, -1)
        for rank in rule.collect(mesh):
            maker[dealt[rank]] = rank
        assert out["slot"].tolist() == maker.tolist()
        assert np.array_equal(out["sample_id"], batch["sample_id"])


@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize("protocol", VERBS)
def test_metrics_count_once_for_each_part_of_the_rows(runtime: Laid, name: str, protocol: str) -> None:
    mesh, rule = MESHES[name], MARKS[protocol]
    runtime.drain()
    getattr(getattr(runtime, name), VERBS[protocol])(rows(9))
    told = runtime.drain().metrics.values()
    parts = mesh.leaders if rule.view else rule.collect(mesh)
    assert told[f"{name}/calls"] == len(parts)
    assert told[f"{name}/rank"] == pytest.approx(np.mean(parts))


@pytest.mark.parametrize("name", MESHES)
def test_sums_go_over_the_data_parallel_blocks_only(runtime: Laid, name: str) -> None:
    mesh = MESHES[name]
    places = [(mesh.coordinates(rank)[1:], mesh.context(rank)) for rank in range(mesh.size)]
    expected = [sum(2.0**other for other in range(mesh.size) if places[other] == places[rank]) for rank in range(mesh.size)]
    assert getattr(runtime, name).sums() == expected


@pytest.mark.parametrize("name", MESHES)
def test_control_methods_collect_what_their_protocol_says(runtime: Laid, name: str) -> None:
    mesh, handle = MESHES[name], getattr(runtime, name)
    letters = [chr(97 + rank) for rank in range(mesh.size)]
    assert handle.echo(letters, list(range(mesh.size))) == [(r, letters[r], r) for r in range(mesh.size)]
    assert handle.stages() == [stage * mesh.tp for stage in range(mesh.pp)]
    assert handle.everyone() == [(r, what) for r in range(mesh.size) for what in "xy"]
    assert handle.plain("rank") == "rank 0"
