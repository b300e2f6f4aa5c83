import json
import subprocess
import sys

import pytest

from hybridflow.core.errors import DataError
from hybridflow.data.prompts import DataConfig, PromptSource
from hybridflow.data.task_rewards import exact, number, positions
from hybridflow.data.tasks import load_data, load_task, tasks
from hybridflow.data.text import Tokenizer
from hybridflow.rollout.rewards import RewardPool, RewardSpec


def prompts(records) -> set[str]:
    return {record.prompt for record in records}


@pytest.mark.parametrize(
    ("name", "options", "train", "held_out"),
    [
        ("addition", {}, 80, 20),
        ("addition", {"digits": 2}, 8000, 200),
        ("addition", {"digits": 2, "format": "compact", "size": 300, "eval_size": 3000}, 300, 2000),
        ("addition", {"digits": 6, "size": 500}, 500, 200),
        ("reverse", {}, 10_000, 200),
        ("sort", {"length": 1}, 8, 2),
        ("sort", {"length": 12, "size": 50, "eval_size": 5}, 50, 5),
    ],
)
def test_train_and_held_out_are_disjoint_and_complete(name, options, train, held_out):
    task = load_task(name, options, seed=1)
    assert (len(task.train), len(task.evaluation)) == (train, held_out)
    assert (len(prompts(task.train)), len(prompts(task.evaluation))) == (train, held_out)
    assert not prompts(task.train) & prompts(task.evaluation)
    other = load_task(name, options, seed=2)
    assert other.evaluation == task.evaluation and other.train != task.train
    assert load_task(name, options, seed=1) == task
    assert not prompts(other.train) & prompts(task.evaluation)


def test_what_the_tasks_ask():
    text = load_task("addition", {}, 0)
    for record in text.train:
        a, b = (int(word) for word in record.prompt.removeprefix("What is ").removesuffix("? Answer:").split(" + "))
        assert record.fields == {"answer": str(a + b)} and record.completion == f" {a + b}"
    [compact] = load_task("addition", {"digits": 3, "format": "compact", "size": 1}, 0).train
    a, b = (int(word) for word in compact.prompt.removesuffix("=").split("+"))
    assert compact.completion == compact.fields["answer"] == str(a + b)
    for name, answer in (("reverse", lambda s: s[::-1]), ("sort", lambda s: "".join(sorted(s)))):
        for record in load_task(name, {"length": 3, "size": 9}, 0).train:
            assert len(record.prompt) == 4 and record.prompt.endswith(">")
            assert record.completion == record.fields["answer"] == answer(record.prompt[:-1])


@pytest.mark.parametrize(
    ("name", "options"), [("addition", {}), ("addition", {"format": "compact"}), ("reverse", {}), ("sort", {})]
)
def test_alphabets_and_rewards_fit_the_demonstrations(name, options):
    task = load_task(name, options | {"size": 20}, 0)
    assert task.alphabet and task.reward
    tokenizer = Tokenizer.characters(task.alphabet)
    source = PromptSource(task.train, tokenizer)
    assert len(source.demonstrations(0, 20).ragged("tokens")) == 20
    rows = [record for record in task.train if record.completion]
    with RewardPool([RewardSpec(task.reward)], workers=1) as pool:
        right = pool.score([""] * 20, [str(row.completion) for row in rows], [row.fields for row in rows])
        wrong = pool.score([""] * 20, [f"{row.completion}0" for row in rows], [row.fields for row in rows])
    assert {result.score for result in right} == {1.0}
    assert all(result.score is not None and result.score < 1.0 for result in wrong)


def test_number():
    assert [number(text, "1234") for text in (" 1234", "1,234.", "It is 01234!", "1234 = 12")] == [1.0] * 4
    assert [number(text, "1234") for text in ("", "none", "-1234", "12345", "5 or 1234", "9" * 5000)] == [0.0] * 6
    assert number("0", "0") == 1.0


def test_exact():
    assert exact(" 46\n", "46") == 1.0 and exact("46=", "46") == exact("", "46") == 0.0


def test_positions():
    assert positions("54321", "54321") == {"score": 1.0, "exact": 1.0}
    assert positions("54300", "54321") == {"score": 0.6, "exact": 0.0}
    assert positions("543", "54321") == {"score": 0.6, "exact": 0.0}
    assert positions("5432154321", "54321") == {"score": 0.5, "exact": 0.0}  # it didn't end
    assert positions("", "5")["score"] == 0.0


