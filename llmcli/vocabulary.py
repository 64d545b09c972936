"""The spellings in a `tokenizer.json`, without the tokenizer: for looking up a few tokens of a large vocabulary.

Building a tokenizer of 256,000 tokens takes most of a second and 170 MB; here the file stays where it is, and what is
kept is where each token's spelling stands.
"""

from __future__ import annotations

import json
import mmap
import re
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt


class _Model(msgspec.Struct):
    vocab: msgspec.Raw
    type: str = "BPE"


class _Added(msgspec.Struct):
    id: int
    content: str


class _File(msgspec.Struct):
    model: _Model
    added_tokens: list[_Added] = []


_QUOTE, _COLON, _SPACE, _BACKSLASH, _ZERO = b'": \\0'
_DIGITS = 9  # of an id; a longer number is no row of any matrix


def row_number(word: str) -> int | None:
    """The row that a user's word names by its number, as `#42` does; None for any other word."""
    return int(word[1:]) if re.fullmatch(r"#\d{1,18}", word, re.ASCII) else None


class Vocabulary:
    """The tokens of a vocabulary that is a table from spellings to ids, added tokens included."""

    def __init__(self, table: bytes | memoryview, added: list[_Added]) -> None:
        self._table = memoryview(table)
        self._added = {token.content: token.id for token in added}
        self._added_by_id = {token.id: token.content for token in added}
        quotes = _quotes(np.frombuffer(table, np.uint8))
        self._starts, self._ends = quotes[::2], quotes[1::2]
        self._ids = _numbers(np.frombuffer(table, np.uint8), self._ends)
        self._order = np.argsort(self._ids, kind="stable")

    @property
    def size(self) -> int:
        """The largest id + 1."""
        return max(int(self._ids.max(initial=-1)), *self._added_by_id, -1) + 1

    def id(self, token: str) -> int | None:
        """The id of a token in the vocabulary's own spelling, or None."""
        if token in self._added:
            return self._added[token]
        for plain in (False, True):  # the two ways in which JSON may be written
            try:
                key = json.dumps(token, ensure_ascii=plain).encode()
            except UnicodeEncodeError:  # a lone surrogate
                continue
            for found in re.finditer(re.escape(key), self._table):
                place = int(np.searchsorted(self._starts, found.start()))
                if place < len(self._ids) and self._starts[place] == found.start():
                    return int(self._ids[place])
        return None

    def token(self, id: int) -> str:
        """The spelling of an id, `<row 62>` where it has none."""
        if id in self._added_by_id:
            return self._added_by_id[id]
        at = int(np.searchsorted(self._ids, id, sorter=self._order))
        if at == len(self._ids) or self._ids[self._order[at]] != id:
            return f"<row {id}>"
        return self._key(int(self._order[at]))

    def _key(self, place: int) -> str:
        """The spelling of the place-th key in the file."""
        key: str = json.loads(bytes(self._table[int(self._starts[place]) : int(self._ends[place]) + 1]))
        return key


def load(path: Path) -> Vocabulary | None:
    """The vocabulary of a tokenizer.json; None for one of another kind (Unigram's is a list) or a file not understood,
    which are for `tokenizer.load` to read or to refuse."""
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        found = msgspec.json.decode(mapped, type=_File)
        if found.model.type not in ("BPE", "WordLevel", "WordPiece"):
            return None
        return Vocabulary(memoryview(found.model.vocab), found.added_tokens)
    except (OSError, ValueError, RecursionError):  # msgspec's errors are ValueErrors
        return None


def _quotes(table: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """Where the quotes around the keys are, opening and closing ones in turn: all quotes but those behind an odd number
    of backslashes, which are part of a key."""
    step = 1 << 20  # in pieces: what comparing makes is as long as what is compared
    found = [np.flatnonzero(table[start : start + step] == _QUOTE) + start for start in range(0, len(table), step)]
    quotes = np.concatenate(found)
    inside = []
    for quote in quotes[table[quotes - 1] == _BACKSLASH].tolist():
        first = quote
        while table[first - 1] == _BACKSLASH:
            first -= 1
        if (quote - first) % 2:
            inside.append(quote)
    return np.setdiff1d(quotes, inside, assume_unique=True) if inside else quotes


def _numbers(table: npt.NDArray[np.uint8], ends: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The number behind each key, which ends at its closing quote. Raises ValueError where there is none."""
    last = len(table) - 1
    at = ends + 1
    colon = np.zeros(len(ends), bool)
    for _ in range(3):
        here = table[np.minimum(at, last)]
        colon |= here == _COLON
        at += (here == _COLON) | (here == _SPACE)
    numbers, going = np.zeros(len(ends), np.int64), colon
    for digit in range(_DIGITS + 1):
        value = table[np.minimum(at + digit, last)].astype(np.int64) - _ZERO
        going = going & (value >= 0) & (value <= 9)
        if digit == 0 and not going.all():
            raise ValueError("a key without a number")
        numbers[going] = numbers[going] * 10 + value[going]
    if going.any():
        raise ValueError("a number too long for an id")
    return numbers
