"""A policy whose weights change while it acts."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from served_policies import acting, asked, observations, weights

from hybridflow.core.errors import ModelError
from hybridflow.serving.served import ServedPolicy


def test_an_observation_has_its_action_in_any_batch() -> None:
    served, seen = ServedPolicy(acting()), observations(70)
    alone = np.concatenate([served.act(asked(one[None])).actions for one in seen])
    np.testing.assert_array_equal(alone[0], acting()(torch.from_numpy(seen[:1]))[0].numpy())
    for size in (2, 3, 8, 64, 70):
        np.testing.assert_allclose(served.act(asked(seen[:size])).actions, alone[:size], atol=1e-6)
    assert np.ptp(alone, axis=0).min() > 1  # of 4


def test_an_update_changes_the_policy_and_its_version_together() -> None:
    served, seen = ServedPolicy(acting(0), 3), observations(5)
    before, new = served.act(asked(seen)), weights(1)
    served.update(new, 4)
    after = served.act(asked(seen))
    assert (before.version, after.version, served.version) == (3, 4, 4)
    np.testing.assert_array_equal(after.actions, ServedPolicy(acting(1)).act(asked(seen)).actions)
    assert not np.array_equal(before.actions, after.actions)
    for tensor in new.values():
        tensor.zero_()  # a training goes on with its own weights
    np.testing.assert_array_equal(served.act(asked(seen)).actions, after.actions)


def test_what_is_served_is_a_copy() -> None:
    made, seen = acting(0), observations(5)
    served = ServedPolicy(made)
    before = served.act(asked(seen)).actions
    made.network.mlp.layers[0].weight.zero_()
    np.testing.assert_array_equal(served.act(asked(seen)).actions, before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"log_std": None}, "version 9: weight log_std: found none, expected shape (2,) of the policy served"),
        ({"more": torch.zeros(1)}, "version 9: weight more: found shape (1,), expected none of the policy served"),
        (
            {"log_std": torch.zeros(3)},
            "version 9: weight log_std: found shape (3,), expected shape (2,) of the policy served",
        ),
        (
            {"log_std": torch.tensor([0, torch.nan])},
            "version 9: weight log_std is not finite; expected a policy that can act",
        ),
    ],
)
def test_weights_that_do_not_fit_leave_the_policy_as_it_is(change: dict[str, torch.Tensor | None], message: str) -> None:
    served, seen = ServedPolicy(acting(0), 1), observations(4)
    before = served.act(asked(seen))
    wrong = {name: value for name, value in {**weights(1), **change}.items() if value is not None}
    with pytest.raises(ModelError) as caught:
        served.update(wrong, 9)
    assert str(caught.value) == message
    np.testing.assert_array_equal(served.act(asked(seen)).actions, before.actions)
    assert served.version == 1


def test_every_answer_is_of_one_version_while_threads_update() -> None:
    seen, versions = observations(16), 40
    expected = [ServedPolicy(acting(seed)).act(asked(seen)).actions for seed in range(versions)]
    served, made = ServedPolicy(acting(0)), [weights(seed) for seed in range(versions)]
    updates = threading.Thread(target=lambda: [served.update(one, version) for version, one in enumerate(made)])
    updates.start()
    answers = [served.act(asked(seen))]
    while updates.is_alive():
        answers.append(served.act(asked(seen)))
    answers.append(served.act(asked(seen)))
    for actions, version, _ in answers:
        np.testing.assert_array_equal(actions, expected[version])
    told = [answer.version for answer in answers]
    assert told == sorted(told) and told[-1] == versions - 1 and len(set(told)) > 2
