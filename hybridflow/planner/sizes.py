"""Models by name or config.json, as far as a planner needs them: sizes of a decoder and of its experts."""

from __future__ import annotations

from dataclasses import dataclass

from hybridflow.models.spec import DecoderSpec

__all__ = ["ModelSize"]


@dataclass(frozen=True)
class ModelSize:
    """A decoder, or one whose MLPs are ``experts``, of which ``active_experts`` work on each token: then
    ``intermediate_size`` of ``spec`` is that of one expert. Dense models have one expert, which is active."""

    name: str
    spec: DecoderSpec
    experts: int = 1
    active_experts: int = 1
