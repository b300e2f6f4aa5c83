import numpy as np
import pytest
import torch

from hybridflow.core.errors import ContractError
from hybridflow.models.nets import QTable
from hybridflow.ops.td import q_table_step


def columns(states, actions, rewards, following, terminated):
    return {
        "observations": torch.tensor(states),
        "actions": torch.tensor(actions),
        "rewards": torch.tensor(rewards, dtype=torch.float32),
        "final_observations": torch.tensor(following),
        "terminated": torch.tensor(terminated),
    }


def move(table, seen, total=lambda x: x, alpha=0.25):
    return q_table_step({"q": table}, seen, total, gamma=0.5, alpha=alpha)


def test_one_transition_at_a_time_is_watkins_rule():
    rng, table, expected = np.random.default_rng(0), QTable(4, 3), np.zeros((4, 3))
    for _ in range(50):
        state, action, following, reward = rng.integers(4), rng.integers(3), rng.integers(4), rng.normal()
        ended = bool(rng.integers(2))
        target = reward + (0 if ended else 0.5 * expected[following].max())
        expected[state, action] += 0.25 * (target - expected[state, action])
        move(table, columns([state], [action], [reward], [following], [ended]))
    np.testing.assert_allclose(table.table.detach().numpy(), expected, atol=1e-6)


def test_equal_transitions_are_as_many_steps_and_other_values_stay():
    table = QTable(3, 2, start=5)
    result = move(table, columns([6, 6, 5], [1, 1, 0], [1.0, 1.0, 2.0], [7, 7, 7], [True, False, True]))
    expected = [[0.25 * 2, 0], [0, 1 - 0.75**2], [0, 0]]
    np.testing.assert_allclose(table.table.detach().numpy(), expected, atol=1e-6)
    assert result.columns["td_errors"].tolist() == [1, 1, 2]


def test_parts_that_are_summed_move_like_the_whole():
    seen = columns([0, 1, 0], [1, 0, 1], [1.0, 2.0, 3.0], [1, 1, 1], [False, True, True])
    whole, halves = QTable(2, 2), [QTable(2, 2), QTable(2, 2)]
    move(whole, seen)
    parts = [{name: x[rows] for name, x in seen.items()} for rows in ([0], [1, 2])]
    sums = []
    for table, part in zip(halves, parts, strict=True):
        move(table, part, lambda x: sums.append(x.clone()) or x)
    for table, part in zip((QTable(2, 2), QTable(2, 2)), parts, strict=True):
        move(table, part, lambda x: sums[0] + sums[1])
        torch.testing.assert_close(table.table, whole.table)


def test_rows_of_several_steps_are_refused():
    seen = columns([0, 1], [0, 0], [1.0, 1.0], [1, 1], [True])
    with pytest.raises(ContractError, match="one transition"):
        move(QTable(2, 2), seen)


def test_the_greedy_policy_draws_among_equals():
    table = QTable(2, 3)
    table.table.data[1, 2] = 1.0
    chances = table.distribution(torch.tensor([0, 1])).log_probabilities.exp()
    torch.testing.assert_close(chances, torch.tensor([[1 / 3] * 3, [0.0, 0.0, 1.0]]))
