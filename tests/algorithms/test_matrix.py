"""Every policy-gradient method with every policy loss, aggregation and KL: it trains, or it is refused with a reason.

``python tests/algorithms/test_matrix.py`` prints docs/combinations.md, which is checked here.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from conftest import save

from hybridflow.algorithms import ALGORITHMS
from hybridflow.algorithms.policy_gradient import PolicyGradient
from hybridflow.build import make_algorithm, make_objective
from hybridflow.build_text import TextParts
from hybridflow.config import RunConfig, validate
from hybridflow.controller.local_runtime import LocalRuntime
from hybridflow.core.config import parse
from hybridflow.core.errors import ConfigError
from hybridflow.core.roles import Role
from hybridflow.workers.estimator import EstimatorWorker

Keys = Mapping[str, Any]

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "combinations.md"
METHODS = {name: method for name, method in ALGORITHMS.items() if issubclass(method.algorithm, PolicyGradient)}
KINDS = ("ppo_clip", "gspo", "cispo", "reinforce")
AGGREGATIONS = (None, "token_mean", "sequence_mean", "constant")
KL_MODES: dict[str, Keys] = {
    "none": {},
    "method's own": {"coef": 0.1},
    **{
        f"{where} {kind}": {"coef": 0.1, "where": where, "kind": kind}
        for where in ("reward", "loss")
        for kind in ("k1", "k2", "k3")
    },
    **{f"{where} adaptive": {"coef": 0.1, "where": where, "target": 0.01, "horizon": 8} for where in ("reward", "loss")},
}
BASE: dict[str, Any] = {
    "run_dir": "unused",
    "threads": 1,
    "actor": {"fresh": {"hidden_size": 16, "num_layers": 1, "num_heads": 2}, "optimizer": {"lr": 1e-2}},
    "data": {"task": "reverse", "options": {"length": 2}},
    "generation": {"max_new_tokens": 3},
    "train": {"prompts_per_step": 2, "group_size": 2},
}
SCORES = """
def varied(response): return sum(ord(c) * 7**i for i, c in enumerate(response)) % 11 / 10
def cost(response): return len(set(response)) / 2
"""


class Cell(NamedTuple):
    algorithm: str
    kind: str
    aggregation: str | None
    kl: str

    def keys(self) -> dict[str, Any]:
        loss = {"kind": self.kind} | ({"aggregation": self.aggregation} if self.aggregation else {})
        return {"algorithm": self.algorithm, "loss": loss, "kl": KL_MODES[self.kl]}


CELLS = [Cell(*cell) for cell in itertools.product(METHODS, KINDS, AGGREGATIONS, KL_MODES)]


def configured(keys: Keys) -> RunConfig:
    teacher = {"teacher": {"model": "there"}} if keys["algorithm"] == "distill" else {}
    return validate({**BASE, **teacher, **keys}, "matrix")


@cache
def refusal(cell: Cell) -> str | None:
    """Why the configuration is refused, None if it isn't."""
    try:
        configured(cell.keys())
    except ConfigError as error:
        return str(error)
    return None


