"""The base of task profiles: what it keeps, for several runs at once, and what it says to files that are none."""

from __future__ import annotations

import multiprocessing
import sqlite3
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from hybridflow.core.errors import ProfileError, ResourceError, UnknownTaskError, UserError
from hybridflow.core.metrics import Effort, Span
from hybridflow.planner.profile_base import KEPT, Learned, ProfileBase, Sample, sample_of

MACHINE = {"processor": "one", "cores": 2, "gpus": ()}
ONE = Sample("actor.update", "train", "m", "cpu", 1, 1, 8, 80, 0.5, 0.5, 1e8, source="runs/one")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "hardware" / "tasks.sqlite"


def test_the_newest_samples_of_each_size_are_kept(path: Path) -> None:
    for number in range(3):
        ProfileBase.add(path, MACHINE, [replace(ONE, seconds=float(5 * number + i)) for i in range(5)])
    ProfileBase.add(path, MACHINE, [replace(ONE, rows=16), replace(ONE, threads=2), replace(ONE, flops=7.0)])
    base = ProfileBase.open(path, MACHINE)
    assert [one.seconds for one in base.samples][:KEPT] == [float(15 - KEPT + i) for i in range(KEPT)]
    assert base.samples[KEPT:] == [replace(ONE, rows=16), replace(ONE, threads=2), replace(ONE, flops=7.0)]
    assert base.tasks() == [("actor.update", "m", "cpu")] and base.cores == 2


def test_about_the_same_size_is_one() -> None:
    sizes = {replace(ONE, rows=rows).size for rows in (8, 8.5, 9)}
    assert len(sizes) == 1 and replace(ONE, rows=16).size not in sizes and replace(ONE, tokens=0).size not in sizes


def test_what_auctions_learned_is_kept_the_last_of_each(path: Path) -> None:
    old, new, other = Learned("actor m", "threads", 0.25), Learned("actor m", "threads", 0.5), Learned("a", "workers", 1.0)
    ProfileBase.add(path, MACHINE, [ONE], [old])
    ProfileBase.add(path, MACHINE, [], [new, other])
    base = ProfileBase.open(path, MACHINE)
    assert base.scalings == base.without("runs/one").scalings == [new, other] and base.samples == [ONE]
    assert (base.scaling("actor m", "threads"), base.scaling("actor m", "workers")) == (0.5, None)
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE scalings SET parallel = 1.5 WHERE work = 'a'")
    with pytest.raises(ProfileError, match="damaged base of task profiles"):
        ProfileBase.open(path)


def test_a_base_without_an_auction_learns_of_one(path: Path) -> None:
    ProfileBase.add(path, MACHINE, [ONE])
    with sqlite3.connect(path) as connection:
        connection.execute("DROP TABLE scalings")
    assert ProfileBase.open(path).scalings == []


def test_units_are_compared_where_several_were_measured(path: Path) -> None:
    """A call of each verb of the roles that are named, of its newest size."""
    many = [replace(ONE, threads=4, seconds=0.2), replace(ONE, verb="actor.prepare", seconds=0.1)]
    other = [replace(ONE, model="n", threads=9), replace(ONE, verb="critic.update", threads=8), replace(ONE, flops=1.0)]
    ProfileBase.add(path, {**MACHINE, "cores": 8}, [sample for sample in (ONE, *many, *other) for _ in range(4)])
    base = ProfileBase.open(path)
    (few, few_s), (most, most_s) = base.ends({"actor": ("m", "cpu")}, "threads") or [(0, 0.0)] * 2
    assert (few, most) == (1, 4) and (few_s, most_s) == (pytest.approx(0.5, rel=0.05), pytest.approx(0.2, rel=0.05))
    assert base.ends({"actor": ("m", "cpu")}, "workers") is None is base.ends({"critic": ("m", "cpu")}, "threads")


def _write(path: Path, rows: int) -> None:
    for number in range(30):
        ProfileBase.add(path, MACHINE, [replace(ONE, rows=rows, tokens=4**number)])


