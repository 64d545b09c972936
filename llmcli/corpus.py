"""Text from files of every usual kind, as a stream: plain text, JSON lines, parquet, compressed or not.

A text file is one document; a line of JSON or a row of parquet is one. A document comes in pieces, so that none need
fit into memory. Newlines are `\\n` whatever the file has, and a byte-order mark is no part of the text.
"""

from __future__ import annotations

import bz2
import codecs
import glob
import gzip
import hashlib
import importlib
import io
import lzma
import os
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec

from llmcli.errors import DataError, LlmcliError, UsageError, unreadable

CHUNK = 1 << 20
"""Bytes read, or characters given, at a time."""

PLAIN = (".txt", ".text", ".md")
LINES = (".jsonl", ".ndjson")
TABLES = (".parquet",)
COMPRESSED = (".gz", ".zst", ".bz2", ".xz")
KINDS = f"{', '.join((*PLAIN, *LINES, *TABLES))}, also with {', '.join(COMPRESSED)}"

CONVERT = "Convert it to UTF-8, for example: iconv -f latin1 -t utf-8."
ENCODING = (
    "Or name its encoding (cp1252, latin-1, utf-16-le): train --set data.encoding=..., train-tokenizer --encoding ..."
)
UTF_16 = "Give a file of text. If it is UTF-16 without a mark, convert it: iconv -f utf-16le -t utf-8."
FIELD = "in training --set data.field=..., elsewhere --field"

_MARKS = (  # UTF-32's mark begins with UTF-16's: the longer ones come first
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)


class Piece(NamedTuple):
    """Some text of a document, and whether the document ends with it."""

    text: str
    ends: bool


class Corpus(msgspec.Struct, frozen=True):
    """Where text comes from: files, or with none the corpus that CPython carries."""

    files: tuple[Path, ...] = ()
    field: str = "text"
    encoding: str | None = None

    def pieces(self) -> Iterator[Piece]:
        """All documents in order, those without text left out. Raises DataError naming the file and the place."""
        if not self.files:
            yield Piece(embedded(), True)
        for path in self.files:
            yield from read(path, self.field, self.encoding)


class Survey(msgspec.Struct, frozen=True):
    """What a corpus holds. `last` is the character at which its last document starts, `digest` the text's SHA-256."""

    documents: int
    characters: int
    bytes: int
    last: int
    digest: str


def embedded() -> str:
    """The corpus that every CPython carries: the reference pages behind `help()`, 465 KB of English, as one text."""
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    return "\n\n".join(text.strip() for _, text in sorted(topics.items())) + "\n"


def find(paths: str | Iterable[str] | None, field: str = "text", encoding: str | None = None) -> Corpus:
    """The files that paths, folders (searched to their leaves) and patterns name, in a fixed order.

    `encoding` None is "auto" of a caller who has no option for it: no refusal then speaks of one.
    Raises UsageError for what does not exist and for an unknown encoding, DataError for a folder without text.
    """
    if encoding not in (None, "auto"):
        try:
            codecs.lookup(encoding)
        except LookupError:
            raise UsageError(
                f"--encoding {encoding}: no such encoding", "For example: utf-8, cp1252, latin-1, utf-16."
            ) from None
    files: dict[Path, None] = {}
    for name in [paths] if isinstance(paths, str) else paths or ():
        if not name.strip():
            raise UsageError("an empty name: no text is meant by it", "Give a file, a folder or a pattern.")
        try:
            files.update(dict.fromkeys(_named(name)))
        except OSError as error:
            raise unreadable(Path(error.filename or name), error, DataError) from None
    if paths is not None and not files:
        raise UsageError("an empty list of files", "Give a file, a folder or a pattern.")
    return Corpus(tuple(files), field, encoding)


def _named(name: str) -> list[Path]:
    """The files that a path, a folder or a pattern names. Raises OSError for what may not be read."""
    path = Path(name).expanduser()
    if path.is_dir():
        found = [file for file in _walk(path) if _kind(file) in (*PLAIN, *LINES, *TABLES)]
        if not found:
            raise DataError(
                f"{path}: a folder without text",
                f"Looked for files named {KINDS}; others are taken by a pattern in quotes: '{path}/*.py'.",
            )
        return found
    if path.exists():
        return [path]
    found = [Path(match) for match in sorted(glob.glob(str(path), recursive=True)) if Path(match).is_file()]
    if not found:
        raise UsageError(f"{name}: no such file or folder", "Check the path, or give another.")
    return found


