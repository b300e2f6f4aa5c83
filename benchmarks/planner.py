"""The planner against what others measured: the bars of the HybridFlow paper, in benchmarks/planner_paper.json.

    python benchmarks/planner.py [--fit ROUNDS] [--json]

PPO as examples/ppo_addition.toml has it, with a reward model and the paper's models and workload (1,024 prompts of 1,024
tokens, as many responses of 1,024, eight updates; bf16 weights, 4 bytes of gradient and 8 of optimizer a parameter) on 8 to
128 A100s. Every number is the planner's own: ``planner.search`` picks a mapping for each model and number of devices, of
all placements and of the three of figure 12, and its seconds are compared with the bar. Nothing is run on a GPU.

Without ``--fit`` the constants are those of the product (``planner.cost.Efficiency``). ``--fit`` finds them: the search
picks mappings at current constants, six constants are fitted to all bars with the mappings so far, and so on, ``ROUNDS``
times. Terms are left out with the mappings that were picked, unless others are to choose from without them.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from hybridflow.build_mapping import task_graph
from hybridflow.config import load_config
from hybridflow.core.errors import ConfigError
from hybridflow.planner.baselines import baselines
from hybridflow.planner.calibrate import Fitted, fit
from hybridflow.planner.cluster import Cluster, parse_cluster
from hybridflow.planner.cost import CostModel, Efficiency
from hybridflow.planner.graph import ModelRole, TaskGraph
from hybridflow.planner.mapping import DeviceMapping, Pool, Strategy
from hybridflow.planner.search import Candidate, Result, pool_seconds, search, step_seconds
from hybridflow.planner.sizes import find_model
from hybridflow.telemetry.graph_tables import aligned

ROOT = Path(__file__).parent.parent
PAPER = json.loads((ROOT / "benchmarks" / "planner_paper.json").read_text())
SIZES = ("llama-7b", "llama-13b")
PLACEMENTS = {
    "colocate": [{"actor", "reference", "critic", "reward"}],
    "split": [{"actor", "reference"}, {"critic", "reward"}],
    "standalone": [{"actor"}, {"reference"}, {"critic"}, {"reward"}],
}
BEST = "best of all"
BOUNDS = {
    "compute": (0.2, 0.75),
    "decode_step_s": (7e-3, 13e-3),
    "decode_row_s": (4e-5, 8e-5),
    "call_s": (0.05, 2.0),
    "network": (0.2, 1.0),
    "copy": (5e8, 2e10),
}
"""What is plausible: of decode steps and rows that of engines of the time"""
GUESS = Efficiency(0.5, 8e-3, 5.5e-5, 0.3, 0.8, 3.3e9)
"""where every fit starts"""
TRANSITIONS_COUNT = 0.5
"""of figure 14, against one bar of tokens/s"""
NEAR = 1.15
"""mappings that are slower than this times the best one at the constants of the search don't wait for the fit"""


class Bar(NamedTuple):
    """Published tokens/s of HybridFlow: figure 9's, of its own mapping, and figure 12's, of a placement."""

    model: str
    devices: int
    placement: str
    tokens_per_second: float


class Transition(NamedTuple):
    """Published seconds from training on p x t to generation on p_g x t_g (figure 14)."""

    model: str
    devices: int
    training: tuple[int, int]
    generation: tuple[int, int]
    seconds: float


def bars() -> list[Bar]:
    nine, twelve = PAPER["figure_9"], PAPER["figure_12"]
    column = nine["systems"].index("HybridFlow")
    found = [Bar(model, int(n), BEST, row[column]) for model, rows in nine["bars"].items() for n, row in rows.items()]
    for n, row in twelve["bars"].items():
        found += [Bar(twelve["model"], int(n), *pair) for pair in zip(twelve["placements"], row, strict=True)]
    return found


def transitions() -> list[Transition]:
    return [
        Transition(model, int(n), tuple(one["train_p_t"]), tuple(one["generate_p_t"]), seconds)
        for model, one in PAPER["figure_14"]["bars"].items()
        for n, seconds in one["HybridFlow"].items()
    ]


