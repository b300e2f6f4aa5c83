"""Networks with a memory: the same from step to step and over whole pieces, wherever episodes are cut."""

from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.core.batch import Batch, Ragged
from hybridflow.core.errors import ContractError
from hybridflow.models.continuous import SquashedGaussianPolicy
from hybridflow.models.memory import memory_size
from hybridflow.models.multi_discrete import MultiCategoricalPolicy
from hybridflow.models.nets import CategoricalPolicy, GaussianPolicy, NetConfig, make_policy
from hybridflow.models.values import ValueNet

KINDS = ("gru", "lstm", "attention")
SPACES = {
    "box": spaces.Box(-1, 1, (3,), np.float32),
    "discrete": spaces.Discrete(5, start=2),
    "image": spaces.Box(0, 255, (7, 7, 3), np.uint8),
}
STEPS = 9


def net_of(kind: str, **keys: object) -> NetConfig:
    return NetConfig.model_validate(
        {"kind": kind, "hidden": [8, 12], **({"context": 4} if kind == "attention" else {}), **keys}
    )


def policy_of(kind: str, space: spaces.Space = SPACES["box"], **keys: object) -> CategoricalPolicy:
    made = make_policy(space, spaces.Discrete(3), net_of(kind, **keys), torch.Generator().manual_seed(0))
    assert isinstance(made, CategoricalPolicy)
    with torch.no_grad():
        made.mlp.layers[-1].weight.mul_(100)  # the small gain of a policy's head would hide differences
    return made


def observations_of(space: spaces.Space, episodes: int, steps: int = STEPS) -> np.ndarray:
    space.seed(1)
    return np.array([[space.sample() for _ in range(steps)] for _ in range(episodes)])


@torch.no_grad()
def stepped(policy: CategoricalPolicy, observations: np.ndarray) -> tuple[torch.Tensor, np.ndarray]:
    """Log-probabilities [E, T, K] of episodes side by side, and the memories [E, T, M] before each step."""
    memory, seen, given = torch.zeros(len(observations), policy.memory_size), [], []
    for now in observations.swapaxes(0, 1):
        given.append(memory.numpy().copy())
        distribution, memory = policy.step(torch.from_numpy(now), memory)
        seen.append(distribution.log_probabilities)
    return torch.stack(seen, 1), np.stack(given, 1)


def rows_of(observations: np.ndarray, memories: np.ndarray, cuts: list[list[int]]) -> Batch:
    """The episodes, each cut before the steps ``cuts``."""
    ends = [[0, *sorted(set(cut)), STEPS] for cut in cuts]
    pieces = [(e, a, b) for e, cut in enumerate(ends) for a, b in pairwise(cut)]
    lengths = np.array([b - a for _, a, b in pieces])
    like = partial(Ragged, lengths=lengths)
    return Batch(
        {
            "observations": like(np.concatenate([observations[e, a:b] for e, a, b in pieces])),
            "response_mask": like(np.ones(lengths.sum(), bool)),
            "actions": like(np.arange(lengths.sum()) % 3),
            "memory": np.stack([memories[e, a] for e, a, _ in pieces]),
            "final_observations": np.stack([observations[e, min(b, STEPS - 1)] for e, _, b in pieces]),
        }
    )


