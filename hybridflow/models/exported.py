"""A policy's weights in a file of their own, which a training replaces while others read it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load, save_model
from torch import Tensor, nn

from hybridflow.core.errors import ModelError
from hybridflow.core.files import replacing

__all__ = ["Exported", "read_policy", "save_policy"]

VERSION = "policy_version"


class Exported(NamedTuple):
    """Weights by name, and the version that they are: the number of updates of the learner."""

    weights: dict[str, Tensor]
    version: int


def save_policy(network: nn.Module, version: int, path: Path) -> None:
    """Replace the file in one go: whoever reads it meanwhile has the old or the new weights, with their version."""
    with replacing(path) as beside:
        save_model(network, str(beside), {VERSION: str(version)})


def read_policy(path: Path) -> Exported:
    """What ``save_policy`` wrote. ModelError: it isn't there, or is no such file."""
    try:
        content = path.read_bytes()  # at once: safe_open opens the file twice, and it may be replaced in between
        weights = load(content)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path}: can't be read: {error}; expected an exported policy") from None
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    version = (header.get("__metadata__") or {}).get(VERSION, "")
    if not version.isdecimal():
        raise ModelError(f"{path}: doesn't say its {VERSION}; expected a policy that this version of hybridflow exported")
    return Exported(weights, int(version))
