"""Every command in the documentation runs."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from conftest import Outcome

from hybridflow.core.config import parse
from hybridflow.models.sources import MODELS, cache_home
from hybridflow.rollout import scorers
from hybridflow.rollout.rewards import RewardConfig, RewardPool

ROOT = Path(__file__).parent.parent
SAMPLED = "examples/rlhf/sample.toml"
SHORT = {
    "chaos": ["--train.steps", "8", "--evaluation.limit", "2"],
    "reverse.toml": ["--train.steps", "3"],
    "split_reverse.toml": ["--train.steps", "3"],
    "async_reverse.toml": ["--train.steps", "3"],
    "cartpole.toml": ["--train.steps", "3", "--evaluation.limit", "2"],
    "dqn_cartpole.toml": ["--train.steps", "300", "--evaluation.limit", "2"],
    "a3c_cartpole.toml": ["--train.steps", "3", "--evaluation.limit", "2"],
    "ppo_minigrid.toml": ["--train.steps", "1", "--evaluation.limit", "2"],
    "sac_pendulum.toml": ["--train.steps", "30", "--evaluation.limit", "2"],
    "sft_addition.toml": ["--train.steps", "3", "--evaluation.limit", "10"],
    "grpo_addition.toml": ["--train.steps", "2", "--evaluation.limit", "10"],
    "custom.toml": ["--train.steps", "1"],
    "rank": ["--count", "40"],
    "dpo.toml": ["--train.steps", "2"],
    "reward_model.toml": ["--train.steps", "2"],
    "bench": ["--prompts", "1", "--new-tokens", "4"],
    "trading.toml": ["--train.steps", "2"],
    "ppo_simple_spread.toml": ["--train.steps", "2", "--evaluation.limit", "2"],
    "bench-policy": ["--budget-ms", "10000"],  # other programs may run, too
    "sample.toml": ["--evaluation.limit", "4"],
    "ppo.toml": ["--train.steps", "2", "--train.prompts_per_step", "4", "--evaluation.limit", "4"],
    "safe.toml": ["--train.steps", "2", "--train.prompts_per_step", "4", "--evaluation.limit", "4"],
    "ppo_addition.toml": ["--train.steps", "1", "--train.prompts_per_step", "4", "--evaluation.limit", "2"],
}


def commands(path: Path) -> list[list[str]]:
    """What the console blocks of a page say after ``$``, without comments."""
    blocks = re.findall(r"```console\n(.*?)```", path.read_text(), re.DOTALL)
    lines = [line[2:] for block in blocks for line in block.splitlines() if line.startswith("$ ")]
    return [shlex.split(line, comments=True) for line in lines]


def shortened(words: list[str], short: Mapping[str, list[str]] = SHORT) -> list[str]:
    """The same command with a few steps, so that all of them take seconds."""
    words = [word for i, word in enumerate(words) if word != "--train.steps" and words[i - 1] != "--train.steps"]
    more = next((list(short[name]) for name in (Path(word).name for word in words) if name in short), [])
    if "--resume" in words:
        more[1] = str(int(more[1]) + 2)
    return words + more


@pytest.fixture
def serve() -> Iterator[Callable[[list[str]], str]]:
    """Starts a server beside the test, on a free port; the URL that it tells."""
    started: list[subprocess.Popen[str]] = []

    def start(words: list[str]) -> str:
        command = [sys.executable, "-m", "hybridflow.cli", *words[1:], "--port", "0"]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        assert started[-1].stdout is not None
        return re.findall(r"http://[\w.:/]+", started[-1].stdout.readline())[0]

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.timeout(400)
@pytest.mark.slow
def test_the_readme_s_commands_run(
    hybridflow: Callable[..., Outcome],
    serve: Callable[[list[str]], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    real_model: Path,
    ray_cluster: None,
) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO("What is 3 + 4?\n"))
    models = cache_home() / "models"
    monkeypatch.setenv("HYBRIDFLOW_HOME", str(tmp_path / "home"))  # what it measures of a busy machine must not stay
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "models").symlink_to(models)
    pages = [words for words in commands(ROOT / "README.md") if words[0] == "hybridflow"]
    assert len(pages) > 15
    url = ""
    for words in pages:
        if words[-1] == "&":
            url = serve(words[:-1])
            continue
        words = [word.replace("http://127.0.0.1:8000/score", url) for word in words]
        outcome = hybridflow(*shortened(words)[1:]) if words[1:] != ["train", "examples/addition.toml"] else None
        if outcome is None:  # the demo has a test of its own, which leaves its run here
            shutil.copytree(real_model, tmp_path / "runs" / "demo" / "model")
            (tmp_path / "runs" / "demo" / "config.toml").touch()
        else:
            assert outcome.code == 0, (words, outcome)


@pytest.mark.slow
def test_the_commands_of_the_rlhf_page_run(
    hybridflow: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wordy_model: Path
) -> None:
    """On a tiny model instead of the page's."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    for path in (tmp_path / "examples" / "rlhf").glob("*.toml"):
        text = re.sub(r"^freeze = .*\n", "", path.read_text(), flags=re.MULTILINE)
        path.write_text(text.replace("smollm2-135m", str(wordy_model)))
    monkeypatch.chdir(tmp_path)
    pages = [words for words in commands(ROOT / "docs" / "rlhf.md") if words[0] == "hybridflow"]
    trained = {words[2] for words in pages if words[1] == "train"}
    assert trained == {f"examples/rlhf/{path.name}" for path in (ROOT / "examples/rlhf").glob("*.toml")} - {SAMPLED}
    for words in pages:
        if words[1] != "models":
            words = [word.replace("smollm2-135m", str(wordy_model)) for word in words]
        outcome = hybridflow(*shortened(words)[1:])
        assert outcome.code == 0, (words, outcome)


