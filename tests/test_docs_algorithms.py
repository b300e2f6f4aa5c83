"""docs/algorithms.md: its configurations run in their order, its metrics are written by them, its keys exist."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from test_preferences import pairs_file
from test_runs import run

from hybridflow.algorithms import ALGORITHMS
from hybridflow.config import RunConfig, validate
from hybridflow.core.config import keys

DOCS = Path(__file__).parent.parent / "docs"
PAGE = (DOCS / "algorithms.md").read_text()
SECTIONS = {text.split("\n", 1)[0]: text for text in PAGE.split("\n## ")[1:]}
BRIEF = {"train": {"steps": 1}, "evaluation": {"limit": 5}}


def fragments(text: str) -> list[dict[str, Any]]:
    return [tomllib.loads(block) for block in re.findall(r"```toml\n(.*?)```", text, re.DOTALL)]


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Both, section by section; ``above`` wins."""
    both = {name: merged(below[name], above[name]) for name in below.keys() & above.keys() if isinstance(above[name], dict)}
    return {**below, **above, **both}


def whole(fragment: Mapping[str, Any]) -> dict[str, Any]:
    """A fragment without a run_dir stands on the page's first one."""
    return dict(fragment) if "run_dir" in fragment else merged(fragments(PAGE)[0], fragment)


def tables(text: str, first: str) -> Iterator[list[str]]:
    """The cells of all rows below a header that starts with ``first``."""
    for body in re.findall(rf"^\| {first} \|.*\n\|[-|]+\n((?:\|.*\n)+)", text, re.MULTILINE):
        yield from ([cell.strip() for cell in row[1:-1].split("|")] for row in body.splitlines())


@pytest.mark.parametrize("section", SECTIONS)
def test_configurations_are_valid(section: str) -> None:
    for fragment in fragments(SECTIONS[section]):
        config = validate(whole(fragment), section)
        assert config.model_fields_set >= fragment.keys()
        if section in ALGORITHMS:
            assert config.algorithm == section


def test_every_algorithm_has_a_section_with_a_configuration_its_file_and_metrics() -> None:
    for name in ALGORITHMS:
        text = SECTIONS[name]
        assert fragments(text) and list(tables(text, "metric")) and f"`hybridflow/algorithms/{name}.py`" in text, name
    named = re.findall(r"`((?:hybridflow/)?(?:algorithms|ops|rollout)/\w+\.py)(?::([\w, \n]+))?`", PAGE)
    assert len(named) > 20
    for path, functions in named:
        source = (DOCS.parent / "hybridflow" / path.removeprefix("hybridflow/")).read_text()
        for name in re.findall(r"\w+", functions):
            assert re.search(rf"^(def|class) {name}\b", source, re.MULTILINE), (path, name)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """One step of every configuration of the page, in its order: names of metrics by section."""
    folder = tmp_path_factory.mktemp("page")
    (folder / "runs").mkdir()
    names: dict[str, set[str]] = {section: set() for section in SECTIONS}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        pairs_file(folder / "runs")
        for section, text in SECTIONS.items():
            for number, fragment in enumerate(fragments(text)):
                own = Path(fragment.get("run_dir", f"runs/{section}{number}".replace(" ", "_")))
                out = run(merged(whole(fragment), BRIEF), own)
                for line in (out / "metrics.jsonl").read_text().splitlines():
                    names[section] |= json.loads(line).keys()
    return names


@pytest.mark.parametrize("section", [name for name, text in SECTIONS.items() if list(tables(text, "metric"))])
def test_metrics_are_written(section: str, written: dict[str, set[str]]) -> None:
    rows = list(tables(SECTIONS[section], "metric"))
    assert all(len(row) == 4 for row in rows), "metric, is, healthy, warning sign"
    named = {name for row in rows for name in re.findall(r"`(.+?)`", row[0])}
    assert named and named - written[section] == set()


def test_keys_and_links_exist() -> None:
    known = {name for name, *_ in keys(RunConfig)} | {"algorithm"}
    rows = list(tables(PAGE, "here"))
    assert len(rows) > 20
    assert {name for row in rows for name in re.findall(r"`(.+?)`", row[0])} <= known
    assert {tuple(row) for row in rows if len(row) != 4} == set()
    for page in DOCS.glob("*.md"):
        for link in re.findall(r"\]\((?!https?:)([^)#]+)\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"
