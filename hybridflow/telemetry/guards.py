"""Guards: named checks of every step's metrics for what silently ruins a run.

Each has a limit, a number of steps in a row that it takes, and an action. ``warn`` tells it once, until it is over;
``stop`` ends the run and leaves the checkpoints as they are. ``non_finite`` is another thing: a loss or a gradient that is
NaN or infinite is stopped by the learner, before the optimizer steps; the action says whether the run ends with it or goes
on without that step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, model_validator

from hybridflow.core.errors import GuardError

__all__ = ["GUARDS", "Finding", "Guard", "Guards", "GuardsConfig", "Rule"]

Values = Mapping[str, float]
NON_FINITE = "non_finite"
SKIPPED = "loss or gradient was NaN or infinite there; look at rewards and observations, and lower the learning rate"


class Rule(BaseModel):
    """What a guard does, at which limit, after how many steps in a row."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    action: Literal["off", "warn", "skip", "stop"]
    limit: float | None = None
    steps: int = Field(ge=1)


@dataclass(frozen=True)
class Guard:
    """``wrong``: what is wrong with a step, "" if nothing is, from its metrics, the limit and what the run had before.

    ``metric``: the documented name without which there is nothing to check. ``means`` and ``fix`` are for the user.
    """

    metric: str
    rule: Rule
    wrong: Callable[[Values, float, History], str]
    fires: str
    means: str
    fix: str


class History:
    """What a guard compares a step with: the steps that this process has seen of the run."""

    def __init__(self) -> None:
        self.best_reward = -float("inf")  # of steps whose scores differed
        self.first_truncated: float | None = None

    def add(self, values: Values) -> None:
        """After the guards have looked at a step."""
        if values.get("reward/std", 0.0) > 0:
            self.best_reward = max(self.best_reward, values["reward/mean"])
        if self.first_truncated is None:
            self.first_truncated = values.get("response_length/truncated")


def _equal_rewards(values: Values, limit: float, history: History) -> str:
    """A solved task has equal scores, too: as high as scores ever were when they still differed."""
    mean = values["reward/mean"]
    if values["reward/std"] > limit or mean >= history.best_reward > -float("inf"):
        return ""
    return "every score was 0" if mean == 0 else f"every score was {mean:.4g}"


def _above(what: str, metric: str) -> Callable[[Values, float, History], str]:
    return lambda values, limit, _: f"{what} is {values[metric]:.3g}, above {limit:g}" if values[metric] > limit else ""


def _empty(values: Values, limit: float, _: History) -> str:
    length = values["response_length/mean"]
    ended = length <= limit and values["response_length/truncated"] < 1
    return f"responses have {length:.3g} tokens on average" if ended else ""


def _truncated(values: Values, limit: float, history: History) -> str:
    now, first = values["response_length/truncated"], history.first_truncated
    grown = first is not None and first < 0.5 * limit and now >= limit
    return f"the length limit cut {now:.0%} of the responses, and {first:.0%} at first" if grown else ""


def _no_entropy(values: Values, limit: float, _: History) -> str:
    """That of a density may be anything; of choices it is never below 0."""
    entropy = values["entropy"]
    return f"the entropy of the policy is {entropy:.2g}, not above {limit:g}" if 0 <= entropy <= limit else ""


GUARDS: dict[str, Guard] = {
    "reward": Guard(
        "reward/std",
        Rule(action="warn", limit=0.0, steps=10),
        _equal_rewards,
        "all scores of a step are equal (their deviation is at most the limit), and lower than scores have been",
        "equal scores have no advantages, so nothing is learned: the reward is too sparse, broken, or hacked",
        "look at samples.jsonl; take easier prompts or a better model, reward partial success, raise train.group_size",
    ),
    "kl": Guard(
        "kl",
        Rule(action="warn", limit=10.0, steps=3),
        _above("KL from the reference", "kl"),
        "kl (nats per token) is above the limit",
        "the policy has left the reference, and often language: its samples are worth a look before its scores are",
        "raise kl.coef, or lower actor.optimizer.lr",
    ),
    "mismatch": Guard(
        "actor/mismatch",
        Rule(action="warn", limit=0.5, steps=3),
        _above("the mean difference of log-probabilities between sampler and learner", "actor/mismatch"),
        "actor/mismatch (nats per token or step) is above the limit",
        "responses come from another policy than the one that learns: weights too old, too coarse, or changed too fast",
        'set generation.precision = "full", make rollouts shorter, or lower schedule.max_staleness or actor.optimizer.lr',
    ),
    "empty": Guard(
        "response_length/mean",
        Rule(action="warn", limit=1.0, steps=3),
        _empty,
        "the mean length of responses is at most the limit, and not because the length limit cuts them there",
        "the policy has learned to say nothing, or ends where its chat template does",
        "let the reward be lower for empty responses; check the end tokens and generation.stop",
    ),
    "truncated": Guard(
        "response_length/truncated",
        Rule(action="warn", limit=0.95, steps=10),
        _truncated,
        "the length limit cuts this share of the responses, and cut less than half as many at first",
        "the policy has learned to go on without end: its reward favours length, or it repeats itself",
        "raise generation.max_new_tokens, use shaping's penalty of overlong responses, or a reward that wants an end",
    ),
    "entropy": Guard(
        "entropy",
        Rule(action="warn", limit=1e-3, steps=10),
        _no_entropy,
        "the entropy of choices (nats per token or step) is at most the limit",
        "the policy always does the same and can't find anything better: fine at the end of a run, not before",
        "raise loss.entropy_coef or kl.coef, lower actor.optimizer.lr, or stop here",
    ),
}
DEFAULTS = {NON_FINITE: Rule(action="stop", steps=3), **{name: guard.rule for name, guard in GUARDS.items()}}


