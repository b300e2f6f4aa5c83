"""Programs of a context: the one of the README word for word, what they learn, record and refuse."""

from __future__ import annotations

import builtins
import json
import re
import runpy
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Outcome
from safetensors.torch import load_file

from hybridflow import HybridFlowContext, compute_gae
from hybridflow.context import Network
from hybridflow.context_graph import Graphs
from hybridflow.core.batch import Batch, Ragged
from hybridflow.core.errors import UserError
from hybridflow.data.envs import EnvironmentConfig
from hybridflow.ops.advantages import gae
from hybridflow.ops.losses import reinforce
from hybridflow.policy import Policy

ROOT = Path(__file__).parent.parent
PROGRAM = """\
with HybridFlowContext() as ctx:
    sampler = ctx.create_sampler(env_config)
    critic = ctx.create_network("MLP", [256, 256])
    actor = ctx.create_network("MLP", [256, 256], policy_head=True)
    optimizer = ctx.create_optimizer("Adam", [actor, critic])
    for epoch in range(1000):
        experiences = sampler.collect(actor, steps=4096)
        advantages = compute_gae(experiences, critic)
        optimizer.update(actor, critic, experiences, advantages)
"""
CARTPOLE = {"env": "CartPole-v1", "num_envs": 4}
OF_RAY = ("moved/", "driver/", "workers/", "time/", "memory/", "env_steps_per_s")


