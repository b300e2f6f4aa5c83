"""Which cores a worker runs on."""

import os
import threading
from pathlib import Path

import pytest

from hybridflow.controller.cores import Share, cores_of, node_cores, stay

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="threads can't be bound to cores here")

TWO = [{0, 1, 2, 3}, {4, 5, 6, 7}]


@pytest.mark.parametrize(
    ("workers", "nodes"), [(1, [None]), (2, [0, 1]), (3, [0, 0, 1]), (4, [0, 0, 1, 1]), (8, [0, 0, 0, 0, 1, 1, 1, 1])]
)
def test_workers_stay_on_one_node_each_if_there_are_enough(workers: int, nodes: list[int | None]) -> None:
    found = [cores_of(Share(number, workers), TWO) for number in range(workers)]
    assert found == [None if node is None else TWO[node] for node in nodes]


def test_one_node_binds_nobody() -> None:
    assert [cores_of(Share(number, 4), TWO[:1]) for number in range(4)] == [None] * 4


def test_nodes_as_the_kernel_lists_them(tmp_path: Path) -> None:
    mine = sorted(os.sched_getaffinity(0))
    lists = {"node0": f"{mine[0]}\n", "node2": f"0-{mine[-1]}\n", "node10": "100000-100003,100008\n", "node3": "\n"}
    for name, text in lists.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "cpulist").write_text(text)
    assert node_cores(tmp_path) == [{mine[0]}, set(mine)]  # those that this process may not use don't count
    assert node_cores(tmp_path / "nothing") == []


def test_threads_that_start_later_stay_too(monkeypatch: pytest.MonkeyPatch) -> None:
    core = min(os.sched_getaffinity(0))
    seen: list[set[int]] = []

    def bound() -> None:
        stay(Share(1, 2))
        later = threading.Thread(target=lambda: seen.append(set(os.sched_getaffinity(0))))
        later.start()
        later.join()

    monkeypatch.setattr("hybridflow.controller.cores.node_cores", lambda: [{core + 1}, {core}])
    thread = threading.Thread(target=bound)  # so that the test's own thread stays free
    thread.start()
    thread.join()
    assert seen == [{core}]
