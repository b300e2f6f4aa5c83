from pathlib import Path
from typing import Literal

import pytest
from pydantic import Field

from hybridflow.core.config import Config, apply_overrides, keys, parse, read_toml, to_toml
from hybridflow.core.errors import ConfigError


class Inner(Config):
    rate: float = Field(0.1, gt=0)
    """how fast"""
    names: tuple[str, ...] = ()


class Outer(Config):
    kind: Literal["a", "b"]
    steps: int = 3
    inner: Inner = Inner()
    other: Inner | None = None


def test_values_are_read_and_frozen() -> None:
    config = parse(Outer, {"kind": "a", "inner": {"rate": 1, "names": ["x"]}}, "test")
    assert config.inner.rate == 1.0
    assert config.inner.names == ("x",)
    with pytest.raises(ValueError, match="frozen"):
        config.steps = 4  # type: ignore[misc]


def test_all_problems_are_told_at_once_with_the_nearest_key() -> None:
    with pytest.raises(ConfigError) as caught:
        parse(Outer, {"kind": "c", "stps": 4, "inner": {"rate": -1}, "rate": 2}, "run.toml")
    assert list(caught.value.problems) == [
        "run.toml: kind = 'c': input should be 'a' or 'b'",
        "run.toml: inner.rate = -1: input should be greater than 0",
        "run.toml: unknown key stps; did you mean steps?",
        "run.toml: unknown key rate; did you mean inner.rate?",
    ]


def test_unknown_key_far_from_all_lists_the_known() -> None:
    with pytest.raises(ConfigError, match=r"unknown key inner.zzz; known here: rate, names"):
        parse(Outer, {"kind": "a", "inner": {"zzz": 1}}, "x")


def test_a_missing_key_is_named() -> None:
    with pytest.raises(ConfigError, match="x: kind is missing"):
        parse(Outer, {}, "x")


def test_overrides_are_toml_or_strings() -> None:
    arguments = ["--inner.rate", "1e-3", "--kind=b", "--inner.names", '["p", "q"]', "--steps", "7"]
    data = apply_overrides({"kind": "a", "inner": {"rate": 1}}, arguments)
    assert data == {"kind": "b", "inner": {"rate": 1e-3, "names": ["p", "q"]}, "steps": 7}


def test_overrides_leave_the_given_data_alone() -> None:
    data = {"inner": {"rate": 1}}
    apply_overrides(data, ["--inner.rate", "2"])
    assert data == {"inner": {"rate": 1}}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["steps", "3"], "'steps' is not understood"),
        (["--steps"], "--steps has no value"),
        (["--kind.x", "1"], "kind is a value, not a section"),
    ],
)
def test_wrong_overrides(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        apply_overrides({"kind": "a"}, arguments)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        read_toml(tmp_path / "missing.toml")
    with pytest.raises(ConfigError, match="is a folder"):
        read_toml(tmp_path)
    (tmp_path / "bad.toml").write_text("a = [1,\nb = 2")
    with pytest.raises(ConfigError, match=r"bad.toml: not valid TOML: .*line 2"):
        read_toml(tmp_path / "bad.toml")


def test_toml_round_trip(tmp_path: Path) -> None:
    config = parse(Outer, {"kind": "a", "inner": {"names": ['quo"te', "line\nbreak \\ é"]}, "other": {"rate": 2.5}}, "x")
    (tmp_path / "c.toml").write_text(to_toml(config), encoding="utf-8")
    assert parse(Outer, read_toml(tmp_path / "c.toml"), "c") == config


def test_keys_are_listed_with_type_default_and_meaning() -> None:
    listed = {name: (default, meaning) for name, _, default, meaning in keys(Outer)}
    assert listed["inner.rate"] == (0.1, "how fast")
    assert listed["other.names"] == ((), "")
