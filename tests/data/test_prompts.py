import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.core.config import apply_overrides, parse, read_toml, to_toml
from hybridflow.core.errors import ConfigError, DataError
from hybridflow.data.prompts import DataConfig, PromptRecord, PromptSource, did_you_mean, read_records
from hybridflow.data.text import Template, Tokenizer

CHARACTERS = Tokenizer.characters("0123456789+=> ")


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def records(count: int) -> list[PromptRecord]:
    return [PromptRecord(f"{i}+1=", {"answer": str(i + 1)}, str(i + 1)) for i in range(count)]


def texts(batch) -> list[str]:
    return [CHARACTERS.decode(row) for row in batch.ragged("prompt")]


def test_the_three_formats_say_the_same(tmp_path):
    import pyarrow
    import pyarrow.parquet

    rows = [{"prompt": "a, b", "answer": "7", "kind": "x"}, {"prompt": "é\nc", "answer": "8", "kind": "y"}]
    lines = [json.dumps(row) for row in rows]
    write(tmp_path / "p.jsonl", "\ufeff" + "\n\n".join(lines) + "\n")
    write(tmp_path / "p.csv", 'prompt,answer,kind\n"a, b",7,x\n"é\nc",8,y\n\n')
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "p.parquet")
    expected = [PromptRecord(row["prompt"], {"answer": row["answer"], "kind": row["kind"]}) for row in rows]
    for kind in ("jsonl", "csv", "parquet"):
        assert read_records(tmp_path / f"p.{kind}") == expected


def test_other_columns_messages_and_completions(tmp_path):
    messages = [{"role": "user", "content": "hi"}]
    path = write(tmp_path / "p.jsonl", json.dumps({"question": messages, "solution": "yes", "n": [1, 2]}))
    assert read_records(path, "question", "solution") == [PromptRecord(messages, {"n": [1, 2]}, "yes")]
    assert read_records(path, "question") == [PromptRecord(messages, {"n": [1, 2], "solution": "yes"})]


GOOD = '{"prompt": "a", "answer": "1"}\n'


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("p.jsonl", GOOD + "{oops}", r"p\.jsonl:2: not valid JSON: .* at column 2"),
        ("p.jsonl", GOOD + "[1]", r"p\.jsonl:2: is a list, expected an object"),
        (
            "p.jsonl",
            GOOD + '\n{"promt": "a"}',
            r"p\.jsonl:3: no column 'prompt'; found promt; did you mean prompt_field = 'promt'",
        ),
        ("p.jsonl", '{"q": "a", "z": 1}', r"p\.jsonl:1: no column 'prompt'; found q, z; set prompt_field to one of them"),
        ("p.jsonl", GOOD + '{"prompt": 3}', r"p\.jsonl:2: prompt is 3 \(int\), expected a text or a list of messages"),
        ("p.jsonl", GOOD + '{"prompt": null}', r"p\.jsonl:2: prompt is None \(NoneType\)"),
        ("p.jsonl", GOOD + '{"prompt": " "}', r"p\.jsonl:2: prompt is empty"),
        ("p.jsonl", GOOD + '{"prompt": []}', r"p\.jsonl:2: prompt is an empty list"),
        ("p.jsonl", '{"prompt": [{"role": "user"}]}', r"p\.jsonl:1: prompt has {'role': 'user'} as message 1, expected"),
        ("p.jsonl", "\n \n", r"p\.jsonl: is empty"),
        ("p.csv", "", r"p\.csv: is empty"),
        ("p.csv", "prompt,answer\n", r"p\.csv: is empty"),
        ("p.csv", "prompt,answer\na,1\nb\n", r"p\.csv, row 2: has 1 columns, the header has 2"),
        ("p.csv", "prompt,answer\na,1,2\n", r"p\.csv, row 1: has 3 columns"),
        ("p.csv", 'prompt\n"a\n', r"p\.csv, line 2: not valid CSV: unexpected end of data"),
        ("p.csv", "question\na\n", r"p\.csv, row 1: no column 'prompt'; found question"),
        ("p.parquet", "nonsense", r"p\.parquet: not a Parquet file"),
        ("p.json", "[]", r"can't read \.json; supported are \.jsonl, \.csv, \.parquet"),
        ("prompts", "a", "can't read a file without extension; supported"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, name, text, message):
    with pytest.raises(DataError, match=message) as caught:
        read_records(write(tmp_path / name, text))
    assert "\n" not in str(caught.value)


