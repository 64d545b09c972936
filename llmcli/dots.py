"""Dot products of a large matrix's rows with a few vectors, in float32, with a proven bound of their error.

A pass over the matrix costs little more than reading it: numpy alone does, in calls that fit a core's own cache and
let other threads run; for bfloat16 the package simsimd (extra `probe`) does better.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from llmcli import tensors

Singles = npt.NDArray[np.float32]

HALF_ULP = 2.0**-24
"""The relative error of rounding to float32."""
_CHUNK = 1 << 19  # bytes of rows worked on at a time: a part of a core's own cache
_MANY = 16  # vectors from which a matrix product is worth more than a product at a time, which no BLAS splits


def widen(stored: npt.NDArray[Any], dtype: str, buffer: Singles) -> Singles:
    """Stored rows (n, d) as float32, in the first n rows of the buffer, or as they are where nothing needs doing."""
    if dtype == "F32" and stored.flags.aligned:
        return stored
    block = buffer[: len(stored)]
    if dtype == "BF16":
        bits = block.view(np.uint32)
        np.copyto(bits, stored)
        np.left_shift(bits, 16, out=bits)
    else:
        np.copyto(block, stored, casting="same_kind")
    return block


def choose(array: npt.NDArray[Any], dtype: str, mean: npt.NDArray[np.float64] | None, vectors: int) -> Kernel:
    """The fastest way to multiply the rows of `array` (as stored, of safetensors' `dtype`), less `mean` if there is
    one, with so many vectors."""
    if dtype == "BF16" and mean is None and vectors <= 4:
        if Simd.fits(array):
            return Simd(array)
        if Pairs.fits(array):
            return Pairs(array)
    return Wide(array, dtype, mean)


class Kernel(Protocol):
    """Dot products of many rows with a few vectors of length 1, in float32."""

    error: float
    """A product is off by at most this times its row's length, a length by at most this times itself."""

    def run(self, unit: Singles, start: int, stop: int, lengths: bool) -> tuple[Singles, Singles | None]:
        """The products of unit (t, d) with the rows start:stop, (t, n); with `lengths` also their squared lengths."""


class Wide:
    """Rows of any type as float32, a chunk at a time, less the mean when there is one.

    A float32 sum of d products, in whatever order, is off by at most d half-ulps of the sum of their sizes (Higham,
    Accuracy and Stability of Numerical Algorithms, 3.1); rounding query, row and mean to float32 adds one each.
    """

    def __init__(self, array: npt.NDArray[Any], dtype: str, mean: npt.NDArray[np.float64] | None) -> None:
        self._array, self._dtype = array, dtype
        self._chunk = max(1, _CHUNK // array[0].nbytes)
        self._mean = None if mean is None else mean.astype(np.float32)
        self.error = 1.01 * (array.shape[1] + 16) * HALF_ULP

    def run(self, unit: Singles, start: int, stop: int, lengths: bool) -> tuple[Singles, Singles | None]:
        products = np.empty((len(unit), stop - start), np.float32)
        squares = np.empty(stop - start, np.float32) if lengths else None
        buffer = np.empty((self._chunk, self._array.shape[1]), np.float32)
        for first in range(start, stop, self._chunk):
            last = min(first + self._chunk, stop)
            here = slice(first - start, last - start)
            block = widen(self._array[first:last], self._dtype, buffer)
            if self._mean is not None:
                block = np.subtract(block, self._mean, out=buffer[: len(block)])
            if len(unit) > _MANY:
                products[:, here] = unit @ block.T
            else:
                for vector, out in zip(unit, products, strict=True):
                    np.vecdot(block, vector, out=out[here])
            if squares is not None:
                np.vecdot(block, block, out=squares[here])
        return products, squares


class Pairs:
    """bfloat16 rows without widening them: every two neighbours in memory, read as one float32.

    The high half of the four bytes is the second of the pair (memory is little-endian); the low half, the first, only
    adds noise of less than 2^-7 of the number, always away from zero. Copied to begin one number earlier, the other
    numbers come to stand in the high halves. Multiplied by 1 / (1 + 2^-8) the noise lies between -2^-8 / (1 + 2^-8)
    and +2^-8 / (1 + 2^-8) of each number, so the dot product with a vector of length 1 is off by at most that part of
    the row's length (Cauchy-Schwarz). So a pass reads the file where it lies, once, at about the speed of memory.
    """

    _shrink = np.float32(1 / (1 + 2.0**-8))

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self._array, self._width = array, array.shape[1]
        self._flat = array.reshape(-1)
        self._odd = array.view(np.float32)  # columns 1, 3, 5, ...
        self._chunk = max(1, _CHUNK // array[0].nbytes)
        self.error = 2.0**-8 / (1 + 2.0**-8) + 1.02 * (self._width + 16) * HALF_ULP

    @staticmethod
    def fits(array: npt.NDArray[Any]) -> bool:
        """Whether rows hold whole pairs, and lie so that pairs can be read as they are."""
        return array.shape[1] % 2 == 0 and array.ctypes.data % 4 == 0 and np.little_endian

    def run(self, unit: Singles, start: int, stop: int, lengths: bool) -> tuple[Singles, Singles | None]:
        sums = np.empty((2, len(unit) + lengths, stop - start), np.float32)
        begin = start
        if begin == 0:  # the first row has nothing before it
            row = tensors.as_float32(self._array[0], "BF16")
            sums[:, :, 0] = np.concatenate([unit, row[None]] if lengths else [unit]) @ row / self._shrink / 2
            begin = 1
        buffer = np.empty((self._chunk, self._width), np.uint16)
        whole = begin + (stop - begin) // self._chunk * self._chunk
        for first, last in ((begin, whole), (whole, stop)):
            if first < last:
                some = buffer[: min(self._chunk, last - first)]
                self._run(unit, first, last, some, sums[:, :, first - start : last - start])
        total = (sums[0] + sums[1]) * self._shrink
        return total[: len(unit)], total[-1] * self._shrink if lengths else None

    def _run(self, unit: Singles, first: int, last: int, buffer: npt.NDArray[np.uint16], sums: Singles) -> None:
        """The rows first:last, which are a multiple of the buffer's. As few and long calls as the cache allows:
        between calls the threads wait for each other."""
        odd, even = np.ascontiguousarray(unit[:, 1::2]), np.ascontiguousarray(unit[:, ::2])
        rows, flat = len(buffer), buffer.reshape(-1)
        moved = flat.view(np.float32).reshape(rows, -1)  # columns 0, 2, 4, ...
        blocks = self._odd[first:last].reshape(-1, rows, self._width // 2)
        sources = self._flat[first * self._width - 1 : last * self._width - 1].reshape(-1, flat.size)
        # (chunks, 2, vectors, rows)
        results = sums.reshape(*sums.shape[:2], -1, rows).transpose(2, 0, 1, 3)
        for block, source, (ones, others) in zip(blocks, sources, results, strict=True):
            for vector, out in zip((*odd, block)[: len(ones)], ones, strict=True):
                np.vecdot(block, vector, out=out)
            np.copyto(flat, source)
            for vector, out in zip((*even, moved)[: len(others)], others, strict=True):
                np.vecdot(moved, vector, out=out)


class Simd:
    """bfloat16 rows by the instructions made for them, with the package simsimd: a pass at the speed of memory.

    Rounding the vectors to bfloat16 moves them by at most 2^-9 of their length; the products are summed in float32,
    on some processors with one more rounding for every two.
    """

    def __init__(self, array: npt.NDArray[Any]) -> None:
        import simsimd

        self._simsimd, self._array = simsimd, array
        self._chunk = max(1, _CHUNK // array[0].nbytes)
        self.error = 2.0**-9 + 2.04 * (array.shape[1] + 16) * HALF_ULP

    @staticmethod
    def fits(array: npt.NDArray[Any]) -> bool:
        """Whether the package is there with more than plain C for this processor, and the rows lie as it reads them."""
        try:
            import simsimd
        except ImportError:
            return False
        faster = any(there for name, there in simsimd.get_capabilities().items() if name != "serial")
        return faster and bool(array.flags.aligned)

    def run(self, unit: Singles, start: int, stop: int, lengths: bool) -> tuple[Singles, Singles | None]:
        vectors = _bfloat16(unit)
        products = np.empty((len(unit), stop - start), np.float32)
        squares = np.empty(stop - start, np.float32) if lengths else None
        step = self._chunk if lengths else stop - start
        for first in range(start, stop, step):
            rows = self._array[first : min(first + step, stop)]
            here = slice(first - start, first - start + len(rows))
            if len(unit):
                products[:, here] = self._simsimd.cdist(vectors, rows, "dot", dtype="bf16")
            if squares is not None:
                squares[here] = self._simsimd.dot(rows, rows, "bf16")
        return products, squares


def _bfloat16(values: Singles) -> npt.NDArray[np.uint16]:
    """The bits of the nearest bfloat16 (ties to even) of finite values."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
