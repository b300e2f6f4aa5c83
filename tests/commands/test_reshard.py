"""``hybridflow reshard`` as its users see it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Outcome

Program = Callable[..., Outcome]
EXAMPLE = ("--train", "1-4-2", "--generate", "1-2-2-2")


def rows_of(out: str, header: str) -> list[list[str]]:
    """The cells of the table below a line that begins with ``header``."""
    lines = out.splitlines()
    start = next(n for n, line in enumerate(lines) if line.split()[:1] == [header])
    end = next((n for n in range(start, len(lines)) if not lines[n]), len(lines))
    return [line.split("  ") for line in lines[start + 1 : end]]


def test_the_worked_example(hybridflow: Program) -> None:
    code, out, err = hybridflow("reshard", *EXAMPLE)
    assert (code, err) == (0, "")
    assert "generate tp  [0 2] [1 3] [4 6] [5 7]\n" in out and "micro dp     [0 1] [2 3] [4 5] [6 7]\n" in out
    assert "   0  █▒··\n   1  ▒█··\n   2  ··█▒\n   3  ··▒█\n   4  █▒··\n" in out
    assert "received       1/4  0.2500  0.2500  0.2500\n" in out and "peak           1/2  0.5000" in out
    [first, *_] = rows_of(out, "rank")
    assert [cell.strip() for cell in first if cell.strip()] == [
        "0",
        "3.37 GB",
        "6.74 GB",
        "3.37 GB",
        "3.37 GB",
        "3.37 GB",
        "0",
        "0",
        "6.74 GB",
        "1",
    ]


def test_the_page_shows_what_its_commands_print(hybridflow: Program) -> None:
    page = (Path(__file__).parents[2] / "docs" / "hybrid_engine.md").read_text()
    shown = re.findall(r"```console\n\$ (hybridflow reshard .*?)\n```.*?```\n(.*?)```", page, re.DOTALL)
    assert len(shown) == 2
    for command, printed in shown:
        out = hybridflow(*command.split()[1:]).out.splitlines()
        assert {line for line in printed.splitlines() if line != "..."} <= {*out}


def test_the_vanilla_grouping_s_second_copies(hybridflow: Program) -> None:
    out = hybridflow("reshard", *EXAMPLE, "--strategy", "vanilla").out
    assert "generate tp  [0 1] [2 3] [4 5] [6 7]\n" in out
    assert "   0  █▒··\n   1  ·□▒▒\n   2  ▒▒□·\n   3  ··▒█\n" in out
    assert "redundant      1/4  0.0000  0.1250  0.2500\n" in out


def test_other_devices_are_numbered_behind(hybridflow: Program) -> None:
    out = hybridflow("reshard", *EXAMPLE, "--strategy", "publish").out
    assert "generate tp  [8 9] [10 11] [12 13] [14 15]\n" in out and "   8  ▒▒··\n   9  ··▒▒\n" in out
    assert "micro dp" not in out


def test_json_has_every_number(hybridflow: Program, tiny_model: Path) -> None:
    out = hybridflow("reshard", "--train", "2-2-1", "--generate", "1-1-4-1", "--model", tiny_model, "--json").out
    data = json.loads(out)
    assert data["nested"] and data["groups"]["micro dp"] == [[0, 1, 2, 3]]
    received = [sum(rank["received"].values()) for rank in data["ranks"]]
    assert received == [
        sum(link["cut"] + link["replicated"] for link in data["links"] if link["target"] == rank) for rank in range(4)
    ]
    assert data["table2"]["received"][0] == 0.75 and all(
        rank["redundant"] == {"cut": 0, "replicated": 0} for rank in data["ranks"]
    )


def test_layouts_without_a_formula_say_why(hybridflow: Program) -> None:
    out = hybridflow("reshard", "--train", "2-2-1", "--generate", "1-4-1-1").out
    assert "No formula of the paper's table 2: t_g doesn't divide t" in out and "   0  ▓□··|▒···\n" in out
    out = hybridflow("reshard", *EXAMPLE, "--dtype", "float32", "--generation-dtype", "bfloat16").out
    assert "No formula of the paper's table 2: weights of another type" in out and "   0  ▓▒··\n" in out


def test_many_ranks_have_no_picture(hybridflow: Program) -> None:
    out = hybridflow("reshard", "--train", "10-8-1", "--generate", "1-8-10-1", "--model", "llama-70b").out
    assert "█" not in out and "\n  79 " in out


@pytest.mark.parametrize(
    ("train", "generate", "lines"),
    [
        ("1-4", "1-2-2-2", ["--train 1-4: expected p-t-d, 3 numbers above 0, for instance 1-4-2"]),
        (
            "1-x-2",
            "0-2-2-2",
            ["--train 1-x-2: expected p-t-d", "--generate 0-2-2-2: expected p_g-t_g-d_g-d, 4 numbers above 0"],
        ),
        ("1-4-2", "1-3-1-2", ["--generate 1-3-1-2: p_g t_g = 3 doesn't divide p t = 4 of --train 1-4-2"]),
        (
            "1-4-2",
            "1-2-4-2",
            ["--generate 1-2-4-2: d_g-d = 4-2 and 16 ranks; --train 1-4-2 has 8 ranks, d = 2 and d_g = p t"],
        ),
        ("1-64-1", "1-2-32-1", ["mesh: tp = 64, but the model has 32 attention heads: a rank needs one; lower tp to 32"]),
        ("64-1-1", "1-1-64-1", ["mesh: pp = 64, but the model has 32 layers: a stage needs one; lower pp to 32"]),
    ],
)
def test_nonsense_is_told_in_one_line_each(hybridflow: Program, train: str, generate: str, lines: list[str]) -> None:
    code, out, err = hybridflow("reshard", "--train", train, "--generate", generate)
    told = err.splitlines()
    assert (code, out, len(told)) == (2, "", len(lines))
    assert all(text.startswith(f"error: {line}") for text, line in zip(told, lines, strict=True))


def test_models_with_experts_have_no_layout(hybridflow: Program) -> None:
    code, _, err = hybridflow("reshard", *EXAMPLE, "--model", "mixtral-8x7b")
    assert code == 2 and err.startswith("error: mixtral-8x7b: has experts") and err.count("\n") == 1


def test_a_model_that_nobody_knows(hybridflow: Program) -> None:
    code, _, err = hybridflow("reshard", *EXAMPLE, "--model", "nobody")
    assert code == 2 and err.startswith("error: nobody: no model of that name") and err.count("\n") == 1
