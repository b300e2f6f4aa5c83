"""The export command: a policy as an ONNX file, with all that it needs, and checked against torch.

observations [B, ...] in the environment's type  ->  actions [B, ...] as environment.step takes them
memory [B, M], of a policy that has one          ->  next_memory [B, M], which the next step is given

Of several agents, who have one policy, a row is what one of them observes, and who it is where the policy is told that.
"""

from __future__ import annotations

import copy
import importlib.util
import logging
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hybridflow.core.batch import Array
from hybridflow.core.errors import ModelError, UserError
from hybridflow.core.seeding import derive
from hybridflow.models.layers import MLP
from hybridflow.models.multi_discrete import MultiCategoricalPolicy
from hybridflow.models.nets import QNet
from hybridflow.policy import Acting, Policy

__all__ = ["Check", "Step", "export", "needs_onnx", "run_onnx", "write_onnx"]

Step = Callable[[Array, Array], tuple[Array, Array]]
"""(observations [B, ...], memory [B, M]) -> (actions [B, ...], the memory afterwards)"""

NUM_OBSERVATIONS = 10_000
SCALES = (0.1, 1.0, 10.0, 100.0)
"""deviations of random observations where the space has no bounds"""
WIDEST = 1e6
MOST_REAL = 1000
CHUNK = 500
TOLERANCE = 1e-4
"""float32 sums in another order differ by less, relative to the larger of 1 and the number"""


@dataclass(frozen=True)
class Check:
    """How the file's actions compare with torch's on ``num_random`` and ``num_real`` observations: ``ties`` discrete ones
    differ where torch's two likeliest are equal within float error, continuous ones differ by ``difference`` at most.
    ``num_groups``: of agents, that many random ones of each."""

    num_random: int
    num_real: int
    ties: int
    difference: float
    num_groups: int = 1

    def __str__(self) -> str:
        each = f" for each of {self.num_groups} groups of agents" if self.num_groups > 1 else ""
        found = f"{self.num_random} random{each} and {self.num_real} real observations: the same actions as torch's"
        if self.ties:
            found += f", but for {self.ties} ties, equal within float error"
        return f"{found}, difference at most {self.difference:.2g}" if self.difference else found


def export(run: Path, file: Path) -> None:
    """Write the policy that ``run`` has exported to ``file``, whole and checked or not at all. ModelError: it acts
    differently there."""
    needs_onnx("export")
    if file.suffix != ".onnx":
        raise UserError(f"{file}: expected a name that ends in .onnx")
    policy = Policy.load(run)
    with tempfile.TemporaryDirectory(dir=file.parent if file.parent.is_dir() else None, prefix=".onnx-") as folder:
        made = Path(folder) / file.name
        write_onnx(policy, made, _metadata(policy))
        check = _checked(policy, run_onnx(made))
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(made.read_bytes())
    print(f"{file}: {file.stat().st_size} bytes, checked on {check}")


def needs_onnx(command: str) -> None:
    """UserError if a package of the extra is missing."""
    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f'{command}: needs {", ".join(missing)}, not installed here: pip install "hybridflow[export]"')


def write_onnx(policy: Policy, file: Path, metadata: dict[str, str]) -> None:
    """The policy as ONNX."""
    import onnx

    # A copy: tracing leaves tensors of its own in what modules cache.
    acting = copy.deepcopy(Acting(policy.network, policy.spaces[1])).eval()
    for module in acting.modules():
        if isinstance(module, MLP):
            module.twice_differentiable = True  # in plain operations
    example = [torch.from_numpy(_random_observations(policy, 2, np.random.default_rng(0)))]
    if policy.memory_size:
        example.append(torch.zeros(2, policy.memory_size))
    logger, batch = logging.getLogger("torch.onnx"), torch.export.Dim("batch")
    level = logger.level
    try:
        logger.setLevel(logging.ERROR)  # it misses torchvision
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch about itself
            program = torch.onnx.export(
                acting,
                tuple(example),
                dynamo=True,
                verbose=False,
                input_names=["observations", "memory"][: len(example)],
                output_names=["actions", "next_memory"][: len(example)],
                dynamic_shapes=[{0: batch}] * len(example),
            )
    finally:
        logger.setLevel(level)
    assert program is not None
    model = program.model_proto
    onnx.helper.set_model_props(model, metadata)
    for node in model.graph.node:
        node.ClearField("metadata_props")  # where in the source it comes from, with paths of this machine
    onnx.checker.check_model(model)
    onnx.save(model, str(file))


