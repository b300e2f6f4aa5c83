"""A learner that trains several networks, each loss some of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import save
from torch import Tensor, nn

from hybridflow.core.batch import Batch, Ragged
from hybridflow.core.errors import ContractError
from hybridflow.core.roles import Fn, Loss, WorkerContext, columns
from hybridflow.ops.td import follow
from hybridflow.workers.learner import Learner, Trained, UpdatePlan
from hybridflow.workers.networks import Networks
from hybridflow.workers.optimizer import OptimizerConfig

INPUTS = ("observations", "actions")


class Net(nn.Module):
    """Linear, on single steps."""

    unit = "step"

    def __init__(self, sizes: tuple[int, int], seed: int) -> None:
        super().__init__()
        self.layer = nn.Linear(*sizes)
        for parameter in self.parameters():
            parameter.data.normal_(generator=torch.Generator().manual_seed(seed))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out


def build() -> dict[str, nn.Module]:
    return {"policy": Net((2, 1), 1), "critic": Net((3, 1), 2), "target": Net((3, 1), 2), "scale": Net((1, 1), 3)}


@columns(reads=("rewards",), writes=("td_errors",), on="networks", trains=("critic",))
def critic_loss(networks: dict[str, nn.Module], columns: dict[str, Tensor]) -> Loss:
    errors = networks["critic"](torch.cat([columns["observations"], columns["actions"]], -1))[:, 0] - columns["rewards"]
    assert errors.requires_grad and not networks["policy"](columns["observations"]).requires_grad
    return Loss(errors**2 / 2, {}, {"td_errors": errors.detach()})


@columns(reads=(), on="networks", trains=("policy", "scale"), noise=True)
def policy_loss(networks: dict[str, nn.Module], columns: dict[str, Tensor]) -> Loss:
    actions = networks["policy"](columns["observations"]) + networks["scale"](columns["noise"])
    value = networks["critic"](torch.cat([columns["observations"], actions], -1))[:, 0]
    return Loss(-value, {"noise": columns["noise"].mean(-1)})


LOSSES = (critic_loss.bind(), policy_loss.bind())
FOLLOW = follow.bind(targets={"target": "critic"}, tau=0.25)


def batch(rows: int = 11) -> Batch:
    rng, ones = np.random.default_rng(0), np.ones(rows, np.int64)
    return Batch(
        {
            "sample_id": np.arange(rows),
            "observations": Ragged(rng.standard_normal((rows, 2), np.float32), ones),
            "actions": Ragged(rng.standard_normal((rows, 1), np.float32), ones),
            "rewards": Ragged(rng.standard_normal(rows, np.float32), ones),
            "response_mask": Ragged(np.ones(rows, bool), ones),
        }
    )


def learner(
    context: WorkerContext | None = None,
    minibatches: int = 1,
    budget: int = 4096,
    lr: float = 0.1,
    drawn: int | None = None,
) -> Learner:
    optimizer, plan = OptimizerConfig(lr=lr, max_grad_norm=100.0), UpdatePlan(minibatches, 1, budget, drawn)
    others = {"critic": Trained(optimizer, 10), "scale": Trained(OptimizerConfig(lr=lr, schedule="linear"), 10)}
    networks = Networks(build, "policy", INPUTS)
    given = {"networks": networks, "optimizer": optimizer, "plan": plan, "total_steps": 10, "seed": 1}
    return Learner(context or WorkerContext(), **given, others=others)


def parameters(one: Learner) -> dict[str, Tensor]:
    return {f"{n}.{k}": p.detach().clone() for n, net in one.networks.items() for k, p in net.named_parameters()}


def gradients(one: Learner, losses: tuple[Fn, ...] = LOSSES) -> list[dict[str, Tensor]]:
    """Of every network that has any, whenever an optimizer would step; nothing moves."""
    seen = []

    def record(name: str) -> None:
        named = one.networks[name].named_parameters()
        seen.append({f"{name}.{key}": p.grad.clone() for key, p in named if p.grad is not None})

    for name, optimizer in one.optimizers.items():
        optimizer.step = lambda name=name: record(name)  # type: ignore[method-assign]
    one.update(batch(), *losses)
    return seen


def test_every_loss_is_a_step_of_what_it_trains_in_their_order() -> None:
    one, data = learner(), batch()
    observations, actions = (torch.tensor(data.ragged(name).values) for name in INPUTS)
    critic = build()["critic"]
    errors = critic(torch.cat([observations, actions], -1))[:, 0] - torch.tensor(data.ragged("rewards").values)
    (errors**2 / 2).mean().backward()
    first, second, third = gradients(one)
    for key, parameter in critic.named_parameters():
        torch.testing.assert_close(first[f"critic.{key}"], parameter.grad)
    slope = critic.layer.weight[0, 2].detach()
    torch.testing.assert_close(second["policy.layer.weight"], -slope * observations.mean(0, keepdim=True))
    torch.testing.assert_close(second["policy.layer.bias"], -slope[None])
    noise = one.context.metrics.values()["noise"]
    torch.testing.assert_close(third["scale.layer.weight"], -slope * torch.tensor([[noise]]), rtol=1e-5, atol=1e-6)
    assert first.keys() == {"critic.layer.weight", "critic.layer.bias"}


def test_a_later_loss_sees_the_step_of_an_earlier_one_and_the_target_moves_by_following_alone() -> None:
    one, alone = learner(), learner()
    before = parameters(one)
    errors = one.update(batch(), *LOSSES)["td_errors"].values
    alone.update(batch(), LOSSES[0])
    after, critic_only = parameters(one), parameters(alone)
    moved = {name.split(".")[0] for name in before if not torch.equal(before[name], after[name])}
    assert moved == {"policy", "critic", "scale"} and (errors != 0).all()
    assert all(torch.equal(after[name], critic_only[name]) for name in after if name.startswith("critic"))
    assert [one.optimizers[name].steps for name in ("policy", "critic", "scale")] == [1, 1, 1]
    followed = learner()
    followed.update(batch(), *LOSSES, FOLLOW)
    for name, x in parameters(followed).items():
        target = name.startswith("target")
        blended = 0.75 * after[name] + 0.25 * after[name.replace("target", "critic")]
        torch.testing.assert_close(
            x, blended if target else after[name], rtol=1e-6 if target else 0, atol=1e-7 if target else 0
        )


@pytest.mark.parametrize("budget", [4096, 3])
def test_several_draws_in_one_update_are_as_many_updates(budget: int) -> None:
    losses = (LOSSES[0], replace(LOSSES[1], every=2), replace(FOLLOW, every=3))
    draws = [batch(4).rows(np.random.default_rng(seed).integers(0, 4, 4)) for seed in range(7)]
    single, together = learner(budget=budget), learner(budget=budget, drawn=4)
    errors = [single.update(draw, *losses)["td_errors"].values for draw in draws]
    found = [together.update(Batch.concat(part), *losses)["td_errors"].values for part in (draws[:5], draws[5:])]
    assert np.array_equal(np.concatenate(found), np.concatenate(errors))
    assert all(torch.equal(x, parameters(together)[name]) for name, x in parameters(single).items())
    assert {name: one.steps for name, one in together.optimizers.items()} == {"policy": 3, "critic": 7, "scale": 3}
    ours, theirs = (one.context.metrics.values() for one in (together, single))
    assert ours == pytest.approx(theirs)


def test_metrics_tell_the_networks_apart() -> None:
    one = learner()
    one.update(batch(), *LOSSES)
    values = one.context.metrics.values()
    assert {
        "loss",
        "critic_loss",
        "grad_norm",
        "critic_grad_norm",
        "scale_grad_norm",
        "scale_learning_rate",
    } <= values.keys()
    assert values["critic_loss"] > 0 and abs(values["noise"]) < 1 and "effective_samples" not in values


def test_noise_is_normal_and_new_in_every_step_whatever_the_microbatches() -> None:
    drawn = []

    @columns(reads=(), on="networks", trains=("scale",), noise=True)
    def look(networks: dict[str, nn.Module], columns: dict[str, Tensor]) -> Loss:
        drawn.append(columns["noise"].numpy())
        return Loss(networks["scale"](columns["noise"])[:, 0], {})

    one = learner()
    for _ in range(2):
        one.update(batch(3000), look.bind())
    first, second = drawn
    assert first.shape == (3000, 1) and abs(first.mean()) < 0.08 and abs(first.std() - 1) < 0.05
    assert abs(np.corrcoef(first[:, 0], second[:, 0])[0, 1]) < 0.08
    whole, split = gradients(learner()), gradients(learner(budget=2))
    for one_step, other in zip(whole, split, strict=True):
        for name, gradient in one_step.items():
            torch.testing.assert_close(other[name], gradient, rtol=1e-5, atol=1e-6)


def test_a_loss_that_trains_what_the_learner_does_not_is_refused() -> None:
    networks = Networks(build, "policy", INPUTS)
    given = {"networks": networks, "optimizer": OptimizerConfig(), "plan": UpdatePlan(), "total_steps": 10, "seed": 1}
    one = Learner(WorkerContext(), **given)
    with pytest.raises(ContractError, match=r"loss critic_loss trains 'critic'; this learner trains policy"):
        one.update(batch(), LOSSES[0])
    assert not any(p.requires_grad for p in one.networks["critic"].parameters())


def test_resume_is_bit_exact_and_offloading_changes_nothing(tmp_path: Path) -> None:
    straight, first, resumed = learner(minibatches=2), learner(minibatches=2), learner(minibatches=2)
    for one in (straight, first):
        for _ in range(2):
            one.update(batch(), *LOSSES, FOLLOW)
    resumed.load(*save(first, tmp_path / "run" / "actor"))
    assert {name: one.steps for name, one in resumed.optimizers.items()} == {"policy": 4, "critic": 4, "scale": 4}
    for one in (straight, resumed):
        for _ in range(2):
            one.update(batch(), *LOSSES)
    for name, x in parameters(straight).items():
        assert torch.equal(x, parameters(resumed)[name]), name
    moments = sum(2 * x.nbytes for name, x in parameters(resumed).items() if not name.startswith("target"))
    assert straight.offload() >= moments + sum(x.nbytes for x in parameters(resumed).values())
    straight.onload("update")
    for one in (straight, resumed):
        one.update(batch(), *LOSSES)
    assert all(torch.equal(x, parameters(resumed)[name]) for name, x in parameters(straight).items())
