"""llmcli count-params: how many parameters, where they are, and what they cost."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import msgspec
import typer

from llmcli import completion
from llmcli.commands import OUTPUT, AsJson, Offline, Revision
from llmcli.errors import dimensions
from llmcli.output import Fitting, bar, emit, emit_json, note, quantity, size, table, warn

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.console import RenderableType
    from rich.table import Table

    from llmcli.costs import Costs
    from llmcli.params import Counted, EmbeddingShare, Line, ParameterCount

GROUP = "Checkpoints"
COSTS = "Costs"

Targets = Annotated[
    list[str],
    typer.Argument(
        metavar="TARGET...",
        help="A preset, a config file (ours or config.json), a checkpoint folder, a .safetensors file, or org/name "
        "on the Hub.",
        autocompletion=completion.targets,
    ),
]
By = Annotated[
    Literal["part", "layer", "tensor"] | None,
    typer.Option(help="List the parameters by part, by layer, or tensor by tensor."),
]
ShowTable = Annotated[
    Literal["embeddings"] | None,
    typer.Option("--table", help="Show one line a target: its embedding matrix, and what tying the output saves."),
]
Cost = Annotated[
    bool,
    typer.Option(
        "--cost", help="Add memory and operations: weights, cache, training, one token.", rich_help_panel=COSTS
    ),
]
Dtype = Annotated[
    Literal["float32", "bfloat16", "float16"] | None,
    typer.Option(help="Reckon cache, activations and logits in this type; default: bfloat16.", rich_help_panel=COSTS),
]
Context = Annotated[
    int | None,
    typer.Option(
        metavar="N", min=1, help="Reckon with so many positions; default: the model's.", rich_help_panel=COSTS
    ),
]
Batch = Annotated[
    int | None,
    typer.Option(
        metavar="N", min=1, help="Reckon with so many sequences at a time; default: 1.", rich_help_panel=COSTS
    ),
]
ShowFiles = Annotated[
    bool,
    typer.Option("--files", help="Add what a checkpoint's files hold besides, with --json.", rich_help_panel=OUTPUT),
]
Plot = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Draw the parts to an .svg, .png or .pdf (extra: plot).", rich_help_panel=OUTPUT),
]


class Result(msgspec.Struct, frozen=True):
    """What there is to show of one target; `lines` (`by` what) and `costs` when asked for."""

    target: str
    counted: Counted
    by: str | None = None
    lines: list[Line] | None = None
    costs: Costs | None = None


class Cell(NamedTuple):
    """A number as it is shown, and its share of the whole where that says something."""

    text: str
    share: float | None = None


class Row(NamedTuple):
    """A label and a cell for each target; without cells a heading."""

    label: str
    cells: Sequence[Cell] = ()
    style: str = ""


def run(
    targets: Targets,
    by: By = None,
    table: ShowTable = None,
    cost: Cost = False,
    dtype: Dtype = None,
    context: Context = None,
    batch: Batch = None,
    plot: Plot = None,
    files: ShowFiles = False,
    revision: Revision = None,
    offline: Offline = False,
    as_json: AsJson = False,
) -> None:
    """Count parameters, tied and untied, and what they cost, without reading weights.

    A checkpoint is counted by the headers of its files.

    Example: llmcli count-params gpt2 gemma-2b --cost --context 1024
    """
    from llmcli.params import breakdown, take

    _check_options(by, table, cost, {"--dtype": dtype, "--context": context, "--batch": batch})
    if plot:
        from llmcli.plot import check

        check(plot)
    results = []
    for target in targets:
        counted = take(target, revision=revision, offline=offline)
        lines = breakdown(counted, by) if by else None
        costs = _costs(target, counted, dtype, context, batch) if cost else None
        results.append(Result(target, counted, by, lines, costs))
        for text in counted.notes:
            note(text)
        for text in counted.files.disagreements if counted.files else ():
            warn(f"{target}: {text}")
    if plot:
        draw(results, plot)
    if as_json:
        documents = [_document(result, table is not None, files) for result in results]
        emit_json(documents[0] if len(documents) == 1 else documents)
    else:
        emit(results, view_embeddings if table else view, as_json)


def _check_options(by: str | None, table: str | None, cost: bool, details: dict[str, Any]) -> None:
    from llmcli.errors import UsageError

    if table and (by or cost):
        raise UsageError(f"--table {table} is a table of its own", f"Leave out {'--by' if by else '--cost'}.")
    given = [name for name, value in details.items() if value is not None]
    if given and not cost:
        raise UsageError(f"{given[0]} says at what the costs are reckoned, and none are asked for", "Add --cost.")


def _costs(target: str, counted: Counted, dtype: Any, context: int | None, batch: int | None) -> Costs:
    from llmcli.costs import costs
    from llmcli.errors import ConfigError

    if counted.config is None:
        raise ConfigError(f"{target}: costs follow from a config, and there is none to read", "Leave out --cost.")
    return costs(counted.config, dtype=dtype or "bfloat16", context=context, batch=batch or 1)


def _document(result: Result, table: bool, files: bool) -> dict[str, Any]:
    """The count as JSON has it, and under further keys what was asked for besides."""
    from llmcli.params import embedding_share

    document: dict[str, Any] = msgspec.to_builtins(result.counted.count)
    if table:
        document["embeddings"] = embedding_share(result.counted)
    if result.lines is not None:
        document["by"], document["lines"] = result.by, result.lines
    if result.costs:
        document["cost"] = result.costs
    if files:
        document["files"] = result.counted.files
    return document


def view(results: list[Result]) -> RenderableType:
    """One column a target where they fit side by side, else one below the other; layers and tensors always so."""
    from rich.console import Group
    from rich.text import Text

    def below(bars: int) -> RenderableType:
        return Group(*(block for result in results for block in (sheet([result], bars), Text(""))))

    if any(result.by in ("layer", "tensor") for result in results):
        blocks = ((lines_view(result), Text(""), sheet([result]), Text("")) for result in results)
        return Group(*(block for group in blocks for block in group))
    if len(results) == 1:
        return Fitting(lambda: sheet(results, bars=12), lambda: sheet(results))
    return Fitting(lambda: sheet(results, bars=8), lambda: sheet(results), lambda: below(12), lambda: below(0))


def sheet(results: list[Result], bars: int = 0) -> Table:
    """Rows of numbers with a column for each target: its parts, totals, and costs; bars of so many characters."""
    made = table(padding=(0, 1, 0, 0))
    made.add_column("")
    for result in results:
        made.add_column(result.target, justify="right", overflow="fold")
        made.add_column("", justify="right", style="dim")
        if bars:
            made.add_column("", min_width=bars + 1, style="cyan")
    rows = [*total_rows(results), *cost_rows(results)]
    for row in rows if results[0].by in ("layer", "tensor") else [*part_rows(results), *rows]:
        cells = []
        for cell in row.cells:
            cells += [cell.text, "" if cell.share is None else percent(cell.share)]
            cells += [bar(cell.share or 0.0, bars)] if bars else []
        made.add_row(row.label, *cells, style=row.style)
    return made


def part_rows(results: list[Result]) -> Iterator[Row]:
    """The parts with their shares."""
    from llmcli.params import ORDER

    counts = [result.counted.count for result in results]
    for part in ORDER:
        if any(part in count.parts for count in counts):
            numbers = [count.parts.get(part, 0) for count in counts]
            cells = [
                Cell(f"{n:,}", n / (count.total or 1)) if n else Cell("–")
                for n, count in zip(numbers, counts, strict=True)
            ]
            yield Row(part.replace("_", " "), cells)


def total_rows(results: list[Result]) -> Iterator[Row]:
    """The totals, and what a checkpoint's files hold besides."""
    counts = [result.counted.count for result in results]
    yield Row("total", [Cell(f"{count.total:,}") for count in counts], "bold")
    yield Row("", [Cell(quantity(count.total)) for count in counts], "dim")
    yield Row("tied", [Cell(f"{count.total_tied:,}") for count in counts])
    yield Row("untied", [Cell(f"{count.total_untied:,}") for count in counts])
    yield Row("saved by tying", [Cell(f"{count.saved_by_tying:,}") for count in counts])
    if any(count.active != count.total for count in counts):
        shares = [count.active / (count.total or 1) for count in counts]
        cells = [Cell(f"{c.active:,}", share if share < 1 else None) for c, share in zip(counts, shares, strict=True)]
        yield Row("active per token", cells)
    yield Row("counted as", [Cell("tied" if count.tie_word_embeddings else "untied") for count in counts])
    files = [result.counted.files for result in results]
    if any(files):
        yield Row("buffers, apart", [Cell(f"{held.buffers:,}") if held else Cell("–") for held in files])
        yield Row("in files", [Cell(size(held.bytes)) if held else Cell("–") for held in files])
    if any(held and held.padding_rows for held in files):
        yield Row("padding rows", [Cell(f"{held.padding_rows or 0:,}") if held else Cell("–") for held in files])


