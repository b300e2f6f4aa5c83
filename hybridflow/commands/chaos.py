"""``hybridflow chaos``: train as a TOML file says, once in peace and once under faults, and compare what came out."""

from __future__ import annotations

import difflib
import json
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from hybridflow.chaos.disk import Disk, SmallDisk
from hybridflow.chaos.kinds import KINDS
from hybridflow.chaos.nodes import Nodes
from hybridflow.chaos.processes import Processes, kill_all
from hybridflow.chaos.schedule import SPARE_STEPS, schedule
from hybridflow.chaos.training import Training, newest_step
from hybridflow.chaos.trial import Befallen, Trial
from hybridflow.chaos.verdict import differences
from hybridflow.commands.ledger import Balance, balance
from hybridflow.config import RunConfig, load_config
from hybridflow.core.errors import UserError, WorkerError
from hybridflow.rollout.reward_service import is_url
from hybridflow.telemetry.graph_tables import aligned
from hybridflow.telemetry.records import read_records
from hybridflow.telemetry.rundir import RunDirectory

__all__ = ["Request", "chaos", "planned"]

LONGEST_S = 900.0
"""of the run in peace"""
PATIENCE_S = 10.0
POLL_S = 0.05
SPARE_BYTES = 1 << 26


@dataclass(frozen=True)
class Request:
    """What was asked for. ``kinds``: () for all that can befall the run; ``faults``: 0 for one of each kind. ``nodes``: Ray
    nodes to start on this machine; 0: the run starts its Ray itself."""

    config: Path
    overrides: Sequence[str]
    seed: int
    faults: int
    kinds: Sequence[str]
    nodes: int
    out: Path | None


@dataclass(frozen=True)
class Outcome:
    """Of a run under faults. ``differences`` from the run without; None: not compared, results depend on who is first."""

    faults: Sequence[Befallen]
    left: Sequence[str]
    differences: Sequence[str] | None
    balance: Balance

    @property
    def good(self) -> bool:
        whole = not self.balance.problems and not self.differences and not self.left
        return whole and not any(fault.problem for fault in self.faults)


def chaos(request: Request, as_json: bool) -> int:
    """Print a table of faults and the verdict. The exit code: 1 if anything was lost, made twice, unequal or not gone on
    from."""
    config = load_config(request.config, request.overrides)
    kinds = planned(request, config)
    folder = request.out or Path(f"{config.run_dir}-chaos")
    if folder.exists():
        raise UserError(f"chaos: {folder} is there already; remove it, or give another folder with --out")
    folder.mkdir(parents=True)
    step_s = _in_peace(request, config, folder / "clean")
    outcome = _under_faults(request, config, folder, kinds, step_s)
    print(json.dumps(_data(outcome), indent=2) if as_json else "\n".join(_table(outcome)))
    return 0 if outcome.good else 1


def planned(request: Request, config: RunConfig) -> list[str]:
    """The kinds that were asked for, or else may befall the run. UserError: they can't."""
    _check(request, config)
    missing = {name: why for name, kind in KINDS.items() if (why := _missing(kind.needs, request, config))}
    for name in request.kinds:
        if name in missing:
            raise UserError(f"chaos: --kinds {name} can't befall this run: {missing[name]}")
    kinds = list(request.kinds or [name for name in KINDS if name not in missing])
    faults, most = request.faults or len(kinds), config.train.steps - SPARE_STEPS
    if faults > most:
        hint = f"give --train.steps {faults + SPARE_STEPS} or more, or fewer faults"
        raise UserError(
            f"chaos: {faults} faults need a step each and {SPARE_STEPS} more; train.steps = {config.train.steps}; {hint}"
        )
    return kinds


def _check(request: Request, config: RunConfig) -> None:
    if unknown := [name for name in request.kinds if name not in KINDS]:
        near = difflib.get_close_matches(unknown[0], KINDS, 1)
        hint = f"did you mean {near[0]}? There are" if near else "there are"
        raise UserError(f"chaos: --kinds {unknown[0]}: no such kind; {hint} {', '.join(KINDS)}")
    if request.faults < 0:
        raise UserError(f"chaos: --faults {request.faults}: expected 0, one of each kind, or more")
    if not config.checkpoint.every:
        raise UserError("chaos: checkpoint.every = 0, so a run that dies begins anew; give --checkpoint.every 1, or so")
    if config.runtime.address is not None:
        raise UserError(
            "chaos: runtime.address: leave it out, chaos starts what it breaks; --nodes 3 stands for three machines"
        )
    if request.nodes and config.runtime.kind != "ray":
        raise UserError('chaos: --nodes are for runtime.kind = "ray"; set it, or leave them out')


def _missing(need: str, request: Request, config: RunConfig) -> str:
    """Why what a kind needs isn't there, as far as the configuration tells."""
    found = {
        "": "",
        "ray": "" if config.runtime.kind == "ray" else 'it has no worker processes; set runtime.kind = "ray"',
        "nodes": "" if request.nodes > 1 else "it has one node; give --nodes 2 or more",
        "spare": "" if config.checkpoint.keep > 1 else "it keeps one checkpoint; set checkpoint.keep = 2 or more",
        "disk": "" if sys.platform == "linux" else "only Linux lets a user have a small disk",
        "rewards": "" if _calls_rewards(config) else "it calls no reward functions in processes of their own",
        "environments": "" if _has_processes(config) else "it has no processes of environments",
    }
    return found[need]


def _has_processes(config: RunConfig) -> bool:
    return config.environment is not None and config.environment.processes > 0


