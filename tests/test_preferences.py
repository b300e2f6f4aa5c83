"""Preference learning through the real program: rank, reward_model, dpo, and a reward model as scorer."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import REVERSE, Outcome, with_keys
from test_bad_input import _toml as to_toml_text
from test_runs import assert_equal, records, run, state

from hybridflow.build import build
from hybridflow.commands.rank import rank
from hybridflow.config import validate

Program = Callable[..., Outcome]
SEVENS = "def share(response): return response.count('7') / 4\n"
PAIRS: dict[str, Any] = {
    "threads": 1,
    "actor": {"fresh": {"hidden_size": 32}, "optimizer": {"lr": 2e-3}},
    "train": {"steps": 50, "prompts_per_step": 32},
    "checkpoint": {},
}


class Work:
    """A folder with a fresh policy's samples, ranked by how many sevens they hold."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.seed = folder, seed
        (folder / "sevens.py").write_text(SEVENS)
        reward = {"functions": [f"{folder / 'sevens.py'}:share"]}
        evaluation = {"temperature": 1.0, "limit": 100}
        self.policy = with_keys(REVERSE, seed=seed, reward=reward, evaluation=evaluation, data__options={"length": 4})
        rank(self.write(self.policy), (), folder / "pairs.jsonl", 1000)
        self.sevens = self.share()

    def write(self, data: dict[str, Any]) -> Path:
        path = self.folder / "run.toml"
        path.write_text(to_toml_text({"run_dir": str(self.folder / "unused"), **data}))
        return path

    def train(self, algorithm: str, name: str, **keys: Any) -> dict[str, Any]:
        """The result of a run on the pairs."""
        data = {**PAIRS, "algorithm": algorithm, "seed": self.seed, "data": {"pairs": str(self.folder / "pairs.jsonl")}}
        out = run(with_keys(data, **keys), self.folder / name)
        return json.loads((out / "result.json").read_text())

    def share(self, model: str | None = None) -> float:
        """Mean share of sevens in responses to held-out prompts, sampled from the fresh policy or from a run's."""
        actor = self.policy["actor"] if model is None else {"model": str(self.folder / model / "model")}
        parts = build(validate(with_keys(self.policy, run_dir="unused", actor=actor), "test"))
        try:
            assert parts.parts.evaluate is not None
            return parts.parts.evaluate().score
        finally:
            parts.runtime.stop()


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Work]:
    return functools.cache(lambda seed: Work(tmp_path_factory.mktemp(f"seed{seed}"), seed))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_dpo_learns_what_the_scorer_prefers(work: Callable[[int], Work], seed: int) -> None:
    one = work(seed)
    result = one.train("dpo", "dpo", dpo={"beta": 0.1})
    assert result["before"]["eval/score"] == 0.5  # the policy is the reference: all ties
    assert result["after"]["eval/score"] > 0.9 and result["after"]["eval/count"] > 30
    assert one.sevens < 0.1 and one.share("dpo") > one.sevens + 0.1


@pytest.mark.parametrize("kind", ["ipo", "kto"])
def test_its_family_learns_too(work: Callable[[int], Work], kind: str) -> None:
    one = work(1)
    assert one.train("dpo", kind, dpo={"kind": kind, "beta": 0.1})["after"]["eval/score"] > 0.9
    assert one.share(kind) > one.sevens + 0.1


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_reward_model_predicts_preferences_and_then_teaches_them(work: Callable[[int], Work], seed: int) -> None:
    one = work(seed)
    result = one.train("reward_model", "reward")
    assert result["after"]["eval/score"] > 0.9
    last = records(one.folder / "reward")[-1]
    assert last["eval/brier"] < 0.1 and 0 <= last["eval/calibration_error"] < 0.2 and last["eval/margin"] > 1
    model = {"model": str(one.folder / "reward" / "model")}
    policy = with_keys(one.policy, reward=model, train={"steps": 25, "prompts_per_step": 8, "group_size": 8})
    out = run(policy, one.folder / "taught")
    scores = [record["reward/mean"] for record in records(out)[1:]]
    assert scores[-1] > scores[0] + 1
    assert one.share("taught") > one.sevens + 0.1