def ppo(model: str) -> TaskGraph:
    """The example's graph with the paper's sizes, and a reward model instead of a function."""
    graph = task_graph(load_config(ROOT / "examples" / "ppo_addition.toml", []))
    size = find_model(model)
    trained = {"gradient_bytes": 4.0, "optimizer_bytes": 8.0}
    roles = [replace(role, size=size, frozen=0, **(trained if role.trained else {})) for role in graph.roles]
    tasks = [
        replace(task, kind="forward", prompt=1.0, response=1.0) if task.role == "reward" else replace(task, slots=0)
        for task in graph.tasks
    ]
    tasks = [replace(task, minibatches=8) if task.kind == "train" else task for task in tasks]
    whole = TaskGraph((*roles, ModelRole("reward", size, "score")), tuple(tasks), graph.edges)
    return whole.with_lengths(1024, 1024).with_rows(1024)


def cluster(devices: int) -> Cluster:
    return parse_cluster(f"a100-80g:{devices // 8}x8")


GRAPHS = {model: ppo(model) for model in SIZES}
Mappings = Mapping[Bar, Sequence[DeviceMapping]]


class Planner:
    """The cost models of all sizes at some constants; ``options``: of ``CostModel``. Systems of the paper cut pipelines
    into stages of equally many layers."""

    def __init__(self, efficiency: Efficiency, **options: Any) -> None:
        self.efficiency = efficiency
        self.costs = {
            model: CostModel(graph, efficiency, **{"even_stages": True, **options}) for model, graph in GRAPHS.items()
        }

    def results(self, wanted: Sequence[tuple[str, int]]) -> dict[tuple[str, int], Result]:
        return {(model, n): search(GRAPHS[model], cluster(n), self.costs[model]) for model, n in wanted}

    def seconds(self, model: str, mapping: DeviceMapping) -> float:
        """Of a step; infinite if it doesn't fit."""
        try:
            estimates = self.costs[model].estimates(mapping)
        except ConfigError:
            return math.inf
        return step_seconds(pool_seconds(GRAPHS[model], mapping, estimates), mapping.schedule)

    def tokens_per_second(self, bar: Bar, mappings: Mappings) -> float:
        return GRAPHS[bar.model].tokens / min(self.seconds(bar.model, one) for one in mappings[bar])

    def transition(self, one: Transition) -> float:
        """Seconds."""
        cost, machine = self.costs[one.model], cluster(8).machines[0][1]
        training, generation = (Strategy(p, t, one.devices // (p * t)) for p, t in (one.training, one.generation))
        found = cost.transition(cost.roles["sampler"], training, generation, machine)
        assert found is not None
        return found.seconds


def searched(bars: Sequence[Bar]) -> list[tuple[str, int]]:
    return [*dict.fromkeys((bar.model, bar.devices) for bar in bars)]


def of_placement(result: Result, placement: str) -> list[Candidate]:
    """The best first."""
    every = [one for one in (result.best, *result.runners_up) if one.mapping is not None]
    if placement == BEST:
        return every
    want = sorted(map(sorted, PLACEMENTS[placement]))
    return [one for one in every if sorted(sorted({*roles} - {"sampler"}) for roles in one.placement) == want]


def picked(bars: Sequence[Bar], results: Mapping[tuple[str, int], Result]) -> dict[Bar, list[DeviceMapping]]:
    """Of each bar the mapping that costs least, and those that are near."""
    found: dict[Bar, list[DeviceMapping]] = {}
    for bar in bars:
        first, *others = of_placement(results[bar.model, bar.devices], bar.placement)
        near = [one for one in others if one.seconds < NEAR * first.seconds]
        found[bar] = [one.mapping for one in (first, *near) if one.mapping is not None]
    return found


# -------------------------------------------------------------------------------------------------------------------- fit


def fitted(bars: Sequence[Bar], mappings: Mappings, start: Efficiency, **options: Any) -> Fitted:
    """Six constants, to bars and the transitions of the same models."""
    moves = [one for one in transitions() if one.model in {bar.model for bar in bars}]

    def predict(values: Mapping[str, float]) -> list[float]:
        planner = Planner(replace(start, **values), **options)
        tokens = [planner.tokens_per_second(bar, mappings) for bar in bars]
        return tokens + [planner.transition(one) for one in moves]

    observed = [bar.tokens_per_second for bar in bars] + [one.seconds for one in moves]
    weights = [1.0] * len(bars) + [TRANSITIONS_COUNT] * len(moves)
    return fit(predict, observed, {name: getattr(start, name) for name in BOUNDS}, BOUNDS, weights)


def alternated(bars: Sequence[Bar], start: Efficiency, rounds: int) -> Efficiency:
    """Constants and mappings in turns. A mapping that was picked once stays to be chosen from."""
    known: dict[Bar, list[DeviceMapping]] = {bar: [] for bar in bars}
    for number in range(rounds):
        for bar, mappings in picked(bars, Planner(start).results(searched(bars))).items():
            known[bar] += [one for one in mappings if one not in known[bar]]
        found = fitted(bars, known, start)
        start = replace(start, **{name: float(f"{value:.3g}") for name, value in found.values.items()})
        constants = ", ".join(f"{name} = {getattr(start, name):.3g}" for name in BOUNDS)
        print(f"round {number + 1}: {constants}; median error {found.median_error:.1%}", file=sys.stderr)
    return start


# ----------------------------------------------------------------------------------------------------------------- scores


@dataclass(frozen=True)
class Scores:
    """Of predicted tokens/s: errors as shares of what was measured; pairs of placements more than 5 % apart in the right
    order; ``regret``: the share of tokens/s that is lost where the placement that should be best isn't."""

    median: float
    worst: float
    right: int
    pairs: int
    regret_mean: float
    regret_worst: float


def scores(predicted: Mapping[Bar, float]) -> Scores:
    errors = [abs(value / bar.tokens_per_second - 1) for bar, value in predicted.items()]
    right, regrets = [], []
    for n in sorted({bar.devices for bar in predicted if bar.placement != BEST}):
        three = [bar for bar in predicted if bar.devices == n and bar.placement != BEST]
        for number, one in enumerate(three):
            for other in three[:number]:
                ratio = one.tokens_per_second / other.tokens_per_second
                if abs(math.log(ratio)) > math.log(1.05):
                    right.append((predicted[one] > predicted[other]) == (ratio > 1))
        chosen = max(three, key=lambda bar: predicted[bar])
        regrets.append(1 - chosen.tokens_per_second / max(bar.tokens_per_second for bar in three))
    regrets = regrets or [math.nan]
    return Scores(statistics.median(errors), max(errors), sum(right), len(right), statistics.fmean(regrets), max(regrets))


def power_law(train: Sequence[Bar], test: Sequence[Bar]) -> dict[Bar, float]:
    """c N^a P^b by least squares of logarithms; with one size, b = -1."""
    exponent = None if len({bar.model for bar in train}) > 1 else -1.0

    def row(bar: Bar) -> tuple[list[float], float]:
        n, p = math.log(bar.devices), math.log(GRAPHS[bar.model].roles[0].parameters)
        return ([1.0, n, p], 0.0) if exponent is None else ([1.0, n], exponent * p)

    rows = [row(bar) for bar in train]
    target = [math.log(bar.tokens_per_second) - fixed for bar, (_, fixed) in zip(train, rows, strict=True)]
    factors = np.linalg.lstsq(np.array([x for x, _ in rows]), np.array(target), rcond=None)[0]
    return {bar: math.exp(float(np.dot(factors, row(bar)[0])) + row(bar)[1]) for bar in test}


def law_by_placement(bars: Sequence[Bar]) -> dict[Bar, float]:
    """A power law for each placement."""
    found: dict[Bar, float] = {}
    for placement in dict.fromkeys(bar.placement for bar in bars):
        own = [bar for bar in bars if bar.placement == placement]
        found |= power_law(own, own)
    return found


def rule(bars: Sequence[Bar]) -> dict[Bar, float]:
    """Colocate up to 64 devices, then split: only which one is best."""
    best = {bar: "colocate" if bar.devices <= 64 else "split" for bar in bars}
    return {bar: 2.0 if bar.placement == best[bar] else 1.0 for bar in bars if bar.placement != BEST}


# -------------------------------------------------------------------------------------------------------------- the tables


@dataclass
class Report:
    """Lines to print, and the same as data."""

    lines: list[str] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)
    targets: list[tuple[str, str, str, bool]] = field(default_factory=list)

    def table(self, title: str, rows: Sequence[Sequence[str]], left: int = 1) -> None:
        self.lines += [title, "", *aligned(rows, rows[0][left:]), ""]

    def target(self, what: str, wanted: str, got: str, held: bool) -> None:
        self.targets.append((what, wanted, got, held))


def share(value: float) -> str:
    return f"{100 * value:.1f} %"


def signed(value: float) -> str:
    return f"{100 * value:+.1f} %"


def told(mapping: DeviceMapping) -> str:
    """actor 1-8-16 + sampler 1-4-32 | ...: p-t-d of each role, pool by pool."""

    def cut(role: str) -> str:
        s = mapping.strategies[role]
        return f"{role} {s.pp}-{s.tp}-{s.dp}"

    return " | ".join(f"{pool.devices}: {', '.join(map(cut, pool.roles))}" for pool in mapping.pools)


def report_constants(report: Report, found: Fitted, efficiency: Efficiency) -> None:
    rows = [("constant", "of the product", "fitted to these mappings", "within a factor of")]
    for name in BOUNDS:
        own = f"{getattr(efficiency, name):.3g}"
        rows.append((name, own, f"{found.values[name]:.3g}", f"{found.spread[name]:.2f}"))
    report.table("Constants; the factor is one standard error, by leaving out each bar in turn.", rows)
    report.data["constants"] = {"product": asdict(efficiency), "fitted": found.values, "spread": found.spread}


def report_bars(report: Report, predicted: Mapping[Bar, float], mappings: Mappings) -> None:
    rows = [("model", "devices", "placement", "published", "planned", "error", "mapping")]
    for bar, value in predicted.items():
        numbers = (f"{bar.tokens_per_second:,.0f}", f"{value:,.0f}", signed(value / bar.tokens_per_second - 1))
        rows.append((bar.model, str(bar.devices), bar.placement, *numbers, told(mappings[bar][0])))
    report.lines += ["Figures 9 and 12: tokens/s of HybridFlow.", "", *aligned(rows, ("devices", *rows[0][3:6])), ""]
    report.data["bars"] = [{**bar._asdict(), "planned": value} for bar, value in predicted.items()]
    found = scores(predicted)
    report.data["scores"] = asdict(found)
    report.target("median error of 27 bars", "<= 6 %", share(found.median), found.median <= 0.06)
    report.target("worst error of them", "<= 25 %", share(found.worst), found.worst <= 0.25)
    ordered = found.right / found.pairs
    report.target("pairs in the right order", ">= 85 %", f"{found.right} of {found.pairs}", ordered >= 0.85)
    report.target("regret, mean", "<= 1.5 %", share(found.regret_mean), found.regret_mean <= 0.015)
    report.target("regret, worst", "<= 8 %", share(found.regret_worst), found.regret_worst <= 0.08)
    best = {
        n: max((bar for bar in predicted if bar.devices == n and bar.placement != BEST), key=lambda bar: predicted[bar])
        for n in sorted({bar.devices for bar in predicted if bar.placement != BEST})
    }
    small = all(bar.placement == "colocate" for n, bar in best.items() if n <= 32)
    report.target("best up to 32 devices", "colocate", "colocate" if small else "another", small)
    report.target("best on 128 devices", "a split", best[128].placement, best[128].placement != "colocate")


def report_halves(report: Report, bars: Sequence[Bar]) -> dict[Bar, float]:
    """Fitted on 7B alone, and tested on 13B."""
    own = [bar for bar in bars if bar.model == "llama-7b"]
    others = [bar for bar in bars if bar not in own]
    constants = alternated(own, GUESS, 2)
    planner = Planner(constants)
    mappings = picked(others, planner.results(searched(others)))
    predicted = {bar: planner.tokens_per_second(bar, mappings) for bar in others}
    held = scores(predicted)
    report.data["fitted_on_7b"] = {"constants": asdict(constants), "scores": asdict(held)}
    got = f"{share(held.median)}; worst {share(held.worst)}"
    report.target("fitted on 7B alone: median error of 13B", "<= 9 %", got, held.median <= 0.09)
    return predicted


def report_transitions(report: Report, planner: Planner) -> None:
    rows, errors = [("model", "devices", "published", "planned", "error")], []
    for one in transitions():
        seconds = planner.transition(one)
        errors.append(abs(seconds / one.seconds - 1))
        error = signed(seconds / one.seconds - 1)
        rows.append((one.model, str(one.devices), f"{one.seconds:.1f} s", f"{seconds:.1f} s", error))
    report.table("Figure 14: from training to generation.", rows)
    median, worst = statistics.median(errors), max(errors)
    report.data["transitions"] = {"median": median, "worst": worst}
    report.target("figure 14: median error", "<= 12 %", share(median), median <= 0.12)
    report.target("figure 14: worst error", "<= 25 %", share(worst), worst <= 0.25)


def drawn(planner: Planner, model: str, tp: int) -> tuple[float, float] | None:
    """Seconds of generation and transition on figure 15's 16 devices; None if nothing fits."""
    devices, (p, t) = PAPER["figure_15"]["devices"], PAPER["figure_15"]["train_p_t"]
    graph, cost = GRAPHS[model], planner.costs[model]
    cut = Strategy(p, t, devices // (p * t))
    strategies = {role.name: cut._replace(shard="zero1" if role.trained else "none") for role in graph.roles}
    strategies |= {"sampler": Strategy(1, tp, devices // tp)}
    pool = Pool("main", cluster(devices).machines[0][1], devices, tuple(strategies))
    try:
        parts = cost.estimates(DeviceMapping((pool,), strategies))["sampler.rollout"].parts
    except ConfigError:
        return None
    moving = parts.get("transition", 0.0)
    return sum(parts.values()) - moving, moving


def report_generation(report: Report, planner: Planner) -> None:
    rows = [("model", "t_g", "generation", "planned", "transition", "planned ")]
    best: dict[str, int] = {}
    for model, published in PAPER["figure_15"]["bars"].items():
        times = {int(tp): drawn(planner, model, int(tp)) for tp in published}
        best[model] = min((tp for tp, one in times.items() if one), key=lambda tp: sum(times[tp] or ()))
        for tp, (seconds, moved) in published.items():
            one = times[int(tp)]
            planned = ("doesn't fit", "") if one is None else (f"{one[0]:.1f} s", f"{one[1]:.1f} s")
            moving = "" if moved is None else f"{moved:.1f} s"
            rows.append((model, tp, f"{seconds:.1f} s", planned[0], moving, planned[1]))
    report.table("Figure 15: generation on 16 devices, trained as 1-8-2.", rows)
    report.data["best_generation_tp"] = best
    report.target("figure 15: best t_g of 7B", "1 or 2", str(best["llama-7b"]), best["llama-7b"] in (1, 2))
    report.target("figure 15: best t_g of 13B", "4", str(best["llama-13b"]), best["llama-13b"] == 4)


def report_systems(report: Report, planner: Planner, predicted: Mapping[Bar, float]) -> None:
    systems = PAPER["figure_9"]["systems"][:-1]
    rows = [("model", "devices", *(f"{name}{end}" for name in systems for end in ("", ", planned")), "speed-ups, planned")]
    ratios: dict[str, list[float]] = {name: [] for name in systems}
    fastest = True
    for model, published in PAPER["figure_9"]["bars"].items():
        for n, values in published.items():
            found = baselines(GRAPHS[model], cluster(int(n)), planner.costs[model])
            [own] = [value for bar, value in predicted.items() if bar[:3] == (model, int(n), BEST)]
            cells, ups = [], []
            for name, value in zip(systems, values[:-1], strict=True):
                mapping = found[name]
                tokens = 0.0
                if not isinstance(mapping, str):
                    tokens = GRAPHS[model].tokens / planner.seconds(model, mapping)
                    ratios[name].append(tokens / value)
                    ups.append(f"{own / tokens:.1f}")
                fastest &= own > tokens
                cells += [f"{value:,.0f}", f"{tokens:,.0f}"]
            rows.append((model, n, *cells, " ".join(ups)))
    report.table("Figure 9: tokens/s of other systems.", rows)
    report.data["systems"] = ratios
    report.target("HybridFlow the fastest", "everywhere", "everywhere" if fastest else "not everywhere", fastest)
    for name in systems[1:]:
        least, most = min(ratios[name]), max(ratios[name])
        report.target(f"{name}, planned / published", "0.5 to 2", f"{least:.2f} to {most:.2f}", least >= 0.5 and most <= 2)
    least, most = min(ratios[systems[0]]), max(ratios[systems[0]])
    report.lines += [f"{systems[0]}, planned / published: {least:.2f} to {most:.2f}.", ""]


def report_rivals(report: Report, bars: Sequence[Bar], planned: Scores, halves: Mapping[Bar, float]) -> None:
    own = [bar for bar in bars if bar.model == "llama-7b"]
    others = [bar for bar in bars if bar not in own]
    rivals = {
        "planner": planned,
        "planner, constants fitted on 7B": scores(halves),
        "c N^a P^b": scores(power_law(bars, bars)),
        "c N^a P^-1, fitted on 7B": scores(power_law(own, others)),
        "a power law for each placement": scores(law_by_placement(bars)),
    }
    rows = [("", "median error", "worst", "pairs in order", "regret, mean", "worst ")]
    for name, one in rivals.items():
        orders = "placement" in name or "planner" in name
        order = (f"{one.right} of {one.pairs}", share(one.regret_mean), share(one.regret_worst))
        rows.append((name, share(one.median), share(one.worst), *(order if orders else ("no order", "", ""))))
    one = scores(rule(bars))
    rows.append(
        (
            "colocate up to 64, then split",
            "",
            "",
            f"{one.right} of {one.pairs}",
            share(one.regret_mean),
            share(one.regret_worst),
        )
    )
    report.table("Beside it: laws fitted to the same bars, and a rule that was read off them.", rows)
    report.data["rivals"] = {name: asdict(value) for name, value in {**rivals, "rule": one}.items()}


LEFT_OUT: dict[str, dict[str, Any]] = {
    "pipelines (all pp = 1)": {"max_pp": 1},
    "optimizer states shared out": {"shards": ("none",)},
    "the cap of 16 stages": {"max_pp": 10**6},
    "traffic of data-parallel copies": {"without": {"data"}},
    "all-reduces of tensor parallelism": {"without": {"tensor"}},
    "bubbles and uneven stages": {"without": {"bubble", "imbalance"}},
    "a cost of each decode step": {"without": {"steps"}},
    "a cost of each row in it": {"without": {"rows"}},
    "reading weights and cache": {"without": {"decode"}},
    "prefill": {"without": {"prefill"}},
    "the limit of the cache and its waves": {"cache_limit": False},
    "a cost of each call": {"without": {"call"}},
    "copying in the transition": {"without": {"copy"}},
}


def report_ablation(report: Report, bars: Sequence[Bar], mappings: Mappings, efficiency: Efficiency) -> None:
    rows = [("without", "median error", "mean", "worst", "refitted: median", "mean ", "worst ")]
    report.data["ablation"] = {}
    for name, options in LEFT_OUT.items():
        start = replace(efficiency, cache_limit="cache_limit" not in options)
        rest = {key: value for key, value in options.items() if key != "cache_limit"}
        own = mappings
        if "without" not in options and "cache_limit" not in options:  # other mappings to choose from
            own = picked(bars, Planner(start, **rest).results(searched(bars)))
        again = fitted(bars, own, start, **rest)
        cells: list[float] = []
        for constants in (start, replace(start, **again.values)):
            planner = Planner(constants, **rest)
            errors = [abs(planner.tokens_per_second(bar, own) / bar.tokens_per_second - 1) for bar in bars]
            cells += [statistics.median(errors), statistics.fmean(errors), max(errors)]
        rows.append((name, *map(share, cells)))
        report.data["ablation"][name] = cells
    report.table("Terms left out: errors of all bars with the constants as they are, and fitted again.", rows)


def made(efficiency: Efficiency) -> Report:
    report, every = Report(), bars()
    planner = Planner(efficiency)
    mappings = picked(every, planner.results(searched(every)))
    predicted = {bar: planner.tokens_per_second(bar, mappings) for bar in every}
    report_constants(report, fitted(every, mappings, efficiency), efficiency)
    report_bars(report, predicted, mappings)
    halves = report_halves(report, every)
    report_transitions(report, planner)
    report_generation(report, planner)
    report_systems(report, planner, predicted)
    report_rivals(report, every, scores(predicted), halves)
    report_ablation(report, every, mappings, efficiency)
    rows = [("target", "wanted", "got", "")]
    rows += [(what, wanted, got, "held" if held else "MISSED") for what, wanted, got, held in report.targets]
    report.lines += ["Targets.", "", *aligned(rows, ()), ""]
    report.data["targets"] = [dict(zip(("target", "wanted", "got", "held"), one, strict=True)) for one in report.targets]
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description="The planner against published bars.")
    parser.add_argument("--fit", type=int, default=0, metavar="ROUNDS", help="find the constants, too")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    efficiency = alternated(bars(), GUESS, options.fit) if options.fit else Efficiency()
    report = made(efficiency)
    print(json.dumps(report.data, indent=2, default=list) if options.json else "\n".join(report.lines))


if __name__ == "__main__":
    main()
