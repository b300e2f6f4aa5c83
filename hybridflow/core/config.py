"""Configuration: frozen, typed sections, each beside the class that it configures, read from TOML.

Overrides (``--section.key value``) are merged into the file's data *before* validation, so a mistake in the file and one
on the command line are found by the same check and reported together, with the nearest known key.
"""

import difflib
import re
import tomllib
import types
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from hybridflow.core.errors import ConfigError

__all__ = ["Config", "apply_overrides", "differences", "keys", "parse", "read_toml", "to_toml", "toml_key", "toml_value"]

C = TypeVar("C", bound="Config")


class Config(BaseModel):
    """A section. Unknown keys are errors; values never change after validation."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


def read_toml(path: Path) -> dict[str, Any]:
    """The data of a TOML file; ConfigError with file and line if it can't be read."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError([f"{path}: no such file"]) from None
    except IsADirectoryError:
        raise ConfigError([f"{path}: is a folder, expected a TOML file"]) from None
    except (ValueError, RecursionError) as error:  # of TOML, UTF-8 or a number of 5000 digits
        raise ConfigError([f"{path}: not valid TOML: {error}"]) from None


def apply_overrides(data: Mapping[str, Any], arguments: Sequence[str]) -> dict[str, Any]:
    """``data`` with ``--section.key value`` (or ``--section.key=value``) set.

    A value is read as TOML (``8``, ``true``, ``1e-5``, ``["a", "b"]``); what is no TOML value is a string.
    """
    result, problems = _copy(data), []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        key, equals, value = word.partition("=")
        if not key.startswith("--") or len(key) < 3:
            problems.append(f"command line: {word!r} is not understood; an override is --section.key value")
            continue
        if not equals:
            if not rest:
                problems.append(f"command line: {key} has no value")
                continue
            value = rest.pop(0)
        problems += _set(result, key[2:].replace("-", "_").split("."), _value(value))
    if problems:
        raise ConfigError(problems)
    return result


def parse(model: type[C], data: Mapping[str, Any], source: str) -> C:
    """Validate; ConfigError lists every problem as ``source: key: what was found, what was expected``."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise ConfigError([_explain(model, problem, source) for problem in error.errors()]) from None


def keys(model: type[Config], prefix: str = "") -> Iterator[tuple[str, Any, Any, str]]:
    """(dotted key, type, default, meaning) of every key below ``model``."""
    for name, info in model.model_fields.items():
        section = _section(info.annotation)
        if section:
            yield from keys(section, f"{prefix}{name}.")
        else:
            yield (
                f"{prefix}{name}",
                info.annotation,
                info.get_default(call_default_factory=True),
                info.description or "",
            )


def to_toml(config: Config, leave_out: Collection[str] = ()) -> str:
    """All values as TOML, readable by ``read_toml``, without keys that have none and without the keys ``leave_out``."""
    return "\n".join(_sections(config.model_dump(mode="json", exclude=set(leave_out)), ())) + "\n"


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(dotted key, old value, new value) wherever they differ, in the order of the keys; None where a key is missing."""
    for key in sorted(old.keys() | new.keys()):
        was, now = old.get(key), new.get(key)
        if isinstance(was, Mapping) and isinstance(now, Mapping):
            yield from differences(was, now, f"{prefix}{key}.")
        elif was != now:
            yield f"{prefix}{key}", was, now


def _sections(data: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    if path:
        yield f"\n[{'.'.join(path)}]"
    for key, value in data.items():
        if value is not None and not isinstance(value, dict):
            yield f"{key} = {toml_value(value)}"
    for key, value in data.items():
        if isinstance(value, dict):
            yield from _sections(value, (*path, key))


def toml_key(key: str) -> str:
    """Bare if it may be."""
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else toml_value(key)


def toml_value(value: Any) -> str:
    """A value as TOML in one line; tables are inline."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{toml_key(key)} = {toml_value(inner)}' for key, inner in value.items())} }}"
    escaped = str(value).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t")
    return f'"{escaped}"'


def _copy(data: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copy(value) if isinstance(value, Mapping) else value for key, value in data.items()}


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _set(data: dict[str, Any], path: Sequence[str], value: Any) -> list[str]:
    for section in path[:-1]:
        data = data.setdefault(section, {})
        if not isinstance(data, dict):
            return [f"command line: --{'.'.join(path)}: {section} is a value, not a section"]
    data[path[-1]] = value
    return []


def _section(annotation: Any) -> type[Config] | None:
    """The Config behind an annotation such as ``Critic | None``."""
    options = typing.get_args(annotation) if _is_union(annotation) else (annotation,)
    return next((o for o in options if isinstance(o, type) and issubclass(o, Config)), None)


def _is_union(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (typing.Union, types.UnionType)


def _explain(model: type[Config], problem: Any, source: str) -> str:
    path = [str(part) for part in problem["loc"]]
    key = ".".join(path) or "the whole"
    if problem["type"] == "extra_forbidden":
        return f"{source}: unknown key {key}{_nearest(model, path)}"
    if problem["type"] == "missing":
        return f"{source}: {key} is missing"
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "value_error":
        return f"{source}: {key}: {message}" if path else f"{source}: {message}"
    return f"{source}: {key} = {problem['input']!r}: {message[0].lower()}{message[1:]}"


def _nearest(model: type[Config], path: Sequence[str]) -> str:
    """The nearest known key: of the same section first, then of all."""
    section: type[Config] | None = model
    for name in path[:-1]:
        section = _section(section.model_fields[name].annotation) if section and name in section.model_fields else None
    near = difflib.get_close_matches(path[-1], section.model_fields if section else [], 1, 0.6)
    if near:
        return f"; did you mean {'.'.join([*path[:-1], near[0]])}?"
    everywhere = [key for key, *_ in keys(model)]
    same = [key for key in everywhere if key.split(".")[-1] == path[-1]]
    near = same or difflib.get_close_matches(".".join(path), everywhere, 1, 0.8)
    if near:
        return f"; did you mean {near[0]}?"
    return f"; known here: {', '.join(section.model_fields)}" if section else ""
