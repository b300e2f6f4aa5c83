"""Environments (Gymnasium) as slots: each slot is one environment that plays episode after episode.

Episode k of slot s starts with ``reset(seed=derive(seed, "env", s, k))``, so it depends on no other episode and on no
other slot, and a slot's whole state is (k, the actions of the episode so far). A checkpoint holds just that, and loading
plays the episode again: exact also for environments whose state is compiled (Box2D, MuJoCo) and which pickle without it,
and checked by the observation that it must end with.
"""

from __future__ import annotations

import difflib
import importlib
import runpy
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
from pydantic import Field, field_validator, model_validator

from hybridflow.core.batch import Array, Batch
from hybridflow.core.config import Config
from hybridflow.core.errors import CheckpointError, DataError, UserError
from hybridflow.core.seeding import derive

if TYPE_CHECKING:
    from gymnasium import Env, Space

__all__ = [
    "EVALUATION",
    "EnvironmentConfig",
    "Replayable",
    "Slot",
    "Transition",
    "entry_types",
    "make_environment",
    "native_action",
    "rollout_source",
    "spaces_of",
]


EVALUATION = "eval-env"
"""what episodes of evaluations are seeded for, besides the seed: they are none of those that are trained on"""
RECORDS = "RecordVideo"
KEEPS_STATISTICS = {"NormalizeObservation": "actor.net.normalise and critic.net.normalise", "NormalizeReward": "ClipReward"}


class EnvironmentConfig(Config):
    """Which environment, how many of it, how long a rollout."""

    id: str
    """a registered Gymnasium environment such as "CartPole-v1"; "module:Name-v0" and "path/file.py:Name-v0" import first;
    "pettingzoo:mpe2.simple_spread_v3" is the module's parallel environment of several agents"""
    num_envs: int = Field(8, ge=1)
    """environments that are stepped together"""
    steps_per_rollout: int = Field(128, ge=0)
    """steps of each environment in one rollout; 0: none, what is learned from is all in replay.dataset"""
    options: dict[str, Any] = Field({})
    """further arguments of the environment, such as max_episode_steps"""
    workers: int = Field(0, ge=0)
    """env workers that share num_envs out and roll out by themselves while the learner learns; 0: all in turns with it"""
    processes: int = Field(0, ge=0)
    """child processes of each sampler that step environments side by side, if a step takes over 0.1 ms; 0: none"""
    timeout_s: float = Field(120, gt=0)
    """a child process that is silent for so long, once it has started, is lost, and the run ends; --restarts goes on"""
    wrappers: tuple[dict[str, Any], ...] = ()
    """around it, from the inside, of gymnasium.wrappers or elsewhere: { name = "FrameStackObservation", stack_size = 4 },
    { name = "minigrid.wrappers:ImgObsWrapper" }, ..."""
    agent_id: bool = False
    """of several agents: their one-hot number is added to what they observe, so that one network can tell them apart"""

    @property
    def shared(self) -> bool:
        """Whether it is an environment of several agents."""
        return self.id.startswith("pettingzoo:")

    @field_validator("wrappers", mode="before")
    @classmethod
    def _tables(cls, wrappers: Any) -> Any:
        for wrapper in wrappers if isinstance(wrappers, (list, tuple)) else ():
            if not isinstance(wrapper, dict) or not isinstance(wrapper.get("name"), str):
                raise ValueError(f'{wrapper!r} has no name, expected {{ name = "FrameStackObservation", stack_size = 4 }}')
        return wrappers

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.shared and self.wrappers:
            raise ValueError(f"wrappers are gymnasium's, and {self.id!r} is PettingZoo's; remove them")
        if self.agent_id and not self.shared:
            raise ValueError(f'agent_id is for several agents, id = "pettingzoo:..."; remove it from {self.id!r}')
        return self

    @property
    def unrecorded(self) -> Self:
        """The same without wrappers that record."""
        kept = tuple(wrapper for wrapper in self.wrappers if wrapper.get("name") != RECORDS)
        return self.model_copy(update={"wrappers": kept})

    def with_options(self, options: Mapping[str, Any]) -> EnvironmentConfig:
        """The same with further ``options``, which win over its own."""
        return self.model_copy(update={"options": {**self.options, **options}})


class Transition(NamedTuple):
    """One step of one environment; ``observation`` is what followed it, before any restart."""

    observation: Array
    reward: float
    terminated: bool
    truncated: bool


