"""Rollouts of a language model, however its prompts are dealt to ranks."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
from test_learner import SPEC, decoder

from hybridflow.core.batch import Batch, Ragged
from hybridflow.core.errors import UserError
from hybridflow.core.metrics import Metrics
from hybridflow.core.roles import WorkerContext, verb_of
from hybridflow.data.text import Tokenizer
from hybridflow.generation.request import SamplingParams
from hybridflow.models.policy import TextPolicy
from hybridflow.parallel.mesh import ALONE, Line
from hybridflow.workers.parts import WHOLE, Lines
from hybridflow.workers.text_sampler import TextSampler


def sampler(kv_cache_gb: float | None = None) -> TextSampler:
    tokenizer = Tokenizer.characters("0123456789abcdef")
    assert tokenizer.vocab_size <= SPEC.vocab_size
    params = SamplingParams(max_new_tokens=6)
    settings = {"tokenizer": tokenizer, "params": params, "seed": 1, "max_slots": 3, "kv_cache_gb": kv_cache_gb}
    made = TextSampler(WorkerContext(), **settings)
    policy = TextPolicy(decoder())
    read = {"sampled": policy.decoder, "sampled_pp": ALONE, "reading": nullcontext}
    made.attach(SimpleNamespace(networks={"policy": policy}, version=4, lines=WHOLE, **read))
    return made


def prompts() -> Batch:
    rows = [[3, 4, 5], [6], [3, 4, 5], [7, 8], [9, 3, 4, 5]]
    columns = {"prompt": Ragged.from_rows(rows, np.int64), "sample_id": np.arange(5) + 7}
    return Batch(columns | {"expected_length": np.array([3, 9, 0, 9, 1])})


@pytest.mark.parametrize("kv_cache_gb", [None, 0.001])
def test_responses_and_metrics_do_not_depend_on_how_prompts_are_dealt(kv_cache_gb: float | None) -> None:
    whole, merged, parts = sampler(kv_cache_gb), Metrics(), []
    together = whole.rollout(prompts())
    for rows in ([0, 3], [], [1, 2, 4]):
        rank = sampler(kv_cache_gb)
        parts.append(rank.rollout(prompts().rows(np.array(rows, np.int64))))
        merged.merge(rank.context.metrics)
    apart = Batch.concat(parts).rows([0, 2, 3, 1, 4])
    for name in ("tokens", "policy_version", "response_mask"):
        np.testing.assert_array_equal(apart[name].values, together[name].values)
    np.testing.assert_allclose(apart["log_probs"].values, together["log_probs"].values, atol=1e-6)
    assert apart["response"].tolist() == together["response"].tolist()
    assert merged.values() == whole.context.metrics.values() and merged.values()["tokens"] > 5


def test_no_prompts_give_empty_columns_of_the_right_types() -> None:
    one = sampler()
    empty = one.rollout(prompts().rows(np.zeros(0, np.int64)))
    assert len(empty) == 0 and set(empty.columns) == set(verb_of(TextSampler.rollout).writes)
    assert one.context.metrics.values() == {"tokens": 0.0}


def test_vllm_is_refused_where_the_policy_is_cut() -> None:
    made = TextSampler(
        WorkerContext(),
        tokenizer=Tokenizer.characters("0123456789abcdef"),
        params=SamplingParams(max_new_tokens=6),
        seed=1,
        max_slots=3,
        kv_cache_gb=None,
        engine="vllm",
    )
    source = SimpleNamespace(networks={"policy": TextPolicy(decoder())}, version=4, lines=Lines(tp=Line(2, 0)))
    with pytest.raises(
        UserError, match=r'generation.engine: "vllm" draws from whole models, not from cut ones \(tp 2, pp 1'
    ):
        made.attach(source)
