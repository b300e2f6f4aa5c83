"""Temporal-difference losses of action values, on single transitions and on sequences of them.

A row of a replay buffer is one transition: state s (``observations``), action a, what was rewarded until s'
(``final_observations``), what the value of s' counts in the return (``discounts``: gamma to the number of steps, 0 where
the episode ended) and what the row counts in the loss (``weights``).

A row of several steps is a sequence: ``rewards`` are single ones, ``final_observations`` followed the last step, and
``discounts`` is 0 if the episode ended with it. It begins with what the policy that acted remembered (``memory``).

Shapes: N transitions, K actions, Z atoms, R sequences.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from hybridflow.core.errors import ContractError
from hybridflow.core.roles import Loss, columns

__all__ = ["TRANSITION", "bootstrapped", "c51_loss", "dqn_loss", "follow", "q_table_step", "recurrent_dqn_loss"]

TRANSITION = ("observations", "actions", "rewards", "discounts", "weights", "final_observations", "response_mask")
"""columns of a replayed transition"""


def bootstrapped(columns: Mapping[str, Tensor], next_values: Tensor) -> Tensor:
    """[..., N] rewards + discounts x ``next_values`` of final_observations, which count nothing where nothing follows.

    Pieces of several steps are a ContractError: a replay buffer makes transitions of them.
    """
    rewards, discounts = columns["rewards"], columns["discounts"]
    if len(discounts) != len(rewards):
        raise ContractError(f"{len(rewards)} steps in {len(discounts)} rows, but every row must be one transition")
    return rewards + torch.where(discounts > 0, discounts * next_values, 0.0)


@columns(reads=(), on="weights")
def follow(weights: Mapping[str, list[Tensor]], *, targets: Mapping[str, str], tau: float) -> None:
    """Move target networks towards those that they follow: target += tau (source - target) (Lillicrap et al. 2016).

    ``targets``: of each target the network that it follows.
    """
    for target, source in targets.items():
        torch._foreach_lerp_(weights[target], weights[source], tau)


@columns(reads=TRANSITION, writes=("td_errors",), on="networks")
def dqn_loss(
    networks: Mapping[str, Any],
    columns: Mapping[str, Tensor],
    *,
    double: bool = True,
    huber_delta: float | None = None,
) -> Loss:
    """Squared loss of Q-learning with a target network (Mnih et al. 2015), [N] single transitions.

        delta = Q(s, a) - (r + discount Q_target(s', a'))

    The loss is delta^2 / 2, beyond ``huber_delta`` linear. Linear means the median instead of the mean: with returns far
    above ``huber_delta``, rare ends of episodes hardly count and values come out too high.

    a' is the best action under Q_target, or with ``double`` under Q (van Hasselt et al. 2016). ``networks`` holds "q" and
    "target", [N, ...] -> [N, K].
    """
    following = columns["final_observations"]
    values = networks["q"](columns["observations"])
    with torch.no_grad():
        next_values = networks["target"](following)
        best = (networks["q"](following) if double else next_values).argmax(-1, keepdim=True)
        target = bootstrapped(columns, next_values.gather(-1, best).squeeze(-1))
    return _squared(values, target, columns["actions"], columns["weights"], huber_delta)


@columns(reads=(*TRANSITION, "memory"), writes=("td_errors",), on="networks")
def recurrent_dqn_loss(
    networks: Mapping[str, Any],
    columns: Mapping[str, Tensor],
    *,
    gamma: float,
    n_steps: int = 1,
    double: bool = True,
    huber_delta: float | None = None,
) -> Loss:
    """``dqn_loss`` of networks with a memory, [N] steps of R sequences (R2D2, Kapturowski et al. 2019, without its burn-in
    and its rescaling of values).

    Both networks are unrolled over a sequence and what followed it, from the memory with which it was collected. A step's
    rewards are added up over ``n_steps``, fewer where its sequence ends. ``networks``: "q" and "target", whose
    ``unroll_on`` gives [N + R, K].
    """
    rows, after = columns["row_index"], columns["final_observations"]
    lengths = torch.bincount(rows, minlength=len(after)).cpu().numpy()
    given = (columns["observations"], after, columns["memory"], lengths)
    values = networks["q"].unroll_on(*given)
    rewards, discounts, ahead = _summed(columns, gamma, n_steps)
    with torch.no_grad():
        next_values = networks["target"].unroll_on(*given)
        best = (values if double else next_values).argmax(-1, keepdim=True)
        following = next_values.gather(-1, best).squeeze(-1)[ahead + rows]
        target = rewards + torch.where(discounts > 0, discounts * following, 0.0)
    here = values[torch.arange(len(rows), device=rows.device) + rows]  # a final state is behind those of each row before
    return _squared(here, target, columns["actions"], columns["weights"][rows], huber_delta)


def _summed(columns: Mapping[str, Tensor], gamma: float, n_steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of each step [N]: discounted rewards of up to ``n_steps`` of its row, what the value of the state behind them counts,
    and which step that state is of; that of the next row's first step is what followed the row."""
    rows, rewards, counts = columns["row_index"], columns["rewards"], columns["discounts"]
    ends = torch.bincount(rows, minlength=len(counts)).cumsum(0)[rows]
    sums, discounts = torch.zeros_like(rewards), torch.ones_like(rewards)
    ahead = torch.arange(len(rows), device=rows.device)
    for _ in range(n_steps):
        goes_on = ahead < ends
        sums = sums + torch.where(goes_on, discounts * rewards[ahead.clamp(max=len(rows) - 1)], 0.0)
        discounts, ahead = torch.where(goes_on, discounts * gamma, discounts), ahead + goes_on.long()
    return sums, torch.where((ahead < ends) | (counts[rows] > 0), discounts, 0.0), ahead


