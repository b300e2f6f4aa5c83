"""Randomness from what it is for, never from who draws it.

Every random number derives from (seed, purpose, ids), so one worker or four, resumed or not, in any batch composition,
use the same numbers.
"""

import hashlib

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

__all__ = ["derive", "generator", "torch_generator", "uniforms"]


def derive(seed: int, purpose: str, *ids: int) -> int:
    """A 63-bit seed for (seed, purpose, ids)."""
    text = "/".join([str(seed), purpose, *map(str, ids)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def generator(seed: int, purpose: str, *ids: int) -> np.random.Generator:
    """A numpy generator for (seed, purpose, ids)."""
    return np.random.Generator(np.random.Philox(derive(seed, purpose, *ids)))


def torch_generator(seed: int, purpose: str, *ids: int) -> torch.Generator:
    """A torch CPU generator for (seed, purpose, ids)."""
    return torch.Generator().manual_seed(derive(seed, purpose, *ids))


def uniforms(seed: int, purpose: str, sample_ids: ArrayLike, positions: ArrayLike) -> NDArray[np.float64]:
    """[B] numbers in [0, 1): entry i depends on (seed, purpose, sample_ids[i], positions[i]) alone.

    A counter-based generator (two rounds of the splitmix64 finaliser), so that no row keeps a state.
    """
    key = np.uint64(derive(seed, purpose))
    ids, places = np.asarray(sample_ids).astype(np.uint64), np.asarray(positions).astype(np.uint64)
    mixed = _mix(_mix(ids + key) ^ (places * np.uint64(0x9E3779B97F4A7C15)))
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
