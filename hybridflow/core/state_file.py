"""Plain state in two files that hold no code: a tree of values as JSON, and the arrays in it as safetensors.

{"num_added": 7, "ring": {"rewards": array}}  <──>  name.json        {"num_added": 7, "ring": {"rewards": array}}
      <─> name.json          {"num_added": 7, "ring": {"rewards": {"$array": "0"}}}
          name.safetensors   0: the array
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from hybridflow.core.batch import Batch, Ragged
from hybridflow.core.errors import CheckpointError, ContractError
from hybridflow.core.files import sync
from hybridflow.core.tensor_file import kind_of, write_tensors

__all__ = ["read_state", "write_state"]

Array = NDArray[Any]


def write_state(folder: Path, name: str, state: Any) -> list[str]:
    """Write a tree of dicts with names as keys, lists, tuples, numbers, texts, arrays and batches; the files' names.

    Raises ContractError: something else is in it.
    """
    arrays: list[Array] = []
    (folder / f"{name}.json").write_text(json.dumps(_encoded(state, arrays), indent=1))
    sync(folder / f"{name}.json")
    if not arrays:
        return [f"{name}.json"]
    order = sorted(range(len(arrays)), key=lambda number: -arrays[number].itemsize)
    tensors = {str(number): torch.from_numpy(np.array(arrays[number])) for number in order}
    kinds = {number: kind_of(tensor) for number, tensor in tensors.items()}
    write_tensors(folder / f"{name}.safetensors", kinds, tensors.values())
    return [f"{name}.json", f"{name}.safetensors"]


def read_state(folder: Path, name: str) -> Any:
    """What ``write_state`` wrote. CheckpointError: it can't be that."""
    arrays: dict[str, Array] = {}
    try:
        if (path := folder / f"{name}.safetensors").is_file():
            with safe_open(path, framework="np") as file:
                arrays = {number: file.get_tensor(number) for number in file.keys()}  # noqa: SIM118 - not a dict
        return _decoded(json.loads((folder / f"{name}.json").read_text()), arrays)
    except (SafetensorError, ValueError, LookupError, TypeError, RecursionError, ContractError) as error:
        raise CheckpointError(f"{folder / name}.json: can't be read ({type(error).__name__}: {error})") from error


def _encoded(value: Any, arrays: list[Array]) -> Any:
    match value:
        case None | bool() | int() | float() | str():
            return value
        case list():
            return [_encoded(item, arrays) for item in value]
        case tuple():
            return {"$tuple": [_encoded(item, arrays) for item in value]}
        case np.ndarray() if value.dtype == object:
            return {"$objects": [_encoded(item, arrays) for item in value.tolist()]}
        case np.ndarray():
            arrays.append(value)
            return {"$array": str(len(arrays) - 1)}
        case Ragged():
            return {"$ragged": [_encoded(value.values, arrays), _encoded(value.lengths, arrays)]}
        case Batch():
            return {"$batch": {name: _encoded(value[name], arrays) for name in value.columns}}
        case Mapping() if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: _encoded(item, arrays) for key, item in value.items()}
    raise ContractError(f"state: {type(value).__name__} {value!r:.80} can't be saved; use numbers, texts and arrays")


def _decoded(value: Any, arrays: Mapping[str, Array]) -> Any:
    match value:
        case list():
            return [_decoded(item, arrays) for item in value]
        case {"$tuple": items}:
            return tuple(_decoded(items, arrays))
        case {"$objects": items}:
            out = np.empty(len(items), object)
            out[:] = _decoded(items, arrays)
            return out
        case {"$array": number}:
            return arrays[number]
        case {"$ragged": [values, lengths]}:
            return Ragged(_decoded(values, arrays), _decoded(lengths, arrays))
        case {"$batch": columns}:
            return Batch({name: _decoded(column, arrays) for name, column in columns.items()})
        case dict():
            return {key: _decoded(item, arrays) for key, item in value.items()}
    return value
