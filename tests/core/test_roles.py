import pickle

import numpy as np

from hybridflow.controller.protocols import THREE_D
from hybridflow.core.batch import Batch, Ragged
from hybridflow.core.roles import Role, chain, columns, remote, verb_of


@columns(reads=("rewards",), writes=("returns",), min_group=2)
def double(batch: Batch, factor: float = 2.0) -> dict:
    """Doubles."""
    return {"returns": batch.ragged("rewards").like(batch.ragged("rewards").values * np.float32(factor))}


@columns(reads=("returns", "values"), writes=("advantages",))
def minus(batch: Batch) -> dict:
    return {"advantages": batch.ragged("returns").like(batch.ragged("returns").values - batch.ragged("values").values)}


@columns(reads=lambda p: ("log_probs", "ref_log_probs") if p["coef"] else ("log_probs",), per=lambda p: p["per"])
def loss(outputs: dict, columns: dict, coef: float = 0.0, per: str = "step") -> None: ...


class Worker:
    @remote(THREE_D, reads=lambda args: args["inputs"], writes=("values",))
    def compute(self, batch: Batch, fn: object = None, /) -> Batch:
        return batch


def test_declared_columns_depend_on_parameters() -> None:
    assert loss.bind().reads == ("log_probs",)
    assert loss.bind(coef=0.1).reads == ("log_probs", "ref_log_probs")
    assert loss.bind(per="row").per == "row"


def test_chain_reads_only_what_it_does_not_write_itself() -> None:
    fn = chain(double.bind(factor=3.0), minus.bind())
    assert (fn.reads, fn.writes, fn.min_group) == (("rewards", "values"), ("returns", "advantages"), 2)
    one = Ragged.from_rows([[1, 2]], np.float32)
    out = fn(Batch({"rewards": one, "values": one}))
    assert out["advantages"].values.tolist() == [2.0, 4.0]
    assert set(out) == {"returns", "advantages"}


def test_functions_pickle_by_name() -> None:
    fn = pickle.loads(pickle.dumps(chain(double.bind(factor=3.0), minus.bind())))
    assert fn.params["functions"][0].declared is double
    assert fn.reads == ("rewards", "values")


def test_columns_of_a_call_add_those_of_functions() -> None:
    role = Role("critic", Worker, {"inputs": ("tokens",)})
    verb = verb_of(Worker.compute)
    assert verb is not None
    assert role.columns_of(verb, (double.bind(),)) == (("tokens", "rewards"), ("values", "returns"))
