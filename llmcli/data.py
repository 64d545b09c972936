"""Text to token ids on disk: tokenised once, kept under a key of all that they depend on, then mapped into memory."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from llmcli import corpus, tokenizer
from llmcli.config import DataConfig
from llmcli.corpus import Corpus, Piece, Survey
from llmcli.errors import DataError, UsageError, remedy
from llmcli.events import Progress, Source
from llmcli.tokenizer import Tokenizer

Tokens = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]

FORMAT = "1"
"""Part of every cache key: a change in how text becomes tokens must not meet old files."""

STRAY_AGE = 7 * 24 * 3600
"""Seconds after which what a killed process left half written is taken for left, not for being written."""

BATCH = 1 << 21
"""Characters tokenised at a time: enough for every core, little memory."""


class Part(msgspec.Struct, frozen=True):
    """The tokens of the training or the validation text, and how many bytes of UTF-8 they stand for."""

    tokens: int
    bytes: int


class Info(msgspec.Struct, frozen=True):
    """What a folder of tokens holds, as it stands in its `info.json`."""

    fingerprint: str
    itemsize: int
    train: Part
    validation: Part


class Data(msgspec.Struct, frozen=True):
    """Tokenised text, mapped into memory. `fingerprint` is one for one text, split and tokenizer."""

    tokenizer: Tokenizer
    train: Tokens
    validation: Tokens
    info: Info
    source: Source

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of what was tokenised and how."""
        return self.info.fingerprint

    @property
    def bytes_per_token(self) -> float:
        """Of the validation text: what turns a loss per token into bits per byte."""
        return self.info.validation.bytes / max(1, self.info.validation.tokens)


def prepare(config: DataConfig, vocab_size: int, fallback: Path) -> Generator[Progress, None, Data]:
    """The tokens of a recipe's text, made now or found in the cache; yields progress, returns the data.

    `vocab_size` is what a BPE is trained to. The cache is `llmcli` in XDG_CACHE_HOME (or ~/.cache), and the folder
    `fallback` where that cannot be written. Raises DataError, TokenizerError.
    """
    source = corpus.find(config.path, config.field, config.encoding)
    held_out = None
    if config.validation_path is not None:
        held_out = corpus.find(config.validation_path, config.field, config.encoding)
    seen = yield from _surveyed(source)
    held_out_seen = (yield from _surveyed(held_out)) if held_out else None
    split = held_out_seen.digest if held_out_seen else repr(config.validation_fraction)
    text = _digest(FORMAT, seen.digest, split)
    cache = _cache_folder(fallback)

    def pieces() -> Iterator[tuple[bool, Piece]]:
        yield from divide(source.pieces(), seen, None if held_out else config.validation_fraction)
        if held_out:
            yield from ((True, piece) for piece in held_out.pieces())

    total = seen.characters + (held_out_seen.characters if held_out_seen else 0)
    # A single document is not closed: nothing follows it.
    several = seen.documents + (held_out_seen.documents if held_out_seen else 0) > 1
    made = yield from _tokenizer(config.tokenizer, vocab_size, pieces, several, text, cache, total)
    fingerprint = _digest(text, made.fingerprint, repr((made.eos_id, made.add_bos, several)))
    folder = cache / "tokens" / fingerprint
    if _read_info(folder) is None:
        yield from _tokenise(pieces(), made, folder, fingerprint, total, several)
    info = _read_info(folder)
    if info is None:
        raise DataError(f"{folder}: the tokens just written cannot be read back", "Look after the disk.")
    kind = f"<u{info.itemsize}"
    both = [(source, seen), *([(held_out, held_out_seen)] if held_out and held_out_seen else [])]
    read = Source(
        files=sum(len(corpus.files) for corpus, _ in both),
        documents=sum(survey.documents for _, survey in both),
        characters=total,
        bytes=sum(survey.bytes for _, survey in both),
    )
    return Data(made, _map(folder / "train.bin", kind), _map(folder / "validation.bin", kind), info, read)


def finished(preparing: Generator[Progress, None, Data]) -> Data:
    """What `prepare` returns, when nobody looks at its progress."""
    while True:
        try:
            next(preparing)
        except StopIteration as end:
            result: Data = end.value
            return result


