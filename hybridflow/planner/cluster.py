"""Devices, machines and links that a run could have: as plain data, by name, from a file, or as measured here.

    a100-80g:16x8                    16 machines with 8 devices each
    a100-80g:16x8@1.5                ... of which each costs 1.5 an hour, in any currency
    a100-80g:2x8+h100:1x8            machines of several kinds
    here:1x2                         this machine, as ``hybridflow probe`` measured it, divided by two workers
    cluster.toml                     devices and machines of your own

Numbers of presets are those of data sheets: dense matrix products, links in one direction.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from hybridflow.core.config import Config, parse, read_toml
from hybridflow.core.errors import ConfigError
from hybridflow.planner.hardware import load_probe

__all__ = ["HERE", "PRESETS", "Cluster", "Device", "Machine", "conflicts", "machine_here", "parse_cluster"]


@dataclass(frozen=True)
class Device:
    """``flops``: peak of dense matrix products by dtype ("bfloat16", "float32"), in FLOP/s. ``memory_bytes`` and its
    ``bandwidth`` in bytes/s. ``price``: of an hour, in any currency; 0 if unknown. ``launch_s``: that kernels of a layer
    take to start and to end, some twenty of 5 µs on a GPU."""

    name: str
    flops: Mapping[str, float]
    memory_bytes: float
    bandwidth: float
    price: float = 0.0
    launch_s: float = 1e-4


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


# Latencies of a message: what NCCL's tuning takes for rings, 3.4 µs over NVLink, 5.7 over PCIe, 14 over networks.
def _machine(device: Device, devices: int, link: float, network: float, latency_s: float = 3.4e-6) -> Machine:
    return Machine(device, devices, link, network, latency_s, 14e-6)


PRESETS: dict[str, Machine] = {
    # SXM4; NVLink 3: 600 GB/s both ways; the network is that of the HybridFlow paper's testbed, 200 Gbit/s a machine.
    "a100-80g": _machine(Device("a100-80g", {"bfloat16": 312e12, "float32": 19.5e12}, 80e9, 2.039e12), 8, 300e9, 25e9),
    # SXM5; NVLink 4: 900 GB/s both ways; the network is that of a DGX: 400 Gbit/s a device.
    "h100": _machine(Device("h100", {"bfloat16": 989.4e12, "float32": 66.9e12}, 80e9, 3.35e12), 8, 450e9, 400e9),
    "h200": _machine(Device("h200", {"bfloat16": 989.4e12, "float32": 66.9e12}, 141e9, 4.8e12), 8, 450e9, 400e9),
    # PCIe 4 x16: 64 GB/s both ways, no NVLink; 200 Gbit/s a machine.
    "l40s": _machine(Device("l40s", {"bfloat16": 362.05e12, "float32": 91.6e12}, 48e9, 864e9), 8, 32e9, 25e9, 5.7e-6),
    # A socket of a Xeon Platinum 8480+ at 2 GHz, its base clock: 56 cores with AMX (2,048 FLOPs a clock) and AVX-512 (64),
    # eight channels of DDR5-4800, 256 GB; sockets joined by one UPI 2.0 link, machines by 100 Gbit/s.
    "cpu": _machine(Device("cpu", {"bfloat16": 229e12, "float32": 7.2e12}, 256e9, 307e9), 2, 32e9, 12.5e9, 1e-6),
}
HERE = "here"
FORM = "KIND:MACHINESxDEVICES like a100-80g:16x8, several joined with +, or a TOML file"


def parse_cluster(text: str) -> Cluster:
    """The cluster that ``text`` names, as the module says. ConfigError: every mistake, in a line each."""
    if text.endswith(".toml"):
        return _read(Path(text))
    problems: list[str] = []
    machines = []
    for part in text.split("+"):
        try:
            machines.append(_part(part.strip()))
        except ConfigError as error:
            problems += [f"cluster {text!r}: {problem}" for problem in error.problems]
    if problems:
        raise ConfigError(problems)
    return Cluster(tuple(machines))


def _part(text: str) -> tuple[int, Machine]:
    kind, colon, size = text.partition(":")
    size, at, cost = size.partition("@")
    if not colon or not kind:
        raise ConfigError([f"{text!r} is no machines; expected {FORM}"])
    number, devices = _numbers(size)
    machine = _named(kind, devices)
    if kind == HERE and number > 1:
        raise ConfigError([f"{text!r}: here is one machine; write here:1x{devices}, or describe several in a TOML file"])
    price = _price(cost) if at else 0.0
    return number, replace(machine, devices=devices, device=replace(machine.device, price=price))


def _numbers(size: str) -> tuple[int, int]:
    found = size.lower().split("x")
    if len(found) != 2 or not all(re.fullmatch(r"\d+", part) and int(part) for part in found):
        raise ConfigError([f"{size!r} is no size; expected MACHINESxDEVICES, whole numbers from 1 on, like 16x8"])
    return int(found[0]), int(found[1])


def _price(cost: str) -> float:
    try:
        price = float(cost)
    except ValueError:
        price = math.nan
    if not 0 <= price < math.inf:
        raise ConfigError([f"{cost!r} is no price; expected what a device costs an hour, like @1.5"])
    return price


def _named(kind: str, devices: int) -> Machine:
    if kind == HERE:
        return machine_here(devices)
    if kind not in PRESETS:
        raise ConfigError([f"no machines {kind!r}{_nearest(kind, [*PRESETS, HERE])}"])
    return PRESETS[kind]


def machine_here(workers: int, threads: int = 0) -> Machine:
    """This machine, of which each of ``workers`` has a share of the cores, or so many ``threads``, or a GPU. ConfigError:
    it was not measured."""
    probe = load_probe()
    if probe.gpus and workers > probe.gpus:
        raise ConfigError([f"here has {probe.gpus} GPUs; expected at most 1x{probe.gpus}"])
    share = probe.share(workers, threads)
    device = Device(HERE, share.flops, share.memory_bytes, share.bandwidth, launch_s=share.launch_s)
    return Machine(device, workers, probe.link, probe.link, probe.link_latency_s, probe.link_latency_s)


def _nearest(name: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(name, known, 1, 0.5)
    return (
        f"; did you mean {near[0]}? There" if near else "; there"
    ) + f" are {', '.join(known)}; others go in a TOML file"


def conflicts(machine: Machine) -> Iterator[str]:
    """What can't be of a machine's speeds, a line each.

    Memory has to be as fast as the link that reads from it, the links of all devices together as fast as the network, and
    messages to another machine take as long as those to a neighbour or longer.
    """
    name, device = machine.device.name, machine.device
    speeds = {"memory": device.memory_bytes, "bandwidth": device.bandwidth, "network": machine.network}
    speeds |= {"link": machine.link} if machine.devices > 1 else {}
    speeds |= {f"flops of {dtype}": value for dtype, value in device.flops.items()}
    wrong = [what for what, value in speeds.items() if not 0 < value < math.inf]
    yield from (f"{name}: {what} is {speeds[what]:g}; expected a number above 0" for what in wrong)
    if not device.flops:
        yield f'{name}: no flops; expected a number for "bfloat16" or "float32", or both'
    if wrong:
        return
    link = machine.link if machine.devices > 1 else device.bandwidth
    if link > device.bandwidth:
        yield f"{name}: link of {_rate(link)} is faster than the memory that it reads, {_rate(device.bandwidth)}"
    if machine.network > machine.devices * link * (1 + 1e-9):
        able = f"its {machine.devices} devices can deliver, {_rate(machine.devices * link)}"
        yield f"{name}: network of {_rate(machine.network)} is faster than {able}; give links in one direction, of a device"
    if machine.link_latency_s > machine.network_latency_s:
        yield f"{name}: a message inside a machine takes longer than to another one; swap the latencies"


def _rate(value: float) -> str:
    return f"{value / 1e9:.4g} GB/s"


Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class DeviceConfig(Config):
    """``[devices.NAME]``: what it says replaces what the preset ``like`` has; without one, all but the price is needed."""

    like: str | None = None
    flops: dict[str, Positive] = Field(default_factory=dict)
    """by dtype, "bfloat16" and "float32", in FLOP/s, dense"""
    memory_gb: Positive | None = None
    bandwidth_gb_s: Positive | None = None
    price: float = Field(0.0, ge=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.like is not None and self.like not in PRESETS:
            raise ValueError(f"like = {self.like!r}: no such preset{_nearest(self.like, PRESETS)}")
        missing = [name for name in ("flops", "memory_gb", "bandwidth_gb_s") if not getattr(self, name)]
        if missing and self.like is None:
            raise ValueError(f"without {', '.join(missing)}; give them, or a preset that has them: like = ...")
        if unknown := set(self.flops) - {"bfloat16", "float32"}:
            raise ValueError(f'flops of {", ".join(unknown)}; expected "bfloat16" and "float32"')
        return self


class MachineConfig(Config):
    """``[[machines]]``: ``number`` of them with ``devices`` each; what is left out is as in the preset of the device."""

    device: str
    number: int = Field(1, ge=1)
    devices: int = Field(ge=1)
    link_gb_s: Positive | None = None
    """of a device to its neighbours, in one direction"""
    network_gb_s: Positive | None = None
    """of a machine to the others, in one direction"""
    link_latency_us: Positive | None = None
    network_latency_us: Positive | None = None


LINKS = {
    "link_gb_s": ("link", 1e9),
    "network_gb_s": ("network", 1e9),
    "link_latency_us": ("link_latency_s", 1e-6),
    "network_latency_us": ("network_latency_s", 1e-6),
}


class ClusterConfig(Config):
    """A TOML file of a cluster."""

    devices: dict[str, DeviceConfig] = Field(default_factory=dict)
    machines: tuple[MachineConfig, ...] = Field(min_length=1)


def _read(path: Path) -> Cluster:
    config = parse(ClusterConfig, read_toml(path), str(path))
    try:
        built = [(one.number, _built(one, config.devices)) for one in config.machines]
        if problems := [problem for _, machine in built for problem in conflicts(machine)]:
            raise ConfigError(list(dict.fromkeys(problems)))
    except ConfigError as error:
        raise ConfigError([f"{path}: {problem}" for problem in error.problems]) from None
    return Cluster(tuple(built))


def _built(config: MachineConfig, own: Mapping[str, DeviceConfig]) -> Machine:
    name = config.device
    if name not in {*own, *PRESETS}:
        raise ConfigError([f"machines: no device {name!r}{_nearest(name, [*own, *PRESETS])}"])
    mine = own[name] if name in own else DeviceConfig(like=name)
    base = PRESETS[mine.like] if mine.like else None
    links = {key: getattr(config, key) for key in LINKS if getattr(config, key) is not None}
    if base is not None:
        links = {key: getattr(base, field) / unit for key, (field, unit) in LINKS.items()} | links
    elif config.devices == 1:
        links = {"link_gb_s": mine.bandwidth_gb_s, "link_latency_us": links.get("network_latency_us")} | links
    if missing := [key for key in LINKS if key not in links]:
        raise ConfigError([f"machines of {name}: without {', '.join(missing)}; give them"])
    values = {field: links[key] * unit for key, (field, unit) in LINKS.items()}
    return Machine(_device(name, mine, base), config.devices, **values)


def _device(name: str, config: DeviceConfig, base: Machine | None) -> Device:
    given = {"memory_bytes": config.memory_gb, "bandwidth": config.bandwidth_gb_s}
    sizes = {key: value * 1e9 for key, value in given.items() if value is not None}
    known = base.device if base is not None else Device(name, {}, 0.0, 0.0)
    return replace(known, name=name, flops={**known.flops, **config.flops}, price=config.price, **sizes)