@pytest.fixture(scope="module")
def laboratory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Keys], dict[str, float]]]:
    """Trains one step from the same weights, on roles that are built once: keys -> metrics."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("matrix")
    (folder / "scores.py").write_text(SCORES)
    reward, cost = ({"functions": [f"{folder / 'scores.py'}:{name}"]} for name in ("varied", "cost"))
    sections = {"algorithm": "ppo", "kl": {"coef": 0.1}, "reward": reward, "cost": cost, "safe_rlhf": {"ptx_coef": 0.1}}
    sections["teacher"] = {"model": str(folder / "teacher")}
    config = parse(RunConfig, {**BASE, **sections}, "matrix")
    assert config.data is not None
    runtime = LocalRuntime()
    parts = TextParts(config, config.data, runtime)
    parts.export(folder / "teacher")
    made = {name: make() for name, make in parts.makers().items()}
    made["estimator"] = runtime.role(Role("estimator", EstimatorWorker))
    learners = {"actor": made["actor"].learner, "critic": made["critic"], "cost_critic": made["cost_critic"]}
    with torch.no_grad():  # away from the reference and the teacher, so that no KL is zero
        made["actor"].learner.export(
            lambda policy: [p.add_(0.1 * torch.sin(torch.arange(p.numel())).view_as(p)) for p in policy.parameters()]
        )
    start = {name: save(learner, folder / "saved" / name) for name, learner in learners.items()}
    weights = {name: array.copy() for name, array in learners["actor"].weights(0).arrays.items()}
    source = parts.source(1)

    def train(keys: Keys) -> dict[str, float]:
        config = configured(keys)
        for name, learner in learners.items():
            learner.load(*start[name])
        scorers = made["scorers"] if config.needs_reference else made["scorers"][:1]
        own = {"scorers": scorers, "objective": make_objective(config)}
        algorithm = make_algorithm(config, {name: lambda part=part: part for name, part in {**made, **own}.items()})
        runtime.drain()
        algorithm.learn(algorithm.rollout(source))
        metrics = runtime.drain().metrics.values()
        algorithm.observe(metrics)
        moved = [np.abs(array - weights[name]).max() for name, array in learners["actor"].weights(0).arrays.items()]
        return {**metrics, **algorithm.metrics(), "moved": float(max(moved))}

    yield train
    runtime.stop()


@pytest.mark.parametrize("algorithm", METHODS)
def test_every_combination_trains_or_is_refused(algorithm: str, laboratory: Callable[[Keys], dict[str, float]]) -> None:
    cells = [cell for cell in CELLS if cell.algorithm == algorithm]
    outcomes = {cell: refusal(cell) for cell in cells}
    assert len(set(outcomes.values())) > 1
    for cell, reason in outcomes.items():
        if reason is not None:
            of_loss = cell.kind == "gspo" and cell.aggregation in ("token_mean", "constant")
            keys = ("loss: kind", "aggregation") if of_loss else ("kl.kind", "kl.where")
            assert all(key in reason for key in keys) and reason.startswith("matrix: "), (cell, reason)
            continue
        metrics = laboratory(cell.keys())
        assert metrics["moved"] > 1e-3, cell
        assert all(torch.isfinite(torch.tensor(list(metrics.values())))), cell
        assert ("actor/kl" in metrics) == (KL_MODES[cell.kl] != {} and objective_of(cell).kl_where == "loss"), cell
        assert ("kl_coef" in metrics) == cell.kl.endswith("adaptive")
        assert metrics.get("kl_coef") != 0.1, cell


def objective_of(cell: Cell) -> Any:
    return make_objective(configured(cell.keys()))


VARIANTS: dict[str, Keys] = {
    "Dr. GRPO": {"algorithm": "grpo", "grpo": {"scale": "none"}, "loss": {"aggregation": "constant"}},
    "REINFORCE++-baseline": {"algorithm": "reinforce_pp", "reinforce_pp": {"group_baseline": True}},
    "PPO without value clipping": {"algorithm": "ppo", "ppo": {"value_clip": 0}},
    "Safe RLHF with demonstrations": {"algorithm": "safe_rlhf", "safe_rlhf": {"ptx_coef": 0.5}},
    "distillation of whole responses": {"algorithm": "distill", "distill": {"gamma": 1.0}},
    "overlong penalty": {"algorithm": "grpo", "shaping": {"overlong_buffer": 2, "overlong_penalty": 0.5}},
    **{f"{how} scores": {"algorithm": "remax", "shaping": {"normalise": how}} for how in ("batch", "running")},
    "overlong penalty and greedy responses": {"algorithm": "remax", "shaping": {"overlong_buffer": 2}},
    **{
        f"{name} {kind} {correction}": {"algorithm": name, "loss": {"kind": kind, "correction": correction}}
        for name in METHODS
        for kind, correction in itertools.product(KINDS, ("truncate", "mask"))
    },
    "demonstrations and correction": {
        "algorithm": "safe_rlhf",
        "safe_rlhf": {"ptx_coef": 0.5},
        "loss": {"correction": "truncate", "kind": "gspo"},
        "kl": {"coef": 0.1, "where": "loss"},
    },
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_train(name: str, laboratory: Callable[[Keys], dict[str, float]]) -> None:
    metrics = laboratory(VARIANTS[name])
    assert metrics["moved"] > 1e-3
    assert all(torch.isfinite(torch.tensor(list(metrics.values()))))
    assert metrics["actor/mismatch_max"] < 1e-4 and metrics["actor/effective_samples"] == pytest.approx(1, abs=1e-6)
    corrected = VARIANTS[name].get("loss", {}).get("correction")
    assert ("actor/weight" in metrics) == bool(corrected)
    assert metrics.get("actor/weight", 1) == pytest.approx(1, abs=1e-4)


# --- what the paper says about length ---


def program(algorithm: type[Any]) -> list[str]:
    """The lines of rollout and learn, without the last ``return batch``."""
    bodies = []
    for name in ("rollout", "learn"):
        (function,) = ast.parse(textwrap.dedent(inspect.getsource(getattr(algorithm, name)))).body
        assert isinstance(function, ast.FunctionDef)
        bodies += [line for statement in function.body for line in ast.unparse(statement).splitlines()]
    return [line for line in bodies if line != "return batch"]


def test_methods_are_as_long_as_in_the_paper() -> None:
    """PPO is 8 lines, Safe RLHF adds at most 5, ReMax one more generation, and it has no critic."""
    lines = {name: program(method.algorithm) for name, method in METHODS.items()}
    assert len(lines["ppo"]) <= 8
    assert 0 < len(lines["safe_rlhf"]) - len(lines["ppo"]) <= 5
    generations = {name: "\n".join(body).count("actor.rollout") for name, body in lines.items()}
    assert generations == {**dict.fromkeys(METHODS, 1), "remax": 2}
    assert "critic" not in inspect.signature(METHODS["remax"].algorithm).parameters
    [told] = re.findall(r"PPO\s+is\s+(\d+)\s+lines,\s+Safe\s+RLHF\s+adds\s+(\d+)", (ROOT / "README.md").read_text())
    assert [int(number) for number in told] == [len(lines["ppo"]), len(lines["safe_rlhf"]) - len(lines["ppo"])]


# --- the page ---


def page() -> str:
    """docs/combinations.md"""
    return "\n".join([HEAD, *roles_table(), KL_HEAD, *kl_table(), LOSS_HEAD, *loss_table(), ""])


HEAD = """# Policy-gradient methods

