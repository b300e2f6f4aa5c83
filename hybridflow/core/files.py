"""Files and folders that are there whole or not at all, whenever the process is killed."""

import errno
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import NamedTuple

from hybridflow.core.errors import CheckpointError, ResourceError

__all__ = [
    "Written",
    "appearing",
    "check_file",
    "explain_full_disk",
    "hidden",
    "hidden_name",
    "inside",
    "replacing",
    "reveal",
    "sync",
    "write_whole",
    "written",
]


class Written(NamedTuple):
    """A file as it was written: its path in its folder, its content's SHA-256 and its size."""

    name: str
    sha256: str
    num_bytes: int


def written(folder: Path, name: str) -> Written:
    """A file as it is."""
    with (folder / name).open("rb") as file:
        return Written(name, hashlib.file_digest(file, "sha256").hexdigest(), (folder / name).stat().st_size)


def check_file(folder: Path, expected: Written, content: bool = True) -> None:
    """CheckpointError: the file is missing, or not as it was written: by its size, and by its ``content``."""
    if not inside(expected.name):
        raise CheckpointError(f"{folder}: its manifest names {expected.name!r}, which is outside; it is damaged")
    path = folder / expected.name
    fits = path.is_file() and path.stat().st_size == expected.num_bytes
    if not fits or (content and written(folder, expected.name) != expected):
        raise CheckpointError(f"{path}: missing or damaged (it differs from its manifest)")


def inside(name: object) -> bool:
    """Whether what was read from a file is the relative path of another one below the same folder."""
    if not isinstance(name, str) or not name or "\0" in name:
        return False
    path = PurePath(name)
    return not path.is_absolute() and ".." not in path.parts


def write_whole(path: Path, data: bytes) -> None:
    """Replace a file's content in one go: a reader, or a kill, sees the old or the new content."""
    with replacing(path) as beside:
        beside.write_bytes(data)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A sibling to write, which takes the file's place at the end, on disk."""
    beside = path.with_name(path.name + ".tmp")
    yield beside
    sync(beside)
    beside.replace(path)


@contextmanager
def appearing(folder: Path) -> Iterator[Path]:
    """A hidden sibling to fill, which becomes ``folder`` at the end, on disk; removed on any error, and on the next try
    after a kill."""
    partial = hidden(folder)
    try:
        yield partial
        for path in partial.iterdir():
            sync(path)
        reveal(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def hidden(folder: Path) -> Path:
    """A new and empty hidden sibling, for ``reveal``; what an earlier try left of it is removed."""
    partial = folder.with_name(hidden_name(folder))
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    return partial


def hidden_name(folder: Path) -> str:
    """Of the hidden sibling."""
    return f".{folder.name}.partial"


def reveal(partial: Path, folder: Path) -> None:
    """Make ``folder`` of its hidden sibling, whose files are on disk."""
    sync(partial)
    partial.rename(folder)
    sync(folder.parent)


@contextmanager
def explain_full_disk(folder: Path, hint: str) -> Iterator[None]:
    """Make a ResourceError of an error of writing to a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        free = shutil.disk_usage(next(parent for parent in (folder, *folder.parents) if parent.exists())).free
        raise ResourceError(f"{folder}: the disk is full ({free / 2**20:.0f} MiB free); {hint}") from error


def sync(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
