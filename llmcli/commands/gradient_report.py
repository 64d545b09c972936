"""llmcli gradient-report: which rows of the embedding a backward pass moves, and by which path."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from llmcli.commands import AsJson, Checkpoint, Device, Keep, Offline, Revision, Tie, open_model, warn_of_length
from llmcli.output import Fit, emit, table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from llmcli.gradients import GradientReport

GROUP = "Look inside"

Text = Annotated[str, typer.Option(metavar="TEXT", help="Take the next-token loss of this text.")]
Count = Annotated[int, typer.Option("-k", metavar="N", min=0, help="Show so many rows that are not in the text.")]


def run(
    checkpoint: Checkpoint,
    text: Text,
    k: Count = 10,
    tie: Tie = "auto",
    keep: Keep = None,
    device: Device = "cpu",
    revision: Revision = None,
    offline: Offline = False,
    as_json: AsJson = False,
) -> None:
    """Show which rows of the embedding get a gradient from a text: by being read, and by being scored.

    A tied embedding gets both and their sum; an untied one only the first, its output projection the second.

    Example: llmcli gradient-report runs/glasslm/best --text "Once upon a time"
    """
    import torch

    from llmcli import gradients, targets
    from llmcli.names import Names

    path = targets.find_checkpoint(checkpoint, revision=revision, offline=offline)
    model, _ = open_model(str(path), tie, keep, "float32", device=device)
    names = Names(path, model.config.vocab_size)
    ids = names.tokenizer.encode(text)
    names.check(ids)
    warn_of_length(model, len(ids))
    spellings = [names.of(id) for id in range(model.config.vocab_size)]
    emit(gradients.report(model, torch.tensor([ids], device=device), spellings, k), view, as_json)


def view(result: GradientReport) -> RenderableType:
    """The two paths, then a row for each token."""
    from rich.console import Group
    from rich.text import Text

    from llmcli.names import visible

    paths = table()
    for heading in ("path", "rows reached", "norm of the gradient"):
        paths.add_column(heading, justify="left" if heading == "path" else "right")
    parts = [("input: rows looked up", result.input), ("output: rows scored", result.output)]
    if result.sum is not None:
        parts.append(("sum: what the tied matrix gets", result.sum))
    for label, part in parts:
        paths.add_row(label, f"{part.rows:,} of {result.vocab_size:,}", f"{part.norm:.4g}")

    rows = table()
    for heading in ("token", "id", "read", "predicted", "input", "output", *(["sum"] if result.tied else [])):
        rows.add_column(heading, justify="left" if heading == "token" else "right")
    for group in (result.rows, result.others):
        for row in group:
            norms = [row.input_norm, row.output_norm] + ([row.sum_norm] if row.sum_norm is not None else [])
            counts = [str(row.as_input or "–"), str(row.as_target or "–")]
            style = "dim" if group is result.others else None
            rows.add_row(
                Text(visible(row.token)), str(row.id), *counts, *(f"{n:.3g}" if n else "0" for n in norms), style=style
            )
    said = f"loss {result.loss:.4f} over {result.positions:,} positions, {'tied' if result.tied else 'untied'}"
    if result.cosine is not None:
        said += f"; cosine between the two gradients {result.cosine:+.3f}"
    return Group(Text(said), Text(), Fit(paths), Text(), Fit(rows))
