"""Pools and the roles on them, as a configuration gives them."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import CARTPOLE, REVERSE, with_keys

from hybridflow.config import RunConfig, validate
from hybridflow.core.errors import ConfigError
from hybridflow.core.placement import Mesh, ResourcePool

WORDS = "hybridflow.rollout.scorers:words_over?limit=1"
TWO = {"train": 2, "rest": 1}


def on_ray(data: dict[str, Any], /, **keys: Any) -> RunConfig:
    return validate(with_keys(data, run_dir="unused", **{"runtime__kind": "ray", **keys}), "test")


def test_without_a_word_everything_is_in_this_process() -> None:
    config = validate({**REVERSE, "run_dir": "unused"}, "test")
    assert config.placed.pools == (ResourcePool("driver", (1,)),)
    assert set(config.placed.roles.values()) == {"driver"} and "placement" not in config.sections()


def test_one_pool_needs_no_roles() -> None:
    assert on_ray(REVERSE).placed.pools == (ResourcePool("main", (1,)),)
    placed = on_ray(REVERSE, placement__pools={"all": [2, 2]}).placed
    assert placed.pools == (ResourcePool("all", (2, 2)),) and set(placed.roles.values()) == {"all"}
    assert placed.mesh_of("actor", None) == Mesh(dp=4) and placed.mesh_of("estimator", 1) == Mesh(dp=1)


def test_roles_that_are_not_named_are_where_those_are_that_they_serve() -> None:
    pools = {"a": 1, "b": 1, "c": 1, "d": 1}
    roles = {"actor": "a", "critic": "b", "reward": "c", "cost": "d"}
    safe = on_ray(
        REVERSE, algorithm="safe_rlhf", cost__functions=[WORDS], placement={"pools": pools, "roles": roles}
    ).placed
    follow = {"sampler": "a", "estimator": "a", "cost_critic": "b", "examiner": "c"}
    assert safe.roles == roles | follow
    remax = on_ray(
        REVERSE,
        algorithm="remax",
        train__group_size=1,
        placement={"pools": TWO, "roles": {"actor": "train", "reward": "rest"}},
    )
    assert remax.placed.roles["baseline"] == "rest"
    named = {"actor": "train", "reward": "rest", "baseline": "train", "sampler": "rest"}
    remax = on_ray(REVERSE, algorithm="remax", train__group_size=1, placement={"pools": TWO, "roles": named})
    assert remax.placed.roles.items() >= named.items() and remax.placed.roles["examiner"] == "rest"


def test_what_may_be_there_may_be_placed_and_need_not() -> None:
    data = with_keys(REVERSE, algorithm="sft", generation=None, train__group_size=1)
    roles = {"actor": "train", "sampler": "rest"}
    assert on_ray(data, placement={"pools": TWO, "roles": roles}).placed.roles["reward"] == "train"
    assert on_ray(data, placement={"pools": TWO, "roles": {**roles, "examiner": "rest"}}).placed.roles["examiner"] == "rest"


def test_environments_have_no_reward_and_no_reference() -> None:
    roles = {"actor": "train", "critic": "rest"}
    config = on_ray(CARTPOLE, placement={"pools": TWO, "roles": roles})
    assert config.placed.roles == {**roles, "estimator": "train", "sampler": "train"}
    with pytest.raises(ConfigError, match=r"placement\.roles\.reward: ppo has no such role here"):
        on_ray(CARTPOLE, placement={"pools": TWO, "roles": {**roles, "reward": "rest"}})


def problems(**keys: Any) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as told:
        on_ray(REVERSE, algorithm="ppo", kl__coef=0.1, **keys)
    return told.value.problems


def test_every_mistake_is_told_and_nothing_that_follows_from_it() -> None:
    first, second = problems(placement={"pools": TWO, "roles": {"critik": "train", "reward": "trains"}})
    assert "placement.roles.critik: ppo has no such role here; did you mean critic" in first
    assert "placement.roles.reward = 'trains': there is no such pool; did you mean train" in second


def test_all_that_is_missing_is_told_at_once() -> None:
    first, second = problems(placement={"pools": TWO, "roles": {"reward": "train"}})
    assert "no pool for actor, critic, reference; name one of train, rest for each" in first
    assert "placement.pools.rest: no role is on it" in second


def test_a_mesh_cuts_the_models_of_its_section_and_the_rest_of_the_pool_is_data_parallel() -> None:
    keys = {"algorithm": "safe_rlhf", "cost__functions": [WORDS], "kl__coef": 0.1, "placement__pools": {"main": 8}}
    placed = on_ray(REVERSE, **keys, actor__mesh={"tp": 2, "pp": 2}, critic={"mesh": {"pp": 4}}).placed
    assert placed.mesh_of("actor", None) == Mesh(2, 2, 2, 1, 1) and placed.mesh_of("cost_critic", None) == Mesh(2, 1, 4)
    assert placed.mesh_of("reference", None) == Mesh(dp=8) and placed.mesh_of("critic", None) == Mesh(2, 1, 4)
    assert placed.mesh_of("sampler", None) == placed.mesh_of("actor", None)
    with pytest.raises(ConfigError) as told:
        on_ray(REVERSE, **keys, critic={"mesh": {"tp": 3}})
    assert len(told.value.problems) == 1 and "critic.mesh: tp 3 x pp 1 = 3 processes" in told.value.problems[0]


def test_context_parallelism_is_part_of_a_mesh() -> None:
    placed = on_ray(REVERSE, placement__pools={"main": 8}, actor__mesh={"tp": 2, "cp": 2}).placed
    assert placed.mesh_of("actor", None) == Mesh(2, 2, 1, 1, 1, cp=2)
    assert placed.mesh_of("sampler", None) == placed.mesh_of("actor", None).by_copies


@pytest.mark.parametrize(
    ("mesh", "generation", "sampler"),
    [
        ({"tp": 4, "pp": 2}, {"tp": 2}, Mesh(1, 4, 2, 2, 1)),
        ({"tp": 2, "pp": 2}, {"tp": 4}, Mesh(2, 2, 2, 4, 1)),
        ({"tp": 2, "cp": 2}, {"tp": 2}, Mesh(4, 2, 1, 2, 1)),
        ({"tp": 2}, {"pp": 4}, Mesh(2, 1, 4)),
        ({}, {"tp": 2}, Mesh(4, 2)),
        ({"tp": 2, "shard": "fsdp"}, {}, Mesh(8)),
        ({"shard": "fsdp"}, {}, Mesh(8)),
        ({"pp": 2, "chunks": 2}, {}, Mesh(8)),
        ({"pp": 2, "chunks": 2}, {"pp": 2}, Mesh(4, 1, 2)),
    ],
)
def test_a_sampler_draws_in_place_where_its_layout_fits_the_actors(
    mesh: dict[str, Any], generation: dict[str, int], sampler: Mesh
) -> None:
    """Else it has a mesh of its own, and gets a copy."""
    keys = {"actor__mesh": mesh, "actor__generation_mesh": generation}
    placed = on_ray(REVERSE, placement__pools={"main": 8}, **keys).placed
    assert placed.mesh_of("sampler", None) == sampler
    assert placed.mesh_of("actor", None).chunks == mesh.get("chunks", 1)
    apart = on_ray(
        REVERSE, placement={"pools": {"a": 8, "b": 8}, "roles": {"actor": "a", "sampler": "b", "reward": "a"}}, **keys
    )
    own = {"tp": 1, "pp": 1} | generation
    assert apart.placed.mesh_of("sampler", None) == Mesh(8 // (own["tp"] * own["pp"]), **own)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"placement__pools": {"main": 6}, "actor__generation_mesh": {"tp": 4}},
         r"actor\.generation_mesh: tp 4 x pp 1 = 4 processes draw responses together, but pool 'main' has 6 workers"),
        ({"placement__pools": {"main": 2}, "actor__generation_mesh": {"tp": 2}, "generation__engine": "vllm"},
         r"actor\.generation_mesh: generation\.engine = 'vllm' runs in one process; remove it"),
        ({"runtime__kind": "local", "actor__generation_mesh": {"tp": 2}},
         r"actor\.generation_mesh: needs several processes; set runtime\.kind = \"ray\""),
    ],
)  # fmt: skip
def test_layouts_that_nothing_can_generate_in_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as told:
        on_ray(REVERSE, **keys)
    assert len(told.value.problems) == 1


def test_groups_of_some_copies_share_out_and_the_sampler_still_reads_in_place() -> None:
    keys = {"placement__pools": {"main": 8}, "algorithm": "ppo", "critic": {"mesh": {"shard": "fsdp"}}}
    placed = on_ray(REVERSE, **keys, actor__mesh={"tp": 2, "shard": "zero1", "shard_ranks": 2}).placed
    actor, critic = placed.mesh_of("actor", None), placed.mesh_of("critic", None)
    assert (actor.copies, actor.sharing) == (4, 2) and (critic.copies, critic.sharing) == (8, 8)
    assert actor.by_copies == placed.mesh_of("sampler", None)


@pytest.mark.parametrize("axis", ["tp", "cp"])
@pytest.mark.parametrize("kind", ["ray", "local"])
def test_networks_for_environments_are_not_cut(kind: str, axis: str) -> None:
    with pytest.raises(ConfigError, match=r"actor\.mesh: networks for environments can't be cut; remove it"):
        on_ray(CARTPOLE, runtime__kind=kind, actor__mesh={axis: 2})


def test_networks_of_environments_generate_in_no_mesh() -> None:
    with pytest.raises(ConfigError, match=r"actor\.generation_mesh: networks for environments can't be cut; remove it"):
        on_ray(CARTPOLE, placement__pools={"main": 2}, actor__generation_mesh={"tp": 2})
