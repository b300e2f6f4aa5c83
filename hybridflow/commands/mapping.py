"""``hybridflow plan --cluster``: which roles should share which devices, how each is cut, and how fast that is."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from hybridflow.build_mapping import mapping_of, task_graph, written
from hybridflow.build_profile import base_if_any, profiled, with_own_seconds
from hybridflow.build_stream import recorded_lengths, recorded_prompt
from hybridflow.commands.mapping_tables import Picked, data, headline, lanes, tables, verdict
from hybridflow.config import RunConfig, load_config
from hybridflow.core.errors import ConfigError, UserError
from hybridflow.core.files import write_whole
from hybridflow.planner.baselines import baselines
from hybridflow.planner.calibrate import efficiency_of
from hybridflow.planner.cluster import HERE, Cluster
from hybridflow.planner.cost import CostModel
from hybridflow.planner.graph import TaskGraph
from hybridflow.planner.lengths import Lengths
from hybridflow.planner.mapping import Schedule
from hybridflow.planner.profile_base import ProfileBase
from hybridflow.planner.search import Objective, Result, pool_seconds, search, step_seconds
from hybridflow.planner.simulate import simulate
from hybridflow.planner.sizes import find_model
from hybridflow.telemetry.gantt import gantt_page
from hybridflow.telemetry.graph_tables import aligned
from hybridflow.telemetry.records import to_json
from hybridflow.telemetry.timeline import Timeline

__all__ = ["Files", "Problem", "Request", "load", "plan_mapping", "problem_of"]

Load = Callable[[Path, tuple[str, ...]], tuple[RunConfig, TaskGraph]]

STEPS, SHOWN = 12, 3
"""that are simulated, and of which picture and timeline have the first"""


@dataclass(frozen=True)
class Request:
    """What to plan for. ``model``: of every role that has one; ``lengths``: of all rows, see ``LENGTHS``. None: as the
    configuration says."""

    source: Path
    overrides: tuple[str, ...]
    cluster: Cluster
    model: str | None = None
    lengths: str | None = None
    schedule: Schedule = "sync"
    objective: Objective = "throughput"


@dataclass(frozen=True)
class Files:
    """What to write, and where."""

    picture: Path | None = None
    timeline: Path | None = None
    write: Path | None = None


class Problem(NamedTuple):
    """What the search is asked."""

    request: Request
    config: RunConfig
    graph: TaskGraph
    lengths: Lengths | None = None
    """of responses, as a run recorded them"""

    def solved(self) -> tuple[CostModel, Result]:
        """ConfigError: nothing fits."""
        cost, request = CostModel(self.graph, efficiency_of(self.request.cluster)), self.request
        return cost, search(self.graph, request.cluster, cost, schedule=request.schedule, objective=request.objective)

    @property
    def headline(self) -> str:
        return headline(self.config.algorithm, self.graph, self.request.cluster)


def load(source: Path, overrides: tuple[str, ...]) -> tuple[RunConfig, TaskGraph]:
    """A configuration and what it does in a step."""
    config = load_config(source, overrides)
    return config, task_graph(config)


def problem_of(request: Request, load: Load = load) -> Problem:
    """ConfigError: something of the request makes no sense."""
    given = None if request.lengths is None else _lengths(request.lengths)
    size = None if request.model is None else find_model(request.model)
    config, graph = load(request.source, request.overrides)
    if size is not None:
        graph = graph.with_model(size)
    lengths = None
    if given is not None:
        prompt, lengths = given
        most = lengths.longest or float(config.generation.max_new_tokens)
        longest = most if lengths.deviation and most > lengths.mean else 0.0
        graph = graph.with_lengths(prompt, lengths.mean, lengths.deviation, longest)
    if base := _profiles(request):
        graph = with_own_seconds(graph, profiled(config, graph, base, {}, 1))
    return Problem(request, config, graph, lengths if lengths and lengths.recorded else None)


def _profiles(request: Request) -> ProfileBase | None:
    """Of this machine, if that is what is planned for."""
    here = all(machine.device.name == HERE for _, machine in request.cluster.machines)
    return base_if_any() if here else None


LENGTHS = (
    "PROMPT+RESPONSE in tokens, like 1024+512, or 1024+512~200 if responses vary by that standard deviation, "
    "or the directory of a run that drew some"
)


def _lengths(text: str) -> tuple[float, Lengths]:
    """ "1024+512~200" -> mean tokens of prompts, and of responses 512, deviating by 200; or those of a run."""
    if Path(text).is_dir():
        return recorded_prompt(Path(text)), recorded_lengths(Path(text))
    number = r"(\d+(?:\.\d+)?)"
    found = re.fullmatch(rf"{number}\+{number}(?:~{number})?", text)
    if not found:
        raise ConfigError([f"lengths {text!r}: expected {LENGTHS}"])
    prompt, response, deviation = (float(part or 0) for part in found.groups())
    if prompt < 1 or response < 1:
        raise ConfigError(
            [f"lengths {text!r}: {'prompts' if prompt < 1 else 'responses'} without a token; expected 1+1 or more"]
        )
    return prompt, Lengths(response, deviation)


def plan_mapping(request: Request, files: Files, as_json: bool) -> None:
    """Print the best mapping, the next best and why they lose; write what ``files`` names."""
    problem = problem_of(request)
    cost, result = problem.solved()
    mapping = result.best.mapping
    assert mapping is not None, "or search has raised"
    estimates = cost.estimates(mapping)
    drawn = any(role.weights_of for role in problem.graph.roles)
    systems = baselines(problem.graph, request.cluster, cost) if drawn else {}
    simulation = simulate(problem.graph, mapping, estimates, STEPS, lengths=problem.lengths)
    picked = Picked(problem.graph, cost, result, mapping, estimates, simulation, systems)
    told = [*_write(problem, picked, files)]
    if as_json:
        print(to_json(data(picked), indent=2))
    else:
        print("\n".join([*_text(problem, picked), *told]))


def _text(problem: Problem, picked: Picked) -> Iterator[str]:
    yield problem.headline
    yield from verdict(picked)
    yield from _as_it_stands(problem, picked)
    for told in tables(picked):
        yield ""
        yield f"{told.title}. {told.note}"
        yield from aligned(told.rows, told.right)
    yield from _as_profiled(problem, picked)


def _as_profiled(problem: Problem, picked: Picked) -> Iterator[str]:
    """What was measured of these tasks here, where they are not cut."""
    base, models = _profiles(problem.request), {role.name for role in problem.graph.roles}
    if base is None or problem.request.model is not None:
        return
    strategies = picked.mapping.strategies
    whole = {name: one.dp for name, one in strategies.items() if one.pp == one.tp == 1}
    threads = max(1, base.cores // sum(pool.devices for pool in picked.mapping.pools))
    known = profiled(problem.config, problem.graph, base, whole, threads)
    tasks = [task for task in problem.graph.tasks if task.name in known and (task.role in whole or task.role not in models)]
    if not tasks:
        return
    yield ""
    yield "Profiled. Seconds by what was measured here, nine of ten within. The plan is by the cost model, but for"
    yield "tasks without a model, which have these seconds there."
    header = ("task", "cost model", "profiled", "within")
    rows = [header]
    for task in tasks:
        model = f"{picked.estimates[task.name].seconds:.3g}" if task.role in models else ""
        low, high = (task.times * end for end in known[task.name].interval)
        rows.append((task.name, model, f"{task.times * known[task.name].seconds:.3g}", f"{low:.3g} - {high:.3g}"))
    yield from aligned(rows, right=header[1:])


def _as_it_stands(problem: Problem, picked: Picked) -> Iterator[str]:
    """How fast the configuration's own placement is, if it has one."""
    request = problem.request
    if problem.config.runtime.kind != "ray":
        return
    try:
        mapping = mapping_of(problem.config, request.cluster, problem.graph)
        pools = pool_seconds(problem.graph, mapping, picked.cost.estimates(mapping))
    except ConfigError as error:
        yield f"The placement of {request.source.name} can't be compared: {error.problems[0]}."
        return
    devices = sum(pool.devices for pool in mapping.pools)
    seconds = step_seconds(pools, mapping.schedule)
    yield f"The placement of {request.source.name}: {seconds:.4g} s a step on {devices} devices."