def make_environment(config: EnvironmentConfig, film: str = "") -> Env[Any, Any]:
    """One environment; DataError if the id is unknown, a dependency is missing, the options don't fit or it has several
    agents. ``film``: what its videos are called, if there is a wrapper that records; "" if it isn't to be recorded."""
    if config.shared:
        raise DataError(f"environment {config.id!r} has several agents, one is needed; hybridflow eval plays it")
    gymnasium = _gymnasium()
    environment = _made(gymnasium, config)
    for wrapper in config.wrappers:
        if wrapper.get("name") != RECORDS:
            environment = _wrapped(environment, dict(wrapper))
        elif film:
            prefix = "-".join([*([wrapper["name_prefix"]] if "name_prefix" in wrapper else []), film])
            environment = _wrapped(environment, {**wrapper, "name_prefix": prefix})
    return environment


def _wrapped(environment: Env[Any, Any], arguments: dict[str, Any]) -> Env[Any, Any]:
    import gymnasium

    name = arguments.pop("name", "")
    where = f"environment.wrappers: {name!r}"
    if name in KEEPS_STATISTICS:
        raise DataError(f"{where} has statistics of its own in each environment; use {KEEPS_STATISTICS[name]} instead")
    given = {key: tuple(value) if isinstance(value, list) else value for key, value in arguments.items()}
    wrapper = _wrapper(name, where)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*Overwriting existing videos")  # the folder is that of all of them
            wrapped: Env[Any, Any] = wrapper(environment, **given)
    except gymnasium.error.DependencyNotInstalled as error:
        raise DataError(f"{where}: {error}") from error
    except (TypeError, ValueError, AssertionError, OSError, gymnasium.error.Error) as error:
        hint = (
            "" if name != RECORDS else '; it needs a video_folder, and environment.options = { render_mode = "rgb_array" }'
        )
        raise DataError(f"{where} doesn't fit here or doesn't take {given}: {error}{hint}") from error
    return wrapped


def _wrapper(name: str, where: str) -> Any:
    """The class called "Class", of gymnasium.wrappers, or "module:Class"."""
    import gymnasium.wrappers

    module, colon, kind = name.partition(":")
    try:
        if not colon and name in gymnasium.wrappers.__all__:
            return getattr(gymnasium.wrappers, name)  # which imports it
    except ImportError as error:
        raise DataError(f"{where}: {error}; install what it needs") from error
    if not colon:
        near = difflib.get_close_matches(name, gymnasium.wrappers.__all__, 1, 0.5)
        hint = f"did you mean {near[0]!r}?" if near else 'see the list of gymnasium.wrappers, or name one "module:Class"'
        raise DataError(f"{where} is no wrapper of gymnasium, expected such a name; {hint}")
    try:
        found = importlib.import_module(module).__dict__.get(kind)
    except ImportError as error:
        raise DataError(f"{where}: {error}; install what has it, or correct the name") from error
    if not isinstance(found, type) or not issubclass(found, gymnasium.Wrapper):
        raise DataError(f"{where}: {module} has no wrapper {kind!r}, expected the name of a class of gymnasium.Wrapper")
    return found


def _made(gymnasium: Any, config: EnvironmentConfig) -> Env[Any, Any]:
    place, _, name = config.id.rpartition(":")
    if in_file := place.endswith(".py"):
        _run_once(Path(place).absolute())
    try:
        made: Env[Any, Any] = gymnasium.make(name if in_file else config.id, **config.options)
        return made
    except gymnasium.error.UnregisteredEnv as error:
        near = difflib.get_close_matches(config.id, gymnasium.registry, 1, 0.5)
        hint = f"did you mean {near[0]!r}?" if near else "list them with gymnasium.pprint_registry()"
        raise DataError(f"environment {config.id!r} is not registered in gymnasium; {hint}") from error
    except (gymnasium.error.DependencyNotInstalled, ModuleNotFoundError) as error:
        raise DataError(f"environment {config.id!r} can't be imported: {error}") from error
    except (TypeError, ValueError) as error:
        raise DataError(f"environment {config.id!r} doesn't take the options {config.options}: {error}") from error
    except gymnasium.error.Error as error:
        raise DataError(f"environment {config.id!r} can't be made: {error}") from error


@cache
def _run_once(path: Path) -> None:
    """A file that registers environments."""
    if not path.is_file():
        raise DataError(f"environment.id: no file {path}; expected path/file.py:Name-v0, where the file registers Name-v0")
    try:
        runpy.run_path(str(path))
    except ImportError as error:
        raise DataError(f"environment.id: {path} can't be imported: {error}") from error


