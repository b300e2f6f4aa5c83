"""Seconds of collectives and messages over the links of a pool's machines."""

from __future__ import annotations

from math import ceil, log2

from hybridflow.planner.cluster import Machine

__all__ = ["Links"]


class Links:
    """Of a pool of ``machine``s. ``link`` and ``network``: the share of their bandwidths that is reached.

    Neighbouring ranks are in one machine. A machine's devices share its network, and whatever they send each other stays
    on its links, so that of a ring over several machines each network carries the data once.
    """

    __slots__ = ("devices", "link", "link_latency", "network", "network_latency")

    def __init__(self, machine: Machine, link: float, network: float) -> None:
        self.devices = machine.devices
        self.link, self.network = 1 / (machine.link * link), 1 / (machine.network * network)
        self.link_latency, self.network_latency = machine.link_latency_s, machine.network_latency_s

    def all_reduce(self, size: float, ranks: int) -> float:
        """Of ``size`` bytes on each of ``ranks`` of one machine: every byte goes round a ring twice, in messages up and
        down a tree if it is short."""
        if ranks == 1:
            return 0.0
        return 2 * (ranks - 1) / ranks * size * self.link + 2 * ceil(log2(ranks)) * self.link_latency

    def message(self, size: float, block: int) -> float:
        """Between two neighbouring stages of a pipeline of ``block`` ranks."""
        if block <= self.devices:
            return size * self.link + self.link_latency
        return size * self.network + self.network_latency

    def ring(self, size: float, block: int, ranks: int) -> float:
        """A reduce-scatter, or an all-gather, of ``size`` bytes over ``ranks`` that are ``block`` apart, beside the like of
        the ``block`` ranks between them: first over those in a machine, then the parts of it between machines."""
        if ranks == 1:
            return 0.0
        inside = min(ranks, max(1, self.devices // block))
        machines = ceil(ranks / inside)
        seconds = (inside - 1) / inside * size * self.link
        if machines > 1:
            rings = min(block, self.devices)  # all that a machine has of the block goes through its network
            seconds += (machines - 1) / machines * size * rings * self.network + ceil(log2(machines)) * self.network_latency
        return seconds + (ceil(log2(inside)) * self.link_latency if inside > 1 else 0.0)
