"""Files of tensors in the safetensors format, written one tensor after another.

safetensors itself writes them too, but takes all tensors at once. Here only one has to be there at a time, and the file is
hashed on its way to the disk. Reading is left to ``safetensors.safe_open``, which maps the file and copies what is wanted.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hybridflow.core.files import Written

__all__ = ["Kind", "kind_of", "write_tensors"]

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class Kind(NamedTuple):
    """What a file says of a tensor before it."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * int(np.prod(self.shape, dtype=np.int64))


def kind_of(tensor: Tensor) -> Kind:
    return Kind(tensor.dtype, tuple(tensor.shape))


def write_tensors(
    path: Path, kinds: Mapping[str, Kind], tensors: Iterable[Tensor], metadata: Mapping[str, str] | None = None
) -> Written:
    """Write ``tensors``, which come in the order of ``kinds``, and wait until they are on disk; the file, by its own name.

    Readers map a tensor in place, so those of larger numbers have to come first. ``metadata``: read back by
    ``safe_open(...).metadata()``. Raises OSError.
    """
    header, end = {"__metadata__": {"format": "pt", **(metadata or {})}}, 0
    for name, (dtype, shape) in kinds.items():
        begin, end = end, end + Kind(dtype, shape).num_bytes
        assert begin % dtype.itemsize == 0, f"{name} is not where its numbers can be read in place"
        header[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [begin, end]}  # type: ignore[dict-item]
    told = json.dumps(header, separators=(",", ":")).encode()
    told += b" " * (-len(told) % 8)
    content = hashlib.sha256()
    with path.open("wb") as file:
        for part in (len(told).to_bytes(8, "little"), told):
            content.update(part)
            file.write(part)
        for expected, tensor in zip(kinds.values(), tensors, strict=True):
            assert kind_of(tensor) == expected
            if tensor.numel():  # torch can't view as bytes what is empty
                data = np.from_dlpack(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)).data
                content.update(data)
                file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return Written(path.name, content.hexdigest(), 8 + len(told) + end)
