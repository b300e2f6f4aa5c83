"""The error tree.

    HybridFlowError
    ├── UserError            a mistake of the user: one line says what, where, what was expected, how to fix it; exit code 2
    │   ├── ConfigError      all problems of a configuration at once
    │   ├── ModelError       a model folder, its weights or its tokenizer
    │   ├── DataError        a prompt file, a task, an environment
    │   ├── RewardError      a reward function or what it returned
    │   ├── CheckpointError  a checkpoint or a run directory
    │   ├── ProfileError     a base of task profiles: missing, damaged, of another machine
    │   │   └── UnknownTaskError  a task that it has no measurements of
    │   └── ResourceError    memory or disk ran out: what to lower
    ├── ContractError        a program broke the contract of the dataflow (a column missing, undeclared, of the wrong shape)
    ├── NonFiniteError       a loss, gradient or reward is NaN or infinite
    ├── GuardError           a guard has stopped the run: what a step's metrics say is wrong with it
    ├── WorkerError          a worker process failed, died or was not heard of; exit code 1
    │   └── LostWorkersError  their pools can be made anew, and the run goes on from its last snapshot
    └── LateError            a policy server had no action in time; the next one may come in time

Everything else is a bug and shows as a traceback.
"""

from collections.abc import Sequence

__all__ = [
    "CheckpointError",
    "ConfigError",
    "ContractError",
    "DataError",
    "GuardError",
    "HybridFlowError",
    "LateError",
    "LostWorkersError",
    "ModelError",
    "NonFiniteError",
    "ProfileError",
    "ResourceError",
    "RewardError",
    "UnknownTaskError",
    "UserError",
    "WorkerError",
]


class HybridFlowError(Exception):
    """Root of every error that hybridflow raises on purpose."""


class UserError(HybridFlowError):
    """A user's mistake, told in one line."""


class ConfigError(UserError):
    """Every problem of a configuration; ``problems`` holds one line each."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.problems,)


class ModelError(UserError):
    """A model folder, its weights or its tokenizer can't be used."""


class DataError(UserError):
    """A prompt file, a task or an environment can't be used."""


class RewardError(UserError):
    """A reward function can't be found or called, or what it returned is no score."""


class CheckpointError(UserError):
    """A checkpoint or a run directory is missing, damaged, or belongs to another run."""


class ResourceError(UserError):
    """Memory or disk ran out; the message says what to lower."""


class ProfileError(UserError):
    """A base of task profiles is missing, damaged, no such base, or of another machine."""


class UnknownTaskError(ProfileError):
    """A base has no measurements of a task."""


class ContractError(HybridFlowError):
    """A program broke the contract of the dataflow."""


class NonFiniteError(HybridFlowError):
    """A loss, a gradient or a reward is NaN or infinite; the message names the function and the samples."""


class GuardError(HybridFlowError):
    """A guard has stopped the run; the message says what it saw, what that usually means and what to try."""


class WorkerError(HybridFlowError):
    """A worker process failed, died or was not heard of; the message says which, at what, on which samples, and how."""


class LostWorkersError(WorkerError):
    """Processes of these ``pools`` died or no longer answer. ``seen_s``: how long ago they were heard of last."""

    def __init__(self, message: str, pools: Sequence[str], seen_s: float = 0.0) -> None:
        super().__init__(message)
        self.pools, self.seen_s = tuple(pools), seen_s


class LateError(HybridFlowError):
    """A policy server had no action in time; whoever controls something decides what to do without one."""
