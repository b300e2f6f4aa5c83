"""A program that saves tiny checkpoints again and again in child processes, each of which is killed somewhere in it.

    python saving.py random FOLDER 200      killed after a random time
    python saving.py every FOLDER           killed before each operation on the file system in turn

After each kill it does what the next start does, and prints what it found as a line of JSON:

    told      the step of the last checkpoint of which the child said that it is there, 0 for none
    newest    the step of the one that the next start finds, 0 for none
    whole     all of its files are as they were written, and its state is that of its step
    left      what is there besides checkpoints
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

from hybridflow import checkpoint
from hybridflow.core.files import written

CHANGING = {"os.rename", "os.mkdir", "os.remove", "os.rmdir", "open"}


def save(folder: Path, step: int) -> None:
    writing = checkpoint.Writing(folder, step)
    (writing.partial / "actor").mkdir()
    (writing.partial / "actor" / "0").write_bytes(bytes([step % 256]) * 1000)
    writing.add("trainer", {"step": step})
    writing.commit({"actor": [written(writing.partial, "actor/0")]}, 1)


def child(folder: Path, first: int, told: int, kill_at: int | None) -> None:
    """Save ``first``, then each step after it twice: a run that was rewound saves what is there already."""
    os.write(told, b"0\n")
    if kill_at is not None:
        left = kill_at

        def count(event: str, _: object) -> None:
            nonlocal left
            if event in CHANGING:
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
    for number in range(10_000):
        step = first + (number + 1) // 2
        save(folder, step)
        os.write(told, f"{step}\n".encode())
        if kill_at is not None and number == 2:  # replaced, revealed and removed, all of it
            os._exit(0)


def killed(folder: Path, first: int, seconds: float, kill_at: int | None) -> tuple[int, bool]:
    """The step that the child told last, and whether it was killed."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        child(folder, first, writing, kill_at)
    os.close(writing)
    if kill_at is None:
        assert os.read(reading, 2) == b"0\n", "it has begun"
        time.sleep(seconds)
        os.kill(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    with open(reading) as lines:
        steps = lines.read().split()
    return int(steps[-1]) if steps else 0, os.WIFSIGNALED(status)


def look(folder: Path, told: int) -> int:
    """What the next start does; the step that it finds."""
    checkpoint.tidy(folder)
    found, damaged = checkpoint.intact(folder)
    newest = found.step if found else 0
    whole = not damaged and (found is None or found.state["trainer"] == {"step": newest})
    left = sorted(path.name for path in folder.iterdir() if not path.name.startswith("step-"))
    print(json.dumps({"told": told, "newest": newest, "whole": whole, "left": left}), flush=True)
    return newest


def seconds(folder: Path) -> float:
    """What a save takes just now."""
    start = time.perf_counter()
    save(folder, 1)
    return time.perf_counter() - start


def main() -> None:
    how, folder = sys.argv[1], Path(sys.argv[2])
    folder.mkdir()
    if how == "random":
        newest, draw = 0, random.Random(1)
        for _ in range(int(sys.argv[3])):
            told, _ = killed(folder, newest, draw.uniform(0, 4 * seconds(folder.with_name("trial"))), None)
            newest = look(folder, told or newest)
        return
    for kill_at in range(1000):
        shutil.rmtree(folder)
        folder.mkdir()
        told, was_killed = killed(folder, 1, 0, kill_at)
        look(folder, told)
        if not was_killed:
            return


if __name__ == "__main__":
    main()
