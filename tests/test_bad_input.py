"""A user's mistakes: one clear line each, exit code 2, before any model loads where possible, and nothing lost."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import REVERSE, Outcome, with_keys, written

from hybridflow import checkpoint
from hybridflow.core.errors import ResourceError
from hybridflow.parallel.shard import Piece
from hybridflow.workers.checkpoint import PieceWriter

Program = Callable[..., Outcome]

RAY, POOLS = {"kind": "ray"}, {"train": 2, "rest": 1}
SAFE = {"algorithm": "safe_rlhf", "cost": {"functions": ["hybridflow.rollout.scorers:words_over?limit=1"]}}


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., Path]:
    """Write a configuration: the tiny reverse run with keys changed."""

    def write(text: str = "", **keys: Any) -> Path:
        data = with_keys(REVERSE, **{"run_dir": str(tmp_path / "run"), **keys})
        path = tmp_path / "run.toml"
        path.write_text(_toml(data) + text)
        return path

    return write


def _toml(data: dict[str, Any], prefix: str = "") -> str:
    plain = "".join(
        f"{json.dumps(key)} = {json.dumps(value)}\n" for key, value in data.items() if not isinstance(value, dict)
    )
    tables = [(f"{prefix}{key}", value) for key, value in data.items() if isinstance(value, dict)]
    return plain + "".join(f"[{name}]\n{_toml(value, name + '.')}" for name, value in tables)


@pytest.fixture
def no_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if a decoder is made: the mistake must be told before."""

    def refuse(*_: object) -> None:
        raise AssertionError("a model was made before the mistake was told")

    monkeypatch.setattr("hybridflow.models.decoder.Decoder.__init__", refuse)


def one_line(outcome: Outcome) -> str:
    assert outcome.code == 2, outcome
    lines = [line for line in outcome.err.splitlines() if line]
    assert len(lines) == 1, outcome.err
    return lines[0]


