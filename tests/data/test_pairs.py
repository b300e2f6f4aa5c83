"""Preference pairs: what a file may hold, how it becomes rows, what is held out."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.core.errors import DataError
from hybridflow.data.pairs import PairRecord, PairSource, load_pairs, read_pairs
from hybridflow.data.prompts import DataConfig
from hybridflow.data.text import Tokenizer

TOKENIZER = Tokenizer.characters("0123456789>")  # digit d is token d + 3, ">" is 13, the end is 1
CONFIG = DataConfig(pairs="unused")
RECORDS = [PairRecord("1>", "1", "22", 0.5), PairRecord("45>", "54", "4", 1.0), PairRecord("7>", "7", "0", 0.25)]


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_pair_is_two_rows_by_hand() -> None:
    batch = PairSource(RECORDS, CONFIG, TOKENIZER).all(2)
    tokens = [row.tolist() for row in batch["tokens"]]
    assert tokens == [[4, 13, 4, 1], [4, 13, 5, 5, 1], [7, 8, 13, 8, 7, 1], [7, 8, 13, 7, 1]]
    assert [row.tolist() for row in batch["response_mask"]][3] == [False, False, False, True, True]
    assert batch["preferred"].tolist() == [True, False, True, False]
    assert batch["group_id"].tolist() == [0, 0, 1, 1] and batch["sample_id"].tolist() == [0, 1, 2, 3]
    assert batch["margins"].tolist() == [0.5, 0.5, 1.0, 1.0]


@given(st.integers(1, 7), st.integers(0, 3))
@settings(max_examples=15, deadline=None, derandomize=True)
def test_steps_are_pure_and_an_epoch_holds_every_pair_once(num_pairs: int, seed: int) -> None:
    records = [PairRecord(f"{i}>", str(i), "0") for i in range(1, 8)]
    one, other = (PairSource(records, CONFIG, TOKENIZER, seed) for _ in range(2))
    steps = [one.batch(step, num_pairs) for step in range(7)]
    again = other.batch(5, num_pairs)
    assert np.array_equal(steps[5]["tokens"].values, again["tokens"].values) and "margins" not in again
    prompts = [int(row[0]) for step in steps for row in step["tokens"]][::2]
    for epoch in range(num_pairs):
        assert sorted(prompts[7 * epoch : 7 * epoch + 7]) == [i + 3 for i in range(1, 8)]
    ids = [int(i) for step in steps for i in step["sample_id"]]
    assert ids == list(range(14 * num_pairs))


def test_lengths_and_long_prompts() -> None:
    assert PairSource(RECORDS, CONFIG, TOKENIZER).longest == 6
    skipping = DataConfig(pairs="unused", max_prompt_tokens=2, on_long_prompt="skip")
    source = PairSource(RECORDS, skipping, TOKENIZER)
    assert len(source) == 2 and source.prompts.num_skipped == 1
    assert [row.tolist() for row in source.all()["tokens"]][2] == [10, 13, 10, 1]
    assert not PairSource([*RECORDS, PairRecord("1>", "1", "2")], CONFIG, TOKENIZER).has_margins


def test_files_of_every_kind_hold_the_same_pairs(tmp_path: Path) -> None:
    rows = [{"prompt": "1>", "chosen": "1", "rejected": "2", "margin": 0.5, "note": "x"}]
    rows.append({"prompt": "2>", "chosen": "2", "rejected": "1", "margin": 2})
    records = read_pairs(write(tmp_path / "p.jsonl", *rows))
    assert records == [PairRecord("1>", "1", "2", 0.5), PairRecord("2>", "2", "1", 2.0)]
    (tmp_path / "p.csv").write_text("chosen,rejected,margin,prompt\n1,2,0.5,1>\n2,1,2,2>\n")
    assert read_pairs(tmp_path / "p.csv") == records
    (tmp_path / "q.csv").write_text("question,chosen,rejected,margin\n1>,1,2,\n")
    assert read_pairs(tmp_path / "q.csv", "question") == [PairRecord("1>", "1", "2", None)]
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "p.parquet")
    assert read_pairs(tmp_path / "p.parquet") == records


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"chosen": "1", "rejected": "2"}, r"p.jsonl:2: no column 'prompt'; found chosen, rejected"),
        ({"prompt": "1>", "chosn": "1", "rejected": "2"}, r"p.jsonl:2: no column 'chosen'; .* rename 'chosn'"),
        ({"prompt": "1>", "chosen": "1"}, r"p.jsonl:2: no column 'rejected'; found prompt, chosen"),
        ({"prompt": "1>", "chosen": "", "rejected": "2"}, r"p.jsonl:2: chosen is '', expected a text"),
        ({"prompt": "1>", "chosen": "1", "rejected": 2}, r"p.jsonl:2: rejected is 2, expected a text"),
        ({"prompt": "1>", "chosen": "1", "rejected": "1"}, r"p.jsonl:2: chosen and rejected are the same text, '1'"),
        (
            {"prompt": "1>", "chosen": "1", "rejected": "2", "margin": "far"},
            r"p.jsonl:2: margin is 'far', expected a finite",
        ),
        ({"prompt": "1>", "chosen": "1", "rejected": "2", "margin": True}, r"p.jsonl:2: margin is True, expected a finite"),
        ({"prompt": [], "chosen": "1", "rejected": "2"}, r"p.jsonl:2: prompt is an empty list"),
    ],
)
def test_rows_that_are_no_pairs(tmp_path: Path, row: dict, message: str) -> None:
    path = write(tmp_path / "p.jsonl", {"prompt": "1>", "chosen": "1", "rejected": "2"}, row)
    with pytest.raises(DataError, match=message):
        read_pairs(path)


def test_responses_may_be_a_list_of_one_message(tmp_path: Path) -> None:
    row = {"prompt": [{"role": "user", "content": "1>"}], "rejected": "2"}
    row["chosen"] = [{"role": "assistant", "content": "1"}]
    assert read_pairs(write(tmp_path / "p.jsonl", row)) == [PairRecord(row["prompt"], "1", "2")]
    row["chosen"] = [*row["prompt"], *row["chosen"]]
    with pytest.raises(DataError, match=r"p.jsonl:1: chosen is \[.*, expected a text"):
        read_pairs(write(tmp_path / "p.jsonl", row))


def test_empty_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is empty, expected one pair a row"):
        read_pairs(write(tmp_path / "p.jsonl"))


def test_a_tenth_of_the_prompts_is_held_out_whatever_the_order(tmp_path: Path) -> None:
    rows = [{"prompt": f"{i % 40}>", "chosen": "1", "rejected": str(i + 2)} for i in range(120)]
    one = load_pairs(DataConfig(pairs=str(write(tmp_path / "a.jsonl", *rows))))
    other = load_pairs(DataConfig(pairs=str(write(tmp_path / "b.jsonl", *rows[::-1]))))
    held_out = {record.prompt for record in one[1]}
    assert len(held_out) == 4 and len(one[1]) == 12 and len(one[0]) == 108
    assert held_out == {record.prompt for record in other[1]}
    assert not held_out & {record.prompt for record in one[0]}
    alone = load_pairs(DataConfig(pairs=str(write(tmp_path / "c.jsonl", rows[0], rows[40]))))
    assert len(alone[0]) == 2 and alone[1] == []
    given = load_pairs(DataConfig(pairs=str(tmp_path / "a.jsonl"), eval_pairs=str(tmp_path / "c.jsonl")))
    assert len(given[0]) == 120 and len(given[1]) == 2