class GuardsConfig(BaseModel):
    """``[guards]``: by a guard's name its action, or a table with those of action, limit and steps that differ."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    non_finite: Rule = DEFAULTS[NON_FINITE]
    reward: Rule = DEFAULTS["reward"]
    kl: Rule = DEFAULTS["kl"]
    mismatch: Rule = DEFAULTS["mismatch"]
    empty: Rule = DEFAULTS["empty"]
    truncated: Rule = DEFAULTS["truncated"]
    entropy: Rule = DEFAULTS["entropy"]

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, data: Any) -> Any:
        """Fill in what isn't given."""
        if not isinstance(data, Mapping):
            return data
        if unknown := [name for name in data if name not in DEFAULTS]:
            raise ValueError(f"no guard {unknown[0]!r}; there are {', '.join(DEFAULTS)}")
        given = {name: {"action": rule} if isinstance(rule, str) else rule for name, rule in data.items()}
        return {n: {**DEFAULTS[n].model_dump(), **r} if isinstance(r, Mapping) else r for n, r in given.items()}

    @model_validator(mode="after")
    def _check(self) -> GuardsConfig:
        if self.non_finite.action not in ("skip", "stop"):
            raise ValueError(f'non_finite = "{self.non_finite.action}": such a step can be skipped or stop the run')
        if self.non_finite.limit is not None:
            raise ValueError("non_finite.limit: every value that is not finite counts; remove it")
        for name in GUARDS:
            rule: Rule = getattr(self, name)
            if rule.action == "skip":
                raise ValueError(f'{name} = "skip": it is known after the step; use off, warn or stop')
            if rule.limit is None:
                raise ValueError(f"{name}.limit is missing")
        return self

    def __str__(self) -> str:
        """For lists of keys."""
        return ", ".join(f"{name}: {getattr(self, name).action}" for name in DEFAULTS)

    @property
    def max_skips(self) -> int:
        """Optimizer steps that aren't finite and may be skipped in a row."""
        return self.non_finite.steps if self.non_finite.action == "skip" else 0


class Finding(NamedTuple):
    """A guard that has fired."""

    guard: str
    text: str
    stops: bool


class Guards:
    """Looks at every step with those guards whose metric it has."""

    def __init__(self, config: GuardsConfig) -> None:
        rules: dict[str, Rule] = {name: getattr(config, name) for name in GUARDS}
        self.rules = {name: rule for name, rule in rules.items() if rule.action != "off"}
        self.begin()

    def begin(self) -> None:
        """Forget what was seen: a run begins, or goes on from an earlier step."""
        self._in_a_row = dict.fromkeys(self.rules, 0)
        self._history, self._skipping = History(), False

    def doubtful(self) -> bool:
        """Whether a guard that would stop the run has begun to see what it stops for: what is saved now may be what nobody
        wants to go on from."""
        return any(self._in_a_row[name] for name, rule in self.rules.items() if rule.action == "stop")

    def look(self, step: int, values: Values) -> list[Finding]:
        """What has fired with this step; ``values`` by their documented names. A guard that goes on firing is told once."""
        found = [finding for name in self.rules for finding in self._look(name, step, values)]
        self._history.add(values)
        return [*found, *self._skipped(step, values)]

    def _skipped(self, step: int, values: Values) -> Iterable[Finding]:
        shares = {name: share for name, share in values.items() if name.endswith("/steps_skipped")}
        worst = max(shares, key=lambda name: shares[name], default=None)
        if worst is None or not shares[worst]:
            self._skipping = False
        elif not self._skipping:
            self._skipping = True
            text = f"{worst.partition('/')[0]} has skipped {shares[worst]:.0%} of its optimizer steps: {SKIPPED}"
            yield Finding(NON_FINITE, f"step {step}: guards.{NON_FINITE}: {text}", stops=False)

    def _look(self, name: str, step: int, values: Values) -> Iterable[Finding]:
        guard, rule = GUARDS[name], self.rules[name]
        if guard.metric not in values:
            return
        assert rule.limit is not None
        wrong = guard.wrong(values, rule.limit, self._history)
        self._in_a_row[name] = self._in_a_row[name] + 1 if wrong else 0
        if self._in_a_row[name] == rule.steps:
            since = f" for {rule.steps} steps" if rule.steps > 1 else ""
            text = f"step {step}: guards.{name}: {wrong}{since}: {guard.means}; {guard.fix}"
            yield Finding(name, text, stops=rule.action == "stop")


def stop(found: Iterable[Finding]) -> None:
    """GuardError if one of the findings stops the run."""
    for finding in found:
        if finding.stops:
            raise GuardError(finding.text)