def test_runs_side_by_side_lose_nothing(path: Path) -> None:
    """Also of the file that all of them make."""
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_write, args=(path, rows)) for rows in (1, 4, 16)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert [writer.exitcode for writer in writers] == [0, 0, 0]
    assert Counter(one.rows for one in ProfileBase.open(path).samples) == {1: 30, 4: 30, 16: 30}
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_prediction_is_of_the_task_that_is_asked_for(path: Path) -> None:
    for model, seconds in (("small", 0.1), ("large", 1.0)):
        ProfileBase.add(path, MACHINE, [replace(ONE, model=model, seconds=seconds)] * 3)
    ProfileBase.add(path, MACHINE, [replace(ONE, flops=1e9, seconds=99.0), replace(ONE, device="cuda", seconds=0.01)])
    base = ProfileBase.open(path)
    assert base.predict("actor.update", rows=8, tokens=80, model="small").seconds == pytest.approx(0.1, rel=0.01)
    assert base.predict("actor.update", rows=8, tokens=80).seconds == pytest.approx(1.0, rel=0.01)  # the newest
    assert base.predict("actor.update", rows=8, tokens=80, device="cuda").seconds == pytest.approx(0.01, rel=0.01)
    with pytest.raises(UnknownTaskError, match=r"^critic.update was not profiled on a cpu .* profiled are actor.update; "):
        base.predict("critic.update", rows=8, tokens=80)
    with pytest.raises(UnknownTaskError, match=r"actor\.update with middling"):
        base.predict("actor.update", rows=8, tokens=80, model="middling")


def test_a_run_s_own_samples_can_be_left_out(path: Path) -> None:
    ProfileBase.add(path, MACHINE, [ONE, replace(ONE, source="runs/two", seconds=2.0)])
    assert ProfileBase.open(path).without("runs/one").samples == [replace(ONE, source="runs/two", seconds=2.0)]


def test_a_span_is_a_sample_if_it_was_looked_at() -> None:
    span = Span("actor.update", "train", 3.0, 0.5, "main/0")
    effort = Effort(cpu_s=0.75, memory_bytes=7, rows=8, tokens=80, threads=2, workers=4)
    found = sample_of(replace(span, effort=effort), "m", "cpu", "here")
    assert found == Sample("actor.update", "train", "m", "cpu", 2, 4, 8, 80, 0.5, 0.75, 7, source="here")
    assert sample_of(span, "m", "cpu", "here") is None
    assert sample_of(replace(span, effort=replace(effort, rows=0.0)), "m", "cpu", "here") is None


def other_program(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE samples (id)")


def later_version(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 7")


def senseless(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE samples SET seconds = 'long'")


def nowhere(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("DELETE FROM machine")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:5000])


def text(path: Path) -> None:
    path.write_text("not a base at all " * 100)


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (other_program, "a SQLite file of another program"),
        (later_version, "version 7 of task profiles, this program version 1; remove it"),
        (senseless, "samples without sense"),
        (nowhere, "it doesn't say of which machine"),
        (cut, "a damaged base of task profiles"),
        (text, "a damaged base of task profiles"),
        (Path.unlink, "no task was profiled on this machine yet; run: hybridflow profile"),
    ],
)
def test_files_that_are_no_base(path: Path, spoil: object, told: str) -> None:
    ProfileBase.add(path, MACHINE, [ONE] * 40)
    if spoil is other_program:
        path.unlink()
    spoil(path)  # type: ignore[operator]
    with pytest.raises(ProfileError) as caught:
        ProfileBase.open(path, MACHINE)
    assert told in str(caught.value) and "\n" not in str(caught.value)


def test_a_base_of_another_machine(path: Path) -> None:
    ProfileBase.add(path, MACHINE, [ONE])
    for use in (lambda machine: ProfileBase.open(path, machine), lambda machine: ProfileBase.add(path, machine, [ONE])):
        with pytest.raises(ProfileError, match=r"of another machine \(cores 2, not 64\); profile this one: "):
            use({**MACHINE, "cores": 64})
    assert len(ProfileBase.open(path, MACHINE).samples) == 1


def test_no_room_on_the_disk_is_told_and_loses_nothing(path: Path) -> None:
    """A limit on the size of files stands for a full disk: writing fails half-way."""
    ProfileBase.add(path, MACHINE, [ONE])
    code = (
        "import resource, sys; from pathlib import Path; from dataclasses import replace\n"
        "from hybridflow.core.errors import ResourceError\n"
        "from hybridflow.planner.profile_base import ProfileBase, Sample\n"
        f"one, machine, path = {ONE!r}, {MACHINE!r}, Path({str(path)!r})\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))\n"
        "try: ProfileBase.add(path, machine, [replace(one, rows=4.0**n) for n in range(500)])\n"
        "except ResourceError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith(f"{path}: task profiles can't be used (") and done.stdout.count("\n") == 1
    assert ProfileBase.open(path, MACHINE).samples == [ONE]


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match="can't be used"):
        ProfileBase.add(tmp_path / "file" / "tasks.sqlite", MACHINE, [ONE])
    assert issubclass(UnknownTaskError, UserError)


def test_reading_a_base_needs_no_torch() -> None:
    code = "import sys; import hybridflow.planner.profile_base; print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert out.stdout == "False\n"
