"""Recorded episodes as Minari datasets: to learn from, and to write."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hybridflow.core.batch import Array, Batch, Ragged
from hybridflow.core.errors import DataError, UserError
from hybridflow.core.seeding import uniforms
from hybridflow.data.envs import EnvironmentConfig, Slot, Transition, entry_types, native_action

if TYPE_CHECKING:
    from minari import MinariDataset

__all__ = ["Recorded", "open_recorded", "record"]

TOGETHER = 10_000
"""steps of one batch of episodes, about"""
Spaces = tuple[Any, Any]


class Recorded(NamedTuple):
    """A dataset whose ``spaces`` are those of an environment."""

    name: str
    dataset: MinariDataset
    spaces: Spaces

    @property
    def num_steps(self) -> int:
        return int(self.dataset.total_steps)

    def batches(self) -> Iterator[Batch]:
        """All episodes, each a row, in columns as environments give them; an episode that didn't terminate counts as cut.

        ``sample_id`` counts down from -1. DataError: a reward isn't finite.
        """
        episodes: list[Any] = []
        for episode in self.dataset.iterate_episodes():
            episodes.append(episode)
            if sum(map(len, episodes)) >= TOGETHER:
                yield self._batch(episodes)
                episodes = []
        if episodes:
            yield self._batch(episodes)

    def _batch(self, episodes: Sequence[Any]) -> Batch:
        types, start = entry_types(self.spaces), getattr(self.spaces[1], "start", 0)
        lengths = np.array([len(episode) for episode in episodes], np.int64)
        rewards = np.concatenate([episode.rewards for episode in episodes]).astype(np.float32)
        if not np.isfinite(rewards).all():
            bad = episodes[int(np.repeat(np.arange(len(lengths)), lengths)[~np.isfinite(rewards)][0])]
            raise DataError(f"replay.dataset = {self.name!r}: episode {bad.id} has a reward that is NaN or infinite")
        observed = types["observations"].base
        terminated = np.array([bool(episode.terminations[-1]) for episode in episodes])
        steps = {
            "observations": np.concatenate([episode.observations[:-1] for episode in episodes]).astype(observed),
            "actions": (np.concatenate([episode.actions for episode in episodes]) - start).astype(types["actions"].base),
            "rewards": rewards,
            "response_mask": np.ones(len(rewards), bool),
        }
        return Batch(
            {
                "sample_id": np.array([-1 - int(episode.id) for episode in episodes], np.int64),
                **{name: Ragged(values, lengths) for name, values in steps.items()},
                "terminated": terminated,
                "truncated": ~terminated,
                "final_observations": np.stack([episode.observations[-1] for episode in episodes]).astype(observed),
            }
        )


def open_recorded(name: str, environment: str, spaces: Spaces) -> Recorded:
    """A dataset by its folder, or by its id in MINARI_DATASETS_PATH or ~/.minari.

    DataError: it isn't there, or it is of other spaces than the ``environment``.
    """
    minari = _minari("replay.dataset")
    try:
        dataset = minari.MinariDataset(Path(name) / "data") if Path(name).is_dir() else minari.load_dataset(name)
    except (FileNotFoundError, ValueError) as error:
        raise DataError(f"replay.dataset = {name!r}: expected a Minari dataset's folder or id; {error}") from error
    for what, there, here in zip(
        ("observations", "actions"), (dataset.observation_space, dataset.action_space), spaces, strict=True
    ):
        if there != here:
            raise DataError(f"replay.dataset = {name!r}: its {what} are {there}, but those of {environment!r} are {here}")
    return Recorded(name, dataset, spaces)


def record(
    config: EnvironmentConfig,
    act: Callable[[Array], Array],
    folder: Path,
    num_steps: int,
    chance: float,
    about: Mapping[str, str],
) -> tuple[int, list[float]]:
    """Play whole episodes until there are ``num_steps`` steps, and write them to ``folder`` as a Minari dataset.

    ``act``: [1, ...] observations to [1, ...] actions; with this ``chance`` an action is drawn evenly instead. Returns the
    steps and the return of each episode. UserError: ``folder`` is there, or its name is no Minari name.
    """
    minari = _minari("record")
    if folder.exists():
        raise UserError(f"--out {folder}: it is there already; name a new folder")
    if not re.fullmatch(r"[\w-]+-v\d+", folder.name):
        raise UserError(f"--out {folder}: Minari's names end with a version, such as {folder.name}-v0")
    slot = Slot(config, 0, 0, "record")
    episodes: list[Any] = []
    returns: list[float] = []
    while slot.num_steps < num_steps:
        slot.begin(len(episodes))
        episodes.append(_played(slot, act, chance, minari.data_collector.EpisodeBuffer))
        returns.append(slot.episode_return)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent) as beside, _datasets_in(Path(beside)), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it asks for an author and for links
        minari.create_dataset_from_buffers(folder.name, episodes, env=slot.environment, jpeg_encoding=False, **about)
        (Path(beside) / folder.name).rename(folder)
    slot.close()
    return slot.num_steps, returns


def _played(slot: Slot, act: Callable[[Array], Array], chance: float, buffer: Callable[..., Any]) -> Any:
    """One episode."""
    space = slot.environment.action_space
    space.seed(slot.episode)
    native = native_action(space)
    observations, actions, steps = [slot.observation], list[Any](), list[Transition]()
    while not steps or not (steps[-1].terminated or steps[-1].truncated):
        action = act(slot.observation[None])[0]
        if uniforms(0, "record", [slot.episode], [len(steps)])[0] < chance:
            action = space.sample() - getattr(space, "start", 0)
        actions.append(native(action))
        steps.append(slot.step(action))
        observations.append(slot.observation)
    return buffer(
        id=slot.episode,
        observations=observations,
        actions=actions,
        rewards=[step.reward for step in steps],
        terminations=[step.terminated for step in steps],
        truncations=[step.truncated for step in steps],
        infos={},
    )


@contextmanager
def _datasets_in(folder: Path) -> Iterator[None]:
    """Minari writes below this folder meanwhile."""
    before = os.environ.get("MINARI_DATASETS_PATH")
    os.environ["MINARI_DATASETS_PATH"] = str(folder.absolute())
    try:
        yield
    finally:
        del os.environ["MINARI_DATASETS_PATH"]
        if before is not None:
            os.environ["MINARI_DATASETS_PATH"] = before


def _minari(what: str) -> Any:
    try:
        import minari
    except ImportError as error:
        raise UserError(f'{what} needs Minari, which is not installed: pip install "hybridflow[offline]"') from error
    return minari