def _walk(folder: Path) -> list[Path]:
    """The files of a folder and of those in it, hidden ones left out. Raises OSError for a folder it may not read."""

    def refuse(error: OSError) -> None:
        raise error

    found: list[Path] = []
    for place, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(place, name) for name in names if not name.startswith(".")]
    return sorted((path for path in found if path.is_file()), key=lambda path: path.relative_to(folder).parts)


def _kind(path: Path) -> str:
    """The suffix that says what a file holds: `.jsonl` of `a.jsonl.gz`."""
    name = path.with_suffix("") if path.suffix.lower() in COMPRESSED else path
    return name.suffix.lower()


def read(path: Path, field: str = "text", encoding: str | None = None) -> Iterator[Piece]:
    """The documents of one file. Raises DataError naming the file, and the byte or line at which it is wrong."""
    kind = _kind(path)
    if kind in TABLES:
        documents = _rows(path, field)
    elif kind in LINES:
        documents = _lines(path, field, encoding)
    else:
        yield from _one_document(_text(path, encoding))
        return
    for text in documents:
        yield from (Piece(text[i : i + CHUNK], i + CHUNK >= len(text)) for i in range(0, len(text), CHUNK))


def _one_document(chunks: Iterator[str]) -> Iterator[Piece]:
    waiting = ""
    for chunk in chunks:
        if waiting and chunk:
            yield Piece(waiting, False)
        waiting = chunk or waiting
    if waiting:
        yield Piece(waiting, True)


def _open(path: Path) -> BinaryIO:
    suffix = path.suffix.lower()
    if suffix == ".gz":
        return gzip.open(path, "rb")  # type: ignore[return-value]
    if suffix == ".bz2":
        return bz2.open(path, "rb")  # type: ignore[return-value]
    if suffix == ".xz":
        return lzma.open(path, "rb")  # type: ignore[return-value]
    return path.open("rb")


def _zstd(path: Path) -> Iterator[bytes]:
    """The content of a zstd file, in one frame or several. Its package reads a file that is cut off without a word."""
    try:
        zstandard = importlib.import_module("zstandard")
    except ImportError:
        raise DataError(
            f"{path}: the package that reads zstd is not installed", 'Install the extra: pip install "llmcli[zstd]"'
        ) from None
    new_frame = zstandard.ZstdDecompressor().decompressobj
    with path.open("rb") as file:
        frame, inside = new_frame(), False
        try:
            while raw := file.read(CHUNK):
                while raw:
                    yield frame.decompress(raw)
                    raw, inside = frame.unused_data, not frame.eof
                    frame = frame if inside else new_frame()
        except zstandard.ZstdError as error:
            raise EOFError(error) from None
    if inside:
        raise EOFError("it ends inside a frame")


def _chunks(path: Path) -> Iterator[bytes]:
    try:
        if path.suffix.lower() == ".zst":
            yield from _zstd(path)
            return
        with _open(path) as file:
            while chunk := file.read(CHUNK):
                yield chunk
    except LlmcliError:
        raise
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: damaged ({error})", "It is truncated or not what its name says.") from None
    except OSError as error:
        raise unreadable(path, error, DataError) from None