def test_reasoning_gym():
    task = load_task("reasoning_gym:leg_counting", {"size": 30, "eval_size": 10, "max_animals": 4}, seed=1)
    assert 1 <= len(task.train) <= 30 and len(task.evaluation) == 10
    assert not prompts(task.train) & prompts(task.evaluation)
    assert (
        load_task("reasoning_gym:leg_counting", {"size": 3, "eval_size": 10, "max_animals": 4}, 2).evaluation
        == task.evaluation
    )
    row = task.train[0]
    answer = row.fields["answer"]
    responses = [answer, f"I think <answer>1</answer>, no <answer> {answer} </answer>!", f"{answer}0000", ""]
    assert task.reward
    with RewardPool([RewardSpec(task.reward)], workers=1) as pool:
        scores = [result.score for result in pool.score([row.prompt] * 4, responses, [row.fields] * 4)]
    assert scores[:2] == [1.0, 1.0] and scores[2] is not None and scores[2] < 1.0 and scores[3] == 0.0


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("adition", {}, "unknown task 'adition': did you mean addition"),
        ("chess", {}, "unknown task 'chess': known are addition, reverse, sort, reasoning_gym:NAME"),
        ("addition", {"digit": 2}, "task addition: unknown option 'digit'; known are digits, format, size, eval_size"),
        ("addition", {"digits": 7}, "task addition: digits = 7, expected 1 to 6"),
        ("addition", {"digits": "two"}, "task addition: digits = 'two', expected a whole number"),
        ("addition", {"digits": True}, "task addition: digits = True, expected a whole number"),
        ("addition", {"format": "latex"}, 'format = \'latex\', expected "text" or "compact"'),
        ("addition", {"format": 1}, "format = 1, expected a text"),
        ("reverse", {"length": 0}, "task reverse: length = 0, expected 1 to 12"),
        ("sort", {"size": 0}, "task sort: size = 0, expected 1 to"),
        ("reasoning_gym:leg_countin", {}, "unknown task 'reasoning_gym:leg_countin': did you mean leg_counting"),
        ("reasoning_gym:leg_counting", {"animals": 1}, "unknown option 'animals'; known are size, eval_size, min_animals"),
        (
            "reasoning_gym:leg_counting",
            {"max_animals": -1},
            "task reasoning_gym:leg_counting: .*; given are {'max_animals': -1}",
        ),
        ("reasoning_gym:leg_counting", {"max_animals": "x"}, "task reasoning_gym:leg_counting: "),
        ("reasoning_gym:leg_counting", {"size": 1.5}, "size = 1.5, expected a whole number"),
    ],
)
def test_tasks_that_cannot_be(name, options, message):
    with pytest.raises(DataError, match=message) as caught:
        load_task(name, options, seed=0)
    assert "\n" not in str(caught.value)


def test_reasoning_gym_missing_names_the_extra(monkeypatch):
    monkeypatch.delitem(sys.modules, "hybridflow.data.reasoning", raising=False)
    monkeypatch.delattr("hybridflow.data.reasoning", raising=False)
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(DataError, match=r'needs reasoning-gym; pip install "hybridflow\[tasks\]"'):
        load_task("reasoning_gym:leg_counting", {}, 0)


def test_task_rewards_import_nothing_heavy():
    program = "import sys, hybridflow.data.task_rewards; print(*{'torch', 'numpy', 'pydantic'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "\n"


def test_tasks_are_described():
    assert set(tasks()) == {"addition", "reverse", "sort", "reasoning_gym:NAME"}


def test_load_data(tmp_path):
    assert load_data(DataConfig(task="sort", options={"length": 2}), 1) == load_task("sort", {"length": 2}, 1)
    rows = [{"prompt": "a", "completion": "b", "answer": "c"}]
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    plain = load_data(DataConfig(prompts=str(path)), 1)
    assert plain.train[0].fields == {"completion": "b", "answer": "c"}
    assert (list(plain.evaluation), plain.reward, plain.alphabet) == ([], None, None)
    tuned = load_data(DataConfig(prompts=str(path), eval_prompts=str(path)), 1, demonstrations=True)
    assert tuned.train[0].completion == "b" and tuned.evaluation[0].prompt == "a"