def test_paths_that_cannot_be_read(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        read_records(tmp_path / "p.jsonl")
    with pytest.raises(DataError, match="is a folder, expected a file; supported are"):
        read_records(tmp_path)
    (tmp_path / "p.jsonl").write_bytes(b'{"prompt": "\xff"}')
    with pytest.raises(DataError, match="not UTF-8 text"):
        read_records(tmp_path / "p.jsonl")


def test_parquet_without_pyarrow_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(DataError, match=r'pip install "hybridflow\[data\]"'):
        read_records(write(tmp_path / "p.parquet", ""))


@pytest.mark.parametrize("value", ["null", '""', "3"])
def test_a_completion_must_be_a_text(tmp_path, value):
    path = write(tmp_path / "p.jsonl", f'{{"prompt": "a", "completion": {value}}}')
    with pytest.raises(DataError, match=r":1: completion is .*, expected a text that is not empty"):
        read_records(path, completion_field="completion")
    with pytest.raises(DataError, match="no column 'answer'; found prompt, completion; set completion_field"):
        read_records(path, completion_field="answer")


def test_a_batch_repeats_every_prompt_side_by_side():
    source = PromptSource(records(10), CHARACTERS, seed=3)
    batch = source.batch(step=2, num_prompts=3, group_size=2)
    assert batch["sample_id"].tolist() == [12, 13, 14, 15, 16, 17]
    assert batch["group_id"].tolist() == [6, 6, 7, 7, 8, 8]
    assert texts(batch)[::2] == texts(batch)[1::2] == batch["prompt_text"].tolist()[::2]
    assert len(set(texts(batch))) == 3
    for prompt, fields in zip(batch["prompt_text"], batch["fields"], strict=True):
        assert int(prompt.split("+")[0]) + 1 == int(fields["answer"])


@settings(max_examples=30, deadline=None)
@given(count=st.integers(1, 12), num_prompts=st.integers(1, 15), seed=st.integers(0, 3))
def test_epochs_are_permutations_wherever_steps_end(count, num_prompts, seed):
    source = PromptSource(records(count), CHARACTERS, seed=seed)
    steps = -(-2 * count // num_prompts)
    dealt = [text for step in range(steps) for text in texts(source.batch(step, num_prompts))]
    everything = sorted(record.prompt for record in records(count))
    assert sorted(dealt[:count]) == sorted(dealt[count : 2 * count]) == everything


def test_a_step_is_a_pure_function_of_seed_and_step():
    one, other = (PromptSource(records(50), CHARACTERS, seed=1) for _ in range(2))
    later = texts(one.batch(7, 8))
    assert texts(other.batch(7, 8)) == later  # without having dealt the steps before
    assert texts(one.batch(0, 50)) != texts(one.batch(1, 50))  # epochs differ
    assert texts(PromptSource(records(50), CHARACTERS, seed=2).batch(7, 8)) != later


def test_all_keeps_the_order_of_the_records():
    source = PromptSource(records(5), CHARACTERS)
    assert texts(source.all()) == [record.prompt for record in records(5)]
    assert source.all()["sample_id"].tolist() == [0, 1, 2, 3, 4]
    assert texts(source.all(2)) == ["0+1=", "1+1="] and len(source.all(9)) == 5


def test_demonstrations():
    batch = PromptSource(records(30), CHARACTERS, seed=1).demonstrations(step=1, num_prompts=4)
    assert batch["sample_id"].tolist() == [4, 5, 6, 7]
    for tokens, mask in zip(batch.ragged("tokens"), batch.ragged("response_mask"), strict=True):
        prompt, response = CHARACTERS.decode(tokens[~mask]), CHARACTERS.decode(tokens[mask], skip_special=False)
        assert prompt.endswith("+1=") and response == f"{int(prompt[:-3]) + 1}<eos>"
        assert not mask[: int(np.argmax(mask))].any() and mask[int(np.argmax(mask)) :].all()


def test_demonstrations_need_completions():
    source = PromptSource([PromptRecord("1+1=", {}, "2"), PromptRecord("2+2=")], CHARACTERS)
    assert len(source.batch(0, 2)) == 2
    with pytest.raises(DataError, match=r"record 2 \('2\+2='\) has no completion"):
        source.demonstrations(0, 1)


def test_long_prompts():
    rows = [PromptRecord("1+1="), PromptRecord("12+34="), PromptRecord("12345+1=")]
    with pytest.raises(DataError, match=r"record 2: its prompt has 6 tokens, max_prompt_tokens is 4 \(2 of 3 are longer\)"):
        PromptSource(rows, CHARACTERS, max_prompt_tokens=4)
    left = PromptSource(rows, CHARACTERS, max_prompt_tokens=4, on_long_prompt="truncate_left")
    assert texts(left.all()) == ["1+1=", "+34=", "5+1="] and (left.num_truncated, left.num_skipped) == (2, 0)
    right = PromptSource(rows, CHARACTERS, max_prompt_tokens=4, on_long_prompt="truncate_right")
    assert texts(right.all()) == ["1+1=", "12+3", "1234"] and right.num_truncated == 2
    skip = PromptSource(rows, CHARACTERS, max_prompt_tokens=6, on_long_prompt="skip")
    assert texts(skip.all()) == ["1+1=", "12+34="] and (skip.num_truncated, skip.num_skipped) == (0, 1)
    assert sorted(texts(skip.batch(3, 2))) == ["1+1=", "12+34="]
    with pytest.raises(DataError, match="all 3 prompts have more than 3 tokens"):
        PromptSource(rows, CHARACTERS, max_prompt_tokens=3, on_long_prompt="skip")


def test_prompts_are_encoded_once(monkeypatch):
    calls = []
    encode = Tokenizer.encode_many

    def counted(self, texts, special=False):
        calls.append(len(texts))
        return encode(self, texts, special)

    monkeypatch.setattr(Tokenizer, "encode_many", counted)
    source = PromptSource(records(20), CHARACTERS)
    for step in range(5):
        source.batch(step, 8, 2)
        source.demonstrations(step, 8)
    assert calls == [20, 20]  # the prompts, the completions


def test_templates_and_texts():
    chat = "{% for m in messages %}{{ m.content }}>{% endfor %}"
    tokenizer = Tokenizer(CHARACTERS.backend, CHARACTERS.config, (1,), 0, chat)
    messages = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}, {"role": "user", "content": "3"}]
    source = PromptSource([PromptRecord("7"), PromptRecord(messages)], tokenizer, Template("chat", "0"))
    assert texts(source.all()) == ["0>7>", "0>1>2>3>"]
    assert source.all()["prompt_text"].tolist() == ["7", "3"]
    assert texts(PromptSource([PromptRecord("7")], tokenizer, Template("1+{prompt}=")).all()) == ["1+7="]


