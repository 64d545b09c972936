"""The rows of an embedding matrix by name: from a row to its token's spelling, from a user's word to its row.

`probe` knows rows and numbers, and nothing of words.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from llmcli import vocabulary
from llmcli.errors import TokenizerError
from llmcli.vocabulary import Vocabulary

if TYPE_CHECKING:
    from llmcli.tokenizer import Tokenizer


class Token(msgspec.Struct, frozen=True):
    """A row as the vocabulary spells it; `id` is None for what is no row (a mean, an analogy, a vector)."""

    token: str
    id: int | None


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
                f"Rows are #0 to #{self.rows - 1}; a word's come from the tokenizer the model was trained with.",
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


def escaped(token: str) -> str:
    """A token on one line and without white space, other characters as they are: ` ` as `\\x20`, a newline as `\\n`."""
    shown = "".join(c if c.isprintable() and not c.isspace() else _escape(c) for c in token)
    return shown if shown else '""'


def visible(token: str) -> str:
    """A token for the eye: as `escaped`, but spaces inside stay, and so does `<row 62>`."""
    return " ".join(escaped(part) for part in token.split(" ")) if token == token.strip(" ") != "" else escaped(token)


def _escape(character: str) -> str:
    return "\\x20" if character == " " else ascii(character)[1:-1]
