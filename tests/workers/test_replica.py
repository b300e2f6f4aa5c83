"""A learner's weights in another process: copied in place, bit for bit."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_learner import LOSSES, SPEC, batch
from torch import nn

from hybridflow.core.errors import ContractError, WorkerError
from hybridflow.core.roles import WorkerContext, is_control
from hybridflow.models.decoder import Decoder, Part, init_weights
from hybridflow.models.policy import TextPolicy
from hybridflow.models.weights import load_decoder
from hybridflow.parallel.mesh import Line
from hybridflow.parallel.shard import cuts
from hybridflow.parallel.tensor import take
from hybridflow.workers import publish
from hybridflow.workers.forward import forward
from hybridflow.workers.learner import Learner, UpdatePlan
from hybridflow.workers.networks import Networks
from hybridflow.workers.optimizer import OptimizerConfig
from hybridflow.workers.parts import Lines
from hybridflow.workers.publish import Published, checksum, compare_probes, probe_texts
from hybridflow.workers.replica import Replica


class Tied(nn.Module):
    """A weight under two names, and buffers."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("mean", torch.randn(3, generator=generator))
        self.register_buffer("count", torch.tensor(7), persistent=False)
        nn.init.normal_(self.first.weight, generator=generator)


def networks(dtype: torch.dtype = torch.float32, tied: bool = True, seed: int = 0) -> Networks:
    def build() -> dict[str, nn.Module]:
        model = Decoder(replace(SPEC, tied=tied))
        init_weights(model, torch.Generator().manual_seed(seed))
        return {"policy": TextPolicy(model.to(dtype)), "other": nn.Linear(2, 2)}

    return Networks(build, "policy", ("tokens",))


def learner(networks: Networks) -> Learner:
    settings = {"optimizer": OptimizerConfig(lr=0.01), "plan": UpdatePlan(), "total_steps": 10, "seed": 1}
    return Learner(WorkerContext(), networks=networks, **settings)


def shipped(published: Published) -> list[Published]:
    """As another process gets it: read-only."""
    published = pickle.loads(pickle.dumps(published))
    for array in published.arrays.values():
        array.flags.writeable = False
    return [published]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_replica_has_the_learners_weights_bit_for_bit(dtype: torch.dtype, tied: bool) -> None:
    one, replica = learner(networks(dtype, tied)), Replica(networks(dtype, tied, seed=1))
    places = [p.data_ptr() for p in replica.networks["policy"].parameters()]
    for version in (1, 2):
        one.update(batch(), LOSSES[0])
        replica.load(shipped(one.weights(0)), last=True)
        assert replica.version == version
        pairs = zip(one.model.named_parameters(), replica.networks["policy"].named_parameters(), strict=True)
        assert all(a == b and x.dtype == y.dtype and torch.equal(x, y) for (a, x), (b, y) in pairs)
    assert places == [p.data_ptr() for p in replica.networks["policy"].parameters()]
    assert set(replica.networks) == {"policy"} and is_control(Learner.weights)


def test_tied_weights_and_buffers_travel_once() -> None:
    generator = torch.Generator().manual_seed(0)
    own = Networks(lambda: {"q": Tied(generator)}, "q", ())
    one, replica = learner(own), Replica(own)
    weights = one.weights(0)
    assert set(weights.arrays) == {"q/first.weight", "q/mean", "q/count"} and weights.probe is None
    replica.load(shipped(weights), last=True)
    q: nn.Module = replica.networks["q"]
    assert q.first.weight is q.second.weight and torch.equal(q.first.weight, one.model.first.weight)
    assert torch.equal(q.mean, one.model.mean) and int(q.count) == 7


def test_weights_on_a_cpu_are_no_copies() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        one = learner(networks(dtype))
        weights = one.weights(0).arrays
        assert all(
            w.ctypes.data == one.model.get_parameter(n.removeprefix("policy/")).data_ptr() for n, w in weights.items()
        )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (networks(torch.bfloat16), r"'policy/decoder.embed.weight' is uint16 \[19, 16\], expected float32 \[19, 16\]"),
        (networks(tied=False), r"'policy/decoder.lm_head.weight' is float32 \[19, 16\], expected none of that name"),
    ],
)
def test_weights_of_another_network_are_refused(given: Networks, message: str) -> None:
    replica = Replica(networks())
    with pytest.raises(ContractError, match=message):
        replica.load([learner(given).weights(0)], last=True)
    assert replica.version == 0


def cut_networks(dtype: torch.dtype, tied: bool, pieces: int = 1) -> Networks:
    def build(lines: Lines = Lines()) -> dict[str, nn.Module]:  # noqa: B008
        tp, pp = lines.tp, lines.pp
        layers = cuts(SPEC.num_layers, pp.size)[pp.index]
        last = pp.index == pp.size - 1
        part = Part(layers, first=pp.index == 0, last=last, tp=tp, pieces=1 if lines.whole else pieces)
        model = Decoder(replace(SPEC, tied=tied), part)
        init_weights(model, torch.Generator().manual_seed(0))
        return {"policy": TextPolicy(model.to(dtype))}

    return Networks(build, "policy", ("tokens",), part=build)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("tp", "pp", "pieces"), [(2, 1, 1), (2, 1, 2), (4, 1, 1), (1, 2, 1), (2, 2, 2)])
