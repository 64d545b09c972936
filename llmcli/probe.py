"""Which rows of an embedding matrix lie near a vector: exact answers, one tensor read, no torch.

The matrix stays in its file. A first pass over it, in float32 and in chunks that fit a core's cache, gives every row a
score and a proven bound of that score's error; the rows that can still be among the best are scored again in float64.
What is kept of a pass is one length a row.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from llmcli import dots, tensors
from llmcli.errors import UsageError
from llmcli.matrix import Matrix

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.intp]
Metric = Literal["cosine", "dot", "l2"]


class Hit(msgspec.Struct, frozen=True):
    """A row and its score."""

    id: int
    score: float


class Spread(msgspec.Struct, frozen=True):
    """Mean and standard deviation of a score over `pairs` pairs."""

    mean: float
    std: float
    pairs: int


_TINY, _HUGE = 1e-30, 1e30  # squared lengths beyond these are left to float64
_PANEL = 1 << 24  # bytes of rows after which the best so far are sorted out
_PANEL_ROWS = 1 << 13  # and their number, which bounds the memory for their scores
_BATCH = 32  # queries that share a pass


class Rows:
    """A matrix opened for queries. The first query takes the lengths of all rows along; later ones need one pass less.

    `count` leaves out the rows from there on (padding: rows without a token). With `center` the mean of the rows is
    taken from every row, and must be taken from queries that are not rows (`mean` holds it). Rows that are zero (or
    the mean itself, when centred) or not finite have no direction: they are never an answer; `unusable` has them.

    The file is only read. An instance is for one thread at a time, and uses several itself.
    """

    def __init__(self, matrix: Matrix, count: int | None = None, center: bool = False) -> None:
        self.matrix = matrix
        self.count = matrix.rows if count is None else min(count, matrix.rows)
        self._stored = tensors.read_array(matrix.info)
        self._array = self._stored[: self.count]
        self._dtype = matrix.info.dtype
        self._panel = min(max(1, _PANEL // self._stored[0].nbytes), _PANEL_ROWS)
        self._block = max(1, (1 << 17) // matrix.width)  # rows worked on at a time in float64
        self._lengths: npt.NDArray[np.float32] | None = None  # of every row, approximate; 1 where set aside
        self._aside = np.zeros(self.count, bool)  # rows that float32 cannot judge: the unusable, and a few others
        self._unusable: Ids = np.empty(0, np.intp)
        self._extreme: Ids = np.empty(0, np.intp)  # set aside, but usable: too long or too short for float32
        self._void = np.zeros(matrix.rows, bool)  # rows that were zero or not finite before centring
        self.mean: Floats | None = None
        if center:
            self.mean = self._mean()

    def vectors(self, ids: Sequence[int] | Ids) -> Floats:
        """The rows `ids` as float64, (n, d), less the mean when centred."""
        block = _widen64(self._stored[np.asarray(ids, np.intp)], self._dtype)
        return block if self.mean is None else block - self.mean

    def unusable(self) -> Ids:
        """The ids of the rows that have no direction."""
        if self._lengths is None:
            self._scan(np.zeros((0, self.matrix.width)), lambda dots, lengths, slack: (dots, dots), 0)
        return self._unusable

    def nearest(
        self,
        queries: Floats,
        k: int,
        metric: Metric = "cosine",
        exclude: Sequence[Sequence[int]] = (),
        among: Ids | None = None,
    ) -> list[list[Hit]]:
        """For each of the queries (m, d) the `k` best rows, best first, equal scores in the order of ids.

        `exclude` has a list of rows for each query that are no answer; `among` are the only rows that are one. The
        score of l2 is the distance. Raises UsageError for a query without a direction and for a negative `k`.
        """
        lengths = np.linalg.norm(queries, axis=1)
        if not (np.isfinite(lengths).all() and lengths.all()):
            which = int(np.flatnonzero(~(np.isfinite(lengths) & (lengths > 0)))[0])
            raise UsageError(
                f"query {which + 1} is a vector that is zero or not finite: it has no direction",
                "Such a row was never trained, or is damaged; choose another.",
            )
        kinds: dict[Metric, Callable[[Floats], _Score]] = {"cosine": _Cosine, "dot": _Dot, "l2": _Distance}
        hits: list[list[Hit]] = []
        for start in range(0, len(queries), _BATCH):
            some = slice(start, start + _BATCH)
            hits += self.best(kinds[metric](queries[some]), k, exclude[some], among)
        return hits

    def best(
        self, score: _Score, k: int, exclude: Sequence[Sequence[int]] = (), among: Ids | None = None
    ) -> list[list[Hit]]:
        """As `nearest`, for any score."""
        if k < 0:
            raise UsageError(f"-k {k}: a number of neighbours is not negative", "Give 0 or more.")
        left_out = [np.asarray(ids, np.intp) for ids in exclude] or [np.empty(0, np.intp)] * score.queries
        enough = k + max(map(len, left_out), default=0)
        if k == 0:
            return [[] for _ in range(score.queries)]
        if among is not None:
            candidates = [np.unique(among)] * score.queries
        elif enough * 8 >= self.count:
            candidates = [np.arange(self.count)] * score.queries
        else:
            candidates = self._scan(score.unit, score.bounds, enough)
        hits = []
        for query, (ids, out) in enumerate(zip(candidates, left_out, strict=True)):
            ids = np.setdiff1d(ids, out, assume_unique=True)
            values = self._exact(ids, score, query)
            usable = np.isfinite(values)
            ids, values = ids[usable], values[usable]
            order = np.lexsort((ids, -values))[:k]
            hits.append(
                [Hit(int(id), score.shown(float(value))) for id, value in zip(ids[order], values[order], strict=True)]
            )
        return hits

    def random_pairs(self, metric: Metric = "cosine", sample: int = 512) -> Spread:
        """Mean and spread of the score over all pairs of up to `sample` usable rows, the same ones each time."""
        values = self.pairs(metric, sample)
        if not len(values):
            return Spread(0.0, 0.0, 0)
        return Spread(float(values.mean()), float(values.std()), len(values))

    def pairs(self, metric: Metric = "cosine", sample: int = 512) -> Floats:
        """The scores of all pairs of up to `sample` usable rows, the same ones each time."""
        usable = np.setdiff1d(np.arange(self.count), self.unusable(), assume_unique=True)
        block = self.vectors(np.sort(np.random.default_rng(0).permutation(usable)[:sample]))
        gram = block @ block.T
        squares = gram.diagonal()
        if metric == "cosine":
            gram = gram / np.sqrt(np.outer(squares, squares))
        elif metric == "l2":
            gram = np.sqrt(np.maximum(squares[:, None] + squares - 2 * gram, 0))
        return gram[np.triu_indices(len(block), 1)]

    def each(self, work: Callable[[int, Floats], None]) -> None:
        """Call `work` with (first row, some rows as float64) until all rows were had, from several threads at once."""

        def panel(start: int) -> None:
            for first in range(start, min(start + self._panel, self.count), self._block):
                work(first, self.vectors(np.arange(first, min(first + self._block, start + self._panel, self.count))))

        share(panel, range(0, self.count, self._panel))

    def products(self, vectors: Floats) -> Floats:
        """The dot products of vectors of length 1, (t, d), with every row, (t, V), to float32's precision."""
        kernel = dots.Wide(self._array, self._dtype, self.mean)
        unit = vectors.astype(np.float32)
        result = np.empty((len(unit), self.count))

        def panel(start: int) -> None:
            stop = min(start + self._panel, self.count)
            with np.errstate(all="ignore"):
                result[:, start:stop] = kernel.run(unit, start, stop, False)[0]

        share(panel, range(0, self.count, self._panel))
        return result

    def _exact(self, ids: Ids, score: _Score, query: int) -> Floats:
        """The scores of the rows `ids` in float64, NaN for those without a direction."""
        values = np.empty(len(ids))
        step = self._block

        def work(start: int) -> None:
            for first in range(start, min(start + 16 * step, len(ids)), step):
                some = slice(first, min(first + step, start + 16 * step))
                block = self.vectors(ids[some])
                lengths, usable = self.usable(ids[some], block)
                with np.errstate(all="ignore"):
                    values[some] = np.where(usable, score.exact(block, lengths, query), np.nan)

        share(work, range(0, len(ids), 16 * step))
        return values

    def usable(self, ids: Sequence[int] | Ids, block: Floats) -> tuple[Floats, npt.NDArray[np.bool_]]:
        """The lengths of the rows `ids`, whose vectors are `block`, and which of them have a direction."""
        with np.errstate(all="ignore"):
            lengths = np.sqrt(_dot(block, block))
        # A row that is the mean is zero but for rounding.
        floor = 0.0 if self.mean is None else 1e-12 * float(np.linalg.norm(self.mean))
        return lengths, np.isfinite(lengths) & (lengths > floor) & ~self._void[np.asarray(ids, np.intp)]

    def _mean(self) -> Floats:
        """The mean of the rows that are finite and not zero."""
        starts = range(0, self.count, self._panel)
        sums = np.zeros((len(starts), self.matrix.width))
        numbers = np.zeros(len(starts))

        def work(start: int) -> None:
            stop = min(start + self._panel, self.count)
            single = np.empty((self._block, self.matrix.width), np.float32)
            double = np.empty_like(single, np.float64)
            for first in range(start, stop, self._block):
                last = min(first + self._block, stop)
                block = double[: last - first]
                if self._dtype == "F64":
                    np.copyto(block, self._array[first:last])
                else:
                    np.copyto(block, dots.widen(self._array[first:last], self._dtype, single))
                usable = self.usable(np.arange(first, last), block)[1]
                self._void[first:last] = ~usable
                sums[start // self._panel] += (block if usable.all() else block[usable]).sum(0)
                numbers[start // self._panel] += usable.sum()

        share(work, starts)
        mean: Floats = sums.sum(0) / max(numbers.sum(), 1)
        return mean

    def _scan(self, unit: Floats, bounds: _Bounds, k: int) -> list[Ids]:
        """For each query of `bounds`, all rows that may be among its `k` best."""
        first = self._lengths is None
        lengths = np.empty(self.count, np.float32) if self._lengths is None else self._lengths
        kernel = dots.choose(self._array, self._dtype, self.mean, len(unit))
        asked = unit.astype(np.float32)
        far = 0.0 if self.mean is None else float(np.linalg.norm(self.mean))
        kept: list[list[tuple[Ids, Floats, Floats]]] = []  # of each panel, for each query: rows and their bounds
        unusable: list[Ids] = []
        extreme: list[Ids] = []
        lock = threading.Lock()

        def work(start: int) -> None:
            stop = min(start + self._panel, self.count)
            with np.errstate(all="ignore"):
                products, squares = kernel.run(asked, start, stop, first)
                here = lengths[start:stop]
                aside = self._aside[start:stop]
                if squares is not None:
                    plain = (squares > max(_TINY, (1e-4 * far) ** 2)) & (squares < _HUGE) & ~self._void[start:stop]
                    np.logical_not(plain, out=aside)
                    np.sqrt(squares, out=here)
                    here[aside] = 1
                    doubtful = np.flatnonzero(aside) + start
                    for some in np.array_split(doubtful, len(doubtful) // 256 + 1):
                        usable = self.usable(some, self.vectors(some))[1]
                        with lock:
                            unusable.append(some[~usable])
                            extreme.append(some[usable])
                if not len(asked):
                    return
                wide = here.astype(np.float64)
                # Centring rounds by the size of the row and of the mean, not of what is left of them.
                slack = kernel.error + (8 * dots.HALF_ULP * far / wide if far else 0.0)
                lower, upper = bounds(products.astype(np.float64), wide, slack)
            lower[:, aside] = upper[:, aside] = -np.inf
            found = []
            for low, high in zip(lower, upper, strict=True):
                ids = np.flatnonzero((high >= _least(low, k)) & ~aside)
                found.append((ids + start, low[ids], high[ids]))
            with lock:
                kept.append(found)

        share(work, range(0, self.count, self._panel))
        if first:
            self._lengths = lengths
            self._unusable = np.sort(np.concatenate([np.empty(0, np.intp), *unusable]))
            self._extreme = np.sort(np.concatenate([np.empty(0, np.intp), *extreme]))
        candidates = []
        for found in zip(*kept, strict=True):
            ids, low, high = (np.concatenate(part) for part in zip(*found, strict=True))
            candidates.append(np.sort(np.concatenate([ids[high >= _least(low, k)], self._extreme])))
        return candidates


class _Score(Protocol):
    """A score by which rows are ranked: cheap bounds of it for all rows, the exact value for a few."""

    unit: Floats
    """The vectors, of length 1, whose dot products with the rows the bounds need, (t, d)."""
    queries: int

    def bounds(self, dots: Floats, lengths: Floats, slack: Floats | float) -> tuple[Floats, Floats]:
        """Lower and upper bounds (queries, n) from dots (t, n) and lengths (n) of n rows.

        A dot product is off by at most slack times its row's length, a length by at most slack times itself.
        """

    def exact(self, rows: Floats, lengths: Floats, query: int) -> Floats:
        """The scores of rows (n, d) for one query; larger is better."""

    def shown(self, value: float) -> float:
        """The score as the user sees it."""


_Bounds = Callable[[Floats, Floats, "Floats | float"], tuple[Floats, Floats]]


class _Cosine:
    def __init__(self, queries: Floats) -> None:
        self.unit = queries / np.linalg.norm(queries, axis=1, keepdims=True)
        self.queries = len(queries)

    def bounds(self, dots: Floats, lengths: Floats, slack: Floats | float) -> tuple[Floats, Floats]:
        cosine = dots / lengths
        radius = 1.01 * slack * (1 + np.abs(cosine))
        return cosine - radius, cosine + radius

    def exact(self, rows: Floats, lengths: Floats, query: int) -> Floats:
        return np.clip(_dot(rows, self.unit[query]) / lengths, -1, 1)

    def shown(self, value: float) -> float:
        return value


class _Dot:
    def __init__(self, queries: Floats) -> None:
        self._length = np.linalg.norm(queries, axis=1, keepdims=True)
        self.unit = queries / self._length
        self._vectors = queries
        self.queries = len(queries)

    def bounds(self, dots: Floats, lengths: Floats, slack: Floats | float) -> tuple[Floats, Floats]:
        radius = 1.01 * slack * lengths * self._length
        return dots * self._length - radius, dots * self._length + radius

    def exact(self, rows: Floats, lengths: Floats, query: int) -> Floats:
        return _dot(rows, self._vectors[query])

    def shown(self, value: float) -> float:
        return value


class _Distance:
    """Ranked by the negative distance; the bounds are of its square."""

    def __init__(self, queries: Floats) -> None:
        self._length = np.linalg.norm(queries, axis=1, keepdims=True)
        self.unit = queries / self._length
        self._vectors = queries
        self.queries = len(queries)

    def bounds(self, dots: Floats, lengths: Floats, slack: Floats | float) -> tuple[Floats, Floats]:
        square = lengths**2 - 2 * self._length * dots + self._length**2
        radius = 2.05 * slack * lengths * (lengths + self._length)
        return -square - radius, -square + radius

    def exact(self, rows: Floats, lengths: Floats, query: int) -> Floats:
        apart = rows - self._vectors[query]
        return -np.sqrt(_dot(apart, apart))

    def shown(self, value: float) -> float:
        return abs(value)


class Product:
    """3CosMul (Levy and Goldberg, 2014, CoNLL): cosines, moved to 0..1, of the positive vectors multiplied together,
    divided by those of the negative ones plus 0.001.

    `terms` (q, t, d) are the t vectors of each of q questions, `signs` (t) is +1 or -1 for each.
    """

    def __init__(self, terms: Floats, signs: Sequence[int]) -> None:
        self.queries = len(terms)
        unit = terms / np.linalg.norm(terms, axis=2, keepdims=True)
        self.unit = unit.reshape(-1, terms.shape[2])
        self._positive = np.asarray(signs) > 0

    def bounds(self, dots: Floats, lengths: Floats, slack: Floats | float) -> tuple[Floats, Floats]:
        cosine = (dots / lengths).reshape(self.queries, len(self._positive), -1)
        radius = 1.01 * slack * (1 + np.abs(cosine))
        low, high = np.clip(cosine - radius, -1, 1), np.clip(cosine + radius, -1, 1)
        return self._value(low, high), self._value(high, low)

    def exact(self, rows: Floats, lengths: Floats, query: int) -> Floats:
        count = len(self._positive)
        cosine = _dot(rows[None], self.unit[query * count : query * count + count][:, None]) / lengths
        value: Floats = self._value(np.clip(cosine, -1, 1)[None], np.clip(cosine, -1, 1)[None])[0]
        return value

    def shown(self, value: float) -> float:
        return value

    def _value(self, positive: Floats, negative: Floats) -> Floats:
        above = ((1 + positive[:, self._positive]) / 2).prod(1)
        value: Floats = above / (((1 + negative[:, ~self._positive]) / 2).prod(1) + 0.001)
        return value


def _least(lower: Floats, k: int) -> float:
    """What a row must be able to reach to be among the `k` best, given lower bounds of the rows."""
    return float(np.partition(lower, len(lower) - k)[len(lower) - k]) if len(lower) > k else -np.inf


def _dot(rows: Floats, other: Floats) -> Floats:
    """The dot product of each row with the same row of `other`, or with the one vector it is."""
    result: Floats = np.vecdot(rows, other)
    return result


def _widen64(array: npt.NDArray[Any], dtype: str) -> Floats:
    if dtype == "BF16":
        array = tensors.as_float32(array, dtype)
    return array.astype(np.float64)


def share(work: Callable[[int], None], starts: Sequence[int]) -> None:
    """Call `work` with every start, on as many threads as there are cores to use."""
    threads = min(len(starts), _cores())
    if threads <= 1:
        for start in starts:
            work(start)
        return
    queue = iter(starts)
    lock = threading.Lock()
    failures: list[BaseException] = []

    def take() -> None:
        while not failures:
            with lock:
                start = next(queue, None)
            if start is None:
                return
            try:
                work(start)
            except BaseException as failure:
                failures.append(failure)

    others = [threading.Thread(target=take) for _ in range(threads - 1)]
    for thread in others:
        thread.start()
    take()
    for thread in others:
        thread.join()
    if failures:
        raise failures[0]


def _cores() -> int:
    """The cores this process may use, at most eight: more do not read memory faster."""
    if hasattr(os, "sched_getaffinity"):
        return min(len(os.sched_getaffinity(0)), 8)
    return min(os.cpu_count() or 1, 8)
