"""llmcli logits: what a model expects after each token of a text, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec
import typer

from llmcli import output
from llmcli.commands import (
    AsJson,
    Checkpoint,
    Device,
    Dtype,
    Ids,
    Keep,
    Offline,
    Revision,
    Tie,
    ToRead,
    given_ids,
    one_text,
    open_model,
    open_tokenizer,
    tokenizer_if_any,
    warn_of_length,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

    from llmcli.predictions import Guess, Prediction, Why
    from llmcli.tokenizer import Tokenizer

GROUP = "Ask a model"


class Report(msgspec.Struct, frozen=True):
    """A prediction a position, and the reasons of the candidates that were asked about."""

    positions: list[Prediction]
    why: list[Why]


def run(
    checkpoint: Checkpoint,
    text: ToRead = None,
    ids: Ids = None,
    top_k: Annotated[
        int, typer.Option("--top-k", "-k", metavar="N", min=0, help="Show so many candidates a position.")
    ] = 5,
    why: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TOKEN", help="Take this token's logit apart: ' king', 'Ġking' or '#42'. May be repeated."
        ),
    ] = None,
    position: Annotated[
        int | None, typer.Option(metavar="N", help="Show one position alone, from 0; -1 is the last.")
    ] = None,
    tie: Tie = "auto",
    keep: Keep = None,
    dtype: Dtype = None,
    device: Device = "cpu",
    revision: Revision = None,
    offline: Offline = False,
    as_json: AsJson = False,
) -> None:
    """Show what a model expects after each token of a text, and the rank of the token that follows.

    --why takes a candidate's logit apart: state · row = |state| |row| cosine, and the bias.

    Example: llmcli logits runs/glasslm/best "Once upon a" --why " time"
    """
    one_text("logits", text, ids)
    from llmcli import predictions
    from llmcli.errors import UsageError
    from llmcli.targets import find_checkpoint

    path = find_checkpoint(checkpoint, revision=revision, offline=offline)
    coder = open_tokenizer(path) if ids is None else tokenizer_if_any(path)
    read = given_ids(ids) if ids is not None else coder.encode(text or "") if coder else []
    if position is not None and not -len(read) <= position < len(read):
        most = len(read) - 1
        raise UsageError(f"--position {position}: the text has {len(read)} tokens", f"Choose from 0 to {most}.")
    candidates = [_candidate(coder, word) for word in why or ()]
    model = open_model(str(path), tie, keep, dtype, device=device)[0]
    warn_of_length(model, len(read))
    found = list(predictions.predict(model, coder, read, top_k))
    place = -1 if position is None else position
    report = Report(
        found if position is None else [found[position]],
        [predictions.why(model, coder, read, candidate, place) for candidate in candidates],
    )
    output.emit(report, view, as_json)


def _candidate(coder: Tokenizer | None, word: str) -> int:
    from llmcli.errors import UsageError
    from llmcli.vocabulary import row_number

    row = row_number(word)
    if row is not None:
        return row
    if coder is None:
        raise UsageError(f"--why {word}: not the number of a row", "For example: --why '#42'.")
    return coder.one_token(word)


class _Cell(NamedTuple):
    guess: Guess | None

    def __str__(self) -> str:
        if self.guess is None:
            return ""
        return f"{self.guess.token} {self.guess.probability:.1%} ({self.guess.logit:.2f})"


def view(report: Report) -> RenderableType:
    """A line a position: the token, the one that follows and its rank, the best candidates."""
    from rich.console import Group
    from rich.text import Text

    table = output.table()
    for column in ("position", "token", "next", "rank", "candidates: probability (logit)"):
        table.add_column(column, justify="right" if column in ("position", "rank") else "left")
    for p in report.positions:
        rank = "" if p.next is None else f"{p.next.rank:,}"
        best = Text("  ".join(str(_Cell(guess)) for guess in p.top), "dim" if p.next and p.next.rank == 1 else "")
        table.add_row(str(p.position), Text(p.token), Text(str(_Cell(p.next))), rank, best)
    parts: list[RenderableType] = [output.Fit(table)]
    if report.why:
        reasons = output.table()
        parted = ("state · row", "|state|", "|row|", "cosine", "bias")
        capped = report.why[0].cap is not None  # by the model: all of them or none
        for column in ("position", "candidate", "logit", *parted, *(["cap"] if capped else [])):
            reasons.add_column(column, justify="left" if column == "candidate" else "right")
        for w in report.why:
            numbers = [f"{n:.4f}" for n in (w.logit, w.dot, w.state_norm, w.row_norm, w.cosine, w.bias)]
            reasons.add_row(str(w.position), Text(w.token), *numbers, *([f"{w.cap:g}"] if capped else []))
        parts += [Text(""), output.Fit(reasons)]
    return Group(*parts)
