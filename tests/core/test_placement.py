"""Meshes, pools and placements: who is who among the ranks, while training and while generating."""

from __future__ import annotations

import itertools
from collections import defaultdict
from fractions import Fraction

import pytest

from hybridflow.core.errors import ContractError
from hybridflow.core.placement import Mesh, Placement, ResourcePool

Shard = tuple[Fraction, Fraction, Fraction, Fraction]  # layers from, to; columns from, to


def divisors(number: int) -> list[int]:
    return [part for part in range(1, number + 1) if number % part == 0]


# every mesh of up to 16 ranks, with every way to generate by cuts that training has, too
MESHES = [
    Mesh(dp, tp, pp, generation_tp, generation_pp, cp)
    for dp, tp, pp, cp in itertools.product(range(1, 17), repeat=4)
    if dp * tp * pp * cp <= 16
    for generation_tp, generation_pp in itertools.product(divisors(tp), divisors(pp))
]


def groups(mesh: Mesh, key: object) -> list[list[int]]:
    """Ranks, counted from 1 as the paper does, that have the same key."""
    found: dict[object, list[int]] = defaultdict(list)
    for rank in range(mesh.size):
        found[key(rank)].append(rank + 1)  # type: ignore[operator]
    return list(found.values())


def generation_groups(mesh: Mesh) -> tuple[list[list[int]], list[list[int]]]:
    """(tensor-parallel, micro data-parallel) groups while generating."""
    tensor = groups(mesh, lambda rank: mesh.replica(rank)[:2])
    micro = groups(mesh, lambda rank: (mesh.coordinates(rank)[0], *mesh.replica(rank)[1:]))
    return tensor, micro


def shard(p: int, pp: int, t: int, tp: int) -> Shard:
    return Fraction(p, pp), Fraction(p + 1, pp), Fraction(t, tp), Fraction(t + 1, tp)


def area(part: Shard) -> Fraction:
    return (part[1] - part[0]) * (part[3] - part[2])


def test_the_worked_example_of_the_paper() -> None:
    """HybridFlow, section 5.3: training 1-4-2 (p-t-d), generation 1-2-2-2."""
    mesh = Mesh(dp=2, tp=4, pp=1, generation_tp=2)
    assert groups(mesh, lambda rank: mesh.coordinates(rank)[:2]) == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert groups(mesh, lambda rank: mesh.coordinates(rank)[1:]) == [[1, 5], [2, 6], [3, 7], [4, 8]]
    tensor, micro = generation_groups(mesh)
    assert tensor == [[1, 3], [2, 4], [5, 7], [6, 8]]
    assert micro == [[1, 2], [3, 4], [5, 6], [7, 8]]
    assert mesh.num_replicas == 4


def test_micro_groups_are_not_neighbours_where_stages_merge() -> None:
    mesh = Mesh(dp=1, tp=4, pp=2, generation_tp=2, generation_pp=1)
    assert generation_groups(mesh)[1] == [[1, 2, 5, 6], [3, 4, 7, 8]]


def test_coordinates_number_the_ranks() -> None:
    for mesh in MESHES:
        found = [(mesh.coordinates(rank), mesh.context(rank)) for rank in range(mesh.size)]
        axes = itertools.product(*map(range, (mesh.dp, mesh.cp, mesh.pp, mesh.tp)))
        assert found == [((d, p, t), c) for d, c, p, t in axes]
        assert [found[rank] for rank in mesh.leaders] == [((d, mesh.pp - 1, 0), 0) for d in range(mesh.dp)]
        assert mesh.copies * mesh.pp * mesh.tp == mesh.size
        assert [mesh.by_copies.replica(rank) for rank in range(mesh.size)] == list(map(mesh.replica, range(mesh.size)))


OTHERS = [
    Mesh(dp, tp, pp, generation_tp, generation_pp)
    for dp, tp, pp in [(2, 4, 1), (1, 2, 4), (1, 3, 4), (2, 6, 1)]
    for generation_tp, generation_pp in itertools.product(range(1, 13), repeat=2)
    if tp * pp % (generation_tp * generation_pp) == 0
]


def test_cuts_that_training_has_not_are_made_by_neighbours() -> None:
    mesh = Mesh(dp=2, tp=2, pp=2, generation_tp=4, generation_pp=1)
    assert not mesh.nested
    assert generation_groups(mesh)[0] == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert [mesh.replica(rank)[1:] for rank in range(4)] == [(0, 0), (0, 1), (0, 2), (0, 3)]


