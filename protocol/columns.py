"""Columns on the wire: little-endian packed integers, so that a 1,024-row step costs two memcpys and no loop."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

I32 = np.dtype("<i4")
U64 = np.dtype("<u8")
F32 = np.dtype("<f4")

IntArray = npt.NDArray[np.int32]
IdArray = npt.NDArray[np.uint64]


def pack_i32(values: Sequence[int] | npt.NDArray[np.integer]) -> bytes:
    """`values` as packed little-endian int32. Raises OverflowError if one does not fit."""
    if not len(values):
        return b""
    array = np.asarray(values)
    if array.dtype != I32:
        if array.size and (array.max() > 0x7FFFFFFF or array.min() < -0x80000000):
            raise OverflowError("a value does not fit in 32 bits")
        array = array.astype(I32)
    return array.tobytes()


def pack_u64(values: Sequence[int] | npt.NDArray[np.uint64]) -> bytes:
    """`values` as packed little-endian uint64. Raises OverflowError if one is negative or does not fit."""
    return np.asarray(values, dtype=U64).tobytes()


def i32(data: bytes) -> IntArray:
    """A read-only int32 view of a column. Raises ValueError if its length is not a multiple of 4."""
    return np.frombuffer(data, dtype=I32)


def u64(data: bytes) -> IdArray:
    """A read-only uint64 view of a column. Raises ValueError if its length is not a multiple of 8."""
    return np.frombuffer(data, dtype=U64)


def f32(data: bytes) -> npt.NDArray[np.float32]:
    """A read-only float32 view of a column. Raises ValueError if its length is not a multiple of 4."""
    return np.frombuffer(data, dtype=F32)
