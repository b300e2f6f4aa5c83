"""What a runtime of worker processes does when some of them are lost."""

from __future__ import annotations

from pydantic import Field

from hybridflow.core.config import Config

__all__ = ["NEVER", "RecoveryConfig"]


class RecoveryConfig(Config):
    """Keys of ``[recovery]``."""

    max_restarts: int = Field(3, ge=0)
    """how often in a row lost or stalled workers are made anew without a new step getting done, before the run ends; 0: not
    at all"""
    deadline_s: float = Field(10.0, gt=0)
    """a worker process that doesn't answer for so long, whatever it computes, is lost"""


NEVER = RecoveryConfig(max_restarts=0)
