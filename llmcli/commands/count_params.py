"""llmcli count-params: how many parameters, tied and untied."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from llmcli.commands import AsJson
from llmcli.output import emit, quantity

if TYPE_CHECKING:
    from rich.table import Table

    from llmcli.params import ParameterCount

Targets = Annotated[
    list[str],
    typer.Argument(metavar="TARGET...", help="A preset, a config file (ours or config.json), or a checkpoint folder."),
]


def run(targets: Targets, as_json: AsJson = False) -> None:
    """Count a model's parameters, tied and untied, without allocating anything.

    Example: llmcli count-params gpt2 gemma-2b
    """
    from llmcli.params import count
    from llmcli.targets import read_config

    counts = [count(read_config(target)) for target in targets]
    if as_json:
        emit(counts[0] if len(counts) == 1 else counts, lambda _: "", as_json)
    else:
        emit(list(zip(targets, counts, strict=True)), view, as_json)


def view(counts: list[tuple[str, ParameterCount]]) -> Table:
    """One column a target: parts with their share, then totals."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    for target, _ in counts:
        table.add_column(target, justify="right")
        table.add_column("", justify="right", style="dim")

    def row(label: str, values: list[int | None], share: bool = False, style: str | None = None) -> None:
        cells = []
        for value, (_, count) in zip(values, counts, strict=True):
            cells.append("–" if value is None else f"{value:,}")
            cells.append(f"{value / count.total:.0%}" if share and value is not None and count.total else "")
        table.add_row(label, *cells, style=style)

    for part in dict.fromkeys(part for _, count in counts for part in count.parts):
        row(part.replace("_", " "), [count.parts.get(part) for _, count in counts], share=True)
    row("total", [count.total for _, count in counts], style="bold")
    table.add_row("", *[cell for _, count in counts for cell in (quantity(count.total), "")], style="dim")
    row("tied", [count.total_tied for _, count in counts])
    row("untied", [count.total_untied for _, count in counts])
    row("saved by tying", [count.saved_by_tying for _, count in counts])
    if any(count.active != count.total for _, count in counts):
        row("active per token", [count.active for _, count in counts])
    table.add_row(
        "as configured",
        *[cell for _, count in counts for cell in ("tied" if count.tie_word_embeddings else "untied", "")],
    )
    return table