def cost_rows(results: list[Result]) -> Iterator[Row]:
    """Memory and operations, for the targets that were reckoned."""
    costs = [result.costs for result in results if result.costs]
    if not costs:
        return
    dtype = costs[0].dtype

    def sizes(label: str, values: list[int], style: str = "") -> Row:
        return Row(label, [Cell(size(value)) for value in values], style)

    yield Row("")
    yield Row("context", [Cell(f"{c.context:,}") for c in costs])
    yield Row("batch", [Cell(f"{c.batch:,}") for c in costs])
    yield Row("weights", style="bold")
    for name, label in (("float32", "in float32"), ("bfloat16", "in 16 bits"), ("float8", "in 8 bits")):
        yield sizes(label, [c.weights[name] for c in costs])
    yield Row(f"cache in {dtype}", style="bold")
    yield sizes("a token", [c.kv_cache.bytes_per_token for c in costs])
    yield sizes("all", [c.kv_cache.bytes for c in costs])
    yield Row("training in float32" if dtype == "float32" else f"training ({dtype})", style="bold")
    for name in ("weights", "gradients", "moments", "activations", "logits"):
        yield sizes(name, [getattr(c.training, name) for c in costs])
    yield sizes("together", [c.training.total for c in costs], "bold")
    yield sizes("logits in chunks", [c.training.logits_chunked for c in costs])
    yield sizes("then together", [c.training.total_chunked for c in costs], "bold")
    yield sizes("attention if not fused", [c.training.attention_matrices for c in costs])
    yield Row("operations a token", style="bold")
    kinds = {
        "attention_projections": "q, k, v, output",
        "feed_forward": "feed forward",
        "attention": "over the context",
    }
    for name, label in {**kinds, "head": "head"}.items():
        numbers = [(getattr(c.flops, name), c.flops.forward) for c in costs]
        yield Row(label, [Cell(quantity(n), n / forward) for n, forward in numbers])
    yield Row("forward", [Cell(quantity(c.flops.forward)) for c in costs], "bold")
    yield Row("training", [Cell(quantity(c.flops.training)) for c in costs], "bold")


