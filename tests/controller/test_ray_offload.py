"""Who leaves memory for whom: the roles of one process, before the calls that need room."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ray_keepers import Keeper, Reader

from hybridflow.controller.ray_runtime import RayRuntime
from hybridflow.core.batch import Batch
from hybridflow.core.errors import ContractError
from hybridflow.core.placement import Placement, ResourcePool
from hybridflow.core.roles import Role

IDS = Batch({"sample_id": np.arange(4)})
OFFLOAD = ("actor", "critic")


def start(offload: tuple[str, ...]) -> RayRuntime:
    placement = Placement((ResourcePool("main", (1,)),), offload=offload)
    return RayRuntime(placement, address=None, threads=1, timeout_s=60, gpus=False)


def add(runtime: RayRuntime, name: str, worker: Any) -> Any:
    return runtime.role(Role(name, worker, {"name": name}))


@pytest.fixture(scope="module")
def runtime(ray_cluster: None) -> Iterator[RayRuntime]:
    made = start(OFFLOAD)
    yield made
    made.stop()


def test_each_role_has_what_it_needs_and_others_make_room(runtime: RayRuntime) -> None:
    estimator = add(runtime, "estimator", Reader)
    actor, critic, judge = (add(runtime, name, Keeper) for name in ("actor", "critic", "judge"))
    sampler = add(runtime, "sampler", Reader)
    both = [f"actor puts away {part}" for part in ("weights", "optimizer")]
    built = [*both, "critic is built", "critic puts away weights", "critic puts away optimizer", "judge is built"]
    assert estimator.log() == ["estimator is built", "actor is built", *built, "sampler is built"]

    runtime.share("actor", "sampler")
    sampler.work(IDS)
    assert estimator.log() == ["actor takes back weights", "sampler is attached", "sampler works"]

    for _ in range(2):
        judge.work(IDS)
    leaves = ["actor puts away weights", "judge works", "judge works"]
    assert estimator.log() == leaves, "judge is not to leave, and needs the room"

    critic.work(IDS)
    estimator.work(IDS)
    critic.update(IDS)
    comes = ["critic takes back weights", "critic works", "estimator works", "critic takes back optimizer", "critic works"]
    assert estimator.log() == comes, "an estimator needs no room"

    actor.update(IDS)
    actor.work(IDS)
    sampler.work(IDS)
    sampler.state_dict()
    goes = [f"critic puts away {part}" for part in ("weights", "optimizer")]
    back = [f"actor takes back {part}" for part in ("weights", "optimizer")]
    assert estimator.log() == [*goes, *back, "actor works", "actor works", "actor puts away optimizer", "sampler works"]

    spans = [span for span in runtime.drain().spans if span.kind == "transfer"]
    names = [span.name for span in spans if span.name.endswith(".onload")]
    assert names == [f"{role}.onload" for role in ("judge", "critic", "critic", "actor", "sampler")]

    assert set(runtime.save(Path())) == {"estimator", "actor", "critic", "judge", "sampler"}
    saved = ["actor takes back optimizer", *both, *(line.replace("puts away", "takes back") for line in goes), *goes]
    assert estimator.log() == saved, "one after another"


@pytest.mark.usefixtures("ray_cluster")
def test_a_role_without_a_model_can_t_be_offloaded() -> None:
    runtime = start(("estimator",))
    add(runtime, "estimator", Reader)
    with pytest.raises(ContractError, match="role 'estimator': Reader has nothing to offload"):
        runtime.ready()
    runtime.stop()