def test_every_replica_is_a_whole_model_within_a_copy() -> None:
    for mesh in MESHES + OTHERS:
        places, blocks = defaultdict(set), defaultdict(set)
        for rank in range(mesh.size):
            replica, p, t = mesh.replica(rank)
            places[replica].add((p, t))
            blocks[replica].add(mesh.coordinates(rank)[0] * mesh.cp + mesh.context(rank))
        generation_tp, generation_pp = mesh.generation
        whole = {(p, t) for p in range(generation_pp) for t in range(generation_tp)}
        assert dict(places) == dict.fromkeys(range(mesh.num_replicas), whole)
        per_block = mesh.num_replicas // mesh.copies
        assert dict(blocks) == {replica: {replica // per_block} for replica in range(mesh.num_replicas)}


def test_training_shards_of_a_micro_group_tile_its_generation_shard() -> None:
    """So a rank keeps no weight twice, and gathers what it lacks from its micro group alone."""
    for mesh in MESHES:
        generation_tp, generation_pp = mesh.generation
        tiles: dict[tuple[int, int, Shard], set[Shard]] = defaultdict(set)
        for rank in range(mesh.size):
            (d, p, t), (_, p_g, t_g) = mesh.coordinates(rank), mesh.replica(rank)
            own, wanted = shard(p, mesh.pp, t, mesh.tp), shard(p_g, generation_pp, t_g, generation_tp)
            assert wanted[0] <= own[0] and own[1] <= wanted[1] and wanted[2] <= own[2] and own[3] <= wanted[3]
            tiles[d, mesh.context(rank), wanted].add(own)
        assert all(sum(map(area, parts)) == area(wanted) for (_, _, wanted), parts in tiles.items())


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"dp": 0}, "mesh: dp = 0; expected at least one rank on every axis"),
        ({"tp": 2, "pp": -1}, "mesh: pp = -1; expected"),
        ({"cp": 0}, "mesh: cp = 0; expected"),
        ({"shard_ranks": -1}, "mesh: shard_ranks = -1; expected"),
        ({"dp": 2, "cp": 3, "shard_ranks": 4}, "mesh dp 2 x cp 3: shard_ranks = 4 doesn't divide 6 copies"),
        ({"tp": 2, "generation_tp": 0}, "mesh: generation_tp = 0; expected"),
        (
            {"dp": 2, "tp": 4, "generation_tp": 3},
            "mesh dp 2 x tp 4: generation_tp x generation_pp = 3 x 1 = 3 doesn't divide tp x pp = 4 x 1 = 4",
        ),
        ({"tp": 4, "generation_tp": 8}, "generation_tp x generation_pp = 8 x 1 = 8 doesn't divide tp x pp = 4 x 1 = 4"),
        ({"pp": 3, "generation_pp": 2}, "mesh pp 3: generation_tp x generation_pp = 1 x 2 = 2 doesn't divide"),
    ],
)
def test_impossible_meshes_are_refused_in_one_line(axes: dict[str, int], message: str) -> None:
    with pytest.raises(ContractError) as error:
        Mesh(**axes)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_mesh_names_its_axes() -> None:
    names = ["1", "dp 2", "dp 2 x tp 4 x pp 3", "cp 2 x tp 4"]
    assert [str(mesh) for mesh in (Mesh(), Mesh(dp=2), Mesh(2, 4, 3), Mesh(tp=4, cp=2))] == names


@pytest.mark.parametrize("nodes", [(), (0,), (2, 0)])
def test_pools_without_workers_are_refused(nodes: tuple[int, ...]) -> None:
    with pytest.raises(ContractError, match=r"pool 'critics' has \[.*\] workers on its nodes; expected at least one"):
        ResourcePool("critics", nodes)


def test_roles_fill_their_pool_up_to_what_they_can_use() -> None:
    pools = (ResourcePool("main", (4, 4)), ResourcePool("critics", (2,)))
    placement = Placement(pools, {"critic": "critics"})
    assert placement.pool_of("critic") == pools[1] and placement.pool_of("actor") == pools[0]
    assert placement.mesh_of("actor", None) == Mesh(dp=8)
    assert placement.mesh_of("actor", 3) == Mesh(dp=3)
    assert placement.mesh_of("critic", 3) == Mesh(dp=2)
