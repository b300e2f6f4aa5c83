"""``hybridflow plan --cluster --what-if``: how the best mapping and its speed change with something."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from typing import Any

from hybridflow.commands.mapping import Problem, Request, load, problem_of
from hybridflow.commands.mapping_tables import told_cost, told_pools
from hybridflow.config import RunConfig
from hybridflow.core.config import keys
from hybridflow.core.errors import ConfigError
from hybridflow.planner.cluster import Cluster, parse_cluster
from hybridflow.planner.search import Result
from hybridflow.telemetry.graph_tables import aligned
from hybridflow.telemetry.records import to_json

__all__ = ["what_if"]

AXES = ("devices", "cluster", "model", "lengths", "schedule")


@dataclass(frozen=True)
class _Row:
    """``result``: or why there is none."""

    value: str
    problem: Problem
    result: Result | str

    @property
    def devices(self) -> int:
        return self.problem.request.cluster.devices

    def data(self) -> dict[str, Any]:
        shared = {"value": self.value, "devices": self.devices}
        if isinstance(self.result, str):
            return {**shared, "problem": self.result}
        best, speed = self.result.best, self.result.tokens_per_second
        pools = best.mapping.pools if best.mapping else ()
        placement = [{"devices": pool.devices, "roles": pool.roles} for pool in pools]
        return {**shared, "seconds": best.seconds, "tokens_per_second": speed, "pools": placement}


def what_if(request: Request, text: str, as_json: bool) -> None:
    """Print the best mapping for each value. ConfigError: a value makes no sense. Where nothing fits, the row says so."""
    name, values = _parsed(text)
    once = cache(load)  # of values that don't change what a step does
    problems = [problem_of(_changed(request, name, value), once) for value in values]
    rows = [_Row(value, problem, _result(problem)) for value, problem in zip(values, problems, strict=True)]
    if as_json:
        print(to_json([row.data() for row in rows], indent=2))
    else:
        print("\n".join([problem_of(request, once).headline, f"Only {name} changes.", "", *_text(name, rows)]))


def _parsed(text: str) -> tuple[str, list[str]]:
    name, _, listed = text.partition("=")
    values = [value.strip() for value in listed.split(",")]
    if not all(values):
        raise ConfigError([f"--what-if {text}: expected KEY=VALUE,VALUE,... like devices=8,16,32"])
    known = [*AXES, *(key for key, *_ in keys(RunConfig))]
    if name not in known:
        near = "".join(f"; did you mean {one}?" for one in get_close_matches(name, known, 1))
        raise ConfigError([f"--what-if {text}: expected {', '.join(AXES)}, or a key of the configuration{near}"])
    return name, values


def _changed(request: Request, name: str, value: str) -> Request:
    if name == "devices":
        return replace(request, cluster=_resized(request.cluster, value))
    if name == "cluster":
        return replace(request, cluster=parse_cluster(value))
    if name == "schedule" and value not in ("sync", "async"):
        raise ConfigError([f"--what-if schedule={value}: expected sync or async"])
    if name in AXES:
        changed: Any = {name: value}
        return replace(request, **changed)
    return replace(request, overrides=(*request.overrides, f"--{name}", value))


def _resized(cluster: Cluster, value: str) -> Cluster:
    """So many devices of the same machines, or of a part of one."""
    if len(cluster.machines) > 1:
        raise ConfigError([f"--what-if devices={value}: the cluster has several kinds of machines; vary cluster instead"])
    ((_, machine),) = cluster.machines
    devices = int(value) if value.isdecimal() else 0
    if devices < 1 or (devices > machine.devices and devices % machine.devices):
        raise ConfigError(
            [f"--what-if devices={value}: expected 1 to {machine.devices}, which a machine has, or a multiple of that"]
        )
    number = max(1, devices // machine.devices)
    return Cluster(((number, replace(machine, devices=devices // number)),))


def _result(problem: Problem) -> Result | str:
    try:
        return problem.solved()[1]
    except ConfigError as error:
        return error.problems[0]


def _text(name: str, rows: Sequence[_Row]) -> Iterator[str]:
    yield from aligned([*_table(name, rows)], ["devices", *COLUMNS, EFFICIENCY, COST])
    for row in rows:
        if isinstance(row.result, str):
            yield f"{name}={row.value}: {row.result}"


COLUMNS = ("seconds a step", "tokens/s", "a device", "speed-up")
EFFICIENCY, COST = "efficiency", "a million tokens"


def _table(name: str, rows: Sequence[_Row]) -> Iterator[tuple[str, ...]]:
    """Speed-up over the first row that fits; efficiency: that speed-up for each of so many times the devices."""
    first = next((row for row in rows if isinstance(row.result, Result)), rows[0])
    priced = any(isinstance(row.result, Result) and told_cost(row.result) for row in rows)
    columns = (*COLUMNS, *[EFFICIENCY] * (name == "devices"), *[COST] * priced)
    yield (*dict.fromkeys((name, "devices")), *columns, "placement", "on")
    for row in rows:
        told = (row.value,) if name == "devices" else (row.value, str(row.devices))
        if isinstance(row.result, str) or isinstance(first.result, str):
            yield (*told, *[""] * len(columns), "nothing fits", "")
            continue
        speed = row.result.tokens_per_second
        faster = speed / first.result.tokens_per_second
        numbers = {
            "seconds a step": f"{row.result.best.seconds:.4g}",
            "tokens/s": f"{speed:,.0f}",
            "a device": f"{speed / row.devices:,.0f}",
            "speed-up": f"{faster:.2f}",
            EFFICIENCY: f"{faster * first.devices / row.devices:.0%}",
            COST: told_cost(row.result),
        }
        yield (*told, *(numbers[column] for column in columns), *told_pools(row.result.best))
