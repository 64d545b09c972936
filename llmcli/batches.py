"""Which tokens a step sees: batches cut from a text of token ids.

That is a pure function of the seed and the step, so there is no state to lose: a run goes on where it stopped, and any
number of processes share the same order.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np
import numpy.typing as npt

from llmcli.data import Tokens

Ids = npt.NDArray[np.int64]

AHEAD = 4096
"""Sequences whose places are computed at once: some milliseconds, and 32 kB."""


def windows(tokens: int, context: int) -> int:
    """How many windows of `context` predictions a text is cut into; the rest at its end is left out."""
    return (tokens - 1) // context


def starts(tokens: int, context: int, first: int, count: int, seed: int, shuffle: str) -> Ids:
    """Where the sequences number `first` to `first + count - 1` of a run begin: a pure function.

    `windows`: each epoch visits every window once, in an order of its own. `random`: anywhere, with repetition.
    """
    number = np.arange(first, first + count, dtype=np.uint64)
    if shuffle == "random":
        return (_mix(number, _key(seed)) % np.uint64(tokens - context)).astype(np.int64)
    size = windows(tokens, context)
    epoch, index = np.divmod(number, np.uint64(size))
    return permuted(index, size, _mix(epoch, _key(seed))).astype(np.int64) * context


class Order:
    """`starts`, asked for a batch at a time and computed for thousands, which costs hardly more than for one."""

    def __init__(self, tokens: int, context: int, seed: int, shuffle: str) -> None:
        self._of = tokens, context, seed, shuffle
        self._first, self._begin = 0, np.empty(0, dtype=np.int64)

    def __call__(self, first: int, count: int) -> Ids:
        """Where the sequences number `first` to `first + count - 1` of a run begin."""
        if not self._first <= first <= first + count <= self._first + len(self._begin):
            tokens, context, seed, shuffle = self._of
            self._first, self._begin = first, starts(tokens, context, first, max(count, AHEAD), seed, shuffle)
        return self._begin[first - self._first :][:count]


def sequences(tokens: Tokens, context: int, begin: Ids) -> Ids:
    """The sequences that begin there, (B, context + 1): inputs but for the last column, targets but for the first."""
    result: Ids = tokens[begin[:, None] + np.arange(context + 1)].astype(np.int64)
    return result


def held_out(tokens: Tokens, context: int, batch: int, limit: int) -> Iterator[Ids]:
    """Batches (batch, context + 1) that predict each token of a text once, or `limit` windows spread over it evenly.

    What a window or a batch lacks is filled with -100, which as a target does not count; every batch has one shape.
    """
    begin = np.arange(0, len(tokens) - 1, context)
    if limit and len(begin) > limit:
        begin = begin[np.linspace(0, len(begin) - 1, limit).round().astype(np.int64)]
    for first in range(0, len(begin), batch):
        filled = np.full((batch, context + 1), -100, dtype=np.int64)
        for row, start in zip(filled, begin[first : first + batch], strict=False):
            window = tokens[start : start + context + 1]
            row[: len(window)] = window
        yield filled


def shared(batches: Iterator[Ids], rank: int, count: int) -> Iterator[Ids]:
    """Every count-th batch; where the last round does not reach this process, one in which nothing counts."""
    while round := list(islice(batches, count)):
        yield round[rank] if rank < len(round) else np.full_like(round[0], -100)


def mixed(*numbers: int) -> int:
    """A hash of several integers, 64 bits: seeds that depend on more than one thing."""
    value = np.zeros(1, dtype=np.uint64)
    for number in numbers:
        value = _mix(value ^ np.array([number], dtype=np.uint64), _key(0))
    return int(value[0])


def _key(seed: int) -> npt.NDArray[np.uint64]:
    return _mix(np.array([seed], dtype=np.uint64), np.array([0x6C6C6D636C69], dtype=np.uint64))


def _mix(value: npt.NDArray[np.uint64], key: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """A hash of 64-bit integers (the finaliser of SplitMix64, doi:10.1145/2714064.2660195)."""
    z = value + key + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def permuted(index: npt.NDArray[np.uint64], size: int, key: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """A permutation of 0 .. size - 1 at `index`, one for each key, without a table: 64 bits however large the text.

    A Feistel network over the next power of four, walked until it lands inside (Black and Rogaway, 2002).
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    result = index.copy()
    outside = np.ones(len(index), dtype=bool)
    while outside.any():
        left, right = result[outside] >> half, result[outside] & mask
        keys = np.broadcast_to(key, index.shape)[outside]
        for turn in np.arange(8, dtype=np.uint64)[:, None]:
            left, right = right, left ^ (_mix(right, _mix(keys, turn)) & mask)
        result[outside] = (left << half) | right
        outside = result >= np.uint64(size)
    return result