Printed by `python tests/algorithms/test_matrix.py`; a test trains one step of every combination. What each method computes
is in [algorithms.md](algorithms.md).

## What a method needs
"""
KL_HEAD = """
## Method and KL

`[kl]` with `where` and `kind`; "adaptive" with `target`. × is refused: in the loss, the expected gradient of k1 is zero.
"""
LOSS_HEAD = """
## Method, loss and aggregation

`[loss]` with `kind` and `aggregation`, with every KL that the method trains with. × is refused: GSPO is per response.
"""


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def table(*header: str) -> list[str]:
    return [row(*header), "|" + "---|" * len(header)]


def roles_table() -> Iterator[str]:
    yield from table("method", "models and scorers", "smallest group", "the KL, if there is one")
    for name, method in METHODS.items():
        known = ("actor", "critic", "cost_critic", "cost", "teacher", "baseline")
        roles = [role for role in known if role in inspect.signature(method.algorithm).parameters]
        yield row(
            name,
            ", ".join(roles),
            str(method.algorithm.smallest_group(method.config())),
            f"in the {method.algorithm.kl_where}",
        )


def trains(**fixed: str | None) -> str:
    cells = [cell for cell in CELLS if all(getattr(cell, name) == value for name, value in fixed.items())]
    return "✓" if any(refusal(cell) is None for cell in cells) else "×"


def kl_table() -> Iterator[str]:
    yield from table("method", *KL_MODES)
    for name in METHODS:
        yield row(name, *(trains(algorithm=name, kl=kl) for kl in KL_MODES))


def loss_table() -> Iterator[str]:
    yield from table("method", "loss", *(aggregation or "left out" for aggregation in AGGREGATIONS))
    for name, kind in itertools.product(METHODS, KINDS):
        yield row(name, kind, *(trains(algorithm=name, kind=kind, aggregation=how) for how in AGGREGATIONS))


def test_the_page_is_up_to_date_and_says_all() -> None:
    assert PAGE.read_text() == page()
    for cell in CELLS:  # a combination trains if its loss and its KL do
        separately = {
            trains(algorithm=cell.algorithm, kind=cell.kind, aggregation=cell.aggregation),
            trains(algorithm=cell.algorithm, kl=cell.kl),
        }
        assert (refusal(cell) is None) == (separately == {"✓"}), cell


if __name__ == "__main__":
    print(page(), end="")
