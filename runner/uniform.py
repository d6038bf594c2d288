"""Counter-based random numbers: a function of (seed, choice, position), the same in any batch and after a resume."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

U64s = npt.NDArray[np.uint64]
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_A, _B = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31, _S11 = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(11)


def mix(x: U64s) -> U64s:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014) over an array of u64; wraps."""
    x = x + GOLDEN
    x = (x ^ (x >> _S30)) * _A
    x = (x ^ (x >> _S27)) * _B
    return x ^ (x >> _S31)


def uniforms(seeds: U64s, choices: U64s, positions: npt.NDArray[np.integer]) -> npt.NDArray[np.float64]:
    """One number in [0, 1) with 53 random bits for each (seed, choice, position); parallel arrays [n]."""
    keys = mix(mix(seeds) ^ choices)
    return (mix(keys ^ mix(positions.astype(np.uint64))) >> _S11).astype(np.float64) * 2.0**-53
