"""What a learner publishes to samplers in other processes, and how they make sure that both have the same policy.

    learner   bucket 0 ─┐ bucket 1 ─┐ ... last bucket, with the log-probabilities of three fixed texts
    sampler             └─ copied   └─ copied ... and then compares its own with them

A bucket holds at most ``BUCKET_BYTES``, so that joining, sending and copying overlap and nobody holds a second model. Every
bucket carries a checksum of its bytes. An update that stepped, after which the same bytes are published, is an error.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from hybridflow.core.batch import Batch, Ragged
from hybridflow.core.errors import WorkerError

__all__ = ["BUCKET_BYTES", "Published", "buckets", "checksum", "compare_probes", "probe_texts"]

BUCKET_BYTES = 64 * 2**20
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.2}
"""Layouts differ by rounding: of SmolLM2 in bfloat16 0.08 on average; one matrix of one layer with halves swapped is off by
0.5 and more."""
_TEXTS, _TOKENS, _PROMPT = 3, 12, 4


@dataclass(frozen=True)
class Published:
    """A bucket of weights of ``version``: full tensors as arrays, by name.

    ``stepped``: whether the learner has taken a step since it published last. ``probe``: in the last bucket of a model that
    reads tokens, the learner's log-probabilities of ``probe_texts``.
    """

    arrays: Mapping[str, np.ndarray]
    checksum: int
    version: int
    stepped: bool
    probe: NDArray[np.float32] | None = None


def buckets(sizes: Mapping[str, int]) -> list[list[str]]:
    """Names of tensors of so many bytes, in their order, a bucket each; a larger tensor has a bucket of its own."""
    out: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if size > room or not out:
            out.append([])
            room = BUCKET_BYTES
        out[-1].append(name)
        room -= size
    return out


def checksum(arrays: Iterable[np.ndarray]) -> int:
    """CRC-32 of all bytes."""
    total = 0
    for array in arrays:
        total = zlib.crc32(np.ascontiguousarray(array).data, total)
    return total


def probe_texts(vocab_size: int) -> Batch:
    """Three fixed texts, as a model scores them."""
    tokens = (np.arange(_TEXTS * _TOKENS, dtype=np.int64) * 7919 + 1) % vocab_size
    lengths = np.full(_TEXTS, _TOKENS)
    mask = np.tile(np.arange(_TOKENS) >= _PROMPT, _TEXTS)
    return Batch(
        {"sample_id": np.arange(_TEXTS), "tokens": Ragged(tokens, lengths), "response_mask": Ragged(mask, lengths)}
    )


def compare_probes(learner: NDArray[np.float32], sampler: NDArray[np.float32], dtype: torch.dtype, version: int) -> float:
    """The mean difference of log-probabilities of the same texts; WorkerError if the policies are not the same one.

    ``learner`` and ``sampler`` have zeros outside the action steps. The mean, because in bfloat16 a single one may be off
    by several times as much.
    """
    steps = _TEXTS * (_TOKENS - _PROMPT)
    error, allowed = float(np.abs(learner - sampler).sum()) / steps, TOLERANCE.get(dtype, TOLERANCE[torch.bfloat16])
    if not error <= allowed:
        raise WorkerError(
            f"publish: with the weights of version {version} the sampler's log-probabilities of fixed texts are off by "
            f"{error:.3g} on average from the learner's, expected at most {allowed:g}; "
            "the sampler would draw from another policy"
        )
    return error
