"""Losses of off-policy actor-critic methods: SAC, TD3 and DDPG, on single transitions (see ``td``).

Networks by name: "policy"; "critic" and "target_critic", ensembles of E action values; "temperature" (SAC) and
"target_policy" (TD3, DDPG). Policies' losses are differentiated through the critic, which has no gradients meanwhile.

Shapes: E members, N transitions, K actions.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hybridflow.core.roles import Loss, columns
from hybridflow.ops.td import TRANSITION, bootstrapped

__all__ = [
    "deterministic_policy_loss",
    "discrete_sac_critic_loss",
    "discrete_sac_policy_loss",
    "sac_critic_loss",
    "sac_policy_loss",
    "td3_critic_loss",
]

Networks = Mapping[str, Any]
Tensors = Mapping[str, Tensor]
Params = Mapping[str, Any]
STATE = ("observations", "actions", "weights", "response_mask")


def _adapting(params: Params) -> tuple[str, ...]:
    return ("policy",) if params["target_entropy"] is None else ("policy", "temperature")


def _squared(values: Tensor, target: Tensor, columns: Tensors) -> Loss:
    """Sum over the ensemble of squared errors / 2: ``values`` [E, N] against ``target`` [N]."""
    errors = values - target
    terms = columns["weights"] / 2 * (errors * errors).sum(0)  # a power's backward pass takes longer
    mean = errors.detach().mean(0)
    return Loss(terms, {"q": values.detach().mean(0), "td_error": mean.abs()}, {"td_errors": mean})


def _adapted(terms: Tensor, entropy: Tensor, networks: Networks, target_entropy: float | None) -> Loss:
    """Adds the temperature's loss, log alpha x (entropy - target): it rises while the ``entropy`` [N] is too low (Haarnoja
    et al. 2018, eq. 18, on the logarithm)."""
    temperature, entropy = networks["temperature"], entropy.detach()
    metrics = {"entropy": entropy, "temperature": temperature().detach()}
    if target_entropy is not None:
        terms = terms + temperature.log * (entropy - target_entropy)
    return Loss(terms, metrics)


@columns(reads=TRANSITION, writes=("td_errors",), on="networks", trains=("critic",), noise=True)
def sac_critic_loss(networks: Networks, columns: Tensors) -> Loss:
    """Soft action values (Haarnoja et al. 2018, eq. 5 and 6), the target's the smaller of the target ensemble:

    delta = Q(s, a) - (r + discount (min Q_target(s', a') - alpha log pi(a' | s'))),   a' ~ pi(. | s')
    """
    following = columns["final_observations"]
    with torch.no_grad():
        actions, log_probs = networks["policy"].distribution(following).draw(columns["noise"])
        soft = networks["target_critic"](following, actions).amin(0) - networks["temperature"]() * log_probs
        target = bootstrapped(columns, soft)
    return _squared(networks["critic"](columns["observations"], columns["actions"]), target, columns)


@columns(reads=STATE, on="networks", trains=_adapting, noise=True)
def sac_policy_loss(networks: Networks, columns: Tensors, target_entropy: float | None) -> Loss:
    """alpha log pi(a | s) - min Q(s, a), a reparametrised (Haarnoja et al. 2018, eq. 9), and with a ``target_entropy`` the
    temperature's loss (eq. 18), whose gradients have nothing in common. Metrics: ``entropy``, ``temperature``."""
    observations = columns["observations"]
    actions, log_probs = networks["policy"].distribution(observations).draw(columns["noise"])
    value = networks["critic"](observations, actions).amin(0)
    terms = networks["temperature"]().detach() * log_probs - value
    return _adapted(terms, -log_probs, networks, target_entropy)


@columns(reads=TRANSITION, writes=("td_errors",), on="networks", trains=("critic",))
def discrete_sac_critic_loss(networks: Networks, columns: Tensors) -> Loss:
    """``sac_critic_loss`` with the expectation over K actions instead of a drawn one (Christodoulou 2019, eq. 10)."""
    with torch.no_grad():
        log_probs = networks["policy"].distribution(columns["final_observations"]).log_probabilities
        soft = networks["target_critic"](columns["final_observations"]).amin(0) - networks["temperature"]() * log_probs
        target = bootstrapped(columns, (log_probs.exp() * soft).sum(-1))
    values = networks["critic"](columns["observations"])
    chosen = values.gather(-1, columns["actions"].expand(len(values), -1)[..., None])[..., 0]
    return _squared(chosen, target, columns)


@columns(reads=STATE, on="networks", trains=_adapting)
def discrete_sac_policy_loss(networks: Networks, columns: Tensors, target_entropy: float | None) -> Loss:
    """``sac_policy_loss`` with the expectation over K actions (Christodoulou 2019, eq. 12 and 11)."""
    log_probs = networks["policy"].distribution(columns["observations"]).log_probabilities
    with torch.no_grad():
        values = networks["critic"](columns["observations"]).amin(0)
    probabilities = log_probs.exp()
    terms = (probabilities * (networks["temperature"]().detach() * log_probs - values)).sum(-1)
    return _adapted(terms, -(probabilities * log_probs).sum(-1), networks, target_entropy)


@columns(reads=TRANSITION, writes=("td_errors",), on="networks", trains=("critic",), noise=True)
def td3_critic_loss(networks: Networks, columns: Tensors, smoothing: float, smoothing_clip: float) -> Loss:
    """Clipped double Q-learning with target policy smoothing (Fujimoto et al. 2018, algorithm 1):

        delta = Q(s, a) - (r + discount min Q_target(s', clip(pi_target(s') + clip(noise, +-smoothing_clip))))

    ``smoothing``: the noise's deviation; both are in units of actions, half the width of their bounds. With one critic and
    without smoothing it is DDPG's loss (Lillicrap et al. 2016).
    """
    following = columns["final_observations"]
    with torch.no_grad():
        offsets = (smoothing * columns["noise"]).clamp(-smoothing_clip, smoothing_clip)
        actions = networks["target_policy"].perturbed(following, offsets)
        target = bootstrapped(columns, networks["target_critic"](following, actions).amin(0))
    return _squared(networks["critic"](columns["observations"], columns["actions"]), target, columns)


@columns(reads=STATE, on="networks", trains=("policy",))
def deterministic_policy_loss(networks: Networks, columns: Tensors) -> Loss:
    """-Q(s, pi(s)) of the first critic (Silver et al. 2014; TD3, DDPG)."""
    observations = columns["observations"]
    return Loss(-networks["critic"](observations, networks["policy"].perturbed(observations), 1)[0], {})