def divide(pieces: Iterator[Piece], seen: Survey, fraction: float | None) -> Iterator[tuple[bool, Piece]]:
    """Each piece with whether it is validation text: the tail that holds `fraction` of all characters.

    Documents stay whole where that leaves any for validation; the only (or overlong last) one is cut.
    """
    if fraction is None:
        yield from ((False, piece) for piece in pieces)
        return
    cut = int(seen.characters * (1 - fraction))
    whole = seen.documents > 1 and seen.last >= cut
    position = start = 0
    for text, ends in pieces:
        if whole:
            yield start >= cut, Piece(text, ends)
        elif position < cut < position + len(text):
            yield False, Piece(text[: cut - position], False)
            yield True, Piece(text[cut - position :], ends)
        else:
            yield position >= cut, Piece(text, ends)
        position += len(text)
        if ends:
            start = position


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _cache_folder(fallback: Path) -> Path:
    """The first of XDG_CACHE_HOME/llmcli, ~/.cache/llmcli and `fallback` that can be written."""
    home = os.environ.get("XDG_CACHE_HOME")
    first = Path(home) if home else Path(os.path.expanduser("~")) / ".cache"
    for folder in (first / "llmcli", fallback):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                return folder
        except OSError as error:
            reason = error.strerror
    raise DataError(
        f"no place for the tokens: {folder} cannot be written ({reason})", "Set XDG_CACHE_HOME to a folder that can."
    )


def _surveyed(source: Corpus) -> Generator[Progress, None, Survey]:
    yield Progress("reading", 0, 0)
    return corpus.survey(source)


def _tokenizer(
    kind: str,
    vocab_size: int,
    pieces: Callable[[], Iterator[tuple[bool, Piece]]],
    several: bool,
    text: str,
    cache: Path,
    total: int,
) -> Generator[Progress, None, Tokenizer]:
    """The tokenizer that the recipe names, or one learned from the training text and kept in the cache."""
    if kind == "byte":
        return tokenizer.bytes_tokenizer()
    if kind not in ("bpe", "char"):
        if not Path(kind).exists():
            raise UsageError(
                f"data.tokenizer = '{kind}': no such tokenizer",
                "Give bpe, char, byte, or a tokenizer.json or the folder that holds it.",
            )
        return tokenizer.load(kind)
    folder = cache / "tokenizers" / _digest(text, kind, str(vocab_size) if kind == "bpe" else "")
    if not _has_tokenizer(folder):
        yield Progress("learning the tokenizer", 0, total)
        if kind == "char":  # a character that only the validation text has must not stop the run
            made = tokenizer.characters(piece.text for _, piece in pieces())
        else:
            training = (piece for held_out, piece in pieces() if not held_out)
            # Two documents are no one word.
            texts = (piece.text + "\n" * (piece.ends and several) for piece in training)
            made = tokenizer.train_bpe(texts, vocab_size)
        with _new_folder(folder, _has_tokenizer) as aside:
            made.save(aside)
    return tokenizer.load(folder)


def _has_tokenizer(folder: Path) -> bool:
    return (folder / "tokenizer.json").is_file()


class _new_folder:
    """`with _new_folder(folder, whole) as aside`: what is written aside becomes `folder`, unless one is there that is
    `whole`: another process was first. Raises DataError when the disk refuses.
    """

    def __init__(self, folder: Path, whole: Callable[[Path], bool]) -> None:
        self.folder, self.whole = folder, whole

    def __enter__(self) -> Path:
        try:
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            for stray in self.folder.parent.glob(".writing-*"):
                if time.time() - stray.stat().st_mtime > STRAY_AGE:
                    shutil.rmtree(stray, ignore_errors=True)
            self.aside = Path(tempfile.mkdtemp(prefix=".writing-", dir=self.folder.parent))
        except OSError as error:
            raise self._refused(error) from None
        return self.aside

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            if error is None and not self.whole(self.folder):
                shutil.rmtree(self.folder, ignore_errors=True)  # what is there could not be read
                self.aside.rename(self.folder)
        except OSError as failure:
            error = None if self.whole(self.folder) else failure
        finally:
            shutil.rmtree(self.aside, ignore_errors=True)
        if isinstance(error, OSError):
            raise self._refused(error) from None

    def _refused(self, error: OSError) -> DataError:
        what = f"{self.folder}: cannot be written ({error.strerror or error})"
        return DataError(what, remedy(error, "Set XDG_CACHE_HOME to another folder."))