@pytest.mark.usefixtures("no_loading")
@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"train__stesp": 3}, "unknown key train.stesp; did you mean train.steps?"),
        ({"train__group_size": 1}, "train.group_size = 1: grpo compares the responses to one prompt and needs at least 2"),
        ({"ppo": {"gamma": 0.9}}, "[ppo] is set, but grpo on [data] doesn't read it; remove the section"),
        (
            {"loss": {"kind": "gspo", "aggregation": "constant"}},
            'loss: kind = "gspo" is one loss per response, so aggregation',
        ),
        (
            {"loss": {"kind": "reinforce", "clip": 0.1}},
            'loss: kind = "reinforce" has no use for clip = 0.1; leave clip out',
        ),
        ({"loss": {"correction_cap": 3}}, "loss.correction_cap has no effect without loss.correction"),
        ({"kl": {"target": 0.1}}, "kl: target = 0.1 has no effect with coef = 0; set coef or remove target"),
        ({"kl": {"coef": 0.1, "kind": "k1"}}, 'kl.kind = "k1" with kl.where = "loss": its expected gradient is zero'),
        ({"algorithm": "remax", "train__max_refills": 2}, "train.max_refills = 2: algorithm = 'remax' learns from groups"),
        ({"algorithm": "distill"}, '[teacher] needs model = "...", which distill learns from'),
        ({"algorithm": "safe_rlhf"}, "no cost: set cost.functions or cost.model"),
        ({"algorithm": "reinforce_pp", "reinforce_pp": {"group_baseline": True}, "train__group_size": 1}, "at least 2"),
        ({"teacher": {"model": "x"}}, "[teacher] is set, but grpo on [data] doesn't read it"),
        ({"replay": {"capacity": 9}}, "[replay] is set, but grpo on [data] doesn't read it"),
        ({"reference": {"model": "x"}}, "[reference] is set, but grpo on [data] doesn't read it"),
        ({"environment": {"id": "CartPole-v1"}}, "needs [data], one of them; found data and environment"),
        ({"data__task": "revers"}, "unknown task 'revers': did you mean reverse?"),
        ({"data__options": {"lenght": 3}}, "unknown option 'lenght'; known are length"),
        ({"actor__fresh": None, "actor__model": "no/such/folder"}, "no/such/folder"),
        ({"actor__fresh": None}, '[actor] needs model = "..."'),
        ({"actor__fresh__num_heads": 5}, "hidden_size 32 isn't an even multiple of num_heads 5"),
        ({"data": {"prompts": "missing.jsonl"}}, "missing.jsonl: no such file"),
        ({"reward": {"functions": ["no_such_module:f"]}}, "no_such_module"),
        ({"reward": {"functions": ["json:dump"]}}, "requires a parameter"),
        ({"reward": {"functions": ["json:lods"]}}, "did you mean"),
        ({"generation__max_new_tokens": 5000}, "over the model's 2048 positions"),
        (
            {"generation": {"engine": "vllm", "precision": "int8"}},
            "generation.precision = 'int8' needs generation.engine = \"hybridflow\"",
        ),
        ({"generation__kv_cache_gb": 1e-6}, "over kv_cache_gb 1e-06; raise kv_cache_gb or lower max_new_tokens"),
        ({"data__max_prompt_tokens": 2}, "max_prompt_tokens is 2"),
        ({"algorithm": "grppo"}, "algorithm = 'grppo': input should be 'sft', "),
        (
            {"placement": {"roles": {"actor": "main"}}},
            'placement: runtime.kind = "local" runs every role in this process; set runtime.kind = "ray"',
        ),
        ({"recovery": {"max_restarts": 1}}, 'recovery: runtime.kind = "local" has no worker processes to lose; set'),
        ({"runtime": {"kind": "rai"}}, "runtime.kind = 'rai': input should be 'local' or 'ray'"),
        ({"runtime": {"address": "auto"}}, 'runtime: address has no effect with kind = "local"; set kind = "ray"'),
        ({"runtime": {"address": "auto", "timeout_s": 5}}, 'address, timeout_s has no effect with kind = "local"'),
        ({"runtime": RAY, "placement__roles": {"actor": "other"}}, "'other': there is no such pool; the pools are main"),
        (
            {"runtime": RAY, "placement": {"pools": POOLS, "roles": {"actor": "trian", "reward": "rest"}}},
            "placement.roles.actor = 'trian': there is no such pool; did you mean train? The pools are train, rest",
        ),
        (
            {"runtime": RAY, "placement__roles": {"critic": "main"}},
            "placement.roles.critic: grpo has no such role here; the roles are actor, estimator, sampler, reward, examiner",
        ),
        (
            {"runtime": RAY, "placement__roles": {"rewrad": "main"}},
            "placement.roles.rewrad: grpo has no such role here; did you mean reward?",
        ),
        (
            {"runtime": RAY, "placement": {"pools": POOLS, "roles": {"actor": "train", "sampler": "rest"}}},
            "placement.roles: no pool for reward; name one of train, rest for each",
        ),
        (
            {"runtime": RAY, "placement": {"pools": POOLS, "roles": {"actor": "train", "reward": "train"}}},
            "placement.pools.rest: no role is on it; name it in placement.roles or remove the pool",
        ),
        ({"runtime": RAY, "placement__pools": {"main": 0}}, "main = 0: expected how many worker processes, 1 or more"),
        ({"runtime": RAY, "placement__pools": {"main": [2, -1]}}, "main = [2, -1]: expected how many worker processes"),
        ({"runtime": RAY, "placement__pools": {"main": "two"}}, "main = 'two': expected how many worker processes"),
        ({"runtime": RAY, "placement__pools": {"a b": 1}}, "pool 'a b': expected a name of letters, digits, - and _"),
        ({"actor__mesh": {"tp": 0}}, "actor.mesh.tp = 0: input should be greater than or equal to 1"),
        ({"actor__mesh": {"pt": 2}}, "unknown key actor.mesh.pt; did you mean actor.mesh.tp?"),
        (
            {"actor__mesh": {"tp": 2}},
            'actor.mesh: a cut model needs several processes; set runtime.kind = "ray" and placement.pools',
        ),
        ({"critic": {"mesh": {"tp": 2}}}, "[critic] is set, but grpo on [data] doesn't read it; remove the section"),
        (
            {"reward__mesh": {"tp": 2}},
            "reward.mesh: functions aren't cut; remove it, or set reward.model to a reward model",
        ),
        (
            {"runtime": RAY, "placement__pools": {"main": 6}, "actor__mesh": {"tp": 2, "pp": 2}},
            "actor.mesh: tp 2 x pp 2 = 4 processes hold one model, but pool 'main' has 6 workers; make it a multiple of 4",
        ),
        (
            {"runtime": RAY, "placement__pools": {"main": 6}, "actor__mesh": {"tp": 2, "cp": 2}},
            "actor.mesh: tp 2 x pp 1 x cp 2 = 4 processes share one sequence, but pool 'main' has 6 workers; make it a mul",
        ),
        (
            {"runtime": RAY, "placement__pools": {"main": 8}, "actor__mesh": {"tp": 2, "shard": "fsdp", "shard_ranks": 3}},
            "actor.mesh.shard_ranks = 3: 4 of pool 'main' hold the same parameters; use 2 or 4",
        ),
        (
            {"runtime": RAY, "placement__pools": {"main": 2}, "actor__mesh": {"pp": 2, "shard": "zero1", "shard_ranks": 1}},
            "actor.mesh.shard_ranks = 1: 1 of pool 'main' hold the same parameters; remove it",
        ),
        (
            {"runtime": RAY, "placement__pools": {"main": 4}, "actor__mesh": {"shard_ranks": 2}},
            'actor.mesh.shard_ranks: shard = "none" shares nothing out; remove it, or set actor.mesh.shard',
        ),
        (
            {"actor__mesh": {"shard": "fsdp", "shard_ranks": 2}},
            'actor.mesh.shard_ranks: needs several processes; set runtime.kind = "ray" and placement.pools, or remove it',
        ),
        ({"actor__mesh": {"cp": 2}}, "actor.mesh: a cut model needs several processes"),
        ({"actor__mesh": {"pp": 2, "chunks": 2}}, "actor.mesh: a cut model needs several processes"),
        ({"actor__mesh": {"chunks": 0}}, "actor.mesh.chunks = 0: input should be greater than or equal to 1"),
        (
            {"actor__mesh": {"chunks": 2}},
            "actor.mesh.chunks = 2: one process has no pipeline; set actor.mesh.pp, or remove it",
        ),
        (
            {"runtime": RAY, "placement__pools": {"main": 2}, "actor__mesh": {"pp": 2, "chunks": 2}},
            "actor.mesh: pp 2 x chunks 2 = 4 stages, but the model has 2 layers; lower chunks to 1",
        ),
        (
            {"runtime": RAY, "placement__pools": {"main": 3}, "actor__mesh": {"pp": 3}},
            "actor.mesh: pp = 3, but the model has 2 layers; lower pp to 2",
        ),
        (
            {"runtime": RAY, "placement__pools": {"main": 8}, "actor__mesh": {"tp": 8}},
            "actor.mesh: tp = 8, but the model has 4 attention heads: a rank needs one; lower tp to 4",
        ),
        (
            {
                "runtime": RAY,
                "placement__pools": {"main": 20},
                "actor__fresh": {"num_heads": 32},
                "actor__mesh": {"tp": 20},
            },
            "actor.mesh: tp = 20, but the model has 14 tokens in its vocabulary: a rank needs one; lower tp to 14",
        ),
        (
            {"runtime": RAY, "placement__pools": {"main": 4}, "kl": {"coef": 0.1}, "reference": {"mesh": {"pp": 4}}},
            "reference.mesh: pp = 4, but the model has 2 layers; lower pp to 2",
        ),
        (
            {"runtime": RAY, "placement__pools": {"main": 4}, **SAFE, "critic": {"mesh": {"pp": 4}}},
            "critic.mesh: pp = 4, but the model has 2 layers; lower pp to 2",
        ),
        (
            {"runtime": RAY, "placement__pools": {"main": 3}, **SAFE, "critic": {"mesh": {"pp": 2}}},
            "critic.mesh: tp 1 x pp 2 = 2 processes hold one model, but pool 'main' has 3 workers; make it a multiple of 2",
        ),
    ],
    ids=lambda value: "" if isinstance(value, str) else "-".join(value),
)
def test_mistakes_in_the_configuration(config: Any, hybridflow: Program, tmp_path: Path, keys: Any, message: str) -> None:
    line = one_line(hybridflow("train", config(**keys)))
    assert line.startswith("error: ") and message in line
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("no_loading")
def test_several_mistakes_are_told_together(config: Any, hybridflow: Program) -> None:
    outcome = hybridflow("train", config(train__stesp=3, sede=4), "--actor.optimizer.lr", "-1")
    assert outcome.code == 2
    assert [line.split(": ", 2)[2] for line in outcome.err.splitlines()] == [
        "actor.optimizer.lr = -1: input should be greater than 0",
        "unknown key train.stesp; did you mean train.steps?",
        "unknown key sede; did you mean seed?",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("train", "missing.toml"), "missing.toml: no such file"),
        (("report", "missing"), "missing"),
        (("eval", "missing.toml"), "no such file"),
        (("generate", "missing-model", "hello"), "missing-model"),
        (("models", "add", "smollm-135m"), "smollm2-135m"),
        (("models", "path"), "give the name of a model"),
    ],
)
@pytest.mark.usefixtures("no_cache")
def test_mistakes_on_the_command_line(hybridflow: Program, arguments: tuple[str, ...], message: str) -> None:
    assert message in one_line(hybridflow(*arguments))