def spaces_of(config: EnvironmentConfig) -> tuple[Space[Any], Space[Any]]:
    """(observation space, action space) of one environment, or of each agent of one that they share."""
    if config.shared:
        from hybridflow.data.agents import agents_of  # which builds on this module

        return agents_of(config).spaces
    environment = make_environment(config)
    spaces = environment.observation_space, environment.action_space
    environment.close()
    return spaces


def entry_types(spaces: tuple[Space[Any], Space[Any]]) -> dict[str, np.dtype[Any]]:
    """Type and shape of one entry of ``observations``, ``actions`` and ``final_observations``.

    Continuous actions are the policy's numbers (fp32), discrete ones are numbered from 0.
    """
    seen, done = spaces
    observation = np.dtype((seen.dtype, seen.shape or ()))
    discrete = type(done).__name__ in ("Discrete", "MultiDiscrete")
    action = np.dtype((np.int64 if discrete else np.float32, done.shape or ()))
    return {"observations": observation, "actions": action, "final_observations": observation}


def rollout_source(config: EnvironmentConfig) -> Batch:
    """What a rollout starts from: every slot with its number of steps."""
    slots = np.arange(config.num_envs)
    return Batch({"slot": slots, "num_steps": np.full_like(slots, config.steps_per_rollout)})


class Replayable(ABC):
    """An environment whose state is its episode and the actions of that so far: they are played again.

    ``observation`` is what policies see next, ``num_steps`` counts over its life.
    """

    config: EnvironmentConfig
    slot: int
    environment: Any
    episode: int
    num_steps: int
    actions: list[Any]
    observation: Array

    @abstractmethod
    def begin(self, episode: int) -> None:
        """Start an episode."""

    @abstractmethod
    def step(self, action: Array) -> Any:
        """Take one step; after the end of an episode, ``begin`` must come next."""

    def state_dict(self) -> dict[str, Any]:
        """Counters, the episode's actions so far, and the observation that playing them leads to."""
        counters = {"episode": self.episode, "num_steps": self.num_steps}
        return {**counters, "actions": np.array(self.actions), "observation": self.observation}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Play the episode again up to where it stood; CheckpointError if it comes out differently."""
        self.begin(state["episode"])
        for action in state["actions"]:
            self.step(action)
        if not np.array_equal(self.observation, state["observation"], equal_nan=self.observation.dtype.kind == "f"):
            raise CheckpointError(
                f"environment {self.config.id!r}, slot {self.slot}, episode {self.episode}: {len(self.actions)} steps came "
                "out differently when played again, so this run can't be resumed exactly; expected an environment that "
                "reset(seed) and the actions determine"
            )
        self.num_steps = state["num_steps"]

    def close(self) -> None:
        self.environment.close()


class Slot(Replayable):
    """One environment of one agent."""

    def __init__(self, config: EnvironmentConfig, seed: int, slot: int, purpose: str = "env") -> None:
        self.config, self.seed, self.slot, self.purpose = config, seed, slot, purpose
        # Of environments side by side, and of episodes of an evaluation, the first is recorded.
        self.environment = make_environment(config, film="" if slot else purpose)
        self._native = native_action(self.environment.action_space)
        self._observed = self.environment.observation_space.dtype
        self.num_steps = 0
        self.begin(0)

    def begin(self, episode: int) -> None:
        """Start an episode."""
        observation, _ = self.environment.reset(seed=derive(self.seed, self.purpose, self.slot, episode))
        self.episode, self.episode_return = episode, 0.0
        self.actions = []
        self.observation = self._copied(observation)

    def step(self, action: Array) -> Transition:
        """Take one step; after the end of an episode, ``begin`` must come next."""
        observation, reward, terminated, truncated, _ = self.environment.step(self._native(action))
        self.actions.append(action)
        reward = float(reward)
        self.episode_return += reward
        self.num_steps += 1
        self.observation = self._copied(observation)
        return Transition(self.observation, reward, bool(terminated), bool(truncated))

    def _copied(self, observation: Any) -> Array:
        # Environments may write the next observation into the same array.
        return np.array(observation, self._observed)


def native_action(space: Any) -> Callable[[Array], Any]:
    """Makes of an action what the environment takes: numbered from its own start, or clipped to its bounds."""
    if type(space).__name__ == "Discrete":
        start = int(space.start)
        return lambda action: start + action
    if type(space).__name__ == "MultiDiscrete":
        return lambda action: space.start + action
    return lambda action: np.clip(action, space.low, space.high).astype(space.dtype)


def _gymnasium() -> Any:
    try:
        import gymnasium
    except ImportError as error:
        raise UserError("environments need gymnasium, which is not installed: pip install hybridflow[rl]") from error
    return gymnasium