def test_nothing_to_learn_from():
    with pytest.raises(DataError, match="no prompts"):
        PromptSource([], CHARACTERS)


def test_did_you_mean():
    assert did_you_mean("revers", ["reverse", "sort"]) == "did you mean reverse?"
    assert did_you_mean("xyz", ["reverse", "sort"]) == "known are reverse, sort"


def test_config_reaches_the_source():
    data = {"task": "addition", "template": "1+{prompt}", "max_prompt_tokens": 3, "on_long_prompt": "truncate_right"}
    source = parse(DataConfig, data, "run.toml").source([PromptRecord("7=")], CHARACTERS, seed=0)
    assert texts(source.all()) == ["1+7"] and source.num_truncated == 1


def test_options_survive_toml_and_the_command_line(tmp_path):
    config = parse(
        DataConfig, apply_overrides({"task": "addition"}, ["--options.digits", "2", "--options.format=compact"]), ""
    )
    assert config.options == {"digits": 2, "format": "compact"} and type(config.options["digits"]) is int
    assert parse(DataConfig, read_toml(write(tmp_path / "c.toml", to_toml(config))), "") == config


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "give one of task, prompts and pairs; found none"),
        ({"task": "sort", "prompts": "p.jsonl"}, "give one of task, prompts and pairs; found task and prompts"),
        ({"prompts": "p.jsonl", "options": {"digits": 1}}, "options belong to a task.*remove digits"),
        ({"task": "sort", "eval_prompts": "p.jsonl"}, "eval_prompts belongs to prompts, but there is task; remove it"),
        ({"prompts": "p.jsonl", "eval_pairs": "p.jsonl"}, "eval_pairs belongs to pairs, but there is prompts"),
        ({"task": "sort", "system": "S"}, "system needs template = \"chat\", but the template is 'plain'"),
        ({"task": "sort", "template": "chatml"}, '\'chatml\' is none of "plain", "chat" or a text'),
        ({"task": "sort", "on_long_prompt": "cut"}, "'error', 'skip', 'truncate_left' or 'truncate_right'"),
        ({"task": "sort", "max_prompt_tokens": 0}, "greater than or equal to 1"),
        ({"task": "sort", "prompts_field": "q"}, "did you mean prompt_field"),
    ],
)
def test_configs_that_cannot_be(data, message):
    with pytest.raises(ConfigError, match=message):
        parse(DataConfig, data, "run.toml")