def percent(share: float) -> str:
    """A share without decimals; one that would round to nothing says so."""
    return "<1%" if 0 < share < 0.005 else f"{share:.0%}"


def lines_view(result: Result) -> RenderableType:
    """Layers or tensors, equal ones on one line, with bars where they fit; where nothing fits, a name a line."""
    from rich.text import Text

    lines = merged(result.lines or [])

    def each(line: Line, times: int) -> str:
        one = dimensions(line.shape) if line.shape is not None else ""
        return f"{times} × {one or f'{line.parameters:,}'}" if times > 1 else one

    def full(bars: int) -> Table:
        made = table(padding=(0, 1, 0, 0))
        made.add_column(result.target, overflow="fold")
        made.add_column("", justify="right")
        made.add_column("parameters", justify="right")
        made.add_column("", justify="right", style="dim")
        if bars:
            made.add_column("", min_width=bars + 1, style="cyan")
        for name, line, times in lines:
            share = line.share * times
            cells = [name, each(line, times), f"{times * line.parameters:,}", percent(share)]
            made.add_row(*cells, *([bar(share, bars)] if bars else []))
        return made

    def narrow() -> Text:
        said = [f"{result.target}: parameters"]
        for name, line, times in lines:
            said += [name, f"  {times * line.parameters:,}  {percent(line.share * times)}"]
            said += [f"  {each(line, times)}"] if each(line, times) else []
        return Text("\n".join(said))

    return Fitting(lambda: full(12), lambda: full(0), narrow)


def merged(lines: list[Line]) -> list[tuple[str, Line, int]]:
    """(name, one of them, how many) for lines that differ only in their numbers: `layers 0-11`, `blocks.{0-11}.…`."""
    from llmcli.mapping import ranges

    groups: dict[tuple[str, int, tuple[int, ...] | None], list[Line]] = {}
    for line in lines:
        groups.setdefault((re.sub(r"\d+", "#", line.name), line.parameters, line.shape), []).append(line)
    result = []
    for (pattern, _, _), same in groups.items():
        pieces = pattern.split("#")
        numbers = zip(*(map(int, re.findall(r"\d+", line.name)) for line in same), strict=True)
        name = pieces[0] + "".join(
            ranges(set(column)) + piece for column, piece in zip(numbers, pieces[1:], strict=True)
        )
        result.append((name, same[0], len(same)))
    return result


