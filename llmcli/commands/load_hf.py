"""llmcli load-hf: any checkpoint checked, loaded and, if asked, written clean."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from llmcli.commands import AsJson, Keep, Tie
from llmcli.output import emit, quantity

if TYPE_CHECKING:
    from rich.console import RenderableType

    from llmcli.mapping import Plan

Source = Annotated[
    str, typer.Argument(metavar="SOURCE", help="A checkpoint: a folder, or one .safetensors file in it.")
]
Out = Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Write a clean checkpoint here.")]
Check = Annotated[bool, typer.Option("--check", help="Stop after the headers: read no weights.")]
Dtype = Annotated[str | None, typer.Option(metavar="TYPE", help="Convert to float32, bfloat16 or float16.")]


class TieReport(msgspec.Struct, frozen=True):
    """What was decided about the output matrix, and why."""

    decision: str
    reason: str


class Report(msgspec.Struct, frozen=True):
    """What a checkpoint holds and what became of it."""

    family: str
    parameters: int
    tie: TieReport
    ignored: tuple[str, ...]
    warnings: tuple[str, ...]
    out: str | None


def run(
    source: Source,
    out: Out = None,
    check: Check = False,
    tie: Tie = "auto",
    keep: Keep = None,
    dtype: Dtype = None,
    as_json: AsJson = False,
) -> None:
    """Check a checkpoint against its family, load it, and say how; --out writes it clean.

    Example: llmcli load-hf ./gpt2 --out gpt2-untied --tie untie
    """
    from llmcli.targets import find_checkpoint

    path = find_checkpoint(source)
    if check:
        from llmcli import checkpoint

        emit(report(checkpoint.plan(path, tie, keep), None), view, as_json)
        return
    from llmcli import checkpoint

    model, plan = checkpoint.load(path, dtype=dtype, tie=tie, keep=keep)
    if out:
        checkpoint.save(model, out)
    emit(report(plan, out), view, as_json)


def report(plan: Plan, out: Path | None) -> Report:
    """A plan as the command shows it."""
    from llmcli.params import count

    return Report(
        family=plan.config.family,
        parameters=count(plan.config).total,
        tie=TieReport(plan.tie.decision, plan.tie.reason),
        ignored=plan.ignored,
        warnings=plan.warnings,
        out=str(out) if out else None,
    )


def view(report: Report) -> RenderableType:
    """One line a fact."""
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_row("family", report.family)
    table.add_row("parameters", f"{report.parameters:,} ({quantity(report.parameters)})")
    table.add_row("output", f"{'tied' if report.tie.decision == 'tie' else 'untied'}: {report.tie.reason}")
    if report.ignored:
        from llmcli.mapping import grouped

        table.add_row("ignored", ", ".join(grouped(report.ignored)))
    for warning in report.warnings:
        table.add_row("[yellow]warning[/]", warning)
    if report.out:
        table.add_row("written to", report.out)
    return table
