from pathlib import Path

import numpy as np
import pytest

from hybridflow.controller.local_runtime import LocalRuntime
from hybridflow.controller.protocols import ONE_TO_ALL
from hybridflow.core.batch import Batch
from hybridflow.core.errors import ContractError
from hybridflow.core.roles import Role, WorkerContext, control, remote


class Doubler:
    def __init__(self, context: WorkerContext, *, fault: str = "") -> None:
        self.context, self.fault, self.seen = context, fault, ()
        self.total = 0.0

    @remote(ONE_TO_ALL, reads=("scores",), writes=("greedy_scores",), kind="reward")
    def double(self, batch: Batch, /) -> Batch:
        self.seen = tuple(batch.columns)
        self.context.metrics.add("mean", float(batch["scores"].sum()), len(batch))
        doubled = batch["scores"] * np.float32(2)
        if self.fault == "write":
            batch["scores"][0] = 9
        if self.fault == "rows":
            return Batch({"greedy_scores": doubled[:1]})
        if self.fault == "extra":
            return Batch({"greedy_scores": doubled, "scores": doubled})
        return Batch({"greedy_scores": doubled})

    @remote(ONE_TO_ALL, writes=("sample_id",), rows="new")
    def collect(self, batch: Batch, /) -> Batch:
        return Batch({"sample_id": np.arange(5)})

    @control
    def names(self) -> list[str]:
        return ["a"]

    @control
    def state_dict(self) -> dict:
        return {"total": self.total}

    @control
    def load_state_dict(self, state: dict) -> None:
        self.total = state["total"]


def batch() -> Batch:
    return Batch({"scores": np.array([1, 2], np.float32), "terminated": np.array([True, False])}).freeze()


def test_a_verb_sees_what_it_reads_and_adds_what_it_writes() -> None:
    runtime = LocalRuntime()
    worker = runtime.role(Role("twice", Doubler))
    out = worker.double(batch())
    assert out["greedy_scores"].tolist() == [2.0, 4.0]
    assert set(out.columns) == {"scores", "terminated", "greedy_scores"}
    assert runtime._workers["twice"].seen == ("scores",)


def test_new_rows_replace_the_batch_and_control_passes_through() -> None:
    worker = LocalRuntime().role(Role("twice", Doubler))
    assert len(worker.collect(batch())) == 5
    assert worker.names() == ["a"]
    with pytest.raises(AttributeError, match="role 'twice' has no verb 'tripple'"):
        worker.tripple  # type: ignore[attr-defined] # noqa: B018


def test_renamed_columns() -> None:
    worker = LocalRuntime().role(Role("twice", Doubler, rename={"greedy_scores": "scores"}))
    assert worker.double(batch())["scores"].tolist() == [2.0, 4.0]


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        ("write", ValueError, "read-only"),
        ("rows", ContractError, "1 rows, expected 2"),
        ("extra", ContractError, r"twice.double wrote \['greedy_scores', 'scores'\]"),
    ],
)
def test_a_worker_that_breaks_the_contract_is_stopped(fault: str, error: type[Exception], message: str) -> None:
    worker = LocalRuntime().role(Role("twice", Doubler, {"fault": fault}))
    with pytest.raises(error, match=message):
        worker.double(batch())


def test_a_missing_column_names_role_and_verb() -> None:
    worker = LocalRuntime().role(Role("twice", Doubler))
    with pytest.raises(ContractError, match=r"twice\.double reads scores; the batch has terminated"):
        worker.double(batch().select(["terminated"]))


def test_outputs_are_read_only() -> None:
    out = LocalRuntime().role(Role("twice", Doubler)).double(batch())
    with pytest.raises(ValueError, match="read-only"):
        out["greedy_scores"][0] = 1


def test_drain_gives_metrics_and_spans_once() -> None:
    runtime = LocalRuntime()
    worker = runtime.role(Role("twice", Doubler))
    worker.double(batch())
    metrics, spans = runtime.drain()
    assert metrics.values() == {"twice/mean": 1.5}
    assert [(span.name, span.kind) for span in spans] == [("twice.double", "reward")]
    assert runtime.drain().metrics.values() == {}


def test_state_of_workers_by_role(tmp_path: Path) -> None:
    runtime = LocalRuntime()
    worker = runtime.role(Role("twice", Doubler))
    runtime.load(tmp_path, {"twice": {"total": 4.0}}, {})
    assert runtime.save(tmp_path) == {"twice": {"total": 4.0}} and runtime.saved(False) == {}
    assert worker.state_dict() == {"total": 4.0}
    with pytest.raises(ContractError, match="two roles are called 'twice'"):
        runtime.role(Role("twice", Doubler))