def model_with(folder: Path, tiny: Path, change: Callable[[Path], None]) -> Path:
    shutil.copytree(tiny, folder)
    change(folder)
    return folder


def truncate(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def other_architecture(folder: Path) -> None:
    data = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**data, "model_type": "mamba", "architectures": ["MambaForCausalLM"]}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (truncate, "model.safetensors"),
        (other_architecture, "mamba"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "no tokenizer.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json"),
    ],
    ids=["damaged", "architecture", "tokenizer", "config"],
)
def test_model_folders_that_cannot_be_used(
    config: Any, hybridflow: Program, tmp_path: Path, tiny_model: Path, change: Any, message: str
) -> None:
    folder = model_with(tmp_path / "model", tiny_model, change)
    line = one_line(hybridflow("train", config(actor__fresh=None, actor__model=str(folder))))
    assert message in line and str(folder) in line
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("no_loading")
@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("p.jsonl", '{"prompt": "a"}\n{"prompt": 3}\n', "p.jsonl:2: prompt is 3 (int)"),
        ("p.jsonl", '{"prompt": "a"}\n{"prompt": \n', "p.jsonl:2: not valid JSON"),
        ("p.jsonl", '{"promt": "a"}\n', "no column 'prompt'; found promt; did you mean"),
        ("p.jsonl", "", "is empty"),
        ("p.csv", "prompt,answer\na,1\nb\n", "p.csv, row 2: has 1 columns, the header has 2"),
        ("p.txt", "a", "can't read .txt"),
    ],
)
def test_prompt_files(
    config: Any, hybridflow: Program, tmp_path: Path, tiny_model: Path, name: str, text: str, message: str
) -> None:
    (tmp_path / name).write_text(text)
    data = {"prompts": str(tmp_path / name)}
    line = one_line(hybridflow("train", config(actor__fresh=None, actor__model=str(tiny_model), data=data)))
    assert message in line


