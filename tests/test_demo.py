"""The main job on the real model: fetched, trained for two steps, evaluated, exported, loaded again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import Outcome


@pytest.mark.timeout(400)
def test_two_steps_of_the_demo(
    hybridflow: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, real_model: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(2)
    outcome = hybridflow("demo", "--train.steps", 2, "--train.prompts_per_step", 4, "--evaluation.limit", 4)
    assert outcome.code == 0, outcome
    assert "before" in outcome.out and "after" in outcome.out and "95 % confidence" in outcome.out
    run = tmp_path / "runs" / "demo"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    # The first update is on policy: the rollout engine and the training forward differ by bfloat16's rounding alone.
    assert abs(lines[1]["ratio/mean"] - 1) < 0.02 and lines[1]["actor/policy_kl"] < 0.01
    assert (run / "report.html").is_file() and (run / "model" / "config.json").is_file()

    said = hybridflow("generate", run, "What is 3 + 4? Answer:", "--max-new-tokens", 3, "--json")
    assert said.code == 0

    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    model = AutoModelForCausalLM.from_pretrained(run / "model", dtype=torch.float32)
    ids = tokenizer("What is 3 + 4? Answer:", return_tensors="pt")
    out = model.generate(**ids, max_new_tokens=3, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert tokenizer.decode(out, skip_special_tokens=True) == json.loads(said.out)[0]["response"]
