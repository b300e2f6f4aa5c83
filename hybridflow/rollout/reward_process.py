"""The process that runs reward functions: it loads them, calls them and reports every result as it comes.

Standard library only, so that it starts in a fraction of a second. The parent writes pickles to its standard input: first
the specs of the functions and how much memory they may take, then chunks of calls. The child answers with lines of JSON:
what the functions' signatures ask for, then one line a call. See ``rollout.reward_workers`` for the parent's side.

A spec can set parameters: in ``package.module:words_over?limit=50`` the function is called with ``limit=50`` on every row.
Several are joined by ``&``; ``%26`` is a ``&`` and ``%25`` a ``%`` within a value. Values are read as what the parameter is
annotated with, or what its default is: bool, int, float or str.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import json
import os
import pickle
import resource
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple, TypeVar
from urllib.parse import unquote

__all__ = ["LoadError", "Signature", "checked", "load", "main", "needs", "short", "signature"]

F = TypeVar("F", bound=Callable[..., Any])

MAX_FILE_BYTES = 2**30
_MAX_SCORE = 3.4e38  # scores are stored as float32
_NUMBER = (int, float)  # bool is an int


class LoadError(Exception):
    """A reward function can't be loaded; the message is for the user."""


class Signature(NamedTuple):
    """What a call must and may pass by keyword; ``open`` functions take every other keyword too."""

    required: Sequence[str]
    optional: Sequence[str]
    open: bool

    def pick(self, given: dict[str, Any]) -> dict[str, Any]:
        """Those of ``given`` that the function takes."""
        return given if self.open else {name: given[name] for name in (*self.required, *self.optional) if name in given}


def main() -> None:
    """Answer the parent until it closes the pipe."""
    threading.Thread(target=_follow_parent, args=(os.getppid(),), daemon=True).start()
    calls, reports = _take_pipes()
    specs, max_bytes = pickle.load(calls)
    _limit(resource.RLIMIT_DATA, max_bytes)
    _limit(resource.RLIMIT_CORE, 0)
    try:
        functions, signatures = zip(*map(load, specs), strict=True)
    except LoadError as error:
        _report(reports, {"error": str(error)})
        return
    _report(reports, {"signatures": signatures})
    _limit(resource.RLIMIT_FSIZE, MAX_FILE_BYTES)  # not before: what a function needs may be a model that it fetches
    while True:
        try:
            chunk = pickle.load(calls)
        except EOFError:
            return
        for function, arguments in chunk:
            _report(reports, _call(functions[function], arguments))


def needs(load: Callable[[], object]) -> Callable[[F], F]:
    """Mark a reward function that has something to load first, such as a model.

    ``load`` is called when the function is loaded: no row's call waits for it, and what is missing is told, as a LoadError,
    before a run starts. It should keep what it has loaded (``functools.cache``).
    """

    def mark(function: F) -> F:
        _NEEDS[function] = load
        return function

    return mark


def load(spec: str) -> tuple[Callable[..., Any], Signature]:
    """The function behind ``package.module:function`` or ``path/file.py:function``, ready to call, and what it takes.

    LoadError says what is not there.
    """
    path, _, query = spec.partition("?")
    function = _find(path, spec)
    taken = signature(function, spec)
    if isinstance(function, FunctionType) and function in _NEEDS:
        _prepare(_NEEDS[function], spec)
    if not query:
        return function, taken
    fixed = _fixed(function, query, spec)
    required, optional = ([name for name in names if name not in fixed] for names in (taken.required, taken.optional))
    return lambda **given: function(**(given | fixed)), Signature(required, optional, taken.open)


def _find(path: str, spec: str) -> Callable[..., Any]:
    place, _, name = path.rpartition(":")
    if not place or not name:
        raise LoadError(f'reward {spec!r}: expected "package.module:function" or "path/file.py:function"')
    module = _load_file(Path(place), spec) if place.endswith(".py") else _load_module(place, spec)
    function = vars(module).get(name)
    if function is None:
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        near = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(known) or 'no functions'}"
        raise LoadError(f"reward {spec!r}: {place} has no function {name!r}; {hint}")
    if not callable(function):
        raise LoadError(f"reward {spec!r}: {name} is a {type(function).__name__}, expected a function")
    return function  # type: ignore[no-any-return]


