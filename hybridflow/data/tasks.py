"""Built-in tasks: prompts to learn from, held-out prompts, a reward, and demonstrations where they are known.

    task = load_task("addition", {"digits": 2}, seed=1)
    task.train[0]        # PromptRecord("What is 47 + 8? Answer:", {"answer": "55"}, " 55")
    task.reward          # "hybridflow.data.task_rewards:number", for a RewardPool

The training and the held-out prompts of a task are disjoint. Which instances are held out is fixed and doesn't depend on
the seed, so runs with different seeds are measured on the same prompts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybridflow.core.errors import DataError
from hybridflow.core.seeding import derive, generator, uniforms
from hybridflow.data.prompts import DataConfig, PromptRecord, did_you_mean, read_records

__all__ = ["Task", "load_data", "load_task", "tasks"]

Options = Mapping[str, bool | int | float | str]

_HELD_OUT = 0.2  # share of all instances of a task
_ENUMERATED = 1_000_000  # tasks of up to so many instances are split exactly, larger ones by a hash
_REWARDS = "hybridflow.data.task_rewards:"


@dataclass(frozen=True)
class Task:
    """Records to learn from and held-out ones.

    ``reward``: spec of the task's reward function, None for a file of prompts. ``alphabet``: the characters of prompts and
    responses, for models trained from scratch with ``Tokenizer.characters``; None where text is free.
    """

    train: Sequence[PromptRecord]
    evaluation: Sequence[PromptRecord]
    reward: str | None
    alphabet: str | None


def tasks() -> dict[str, str]:
    """What each task asks for, with its options."""
    return {
        "addition": 'add two numbers; digits (1 to 6) = 1, format ("text" or "compact") = "text", size, eval_size',
        "reverse": "write digits in reverse order, dense reward; length (1 to 12) = 5, size, eval_size",
        "sort": "write digits in ascending order, dense reward; length (1 to 12) = 5, size, eval_size",
        "reasoning_gym:NAME": "any task of reasoning-gym with its own score; its options, size, eval_size",
    }


def load_data(config: DataConfig, seed: int, demonstrations: bool = False) -> Task:
    """What the configuration asks for: a task, or files of prompts (with completions if ``demonstrations``)."""
    if config.task is not None:
        return load_task(config.task, config.options, seed)
    assert config.prompts is not None  # validated by DataConfig
    completion = config.completion_field if demonstrations else None
    train = read_records(Path(config.prompts), config.prompt_field, completion)
    held_out = read_records(Path(config.eval_prompts), config.prompt_field) if config.eval_prompts else []
    return Task(train, held_out, None, None)


def load_task(name: str, options: Options, seed: int) -> Task:
    """A task by name. DataError for an unknown name or option, or an option out of its range."""
    if name.startswith("reasoning_gym:"):
        return _reasoning(name.removeprefix("reasoning_gym:"), options, seed)
    if name not in _BUILDERS:
        raise DataError(f"unknown task {name!r}: {did_you_mean(name, tasks())}")
    return _BUILDERS[name](options, seed)


def _addition(options: Options, seed: int) -> Task:
    given = _options("addition", options, {"digits": 1, "format": "text", "size": 10_000, "eval_size": 200})
    digits, layout = _between("addition", given, "digits", 1, 6), given["format"]
    if layout not in ("text", "compact"):
        raise DataError(f'task addition: format = {layout!r}, expected "text" or "compact"')
    text = layout == "text"

    def record(instance: int) -> PromptRecord:
        a, b = divmod(instance, 10**digits)
        prompt = f"What is {a} + {b}? Answer:" if text else f"{a}+{b}="
        return PromptRecord(prompt, {"answer": str(a + b)}, f" {a + b}" if text else str(a + b))

    alphabet = "".join(sorted(set("0123456789What is + ? Answer:"))) if text else "0123456789+="
    reward = _REWARDS + ("number" if text else "exact")
    return _task("addition", given, seed, 10 ** (2 * digits), record, reward, alphabet)


def _digits(name: str, answer: Callable[[str], str]) -> Callable[[Options, int], Task]:
    """A task on a string of digits."""

    def build(options: Options, seed: int) -> Task:
        given = _options(name, options, {"length": 5, "size": 10_000, "eval_size": 200})
        length = _between(name, given, "length", 1, 12)

        def record(instance: int) -> PromptRecord:
            digits = str(instance).zfill(length)
            return PromptRecord(f"{digits}>", {"answer": answer(digits)}, answer(digits))

        return _task(name, given, seed, 10**length, record, _REWARDS + "positions", "0123456789>")

    return build


_BUILDERS: dict[str, Callable[[Options, int], Task]] = {
    "addition": _addition,
    "reverse": _digits("reverse", lambda digits: digits[::-1]),
    "sort": _digits("sort", lambda digits: "".join(sorted(digits))),
}


def _task(
    name: str,
    given: Mapping[str, Any],
    seed: int,
    count: int,
    record: Callable[[int], PromptRecord],
    reward: str,
    alphabet: str,
) -> Task:
    """A task whose instances are the numbers below ``count``."""
    train = _instances(name, count, False, _between(name, given, "size", 1, 1_000_000), seed)
    held_out = _instances(name, count, True, _between(name, given, "eval_size", 1, 1_000_000), 0)
    return Task([record(i) for i in train], [record(i) for i in held_out], reward, alphabet)


def _instances(name: str, count: int, held_out: bool, size: int, seed: int) -> list[int]:
    """Up to ``size`` different instances of one side of the split, in an order by ``seed``."""
    rng = generator(seed, f"task/{name}", int(held_out))
    if count <= _ENUMERATED:
        ranked = np.argsort(_split(name, np.arange(count)), kind="stable")
        border = int(count * _HELD_OUT)
        side = ranked[:border] if held_out else ranked[border:]
        return [int(i) for i in rng.permutation(np.sort(side))[:size]]
    found: dict[int, None] = {}
    while len(found) < size:
        drawn = rng.integers(0, count, 2 * size)
        wanted = (_split(name, drawn) < _HELD_OUT) == held_out
        found |= dict.fromkeys(drawn[wanted].tolist())
    return list(found)[:size]


def _split(name: str, instances: NDArray[np.int64]) -> NDArray[np.float64]:
    """A number in [0, 1) for each instance, the same in every run."""
    return uniforms(0, f"task/{name}/split", instances, np.zeros_like(instances))


def _options(name: str, given: Options, defaults: Mapping[str, Any]) -> dict[str, Any]:
    for key, value in given.items():
        if key not in defaults:
            raise DataError(f"task {name}: unknown option {key!r}; known are {', '.join(defaults)}")
        if type(value) is not type(defaults[key]):
            kind = "a whole number" if isinstance(defaults[key], int) else "a text"
            raise DataError(f"task {name}: {key} = {value!r}, expected {kind}")
    return {**defaults, **given}


def _between(name: str, given: Mapping[str, Any], key: str, low: int, high: int) -> int:
    value = int(given[key])
    if not low <= value <= high:
        raise DataError(f"task {name}: {key} = {value}, expected {low} to {high}")
    return value


def _reasoning(name: str, options: Options, seed: int) -> Task:
    try:
        from hybridflow.data import reasoning
    except ModuleNotFoundError:
        raise DataError(f'task reasoning_gym:{name} needs reasoning-gym; pip install "hybridflow[tasks]"') from None
    full = f"reasoning_gym:{name}"
    if name not in reasoning.names():
        raise DataError(f"unknown task {full!r}: {did_you_mean(name, reasoning.names())}")
    own = {key: value for key, value in options.items() if key not in ("size", "eval_size")}
    unknown = [key for key in own if key not in reasoning.options(name)]
    if unknown:
        known = ", ".join(["size", "eval_size", *reasoning.options(name)])
        raise DataError(f"task {full}: unknown option {unknown[0]!r}; known are {known}")
    sizes = {key: value for key, value in options.items() if key not in own}
    given = _options(full, sizes, {"size": 1_000, "eval_size": 100})
    size, eval_size = (_between(full, given, key, 1, 1_000_000) for key in ("size", "eval_size"))
    # Instance i derives from seed + i: held-out ones from numbers below a million, the others from numbers above.
    above = 1_000_000 + derive(seed, "task/reasoning_gym") % 2**31
    try:
        held_out = list(_entries(reasoning.instances(name, own, 0, eval_size), name, own))
        train = list(_entries(reasoning.instances(name, own, above, size), name, own))
    except (AssertionError, TypeError, ValueError) as error:  # how its configurations say that a value is wrong
        raise DataError(f"task {full}: {error or 'an option has a wrong value'}; given are {own or 'no options'}") from None
    seen = {record.prompt for record in held_out}
    train = [record for record in train if record.prompt not in seen]
    if not train:
        raise DataError(f"task {full}: all of its few questions are held out; lower eval_size or change its options")
    return Task(train, held_out, "hybridflow.data.reasoning:score", None)


def _entries(entries: Sequence[Mapping[str, Any]], name: str, options: Options) -> Iterator[PromptRecord]:
    kept = {"task": name, "options": json.dumps(dict(options))}  # what the reward builds its scorer from
    for entry in entries:
        yield PromptRecord(entry["question"], {"answer": entry["answer"], "metadata": entry["metadata"], **kept})
