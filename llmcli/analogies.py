"""A file of analogies answered and scored: how often the row nearest to b - a + c is d."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from llmcli.errors import DataError, TokenizerError
from llmcli.names import Names
from llmcli.neighbours import Method, lines
from llmcli.probe import Floats, Hit, Ids, Product, Rows


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


def score(
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
    with a space before it is meant where there is one. Raises DataError for a line that has not four words and for a
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
    for number, line in enumerate(lines(path), 1):
        words = line.split()
        if line.startswith(":"):
            titles.append(line[1:].strip())
            skipped.append(0)
        elif words:
            if len(words) != 4:
                raise DataError(f"{path}, line {number}: {len(words)} words, not four", "Write: a b c d")
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
        raise DataError(f"{path}: holds no questions", "Write lines of four words: a b c d")
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