cuts_of_two = st.lists(st.lists(st.integers(1, STEPS - 1), max_size=4), min_size=2, max_size=2)


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=8, deadline=None)
@given(cuts=cuts_of_two)
def test_what_is_learned_from_is_what_acted_wherever_episodes_are_cut(kind: str, space: str, cuts: list[list[int]]) -> None:
    policy, observations = policy_of(kind, SPACES[space]), observations_of(SPACES[space], 2)
    acted, memories = stepped(policy, observations)
    assert policy.unit == "row" and "memory" in policy.inputs
    assert memories.shape[2] == policy.memory_size == memory_size(SPACES[space], net_of(kind)) > 0
    assert not np.array_equal(memories[0, 3], memories[0, 4])
    with torch.no_grad():
        unrolled = policy.head(policy.learned(rows_of(observations, memories, cuts))).log_probabilities
    torch.testing.assert_close(unrolled, acted.flatten(0, 1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_masked_steps_are_remembered_and_not_learned_from(kind: str) -> None:
    policy, observations = policy_of(kind), observations_of(SPACES["box"], 2)
    batch = rows_of(observations, stepped(policy, observations)[1], [[4], []])
    mask = batch.ragged("response_mask").values.copy()
    mask[[0, 5, 6]] = False
    masked = batch.with_columns(response_mask=batch.ragged("response_mask").like(mask))
    all_of, some = policy.outputs(batch)["log_probs"], policy.outputs(masked)["log_probs"]
    assert len(some) == len(mask) - 3
    torch.testing.assert_close(some, all_of[torch.from_numpy(mask)])


@pytest.mark.parametrize("kind", KINDS)
def test_rows_know_nothing_of_each_other(kind: str) -> None:
    policy, observations = policy_of(kind), observations_of(SPACES["box"], 3)
    batch = rows_of(observations, stepped(policy, observations)[1], [[2, 3], [], [7]])
    whole = batch.ragged("response_mask").like(policy.outputs(batch)["log_probs"].detach().numpy())
    for row in range(len(batch)):
        alone = policy.outputs(batch.rows([row]))["log_probs"].detach().numpy()
        np.testing.assert_allclose(alone, whole.rows(np.array([row])).values, atol=1e-5)


def test_attention_sees_the_last_observations_and_no_others() -> None:
    policy, observations = policy_of("attention"), observations_of(SPACES["box"], 1)
    for changed, differs in ((4, False), (5, True), (7, True)):  # context 4: step 8 sees 5, 6, 7 and itself
        other = observations.copy()
        other[0, changed] += 1
        same = torch.equal(stepped(policy, other)[0][0, 8], stepped(policy, observations)[0][0, 8])
        assert same != differs


def test_attention_tells_observations_apart_by_their_age() -> None:
    policy, observations = policy_of("attention"), observations_of(SPACES["box"], 1)
    swapped = observations[:, [0, 1, 2, 3, 4, 6, 5, 7, 8]]
    of = lambda seen: stepped(policy, seen)[0][0, 8]  # noqa: E731
    torch.testing.assert_close(of(swapped), of(observations))
    with torch.no_grad():
        policy.memory.ages.normal_(generator=torch.Generator().manual_seed(0))
    assert not torch.allclose(of(swapped), of(observations))


@pytest.mark.parametrize("kind", KINDS)
def test_every_weight_learns(kind: str) -> None:
    space = SPACES["image"]
    policy, observations = policy_of(kind, space, normalise=True), observations_of(space, 2)
    batch = rows_of(observations, stepped(policy, observations)[1], [[4], []])
    outputs = policy.outputs(batch)
    (outputs["log_probs"] * torch.arange(len(outputs["log_probs"]))).sum().backward()
    still = {name for name, p in policy.named_parameters() if p.grad is None or not p.grad.any()}
    assert still <= {"memory.keys.layers.0.bias"}  # softmax: what all keys have in common says nothing


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_critic_begins_with_what_the_actor_remembers(kind: str) -> None:
    policy, observations = policy_of(kind), observations_of(SPACES["box"], 2)
    memories = stepped(policy, observations)[1]
    width = {"gru": 6, "lstm": 6, "attention": 12}[kind]
    value = ValueNet(
        SPACES["box"],
        net_of(kind, hidden=[8, width]),
        torch.Generator().manual_seed(1),
        policy_memory_size=policy.memory_size,
    )
    pieces = rows_of(observations, memories, [[5], []])
    values = pieces.ragged("response_mask").like(value.outputs(pieces)["values"].numpy())
    forgot = pieces.with_columns(memory=np.zeros_like(pieces["memory"]))
    without = pieces.ragged("response_mask").like(value.outputs(forgot)["values"].numpy())
    np.testing.assert_array_equal(values[0], without[0])  # the beginning of an episode
    assert not np.allclose(values[1], without[1])


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_the_last_value_is_one_more_step(kind: str) -> None:
    policy, observations = policy_of(kind), observations_of(SPACES["box"], 2)
    memories = stepped(policy, observations)[1]
    value = ValueNet(SPACES["box"], net_of(kind), torch.Generator().manual_seed(1), policy_memory_size=policy.memory_size)
    cut, whole = (rows_of(observations, memories, cuts) for cuts in ([[5], [3]], [[], []]))
    in_time = whole.ragged("response_mask").like(value.outputs(whole)["values"].numpy())
    after = value.bootstrap(cut).numpy()
    np.testing.assert_allclose(after[[0, 2]], [in_time[0][5], in_time[1][3]], atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_all_heads_step(kind: str) -> None:
    box, net, random = spaces.Box(-1, 1, (2,), np.float32), net_of(kind), torch.Generator().manual_seed(0)
    heads = (
        GaussianPolicy(SPACES["box"], (2,), net, random),
        SquashedGaussianPolicy(SPACES["box"], box, net, random),
        MultiCategoricalPolicy(SPACES["box"], spaces.MultiDiscrete([2, 3]), net, random),
    )
    for policy in heads:
        nothing = torch.zeros(5, policy.memory_size)
        _, memory = policy.step(-torch.ones(5, 3), nothing)
        first, second = (policy.step(torch.ones(5, 3), known)[0] for known in (nothing, memory))
        assert first.mode.shape == (5, 2) and first.log_prob(first.mode).shape == (5,)
        assert not torch.equal(first.log_prob(first.mode), second.log_prob(first.mode))


def test_a_memory_is_not_forgotten_by_mistake() -> None:
    with pytest.raises(ContractError, match="has a memory; call step"):
        policy_of("gru").distribution(torch.zeros(1, 3))


@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_gates_are_orthogonal(kind: str) -> None:
    memory = policy_of(kind).memory
    matrices = [p for name, p in memory.named_parameters() if p.dim() == 2 and name not in ("ages", "mlp.layers.0.weight")]
    parts = [part for p in matrices for part in torch.split(p.detach(), 12)]
    assert len(parts) >= 6
    for part in parts:
        square = part @ part.T if part.shape[0] <= part.shape[1] else part.T @ part
        scale = float(square[0, 0])
        torch.testing.assert_close(square, scale * torch.eye(len(square)), atol=1e-5, rtol=1e-5)
    if kind == "lstm":
        assert memory.cells.bias_ih_l0.tolist() == [0.0] * 12 + [1.0] * 12 + [0.0] * 24