REWARDS = """
import os, time
def text(response): return "good"
def nothing(response): return None
def nan(response): return float("nan")
def always(response): raise ValueError("no idea")
def endless(response):
    while True: pass
def one_in_hundred(response, answer):
    if hash(answer) % 16 == 0: raise ValueError("unlucky")
    return len(response)
"""


@pytest.mark.parametrize(
    ("function", "reason"),
    [("text", "'good'"), ("nothing", "None"), ("nan", "nan"), ("always", "no idea"), ("endless", "timed out after 0.3 s")],
)
def test_rewards_that_never_score_stop_the_run(
    config: Any, hybridflow: Program, tmp_path: Path, function: str, reason: str
) -> None:
    (tmp_path / "rewards.py").write_text(REWARDS)
    reward = {"functions": [f"{tmp_path / 'rewards.py'}:{function}"], "timeout_s": 0.3}
    line = one_line(hybridflow("train", config(reward=reward)))
    assert reason in line
    assert not (tmp_path / "run").exists()  # nothing was learned, so the name stays free


def test_a_reward_that_starts_to_fail_loses_nothing(config: Any, hybridflow: Program, tmp_path: Path) -> None:
    source = "import pathlib\nFLAG = pathlib.Path(__file__).with_name('flag')\n"
    source += "def f(response):\n    if FLAG.exists(): raise ValueError('gone')\n    return len(response)\n"
    (tmp_path / "rewards.py").write_text(source)
    reward = {"functions": [f"{tmp_path / 'rewards.py'}:f"]}
    path = config(reward=reward, train__steps=4, evaluation__every=0)

    from hybridflow.hooks import Reporter

    original = Reporter.__call__

    def fail_after_two(self: Reporter, step: Any) -> None:
        original(self, step)
        if step.number == 2:
            (tmp_path / "flag").touch()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reporter, "__call__", fail_after_two)
        outcome = hybridflow("train", path)
    assert "gone" in one_line(outcome) and "saved after step 2" in outcome.out
    (tmp_path / "flag").unlink()
    assert hybridflow("train", path, "--resume").code == 0
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert steps == [0, 1, 2, 3, 4]