def _write(problem: Problem, picked: Picked, files: Files) -> Iterator[str]:
    """What was written where."""
    if any((files.picture, files.timeline, files.write)):
        yield ""
    if files.write is not None:
        text = written(problem.request.source, picked.mapping, problem.request.overrides)
        _save(files.write, lambda path: write_whole(path, text.encode()))
        command = shlex.join(["hybridflow", "train", str(files.write), *problem.request.overrides])
        yield f"configuration: {files.write}; to run it: {command}"
    if files.picture is not None:
        page = _page(problem, picked)
        _save(files.picture, lambda path: write_whole(path, page.encode()))
        yield f"picture: {files.picture}"
    if files.timeline is not None:
        _save(files.timeline, lambda path: _timeline(path, picked))
        yield f"timeline: {files.timeline}, for ui.perfetto.dev, like timeline.json of a run"


def _save(path: Path, write: Callable[[Path], object]) -> None:
    if path.is_dir():
        raise UserError(f"plan: can't write {path} (it is a folder); choose another output file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path)
    except OSError as error:
        raise UserError(f"plan: can't write {path} ({error.strerror}); choose another output file") from None


def _page(problem: Problem, picked: Picked) -> str:
    told = {told.title: (told.note, told.rows) for told in tables(picked)}
    said = " ".join([problem.headline, *verdict(picked)])
    return gantt_page("Device mapping", said, [*lanes(picked)], picked.simulation.steps[:SHOWN], told)


def _timeline(path: Path, picked: Picked) -> None:
    path.unlink(missing_ok=True)
    with Timeline(path, process="simulation") as timeline:
        for step, spans in enumerate(picked.simulation.steps[:SHOWN], 1):
            timeline.add(step, spans)
