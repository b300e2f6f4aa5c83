"""Files and folders that are there whole or not at all, whenever the process is killed."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["appearing", "sync", "write_whole"]


def write_whole(path: Path, data: bytes) -> None:
    """Replace a file's content in one go: a reader, or a kill, sees the old or the new content."""
    beside = path.with_name(path.name + ".tmp")
    with beside.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


@contextmanager
def appearing(folder: Path) -> Iterator[Path]:
    """A hidden sibling to fill, which becomes ``folder`` at the end, on disk; removed on any error, and on the next try
    after a kill."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
        for path in [*partial.iterdir(), partial]:
            sync(path)
        partial.rename(folder)
        sync(folder.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def sync(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
