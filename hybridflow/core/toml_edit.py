"""Changing a few keys of a TOML file that somebody wrote, and nothing else: comments, order and forms stay.

A key that is there is changed where it stands, also within an inline table; one that isn't comes to the end of its table,
in the form that the table has (a header, or dotted keys), or into a new table at the end of the file.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from hybridflow.core.config import toml_key, toml_value
from hybridflow.core.errors import ConfigError

__all__ = ["edit_toml"]

Path = tuple[str, ...]


def edit_toml(text: str, values: Mapping[Path, Any], whole: Collection[Path] = ()) -> str:
    """``text``, valid TOML, with ``values`` by path; None removes a key. Tables ``whole`` keep no keys but these.

    ConfigError: it has a form in which that can't be done.
    """
    edit = _Edit(values, whole)
    wanted = edit.table(tomllib.loads(text), ())
    newline = "\r\n" if "\r\n" in text else "\n"
    before = [*_pieces(text.replace("\r\n", "\n"))]
    pieces = [new for piece in before if (new := edit.changed(piece)) is not None]
    for path, value in values.items():
        if value is not None and not edit.found(pieces, path):
            _add(pieces, path, value)
    filled = {piece.table for piece in before if piece.kind == "key"}
    changed = "".join(piece.text for piece in _without_empty(pieces, filled))
    if (data := _data(changed)) is None or _trimmed(data) != _trimmed(wanted):
        raise edit.impossible
    return changed.replace("\n", newline)


@dataclass(frozen=True)
class _Piece:
    """Lines of a file that stand in ``table``: its header, a key with its value, or what says nothing."""

    kind: Literal["header", "key", "nothing"]
    text: str
    table: Path
    key: Path = ()
    value: Any = None

    @property
    def path(self) -> Path:
        return self.table + self.key


class _Edit:
    """What shall be different."""

    def __init__(self, values: Mapping[Path, Any], whole: Collection[Path]) -> None:
        self.values, self.whole = values, whole
        told = ", ".join(".".join(path) for path in values)
        self.impossible = ConfigError([f"it has a form that can't be edited; set these keys in it by hand: {told}"])

    def table(self, old: Mapping[str, Any], path: Path) -> dict[str, Any]:
        """The table at ``path`` as it shall be."""
        new = {key: self._value(value, (*path, key)) for key, value in old.items() if not self._drops((*path, key))}
        for other, value in self.values.items():
            if value is not None and len(other) > len(path) and other[: len(path)] == path:
                inner = new
                for key in other[len(path) : -1]:
                    inner = inner.setdefault(key, {})
                    if not isinstance(inner, dict):
                        raise self.impossible
                inner[other[-1]] = value
        return new

    def _value(self, old: Any, path: Path) -> Any:
        return self.table(old, path) if isinstance(old, dict) else old

    def _drops(self, path: Path) -> bool:
        if any(other[: len(path)] == path and value is not None for other, value in self.values.items()):
            return False
        cut = any(path[: len(table)] == table and len(path) > len(table) for table in self.whole)
        return cut or path in self.values

    def changed(self, piece: _Piece) -> _Piece | None:
        """As it shall be; None: gone."""
        if piece.kind != "key":
            return piece
        if self._drops(piece.path):
            return None
        new = self.values.get(piece.path, self._value(piece.value, piece.path))
        if new == piece.value:
            return piece
        if not _trimmed({"": new}):
            return None
        start = _before_value(piece.text)
        return replace(piece, value=new, text=f"{start} {toml_value(new)}{_behind_value(piece.text[len(start) :])}")

    def found(self, pieces: Sequence[_Piece], path: Path) -> bool:
        """Whether a piece has the value at ``path``."""
        keys = (piece for piece in pieces if piece.kind == "key" and path[: len(piece.path)] == piece.path)
        return any(_at({"": piece.value}, ("", *path[len(piece.path) :])) == self.values[path] for piece in keys)


def _add(pieces: list[_Piece], path: Path, value: Any) -> None:
    """Behind what belongs to the same table, or into a new one."""
    table, size = path[:-1], len(path) - 1
    own = [n for n, piece in enumerate(pieces) if piece.kind != "nothing" and piece.table == table]
    below = [n for n, piece in enumerate(pieces) if piece.kind == "key" and piece.path[:size] == table]
    dotted = [n for n in below if len(pieces[n].table) < size < len(pieces[n].path)]
    if not own and not dotted and table:
        blank = "\n" if pieces and pieces[-1].text.strip() else ""
        pieces.append(_Piece("header", f"{blank}[{_dotted(table)}]\n", table))
        own = [len(pieces) - 1]
    last = max(own or dotted, default=-1)
    inside = pieces[last].table if own or dotted else ()
    key = path[len(inside) :]
    pieces.insert(last + 1, _Piece("key", f"{_dotted(key)} = {toml_value(value)}\n", inside, key, value))


def _without_empty(pieces: Sequence[_Piece], filled: Collection[Path]) -> Iterator[_Piece]:
    """Without the headers of tables that had keys and have none."""
    kept = {piece.table for piece in pieces if piece.kind == "key"}
    emptied = {table for table in filled if table not in kept}
    return (piece for piece in pieces if piece.kind != "header" or piece.table not in emptied)


def _pieces(text: str) -> Iterator[_Piece]:
    lines, table = re.findall(r"[^\n]*\n|[^\n]+", text), cast(Path, ())
    while lines:
        count, start = 1, lines[0].strip()
        while (data := _data("".join(lines[:count]))) is None:
            count += 1
        own, lines = "".join(lines[:count]), lines[count:]
        own += "" if own.endswith("\n") else "\n"
        if not start or start.startswith("#"):
            yield _Piece("nothing", own, table)
        elif start.startswith("["):
            table = _single(data)
            yield _Piece("header", own, table)
        else:
            key = _single(_data(f"{_before_value(own)} 0") or {})
            yield _Piece("key", own, table, key, _at(data, key))


def _data(text: str) -> dict[str, Any] | None:
    """None: it isn't TOML, or not all of a key's value."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return None


def _before_value(text: str) -> str:
    """Key and equals sign."""
    ends = (found.end() for found in re.finditer("=", text))
    return next(text[:end] for end in ends if _data(f"{text[:end]} 0"))


def _behind_value(text: str) -> str:
    """Comment and end of line."""
    starts = (found.start() for found in re.finditer(r"[ \t]*#", text))
    return next((text[n:] for n in starts if _data(f"value = {text[:n]}") is not None), "\n")


def _single(data: Any) -> Path:
    """The path of the only key."""
    path: Path = ()
    while isinstance(data, dict) and data:
        ((key, data),) = data.items()
        path = (*path, key)
    return path


def _at(data: Any, path: Path) -> Any:
    """None: nothing is there."""
    for key in path:
        data = data.get(key) if isinstance(data, dict) else None
    return data


def _trimmed(data: Mapping[str, Any]) -> dict[str, Any]:
    """Without empty tables."""
    inner = {key: _trimmed(value) if isinstance(value, dict) else value for key, value in data.items()}
    return {key: value for key, value in inner.items() if value != {}}


def _dotted(path: Path) -> str:
    return ".".join(map(toml_key, path))
