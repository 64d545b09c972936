"""Rows of an embedding matrix written as text, for the Embedding Projector and for gensim."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from llmcli.errors import LlmcliError, UsageError, unwritable
from llmcli.names import Names, escaped
from llmcli.probe import Rows


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
    spelling that occurs twice gets its id behind it. Raises UsageError when a file is there already, or no file can be
    where the folder is, and LlmcliError when the system refuses to write.
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
        raise unwritable(folder, error, LlmcliError, "Choose another folder.") from None
    return Export(len(ids), rows.matrix.width, tuple(str(path) for path in files))


def _distinct(spellings: Sequence[tuple[int, str]]) -> dict[int, str]:
    seen: set[str] = set()
    result = {}
    for id, spelling in spellings:
        while spelling in seen:  # what the id was put behind may be a spelling too
            spelling = f"{spelling}#{id}"
        result[id] = spelling
        seen.add(spelling)
    return result