def pairs_file(folder: Path, *rows: dict[str, Any]) -> str:
    """A file of a few pairs over digits: of two responses, the one with more sevens."""
    made = rows or [
        {"prompt": f"{i}{j}>", "chosen": f"7{i}7", "rejected": f"{i}{j}", "margin": 0.5}
        for i in range(10)
        for j in range(3)
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
    return str(folder / "pairs.jsonl")


KINDS = {
    "reward_model": {"algorithm": "reward_model", "reward_model": {"use_margins": True}},
    "dpo": {"algorithm": "dpo", "dpo": {"label_smoothing": 0.1}},
    "ipo": {"algorithm": "dpo", "dpo": {"kind": "ipo"}, "actor__dtype": "bfloat16"},
    "kto": {"algorithm": "dpo", "dpo": {"kind": "kto"}},
}


@pytest.mark.parametrize("name", KINDS)
def test_twenty_and_twenty_steps_are_forty_bit_for_bit(name: str, tmp_path: Path) -> None:
    train = {"prompts_per_step": 8, "minibatches": 2, "token_budget": 150}
    data = {**PAIRS, "data": {"pairs": pairs_file(tmp_path)}, "checkpoint": {"every": 20}, "evaluation": {"every": 20}}
    data = with_keys(data, train=train, **KINDS[name])
    whole = run(data, tmp_path / "whole", train__steps=40)
    run(data, tmp_path / "halves", train__steps=20)
    halves = run(data, tmp_path / "halves", resume="latest", train__steps=40)
    assert_equal(state(whole), state(halves))
    assert records(whole) == records(halves) and len(records(whole)) == 41


@pytest.mark.parametrize("name", ["reward_model", "dpo", "kto"])
def test_how_work_is_split_does_not_change_what_is_learned(name: str, tmp_path: Path) -> None:
    """The reference point of KTO included. A large eps keeps Adam from blowing up gradients that are only rounding."""

    def learned(token_budget: int) -> dict[str, torch.Tensor]:
        data = {**PAIRS, "data": {"pairs": pairs_file(tmp_path)}, "run_dir": "unused", **KINDS[name]}
        data = with_keys(data, train={"steps": 3, "prompts_per_step": 10}, actor__optimizer__eps=1e-3)
        made = build(validate(with_keys(data, train__token_budget=token_budget), "test"))
        try:
            made.trainer.train(3)
            return {name: torch.tensor(array) for name, array in made.parts.actor.weights(0).arrays.items()}  # type: ignore[attr-defined]
        finally:
            made.runtime.stop()

    whole, split = learned(4096), learned(16)
    for key, tensor in whole.items():
        torch.testing.assert_close(tensor, split[key], rtol=0, atol=1e-6)


def test_a_run_goes_on_from_its_own_reward_model_and_evaluates_as_it_did(hybridflow: Program, tmp_path: Path) -> None:
    data = {**PAIRS, "data": {"pairs": pairs_file(tmp_path)}, "train": {"steps": 5, "prompts_per_step": 8}}
    for algorithm in ("reward_model", "dpo"):
        out = run(with_keys(data, algorithm=algorithm), tmp_path / algorithm)
        after = json.loads((out / "result.json").read_text())["after"]
        again = json.loads(hybridflow("eval", out, "--json").out)
        assert again["score"] == after["eval/score"] and again["margin"] == records(out)[-1]["eval/margin"] != 0
        onward = run(with_keys(data, algorithm=algorithm, actor={"model": str(out / "model")}), tmp_path / f"{algorithm}-2")
        before = records(onward)[0]["eval/margin"]
        assert before == (again["margin"] if algorithm == "reward_model" else 0)


PAIR = {"prompt": "1>", "chosen": "1", "rejected": "2"}
REFUSED = [
    ("dpo", {"data": {"task": "reverse"}}, "dpo learns from data.pairs, found data.task; hybridflow rank makes pairs"),
    ("reward_model", {"data": {"prompts": "p.jsonl"}}, "reward_model learns from data.pairs, found data.prompts"),
    (
        "grpo",
        {"train__group_size": 2},
        "grpo needs data.task or data.prompts, found data.pairs, which are for reward_model",
    ),
    ("dpo", {"train__group_size": 2}, "train.group_size = 2: dpo samples no responses; remove it"),
    (
        "dpo",
        {"dpo": {"kind": "kto"}, "train__prompts_per_step": 1},
        "compares with responses to other prompts, so it needs 2",
    ),
    ("dpo", {"dpo": {"kind": "ipo", "label_smoothing": 0.1}}, 'label_smoothing belongs to kind = "sigmoid", but kind is'),
    ("dpo", {"reference": {"dtype": "bfloat16"}}, "reference.dtype = 'bfloat16', but the actor has 'float32'"),
    ("dpo", {"reward": {"functions": ["a:b"]}}, "[reward] is set, but dpo on [data] doesn't read it"),
    ("reward_model", {"reference": {"model": "x"}}, "[reference] is set, but reward_model on [data] doesn't read it"),
    ("reward_model", {"reward_model": {"use_margins": True}}, "use_margins needs a margin in every row"),
    ("dpo", {"data": {"pairs": "missing.jsonl"}}, "missing.jsonl: no such file"),
    ("dpo", {"data": {"pairs": "a.jsonl", "task": "sort"}}, "give one of task, prompts and pairs; found task and pairs"),
]


@pytest.mark.parametrize(("algorithm", "keys", "message"), REFUSED, ids=[f"{name}-{'-'.join(k)}" for name, k, _ in REFUSED])
def test_mistakes_are_told_before_a_model_is_made(
    hybridflow: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str, keys: Any, message: str
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a model was made before the mistake was told")

    monkeypatch.setattr("hybridflow.models.decoder.Decoder.__init__", refuse)
    data = {**PAIRS, "algorithm": algorithm, "data": {"pairs": pairs_file(tmp_path, PAIR, {**PAIR, "prompt": "2>"})}}
    (tmp_path / "run.toml").write_text(to_toml_text(with_keys({**data, "run_dir": str(tmp_path / "run")}, **keys)))
    outcome = hybridflow("train", tmp_path / "run.toml")
    assert outcome.code == 2 and len(outcome.err.splitlines()) == 1, outcome
    assert message in outcome.err and not (tmp_path / "run").exists()


def test_long_pairs_and_unknown_characters_are_told(hybridflow: Program, tmp_path: Path, tiny_model: Path) -> None:
    data = {**PAIRS, "algorithm": "dpo", "run_dir": str(tmp_path / "run"), "actor": {"model": str(tiny_model)}}
    for row, message in (
        ({**PAIR, "chosen": "1" * 130}, "has 133 tokens, over the model's 128 positions"),
        ({**PAIR, "chosen": "é"}, "no token for ['é']"),
    ):
        path = tmp_path / "run.toml"
        path.write_text(to_toml_text({**data, "data": {"pairs": pairs_file(tmp_path, row)}}))
        outcome = hybridflow("train", path)
        assert outcome.code == 2 and message in outcome.err and len(outcome.err.splitlines()) == 1


def test_reward_models_that_cannot_judge_are_told(hybridflow: Program, tmp_path: Path, tiny_model: Path) -> None:
    pairs = {**PAIRS, "data": {"pairs": pairs_file(tmp_path)}, "train": {"steps": 1, "prompts_per_step": 4}}
    reward = run(with_keys(pairs, algorithm="reward_model"), tmp_path / "reward") / "model"
    policy = {**REVERSE, "run_dir": str(tmp_path / "run")}
    other = with_keys(policy, actor={"model": str(tiny_model)}, reward={"model": str(reward)})
    both = with_keys(policy, reward={"model": str(reward), "functions": ["json:dumps"]})
    for data, message in (
        (other, f"reward.model: the tokenizer of {reward} is not the actor's; it reads the actor's tokens"),
        (with_keys(policy, reward={"model": str(tiny_model)}), f"reward.model: {tiny_model} holds a language model"),
        (with_keys(policy, reward={"model": "no/such"}), "no/such"),
        (both, "reward: has both model and functions; give one"),
        (with_keys(policy, actor={"model": str(reward)}), f"{reward}: holds a reward model, expected a language model"),
    ):
        (tmp_path / "run.toml").write_text(to_toml_text(data))
        outcome = hybridflow("train", tmp_path / "run.toml")
        assert outcome.code == 2 and message in outcome.err and len(outcome.err.splitlines()) == 1, outcome
        assert not (tmp_path / "run").exists()


def test_one_model_as_reward_and_another_as_cost(tmp_path: Path) -> None:
    """The cost prefers few sevens, so the two are opposed."""
    digits = [f"{i}{j}" for i in range(10) for j in range(3)]
    good = [{"prompt": f"{d}>", "chosen": f"7{d[0]}7", "rejected": d} for d in digits]
    folders = []
    for name, rows in (("reward", good), ("cost", [{**r, "chosen": r["rejected"], "rejected": r["chosen"]} for r in good])):
        data = {**PAIRS, "algorithm": "reward_model", "data": {"pairs": pairs_file(tmp_path, *rows)}}
        folders.append(str(run(with_keys(data, train={"steps": 15, "prompts_per_step": 16}), tmp_path / name) / "model"))
    scorers = {"reward": {"model": folders[0]}, "cost": {"model": folders[1]}}
    policy = {**REVERSE, "algorithm": "safe_rlhf", **scorers}
    assert np.isfinite(records(run(policy, tmp_path / "run"))[-1]["cost/mean"])
    made = build(validate({**policy, "run_dir": "unused"}, "test"))
    try:
        batch = made.trainer.algorithm.rollout(made.parts.source(1))
    finally:
        made.runtime.stop()
    assert np.corrcoef(batch["scores"], batch["costs"])[0, 1] < -0.5 and not batch["score_failed"].any()