def _text(path: Path, encoding: str | None) -> Iterator[str]:
    """A file's text with `\\n` for newlines. Offsets in errors count the (uncompressed) bytes from 0."""
    chunks = _chunks(path)
    first = next(chunks, b"")
    mark, known = next(((mark, name) for mark, name in _MARKS if first.startswith(mark)), (b"", "utf-8"))
    name = known if encoding in (None, "auto") else encoding
    if codecs.lookup(name).name in (known, known[:-3]):  # a mark is skipped where the encoding is the mark's own
        first, offset = first[len(mark) :], len(mark)
        name = known
    else:
        offset = 0
    decoder = codecs.getincrementaldecoder(name)()
    newlines = io.IncrementalNewlineDecoder(None, translate=True)

    def hint(what: str) -> str:
        return what if encoding is None else f"{what} {ENCODING}"

    def decode(chunk: bytes, final: bool) -> str:
        nonlocal offset
        pending = len(decoder.getstate()[0])
        try:
            text = decoder.decode(chunk, final)
        except UnicodeDecodeError as error:
            place = offset - pending + error.start
            if b"\0" in error.object[: error.start]:
                raise DataError(f"{path}: not text (it holds zero bytes)", hint(UTF_16)) from None
            byte = f"byte {error.object[error.start]:#04x} at offset {place:,}"
            raise DataError(f"{path}: not {name.upper()} text ({byte})", hint(CONVERT)) from None
        if "\0" in text:
            place = offset - pending + len(text[: text.index("\0")].encode(name, "replace"))
            raise DataError(f"{path}: not text (a zero byte at offset {place:,})", hint(UTF_16))
        offset += len(chunk)
        return newlines.decode(text, final)

    yield decode(first, False)
    for chunk in chunks:
        yield decode(chunk, False)
    yield decode(b"", True)


def _lines(path: Path, field: str, encoding: str | None) -> Iterator[str]:
    rest, number = "", 0
    for chunk in _text(path, encoding):
        *lines, rest = (rest + chunk).split("\n")
        for line in lines:
            number += 1
            yield _document(path, number, line, field)
    yield _document(path, number + 1, rest, field)


def _document(path: Path, number: int, line: str, field: str) -> str:
    if not line.strip():
        return ""
    try:
        row: Any = msgspec.json.decode(line)
    except msgspec.DecodeError as error:
        raise DataError(f"{path}: line {number} is not JSON ({error})", "Each line must be one JSON object.") from None
    if not isinstance(row, dict) or not isinstance(row.get(field), str):
        found = f"it has {', '.join(map(repr, row))}" if isinstance(row, dict) else "it is no object"
        raise DataError(f"{path}: line {number} has no text under '{field}' ({found})", f"Name the key: {FIELD}.")
    text: str = row[field]
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{path}: line {number} holds half a character ({text[error.start]!r})", "Repair or remove the line."
        ) from None
    return newline(text)


def _rows(path: Path, field: str) -> Iterator[str]:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise DataError(
            f"{path}: the package that reads parquet is not installed",
            'Install the extra: pip install "llmcli[parquet]"',
        ) from None
    try:
        file = parquet.ParquetFile(path)
        names = file.schema_arrow.names
        if field not in names:
            raise DataError(f"{path}: no column '{field}' (it has {', '.join(names)})", f"Name the column: {FIELD}.")
        for batch in file.iter_batches(batch_size=1024, columns=[field]):
            for text in batch.column(0).to_pylist():
                if text is not None and not isinstance(text, str):
                    raise DataError(f"{path}: column '{field}' holds no text", f"Name another: {FIELD}.")
                yield newline(text or "")
    except LlmcliError:
        raise
    except Exception as error:  # pyarrow's own exceptions, whose module may be absent here
        raise DataError(f"{path}: cannot be read as parquet ({error})", "Check the file.") from None


def newline(text: str) -> str:
    """The text with `\\n` for every newline, as training reads it: a prompt should be read so too."""
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def survey(corpus: Corpus) -> Survey:
    """Read a corpus once: its size and its digest, the same for the same documents in whatever files they lie.

    Raises DataError when there is no text at all.
    """
    digest = hashlib.sha256()
    documents = characters = size = start = last = 0
    for text, ends in corpus.pieces():
        raw = text.encode()
        digest.update(raw)
        characters += len(text)
        size += len(raw)
        if ends:
            documents, last, start = documents + 1, start, characters
            digest.update(b"\xff")  # no byte of UTF-8: where documents end is part of what is digested
    if not characters:
        names = ", ".join(str(path) for path in corpus.files[:3])
        raise DataError(f"{names}: no text in {'it' if len(corpus.files) == 1 else 'them'}", "Give files with text.")
    return Survey(documents, characters, size, last, digest.hexdigest())
