"""Confidence intervals, and the result file of an evaluation."""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridflow.core.files import write_whole
from hybridflow.telemetry.records import to_json

__all__ = ["mean_interval", "wilson_interval", "write_result"]


def wilson_interval(successes: float, count: int, confidence: float = 0.95) -> tuple[float, float]:
    """(low, high) of a success rate: the score interval of Wilson (1927), which also holds near 0 and 1.

    Without observations it is (0, 1).
    """
    if not 0 <= successes <= count:
        raise ValueError(f"{successes} successes of {count}: expected 0 <= successes <= count")
    if count == 0:
        return 0.0, 1.0
    z = statistics.NormalDist().inv_cdf((1 + confidence) / 2)
    rate, spread = successes / count, z * z / count
    center = (rate + spread / 2) / (1 + spread)
    margin = math.sqrt(rate * (1 - rate) * spread + spread * spread / 4) / (1 + spread)
    # the ends are exact at 0 and 1; rounding must not push them past the rate
    low = 0.0 if successes == 0 else center - margin
    high = 1.0 if successes == count else center + margin
    return low, high


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float, float]:
    """(mean, low, high) by Student's t distribution with n - 1 degrees of freedom; n = 1 gives (value, -inf, inf)."""
    count = len(values)
    if count == 0:
        raise ValueError("the mean of no values: expected at least one")
    mean = math.fsum(values) / count
    if count == 1:
        return mean, -math.inf, math.inf
    margin = _t_quantile(confidence, count - 1) * statistics.stdev(values) / math.sqrt(count)
    return mean, mean - margin, mean + margin


def write_result(run_dir: Path, result: Mapping[str, Any]) -> Path:
    """Put the entries of ``result`` into the run's ``result.json``, beside those that it has; numbers that are not finite
    become null."""
    path = Path(run_dir) / "result.json"
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    write_whole(path, (to_json({**before, **result}, indent=2) + "\n").encode())
    return path


def _t_quantile(confidence: float, freedom: int) -> float:
    """t with P(|T| < t) = confidence. Abramowitz & Stegun: bisection on 26.7.3 and 26.7.4; above 100, 26.7.5."""
    z = statistics.NormalDist().inv_cdf((1 + confidence) / 2)
    if freedom > 100:
        second = (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
        return z + (z**3 + z) / (4 * freedom) + second
    low, high = 0.0, math.pi / 2
    while high - low > 1e-15:
        middle = (low + high) / 2
        low, high = (middle, high) if _t_probability(middle, freedom) < confidence else (low, middle)
    return math.sqrt(freedom) * math.tan((low + high) / 2)


def _t_probability(angle: float, freedom: int) -> float:
    """P(|T| < sqrt(freedom) tan(angle)): a finite series in the cosine."""
    odd = freedom % 2
    term, total = (math.cos(angle), math.cos(angle)) if odd else (1.0, 1.0)
    for k in range(2 + odd, freedom - 1, 2):
        term *= (k - 1) / k * math.cos(angle) ** 2
        total += term
    if odd:
        return 2 / math.pi * (angle + math.sin(angle) * (total if freedom > 1 else 0.0))
    return math.sin(angle) * total
