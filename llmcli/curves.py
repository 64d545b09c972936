"""Training curves from `metrics.jsonl`: read, compared, drawn, written as CSV. Without torch."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import msgspec

from llmcli.errors import DataError, LlmcliError, UsageError, listing, unreadable
from llmcli.events import METRICS
from llmcli.plot import PALETTE, drawing, readable

A_RUN = "Give the folder of a training run: `llmcli train --out DIR` makes one."
COLUMNS = (
    *("step", "loss", "lr", "grad_norm", "tokens", "tokens_per_second", "mfu", "memory"),
    *("val_loss", "perplexity", "bits_per_byte"),
)


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """One run's steps and evaluations, as they stand in its metrics: a table of numbers for each logged step.

    `start` is what the run said of itself when it last began; empty where it did not.
    """

    name: str
    start: dict[str, Any]
    steps: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]

    @property
    def best(self) -> dict[str, Any] | None:
        """The evaluation of the lowest loss."""
        return min(self.evaluations, key=lambda row: row["val_loss"], default=None)


def _has(event: dict[str, Any], *keys: str) -> bool:
    return all(isinstance(event.get(key), int | float) for key in keys)


def read(run: Path) -> Curve:
    """The curve of a run's folder, or of a metrics.jsonl itself. Raises UsageError or DataError where there is none.

    A last line that is not whole (the run is being written, or was killed) is left out.
    """
    path = run / METRICS if run.is_dir() else run
    try:
        if not path.is_file():  # a device has no end
            raise _no_run(run)
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise unreadable(path, error, DataError) from None
    start: dict[str, Any] = {}
    steps, evaluations = [], []
    for line in lines:
        try:
            event = msgspec.json.decode(line)
        except msgspec.DecodeError:
            continue
        kind = event.get("event") if isinstance(event, dict) else None
        if kind == "step" and _has(event, "step", "loss", "lr", "tokens", "tokens_per_second"):
            steps.append(event)
        elif kind == "eval" and _has(event, "step", "val_loss"):
            evaluations.append(event)
        elif kind == "start" and _has(event, "parameters", "tie_word_embeddings"):
            start = event
    if not steps and not evaluations:
        raise DataError(f"{path}: no steps in it", A_RUN)
    name = run.name if run.is_dir() else run.parent.name
    return Curve(name=name, start=start, steps=steps, evaluations=evaluations)


def _no_run(place: Path) -> LlmcliError:
    """Why a place is no run, and where one is: in it, or around it."""
    if not place.exists():
        return UsageError(f"{place}: no such file or folder", A_RUN)
    if not place.is_dir():
        return UsageError(f"{place}: neither a file nor a folder", A_RUN)
    if inside := sorted(str(path.parent) for path in place.glob(f"*/{METRICS}")):
        return UsageError(f"{place}: a folder of runs, not a run", f"Give some of them: {listing(inside, 12, ' ')}")
    if (place / "config.json").exists():
        around = place.absolute().parent
        return UsageError(
            f"{place}: a checkpoint, not the folder of a run",
            f"Give the folder it is in: {around}" if (around / METRICS).exists() else A_RUN,
        )
    return DataError(f"{place}: no {METRICS} in it", A_RUN)


def draw(curves: list[Curve], path: Path) -> None:
    """Loss by step, and the learning rate below it, of all runs in one picture; validation losses are dots.

    Raises UsageError for a file that is no picture's, LlmcliError without matplotlib.
    """
    with drawing(path, 8, 6) as figure:
        losses, rates = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
        for number, curve in enumerate(curves):
            color, name = PALETTE[number % len(PALETTE)], readable(curve.name)
            x = [row["step"] for row in curve.steps]
            losses.plot(x, [row["loss"] for row in curve.steps], color=color, alpha=0.45, linewidth=1)
            best = f", best {curve.best['val_loss']:.4f}" if curve.best else ""
            losses.plot(
                [row["step"] for row in curve.evaluations],
                [row["val_loss"] for row in curve.evaluations],
                color=color,
                marker="osD^v<>p"[number % 8],
                markersize=4,
                label=f"{name}{best}",
            )
            rates.plot(x, [row["lr"] for row in curve.steps], color=color, linewidth=1)
        losses.set_ylabel("loss (nats per token)")
        losses.set_title("Training loss (line) and validation loss (marks)")
        losses.grid(True)
        losses.legend()
        rates.set_ylabel("learning rate")
        rates.set_xlabel("step")
        rates.grid(True)


def as_csv(curve: Curve) -> str:
    """A row for each logged step, with the evaluation of the same step in its last columns."""
    rows: dict[int, dict[str, Any]] = {}
    for event in (*curve.steps, *curve.evaluations):
        rows.setdefault(event["step"], {}).update(event)
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(row for _, row in sorted(rows.items()))
    return text.getvalue()
