"""Which numbers each rank holds: the paper's groups, slices of real decoders, training slices in generation slices."""

from __future__ import annotations

import itertools

import pytest

from hybridflow.core.errors import UserError
from hybridflow.core.placement import Mesh
from hybridflow.models.decoder import Part, part_shards
from hybridflow.models.layout import decoder_shards
from hybridflow.models.spec import DecoderSpec
from hybridflow.parallel.mesh import Line
from hybridflow.parallel.shard import cuts
from hybridflow.reshard.layout import Place, find, generation_places, groups, slices, total, training_places

SPECS = {
    "llama, tied, 6/3 heads": DecoderSpec("llama", 31, 12, 22, 5, 6, 3, 2, 64),
    "qwen2, biases": DecoderSpec(
        "qwen2", 33, 8, 20, 4, 8, 2, 4, 64, tied=False, qkv_bias=True, output_bias=True, mlp_bias=True
    ),
    "qwen3, norms, 1 kv head": DecoderSpec("qwen3", 30, 8, 23, 4, 6, 1, 4, 64, tied=False, qk_norm=True),
}


def from_one(ranks: list[list[int]]) -> list[list[int]]:
    """As the paper counts them."""
    return [[rank + 1 for rank in group] for group in ranks]


def test_the_groups_of_the_worked_example() -> None:
    """Section 5.3: training 1-4-2, generation 1-2-2-2, in HybridFlow's grouping and in the vanilla one."""
    mesh = Mesh(dp=2, tp=4, pp=1, generation_tp=2)
    found = {kind: from_one(ranks) for kind, ranks in groups(mesh).items()}
    assert found["train tp"] == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert found["train dp"] == [[1, 5], [2, 6], [3, 7], [4, 8]]
    assert found["generate tp"] == [[1, 3], [2, 4], [5, 7], [6, 8]]
    assert found["micro dp"] == [[1, 2], [3, 4], [5, 6], [7, 8]]
    assert found["train pp"] == found["generate pp"] == [[rank] for rank in range(1, 9)]
    assert from_one(groups(mesh, "vanilla")["generate tp"]) == [[1, 2], [3, 4], [5, 6], [7, 8]]


def test_groups_where_stages_merge() -> None:
    mesh = Mesh(dp=1, tp=4, pp=2, generation_tp=2, generation_pp=1)
    assert from_one(groups(mesh)["micro dp"]) == [[1, 2, 5, 6], [3, 4, 7, 8]]


@pytest.mark.parametrize("name", SPECS)
def test_training_slices_are_those_of_decoders(name: str) -> None:
    spec = SPECS[name]
    for pp, tp in itertools.product((1, 2, 4), (1, 2, 3)):
        mesh = Mesh(dp=1, tp=tp, pp=pp)
        for rank, place in enumerate(training_places(mesh)):
            _, p, t = mesh.coordinates(rank)
            part = Part(cuts(spec.num_layers, pp)[p], p == 0, p == pp - 1, tp=Line(tp, t))
            expected = {key: (s.shape, s.dim, s.ranges) for key, s in part_shards(spec, part).items()}
            found = {key: (s.shard.shape, s.shard.dim, s.shard.ranges) for key, s in slices(spec, place).items()}
            assert found == expected and [*found] == [*expected]


@pytest.mark.parametrize("name", SPECS)
def test_generation_slices_are_training_slices_one_behind_the_other(name: str) -> None:
    spec = SPECS[name]
    mesh = Mesh(dp=1, tp=6, pp=1, generation_tp=2)
    training = [decoder_shards(spec, index, 6) for index in range(6)]
    for place in generation_places(mesh):
        for key, piece in slices(spec, place).items():
            pieces = [training[3 * place.index + number][key] for number in range(3)]
            whole = pieces[0].whole
            assert piece.shard.ranges == (pieces[0].ranges if whole else tuple(cut for p in pieces for cut in p.ranges))


@pytest.mark.parametrize("name", SPECS)
def test_runs_are_the_ranges_along_the_cut_axis(name: str) -> None:
    for piece in slices(SPECS[name], Place(size=3, index=1)).values():
        shape, dim = piece.shard.shape, piece.shard.dim
        width = 1 if len(shape) == 1 else shape[1 - dim]
        numbers = [line * width + n for cut in piece.shard.ranges for line in cut for n in range(width)]
        assert [number for run in piece.runs for number in run] == numbers


def test_shares_are_parts_of_a_slice() -> None:
    spec = SPECS["qwen2, biases"]
    mesh = Mesh(dp=3, tp=2)
    whole, parts = slices(spec, training_places(mesh)[1]), [slices(spec, training_places(mesh, True)[r]) for r in (1, 3, 5)]
    for name, piece in whole.items():
        numbers = [n for part in parts for run in part[name].runs for n in run]
        assert numbers == [n for run in piece.runs for n in run]
        assert max(total(part[name].runs) for part in parts) - min(total(part[name].runs) for part in parts) <= 1


@pytest.mark.parametrize(
    ("own", "block", "place"),
    [
        ((range(4, 8),), (range(0, 8),), 4),
        ((range(4, 8),), (range(0, 6), range(10, 12)), None),
        ((range(0, 2), range(8, 10)), (range(20, 23), range(0, 2), range(8, 12)), 3),
        ((range(8, 10), range(0, 2)), (range(0, 2), range(8, 10)), None),
        ((range(5, 7),), (range(0, 5), range(5, 6), range(9, 12), range(5, 7)), 9),
        ((), (range(3),), 0),
    ],
)
def test_where_runs_lie_in_others(own: tuple[range, ...], block: tuple[range, ...], place: int | None) -> None:
    assert find(own, block) == place


def test_models_that_are_too_small_are_refused_in_one_line() -> None:
    spec = SPECS["llama, tied, 6/3 heads"]
    with pytest.raises(UserError, match=r"^mesh: pp = 6, but the model has 5 layers: a stage needs one; lower pp to 5$"):
        slices(spec, Place(stages=6))
    with pytest.raises(UserError, match=r"^mesh: tp = 7, but the model has 6 attention heads.*lower tp to 6$"):
        slices(spec, Place(size=7))
