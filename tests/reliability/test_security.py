"""What is read runs no code, rewards inherit no secrets, servers are for this machine alone, paths stay in their folder."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import hybridflow
from hybridflow import checkpoint
from hybridflow.cli import _parser
from hybridflow.core.errors import CheckpointError, ModelError
from hybridflow.models.weights import load_decoder
from hybridflow.rollout.reward_process import MAX_FILE_BYTES
from hybridflow.rollout.reward_server import RewardServer
from hybridflow.rollout.rewards import RewardPool, RewardSpec

PACKAGE = Path(hybridflow.__file__).parent
# Calls that run code found in data, unpack archives as they come, or hand a line to a shell.
UNSAFE = {
    *(
        "pickle.load",
        "pickle.loads",
        "pickle.Unpickler",
        "cloudpickle.load",
        "cloudpickle.loads",
        "dill.load",
        "dill.loads",
    ),
    *("torch.load", "torch.jit.load", "joblib.load", "marshal.load", "marshal.loads", "shelve.open", "yaml.load"),
    *("np.load", "numpy.load", "eval", "exec", "compile", "os.system", "os.popen", "shutil.unpack_archive"),
    *("tarfile.open", "zipfile.ZipFile"),
}
ALLOWED = {
    ("rollout/reward_process.py", "pickle.load"): "what its parent writes to its pipe",
    (
        "models/sources.py",
        "zipfile.ZipFile",
    ): "a wheel of the pinned hash, of which one member is read into a file named here",
}


def test_nothing_in_the_package_runs_what_it_reads() -> None:
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                words = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                named = name in UNSAFE or name.endswith((".extractall", ".extract"))
                if named or words.get("allow_pickle") == "True" or words.get("shell") == "True":
                    found.add((path.relative_to(PACKAGE).as_posix(), name))
    assert found == ALLOWED.keys()


def scored(folder: Path, body: str, **keys: object) -> tuple[float | None, str | None]:
    (folder / "own.py").write_text(f"import os\ndef own(response):\n    {body}\n")
    with RewardPool([RewardSpec(f"{folder / 'own.py'}:own")], workers=1, **keys) as pool:  # type: ignore[arg-type]
        (result,) = pool.score([""], [""], [{}])
    return result.score, result.failure


def test_reward_functions_inherit_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = ("OPENAI_API_KEY", "HF_TOKEN", "AWS_REGION", "db_password", "GITHUB_TOKEN", "RAY_AUTH_TOKEN", "SSH_AUTH_SOCK")
    for name in (*secrets, "MONKEY_BUSINESS", "TOKENIZERS_PARALLELISM", "KEYBOARD"):
        monkeypatch.setenv(name, "x")
    body = f"return sum(10 ** i * (name in os.environ) for i, name in enumerate({(*secrets, 'MONKEY_BUSINESS')}))"
    assert scored(tmp_path, body) == (10 ** len(secrets), None)
    assert scored(tmp_path, body, secrets=["HF_TOKEN"]) == (10 ** len(secrets) + 10, None)
    body = "return sum(name in os.environ for name in ('PATH', 'PWD', 'KEYBOARD', 'TOKENIZERS_PARALLELISM'))"
    assert scored(tmp_path, body) == (4 if "PWD" in os.environ else 3, None)


def test_reward_functions_have_limits(tmp_path: Path) -> None:
    score, failure = scored(tmp_path, f"return len(bytearray({2 * psutil.virtual_memory().total}))")
    assert score is None and "MemoryError" in str(failure)
    target = tmp_path / "large"
    score, failure = scored(tmp_path, f"open({str(target)!r}, 'wb').truncate({MAX_FILE_BYTES + 1}); return 1.0")
    assert score is None and "File too large" in str(failure)
    assert scored(tmp_path, f"open({str(target)!r}, 'wb').truncate({MAX_FILE_BYTES}); return 1.0") == (1.0, None)
    target.unlink()


def test_servers_are_for_this_machine_alone_unless_told_otherwise() -> None:
    for command in (["serve", "run"], ["serve-rewards", "own.py:own"]):
        assert _parser().parse_args(command).host == "127.0.0.1"
    assert RewardServer.__init__.__defaults__ == ("127.0.0.1", 0)


@pytest.mark.parametrize("name", ["../other.safetensors", "/etc/passwd", "a/../../b", "", "a\0b", 3, None])
def test_an_index_names_files_of_its_folder_alone(tiny_model: Path, tmp_path: Path, name: object) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    (folder / "model.safetensors").rename(tmp_path / "other.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    with pytest.raises(ModelError, match=r"its weight_map names .*, expected files of this folder"):
        load_decoder(folder)


@pytest.mark.parametrize("name", ["../secret.json", "/etc/hostname"])
def test_a_manifest_names_files_of_its_folder_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / "secret.json").write_text("{}")
    folder = tmp_path / "step-00000001"
    folder.mkdir()
    (folder / "manifest.json").write_text(json.dumps({"step": 1, "files": {name: {"sha256": "", "bytes": 2}}}))
    with pytest.raises(CheckpointError, match="which is outside"):
        checkpoint.load(folder)


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_a_ray_that_is_started_here_asks_for_a_token() -> None:
    """In a process of its own: who connects without the token is refused."""
    program = """
import os, subprocess, sys
from hybridflow.controller.ray_group import connect
connect(None, 1)
import ray
from ray._private.authentication.authentication_utils import is_token_auth_enabled
assert is_token_auth_enabled(), "no token is asked for"
address = ray.get_runtime_context().gcs_address
other = "import ray; ray.init(address=%r, logging_level='ERROR'); print('in')" % address
environment = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "wrong"}
done = subprocess.run([sys.executable, "-c", other], env=environment, capture_output=True, text=True, timeout=200)
assert "in" not in done.stdout.split() and done.returncode != 0, done
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
