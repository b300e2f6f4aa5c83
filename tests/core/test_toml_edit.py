"""Editing TOML that somebody wrote: whatever its form, the data are as asked and the rest of the text stays."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.core.config import toml_key, toml_value
from hybridflow.core.errors import ConfigError
from hybridflow.core.toml_edit import edit_toml

FILE = """# what it is for
algorithm = "ppo"  # the method
run_dir = "runs/a#b"

[actor]
model = "m"
# how it is cut
mesh = { tp = 4, sequence_parallel = true }  # of the actor

[placement.pools]
old = 1
# as many as there are
[train]
steps = 3 # few
stop = [
  "a", # first
  "]",
]

[actor.optimizer]
lr = 1e-3
"""


def test_only_what_is_asked_changes() -> None:
    new = edit_toml(
        FILE,
        {
            ("actor", "mesh", "tp"): 2,
            ("actor", "mesh", "pp"): 2,
            ("train", "token_budget"): 99,
            ("train", "stop"): ["b"],
            ("placement", "pools", "main"): [8, 8],
            ("runtime", "kind"): "ray",
            ("actor", "activation_checkpointing"): True,
        },
        whole=[("placement", "pools")],
    )
    changes = {
        "{ tp = 4, sequence_parallel = true }": "{ tp = 2, sequence_parallel = true, pp = 2 }",
        "# of the actor\n": "# of the actor\nactivation_checkpointing = true\n",
        "old = 1\n": "main = [8, 8]\n",
        '[\n  "a", # first\n  "]",\n]': '["b"]\ntoken_budget = 99',
    }
    expected = FILE
    for before, after in changes.items():
        expected = expected.replace(before, after)
    assert new == expected + '\n[runtime]\nkind = "ray"\n'


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", "[a.b]\nc = 1\n"),
        ("[a]\nx = 1", "[a]\nx = 1\n\n[a.b]\nc = 1\n"),
        ("a.x = 1\n", "a.x = 1\n\n[a.b]\nc = 1\n"),
        ("a.b.x = 1\n# end\n", "a.b.x = 1\na.b.c = 1\n# end\n"),
        ("[a]\nb.x = 1\n[z]\n", "[a]\nb.x = 1\nb.c = 1\n[z]\n"),
        ("a = { x = 1 }\n", "a = { x = 1, b = { c = 1 } }\n"),
        ("[a]\nb = {}\n", "[a]\nb = { c = 1 }\n"),
        ('[ a . "b" ] # so\nc = 2\n', '[ a . "b" ] # so\nc = 1\n'),
        ('"a"."b".c = "x=#" # so\n', '"a"."b".c = 1 # so\n'),
        ("[a.b]\nc = 1\n", "[a.b]\nc = 1\n"),
        ("[a.b.d]\nx = 1\n[q]\n", "[a.b.d]\nx = 1\n[q]\n\n[a.b]\nc = 1\n"),
        ('a.b.c = """\n[a.b]\nc = 1\n"""\nx = 1\n', "a.b.c = 1\nx = 1\n"),
        ("[a]\r\nb.c = 2\r\n", "[a]\r\nb.c = 1\r\n"),
        ("# \u2028 [a.b]\n", "# \u2028 [a.b]\n\n[a.b]\nc = 1\n"),
    ],
)
def test_a_key_finds_its_place(before: str, after: str) -> None:
    assert edit_toml(before, {("a", "b", "c"): 1}) == after


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("[a]\nx = 1\n[a.b]\nc = 1\n[z]\ny = 1\n", "[a]\nx = 1\n[z]\ny = 1\n"),
        ("a.b.c = 1\nb = 2\n", "b = 2\n"),
        ("[a]\nb = { c = 1, d = 2 }\n", "[a]\nb = { d = 2 }\n"),
        ("[a]\nb = { c = 1 }\n", ""),
        ("[a]\n", "[a]\n"),
    ],
)
def test_keys_are_removed_and_tables_with_them(before: str, after: str) -> None:
    assert edit_toml(before, {("a", "b", "c"): None}) == after


def test_forms_that_can_not_be_edited_are_told() -> None:
    with pytest.raises(ConfigError, match=r"can't be edited; set these keys in it by hand: a\.b"):
        edit_toml("[[a]]\nx = 1\n", {("a", "b"): 1})


NAMES = st.sampled_from(["a", "b", "c d", "e"])
VALUES = st.one_of(
    st.integers(-5, 5), st.booleans(), st.text("#=\"'[]{} \\x", max_size=4), st.lists(st.integers(), max_size=2)
)
TABLES = st.recursive(st.dictionaries(NAMES, VALUES, max_size=3), lambda t: st.dictionaries(NAMES, VALUES | t, max_size=3))


@st.composite
def files(draw: st.DrawFn) -> str:
    """A table in some of the many forms that it can have."""
    lines: list[str] = []
    later: list[tuple[tuple[str, ...], dict[str, Any]]] = [((), draw(TABLES))]
    while later:
        path, table = later.pop(draw(st.integers(0, len(later) - 1)) if () not in dict(later) else 0)
        lines += [f"[{'.'.join(map(toml_key, path))}]"] if path else []
        lines += _keys(draw, path, table, later, "")
    return "\n".join(lines) + draw(st.sampled_from(["", "\n", "\n# end"]))


def _keys(draw: st.DrawFn, path: tuple[str, ...], table: dict[str, Any], later: list[Any], prefix: str) -> list[str]:
    lines = []
    for key, value in table.items():
        form = draw(st.sampled_from(["header", "inline", "dotted"])) if isinstance(value, dict) else "inline"
        if form == "header" and not prefix:
            later.append(((*path, key), value))
        elif form == "dotted" and value:
            lines += _keys(draw, path, value, later, f"{prefix}{toml_key(key)}.")
        else:
            lines.append(f"{prefix}{toml_key(key)} = {toml_value(value)}{draw(st.sampled_from(['', ' # = x', chr(10)]))}")
    return lines


PATHS = st.lists(NAMES, min_size=1, max_size=3).map(tuple)


@settings(max_examples=30, deadline=None)
@given(text=files(), path=PATHS, value=VALUES)
def test_any_form_can_be_edited(text: str, path: tuple[str, ...], value: Any) -> None:
    data = tomllib.loads(text)
    at: Any = data
    for key in path[:-1]:
        at = at.setdefault(key, {}) if isinstance(at, dict) else None
    if isinstance(at, dict) and not isinstance(at.get(path[-1]), dict):
        at[path[-1]] = value
        after = edit_toml(text, {path: value})
        assert tomllib.loads(after) == data
        kept = [line for line in text.splitlines() if line.startswith("#")]
        assert [line for line in after.splitlines() if line.startswith("#")] == kept
        assert edit_toml(after, {path: value}) == after
    elif not isinstance(at, dict):
        with pytest.raises(ConfigError, match="by hand"):
            edit_toml(text, {path: value})
