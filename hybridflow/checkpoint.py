"""Checkpoints: complete, and either whole or not there.

    checkpoints/step-00000020/
        manifest.json               step, its evaluation if there was one, sha256 and size of every file
        trainer.json, actor.json    the state of the loop and of roles; their arrays in trainer.safetensors, ...
        actor/0.safetensors         weights and optimizer, written by the ranks: see workers/checkpoint.py
              1.safetensors ...

A checkpoint is written beside its place, synced, and renamed; sizes and hashes are checked before anything goes on from it.
Nothing in it is a pickle. Whenever the process is killed, what was complete stays so:

    .step-00000020.partial/     being written, or removed; ``tidy`` removes it when the run is started again
    .step-00000020.replaced/    was complete, while another one of the same step takes its place; ``tidy`` puts it back
    superseded-step-00000020/   later than the one that the run went on from, so of another course: ``set_aside``
"""

from __future__ import annotations

import json
import math
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from hybridflow.core.errors import CheckpointError
from hybridflow.core.files import Written, check_file, explain_full_disk, hidden, hidden_name, reveal, write_whole, written
from hybridflow.core.state_file import read_state, write_state

__all__ = ["Checkpoint", "Writing", "intact", "latest", "load", "marker", "set_aside", "tidy"]

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
        """Adds to a CheckpointError what to do, and makes one of a state that lacks something."""
        try:
            yield
        except CheckpointError as error:
            raise CheckpointError(f"{error}; {_older(self.path)}") from error
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            found = f"its state isn't one of this version and run ({type(error).__name__}: {error})"
            raise CheckpointError(f"{self.path}: {found}; {_older(self.path)}") from error


class Writing:
    """A checkpoint in the making, in the folder ``partial``. ResourceError: the disk is full.

    ``metrics``: what was evaluated after this step, for ``commit`` to compare by.
    """

    def __init__(self, folder: Path, step: int, metrics: Mapping[str, float] = MappingProxyType({})) -> None:
        self.target, self.step, self.metrics = folder.absolute() / f"step-{step:08d}", step, metrics
        self._files: list[Written] = []
        folder.mkdir(parents=True, exist_ok=True)
        self.partial = hidden(self.target)

    def add(self, name: str, state: Any) -> None:
        """Write the state of the loop or a role."""
        with explain_full_disk(self.target, FULL):
            self._files += [written(self.partial, file) for file in write_state(self.partial, name, state)]

    def commit(self, files: Mapping[str, Sequence[Written]], keep: int, best: str | None = None) -> Path:
        """Make the checkpoint appear, when the roles have written ``files``; the newest ``keep`` checkpoints remain, and
        the one with the largest metric ``best``."""
        named = [*self._files, *(file for role in files.values() for file in role)]
        listed = {file.name: {"sha256": file.sha256, "bytes": file.num_bytes} for file in named}
        with explain_full_disk(self.target, FULL):
            manifest = {"step": self.step, "metrics": dict(self.metrics), "files": listed}
            write_whole(self.partial / MANIFEST, json.dumps(manifest, indent=1).encode())
            self._reveal()
        _retain(self.target, keep, best)
        return self.target

    def _reveal(self) -> None:
        """In place of one of the same step, which is complete, and there under one name or another until this one is."""
        replaced = _replaced(self.target)
        if self.target.exists():
            self.target.rename(replaced)
        reveal(self.partial, self.target)
        shutil.rmtree(replaced, ignore_errors=True)

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


def tidy(folder: Path) -> None:
    """Clean up after a run that was killed while it saved; nobody else may be saving there."""
    for replaced in folder.glob(".step-*.replaced"):
        target = replaced.with_name(replaced.name.removeprefix(".").removesuffix(".replaced"))
        if target.exists():
            shutil.rmtree(replaced)
        else:
            replaced.rename(target)
    for partial in folder.glob(".step-*.partial"):
        shutil.rmtree(partial)


def set_aside(folder: Path, step: int) -> list[str]:
    """Rename checkpoints of later steps than that which a run goes on from: they are no past of it. Their new names."""
    later = [path for path in _all(folder) if int(path.name.removeprefix("step-")) > step]
    names = []
    for path in later:
        aside = path.with_name(f"superseded-{path.name}")
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
        names.append(aside.name)
    return names


def intact(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint of which every file is as it was written, and what is wrong with newer ones.

    None: there is no checkpoint at all. CheckpointError: there are, all of them damaged.
    """
    damaged: list[str] = []
    for path in reversed(_all(folder)):
        try:
            return load(path, content=True), damaged
        except CheckpointError as error:
            damaged.append(str(error).partition(";")[0])
    if damaged:
        raise CheckpointError(f"{folder}: no checkpoint is whole ({'; '.join(damaged)}); start the run anew elsewhere")
    return None, []


def latest(folder: Path) -> Path:
    """The newest checkpoint in ``folder``; CheckpointError if there is none."""
    found = _all(folder)
    if not found:
        raise CheckpointError(f"{folder}: no checkpoint to resume from; start the run without --resume")
    return found[-1]


def load(path: Path, content: bool = False) -> Checkpoint:
    """What was saved; CheckpointError if a file is missing, or one that is read here differs from what was written.

    ``content``: also look into the files of roles, which are checked where they are read.
    """
    path = path.absolute()
    step, files = _manifest(path)
    found = Checkpoint(path, step, {}, {})
    with found.explaining():
        for file in files:
            check_file(path, file, content or "/" not in file.name)
            if "/" in file.name:
                found.files.setdefault(file.name.partition("/")[0], []).append(file)
        names = [Path(file.name).stem for file in files if file.name.endswith(".json")]
        found.state.update((name, read_state(path, name)) for name in names)
    return found


def _manifest(path: Path) -> tuple[int, list[Written]]:
    """The step, and every file as it was written."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        files = [Written(name, str(file["sha256"]), int(file["bytes"])) for name, file in manifest["files"].items()]
        return int(manifest["step"]), files
    except (OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        what = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{path / MANIFEST}: can't be read ({what}); {_older(path)}") from None


def _all(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*")) if folder.is_dir() else []


def _retain(committed: Path, keep: int, best: str | None) -> None:
    """Of all complete checkpoints the newest ``keep``, the one that is ``committed`` just now, and the ``best``."""
    complete = [path for path in _all(committed.parent) if (path / MANIFEST).is_file()]
    kept = {*complete[-keep:], committed}
    if best is not None:
        metrics = {path: json.loads((path / MANIFEST).read_text()).get("metrics", {}) for path in complete}
        evaluated = [path for path in complete if math.isfinite(metrics[path].get(best, math.nan))]
        kept |= set(sorted(evaluated, key=lambda path: metrics[path][best])[-1:])  # the newest of equals
    for old in complete:
        if old not in kept:
            _remove(old)


def _remove(path: Path) -> None:
    """A kill meanwhile leaves nothing that looks like a checkpoint."""
    gone = path.with_name(hidden_name(path))
    path.rename(gone)
    shutil.rmtree(gone)


def _replaced(target: Path) -> Path:
    return target.with_name(f".{target.name}.replaced")


def _older(path: Path) -> str:
    others = [other.name for other in _all(path.parent) if other != path]
    return f"resume from another one with --resume {path.parent / others[-1]}" if others else "there is no other checkpoint"
