"""Devices, machines and links that a run could have, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Cluster", "Device", "Machine"]


@dataclass(frozen=True)
class Device:
    """``flops``: peak of dense matrix products by dtype ("bfloat16", "float32"), in FLOP/s. ``memory_bytes`` and its
    ``bandwidth`` in bytes/s. ``price``: of an hour, in any currency; 0 if unknown."""

    name: str
    flops: Mapping[str, float]
    memory_bytes: float
    bandwidth: float
    price: float = 0.0


@dataclass(frozen=True)
class Machine:
    """``devices`` equal ones, each joined with the others by a ``link`` (bytes/s in one direction, of a device), and all of
    them with other machines by a ``network`` (bytes/s in one direction, of the machine). Latencies in seconds a message."""

    device: Device
    devices: int
    link: float
    network: float
    link_latency_s: float
    network_latency_s: float


@dataclass(frozen=True)
class Cluster:
    """(how many, of which machine). A pool is on machines of one kind."""

    machines: tuple[tuple[int, Machine], ...]

    @property
    def devices(self) -> int:
        return sum(number * machine.devices for number, machine in self.machines)
