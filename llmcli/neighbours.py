"""What is asked of an embedding matrix in words: the tokens near a token, a text, a vector or an analogy."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from llmcli.errors import DataError, TokenizerError, UsageError, dimensions, unreadable
from llmcli.matrix import Side
from llmcli.names import Names, Token
from llmcli.probe import Floats, Hit, Ids, Metric, Product, Rows, Spread


class Neighbour(msgspec.Struct, frozen=True):
    """A row and its score."""

    token: str
    id: int
    score: float


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """The rows nearest to a query in one matrix, best first."""

    query: Token
    neighbours: tuple[Neighbour, ...]
    left_out: tuple[str, ...] = ()
    """The tokens a query is made of, which are no answer to it."""
    baseline: Spread | None = None


class Comparison(msgspec.Struct, frozen=True, omit_defaults=True):
    """The rows nearest to a query in the input and in the output matrix; `overlap` is the share of rows in both."""

    query: Token
    input: tuple[Neighbour, ...]
    output: tuple[Neighbour, ...]
    overlap: float
    left_out: tuple[str, ...] = ()
    baseline: dict[Side, Spread] | None = None


class Query(msgspec.Struct, frozen=True):
    """A vector to be made of rows: their weighted sum (of unit vectors, when `unit`), or one given as numbers."""

    name: Token
    ids: tuple[int, ...] = ()
    weights: tuple[float, ...] = ()
    unit: bool = False
    given: tuple[float, ...] = ()

    @property
    def left_out(self) -> tuple[int, ...]:
        """The rows that are no answer: those it is made of."""
        return self.ids

    def vector(self, rows: Rows, names: Names) -> Floats:
        """The vector, (d,), centred when the rows are. Raises UsageError for a row without a direction."""
        if self.given:
            vector = np.asarray(self.given)
            return vector if rows.mean is None else vector - rows.mean
        block = rows.vectors(self.ids)
        usable = rows.usable(self.ids, block)[1]
        if not usable.all():
            bad = self.ids[int(np.flatnonzero(~usable)[0])]
            raise UsageError(
                f"{names.of(bad)} (row {bad}) is zero or not finite"
                f"{' after centring' if rows.mean is not None else ''}: it has no direction",
                "Its token was never trained, or the file is damaged; ask for another.",
            )
        if self.unit:
            block = block / np.linalg.norm(block, axis=1, keepdims=True)
        vector = np.asarray(self.weights) @ block
        return vector


def token_queries(names: Names, words: Iterable[str]) -> list[Query]:
    """One query for each token named. Raises TokenizerError as `Names.id` does, with a way to ask for all pieces."""
    queries = []
    for word in words:
        try:
            queries.append(_row(names, names.id(word)))
        except TokenizerError as error:
            if not names.known or word.startswith("#") or len(names.tokenizer.encode(word, special=False)) < 2:
                raise
            mean = f"For the mean of its pieces: --text {shlex.quote(word)} --mean."
            raise TokenizerError(error.message, f"{error.hint} {mean}") from None
    return queries


def text_queries(names: Names, text: str) -> list[Query]:
    """One query for each token of a text."""
    if not names.known:
        raise names.unread or TokenizerError(
            "a text needs a tokenizer, and there is none beside the weights", "Name rows as #id."
        )
    ids = names.tokenizer.encode(text, special=False)
    if not ids:
        raise UsageError(f"--text {text!r} has no tokens", "Give some text.")
    names.check(ids)
    return [_row(names, id) for id in dict.fromkeys(ids)]


def _row(names: Names, id: int) -> Query:
    return Query(names.token(id), (id,), (1.0,))


def mean_query(names: Names, queries: Sequence[Query]) -> Query:
    """The mean of the rows of several queries."""
    ids = tuple(id for query in queries for id in query.ids)
    if not ids:
        raise UsageError("--mean: there are no tokens to take the mean of", "Give tokens or --text.")
    name = "mean of " + ", ".join(names.of(id) for id in ids)
    return Query(Token(name, None), ids, (1 / len(ids),) * len(ids))


def vector_queries(path: Path, width: int) -> list[Query]:
    """The vectors in a file: .npy, or JSON with one list of numbers or a list of such lists.

    Raises UsageError for a path that is no file's, DataError for what it holds.
    """
    try:
        values = np.load(path, allow_pickle=False) if path.suffix == ".npy" else np.asarray(json.loads(_read(path)))
        values = np.atleast_2d(values.astype(np.float64, casting="safe" if values.dtype.kind in "biuf" else "no"))
    except OSError as error:
        raise unreadable(path, error, DataError) from None
    except (ValueError, TypeError, RecursionError):
        raise DataError(
            f"{path}: not a vector of numbers", "Give a .npy file, or JSON: [0.1, -0.2, ...] or a list of such lists."
        ) from None
    if values.ndim != 2 or values.shape[1] != width or not len(values):
        raise DataError(
            f"{path}: holds {dimensions(values.shape)} numbers, a row has {width}", f"Give vectors of {width} numbers."
        )
    names = [path.name] if len(values) == 1 else [f"{path.name}[{n}]" for n in range(len(values))]
    return [Query(Token(name, None), given=tuple(row)) for name, row in zip(names, values.tolist(), strict=True)]


def analogy_query(names: Names, text: str) -> Query:
    """`king - man + woman` as the sum of unit vectors with signs (3CosAdd; Mikolov, Yih and Zweig, 2013, NAACL).

    A term is a word as it stands in running text, so ` king` where that is a token, else as it is spelled; one in
    quotes is taken as it is, and may hold spaces. Raises UsageError for what is not such a sum.
    """
    parts = re.findall(r"\"[^\"]*\"|'[^']*'|\S+", text)
    signs: list[float] = []
    ids: list[int] = []
    sign: float | None = 1.0
    for place, part in enumerate(parts):
        if part in ("+", "-") and (sign is None or place == 0):
            sign = 1.0 if part == "+" else -1.0
        elif sign is None:
            raise UsageError(f"--analogy {text!r}: no + or - before {part!r}", 'For example: "king - man + woman".')
        else:
            if len(part) > 1 and part[0] == part[-1] and part[0] in "\"'":
                ids.append(names.id(part[1:-1]))
            else:
                word = None if part.startswith("#") else names.word(part)
                ids.append(names.id(part) if word is None else word)
            signs.append(sign)
            sign = None
    if sign is not None or len(ids) < 2:
        raise UsageError(
            f"--analogy {text!r}: not a sum of at least two tokens",
            'For example: "king - man + woman", with spaces around the signs.',
        )
    if not any(sign > 0 for sign in signs):
        raise UsageError(f"--analogy {text!r}: nothing is added", 'For example: "king - man + woman".')
    shown = " ".join(f"{'+-'[sign < 0]} {names.of(id)}" for sign, id in zip(signs, ids, strict=True))
    return Query(Token(shown.removeprefix("+ "), None), tuple(ids), tuple(signs), unit=True)


Method = Literal["add", "mul"]


def ask(
    opened: Mapping[Side, Rows],
    names: Names,
    queries: Sequence[Query],
    k: int,
    *,
    metric: Metric = "cosine",
    method: Method = "add",
    among: Ids | None = None,
    baseline: bool = False,
) -> list[Answer] | list[Comparison]:
    """The answers to queries: in one matrix, or in both side by side. Raises UsageError as `nearest` does.

    With `baseline`, they come with what random pairs of rows score.
    """
    found = [nearest(rows, names, queries, k, metric=metric, method=method, among=among) for rows in opened.values()]
    spreads = {side: rows.random_pairs(metric) for side, rows in opened.items()} if baseline else None
    # A query that is a row is left out as a matter of course; of a sum it is worth saying what is.
    outs = [tuple(names.of(id) for id in query.left_out) if query.name.id is None else () for query in queries]
    if len(found) == 2:
        return [
            Comparison(query.name, a, b, overlap(a, b), out, spreads)
            for query, a, b, out in zip(queries, *found, outs, strict=True)
        ]
    spread = next(iter(spreads.values())) if spreads else None
    return [Answer(query.name, hits, out, spread) for query, hits, out in zip(queries, found[0], outs, strict=True)]


def nearest(
    rows: Rows,
    names: Names,
    queries: Sequence[Query],
    k: int,
    *,
    metric: Metric = "cosine",
    method: Method = "add",
    among: Ids | None = None,
) -> list[tuple[Neighbour, ...]]:
    """The `k` nearest rows of each query, in one pass over the matrix for all of them (up to 32).

    `method` mul answers analogies by 3CosMul. Raises UsageError for a query without a direction.
    """
    vectors = np.stack([query.vector(rows, names) for query in queries])
    for query, length in zip(queries, np.linalg.norm(vectors, axis=1), strict=True):
        if not np.isfinite(length) or length < 1e-12 * max([1.0, *map(abs, query.weights)]) * _size(rows, query):
            raise UsageError(
                f"{query.name.token}: the vector is zero or not finite: it has no direction", "Ask for another."
            )
    products = [n for n, query in enumerate(queries) if query.unit and method == "mul"]
    sums = [n for n in range(len(queries)) if n not in products]
    hits: dict[int, list[Hit]] = {}
    if sums:
        left_out = [queries[n].left_out for n in sums]
        hits |= zip(sums, rows.nearest(vectors[sums], k, metric, left_out, among), strict=True)
    for n in products:
        score = Product(rows.vectors(queries[n].ids)[None], [int(weight) for weight in queries[n].weights])
        hits[n] = rows.best(score, k, [queries[n].left_out], among)[0]
    return [tuple(Neighbour(names.of(hit.id), hit.id, hit.score) for hit in hits[n]) for n in range(len(queries))]


def _size(rows: Rows, query: Query) -> float:
    """How long the rows of a query are, to judge whether what is left of their sum is rounding alone."""
    if query.given:
        return float(np.abs(np.asarray(query.given)).max())
    return 1.0 if query.unit else float(np.linalg.norm(rows.vectors(query.ids), axis=1).max())


def overlap(a: Iterable[Neighbour], b: Iterable[Neighbour]) -> float:
    """The share of rows that two lists of one length have in common, from 0 to 1."""
    first, second = {hit.id for hit in a}, {hit.id for hit in b}
    return len(first & second) / max(len(first), len(second), 1)


def read_among(path: Path, names: Names) -> tuple[Ids, list[str]]:
    """The rows that a file names, one token a line as on the command line, and the lines that are not one token."""
    ids, unknown = [], []
    for line in lines(path):
        if not line:
            continue
        try:
            ids.append(names.id(line))
        except TokenizerError:
            unknown.append(line)
    if not ids:
        raise DataError(f"{path}: none of its {len(unknown)} lines is a token", "Give one token a line.")
    return np.asarray(ids, np.intp), unknown


MOST_BYTES = 100_000_000
"""The longest file of tokens, analogies or numbers that is read; a device has no end."""


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        raw = file.read(MOST_BYTES + 1)
    if len(raw) > MOST_BYTES:
        raise DataError(f"{path}: more than {MOST_BYTES:,} bytes", "Give a shorter file.")
    return raw


def lines(path: Path) -> list[str]:
    """The lines of a text file in UTF-8. Raises UsageError as `unreadable` does, DataError for one that is not text."""
    try:
        raw = _read(path)
        return raw.decode("utf-8-sig").replace("\r\n", "\n").split("\n")
    except OSError as error:
        raise unreadable(path, error, DataError) from None
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: not UTF-8 text (byte {raw[error.start]:#04x} at offset {error.start})", "Save it as UTF-8."
        ) from None
