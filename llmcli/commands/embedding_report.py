"""llmcli embedding-report: what an embedding matrix looks like as a whole."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from llmcli.commands import OUTPUT, AsJson, Checkpoint, Offline, Revision
from llmcli.errors import dimensions
from llmcli.output import Fitting, bar, emit, facts, note, progress, table

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import RenderableType
    from rich.table import Table

    from llmcli.embeddings import EmbeddingReport
    from llmcli.matrix import Matrix
    from llmcli.names import Names
    from llmcli.probe import Floats

GROUP = "Look inside"

MatrixName = Annotated[
    Literal["input", "output"], typer.Option(help="Look at the embedding or at the output projection.")
]
Plot = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Draw norms and cosines to an .svg, .png or .pdf (extra: plot).", rich_help_panel=OUTPUT
    ),
]

MOST = 24
"""How many tokens a line of the table names; JSON holds them all."""


def run(
    checkpoint: Checkpoint,
    matrix: MatrixName = "input",
    plot: Plot = None,
    revision: Revision = None,
    offline: Offline = False,
    as_json: AsJson = False,
) -> None:
    """Report on the matrix of token vectors: norms, directions, rank, duplicates, tokens never trained.

    One tensor is read, in place, without torch.

    Example: llmcli embedding-report runs/glasslm/best
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as in nearest-tokens: the passes have threads of their own
    if plot:
        from llmcli.plot import check

        check(plot)
    from llmcli import embeddings, targets
    from llmcli.matrix import find_matrix
    from llmcli.names import Names

    path = targets.find_checkpoint(checkpoint, revision=revision, offline=offline)
    found = find_matrix(path, matrix)
    for text in found.notes:
        note(text)
    names = Names(path, found.rows)
    if names.unread:
        note(f"{names.unread.message}: rows go by number. {names.unread.hint}")
    with progress("reading", total=1) as advance:
        result, norms = embeddings.report(found, names, advance)
    emit(result, lambda shown: view(shown, names.of), as_json)
    if plot:
        draw(result, norms, found, names, plot)


def view(result: EmbeddingReport, name: Callable[[int], str]) -> RenderableType:
    """Facts in two columns, then the distribution of the norms."""
    from rich.console import Group
    from rich.text import Text

    from llmcli.names import visible

    def tokens(ids: tuple[int, ...]) -> str:
        shown = " ".join(visible(name(id)) for id in ids[:MOST])
        return f"{shown} ..." if len(ids) > MOST else shown

    found = facts()

    def row(label: str, text: str) -> None:
        found.add_row(label, text)

    norms, scale, turn, rank, apart = (
        result.norms, result.scale, result.anisotropy, result.rank, result.under_trained,
    )  # fmt: skip
    tied = ", tied to the output" if result.tied else ""
    row(
        "matrix",
        f"{result.tensor}, {dimensions((result.rows, result.width))} {result.dtype}, the {result.matrix}'s{tied}",
    )
    row("norm of a row", f"{norms.mean:.4g} ± {norms.std:.3g}, from {norms.min:.4g} to {norms.max:.4g}")
    row("RMS of a coordinate", f"{scale.rms:.4g}")
    by = "which the model does" if scale.by_model else "which this model does not do"
    row("times the root of d", f"{scale.root:.4g}: norm {scale.norm_scaled:.4g}, RMS {scale.rms_scaled:.4g}; {by}")
    row(
        "cosine of random pairs",
        f"{turn.mean_cosine:z.3f} ± {turn.std_cosine:.3f}; "
        f"centred {turn.mean_cosine_centered:z.3f} ± {turn.std_cosine_centered:.3f}",
    )
    row("length of the mean row", f"{turn.mean_norm:.2f} of a row's")
    sample = "" if rank.rows >= result.rows - len(result.without_token) - 1 else f" (of {rank.rows:,} rows)"
    row("effective rank", f"{rank.effective:.1f} of {result.width:,}; centred {rank.centered:.1f}{sample}")
    row("zero rows", f"{len(result.zero):,}  {tokens(result.zero)}".rstrip())
    row("rows not finite", f"{len(result.not_finite):,}  {tokens(result.not_finite)}".rstrip())
    row("rows without a token", f"{len(result.without_token):,}")
    same = sum(map(len, result.duplicates))
    groups = "; ".join(tokens(group) for group in result.duplicates[:4]) + (
        " ..." if len(result.duplicates) > 4 else ""
    )
    row("duplicate rows", f"{same:,} in {len(result.duplicates):,} groups: {groups}" if same else "0")
    row("under-trained rows", f"{apart.rows:,}  {tokens(apart.ids)}".rstrip())
    signs = []
    if apart.alike:
        signs.append(f"{apart.alike.rows:,} point the same way (cosine {apart.alike.cosine:.2f} and more)")
    if apart.shared_norm:
        shared = apart.shared_norm
        signs.append(f"{shared.rows:,} share the norm {shared.norm:.4g} (within {shared.tolerance:.1%})")
    if apart.short:
        signs.append(f"{apart.short:,} are far shorter than the rest")
    for n, sign in enumerate(signs):
        row("  by these signs" if n == 0 else "", sign)

    def distribution(bars: int) -> Table:
        made = table()
        for heading in ("norm", "rows", ""):
            made.add_column(heading, justify="right" if heading else "left")
        counts, edges = norms.histogram.counts, norms.histogram.edges
        for low, high, number in zip(edges, edges[1:], counts, strict=False):
            made.add_row(f"{low:.4g} – {high:.4g}", f"{number:,}", Text(bar(number / max(*counts, 1), bars), "cyan"))
        return made

    return Group(found, Text(), Fitting(lambda: distribution(40), lambda: distribution(12)))


def draw(result: EmbeddingReport, norms: Floats, matrix: Matrix, names: Names, path: Path) -> None:
    """Save a picture: the norms, with the under-trained rows apart, and the cosines of random pairs."""
    import numpy as np

    from llmcli.plot import PALETTE, drawing
    from llmcli.probe import Rows

    apart = np.zeros(len(norms), bool)
    apart[list(result.under_trained.ids)] = True
    usable = np.isfinite(norms) & (norms > 0)
    ends = result.norms.histogram.edges
    edges = np.linspace(ends[0], ends[-1], 61)
    with drawing(path, 11, 4.4) as figure:
        left, right = figure.subplots(1, 2)
        groups = [norms[usable & ~apart], norms[usable & apart]]
        labels = [f"{len(groups[0]):,} other rows", f"{len(groups[1]):,} under-trained rows"]
        shown = 2 if len(groups[1]) else 1
        bars = left.hist(groups[:shown], edges, stacked=True, color=PALETTE[:shown], label=labels[:shown])[2]
        if shown == 2:
            for patch in bars[1]:
                patch.set_hatch("///")
                patch.set_edgecolor("white")
            left.legend()
        left.set_title("norms of the rows")
        left.set_xlabel("norm")
        left.set_ylabel("rows")
        left.grid(True, axis="y")
        for n, (center, label, style) in enumerate(((False, "as stored", "-"), (True, "centred", "--"))):
            cosines = Rows(matrix, names.count, center).pairs()
            right.hist(
                cosines, 80, histtype="step", color=PALETTE[n], linestyle=style, linewidth=1.6, density=True,
                label=f"{label}: {cosines.mean():z.3f} ± {cosines.std():.3f}",
            )  # fmt: skip
        right.set_title("cosine of random pairs")
        right.set_xlabel("cosine")
        right.set_ylabel("density")
        right.grid(True, axis="y")
        right.legend()
