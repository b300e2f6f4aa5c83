"""``hybridflow reshard``: who holds and sends what when a model goes from training to generation, without a model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from math import lcm, prod
from pathlib import Path
from typing import Any

from hybridflow.core.errors import ConfigError, ModelError
from hybridflow.core.placement import Mesh
from hybridflow.models.spec import DecoderSpec
from hybridflow.planner.sizes import find_model
from hybridflow.reshard.layout import Grouping, Place, groups
from hybridflow.reshard.plan import Account, Plan, Strategy, make_plan, model_size, table2
from hybridflow.telemetry.graph_tables import aligned, count, memory

__all__ = ["ITEMSIZES", "Request", "parse_meshes", "reshard"]

ITEMSIZES = {"float32": 4, "bfloat16": 2}
MOST_CELLS = 64
COLUMNS = ("training", "generation", "sent", "received", "in_place", "copied", "redundant", "peak")
PICTURE = (
    "What ranks hold while generating: █ training slice, read in place; ▒ received; □ training slice, kept beside; "
    "▓ held twice; · nothing."
)


@dataclass(frozen=True)
class Request:
    """``train`` p-t-d, ``generate`` p_g-t_g-d_g-d; ``model``: as of ``find_model``, or a run directory."""

    train: str
    generate: str
    strategy: Strategy
    model: str
    dtype: str
    generation_dtype: str | None = None


def reshard(request: Request, as_json: bool) -> None:
    """Print groups, bytes, peak and redundancy of every rank. ConfigError: the request makes no sense, a line says why."""
    mesh = parse_meshes(request.train, request.generate)
    itemsizes = ITEMSIZES[request.dtype], ITEMSIZES[request.generation_dtype or request.dtype]
    plan = make_plan(_spec(request.model), mesh, request.strategy, itemsizes=itemsizes)
    if as_json:
        print(json.dumps(_data(request, plan), indent=2))
    else:
        print("\n".join(_text(request, plan)))


def parse_meshes(train: str, generate: str) -> Mesh:
    """ "1-4-2", "1-2-2-2" -> Mesh(dp=2, tp=4, pp=1, generation_tp=2, generation_pp=1)."""
    (trained, *wrong), (generated, *more) = (
        _sizes("--train", train, "p-t-d", "1-4-2"),
        _sizes("--generate", generate, "p_g-t_g-d_g-d", "1-2-2-2"),
    )
    if problems := (*wrong, *more):
        raise ConfigError(problems)
    (p, t, d), (p_g, t_g, *replicas) = trained, generated
    if p * t % (p_g * t_g):
        raise ConfigError([f"--generate {generate}: p_g t_g = {p_g * t_g} doesn't divide p t = {p * t} of --train {train}"])
    if replicas != (expected := [p * t // (p_g * t_g), d]):
        raise ConfigError(
            [
                f"--generate {generate}: d_g-d = {replicas[0]}-{replicas[1]} and {p_g * t_g * prod(replicas)} ranks; "
                f"--train {train} has {p * t * d} ranks, d = {d} and d_g = p t / (p_g t_g) = {expected[0]}: "
                f"--generate {p_g}-{t_g}-{expected[0]}-{expected[1]}"
            ]
        )
    return Mesh(dp=d, tp=t, pp=p, generation_tp=t_g, generation_pp=p_g)


def _sizes(option: str, text: str, form: str, example: str) -> tuple[list[int], *tuple[str, ...]]:
    """The numbers, and what is wrong with the text."""
    parts = text.split("-")
    if len(parts) == form.count("-") + 1 and all(part.isascii() and part.isdigit() and int(part) for part in parts):
        return ([int(part) for part in parts],)
    return [], f"{option} {text}: expected {form}, {form.count('-') + 1} numbers above 0, for instance {example}"


def _spec(model: str) -> DecoderSpec:
    if (Path(model) / "config.toml").is_file():
        from hybridflow.commands.talk import model_folder

        model = model_folder(model)
    size = find_model(model)
    if size.experts > 1:
        raise ModelError(f"{model}: has experts, and no layout of theirs is known; name a dense model")
    return size.spec


def _grouping(plan: Plan) -> Grouping:
    return "vanilla" if plan.strategy in ("vanilla", "gather_all") else "hybridflow"


def _groups(plan: Plan) -> dict[str, list[list[int]]]:
    """Of generation on other devices, the ranks that these have."""
    found, shift = groups(plan.mesh, _grouping(plan)), min(plan.generation)
    if not shift:
        return found
    generation = groups(Mesh(plan.mesh.num_replicas, *plan.mesh.generation))
    there = {f"generate {kind}": generation[f"train {kind}"] for kind in ("tp", "pp")}
    moved = {kind: [[rank + shift for rank in group] for group in ranks] for kind, ranks in there.items()}
    return {kind: ranks for kind, ranks in found.items() if kind.startswith("train")} | moved


def _data(request: Request, plan: Plan) -> dict[str, Any]:
    """Sizes in bytes."""
    size = model_size(plan.spec, plan.mesh.tp, plan.mesh.pp)
    links = [{"source": a, "target": b, **asdict(size)} for (a, b), size in plan.links.items() if a != b]
    return {
        **asdict(request),
        "parameters": asdict(size),
        "nested": plan.mesh.nested,
        "groups": _groups(plan),
        "table2": {
            name: [float(part), float(part * size.cut * plan.itemsizes[1])] for name, part in _formulas(plan).items()
        },
        "ranks": [asdict(account) for account in plan.accounts],
        "links": links,
    }


def _formulas(plan: Plan) -> dict[str, Fraction]:
    if _unlike(plan):
        return {}
    return dict(zip(("received", "peak", "redundant"), table2(plan.strategy, plan.mesh), strict=True))


def _unlike(plan: Plan) -> str:
    """Why the formulas of table 2 don't hold."""
    if plan.itemsizes[0] != plan.itemsizes[1]:
        return "weights of another type share no memory with those that train"
    if plan.strategy == "hybridflow" and not plan.mesh.nested:
        return "t_g doesn't divide t or p_g doesn't divide p, so training slices are not parts of generation slices"
    return ""


