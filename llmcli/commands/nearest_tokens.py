"""llmcli nearest-tokens: which tokens' vectors point the same way."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from llmcli.commands import OUTPUT, AsJson, Checkpoint, Offline, Revision
from llmcli.output import Fit, emit, emit_json, error, note, progress, size, table, warn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from rich.console import RenderableType
    from rich.table import Table

    from llmcli.analogies import Analogies
    from llmcli.export import Export
    from llmcli.names import Names
    from llmcli.neighbours import Answer, Comparison, Query
    from llmcli.probe import Ids, Rows, Spread

GROUP = "Look inside"
QUERY = "What to ask for"

Tokens = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="TOKEN...", help="Tokens as the vocabulary spells them (▁she, Ġking), as text (' she'), or #id."
    ),
]
Text = Annotated[
    list[str] | None,
    typer.Option(metavar="TEXT", help="Ask for each token of a text. May be repeated.", rich_help_panel=QUERY),
]
Mean = Annotated[
    bool, typer.Option("--mean", help="Ask for the mean of all these tokens instead of each.", rich_help_panel=QUERY)
]
Vector = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Ask for the vectors in a file: .npy or JSON numbers.", rich_help_panel=QUERY),
]
Analogy = Annotated[
    list[str] | None,
    typer.Option(
        metavar="SUM",
        help="Ask for 'king - man + woman', a sum of unit vectors. May be repeated.",
        rich_help_panel=QUERY,
    ),
]
AnalogyFile = Annotated[
    Path | None,
    typer.Option(
        "--analogies",
        metavar="FILE",
        help="Score a file of analogies: ': section' lines, four words a line.",
        rich_help_panel=QUERY,
    ),
]
Method = Annotated[
    Literal["add", "mul"],
    typer.Option(help="Answer analogies by adding cosines (3CosAdd) or multiplying (3CosMul).", rich_help_panel=QUERY),
]
Lines = Annotated[
    bool,
    typer.Option(
        "--stdin", help="Also read tokens from standard input, answering line by line.", rich_help_panel=QUERY
    ),
]
Count = Annotated[int, typer.Option("-k", metavar="N", min=0, help="Show so many neighbours.")]
MatrixName = Annotated[
    Literal["input", "output", "both"],
    typer.Option(help="Look at the embedding, at the output projection, or at both side by side."),
]
MetricName = Annotated[Literal["cosine", "dot", "l2"], typer.Option(help="Measure nearness by this.")]
Center = Annotated[bool, typer.Option("--center", help="Take the mean of all rows from every vector first.")]
Among = Annotated[Path | None, typer.Option(metavar="FILE", help="Answer only with the tokens in a file, one a line.")]
AllRows = Annotated[bool, typer.Option("--all-rows", help="Keep the padding rows behind the last token.")]
Baseline = Annotated[
    bool,
    typer.Option(
        "--baseline",
        help="Add mean and spread of the score of random pairs of rows, with --json.",
        rich_help_panel=OUTPUT,
    ),
]
Plot = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Draw similarities and a map to an .svg, .png or .pdf (extra: plot).",
        rich_help_panel=OUTPUT,
    ),
]
ExportTo = Annotated[
    Path | None,
    typer.Option(
        "--export",
        metavar="DIR",
        help="Write the rows for the Embedding Projector and in word2vec's format.",
        rich_help_panel=OUTPUT,
    ),
]


def run(
    checkpoint: Checkpoint,
    tokens: Tokens = None,
    k: Count = 10,
    text: Text = None,
    mean: Mean = False,
    vector: Vector = None,
    analogy: Analogy = None,
    analogies: AnalogyFile = None,
    method: Method = "add",
    stdin: Lines = False,
    matrix: MatrixName = "input",
    metric: MetricName = "cosine",
    center: Center = False,
    among: Among = None,
    all_rows: AllRows = False,
    baseline: Baseline = False,
    plot: Plot = None,
    export: ExportTo = None,
    revision: Revision = None,
    offline: Offline = False,
    as_json: AsJson = False,
) -> None:
    """Find the tokens whose vectors are nearest to a token's.

    One tensor is read, in place, without torch. Scores are exact: they equal float64's. Rows that are zero or not
    finite are left out, and so is the query itself.

    Example: llmcli nearest-tokens runs/glasslm/best ' she' -k 5
    """
    from llmcli.errors import UsageError

    # The pass over the matrix has its own threads; BLAS's would only stand in their way. Read when numpy starts.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if plot:
        from llmcli.plot import check

        check(plot)
    if method == "mul" and (metric != "cosine" or not (analogy or analogies)):
        raise UsageError("--method mul: 3CosMul answers analogies by cosines", "Leave it out, or add --analogy.")
    if matrix == "both" and (analogies or export or plot):
        what = "--analogies" if analogies else "--export" if export else "--plot"
        raise UsageError(f"{what} is about one matrix", "Choose --matrix input or --matrix output.")

    from llmcli import analogies as analogy_files
    from llmcli import export as exports
    from llmcli import neighbours, probe, targets
    from llmcli.matrix import find_matrix
    from llmcli.names import Names, Token

    path = targets.find_checkpoint(checkpoint, revision=revision, offline=offline)
    sides: tuple[Literal["input", "output"], ...] = ("input", "output") if matrix == "both" else (matrix,)
    matrices = [find_matrix(path, side) for side in sides]
    for text_of_note in dict.fromkeys(text for found in matrices for text in found.notes):
        note(text_of_note)
    if matrix != "input" and matrices[-1].tied:
        note("the output is tied to the embedding: both are the same matrix")
    names = Names(path, min(found.rows for found in matrices))
    queries = _queries(names, matrices[0].width, tokens or [], text or [], vector, analogy or [], mean)
    if names.unread:
        note(f"{names.unread.message}: rows go by number. {names.unread.hint}")
    if not (queries or analogies or export or stdin):
        raise UsageError("there is nothing to ask for", "Give a token: llmcli nearest-tokens CHECKPOINT ' she'")

    opened = {
        side: probe.Rows(found, None if all_rows else names.count, center)
        for side, found in zip(sides, matrices, strict=True)
    }
    rows = next(iter(opened.values()))
    chosen = _among(among, names, rows.count) if among else None
    ask = partial(
        neighbours.ask, opened, names, k=k, metric=metric, method=method, among=chosen, baseline=baseline or not as_json
    )
    results: list[Any] = []

    def show(result: Any, look: Callable[[Any], RenderableType]) -> None:
        results.append(result[0] if isinstance(result, list) and len(result) == 1 else result)
        if not as_json:
            emit(result, look, False)

    answers = ask(queries) if queries else []
    if queries:
        show(answers, lambda shown: view(shown, metric))
        if k and chosen is None:
            _say_left_out(opened.values())
    if analogies:
        with progress("answering analogies", unit="questions") as advance:
            scored = analogy_files.score(rows, names, analogies, method=method, among=chosen, progress=advance)
        show(scored, view_analogies)
    if export:
        ids = list(range(rows.count)) if chosen is None else sorted(set(chosen.tolist()))
        with progress("writing", total=len(ids), unit="rows") as advance:
            written = exports.export(rows, names, export, ids, advance)
        show(written, view_export)
    if as_json and results:
        emit_json(results[0] if len(results) == 1 else results)
    if plot:
        from llmcli.neighbours_plot import MOST_DRAWN, draw

        made_of = [[Token(names.of(id), id) for id in query.ids] for query in queries]
        drawn = [answer for answer in answers if isinstance(answer, neighbours.Answer)]
        if dropped := draw(drawn, made_of, rows, plot):
            note(f"{plot}: there is room for {MOST_DRAWN} tokens, {dropped:,} more are left out")
    if stdin:
        _answer_lines(names, ask, metric, as_json)


def _among(file: Path, names: Names, count: int) -> Ids:
    """The rows that a file names, those that have a token; what is not one token is said."""
    from llmcli.neighbours import read_among

    ids, unknown = read_among(file, names)
    if unknown:
        shown = ", ".join(map(repr, unknown[:5])) + (", ..." if len(unknown) > 5 else "")
        warn(f"{file}: {len(unknown):,} lines are not one token and are left out: {shown}")
    return ids[ids < count]


def _answer_lines(names: Names, ask: Callable[..., list[Any]], metric: str, as_json: bool) -> None:
    """Answer each line of standard input at once. A line that is no token is said, and the next one answered."""
    from llmcli.errors import LlmcliError
    from llmcli.neighbours import token_queries

    failed = False
    for line in sys.stdin:
        word = line.rstrip("\r\n")
        if not word:
            continue
        try:
            answers = ask(token_queries(names, [word]))
        except LlmcliError as refusal:
            failed = True
            if as_json:
                emit_json({"query": {"token": word, "id": None}, "error": refusal.message}, indent=False)
            else:
                error(refusal)
            continue
        if as_json:
            emit_json(answers[0], indent=False)
        else:
            emit(answers, lambda shown: view(shown, metric), False)
    if failed:
        raise typer.Exit(1)


def _queries(
    names: Names,
    width: int,
    tokens: Sequence[str],
    texts: Sequence[str],
    vector: Path | None,
    analogies: Sequence[str],
    mean: bool,
) -> list[Query]:
    from llmcli import neighbours

    queries = neighbours.token_queries(names, tokens)
    for text in texts:
        queries += neighbours.text_queries(names, text)
    if mean:
        queries = [neighbours.mean_query(names, queries)]
    if vector:
        queries += neighbours.vector_queries(vector, width)
    return queries + [neighbours.analogy_query(names, sum) for sum in analogies]


def _say_left_out(opened: Iterable[Rows]) -> None:
    for rows in opened:
        if number := len(rows.unusable()):
            kind = "zero, the mean itself" if rows.mean is not None else "zero"
            note(f"{number:,} rows of the {rows.matrix.side} matrix are {kind} or not finite, and are left out")
        if rows.matrix.rows > rows.count:
            first, last = rows.count, rows.matrix.rows - 1
            note(f"{last - first + 1:,} rows without a token are left out ({first} to {last}); --all-rows keeps them")


def view(answers: Sequence[Answer] | Sequence[Comparison], metric: str) -> RenderableType:
    """A block of rows for each query, and what random pairs score."""
    from rich.console import Group
    from rich.text import Text

    from llmcli.names import visible
    from llmcli.neighbours import Answer

    parts: list[RenderableType] = []
    for answer in answers:
        title = Text(visible(answer.query.token) if answer.query.id is not None else answer.query.token, style="bold")
        if answer.query.id is not None:
            title.append(f"  #{answer.query.id}", style="dim")
        if answer.left_out:
            title.append(f"  (left out: {', '.join(map(visible, answer.left_out))})", style="dim")
        table = _table(answer, metric) if isinstance(answer, Answer) else _side_by_side(answer, metric)
        parts += [title, table]
        if not isinstance(answer, Answer):
            parts.append(Text(f"in both lists: {answer.overlap:.0%}", style="dim"))
        parts.append(Text())
    spread = answers[0].baseline
    if spread is not None:
        parts.append(Text(_said(spread, metric), style="dim"))
    return Group(*parts)


def _said(baseline: Spread | dict[Any, Spread], metric: str) -> str:
    spreads = baseline if isinstance(baseline, dict) else {"": baseline}
    said = [f"{side} {s.mean:z.3f} ± {s.std:.3f}".strip() for side, s in spreads.items()]
    return f"random pairs of rows, {metric}: {', '.join(said)} (mean and standard deviation)"


def _columns(table: Table, metric: str) -> None:
    table.add_column("token", min_width=12)
    table.add_column("id", justify="right", style="dim")
    table.add_column("distance" if metric == "l2" else metric, justify="right")


def _table(answer: Answer, metric: str) -> Fit:
    from rich.text import Text

    from llmcli.names import visible

    made = table()
    _columns(made, metric)
    for hit in answer.neighbours:
        made.add_row(Text(visible(hit.token)), str(hit.id), f"{hit.score:.4f}")
    return Fit(made)


def _side_by_side(answer: Comparison, metric: str) -> Fit:
    from itertools import zip_longest

    from rich.text import Text

    from llmcli.names import visible

    made = table()
    made.add_column("input", min_width=12, no_wrap=True)
    made.add_column("id", justify="right", style="dim")
    made.add_column(metric, justify="right")
    made.add_column("  output", min_width=12, no_wrap=True)
    made.add_column("id", justify="right", style="dim")
    made.add_column(metric, justify="right")
    both = {hit.id for hit in answer.input} & {hit.id for hit in answer.output}
    for pair in zip_longest(answer.input, answer.output):
        cells: list[Any] = []
        for side, hit in enumerate(pair):
            if hit is None:
                cells += ["", "", ""]
            else:
                name = Text("  " * side + visible(hit.token), style="bold" if hit.id in both else "")
                cells += [name, str(hit.id), f"{hit.score:.4f}"]
        made.add_row(*cells)
    return Fit(made)


def view_analogies(result: Analogies) -> Fit:
    """A row for each section, and the total."""
    from rich.text import Text

    made = table()
    made.add_column("section")
    for heading in ("asked", "correct", "accuracy", "skipped"):
        made.add_column(heading, justify="right")
    for section in (*result.sections, result.total):
        share = "–" if section.accuracy is None else f"{section.accuracy:.1%}"
        style = "bold" if section is result.total else None
        made.add_row(
            Text(section.name), f"{section.asked:,}", f"{section.correct:,}", share, f"{section.skipped:,}", style=style
        )
    return Fit(made)


def view_export(written: Export) -> RenderableType:
    """The files, with their sizes."""
    from rich.text import Text

    lines = [f"{written.rows:,} vectors of {written.width}"]
    lines += [f"{file}  {size(Path(file).stat().st_size)}" for file in written.files]
    return Text("\n".join(lines))
