"""llmcli curves: what training runs reached, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from llmcli.commands import OUTPUT, AsJson
from llmcli.output import Fit, emit, quantity, sparkline, table

if TYPE_CHECKING:
    from llmcli.curves import Curve

GROUP = "Train"

Runs = Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of training runs, or their metrics.jsonl.")]
Plot = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Draw all curves to an .svg, .png or .pdf (extra: plot).", rich_help_panel=OUTPUT
    ),
]
Csv = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write one run's numbers as CSV.", rich_help_panel=OUTPUT)
]


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """What is trained, where the run stands, and the best it reached; None where nothing was said or evaluated."""

    run: str
    parameters: int | None
    tied: bool | None
    steps: int
    tokens: int
    loss: float | None
    best_loss: float | None
    best_step: int | None
    bits_per_byte: float | None
    tokens_per_second: float | None


def run(runs: Runs, plot: Plot = None, csv: Csv = None, as_json: AsJson = False) -> None:
    """Compare training runs by their losses, and draw their curves.

    Example: llmcli curves runs/tied runs/untied --plot curves.svg
    """
    from llmcli import curves
    from llmcli.errors import LlmcliError, UsageError, unwritable
    from llmcli.plot import check

    if plot:
        check(plot)
    if csv and len(runs) > 1:
        raise UsageError("--csv with several runs", "Give one run.")
    read = [curves.read(run) for run in runs]
    if plot:
        curves.draw(read, plot)
    if csv:
        try:
            csv.write_text(curves.as_csv(read[0]), encoding="utf-8")
        except OSError as error:
            raise unwritable(csv, error, LlmcliError, "Choose another place.") from None
    if as_json:
        found = [summary(curve) for curve in read]
        emit(found[0] if len(found) == 1 else found, lambda _: "", as_json)
    else:
        emit(read, view, as_json)


def summary(curve: Curve) -> Summary:
    """A curve in a line."""
    last, best = curve.steps[-1] if curve.steps else {}, curve.best or {}
    speeds = sorted(row["tokens_per_second"] for row in curve.steps)
    return Summary(
        run=curve.name,
        parameters=curve.start.get("parameters"),
        tied=curve.start.get("tie_word_embeddings"),
        steps=last.get("step", 0),
        tokens=last.get("tokens", 0),
        loss=last.get("loss"),
        best_loss=best.get("val_loss"),
        best_step=best.get("step"),
        bits_per_byte=best.get("bits_per_byte"),
        tokens_per_second=speeds[len(speeds) // 2] if speeds else None,
    )


def view(curves: list[Curve]) -> Fit:
    """One row a run."""
    made = table()
    made.add_column("run", overflow="fold", min_width=8)
    made.add_column("output")
    for name in ("parameters", "steps", "tokens", "loss", "best val loss", "at step", "bits/byte", "tokens/s"):
        made.add_column(name, justify="right")
    made.add_column("loss by step", no_wrap=True)
    for curve in curves:
        row = summary(curve)
        made.add_row(
            row.run,
            "–" if row.tied is None else "tied" if row.tied else "untied",
            "–" if row.parameters is None else quantity(row.parameters),
            f"{row.steps:,}",
            quantity(row.tokens),
            "–" if row.loss is None else f"{row.loss:.4f}",
            "–" if row.best_loss is None else f"{row.best_loss:.4f}",
            "–" if row.best_step is None else f"{row.best_step:,}",
            "–" if row.bits_per_byte is None else f"{row.bits_per_byte:.4f}",
            "–" if row.tokens_per_second is None else quantity(round(row.tokens_per_second)),
            sparkline([step["loss"] for step in curve.steps], 24),
        )
    return Fit(made)
