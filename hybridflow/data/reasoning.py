"""The tasks of reasoning-gym (the extra ``hybridflow[tasks]``): instances by name and seed, and their own scoring.

Light enough for reward processes: imports reasoning_gym and the standard library.
"""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import reasoning_gym
from reasoning_gym.factory import DATASETS

__all__ = ["instances", "names", "options", "score"]


def names() -> list[str]:
    """Every task that needs no data set of its own to be given."""
    return sorted(set(DATASETS) - {"composite"})


def options(name: str) -> list[str]:
    """What can be set for a task, without ``seed`` and ``size``."""
    return [field.name for field in dataclasses.fields(DATASETS[name][1]) if field.name not in ("seed", "size")]


def instances(name: str, given: Mapping[str, Any], seed: int, size: int) -> Sequence[Mapping[str, Any]]:
    """``size`` instances with question, answer and metadata; instance i depends on seed + i alone."""
    dataset = reasoning_gym.create_dataset(name, seed=seed, size=size, **given)
    return [dataset[i] for i in range(size)]


def score(response: str, prompt: str, answer: Any, metadata: Any, task: str, options: str) -> float:
    """The task's own score of what stands in ``<answer>...</answer>``, or of the whole response if no tag is there."""
    tagged = re.findall(r"<answer>(.*?)</answer>", response, re.DOTALL)
    given = (tagged[-1] if tagged else response).strip()
    entry = {"question": prompt, "answer": answer, "metadata": metadata}
    return float(_dataset(task, options).score_answer(given, entry))


@lru_cache(maxsize=8)
def _dataset(task: str, options: str) -> Any:
    return reasoning_gym.create_dataset(task, seed=0, size=1, **json.loads(options))