def view_embeddings(results: list[Result]) -> RenderableType:
    """One line a target: its embedding matrix in the whole; exact where that fits, else rounded, else a block each."""
    from rich.table import Table

    from llmcli.params import embedding_share

    def cells(share: EmbeddingShare, number: Callable[[int], str]) -> list[str]:
        return [
            f"{share.vocab_size:,}",
            f"{share.embed_dim:,}",
            number(share.embedding),
            number(share.total),
            percent(share.share),
            percent(share.share_with_head),
            "tied" if share.tied else "untied",
            number(share.saved_by_tying),
        ]

    shares = [(result.target, embedding_share(result.counted)) for result in results]
    heads = ["V", "d", "V·d", "total", "share", "with head", "output", "saved by tying"]

    def wide(number: Callable[[int], str]) -> Table:
        made = table(padding=(0, 1, 0, 0))
        made.add_column("")
        for head in heads:
            made.add_column(head, justify="right")
        for target, share in shares:
            made.add_row(target, *cells(share, number))
        return made

    def blocks() -> Table:
        table = Table.grid(padding=(0, 1, 0, 0))
        table.add_column()
        table.add_column(justify="right")
        for target, share in shares:
            table.add_row(target, style="bold")
            for head, cell in zip(heads, cells(share, exact), strict=True):
                table.add_row(head, cell)
            table.add_row()
        return table

    def exact(number: int) -> str:
        return f"{number:,}"

    return Fitting(lambda: wide(exact), lambda: wide(quantity), blocks)


def draw(results: list[Result], path: Path) -> None:
    """One target: a bar a part, with its number. Several: each a bar of its whole, cut into parts."""
    from llmcli.params import ORDER
    from llmcli.plot import PALETTE, drawing, readable

    colours = dict(zip(ORDER, (PALETTE[n] for n in (0, 4, 1, 2, 6, 3, 7, 5)), strict=False)) | {"other": "#BBBBBB"}
    counts = {readable(result.target): result.counted.count for result in results}
    ends = {name if len(name) <= 32 else f"…{name[-31:]}": count for name, count in counts.items()}
    counts = ends if len(ends) == len(counts) else counts  # long paths by their ends, where these tell them apart
    parts = {part: colours[part] for part in ORDER if any(count.parts.get(part) for count in counts.values())}
    rows = len(parts) if len(counts) == 1 else len(counts) + 2
    with drawing(path, 7.5, 0.8 + 0.42 * rows) as figure:
        axes = figure.add_subplot()
        axes.invert_yaxis()
        axes.spines["left"].set_visible(False)
        axes.tick_params(left=False)
        if len(counts) == 1:
            _draw_parts(axes, *counts.popitem(), parts)
        else:
            _draw_shares(axes, counts, parts)
            figure.legend(loc="outside lower center", ncols=4, handlelength=1)


def _draw_parts(axes: Axes, target: str, count: ParameterCount, colours: dict[str, str]) -> None:
    sizes = [count.parts[part] for part in colours]
    bars = axes.barh([part.replace("_", " ") for part in colours], sizes, color=list(colours.values()), height=0.72)
    axes.bar_label(bars, [f"{n:,}  ({percent(n / count.total)})" for n in sizes], padding=4)
    axes.set_xlim(0, max(sizes, default=1) * 1.5)  # room for the numbers
    axes.spines["bottom"].set_visible(False)
    axes.set_xticks([])
    axes.set_title(f"{target}: {count.total:,} parameters, {'tied' if count.tie_word_embeddings else 'untied'}")


def _draw_shares(axes: Axes, counts: dict[str, ParameterCount], colours: dict[str, str]) -> None:
    left = [0.0] * len(counts)
    for part, colour in colours.items():
        shares = [count.parts.get(part, 0) / (count.total or 1) for count in counts.values()]
        label = part.replace("_", " ") if max(shares) >= 0.004 else None  # too thin to see
        where = range(len(counts))
        axes.barh(where, shares, left=left, color=colour, height=0.72, edgecolor="white", linewidth=0.8, label=label)
        ink = "white" if part in ("embedding", "norms") else "black"  # on blue and grey white reads better
        for row, share in enumerate(shares):
            if share >= 0.05:  # less is narrower than its number
                axes.text(left[row] + share / 2, row, percent(share), ha="center", va="center", color=ink)
            left[row] += share
    axes.set_yticks(range(len(counts)), [f"{target}  {quantity(count.total)}" for target, count in counts.items()])
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axes.set_title("Where the parameters are")
