"""Recorded episodes as Minari datasets: to learn from, and to write."""

from __future__ import annotations

import json
import math
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
COMPRESSION = 1100
"""no filter of HDF5 makes more bytes than so many of one"""
TOLD = {"observation_space": str, "action_space": str, "data_format": str, "total_episodes": int, "total_steps": int}
"""what its metadata must say; without spaces, Minari would make the environment that they name, and so run code"""
DAMAGED = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    AssertionError,
    ArithmeticError,
    RuntimeError,
    MemoryError,
)
"""what Minari, h5py and numpy raise on reading damaged files; they check little"""
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

        ``sample_id`` counts down from -1. DataError: an episode can't be read, or can't be of the environment.
        """
        episodes: list[Any] = []
        for episode in self._episodes():
            episodes.append(episode)
            if sum(map(len, episodes)) >= TOGETHER:
                yield self._batch(episodes)
                episodes = []
        if episodes:
            yield self._batch(episodes)

    def _episodes(self) -> Iterator[Any]:
        left = self.num_steps
        with _damage_told(self.name):
            for episode in self.dataset.iterate_episodes():
                left -= len(episode)
                if problem := _problem(episode, self.spaces) if left >= 0 else "has more steps than all are said to have":
                    raise DataError(f"replay.dataset = {self.name!r}: episode {episode.id} {problem}")
                yield episode
        if left:
            raise DataError(f"replay.dataset = {self.name!r}: it is said to have {left} steps more than its episodes have")

    def _batch(self, episodes: Sequence[Any]) -> Batch:
        types, start = entry_types(self.spaces), getattr(self.spaces[1], "start", 0)
        lengths = np.array([len(episode) for episode in episodes], np.int64)
        rewards = np.concatenate([episode.rewards for episode in episodes]).astype(np.float32)
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

    DataError: it isn't there, is damaged, or is of other spaces than the ``environment``.
    """
    minari = _minari("replay.dataset")
    folder = (Path(name) if Path(name).is_dir() else minari.storage.get_dataset_path(name)) / "data"
    if not (folder / "metadata.json").is_file():
        raise DataError(f"replay.dataset = {name!r}: expected a Minari dataset's folder or id; there is no {folder}")
    with _damage_told(name):
        _check_claims(folder)
        dataset = minari.MinariDataset(folder)
    for what, there, here in zip(
        ("observations", "actions"), (dataset.observation_space, dataset.action_space), spaces, strict=True
    ):
        if there != here:
            raise DataError(f"replay.dataset = {name!r}: its {what} are {there}, but those of {environment!r} are {here}")
    return Recorded(name, dataset, spaces)


def _check_claims(folder: Path) -> None:
    """ValueError: metadata or headers aren't as they have to be, or claim more than the files can hold."""
    size = sum(path.stat().st_size for path in folder.rglob("*"))
    metadata = json.loads((folder / "metadata.json").read_text())
    for key, kind in TOLD.items():
        if type(metadata.get(key)) is not kind:
            raise ValueError(f"metadata.json: {key} is {metadata.get(key)!r:.80}, expected {kind.__name__}")
    if not 0 <= metadata["total_episodes"] <= min(size, metadata["total_steps"]):
        raise ValueError(f"metadata.json: {metadata['total_episodes']} episodes of {metadata['total_steps']} steps")
    if metadata["data_format"] == "hdf5":
        _check_arrays(folder / "main_data.hdf5", COMPRESSION * size)


def _check_arrays(path: Path, most: int) -> None:
    import h5py

    def check(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset) and math.prod(item.shape or (0,)) * item.dtype.itemsize > most:
            raise ValueError(f"{path.name}: {name} of shape {list(item.shape)} can't be in so small a file")

    with h5py.File(path) as file:
        file.visititems(check)


def _problem(episode: Any, spaces: Spaces) -> str:
    """Why an episode can't be of an environment of these spaces; "" if it can."""
    done, steps, types = spaces[1], len(episode), entry_types(spaces)
    expected = {
        "observations": (steps + 1, types["observations"]),
        "actions": (steps, types["actions"]),
        "rewards": (steps, np.dtype(np.float32)),
        "terminations": (steps, np.dtype(bool)),
    }
    for name, (length, kind) in expected.items():
        values = np.asarray(getattr(episode, name))
        if values.shape != (length, *kind.shape) or not np.can_cast(values.dtype, kind.base, "same_kind"):
            found = f"{values.dtype} {list(values.shape)}"
            return f"has {name} that are {found}, expected {kind.base} {[length, *kind.shape]}"
        if not np.isfinite(values).all():
            return f"has {name} that are NaN or infinite"
    if type(done).__name__ in ("Discrete", "MultiDiscrete"):
        numbers, count = episode.actions - done.start, done.n if type(done).__name__ == "Discrete" else done.nvec
        if ((numbers < 0) | (numbers >= count)).any():
            return f"has actions that are none of {done}"
    return "" if steps else "has no step"


@contextmanager
def _damage_told(name: str) -> Iterator[None]:
    try:
        yield
    except DAMAGED as error:
        told = f"can't be read ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})"
        raise DataError(f"replay.dataset = {name!r}: {told}; record or download it again") from error


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
