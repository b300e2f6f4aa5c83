"""Checkpoints: complete, and either whole or not there.

    checkpoints/step-00000020/
        manifest.json               step, and sha256 and size of every file
        trainer.json, actor.json    the state of the loop and of roles; their arrays in trainer.safetensors, ...
        actor/0.safetensors         weights and optimizer, written by the ranks: see workers/checkpoint.py
              1.safetensors ...

A checkpoint is written beside its place, synced, and renamed; sizes and hashes are checked before anything goes on from it.
Nothing in it is a pickle.
"""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from hybridflow.core.errors import CheckpointError
from hybridflow.core.files import Written, check_file, explain_full_disk, hidden, reveal, write_whole, written
from hybridflow.core.state_file import read_state, write_state

__all__ = ["Checkpoint", "Writing", "latest", "load", "marker"]

MANIFEST = "manifest.json"
FULL = "earlier checkpoints are untouched. Free some space or set checkpoint.keep lower, then go on with --resume"


class Checkpoint(NamedTuple):
    """A checkpoint that is there: ``state`` by name, and the ``files`` of roles, whose content hasn't been looked at."""

    path: Path
    step: int
    state: dict[str, Any]
    files: dict[str, list[Written]]

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Adds to a CheckpointError what to do."""
        try:
            yield
        except CheckpointError as error:
            raise CheckpointError(f"{error}; {_older(self.path)}") from error


class Writing:
    """A checkpoint in the making, in the folder ``partial``. ResourceError: the disk is full."""

    def __init__(self, folder: Path, step: int) -> None:
        self.target, self.step = folder.absolute() / f"step-{step:08d}", step
        self._files: list[Written] = []
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(self.target, ignore_errors=True)
        self.partial = hidden(self.target)

    def add(self, name: str, state: Any) -> None:
        """Write the state of the loop or a role."""
        with explain_full_disk(self.target, FULL):
            self._files += [written(self.partial, file) for file in write_state(self.partial, name, state)]

    def commit(self, files: Mapping[str, Sequence[Written]], keep: int) -> Path:
        """Make the checkpoint appear, when the roles have written ``files``; the newest ``keep`` checkpoints remain."""
        named = [*self._files, *(file for role in files.values() for file in role)]
        listed = {file.name: {"sha256": file.sha256, "bytes": file.num_bytes} for file in named}
        with explain_full_disk(self.target, FULL):
            write_whole(self.partial / MANIFEST, json.dumps({"step": self.step, "files": listed}, indent=1).encode())
            reveal(self.partial, self.target)
        for old in _all(self.target.parent)[:-keep]:
            shutil.rmtree(old)
        return self.target

    @contextmanager
    def discarded_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            shutil.rmtree(self.partial, ignore_errors=True)
            raise


@contextmanager
def marker(folder: Path) -> Iterator[Path]:
    """A file in ``folder`` that every machine of the run has to see."""
    path = folder.absolute() / f".{uuid.uuid4().hex}"
    path.touch()
    try:
        yield path
    finally:
        path.unlink()


def latest(folder: Path) -> Path:
    """The newest checkpoint in ``folder``; CheckpointError if there is none."""
    found = _all(folder)
    if not found:
        raise CheckpointError(f"{folder}: no checkpoint to resume from; start the run without --resume")
    return found[-1]


def load(path: Path) -> Checkpoint:
    """What was saved; CheckpointError if a file is missing, or one that is read here differs from what was written."""
    path = path.absolute()
    try:
        manifest = json.loads((path / MANIFEST).read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path / MANIFEST}: can't be read ({error}); {_older(path)}") from None
    files = [Written(name, file["sha256"], file["bytes"]) for name, file in manifest["files"].items()]
    found = Checkpoint(path, manifest["step"], {}, {})
    with found.explaining():
        for file in files:
            check_file(path, file, content="/" not in file.name)
            if "/" in file.name:
                found.files.setdefault(file.name.partition("/")[0], []).append(file)
    names = [Path(file.name).stem for file in files if file.name.endswith(".json")]
    found.state.update((name, read_state(path, name)) for name in names)
    return found


def _all(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*")) if folder.is_dir() else []


def _older(path: Path) -> str:
    others = [other.name for other in _all(path.parent) if other != path]
    return f"resume from another one with --resume {path.parent / others[-1]}" if others else "there is no other checkpoint"