@pytest.fixture
def scratch() -> Iterator[str]:
    """A folder with a short name: the sockets in it may have 107 characters."""
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        yield folder


@contextmanager
def standing(words: list[str], environment: dict[str, str], log: Path) -> Iterator[None]:
    """A node of a Ray cluster, from when it stands until it is told to end."""
    command = [f"{Path(sys.executable).parent}/{words[0]}", *words[1:], "--num-cpus", "2", "--block"]
    with log.open("w") as out, subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment) as process:
        try:
            deadline = time.monotonic() + 60
            while "Ray runtime started" not in log.read_text():
                assert process.poll() is None and time.monotonic() < deadline, log.read_text()
                time.sleep(0.1)
            yield
        finally:
            process.terminate()


@pytest.mark.timeout(240)
@pytest.mark.slow
def test_the_commands_of_the_cluster_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scratch: str) -> None:
    """Two nodes of a cluster on this machine, started by hand and joined: the reverse example on both."""
    page = (ROOT / "docs" / "cluster.md").read_text()
    lines = re.findall(
        r"^(?:ray|hybridflow|export) .*", "\n".join(re.findall(r"```sh\n(.*?)```", page, re.DOTALL)), re.MULTILINE
    )
    generate, mode, head, other, train = [shlex.split(line, comments=True) for line in lines[2:7]]
    text = (ROOT / "examples" / "split_reverse.toml").read_text()
    (tmp_path / "run.toml").write_text(text.replace("learners = 2", "learners = [1, 1]"))
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    environment = {**os.environ, "HOME": str(tmp_path), "RAY_TMPDIR": scratch, "RAY_USAGE_STATS_ENABLED": "0"}
    name, _, value = mode[1].partition("=")
    environment[name] = value
    ray = f"{Path(sys.executable).parent}/{generate[0]}"
    subprocess.run([ray, *generate[1:]], env=environment, check=True, capture_output=True, timeout=60)
    assert (tmp_path / ".ray" / "auth_token").stat().st_size > 20
    head = [port if word == "6379" else word for word in head]
    other = [f"127.0.0.1:{port}" if word.startswith("FIRST_MACHINE") else word for word in other]
    with standing(head, environment, tmp_path / "head"), standing(other, environment, tmp_path / "other"):
        command = [sys.executable, "-m", "hybridflow.cli", *train[1:], "--train.steps", "2"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 2/2" in done.stdout


@pytest.mark.timeout(120)
@pytest.mark.slow
def test_the_commands_of_the_page_on_meshes_run(
    hybridflow: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ray_cluster: None
) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    train, graph, plan = commands(ROOT / "docs" / "parallel.md")
    trained, drawn, planned = hybridflow(*shortened(train)[1:]), hybridflow(*graph[1:]), hybridflow(*plan[1:])
    assert trained.code == drawn.code == planned.code == 0, (trained, drawn, planned)
    assert re.search(r"\nactor +main +tp 2 x pp 2 ", planned.out)
    assert "step 3/3" in trained.out and re.search(r"\nactor +Learner +main +tp 2 x pp 2 ", drawn.out)
    assert (tmp_path / "runs" / "cut" / "model" / "tokenizer.json").is_file()


@pytest.mark.timeout(240)
@pytest.mark.slow
def test_the_commands_of_the_page_on_the_hybrid_engine_run(
    hybridflow: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ray_cluster: None
) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    page = ROOT / "docs" / "hybrid_engine.md"
    train, graph = [words for words in commands(page) if words[1] != "reshard"]
    trained, drawn = hybridflow(*shortened(train)[1:]), hybridflow(*graph[1:])
    assert trained.code == drawn.code == 0, (trained, drawn)
    assert "step 3/3" in trained.out and re.search(r"\nsampler +TextSampler +main +dp 2 x tp 2 .* in place\n", drawn.out)
    [*_, told] = map(json.loads, (tmp_path / "runs" / "hybrid" / "metrics.jsonl").read_text().splitlines())
    named = set(re.findall(r"^\| `(sampler/\w+)` \|", page.read_text(), re.MULTILINE))
    assert named == {name for name in told if name.startswith("sampler/") and name != "sampler/tokens"}
    assert told["sampler/transition_received_bytes"] > 0


@pytest.mark.timeout(240)
@pytest.mark.slow
def test_the_commands_of_the_page_on_schedules_run(
    hybridflow: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ray_cluster: None
) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    for words in commands(ROOT / "docs" / "schedules.md"):
        trained = hybridflow(*shortened(words)[1:])
        assert trained.code == 0 and "step 3/3" in trained.out, trained
    told, again = [
        [json.loads(line) for line in (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("async_reverse", "again")
    ]
    assert [line["staleness"] for line in told if "staleness" in line] == [0, 1, 2]
    for name in ("loss/policy", "grad_norm", "response_length/mean"):
        assert [line.get(name) for line in told] == [line.get(name) for line in again]


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_the_commands_of_the_planner_s_page_run(
    hybridflow: Callable[..., Outcome],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    real_model: Path,
    ray_cluster: None,
) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    pages = commands(ROOT / "docs" / "planner.md")
    assert len(pages) > 8
    for words in pages:
        outcome = hybridflow(*(shortened(words) if words[1] == "train" else words)[1:])
        assert outcome.code == 0, (words, outcome)
    assert (tmp_path / "plan.html").is_file() and "[placement.pools]" in (tmp_path / "planned.toml").read_text()


def test_the_readme_s_rewards_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    page = (ROOT / "README.md").read_text()
    [block] = re.findall(r"```toml\n(\[reward\].*?)```", page, re.DOTALL)
    with RewardPool(parse(RewardConfig, tomllib.loads(block)["reward"], "README.md").specs(), workers=1) as pool:
        [result] = pool.score(["What is 3 + 4?"], ["7"], [{"answer": "7"}])
    assert result.score is not None and 0.9 < result.score < 1
    named = re.findall(r"^\| `(\w+)\??.*?` \| .* µs |^\| `(\w+)\??.*?` \| .* ms ", page, re.MULTILINE)
    assert sorted(name for pair in named for name in pair if name) == scorers.__all__


def test_make_has_the_readme_s_targets() -> None:
    text, makefile = (ROOT / "README.md").read_text(), (ROOT / "Makefile").read_text()
    targets = re.findall(r"^make (\w+)", text, re.MULTILINE)
    assert targets == ["demo", "test"]
    assert all(f"\n{target}: " in makefile for target in targets)


def test_links_and_pictures_exist() -> None:
    for page in (ROOT / "README.md", ROOT / "ARCHITECTURE.md", *(ROOT / "docs").glob("*.md")):
        for link in re.findall(r"\]\((?!https?://)([^)#]+)\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_files_named_in_the_documentation_exist() -> None:
    named = re.findall(
        r"`((?:tests|hybridflow)/[\w/.]+)`", (ROOT / "README.md").read_text() + (ROOT / "ARCHITECTURE.md").read_text()
    )
    assert named and all((ROOT / name).exists() for name in named)


def test_the_demo_s_configuration_is_an_example() -> None:
    assert (ROOT / "examples" / "addition.toml").read_text() == (ROOT / "hybridflow" / "demo.toml").read_text()
    assert "smollm2-135m" in MODELS and cache_home()