def signature(function: Callable[..., Any], spec: str) -> Signature:
    """What a function takes. LoadError if it can't be called by keyword."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        raise LoadError(f"reward {spec!r}: its signature can't be read; wrap it in a function written in Python") from None
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty]
    if positional:
        raise LoadError(f"reward {spec!r}: parameter {positional[0]!r} is positional-only, expected one passed by keyword")
    keyword = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    required = [p.name for p in keyword if p.default is p.empty]
    optional = [p.name for p in keyword if p.default is not p.empty]
    return Signature(required, optional, any(p.kind is p.VAR_KEYWORD for p in parameters))


def _prepare(first: Callable[[], object], spec: str) -> None:
    try:
        first()
    except LoadError as error:
        raise LoadError(f"reward {spec!r}: {error}") from None
    except Exception as error:
        raise LoadError(f"reward {spec!r}: loading what it needs failed: {type(error).__name__}: {error}") from None


def _fixed(function: Callable[..., Any], query: str, spec: str) -> dict[str, Any]:
    """The parameters that a spec sets."""
    keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    known = {name: p for name, p in inspect.signature(function).parameters.items() if p.kind in keyword}
    fixed: dict[str, Any] = {}
    for part in query.split("&"):
        name, equals, text = part.partition("=")
        if not equals or name in fixed:
            raise LoadError(f"reward {spec!r}: {part!r} after '?' should be parameter=value, once for each parameter")
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(known) or 'none'}"
            raise LoadError(f"reward {spec!r}: the function has no parameter {name!r}; {hint}")
        fixed[name] = _read(known[name], unquote(text), spec)
    return fixed


def _read(parameter: inspect.Parameter, text: str, spec: str) -> bool | int | float | str:
    kind = _kind(parameter)
    if kind not in _READERS:
        raise LoadError(f"reward {spec!r}: parameter {parameter.name!r} is a {kind}; only {', '.join(_READERS)} can be set")
    try:
        return _READERS[kind](text)
    except ValueError:
        raise LoadError(f"reward {spec!r}: {parameter.name} = {text!r}: expected {kind}") from None


def _kind(parameter: inspect.Parameter) -> str:
    """What the parameter is annotated with, or else the type of its default; str if it has neither."""
    note, default = parameter.annotation, parameter.default
    if note is parameter.empty:
        return "str" if default is parameter.empty or default is None else type(default).__name__
    return (note if isinstance(note, str) else inspect.formatannotation(note)).removesuffix(" | None")


def _bool(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError(text)
    return text == "true"


_READERS: dict[str, Callable[[str], bool | int | float | str]] = {"bool": _bool, "int": int, "float": float, "str": str}
_NEEDS: dict[Callable[..., Any], Callable[[], object]] = {}  # what a function needs loaded first


def checked(value: Any) -> tuple[float, dict[str, float]] | str:
    """(score, metrics) of what a function returned, or the reason why it is no score."""
    others: dict[Any, Any] = {}
    if isinstance(value, dict):
        if "score" not in value:
            return f"returned a dict without 'score', with {', '.join(map(repr, value)) or 'no entries'}"
        others = {key: _plain(entry) for key, entry in value.items() if key != "score"}
        value = value["score"]
    score = _plain(value)
    if not isinstance(score, _NUMBER):
        return f"returned {short(repr(value))} ({type(value).__name__}), expected a finite number or a dict with 'score'"
    if not abs(score) <= _MAX_SCORE:
        return f"returned {short(repr(score))}, expected a finite number"
    # A metric that is NaN or infinite says "doesn't apply here".
    metrics = {str(k): float(v) for k, v in others.items() if isinstance(v, _NUMBER) and abs(v) <= _MAX_SCORE}
    return float(score), metrics


def _call(function: Callable[..., Any], arguments: dict[str, Any]) -> tuple[float, dict[str, float]] | str:
    """(score, metrics) or a reason."""
    try:
        return checked(function(**arguments))
    except (Exception, SystemExit) as error:  # whatever the user's code raises is this call's failure, not ours
        return f"raised {type(error).__name__}: {short(str(error), 300)}"


def _plain(value: Any) -> Any:
    """numpy scalars as Python numbers, without importing numpy."""
    numpy = sys.modules.get("numpy")
    return value.item() if numpy is not None and isinstance(value, numpy.generic) else value


def _load_module(name: str, spec: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        if name != missing and not name.startswith(missing + "."):
            raise LoadError(f"reward {spec!r}: importing {name} failed: no module {missing!r}; install it") from None
        hint = 'a file is given as "path/file.py:function"'
        raise LoadError(f"reward {spec!r}: no module {missing!r} in {Path.cwd()} or the Python path; {hint}") from None
    except Exception as error:
        raise LoadError(f"reward {spec!r}: importing {name} failed: {type(error).__name__}: {error}") from None


def _load_file(path: Path, spec: str) -> ModuleType:
    if not path.is_file():
        found = [str(file) for file in path.parent.glob("*.py")] if path.parent.is_dir() else []
        near = difflib.get_close_matches(str(path), found, 1)
        raise LoadError(f"reward {spec!r}: no file {path.absolute()}{f'; did you mean {near[0]}?' if near else ''}")
    description = importlib.util.spec_from_file_location(path.stem, path)
    assert description is not None and description.loader is not None  # it ends in .py
    module = importlib.util.module_from_spec(description)
    sys.path.insert(0, str(path.parent.absolute()))  # its neighbours, as when it is run as a script
    sys.modules.setdefault(path.stem, module)  # dataclasses and pickle look their module up
    try:
        description.loader.exec_module(module)
    except Exception as error:
        raise LoadError(f"reward {spec!r}: running {path} failed: {type(error).__name__}: {error}") from None
    return module


def _limit(kind: int, most: int) -> None:
    """Let this process, and what it starts, have so much and no more."""
    hard = resource.getrlimit(kind)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (most, most))


def _take_pipes() -> tuple[Any, int]:
    """The parent's pipes, moved away from where functions read and print: input is empty, prints go to standard error."""
    calls, reports = os.fdopen(os.dup(0), "rb"), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    return calls, reports


def _report(pipe: int, message: Any) -> None:
    line = json.dumps(message).encode() + b"\n"
    try:
        while line:
            line = line[os.write(pipe, line) :]
    except BrokenPipeError:  # the parent died: nobody to tell
        os._exit(1)


def _follow_parent(parent: int) -> None:
    """End with the parent, also when it was killed while a function runs on without end."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def short(text: str, limit: int = 80) -> str:
    """In one line, cut to ``limit`` characters."""
    return " ".join(text.split()) if len(text) <= limit else " ".join(text[: limit - 3].split()) + "..."