def _text(request: Request, plan: Plan) -> Iterator[str]:
    size = model_size(plan.spec, plan.mesh.tp, plan.mesh.pp)
    dtypes = " -> ".join(dict.fromkeys((request.dtype, request.generation_dtype or request.dtype)))
    yield (
        f"{request.strategy}: train {request.train} (p-t-d), generate {request.generate} (p_g-t_g-d_g-d); "
        f"{request.model}, {count(size.total)} parameters, {dtypes}"
    )
    yield ""
    yield "Groups of ranks, counted from 0."
    yield from aligned([("group", "ranks"), *((kind, _listed(ranks)) for kind, ranks in _groups(plan).items())], ())
    yield ""
    if rows := _picture(plan):
        yield PICTURE
        yield from rows
        yield ""
    yield "Bytes of each rank."
    yield from aligned([*_table(plan)], ("rank", *(name.replace("_", " ") for name in COLUMNS)))
    yield ""
    yield from _against(plan)


def _listed(ranks: list[list[int]]) -> str:
    return " ".join(f"[{' '.join(map(str, group))}]" for group in ranks)


def _table(plan: Plan) -> Iterator[tuple[str, ...]]:
    yield ("rank", *(name.replace("_", " ") for name in COLUMNS), "from")
    sources: dict[int, list[int]] = {}
    for source, target in plan.links:
        if source != target:
            sources.setdefault(target, []).append(source)
    for account in plan.accounts:
        sizes = (memory(getattr(account, name).total) or "0" for name in COLUMNS)
        yield (str(account.rank), *sizes, _compact(sources.get(account.rank, [])))


def _compact(ranks: Sequence[int]) -> str:
    """[1, 2, 3, 7] -> "1-3 7"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return " ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _picture(plan: Plan) -> list[str]:
    """A line for each rank: tensor-parallel slices of the model, stage by stage; none if they are too many."""
    places = (*plan.training.values(), *plan.generation.values())
    stages, parts = lcm(*(place.stages for place in places)), lcm(*(place.size for place in places))
    if stages * parts > MOST_CELLS:
        return []
    lines = []
    for account in plan.accounts:
        own, block = (_cells(of.get(account.rank), stages, parts) for of in (plan.training, plan.generation))
        cells = [_cell(account, n in own, n in block) for n in range(stages * parts)]
        rows = ("".join(cells[n * parts : (n + 1) * parts]) for n in range(stages))
        lines.append(f"{account.rank:>4}  {'|'.join(rows)}")
    return lines


def _cells(place: Place | None, stages: int, parts: int) -> set[int]:
    if place is None:
        return set()
    rows, columns = stages // place.stages, parts // place.size
    return {
        row * parts + column
        for row in range(place.stage * rows, (place.stage + 1) * rows)
        for column in range(place.index * columns, (place.index + 1) * columns)
    }


def _cell(account: Account, own: bool, block: bool) -> str:
    if own and block:
        return "▓" if account.redundant.cut else "█"
    return "□" if own else "▒" if block else "·"


def _against(plan: Plan) -> Iterator[str]:
    """The paper's table 2 beside what was counted, of weights that are cut."""
    size = model_size(plan.spec, plan.mesh.tp, plan.mesh.pp)
    unit, formulas = size.cut * plan.itemsizes[1], _formulas(plan)
    if not formulas:
        yield f"No formula of the paper's table 2: {_unlike(plan)}."
        return
    yield f"Table 2 of the paper, in units of M = {memory(unit)} of weights that are cut. Apart are norms, key-value heads"
    yield f"and embeddings that several ranks of a model hold: {memory((size * plan.itemsizes[1]).replicated) or '0'}."
    accounts = [account for account in plan.accounts if account.rank in plan.generation]
    rows: list[tuple[str, ...]] = [("per rank", "formula", "least", "mean", "most")]
    for name, formula in formulas.items():
        found = [Fraction(getattr(account, name).cut, unit) for account in accounts]
        numbers = (min(found), sum(found) / len(found), max(found))
        rows.append((name, str(formula), *(f"{float(number):.4f}" for number in numbers)))
    yield from aligned(rows, ("formula", "least", "mean", "most"))
