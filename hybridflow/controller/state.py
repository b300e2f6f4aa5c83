"""What runtimes do when a run is saved and goes on: the same for all of them, through control methods of the workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridflow.core.errors import CheckpointError
from hybridflow.core.files import Written
from hybridflow.core.roles import Role, is_control

__all__ = ["KeepsState"]


class KeepsState:
    """The part of a ``Runtime`` that saves and loads: see there. Roles keep state if their workers have ``state_dict`` and
    ``load_state_dict``, or are ``Saving``."""

    roles: dict[str, Role[Any]]
    _saving: Mapping[str, Role[Any]] = {}

    def control(self, role: Role[Any], name: str, method: Any, arguments: tuple[Any, ...]) -> Any:
        raise NotImplementedError

    def ready(self) -> None:
        raise NotImplementedError

    def save(self, folder: Path, /) -> dict[str, Any]:
        small = {name: self._ask(role, "state_dict") for name, role in self._with("state_dict").items()}
        self._saving = self._with("save")
        return small | {name: self._ask(role, "save", folder / name) for name, role in self._saving.items()}

    def saved(self, wait: bool, /) -> dict[str, list[Written]] | None:
        told = {name: self._ask(role, "saved", wait) for name, role in self._saving.items()}
        if any(files is None for ranks in told.values() for files in ranks):
            return None
        return {name: [file for files in ranks for file in files] for name, ranks in told.items()}

    def sees(self, file: Path, /) -> None:
        for role in self._with("save").values():
            self._ask(role, "sees", file)
        self.ready()

    def load(self, folder: Path, state: Mapping[str, Any], files: Mapping[str, Sequence[Written]], /) -> None:
        small, saving = self._with("load_state_dict"), self._with("save")
        if missing := sorted((small.keys() | saving.keys()) - state.keys()):
            raise CheckpointError(f"{folder}: it has no state of {', '.join(missing)}; resume with the same algorithm")
        for name, role in small.items():
            self._ask(role, "load_state_dict", state[name])
        for name, role in saving.items():
            self._ask(role, "load", folder / name, state[name], files.get(name, ()))
        self.ready()

    def _with(self, method: str) -> dict[str, Role[Any]]:
        """The roles whose worker has this control method."""
        return {name: role for name, role in self.roles.items() if is_control(getattr(role.worker, method, None))}

    def _ask(self, role: Role[Any], name: str, *arguments: Any) -> Any:
        return self.control(role, name, getattr(role.worker, name), arguments)
