"""Checkpoints: complete, and either whole or not there.

    checkpoints/step-00000020/
        manifest.json      step, and sha256 and size of every file
        trainer.pt, actor.pt, ...

A checkpoint is written beside its place, synced, and renamed; the manifest is checked before anything is loaded. The files
are pickles of torch: load only checkpoints that you trust.
"""

import errno
import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hybridflow.core.errors import CheckpointError, ResourceError
from hybridflow.core.files import appearing

__all__ = ["latest", "load", "save"]

MANIFEST = "manifest.json"


def save(folder: Path, step: int, state: Mapping[str, Any], keep: int) -> Path:
    """Write ``state`` (one file for each key) as the checkpoint of ``step``; the newest ``keep`` checkpoints remain."""
    target = folder / f"step-{step:08d}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(target, ignore_errors=True)
        with appearing(target) as writing:
            files = {f"{name}.pt": _write(writing / f"{name}.pt", part) for name, part in state.items()}
            (writing / MANIFEST).write_text(json.dumps({"step": step, "files": files}, indent=1))
    except (OSError, RuntimeError) as error:
        raise _explain(error, target) from error
    for old in _all(folder)[:-keep]:
        shutil.rmtree(old)
    return target


def latest(folder: Path) -> Path:
    """The newest checkpoint in ``folder``; CheckpointError if there is none."""
    found = _all(folder)
    if not found:
        raise CheckpointError(f"{folder}: no checkpoint to resume from; start the run without --resume")
    return found[-1]


def load(path: Path) -> dict[str, Any]:
    """The state that was saved; CheckpointError if a file is missing or differs from what was written."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path / MANIFEST}: can't be read ({error}); {_older(path)}") from None
    for name, written in manifest["files"].items():
        if not (path / name).is_file() or _digest(path / name) != written["sha256"]:
            raise CheckpointError(f"{path / name}: missing or damaged (it differs from its manifest); {_older(path)}")
    return {Path(name).stem: torch.load(path / name, weights_only=False) for name in manifest["files"]}


def _write(path: Path, part: Any) -> dict[str, Any]:
    torch.save(part, path)
    return {"sha256": _digest(path), "bytes": path.stat().st_size}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _all(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*")) if folder.is_dir() else []


def _older(path: Path) -> str:
    others = [other.name for other in _all(path.parent) if other != path]
    return f"resume from another one with --resume {path.parent / others[-1]}" if others else "there is no other checkpoint"


def _explain(error: Exception, target: Path) -> Exception:
    """torch reports a full disk as a RuntimeError without errno, so the free space decides."""
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    free = shutil.disk_usage(next(parent for parent in target.parents if parent.exists())).free
    if full or (isinstance(error, RuntimeError) and free < 2**26):
        return ResourceError(
            f"{target}: the disk is full ({free / 2**20:.0f} MiB free); earlier checkpoints are untouched. "
            "Free some space or set checkpoint.keep lower, then go on with --resume"
        )
    return error