def run_program(until: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The program's names after it has run; its ``range`` ends early, after the epoch in which ``until`` holds."""
    names: dict[str, Any] = {"HybridFlowContext": HybridFlowContext, "compute_gae": compute_gae}

    def shorter(stop: int) -> Iterator[int]:
        for epoch in builtins.range(stop):
            yield epoch
            if until(names):
                return

    exec(PROGRAM, names | {"range": shorter, "env_config": {"env": "CartPole-v1"}}, names)
    return names


def test_the_program_runs_word_for_word() -> None:
    names = run_program(lambda names: True)
    assert names["ctx"].epoch == 1
    experiences, advantages = names["experiences"], names["advantages"]
    assert experiences["rewards"].values.sum() == len(experiences["actions"].values) == 4096
    assert advantages.columns.keys() == {"advantages", "returns", "values"}


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_the_program_solves_cartpole() -> None:
    """Gymnasium counts it as solved at 475."""
    names = run_program(lambda names: names["sampler"].evaluate(names["actor"], 20).score >= 475)
    assert names["epoch"] + 1 <= 20


def test_the_readme_and_the_page_show_this_program() -> None:
    for page in ("README.md", "docs/classical.md"):
        assert PROGRAM in (ROOT / page).read_text(), page


class Parts:
    """A small program."""

    def __init__(self, ctx: HybridFlowContext, *, kind: str = "MLP", **update: Any) -> None:
        self.ctx = ctx
        self.sampler = ctx.create_sampler(CARTPOLE)
        self.critic = ctx.create_network(kind, [16])
        self.actor = ctx.create_network(kind, [16], policy_head=True)
        self.optimizer = ctx.create_optimizer(
            "Adam", [self.actor, self.critic], **{"epochs": 2, "minibatches": 2, **update}
        )

    def epoch(self, steps: int = 64, **loss: Any) -> Batch:
        experiences = self.sampler.collect(self.actor, steps=steps)
        advantages = compute_gae(experiences, self.critic)
        self.optimizer.update(self.actor, self.critic, experiences, advantages, **loss)
        return experiences.with_columns(**advantages.columns).load()


def weights(ctx: HybridFlowContext, folder: Path) -> dict[str, torch.Tensor]:
    ctx.save(folder)
    return load_file(folder / "model" / "policy.safetensors")


def assert_same_weights(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_program_is_the_run_that_it_saves(hybridflow: Callable[..., Outcome], tmp_path: Path) -> None:
    """``hybridflow train`` on the configuration that was saved gives the same weights, bit for bit."""
    with HybridFlowContext(seed=3) as ctx:
        parts = Parts(ctx, lr=3e-3)
        for _ in range(3):
            parts.epoch()
        saved = weights(ctx, tmp_path / "program")
        score = parts.sampler.evaluate(parts.actor, 3).score
    trained = hybridflow("train", tmp_path / "program" / "config.toml", "--run_dir", tmp_path / "run")
    assert trained.code == 0, trained
    assert_same_weights(saved, load_file(tmp_path / "run" / "model" / "policy.safetensors"))
    told = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    means = [{k: v for k, v in record.items() if k in ctx.metrics and not k.startswith(OF_RAY)} for record in told]
    assert means[-1] == {k: v for k, v in ctx.metrics.items() if not k.startswith(OF_RAY)}
    evaluated = hybridflow("eval", tmp_path / "program", "--evaluation.limit", 3, "--json")
    assert json.loads(evaluated.out)["score"] == score
    assert hybridflow("report", tmp_path / "program").code == 0


def test_what_is_saved_acts(tmp_path: Path) -> None:
    with HybridFlowContext() as ctx:
        parts = Parts(ctx)
        parts.epoch()
        ctx.save(tmp_path / "run")
        with pytest.raises(UserError, match="holds a run already"):
            ctx.save(tmp_path / "run")
    policy = Policy.load(tmp_path / "run")
    assert policy.act(np.zeros((3, 4), np.float32)).shape == (3,)


def test_a_checkpoint_goes_on_exactly(tmp_path: Path) -> None:
    with HybridFlowContext() as ctx:
        parts = Parts(ctx)
        parts.epoch()
        saved = ctx.save_checkpoint(tmp_path / "checkpoints")
        parts.epoch(), parts.epoch()
        straight = weights(ctx, tmp_path / "straight")
    with HybridFlowContext() as ctx:
        parts = Parts(ctx)
        ctx.load_checkpoint(saved)
        assert ctx.epoch == 1
        for _ in range(ctx.epoch, 3):
            parts.epoch()
        assert ctx.epoch == 3
        assert_same_weights(weights(ctx, tmp_path / "resumed"), straight)


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_ray_with_two_environment_workers_gives_the_same(ray_cluster: None, tmp_path: Path) -> None:
    found = {}
    for runtime in ("local", "ray"):
        with HybridFlowContext(runtime, workers=2 if runtime == "ray" else 0) as ctx:  # type: ignore[arg-type]
            parts = Parts(ctx)
            batches = [parts.epoch(), parts.epoch()]
            saved = weights(ctx, tmp_path / runtime)
            parts.epoch()
        metrics = {k: v for k, v in ctx.metrics.items() if not k.startswith(OF_RAY)}
        found[runtime] = batches, saved, metrics, ctx.graph
    (local, local_weights, local_metrics, one), (ray, ray_weights, ray_metrics, other) = found.values()
    for mine, theirs in zip(local, ray, strict=True):
        assert mine.columns.keys() == theirs.columns.keys()
        for name in mine.columns:
            a, b = (batch[name].values if isinstance(batch[name], Ragged) else batch[name] for batch in (mine, theirs))
            # Two processes multiply smaller matrices than one, which changes the last bit of a logit.
            close = {"rtol": 1e-4, "atol": 1e-5} if a.dtype == np.float32 else {"rtol": 0.0, "atol": 0.0}
            np.testing.assert_allclose(a, b, **close, err_msg=name)
    assert ray_metrics == pytest.approx(local_metrics, rel=1e-3, abs=1e-5)
    assert all(torch.allclose(local_weights[name], ray_weights[name], atol=1e-4) for name in local_weights)
    _check_same_graphs(one, other)


def _check_same_graphs(local: Graphs, ray: Graphs) -> None:
    assert [asdict(call) for call in local.logical.calls] == [asdict(call) for call in ray.logical.calls]
    assert local.logical.edges == ray.logical.edges and local.logical.carried == ray.logical.carried
    assert [call.name for call in local.execution.calls] == [call.name for call in ray.execution.calls]
    assert {role.name: role.pool for role in ray.physical.roles} == {
        "actor": "actor",
        "critic": "critic",
        "estimator": "critic",
        "sampler": "environments",
    }
    assert {role.pool for role in local.physical.roles} == {"driver"}
    [whole], parts = local.physical.shards, ray.physical.shards
    assert [shard.environments for shard in parts] == [(0, 1), (2, 3)] and whole.environments == (0, 1, 2, 3)
    assert sum(shard.steps for shard in parts) == whole.steps == 64
    last = [call.name for call in ray.execution.stages()[-1]]
    assert last == ["critic.update", "actor.update"] and len(local.execution.stages()[-1]) == 1
    assert not local.execution.overlaps()
    assert "published" in " ".join(ray.execution.reused) and "published" not in " ".join(local.execution.reused)
    assert re.search(r"sampler\.rollout +environments x 2 ", str(ray.execution))
    assert str(local.logical) == str(ray.logical)


def test_the_levels_are_plain_data_and_say_what_ran() -> None:
    with HybridFlowContext() as ctx:
        parts = Parts(ctx)
        with pytest.raises(UserError, match="nothing has run yet"):
            ctx.graph  # noqa: B018
        parts.epoch(), parts.epoch()
        first = ctx.graph
        experiences = parts.sampler.collect(parts.actor, steps=40)
    logical, physical, execution = first
    assert [call.verb for call in logical.calls[:4]] == ["create_sampler", *["create_network"] * 2, "create_optimizer"]
    assert [call.verb for call in logical.calls[4:]] == ["collect", "compute_gae", "update"]
    assert len(experiences["rewards"].values) == 40 and logical.calls[4].tokens_out == 64
    passing = {(edge.column, edge.writer, edge.reader) for edge in logical.edges}
    assert {("advantages", 5, 6), ("actions", 4, 6), ("rewards", 4, 5), ("weights of actor", 2, 4)} <= passing
    assert ("actions", 4, 5) not in passing  # what GAE doesn't read
    carried = {(edge.column, edge.writer, edge.reader) for edge in logical.carried}
    assert {("weights of actor", 6, 4), ("weights of critic", 6, 5), ("environments", 4, 4)} <= carried
    assert [call.name for call in execution.calls if call.kind != "source"] == [
        "sampler.rollout",
        "critic.compute_values",
        "estimator.compute",
        "estimator.compute",
        "critic.update",
        "actor.update",
    ]
    assert [len(execution.ran(call)) for call in execution.calls] == [0, *[1] * 6]
    [first_run, second_run] = [execution.ran(call)[0] for call in execution.calls if call.verb == "compute"]
    assert first_run.start_s < second_run.start_s
    assert json.loads(json.dumps([asdict(level) for level in first]))
    assert [role.name for role in physical.roles] == ["critic", "actor", "sampler", "estimator"]
    assert "the sampler acts with the actor's own weights" in str(execution)
    assert str(first).count("== ") == 3 and "weights of actor, 456 B from 2 create_network" in str(logical)


def test_bytes_of_the_graphs_are_those_that_pass() -> None:
    with HybridFlowContext() as ctx:
        batch = Parts(ctx).epoch()
        graph = ctx.graph
    passing = {edge.column: edge.bytes for edge in graph.logical.edges if edge.reader == 6 and edge.column in batch}
    assert passing.keys() == {
        "observations", "actions", "log_probs", "response_mask", "sample_id", "returns", "advantages"
    }  # fmt: skip
    for column, size in passing.items():
        values = batch[column].values if isinstance(batch[column], Ragged) else None
        assert values is None or values.nbytes == size, column


def test_what_a_program_makes_by_itself_has_no_writer() -> None:
    with HybridFlowContext() as ctx:
        parts = Parts(ctx)
        experiences = parts.sampler.collect(parts.actor, steps=64)
        rewards = experiences.ragged("rewards")
        shaped = experiences.with_columns(rewards=rewards.like(rewards.values * 0.1))
        advantages = compute_gae(shaped, parts.critic)
        parts.optimizer.update(parts.actor, parts.critic, shaped, advantages)
        edges = {(edge.column, edge.writer, edge.reader) for edge in ctx.graph.logical.edges}
    assert ("rewards", 4, 5) not in edges and ("observations", 4, 5) in edges
    assert abs(advantages.ragged("returns").values).max() < 10


def test_experiences_of_an_earlier_epoch_have_no_writer_either() -> None:
    with HybridFlowContext() as ctx:
        parts = Parts(ctx)
        earlier = parts.sampler.collect(parts.actor, steps=64)
        parts.sampler.collect(parts.actor, steps=32)
        parts.optimizer.update(parts.actor, parts.critic, earlier, compute_gae(earlier, parts.critic))
        graph = ctx.graph.logical
    assert [(call.verb, call.tokens_in) for call in graph.calls[5:]] == [("compute_gae", 64), ("update", 64)]
    assert not [edge for edge in graph.edges if edge.writer == 4]
    assert {edge.bytes for edge in graph.edges if edge.column == "advantages"} == {64 * 4}


def test_several_updates_in_an_epoch_follow_each_other() -> None:
    with HybridFlowContext() as ctx:
        parts = Parts(ctx)
        experiences = parts.sampler.collect(parts.actor, steps=64)
        for _ in range(2):
            advantages = compute_gae(experiences, parts.critic)
            parts.optimizer.update(parts.actor, parts.critic, experiences, advantages)
        logical, _, execution = ctx.graph
        assert ctx.epoch == 1
    weights = {(edge.writer, edge.reader) for edge in logical.edges if edge.column == "weights of critic"}
    assert {(1, 5), (1, 6), (6, 7), (6, 8)} <= weights and (1, 7) not in weights
    assert [(e.writer, e.reader) for e in logical.carried if e.column == "weights of actor"] == [(8, 4), (8, 6)]
    first, second = (execution.ran(call)[0] for call in execution.calls if call.name == "actor.update")
    assert first.start_s < second.start_s


def test_what_the_plan_calls_fused_is() -> None:
    with HybridFlowContext() as ctx:
        parts = Parts(ctx)
        parts.epoch()
        told = ctx.graph.execution.fused
        learner: Any = ctx._program.workers.runtime.runtime._workers["actor"]  # type: ignore[attr-defined]
        sampler: Any = ctx._program.workers.runtime.runtime._workers["sampler"]  # type: ignore[attr-defined]
        logits = learner.model(torch.zeros(2, 4))
        assert sampler.source is learner
    assert any("one node of autograd: actor, critic" in line for line in told)
    assert type(logits.grad_fn).__name__ == "_LayersBackward" and logits.grad_fn.next_functions[0][0] is None
    assert any("one kernel" in line for line in told) and len(learner.optimizer.adamw.param_groups) == 1


def test_another_loss() -> None:
    """A2C, in one step on all experiences."""
    found = []
    for loss in ({}, {"loss": reinforce.bind()}):
        with HybridFlowContext() as ctx:
            Parts(ctx, epochs=1, minibatches=1).epoch(**loss)
            found.append(ctx.metrics)
            assert ctx.graph.logical.calls[-1].function.startswith(f"actor by {'reinforce' if loss else 'ppo_clip'}")
    assert "clip_fraction" in found[0] and "clip_fraction" not in found[1]
    assert found[0]["grad_norm"] == pytest.approx(found[1]["grad_norm"], rel=1e-5)  # on policy they are the same


def test_advantages_are_those_of_the_estimator() -> None:
    with HybridFlowContext() as ctx:
        parts = Parts(ctx)
        experiences = parts.sampler.collect(parts.actor, steps=64)
        found = compute_gae(experiences, parts.critic, gamma=0.7, lam=0.2)
        valued = parts.critic.program.workers.critic.compute_values(experiences)
    expected = gae(valued, gamma=0.7, lam=0.2)
    for name in ("advantages", "returns"):
        np.testing.assert_array_equal(found.ragged(name).values, expected[name].values)
    np.testing.assert_array_equal(found.ragged("values").values, valued.ragged("values").values)


def test_metrics_and_the_line_tell_of_the_last_epoch(capsys: pytest.CaptureFixture[str]) -> None:
    with HybridFlowContext() as ctx:
        assert ctx.metrics == {} and str(ctx) == "epoch 0"
        parts = Parts(ctx)
        parts.epoch(steps=400)
        inside, line = ctx.metrics, str(ctx)
        assert parts.sampler.evaluate(parts.actor, 2).count == 2
    assert ctx.metrics == pytest.approx(inside, abs=0.1) and inside["env_steps_per_s"] > 0
    assert re.fullmatch(r"epoch 1  return [\d.]+  [\d,.]+k? steps/s  \S+ \(gen .* learn \d+%\)", line)
    assert capsys.readouterr() == ("", "")  # a program's output is its own


def test_on_a_terminal_a_line_follows_the_epochs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    with HybridFlowContext() as ctx:
        parts = Parts(ctx)
        parts.epoch(), parts.epoch()
    out, err = capsys.readouterr()
    assert not out and re.search(r"epoch 2  return .* steps/s .*\n", err)


def test_steps_that_environments_can_t_share_evenly() -> None:
    with HybridFlowContext() as ctx:
        parts = Parts(ctx)
        assert len(parts.epoch(steps=9)["actions"].values) == 9
        assert len(parts.epoch(steps=3)["actions"].values) == 3
        assert [shard.steps for shard in ctx.graph.physical.shards] == [3]


@pytest.mark.parametrize("kind", ["GRU", "LSTM", "attention"])
def test_networks_with_a_memory(kind: str, tmp_path: Path) -> None:
    with HybridFlowContext() as ctx:
        parts = Parts(ctx, kind=kind)
        parts.epoch()
        assert "memory" in parts.epoch() and parts.sampler.evaluate(parts.actor, 2).count == 2
        passing = {edge.column for edge in ctx.graph.logical.edges if edge.reader == 6}
        assert "memory" in passing and not any("autograd" in fact for fact in ctx.graph.execution.fused)
        ctx.save(tmp_path / "run")
    assert f'kind = "{kind.lower()}"' in (tmp_path / "run" / "config.toml").read_text()


def test_continuous_actions_and_a_typed_configuration() -> None:
    with HybridFlowContext() as ctx:
        sampler = ctx.create_sampler(EnvironmentConfig(id="Pendulum-v1", num_envs=2))
        actor = ctx.create_network("MLP", [8], policy_head=True, activation="relu", normalise=True)
        critic = ctx.create_network("MLP", [])
        optimizer = ctx.create_optimizer("AdamW", [critic, actor], weight_decay=0.1, minibatches=1)
        experiences = sampler.collect(actor, 20)
        optimizer.update(actor, critic, experiences, compute_gae(experiences, critic, gamma=0.9, lam=0.8))
        assert experiences["actions"].values.shape == (20, 1)
        assert ctx._program.config().ppo.gamma == 0.9


Mistake = Callable[[HybridFlowContext, Parts], object]


BEFORE: dict[str, tuple[Callable[[HybridFlowContext], object], str]] = {
    "runtime": (lambda ctx: HybridFlowContext("rya"), r"runtime 'rya' is not known; did you mean 'ray'\?"),  # type: ignore[arg-type]
    "device": (lambda ctx: HybridFlowContext(device="tpu"), "known are auto, cpu, cuda"),  # type: ignore[arg-type]
    "workers": (lambda ctx: HybridFlowContext(workers=2), 'no effect with runtime = "local"'),
    "negative workers": (lambda ctx: HybridFlowContext("ray", workers=-2), "workers: -2, expected a whole number"),
    "threads": (lambda ctx: HybridFlowContext(threads=0), "threads: 0, expected"),
    "no GPU": (lambda ctx: HybridFlowContext(device="cuda"), "torch finds no GPU here"),
    "no dict": (lambda ctx: ctx.create_sampler("CartPole-v1"), "'CartPole-v1', expected a dict"),  # type: ignore[arg-type]
    "no list of sizes": (lambda ctx: ctx.create_network("MLP", 256), "sizes: 256, expected a list"),  # type: ignore[arg-type]
    "no list of networks": (lambda ctx: ctx.create_optimizer("Adam", 1), "networks: 1, expected a list"),  # type: ignore[arg-type]
    "unknown environment": (lambda ctx: ctx.create_sampler({"env": "CartPol-v1"}), "did you mean 'CartPole-v1'"),
    "no environment": (lambda ctx: ctx.create_sampler({"num_envs": 2}), 'no "env" in'),
    "unknown key": (lambda ctx: ctx.create_sampler({**CARTPOLE, "num_env": 2}), "did you mean num_envs"),
    "steps of a rollout": (lambda ctx: ctx.create_sampler({**CARTPOLE, "steps_per_rollout": 2}), "collect says"),
    "no environments": (lambda ctx: ctx.create_sampler({**CARTPOLE, "num_envs": 0}), "num_envs = 0"),
    "two samplers": (lambda ctx: [ctx.create_sampler(CARTPOLE), ctx.create_sampler(CARTPOLE)], "has a sampler"),
    "unknown network": (lambda ctx: ctx.create_network("MPL", [8]), r"'MPL' is not known; did you mean 'MLP'\?"),
    "size of zero": (lambda ctx: ctx.create_network("MLP", [8, 0]), "a size: 0, expected a whole number of at least 1"),
    "size of a half": (lambda ctx: ctx.create_network("MLP", [8.5]), "a size: 8.5"),  # type: ignore[list-item]
    "sizes twice": (lambda ctx: ctx.create_network("MLP", [8], hidden=[16]), "hidden is what the sizes say"),
    "memory without width": (lambda ctx: ctx.create_network("GRU", []), "needs the width of its memory"),
    "unknown option": (lambda ctx: ctx.create_network("MLP", [8], activatoin="relu"), "did you mean activation"),
    "two policies": (
        lambda ctx: [ctx.create_network("MLP", [8], True), ctx.create_network("MLP", [8], True)],
        "policy head",
    ),
    "unknown optimizer": (lambda ctx: ctx.create_optimizer("Adm", []), r"'Adm' is not known; did you mean 'Adam'\?"),
    "nothing to move": (lambda ctx: ctx.create_optimizer("Adam", []), "no networks"),
    "no network": (lambda ctx: ctx.create_optimizer("Adam", ["actor"]), "got str, expected a network"),  # type: ignore[list-item]
    "learning rate": (lambda ctx: ctx.create_optimizer("Adam", [ctx.create_network("MLP", [8])], lr=0.0), "lr = 0.0"),
    "decay": (lambda ctx: ctx.create_optimizer("Adam", [ctx.create_network("MLP", [8])], weight_decay=0.1), "AdamW"),
    "schedule": (
        lambda ctx: ctx.create_optimizer("Adam", [ctx.create_network("MLP", [8])], schedule="linear"),
        "length of a run",
    ),
    "loading nothing": (lambda ctx: ctx.load_checkpoint("x"), "create sampler, networks and optimizer before"),
}


@pytest.mark.parametrize("name", BEFORE)
def test_mistakes_before_anything_runs_take_one_line(name: str) -> None:
    mistake, expected = BEFORE[name]
    with HybridFlowContext() as ctx, pytest.raises(UserError, match=expected) as caught:
        mistake(ctx)
    assert "\n" not in str(caught.value) and not ctx._program.runs


def other_network() -> Network:
    return HybridFlowContext().create_network("MLP", [8], policy_head=True)


def without_critic(ctx: HybridFlowContext, parts: Parts) -> None:
    with HybridFlowContext() as other:
        sampler = other.create_sampler(CARTPOLE)
        actor, critic = other.create_network("MLP", [8], True), other.create_network("MLP", [8])
        optimizer = other.create_optimizer("Adam", [actor])
        experiences = sampler.collect(actor, 8)
        optimizer.update(actor, critic, experiences, compute_gae(experiences, critic))


RUNNING: dict[str, tuple[Mistake, str]] = {
    "a critic acts": (lambda ctx, p: p.sampler.collect(p.critic, 8), "can't act; create it with policy_head=True"),
    "a critic is evaluated": (lambda ctx, p: p.sampler.evaluate(p.critic), "can't act"),
    "no steps": (lambda ctx, p: p.sampler.collect(p.actor, 0), "steps: 0, expected a whole number of at least 1"),
    "no episodes": (lambda ctx, p: p.sampler.evaluate(p.actor, 0), "episodes: 0"),
    "another context": (lambda ctx, p: p.sampler.collect(other_network(), 8), "of another context"),
    "a policy gives values": (lambda ctx, p: compute_gae(p.epoch(), p.actor), "gives no values"),
    "values of nothing": (lambda ctx, p: compute_gae(None, p.critic), "got NoneType, expected what sampler.collect gave"),  # type: ignore[arg-type]
    "no critic": (lambda ctx, p: compute_gae(p.epoch(), "critic"), "got str, expected a network"),  # type: ignore[arg-type]
    "discount": (lambda ctx, p: compute_gae(p.epoch(), p.critic, gamma=1.5), "gamma = 1.5"),
    "swapped networks": (lambda ctx, p: p.optimizer.update(p.critic, p.actor, *[p.epoch()] * 2), "can't act"),
    "not in the optimizer": (without_critic, "the critic isn't in this optimizer"),
    "a loss without parameters": (
        lambda ctx, p: p.optimizer.update(p.actor, p.critic, *[p.epoch()] * 2, loss=reinforce),  # type: ignore[arg-type]
        r"such as reinforce\.bind\(\)",
    ),
    "swapped batches": (
        lambda ctx, p: p.optimizer.update(p.actor, p.critic, compute_gae(p.epoch(), p.critic), p.epoch()),
        "experiences: without",
    ),
    "no advantages": (
        lambda ctx, p: p.optimizer.update(p.actor, p.critic, *[p.sampler.collect(p.actor, 8)] * 2),
        "advantages: without values, advantages, returns",
    ),
    "advantages of others": (
        lambda ctx, p: p.optimizer.update(p.actor, p.critic, p.epoch(64), compute_gae(p.epoch(32), p.critic)),
        "are not of these experiences",
    ),
    "too late": (lambda ctx, p: [p.epoch(), ctx.create_network("MLP", [8])], "the program runs already"),
}


@pytest.mark.parametrize("name", RUNNING)
def test_mistakes_of_a_program_take_one_line(name: str) -> None:
    mistake, expected = RUNNING[name]
    with HybridFlowContext() as ctx:
        parts = Parts(ctx)
        with pytest.raises(UserError, match=expected) as caught:
            mistake(ctx, parts)
    assert "\n" not in str(caught.value)


def test_after_the_end_everything_is_refused(tmp_path: Path) -> None:
    with HybridFlowContext() as ctx:
        parts = Parts(ctx)
        experiences = parts.epoch()
        assert ctx._program.workers.runtime.trace.roles.keys() == ctx._program.workers.runtime.runtime.roles.keys()  # type: ignore[attr-defined]
    assert not ctx._program.workers.runtime.runtime.roles  # type: ignore[attr-defined]
    assert ctx.epoch == 1 and ctx.graph.logical.calls and ctx.metrics
    calls: list[Callable[[], object]] = [
        lambda: parts.sampler.collect(parts.actor, 8),
        lambda: parts.sampler.evaluate(parts.actor),
        lambda: compute_gae(experiences, parts.critic),
        lambda: parts.optimizer.update(parts.actor, parts.critic, experiences, experiences),
        lambda: ctx.create_network("MLP", [8]),
        lambda: ctx.save(tmp_path / "x"),
        lambda: ctx.save_checkpoint(tmp_path / "x"),
    ]
    for call in calls:
        with pytest.raises(UserError, match="the context is closed"):
            call()


def test_an_error_inside_is_the_one_that_is_told() -> None:
    with pytest.raises(ZeroDivisionError), HybridFlowContext() as ctx:
        Parts(ctx).epoch()
        ctx.epoch / 0
    assert ctx._program.closed


def test_spaces_that_no_network_fits_are_told_before_work() -> None:
    with HybridFlowContext() as ctx:
        sampler = ctx.create_sampler({"env": "Blackjack-v1"})
        actor = ctx.create_network("MLP", [8], policy_head=True)
        with pytest.raises(UserError, match="FlattenObservation"):
            sampler.collect(actor, 8)


def test_the_example_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = ROOT / "examples" / "context_cartpole.py"
    monkeypatch.setattr("sys.argv", [str(path), "--epochs", "1", "--steps", "64", "--save", str(tmp_path / "run")])
    runpy.run_path(str(path), run_name="__main__")
    out = capsys.readouterr().out
    assert out.startswith("epoch 1  ") and "evaluated" in out
    assert [f"== {name} ==" in out for name in Graphs._fields] == [True] * 3
    assert (tmp_path / "run" / "model" / "policy.safetensors").is_file()
