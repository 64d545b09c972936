"""llmcli train-tokenizer: a tokenizer from text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import typer

from llmcli.commands import OUTPUT, AsJson, Field
from llmcli.output import emit, facts, note, progress

if TYPE_CHECKING:
    from rich.table import Table

GROUP = "Train"

Files = Annotated[
    list[str], typer.Argument(metavar="FILE...", help="Text: files, folders or patterns; JSON lines and parquet too.")
]
Size = Annotated[
    int, typer.Option("--vocab-size", metavar="N", min=1, max=10_000_000, help="Learn so many tokens, with --kind bpe.")
]
Kind = Annotated[Literal["bpe", "char", "byte"], typer.Option(help="Make tokens of merged pairs, characters or bytes.")]
Out = Annotated[Path, typer.Option(metavar="DIR", help="Write tokenizer.json to this folder.", rich_help_panel=OUTPUT)]
Encoding = Annotated[str, typer.Option(metavar="NAME", help="Read text that is not UTF-8 by this encoding.")]


class Trained(msgspec.Struct, frozen=True, kw_only=True):
    """A tokenizer and the text it was made from. `bytes_per_token` is measured on the beginning of that text."""

    kind: str
    vocab_size: int
    documents: int
    characters: int
    bytes_per_token: float
    fingerprint: str
    out: str


def run(
    files: Files,
    vocab_size: Size = 8192,
    kind: Kind = "bpe",
    out: Out = Path("tokenizer"),
    field: Field = "text",
    encoding: Encoding = "auto",
    as_json: AsJson = False,
) -> None:
    """Learn a tokenizer from text: the same text gives the same file.

    Example: llmcli train-tokenizer books/ --vocab-size 8192 --out books-tokenizer
    """
    from llmcli import corpus, tokenizer
    from llmcli.errors import TokenizerError, UsageError, unwritable

    if (out / "config.json").exists():
        raise UsageError(f"--out {out}: a checkpoint, whose tokenizer would be lost", "Name another folder.")
    if any(place.exists() and not place.is_dir() for place in (out, *out.parents)):
        raise UsageError(f"--out {out}: a file is where a folder belongs", "Name another folder.")
    if kind == "bpe" and vocab_size < 257:
        raise UsageError(f"--vocab-size {vocab_size}: a byte-level BPE has at least 257 tokens", "Ask for more.")
    source = corpus.find(files, field, encoding)
    seen = corpus.survey(source)
    with progress("learning the tokenizer", seen.characters, "characters") as advance:

        def texts() -> Iterator[str]:
            for text, ends in source.pieces():
                advance(len(text))
                yield text
                if ends and seen.documents > 1:
                    yield "\n"

        if kind == "bpe":
            made = tokenizer.train_bpe(texts(), vocab_size)
        else:
            made = tokenizer.characters(texts()) if kind == "char" else tokenizer.bytes_tokenizer()
    if kind == "bpe" and made.size < vocab_size:
        note(f"{vocab_size:,} tokens were asked for: the text gives {made.size:,}, no further pair comes twice in it")
    try:
        made.save(out)
    except OSError as error:
        raise unwritable(out, error, TokenizerError, "Choose another folder.") from None
    sample = next(source.pieces()).text
    emit(
        Trained(
            kind=kind,
            vocab_size=made.size,
            documents=seen.documents,
            characters=seen.characters,
            bytes_per_token=len(sample.encode()) / len(made.encode(sample, special=False)),
            fingerprint=made.fingerprint,
            out=str(out),
        ),
        view,
        as_json,
    )


def view(trained: Trained) -> Table:
    """What was learned, a line each."""
    rows = facts()
    rows.add_row("tokens", f"{trained.vocab_size:,} ({trained.kind})")
    rows.add_row("from", f"{trained.characters:,} characters in {trained.documents:,} documents")
    rows.add_row("bytes per token", f"{trained.bytes_per_token:.3f}")
    rows.add_row("written to", trained.out)
    return rows