def _squared(values: Tensor, target: Tensor, actions: Tensor, weights: Tensor, huber_delta: float | None) -> Loss:
    """The loss of ``values`` [N, K] at ``actions``."""
    chosen = values.gather(-1, actions[:, None]).squeeze(-1)
    errors = chosen - target
    fixed = errors.detach()
    terms = weights * _huber(errors, huber_delta)
    return Loss(terms, {"q": chosen.detach(), "td_error": fixed.abs()}, {"td_errors": fixed})


@columns(reads=TRANSITION, writes=("td_errors",), on="networks")
def c51_loss(networks: Mapping[str, Any], columns: Mapping[str, Tensor], *, double: bool = True) -> Loss:
    """Cross-entropy of the categorical distribution of returns to its target (Bellemare et al. 2017, algorithm 1).

    The target moves every atom z of the return after a' to r + discount z, within the outer atoms, and shares its
    probability out to the two atoms beside it. a' is as in ``dqn_loss``. ``td_errors``: the divergence KL(target || p).
    """
    following, q, target = columns["final_observations"], networks["q"], networks["target"]
    with torch.no_grad():
        best = (q if double else target)(following).argmax(-1)
        next_log_probs = _of_actions(target.log_probabilities(following), best)
        atoms = bootstrapped(columns, q.support[:, None]).T.clamp(q.support[0], q.support[-1])
        shares = _projected(atoms, next_log_probs.exp(), q.support)
    log_probs = _of_actions(q.log_probabilities(columns["observations"]), columns["actions"])
    terms = -(shares * log_probs).sum(-1)
    divergence = terms.detach() + torch.xlogy(shares, shares).sum(-1)
    chosen = (log_probs.detach().exp() * q.support).sum(-1)
    return Loss(columns["weights"] * terms, {"q": chosen, "td_error": divergence}, {"td_errors": divergence})


def _projected(atoms: Tensor, probabilities: Tensor, support: Tensor) -> Tensor:
    """[N, Z] probability of each atom of ``support``, of ``probabilities`` that stand at ``atoms`` [N, Z] between them."""
    width = support[1] - support[0]
    near = (1 - (atoms[:, :, None] - support).abs() / width).clamp(min=0)
    return torch.einsum("nz,nzj->nj", probabilities, near)


def _of_actions(x: Tensor, actions: Tensor) -> Tensor:
    """[N, Z] of [N, K, Z]."""
    return x.gather(1, actions[:, None, None].expand(-1, 1, x.shape[-1]))[:, 0]


def _huber(errors: Tensor, delta: float | None) -> Tensor:
    # The derivative is the clipped error, so that takes part as a constant.
    clipped = errors.detach() if delta is None else errors.detach().clamp(-delta, delta)
    return clipped * (errors - clipped / 2)


@columns(reads=("observations", "actions", "rewards", "terminated", "final_observations"), writes=("td_errors",), on="step")
def q_table_step(
    networks: Mapping[str, Any],
    columns: Mapping[str, Tensor],
    total: Callable[[Tensor], Tensor],
    *,
    gamma: float,
    alpha: float,
) -> Loss:
    """Q-learning (Watkins 1989) on the table [S, K] of the network "q", for rows of one transition each.

        Q(s, a) += alpha (r + gamma (1 - terminated) max Q(s', .) - Q(s, a))

    All transitions see the same table. If n of them are of the same state and action, that takes n such steps towards the
    mean of their targets: 1 - (1 - alpha)^n of the way. ``total`` sums a tensor over all that have some transitions.
    """
    table, rewards = networks["q"].table, columns["rewards"]
    if len(columns["terminated"]) != len(rewards):
        raise ContractError(f"{len(rewards)} steps in {len(columns['terminated'])} rows, but a row must be one transition")
    states, following = (networks["q"].states(columns[name]) for name in ("observations", "final_observations"))
    with torch.no_grad():
        targets = rewards + gamma * torch.where(columns["terminated"], 0.0, table[following].amax(-1))
        errors = targets - table[states, columns["actions"]]
        places = states * table.shape[1] + columns["actions"]
        sums = torch.zeros(2, table.numel(), device=table.device)
        sums = total(sums.index_add_(1, places, torch.stack([errors, torch.ones_like(errors)])))
        way = 1 - (1 - alpha) ** sums[1]
        table += (way * sums[0] / sums[1].clamp(min=1)).reshape(table.shape)
    return Loss(0.5 * errors**2, {"q": targets - errors, "td_error": errors.abs()}, {"td_errors": errors})