def test_rewards_that_sometimes_fail_drop_their_groups_and_are_counted(
    config: Any, hybridflow: Program, tmp_path: Path
) -> None:
    (tmp_path / "rewards.py").write_text(REWARDS)
    reward = {"functions": [f"{tmp_path / 'rewards.py'}:one_in_hundred"], "max_failed_fraction": 0.6}
    os.environ["PYTHONHASHSEED"] = "0"
    path = config(reward=reward, train__prompts_per_step=16, train__steps=3)
    assert hybridflow("train", path).code == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    failed = [line["reward/failed"] for line in lines[1:]]
    assert sum(failed) > 0 and all(count % 4 == 0 for count in failed)
    assert all(line["reward/mean"] > 0 for line in lines[1:])


def test_a_run_directory_that_is_in_use(config: Any, hybridflow: Program, tmp_path: Path) -> None:
    assert hybridflow("train", config()).code == 0
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    assert "holds a run already; continue it with --resume or choose another run_dir" in one_line(
        hybridflow("train", config())
    )
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("x")
    line = one_line(hybridflow("train", config(), "--run_dir", tmp_path / "other"))
    assert "holds other files (thesis.tex, 1 in all)" in line


def test_resuming_without_or_from_a_damaged_checkpoint(config: Any, hybridflow: Program, tmp_path: Path) -> None:
    assert "no checkpoint to resume from" in one_line(hybridflow("train", config(), "--resume"))
    path = config(checkpoint={"every": 1})
    assert hybridflow("train", path).code == 0
    line = one_line(hybridflow("train", path, "--resume"))
    assert "after step 2 and train.steps = 2, so nothing is left to do" in line
    newest = checkpoint.latest(tmp_path / "run" / "checkpoints")
    more = ("--resume", "--train.steps", 3)
    for name in ("trainer.json", "actor/0.safetensors"):
        whole = (newest / name).read_bytes()
        for content in (whole[:-1], whole[: len(whole) // 2] + b"?" + whole[len(whole) // 2 + 1 :], None):
            (newest / name).unlink()
            if content is not None:
                (newest / name).write_bytes(content)
            line = one_line(hybridflow("train", path, *more))
            assert f"{name}: missing or damaged" in line and "--resume" in line and "step-00000001" in line
            (newest / name).write_bytes(whole)
    (newest / "manifest.json").unlink()
    assert "manifest.json: can't be read" in one_line(hybridflow("train", path, *more))
    good = newest.with_name("step-00000001")
    assert hybridflow("train", path, "--resume", good).code == 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB, which only root can mount."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"a small disk can't be mounted here: {mounted.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_keeps_the_earlier_checkpoints(small_disk: Path) -> None:
    """Whether the driver or a rank can't write."""

    def save(step: int, numbers: int, tensors: int) -> Path:
        writing, writer = checkpoint.Writing(small_disk, step), PieceWriter()
        with writing.discarded_on_error():
            weights = torch.zeros(tensors)
            writer.start(writing.partial / "actor" / "0.safetensors", [("x", Piece.whole("x", (tensors,), True), weights)])
            writing.add("trainer", {"numbers": np.zeros(numbers, np.float32)})
            files = writer.done(wait=True)
            assert files is not None
            return writing.commit({"actor": files}, keep=5)

    first = save(1, 20_000, 20_000)
    for sizes in ((400_000, 1), (1, 400_000)):
        with pytest.raises(ResourceError, match=r"disk is full .* earlier checkpoints are untouched"):
            save(2, *sizes)
        assert [path.name for path in small_disk.iterdir()] == ["step-00000001"]
    assert np.array_equal(checkpoint.load(first).state["trainer"]["numbers"], np.zeros(20_000, np.float32))


def test_out_of_memory_says_what_to_lower(config: Any, tmp_path: Path) -> None:
    path = config(actor__fresh={"hidden_size": 100_000, "num_layers": 1, "num_heads": 4})

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (48 * 2**30, 48 * 2**30))

    command = [sys.executable, "-m", "hybridflow.cli", "train", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, preexec_fn=limit, check=False)
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: out of memory: lower train.token_budget")


@pytest.mark.usefixtures("no_loading")
def test_a_held_out_prompt_that_is_too_long_is_told_before_the_model_loads(
    hybridflow: Program, tmp_path: Path, tiny_model: Path
) -> None:
    for name, prompt in (("short", "word"), ("long", "word " * 3000)):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"prompt": prompt}) + "\n")
    data = {"prompts": str(tmp_path / "short.jsonl"), "eval_prompts": str(tmp_path / "long.jsonl")}
    reward = {"functions": ["hybridflow.rollout.scorers:words_over"]}
    keys = with_keys(REVERSE, data=data, reward=reward, actor={"model": str(tiny_model)}, run_dir=str(tmp_path / "run"))
    (tmp_path / "run.toml").write_text(_toml(keys))
    line = one_line(hybridflow("train", tmp_path / "run.toml"))
    assert "the longest prompt has " in line and "positions" in line


