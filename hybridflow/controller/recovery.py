"""What a runtime of worker processes does when some of them are lost."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["NEVER", "RecoveryConfig"]


class RecoveryConfig(BaseModel):
    """``[recovery]``: a table."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    max_restarts: int = Field(3, ge=0)
    """how often in a row lost workers are made anew without a new step getting done, before the run ends; 0: never"""
    deadline_s: float = Field(10.0, gt=0)
    """a worker process that doesn't answer for so long, whatever it computes, is lost"""
    on_stall: Literal["restart", "stop"] = "restart"
    """when nothing gets done within runtime.timeout_s though all processes answer: make the late workers anew, or stop"""


NEVER = RecoveryConfig(max_restarts=0)