def run_onnx(file: Path) -> Step:
    """What the file computes, by ONNX Runtime on one thread: observations [B, ...] and memory [B, M] -> actions [B, ...]
    and the memory afterwards."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])

    remembers = len(session.get_inputs()) == 2

    def run(observations: Array, memory: Array) -> tuple[Array, Array]:
        if not remembers:
            return session.run(None, {"observations": observations})[0], memory
        actions, after = session.run(None, {"observations": observations, "memory": memory})
        return actions, after

    return run


def _metadata(policy: Policy) -> dict[str, str]:
    """What the file tells of itself."""
    observed, done = policy.spaces
    agents = {} if policy.agents is None else {"agents": ", ".join(policy.agents.names)}
    return {
        "environment": policy.environment.id,
        "algorithm": policy.config.algorithm,
        "observation_space": str(observed),
        "action_space": str(done),
        "policy_version": str(policy.version),
        "hybridflow_version": version("hybridflow"),
        **agents,
    }


def _checked(policy: Policy, run: Step) -> Check:
    """On one episode, and on random observations, side by side and, for what is remembered, one after another."""
    rng, groups = np.random.default_rng(derive(policy.config.seed, "export")), _groups(policy)
    chunks = range(NUM_OBSERVATIONS // CHUNK)
    drawn = [[_random_observations(policy, CHUNK, rng, group) for _ in chunks] for group in groups]
    shown = [policy.rows(moment.observation) for moment in islice(policy.episode(0), MOST_REAL)]
    ties, difference = 0, 0.0
    for sequence in (*drawn, shown):
        memory = np.zeros((len(sequence[0]), policy.memory_size), np.float32)
        for observations in sequence:
            (expected, after), (found, found_after) = policy.step(observations, memory), run(observations, memory)
            difference = max(difference, _difference(after, found_after))
            if policy.acting.numbered:
                ties += _ties(policy, (observations, memory), expected, found)
            else:
                difference = max(difference, _difference(expected, found))
            memory = after
    return Check(NUM_OBSERVATIONS, sum(map(len, shown)), ties, difference, len(groups))


def _difference(expected: Array, found: Array) -> float:
    """The largest between continuous actions, or memories. ModelError: it is more than float error."""
    _same_kind(expected, found)
    off = np.abs(found.astype(np.float64) - expected)
    if not np.all(off <= TOLERANCE * np.maximum(1, np.abs(expected))):
        raise ModelError(f"what the ONNX file computes differs from torch's by up to {off.max():.3g}: not written")
    return float(off.max(initial=0.0))


def _same_kind(expected: Array, found: Array) -> None:
    if expected.dtype != found.dtype or expected.shape != found.shape:
        what = f"{found.dtype} {found.shape}, torch's are {expected.dtype} {expected.shape}"
        raise ModelError(f"the ONNX file's actions are {what}: not written")


def _ties(policy: Policy, given: tuple[Array, Array], expected: Array, found: Array) -> int:
    """How many discrete actions differ where both are equally good. ModelError: elsewhere, too."""
    _same_kind(expected, found)
    rows = np.flatnonzero((expected != found).reshape(len(found), -1).any(1))
    if not len(rows):
        return 0
    start = policy.spaces[1].start
    observations, memory = (torch.from_numpy(part[rows]) for part in given)
    values = _preferences(policy.network, observations, memory)
    gap = _gap(policy.network, values, expected[rows] - start, found[rows] - start)
    if not np.all(gap <= TOLERANCE):
        raise ModelError(f"{len(rows)} of the ONNX file's actions differ from torch's in {len(found)}: not written")
    return len(rows)


def _preferences(network: Any, observations: Tensor, memory: Tensor) -> Array:
    """[B, K] of which torch takes the highest."""
    with torch.inference_mode():
        if isinstance(network, QNet):
            values, _ = network.advance(observations, memory)
        else:
            values = network.step(observations, memory)[0].log_probabilities
    preferences: Array = values.double().numpy()
    return preferences


def _gap(network: Any, values: Array, chosen: Array, other: Array) -> Array:
    """[B] how much higher ``values`` [B, K] are at ``chosen`` than at ``other``, relative to the larger of 1 and them."""
    sizes = network.sizes if isinstance(network, MultiCategoricalPolicy) else (values.shape[1],)
    starts = np.cumsum([0, *sizes[:-1]])
    columns = (np.reshape(numbers, (len(values), -1)) + starts for numbers in (chosen, other))
    better, worse = (np.take_along_axis(values, column, 1) for column in columns)
    sizes_of = np.abs(np.where(np.isfinite(values), values, 0))  # what is impossible has no size
    gap: Array = ((better - worse) / np.maximum(1, sizes_of.max(1, keepdims=True))).max(1)
    return gap


def _groups(policy: Policy) -> list[list[int]]:
    """The agents of each, by number; one group of one where there are no others."""
    return [[0]] if policy.agents is None else policy.agents.groups


def _random_observations(policy: Policy, count: int, rng: np.random.Generator, group: Sequence[int] = (0,)) -> Array:
    """[count, ...] of the agents of a ``group``, one after another."""
    agents = policy.agents
    if agents is None or not agents.numbered:
        return _random(policy.spaces[0], count, rng)
    rows = np.zeros((count, *policy.spaces[0].shape), policy.spaces[0].dtype)
    own = _random(agents.observed[group[0]], count, rng)
    rows[:, : own.shape[1]] = own
    rows[np.arange(count), agents.width + np.resize(group, count)] = 1
    return rows


def _random(space: Any, count: int, rng: np.random.Generator) -> Array:
    """[count, ...] from the space; of several scales where it has no bounds, or such that no environment means them."""
    space = copy.deepcopy(space)
    space.seed(int(rng.integers(2**31)))
    drawn = np.array([space.sample() for _ in range(count)], space.dtype)
    if not np.issubdtype(space.dtype, np.floating):
        return drawn
    low, high = (np.asarray(bound, np.float64) for bound in (space.low, space.high))
    scales = rng.choice(SCALES, count).reshape(-1, *[1] * len(space.shape))
    normal = np.clip(rng.standard_normal(drawn.shape) * scales, low, high)
    return np.where(high - low < WIDEST, drawn, normal).astype(space.dtype)
