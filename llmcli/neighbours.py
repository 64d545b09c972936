"""What is asked of an embedding matrix in words: the tokens near a token, a text, a vector or an analogy.

`probe` knows rows and numbers; here rows have names. A checkpoint is only read; `export` writes new files.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np

from llmcli import vocabulary
from llmcli.errors import TokenizerError, UsageError
from llmcli.probe import Floats, Hit, Ids, Metric, Product, Rows, Side, Spread
from llmcli.vocabulary import Vocabulary

if TYPE_CHECKING:
    from llmcli.tokenizer import Tokenizer


class Token(msgspec.Struct, frozen=True):
    """A row as the vocabulary spells it; `id` is None for what is no row (a mean, an analogy, a vector)."""

    token: str
    id: int | None


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


class Names:
    """The rows of a checkpoint by name: its tokenizer's spellings, read when first asked for.

    Spellings come from the file alone where that can be; the tokenizer is built for text that is no spelling.
    """

    def __init__(self, path: Path, rows: int) -> None:
        self._folder, self.rows = path if path.is_dir() else path.parent, rows

    @cached_property
    def known(self) -> bool:
        """Whether there is a tokenizer beside the weights, one that can be read here."""
        files = ("tokenizer.json", "vocab.json", "tokenizer.model")
        return self.unread is None and any((self._folder / name).is_file() for name in files)

    @cached_property
    def unread(self) -> TokenizerError | None:
        """What is missing to read the tokenizer beside the weights, if an extra is: rows then go by number."""
        other = any((self._folder / name).is_file() for name in ("tokenizer.json", "vocab.json"))
        if other or not (self._folder / "tokenizer.model").is_file():
            return None
        try:
            self.tokenizer  # noqa: B018
        except TokenizerError as error:
            if "llmcli[" not in error.hint:  # it is damaged, which is another matter
                raise
            return error
        return None

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer. Raises TokenizerError where there is none."""
        from llmcli import tokenizer

        return tokenizer.load(self._folder)

    @cached_property
    def _spellings(self) -> Vocabulary | Tokenizer:
        found = vocabulary.load(self._folder / "tokenizer.json")
        return self.tokenizer if found is None else found

    @property
    def count(self) -> int:
        """The rows that belong to a token: those behind the last token's are padding."""
        return min(self.rows, self._spellings.size) if self.known else self.rows

    def of(self, id: int) -> str:
        """The spelling of a row's token, `<row 62>` where it has none."""
        return self._spellings.token(id) if self.known else f"<row {id}>"

    def id(self, text: str) -> int:
        """The row that a user's word names: `#id`, a token's spelling, or text that is one token.

        Raises TokenizerError, showing the pieces of what is several tokens, and for a row that does not exist.
        """
        row = vocabulary.row_number(text)
        if row is not None:
            id = row
        elif re.fullmatch(r"#[+-]?\d+", text, re.ASCII) and not (self.known and self._spellings.id(text) is not None):
            raise TokenizerError(f"{text}: there is no such row", f"Rows are numbered #0 to #{self.rows - 1}.")
        elif not self.known:
            raise self.unread or TokenizerError(
                f"{text!r}: there is no tokenizer beside the weights", "Name rows as #id."
            )
        else:
            spelled = self._spellings.id(text)
            id = self.tokenizer.one_token(text) if spelled is None else spelled
        self.check([id])
        return id

    def check(self, ids: Iterable[int]) -> None:
        """Raise TokenizerError for an id that has no row."""
        bad = next((id for id in ids if not 0 <= id < self.rows), None)
        if bad is not None:
            also = f"; the tokenizer's size is {self._spellings.size}" if self.known else ""
            raise TokenizerError(
                f"token id {bad} has no row in the model: its vocab_size is {self.rows}{also}",
                "Use the tokenizer the model was trained with.",
            )

    def token(self, id: int) -> Token:
        """A row with its name."""
        return Token(self.of(id), id)

    def word(self, word: str) -> int | None:
        """The row of a word as it stands in running text (with a space before it), else as it stands; or None."""
        if not self.known:
            return None
        for text in (" " + word, word):
            try:
                id = self.tokenizer.one_token(text)
            except TokenizerError:
                continue
            return id if id < self.rows else None
        return None


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
    """The vectors in a file: .npy, or JSON with one list of numbers or a list of such lists. Raises UsageError."""
    try:
        values = np.load(path, allow_pickle=False) if path.suffix == ".npy" else np.asarray(json.loads(_read(path)))
        values = np.atleast_2d(values.astype(np.float64, casting="safe" if values.dtype.kind in "biuf" else "no"))
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror or error})", "Check the path.") from None
    except (ValueError, TypeError, RecursionError):
        raise UsageError(
            f"{path}: not a vector of numbers", "Give a .npy file, or JSON: [0.1, -0.2, ...] or a list of such lists."
        ) from None
    if values.ndim != 2 or values.shape[1] != width or not len(values):
        shape = " x ".join(map(str, values.shape))
        raise UsageError(f"{path}: holds {shape} numbers, a row has {width}", f"Give vectors of {width} numbers.")
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
    for line in _lines(path):
        if not line:
            continue
        try:
            ids.append(names.id(line))
        except TokenizerError:
            unknown.append(line)
    if not ids:
        raise UsageError(f"{path}: none of its {len(unknown)} lines is a token", "Give one token a line.")
    return np.asarray(ids, np.intp), unknown


