"""The configuration as a whole: few keys, each read, each explained or plain."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import hybridflow
from hybridflow.algorithms import ALGORITHMS
from hybridflow.config import RunConfig, load_config, resolved, validate
from hybridflow.core.config import keys, read_toml

ROOT = Path(hybridflow.__file__).parent
EXAMPLES = sorted((ROOT.parent / "examples").rglob("*.toml"))


def test_every_key_is_read_by_something() -> None:
    source = "\n".join(path.read_text() for path in ROOT.rglob("*.py"))
    unread = [name for name, *_ in keys(RunConfig) if not re.search(rf"\.{name.split('.')[-1]}\b", source)]
    assert unread == []


def test_there_are_fewer_than_150_keys_to_learn() -> None:
    """Besides those of one's method; those of critic, reference and teacher are the actor's: they count once."""
    names = [name for name, *_ in keys(RunConfig)]
    methods = {method: [name for name in names if name.startswith(f"{method}.")] for method in ALGORITHMS}
    apart = ("critic.", "reference.", "teacher.", *(f"{method}." for method in ALGORITHMS))
    assert 50 < len([name for name in names if not name.startswith(apart)]) < 150
    assert max(map(len, methods.values())) <= 12


def test_every_key_is_explained() -> None:
    assert [name for name, _, _, meaning in keys(RunConfig) if not meaning] == []


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_are_valid_and_resolve_to_themselves(path: Path, tmp_path: Path) -> None:
    config = load_config(path)
    (tmp_path / "resolved.toml").write_text(resolved(config))
    assert validate(read_toml(tmp_path / "resolved.toml"), "resolved") == config