def test_a_replica_that_is_cut_takes_its_part_of_full_weights(tied: bool, tp: int, pp: int, pieces: int) -> None:
    own = cut_networks(torch.bfloat16, tied, pieces)
    one = learner(own)
    one.update(batch(), LOSSES[0])
    full, seen = dict(one.model.named_parameters()), set[str]()
    for stage in range(pp):
        for index in range(tp):
            replica = Replica(own, Lines(tp=Line(tp, index), pp=Line(pp, stage)))
            assert replica.lines.tp.index == index
            replica.load(shipped(replaced(one.weights(0), version=3, probe=None)), last=True)
            policy: TextPolicy = replica.networks["policy"]
            for name, parameter in policy.named_parameters():
                assert torch.equal(parameter, take(full[name], policy.decoder.shards[name.removeprefix("decoder.")]))
                seen.add(name)
            assert replica.version == 3
    assert seen == full.keys()


def test_a_cut_replica_refuses_weights_of_another_network() -> None:
    replica = Replica(cut_networks(torch.float32, True), Lines(tp=Line(2, 1), pp=Line(2, 0)))
    weights = learner(networks()).weights(0)
    some = {name: x for name, x in weights.arrays.items() if name != "policy/decoder.layers.0.out.weight"}
    with pytest.raises(ContractError, match=r"'policy/decoder.layers.0.out.weight' is missing"):
        replica.load([replaced(weights, arrays=some)], last=True)
    with pytest.raises(ContractError, match=r"'policy/decoder.lm_head.weight' is float32 .*, expected none of that name"):
        replica.load([learner(networks(tied=False)).weights(0)], last=True)


def replaced(published: Published, **changes: Any) -> Published:
    """Another one, with the checksum that fits."""
    changed = replace(published, **changes)
    return replace(changed, checksum=checksum(changed.arrays.values()))


def test_weights_in_many_buckets_arrive_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish, "BUCKET_BYTES", 1500)
    one, replica = learner(networks()), Replica(networks(seed=1))
    count = one.num_buckets()
    sizes = [[array.nbytes for array in one.weights(number).arrays.values()] for number in range(count)]
    assert count > 5 and all(len(bucket) == 1 or sum(bucket) <= 1500 for bucket in sizes)
    one.update(batch(), LOSSES[0])
    for number in range(count):
        replica.load(shipped(one.weights(number)), number == count - 1)
        assert replica.version == (number == count - 1)
    pairs = zip(one.model.parameters(), replica.networks["policy"].parameters(), strict=True)
    assert all(torch.equal(x, y) for x, y in pairs) and replica.probe_error < 1e-6


def test_a_bucket_that_was_damaged_on_its_way_is_refused() -> None:
    published, replica = pickle.loads(pickle.dumps(learner(networks()).weights(0))), Replica(networks())
    published.arrays["policy/decoder.norm.weight"][3] += 1e-6
    with pytest.raises(WorkerError, match="weights of version 0 were damaged on their way"):
        replica.load([published], last=True)


def test_a_step_that_changed_nothing_is_told() -> None:
    """Publishing twice without a step between is fine."""
    one, replica = learner(networks()), Replica(networks())
    for _ in range(2):
        replica.load(shipped(one.weights(0)), last=True)
    with pytest.raises(WorkerError, match="took a step, but its weights are those of version 0 to the last bit"):
        replica.load([replace(one.weights(0), stepped=True, version=1)], last=True)
    one.update(batch(), LOSSES[0])
    assert [one.weights(0).stepped for _ in range(2)] == [True, False]


def test_a_sampler_with_another_policy_is_told() -> None:
    """The bytes arrive, but are read in another way: here, at another temperature."""
    one, replica = learner(networks()), Replica(networks())
    replica.networks["policy"].temperature = 0.5
    with pytest.raises(WorkerError, match=r"log-probabilities of fixed texts are off by .* expected at most 0.0001"):
        replica.load(shipped(one.weights(0)), last=True)


@pytest.mark.slow
def test_rounding_is_no_other_policy_but_a_matrix_in_another_order_is(real_model: Path) -> None:
    """SmolLM2 in bfloat16, against itself in float32: layouts differ by as much."""

    def probe(dtype: torch.dtype, damage: str = "") -> np.ndarray:
        decoder = load_decoder(real_model, dtype)
        for name, parameter in decoder.named_parameters():
            if name == damage:
                parameter.data = parameter.data.roll(len(parameter) // 2, 0)
        texts = probe_texts(decoder.spec.vocab_size)
        return forward(TextPolicy(decoder), texts, ("log_probs",), 64)["log_probs"].values

    rounded = probe(torch.bfloat16)
    assert 0.01 < compare_probes(probe(torch.float32), rounded, torch.bfloat16, 1) < 0.15
    for name in ("layers.15.out.weight", "layers.28.qkv.weight"):
        with pytest.raises(WorkerError, match=r"version 1 .* off by .* on average .* expected at most 0.2"):
            compare_probes(probe(torch.bfloat16, name), rounded, torch.bfloat16, 1)