MOST_BYTES = 100_000_000
"""The longest file of tokens, analogies or numbers that is read; a device has no end."""


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        raw = file.read(MOST_BYTES + 1)
    if len(raw) > MOST_BYTES:
        raise UsageError(f"{path}: more than {MOST_BYTES:,} bytes", "Give a shorter file.")
    return raw


def _lines(path: Path) -> list[str]:
    try:
        raw = _read(path)
        return raw.decode("utf-8-sig").replace("\r\n", "\n").split("\n")
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror or error})", "Check the path.") from None
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path}: not UTF-8 text (byte {raw[error.start]:#04x} at offset {error.start})", "Save it as UTF-8."
        ) from None


class Section(msgspec.Struct, frozen=True):
    """How well the analogies of one section are answered. `skipped` ones have a word that is not one token.

    `accuracy` is the share of correct ones among those asked, None where none was.
    """

    name: str
    asked: int
    correct: int
    skipped: int
    accuracy: float | None


class Analogies(msgspec.Struct, frozen=True):
    """A file of analogies answered: by section, and all together."""

    file: str
    method: Method
    sections: tuple[Section, ...]
    total: Section


def score_analogies(
    rows: Rows,
    names: Names,
    path: Path,
    *,
    method: Method = "add",
    among: Ids | None = None,
    progress: Callable[[float], None] = lambda amount: None,
) -> Analogies:
    """Answer a file of analogies, `a b c d` a line under `: section` lines: is d the row nearest to b - a + c?

    The three words asked with are no answer, as usual (Mikolov et al., 2013, arXiv:1301.3781). Of a word the token
    with a space before it is meant where there is one. Raises UsageError for a line that has not four words and for a
    file without questions, TokenizerError where words cannot be looked up.
    """
    if not names.known:
        raise names.unread or TokenizerError(
            "--analogies needs a tokenizer, and there is none beside the weights", "Ask with --analogy '#1 - #2 + #3'."
        )
    questions: list[tuple[int, tuple[int, ...]]] = []
    titles: list[str] = []
    skipped: list[int] = []
    known: dict[str, int | None] = {}
    for number, line in enumerate(_lines(path), 1):
        words = line.split()
        if line.startswith(":"):
            titles.append(line[1:].strip())
            skipped.append(0)
        elif words:
            if len(words) != 4:
                raise UsageError(f"{path}, line {number}: {len(words)} words, not four", "Write: a b c d")
            if not titles:
                titles, skipped = [""], [0]
            for word in words:
                if word not in known:
                    known[word] = names.word(word)
            found = tuple(id for id in (known[word] for word in words) if id is not None)
            if len(found) == len(words):
                questions.append((len(titles) - 1, found))
            else:
                skipped[-1] += 1
    if not questions and not any(skipped):
        raise UsageError(f"{path}: holds no questions", "Write lines of four words: a b c d")
    asked, correct = [0] * len(titles), [0] * len(titles)
    bad = set(rows.unusable().tolist())
    for start in range(0, len(questions), 64):
        some = questions[start : start + 64]
        batch = [(section, ids) for section, ids in some if not bad.intersection(ids[:3])]
        for section, _ in some:
            asked[section] += 1
        if batch:
            terms = np.stack([rows.vectors(ids[:3]) for _, ids in batch])
            exclude = [ids[:3] for _, ids in batch]
            for (section, ids), hits in zip(batch, _analogy_hits(rows, terms, method, exclude, among), strict=True):
                correct[section] += bool(hits) and hits[0].id == ids[3]
        progress(len(some))
    sections = [
        _section(title, n, right, left) for title, n, right, left in zip(titles, asked, correct, skipped, strict=True)
    ]
    total = _section("total", sum(asked), sum(correct), sum(skipped))
    return Analogies(str(path), method, tuple(sections), total)


def _analogy_hits(
    rows: Rows, terms: Floats, method: Method, exclude: Sequence[Sequence[int]], among: Ids | None
) -> list[list[Hit]]:
    """The best row for each of the questions a : b = c : ?, terms (q, 3, d)."""
    signs = (-1, 1, 1)
    if method == "mul":
        return rows.best(Product(terms, signs), 1, exclude, among)
    unit = terms / np.linalg.norm(terms, axis=2, keepdims=True)
    sums = np.einsum("t,qtd->qd", np.asarray(signs, np.float64), unit)
    zero = ~(np.linalg.norm(sums, axis=1) > 0)
    sums[zero, 0] = 1.0  # a question whose vectors cancel has no answer; any direction will do to leave it wrong
    hits = rows.nearest(sums, 1, "cosine", exclude, among)
    return [[] if none else found for none, found in zip(zero, hits, strict=True)]


def _section(name: str, asked: int, correct: int, skipped: int) -> Section:
    return Section(name, asked, correct, skipped, correct / asked if asked else None)


class Export(msgspec.Struct, frozen=True):
    """What was written: how many rows, of what length, into which files."""

    rows: int
    width: int
    files: tuple[str, ...]


def export(
    rows: Rows, names: Names, folder: Path, ids: Sequence[int], progress: Callable[[float], None] = lambda amount: None
) -> Export:
    """Write rows as text: `vectors.tsv` and `metadata.tsv` for the Embedding Projector, `word2vec.txt` for gensim.

    Numbers read back as the same float32. White space inside a token is written as an escape (`\\x20`), and a
    spelling that occurs twice gets its id behind it. Raises UsageError when a file is there already or cannot be
    written.
    """
    files = [folder / name for name in ("vectors.tsv", "metadata.tsv", "word2vec.txt")]
    if there := [path for path in files if path.exists()]:
        raise UsageError(f"--export: {there[0]} is there already", "Choose another folder, or remove it first.")
    spellings = _distinct([(id, escaped(names.of(id))) for id in ids])
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (
            files[0].open("w", encoding="utf-8", newline="\n") as vectors,
            files[1].open("w", encoding="utf-8", newline="\n") as metadata,
            files[2].open("w", encoding="utf-8", newline="\n") as words,
        ):
            metadata.write("token\tid\n")
            words.write(f"{len(ids)} {rows.matrix.width}\n")
            for start in range(0, len(ids), 256):
                some = ids[start : start + 256]
                for id, row in zip(some, rows.vectors(some).tolist(), strict=True):
                    numbers = [f"{value:.9g}" for value in row]
                    vectors.write("\t".join(numbers) + "\n")
                    metadata.write(f"{spellings[id]}\t{id}\n")
                    words.write(f"{spellings[id]} {' '.join(numbers)}\n")
                progress(len(some))
    except OSError as error:
        raise UsageError(f"{folder}: cannot be written ({error.strerror or error})", "Check the folder.") from None
    return Export(len(ids), rows.matrix.width, tuple(str(path) for path in files))


def escaped(token: str) -> str:
    """A token on one line and without white space, other characters as they are: ` ` as `\\x20`, a newline as `\\n`."""
    shown = "".join(c if c.isprintable() and not c.isspace() else _escape(c) for c in token)
    return shown if shown else '""'


def visible(token: str) -> str:
    """A token for the eye: as `escaped`, but spaces inside stay, and so does `<row 62>`."""
    return " ".join(escaped(part) for part in token.split(" ")) if token == token.strip(" ") != "" else escaped(token)


def _escape(character: str) -> str:
    return "\\x20" if character == " " else ascii(character)[1:-1]


def _distinct(spellings: Sequence[tuple[int, str]]) -> dict[int, str]:
    seen: set[str] = set()
    result = {}
    for id, spelling in spellings:
        result[id] = spelling if spelling not in seen else f"{spelling}#{id}"
        seen.add(result[id])
    return result
