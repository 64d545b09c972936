"""llmcli evaluate: how well models predict a text."""

from __future__ import annotations

from functools import partial
from math import log
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from llmcli import completion, output
from llmcli.commands import (
    OUTPUT,
    AsJson,
    Device,
    Dtype,
    Field,
    Keep,
    Offline,
    Revision,
    Tie,
    open_model,
    open_tokenizer,
)
from llmcli.errors import UsageError

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from llmcli.evaluate import Bin, Evaluation, TokenLoss

GROUP = "Ask a model"

WORST = 20
"""Tokens in the table of the worst; --json has them all."""


class Report(NamedTuple):
    """One checkpoint's evaluation; `tokens` and `curve` where they were asked for."""

    checkpoint: str
    evaluation: Evaluation
    tokens: list[TokenLoss] | None
    curve: list[Bin] | None


def run(
    targets: Annotated[
        list[str],
        typer.Argument(
            metavar="CHECKPOINT... FILE",
            help="Checkpoints, then the text.",
            autocompletion=completion.checkpoints,
        ),
    ],
    context: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Read so many tokens in a window; default: the model's context, to 2,048."
        ),
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Go on by so many tokens to the next window; default: half a window."),
    ] = None,
    field: Field = "text",
    by_token: Annotated[
        bool,
        typer.Option("--by-token", help="Show the worst tokens and where they stand.", rich_help_panel=OUTPUT),
    ] = False,
    context_curve: Annotated[
        bool,
        typer.Option("--context-curve", help="Show the loss by how many tokens stand before.", rich_help_panel=OUTPUT),
    ] = False,
    tie: Tie = "auto",
    keep: Keep = None,
    dtype: Dtype = None,
    device: Device = "cpu",
    revision: Revision = None,
    offline: Offline = False,
    as_json: AsJson = False,
) -> None:
    """Measure how well models predict a text: loss, perplexity, bits per byte.

    Each token is predicted once, with at least context - stride tokens before it.
    Loss and perplexity compare models of one tokenizer; bits per byte compare any two.

    Example: llmcli evaluate runs/glasslm/best runs/mine/best text.txt --stride 128
    """
    if len(targets) < 2:
        raise UsageError("evaluate needs a checkpoint and a text", "Give both: llmcli evaluate CHECKPOINT FILE")
    from llmcli import corpus, evaluate
    from llmcli import targets as places
    from llmcli.config import ModelConfig

    *checkpoints, file = targets
    if (Path(file) / "config.json").is_file():
        raise UsageError(
            f"{file}: a checkpoint, where the text belongs", "The text comes last: llmcli evaluate CHECKPOINT... FILE."
        )
    texts = _documents(corpus.find(file, field))
    reports = []
    for checkpoint in checkpoints:
        path = places.find_checkpoint(checkpoint, revision=revision, offline=offline)
        coder = open_tokenizer(path)
        model = open_model(str(path), tie, keep, dtype, device=device)[0]
        config: ModelConfig = model.config
        if context is not None and context > config.max_position_embeddings and model.position_embeddings is None:
            output.warn(f"{checkpoint} was trained for {config.max_position_embeddings:,} tokens, not for {context:,}")
        documents = evaluate.encode(coder, texts, config.vocab_size)
        steps = evaluate.evaluate(model, coder, documents, context=context, stride=stride, curve=context_curve)
        with output.progress(checkpoint, sum(len(document.ids) for document in documents), "tokens") as advance:
            while True:
                try:
                    advance(next(steps))
                except StopIteration as end:
                    found: Evaluation = end.value
                    break
        if found.loss > log(config.vocab_size) + 1:
            output.warn(
                f"{checkpoint}: a loss of {found.loss:.2f} is worse than guessing (ln {config.vocab_size:,} = "
                f"{log(config.vocab_size):.2f}): is the tokenizer another model's, or are the weights damaged?"
            )
        tokens = list(evaluate.by_token(coder, documents, found)) if by_token else None
        reports.append(Report(checkpoint, found, tokens, evaluate.bins(found) if context_curve else None))
    if as_json:
        results = [_json(report) for report in reports]
        named = [{"checkpoint": report.checkpoint} | result for report, result in zip(reports, results, strict=True)]
        output.emit_json(results[0] if len(results) == 1 else named)
    else:
        output.emit(reports, view, as_json=False)


def _documents(found: Any) -> list[str]:
    """The texts of a corpus, each whole."""
    texts, parts = [], []
    for piece in found.pieces():
        parts.append(piece.text)
        if piece.ends:
            texts.append("".join(parts))
            parts = []
    return texts


def _json(report: Report) -> dict[str, Any]:
    names = ("tokens", "loss", "perplexity", "bits_per_byte", "stride")
    result: dict[str, Any] = {name: getattr(report.evaluation, name) for name in names}
    if report.tokens is not None:
        result["by_token"] = report.tokens
    if report.curve is not None:
        result["context_curve"] = report.curve
    return result


def view(reports: list[Report]) -> RenderableType:
    """One line a checkpoint; then, where asked for, the worst tokens and the loss by position."""
    from rich.console import Group
    from rich.text import Text

    def table(*columns: str) -> Table:
        made = output.table()
        for number, column in enumerate(columns):
            made.add_column(column, justify="left" if number == 0 else "right", overflow="fold")
        return made

    def curve_table(curve: list[Bin], bars: int) -> Table:
        made = table("tokens before", "tokens", "loss", "")
        made.columns[-1].justify = "left"
        top = max(bin.loss for bin in curve) or 1.0
        for bin in curve:
            span = f"{bin.start:,}" if bin.start == bin.end else f"{bin.start:,}–{bin.end:,}"
            made.add_row(span, f"{bin.tokens:,}", f"{bin.loss:.4f}", Text(output.bar(bin.loss / top, bars), "cyan"))
        return made

    summary = table("checkpoint", "tokens", "loss", "perplexity", "bits/byte", "bits/character", "context", "stride")
    for checkpoint, e, _, _ in reports:
        numbers = f"{e.tokens:,}", f"{e.loss:.4f}", f"{e.perplexity:,.2f}", f"{e.bits_per_byte:.4f}"
        sizes = f"{e.bits_per_character:.4f}", f"{e.context:,}", f"{e.stride:,}"
        summary.add_row(Text(checkpoint), *numbers, *sizes)
    summary.columns[0].min_width = 16
    parts: list[RenderableType] = [output.Fit(summary)]
    for checkpoint, _, tokens, curve in reports:
        if tokens is not None:
            worst = table("token", "id", "loss", "probability", "document", "line", "column")
            from math import exp

            for token in sorted(tokens, key=lambda token: -token.loss)[:WORST]:
                place = str(token.document), f"{token.line:,}", f"{token.column:,}"
                worst.add_row(Text(token.token), str(token.id), f"{token.loss:.4f}", f"{exp(-token.loss):.2g}", *place)
            parts += [Text(f"\n{checkpoint}: the worst tokens", "bold"), output.Fit(worst)]
        if curve is not None:
            ways = (partial(curve_table, curve, bars) for bars in (40, 8))
            parts += [Text(f"\n{checkpoint}: loss by context", "bold"), output.Fitting(*ways)]
    return Group(*parts)