def _calls_rewards(config: RunConfig) -> bool:
    functions = config.reward.functions
    own = not config.reward.model and (not functions or not all(is_url(function) for function in functions))
    return own and bool(config.roles().get("reward"))


# The run in peace.


def _in_peace(request: Request, config: RunConfig, run_dir: Path) -> float:
    """Run it; the median seconds of a step."""
    _say(f"without faults: {run_dir}")
    with ExitStack() as stack:
        nodes = stack.enter_context(Nodes(request.nodes, _slots(config), ())) if request.nodes else None
        training = Training(_arguments(request, run_dir, nodes), (), run_dir.with_suffix(".log"))
        processes = Processes(training.pid, None)
        stack.callback(lambda: kill_all(processes.own()))
        _wait(training, run_dir / "metrics.jsonl", config.train.steps)
    records = read_records(run_dir / "metrics.jsonl")
    return float(median(record["time/step_s"] for record in records if "time/step_s" in record))


def _wait(training: Training, metrics: Path, steps: int) -> None:
    """Until it has ended. UserError: that would take too long."""
    start_s, first_s = time.monotonic(), 0.0
    while training.code is None:
        time.sleep(POLL_S)
        done, now_s = newest_step(metrics), time.monotonic()
        first_s = first_s or (now_s if done else 0.0)
        known = done > 1 and now_s - first_s > PATIENCE_S
        whole_s = (now_s - first_s) / (done - 1) * steps if known else now_s - start_s
        if whole_s > LONGEST_S:
            raise UserError(
                f"chaos: a run of {steps} steps takes about {whole_s / 60:.0f} minutes here, and more under faults; "
                f"give fewer steps with --train.steps: {LONGEST_S / 60:.0f} minutes are the most"
            )
    if training.code:
        told = next((line.text for line in training.lines if line.text.startswith("error: ")), "")
        raise WorkerError(f"chaos: without faults the run ends with exit code {training.code}: {told}; see {training.log}")


def _arguments(request: Request, run_dir: Path, nodes: Nodes | None) -> list[str]:
    there = ["--runtime.address", nodes.address] if nodes else []
    return [str(request.config), *request.overrides, "--run_dir", str(run_dir), *there]


def _slots(config: RunConfig) -> int:
    """Of each node, so that any one of them can be missing and there is still room for all workers."""
    return sum(pool.size for pool in config.placed.pools)


# The run under faults.


def _under_faults(request: Request, config: RunConfig, folder: Path, kinds: Sequence[str], step_s: float) -> Outcome:
    faults = schedule(kinds, request.faults or len(kinds), config.train.steps, request.seed)
    place, run_dir = folder / "faults", folder / "faults" / "run"
    _say(f"under faults: {run_dir}")
    with ExitStack() as stack:
        room = SPARE_BYTES + (len(faults) + 2) * _size(folder / "clean")  # checkpoints of each fault may be set aside
        disk = stack.enter_context(SmallDisk(place, room) if "fill-disk" in kinds else Disk(place))
        nodes = stack.enter_context(Nodes(request.nodes, _slots(config), disk.enter)) if request.nodes else None
        arguments = [*_arguments(request, run_dir, nodes), "--restarts", str(2 * len(faults))]
        trial = Trial(arguments, run_dir, disk, nodes, folder / "faults.log", step_s)
        befallen = []
        for fault in trial.run(faults):
            _say(_line(fault))
            befallen.append(fault)
    found = differences(folder / "clean", run_dir) if _exact(config) else None
    return Outcome(befallen, trial.left, found, _balance(RunDirectory(run_dir).ledger))


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _balance(ledger: Path) -> Balance:
    return balance(ledger) if ledger.exists() else Balance(0, 0, 0, 0, {}, ["there is no ledger: the run never began"])


def _exact(config: RunConfig) -> bool:
    """Whether results don't depend on which worker is first."""
    return not (config.runtime.kind == "ray" and config.environment is not None and config.environment.workers)


# What is shown.


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _line(fault: Befallen) -> str:
    if fault.problem:
        return f"  step {fault.step}: {fault.kind}: {fault.problem}"
    seen = "" if fault.detect_s is None else f"seen after {fault.detect_s:.2f} s, "
    told = f"; {fault.told}" if fault.told else ""
    return f"  step {fault.step}: {fault.kind}: {seen}recovered after {fault.recover_s:.2f} s{told}"


def _table(outcome: Outcome) -> list[str]:
    header = ("fault", "step", "detected, s", "recovered, s", "")
    rows = [
        (fault.kind, str(fault.step), _seconds(fault.detect_s), _seconds(fault.recover_s), fault.problem or fault.told)
        for fault in outcome.faults
    ]
    return [*aligned([header, *rows], right=header[1:4]), "", *_verdict(outcome)]


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.2f}"


def _verdict(outcome: Outcome) -> list[str]:
    if outcome.differences is None:
        compared = ["not compared with the run without faults: results depend on which worker is first"]
    else:
        compared = [f"not equal: {line}" for line in outcome.differences] or [
            "equal to the run without faults, bit for bit"
        ]
    return [*_samples(outcome.balance), *compared, *(f"left behind: process {process}" for process in outcome.left)]


def _samples(balance: Balance) -> list[str]:
    counts = ", ".join(f"{count:,} {name}" for name, count in balance.counts.items())
    again = f"; {balance.redone:,} were issued again, and count once" if balance.redone else ""
    told = [f"lost or twice: {problem}" for problem in balance.problems] or ["0 lost, 0 twice"]
    return [f"samples: {counts}{again}", *told]


def _data(outcome: Outcome) -> dict[str, Any]:
    return {"good": outcome.good, **asdict(outcome)}