def test_a_pattern_that_freezes_nothing_is_told_before_workers_start(config: Any, hybridflow: Program) -> None:
    """A rank with some of the layers could not know it."""
    cut = {"runtime": RAY, "placement__pools": {"main": 2}, "actor__mesh": {"pp": 2}}
    told = "optimizer.freeze: 'layers.7.*' matches no parameter; names look like embed.weight"
    assert told in one_line(hybridflow("train", config(**cut, actor__optimizer={"freeze": ["layers.7.*"]})))
    critic = {"algorithm": "ppo", **cut, "actor__mesh": {}, "critic": {"mesh": {"pp": 2}, "optimizer": {"freeze": ["*"]}}}
    assert "the patterns freeze every parameter" in one_line(hybridflow("train", config(**critic)))


@pytest.mark.parametrize(
    ("generation", "share"), [({}, 1.0), ({"tp": 2}, 0.5), ({"pp": 2}, 0.5), ({"tp": 2, "pp": 2}, 0.25)], ids=str
)
def test_what_a_process_holds_of_the_cache_counts(
    config: Any, hybridflow: Program, generation: dict[str, int], share: float
) -> None:
    """48 positions of two layers with four heads of eight numbers are 24,576 bytes."""
    keys = {"runtime": RAY, "placement__pools": {"main": 4}, "actor__mesh": {"tp": 2, "pp": 2}}
    for least, code in ((1.01, 0), (0.99, 2)):
        size = 24_576e-9 * share * least
        path = config(**keys, actor__generation_mesh=generation, generation__kv_cache_gb=size)
        outcome = hybridflow("graph", path)
        assert outcome.code == code, outcome
    assert "over kv_cache_gb" in one_line(outcome)


def test_a_full_disk_is_one_line_wherever_it_is_written(
    hybridflow: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hybridflow.launch.train", lambda *_: Path("/dev/full").write_text("a step"))
    out = hybridflow("train", written(tmp_path, REVERSE))
    assert out.code == 2
    assert out.err.startswith("error: the disk is full; what was saved before is untouched. Free some space, then go on ")
    assert out.err.count("\n") == 1
