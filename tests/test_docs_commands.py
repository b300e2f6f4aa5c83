"""Commands of all pages: each can be meant, and those of the page on classical methods run."""

from __future__ import annotations

import io
import json
import re
import shlex
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import Outcome
from test_docs import ROOT, SHORT, commands, serve, shortened

from hybridflow.cli import _parser
from hybridflow.config import load_config

__all__ = ["serve"]

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
CLASSICAL = ROOT / "docs" / "classical.md"
SHORTER = {
    **SHORT,
    "eval": ["--episodes", "2"],
    "mappo_simple_spread.toml": SHORT["ppo_simple_spread.toml"],
    "dqn_cartpole.toml": ["--train.steps", "10", "--train.updates_per_step", "2", "--evaluation.limit", "2"],
    "record": ["--steps", "1000"],
    "pendulum_control.py": ["--rate", "1", "--episodes", "1", "--steps", "2"],  # a tick is not to be late here
}
OPEN = re.compile(r"[A-Z]{3,}|\$|\.\.\.")
"""what stands for something else"""


def written(page: Path) -> Iterator[list[str]]:
    """Commands of a page's blocks and lines, without those that leave something open."""
    text = page.read_text()
    blocks = "\n".join(re.findall(r"```(?:console|sh|bash)\n(.*?)```", text, re.DOTALL)).replace("\\\n", " ")
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    lines = [" ".join(line.split()) for line in re.findall(r"`((?:hybridflow|python) [^`]+)`", text)]
    for line in [*(line.removeprefix("$ ") for line in blocks.splitlines()), *lines]:
        if re.match(r"(hybridflow|python) ", line) and not OPEN.search(line.partition("#")[0]):
            yield [word for word in shlex.split(line, comments=True) if word != "&"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_can_be_meant(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Options of ``hybridflow`` are parsed, keys are validated with the example that they are for, and scripts know their
    options."""
    monkeypatch.chdir(ROOT)
    for words in written(page):
        if words[0] == "python":
            script = Path(words[1]).read_text()
            options = [word for word in words if word.startswith("--")]
            assert [word for word in options if f'"{word}"' not in script] == [], words
        elif len(words) > 2 and not words[2].startswith("--"):  # otherwise an option is spoken of
            options, rest = _parser().parse_known_args(words[1:])
            assert not rest or options.takes_overrides, words
            if words[1] in ("train", "graph", "plan") and words[2].startswith("examples/"):
                load_config(Path(words[2]), rest)


def test_commands_are_found() -> None:
    counts = {page.name: len([*written(page)]) for page in PAGES}
    assert sum(counts.values()) > 100 and counts["classical.md"] > 20 and counts["README.md"] > 20


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_the_commands_of_the_page_on_classical_methods_run(
    hybridflow: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a console, and what Python does with their results."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    pages = commands(CLASSICAL)
    assert len(pages) > 12
    for words in pages:
        short = shortened(words, SHORTER)
        if words[0] == "python":
            done = subprocess.run([sys.executable, *short[1:]], capture_output=True, text=True, timeout=120, check=False)
            assert done.returncode == 0, (words, done)
            continue
        outcome = hybridflow(*short[1:])
        assert outcome.code == 0, (words, outcome)
    blocks = re.findall(r"```python\n(.*?)```", CLASSICAL.read_text(), re.DOTALL)
    session, policy = [block for block in blocks if "runs/cartpole" in block]
    names: dict[str, object] = {}
    exec(session, names)
    assert names["actions"] in ([0], [1])
    *lines, remembering = policy.strip().splitlines()
    exec("\n".join(lines), names | (seen := {"observation": [0.0] * 4}), seen)
    assert seen["action"] == names["actions"] and "memory" in remembering


@pytest.mark.timeout(300)
@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_the_page_s_env_workers_run_on_ray(
    hybridflow: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    [words] = [words for words in written(CLASSICAL) if "runs/a3c_ray" in words]
    outcome = hybridflow(*shortened(words, SHORTER)[1:])
    assert outcome.code == 0 and "step 3/3" in outcome.out, outcome


@pytest.mark.timeout(200)
@pytest.mark.slow
def test_the_page_s_policy_is_served_while_it_is_trained(
    hybridflow: Callable[..., Outcome],
    serve: Callable[[list[str]], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    [block] = [block for block in re.findall(r"```sh\n(.*?)```", CLASSICAL.read_text(), re.DOTALL) if "curl" in block]
    train, follow, control, ask = [shlex.split(line, comments=True) for line in block.splitlines()]
    assert hybridflow(*shortened(train[:-1], SHORTER)[1:]).code == 0
    url = serve([*follow[:-1], "--budget-ms", "30000"])  # other programs may run, too
    told = subprocess.run(
        [sys.executable, *[word.replace("http://127.0.0.1:8001", url) for word in shortened(control, SHORTER)[1:]]],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert told.returncode == 0 and re.search(r"^episode 0: return -\d+, policy version \d+$", told.stdout, re.MULTILINE)
    assert ask[:3] == ["curl", "http://127.0.0.1:8001/act", "-d"]
    with urllib.request.urlopen(f"{url}/act", ask[3].encode(), timeout=30) as answer:
        found = json.load(io.TextIOWrapper(answer))
    assert found.keys() == {"actions", "policy_version"} and -2 <= found["actions"][0][0] <= 2