def _tokenise(
    pieces: Iterator[tuple[bool, Piece]], by: Tokenizer, folder: Path, fingerprint: str, total: int, several: bool
) -> Generator[Progress, None, None]:
    itemsize = 2 if by.size <= 1 << 16 else 4
    counts = {False: [0, 0], True: [0, 0]}
    before = [by.bos_id] if by.add_bos and by.bos_id is not None else []
    after = [by.eos_id] if several and by.eos_id is not None else []
    done = 0
    with _new_folder(folder, lambda folder: _read_info(folder) is not None) as aside:
        with (aside / "train.bin").open("wb") as train, (aside / "validation.bin").open("wb") as validation:
            for batch in _batches(pieces, by):
                encoded = by.encode_batch([text for _, text, _, _ in batch], special=False)
                for (held_out, text, starts, ends), ids in zip(batch, encoded, strict=True):
                    if (before and starts) or (after and ends):
                        ids = [*(before if starts else ()), *ids, *(after if ends else ())]
                    (validation if held_out else train).write(np.asarray(ids, dtype=f"<u{itemsize}").tobytes())
                    counts[held_out][0] += len(ids)
                    counts[held_out][1] += len(text.encode())
                    done += len(text)
                yield Progress("tokenising", done, total)
            for file in (train, validation):
                file.flush()
                os.fsync(file.fileno())
        info = Info(fingerprint, itemsize, Part(*counts[False]), Part(*counts[True]))
        (aside / "info.json").write_bytes(msgspec.json.encode(info))


def _batches(pieces: Iterator[tuple[bool, Piece]], by: Tokenizer) -> Iterator[list[tuple[bool, str, bool, bool]]]:
    """Pieces regrouped for encoding: (held out, text, starts a document, ends one), about `BATCH` characters together.

    A document is encoded in parts only where the tokenizer may be cut (at a space or newline after something visible).
    """
    batch: list[tuple[bool, str, bool, bool]] = []
    size, rest, starts, was_held_out = 0, "", True, False
    for held_out, (text, ends) in pieces:
        if held_out != was_held_out and rest:  # the cut between training and validation text
            batch.append((was_held_out, rest, starts, False))
            size, rest, starts = size + len(rest), "", False
        was_held_out = held_out
        rest += text
        if ends:
            batch.append((held_out, rest, starts, True))
            size, rest, starts = size + len(rest), "", True
        elif len(rest) >= BATCH and (at := by.last_cut(rest)):
            batch.append((held_out, rest[:at], starts, False))
            size, rest, starts = size + at, rest[at:], False
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if rest:
        batch.append((was_held_out, rest, starts, False))
    if batch:
        yield batch


def _read_info(folder: Path) -> Info | None:
    """What a folder of tokens holds, or None where there is none or it is damaged."""
    try:
        info = msgspec.json.decode((folder / "info.json").read_bytes(), type=Info)
        sizes = [(folder / name).stat().st_size for name in ("train.bin", "validation.bin")]
    except (OSError, msgspec.DecodeError):
        return None
    whole = sizes == [part.tokens * info.itemsize for part in (info.train, info.validation)]
    return info if whole and info.fingerprint == folder.name else None


def _map(path: Path, kind: str) -> Tokens:
    if path.stat().st_size == 0:  # an empty file cannot be mapped
        return np.empty(0, dtype=kind)
    return np.memmap(path, dtype=kind, mode="r")


def check_length(data: Data, context: int) -> None:
    """Raise DataError when the text is too short to train on, naming the longest context that it allows."""
    train, validation = len(data.train), len(data.validation)
    if train < context + 1:
        hint = "Give more text."
        if train > 1:
            hint = f"The longest that fits is --set train.context={train - 1}; better, give more text."
        raise DataError(f"the training text has {train:,} tokens; a context of {context} needs {context + 1:,}", hint)
    if validation < 2:
        raise DataError(
            f"the validation text has {validation} tokens; at least 2 are needed",
            "Give more text, a larger data.validation_fraction, or data.validation_path.",
        )
