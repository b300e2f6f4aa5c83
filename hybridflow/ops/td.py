"""Temporal-difference losses of action values."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from hybridflow.core.errors import ContractError
from hybridflow.core.roles import Loss, columns

__all__ = ["dqn_loss"]


@columns(
    reads=("observations", "actions", "rewards", "terminated", "final_observations", "response_mask"),
    writes=("td_errors",),
    on="networks",
)
def dqn_loss(
    networks: Mapping[str, nn.Module],
    columns: Mapping[str, Tensor],
    *,
    gamma: float,
    double: bool = True,
    huber_delta: float | None = None,
) -> Loss:
    """Squared loss of Q-learning with a target network (Mnih et al. 2015), [N] single transitions.

        delta = Q(s, a) - (r + gamma (1 - terminated) Q_target(s', a'))

    The loss is delta^2 / 2, beyond ``huber_delta`` linear. Linear means the median instead of the mean: with returns far
    above ``huber_delta``, rare ends of episodes hardly count and values come out too high.

    a' is the best action under Q_target, or with ``double`` under Q (van Hasselt et al. 2016). ``networks`` holds "q" and
    "target", [N, ...] -> [N, K]; ``final_observations`` are s'. Pieces of several steps are a ContractError: a replay
    buffer makes transitions of them.
    """
    following, rewards = columns["final_observations"], columns["rewards"]
    if len(following) != len(rewards):
        raise ContractError(
            f"dqn_loss: {len(rewards)} steps in {len(following)} rows, but every row must be one transition"
        )
    values = networks["q"](columns["observations"])
    chosen = values.gather(-1, columns["actions"][:, None])[:, 0]
    with torch.no_grad():
        next_values = networks["target"](following)
        best = (networks["q"](following) if double else next_values).argmax(-1, keepdim=True)
        bootstrap = torch.where(columns["terminated"], 0.0, next_values.gather(-1, best)[:, 0])
        target = rewards + gamma * bootstrap
    errors = (chosen - target).detach()
    terms = _huber(chosen - target, huber_delta)
    return Loss(terms, {"q": chosen.detach(), "td_error": errors.abs()}, {"td_errors": errors})


def _huber(errors: Tensor, delta: float | None) -> Tensor:
    clipped = errors if delta is None else errors.clamp(-delta, delta)
    return clipped * (errors - clipped / 2)
