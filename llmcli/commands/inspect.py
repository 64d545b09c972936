"""llmcli inspect: what is in a checkpoint, or what lies between two, without loading either."""

from __future__ import annotations

import fnmatch
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmcli import completion
from llmcli.commands import AsJson, Checkpoint, Offline, Revision
from llmcli.errors import dimensions
from llmcli.output import Fit, emit, facts, progress, quantity, size, table

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import RenderableType

    from llmcli.checkpoint import Reader
    from llmcli.differences import Differences
    from llmcli.inspection import Inspection, MatrixHealth, TensorEntry, TieStatus
    from llmcli.tensors import TensorInfo

GROUP = "Checkpoints"

Other = Annotated[
    str | None,
    typer.Argument(
        metavar="OTHER", help="A second one, to compare the first with.", autocompletion=completion.checkpoints
    ),
]
Patterns = Annotated[
    list[str] | None,
    typer.Option("--tensors", metavar="PATTERN", help="List the tensors whose names fit: '*.mlp.*'. May be repeated."),
]
Full = Annotated[bool, typer.Option("--full", help="Read every value instead of a sample of the embedding's rows.")]

MOST = 20
"""How many of the largest differences a table shows; JSON holds them all."""


def run(
    target: Checkpoint,
    other: Other = None,
    patterns: Patterns = None,
    full: Full = False,
    revision: Revision = None,
    offline: Offline = False,
    as_json: AsJson = False,
) -> int:
    """Show what is in a checkpoint, fitting or not, without loading it; of two, what lies between them.

    Of a repository on the Hub only headers are fetched. Exits with 1 where there are problems.

    Example: llmcli inspect runs/glasslm/best --tensors '*.ln_*'
    """
    from llmcli import inspection, targets

    if other is not None:
        paths = [
            targets.find_checkpoint(target, revision=revision, offline=offline),
            targets.find_checkpoint(other, offline=offline),
        ]
        differences = _compare((target, other), paths, patterns)
        emit(differences, view_differences, as_json)
        return int(any(differences.problems))
    remote = None
    if targets.repo_id(target, revision) and not full:
        headers = targets.read_headers(target, revision=revision, offline=offline)
        path, remote = headers.path, None if headers.here else headers.checkpoint
    else:
        path = targets.find_checkpoint(target, revision=revision, offline=offline)
    files = _Files()
    with progress("reading", unit="B") if full else nullcontext(lambda amount: None) as advance:
        found = inspection.inspect(
            path,
            target,
            remote=remote,
            full=full,
            read_file=files.read_file,
            read=files.read_rows,
            progress=advance,
        )
    if patterns:
        found = inspection.select(found, patterns)
    emit(found, lambda found: view(found, one_by_one=bool(patterns)), as_json)
    return int(bool(found.problems))


class _Files:
    """Reads weights of either kind: safetensors as they are, PyTorch's pickles through torch, imported only then."""

    def __init__(self) -> None:
        self._reader: Reader | None = None

    def read_file(self, path: Path) -> dict[str, TensorInfo]:
        from llmcli import tensors, weight_files

        if path.suffix not in weight_files.PICKLES:
            return tensors.read_header(path)
        from llmcli.checkpoint import Reader

        self._reader = self._reader or Reader()
        return self._reader.headers(path)

    def read_rows(self, info: TensorInfo, start: int, stop: int) -> bytes:
        from llmcli import tensors

        return (self._reader.rows if self._reader else tensors.read_rows)(info, start, stop)


def _compare(targets: tuple[str, str], paths: list[Path], patterns: list[str] | None) -> Differences:
    from llmcli import differences, inspection
    from llmcli.mapping import canonical

    files = _Files()
    a, b = (inspection.open_files(path, files.read_file)[0] for path in paths)
    cut = {canonical(name) for name in a.cut | b.cut}
    wanted = [name for name in (*a.infos, *b.infos) if canonical(name) not in cut]
    if patterns:
        wanted = [name for name in wanted if any(fnmatch.fnmatchcase(name, p) for p in patterns)]
    pairs = differences.pair(a, b, set(wanted).__contains__)
    found = []
    total = sum(info.end - info.start for both in pairs.both.values() for info in both)
    with progress("comparing", total, "B") as advance:
        for difference, amount in differences.compare(pairs, files.read_rows):
            found.append(difference)
            advance(amount)
    first, second = (
        inspection.inspect(path, target, read_file=files.read_file, read=files.read_rows)
        for path, target in zip(paths, targets, strict=True)
    )
    apart = differences.of_tokenizers(*paths)
    return differences.summary(*targets, pairs, found, (first, second), apart)


def view(found: Inspection, one_by_one: bool = False) -> RenderableType:
    """What it is, then what is wrong with it, then its tensors: those of all layers in one line, or `one_by_one`."""
    from rich.console import Group
    from rich.text import Text  # what a file says is shown as it is, not read as markup

    rows = facts()
    rows.add_row("family", _family(found))
    rows.add_row("files", Text(_files(found)))
    dtypes = ", ".join(
        dtype if len(found.dtypes) == 1 else f"{dtype} {amount.values / max(1, found.total.values):.1%}"
        for dtype, amount in found.dtypes.items()
    )
    rows.add_row(
        "tensors", f"{found.total.tensors:,} with {found.total.values:,} values, {size(found.total.bytes)} of {dtypes}"
    )
    beside = found.total.values - found.parameters
    rows.add_row(
        "parameters",
        f"{found.parameters:,} ({quantity(found.parameters)})"
        + (f", and {beside:,} values that are not counted" if beside else ""),
    )
    if found.tie:
        rows.add_row("output", "not decided: see the problems" if found.tie.refused else Text(tie_line(found.tie)))
    for health in found.matrices:
        rows.add_row("embedding" if health.side == "input" else "head", _health(health))
    for note in found.notes:
        rows.add_row(Text("note", "cyan"), Text(note))
    for problem in found.problems:
        rows.add_row(Text("problem", "red"), Text(problem))
    return Group(rows, "", _tensors(found, one_by_one))


def _family(found: Inspection) -> str:
    config = found.config
    if config is None:
        return "not known"
    heads = f"{config.num_heads} heads"
    if config.num_kv_heads != config.num_heads:
        heads += f" ({config.num_kv_heads} for keys and values)"
    experts = f", {config.num_experts} experts" if config.num_experts else ""
    return (
        f"{config.family}: {config.num_layers} layers, embed_dim {config.embed_dim:,}, {heads}{experts}, "
        f"vocabulary {config.vocab_size:,}"
    )


def _files(found: Inspection) -> str:
    total = sum(file.bytes for file in found.files)
    if len(found.files) == 1:
        return f"{found.files[0].name}, {size(total)}"
    return f"{len(found.files)} shards, {size(total)}: {found.files[0].name} to {found.files[-1].name}"


def tie_line(tie: TieStatus) -> str:
    """Tied or not, why, and how the two matrices compare."""
    text = {"tie": "tied: ", "untie": "untied: ", None: ""}[tie.decision] + tie.reason
    where = f" in the {tie.rows_compared:,} of {tie.rows:,} rows compared" if tie.rows_compared < tie.rows else ""
    if tie.equal is None or (tie.equal and not where):  # the reason says that they are
        return text
    how = "equal" if tie.equal else f"max difference {tie.max_difference:.3g}"
    return f"{text} ({how}{where}{'; --full compares all' if where else ''})"


def _health(health: MatrixHealth) -> str:
    sampled = health.rows_read < health.rows
    rows = dimensions((health.rows, health.width))
    norms = (
        f"norm {health.norm_mean:.4g} ± {health.norm_std:.2g} ({health.norm_min:.3g} to {health.norm_max:.3g})"
        if health.norm_mean is not None
        else "no row with a norm"
    )
    read = f" (of {health.rows_read:,} rows; --full reads all)" if sampled else ""
    return f"{rows}, {norms}, {health.zero_rows:,} zero rows, {health.non_finite_rows:,} not finite{read}"


def _tensors(found: Inspection, one_by_one: bool) -> Fit:
    from rich.text import Text

    from llmcli.inspection import Folded, fold

    groups = [Folded(entry.name, (entry,)) for entry in found.tensors] if one_by_one else fold(found.tensors)
    number = {file.name: n for n, file in enumerate(found.files, 1)}
    with_values = any(entry.values for entry in found.tensors)
    made = table()
    made.add_column("tensor", overflow="fold", min_width=24)
    for title in ("", "type", "shape", "size", *(("mean", "std", "max |x|", "zero") if with_values else ())):
        made.add_column(title, justify="right")
    if len(number) > 1:
        made.add_column("shard", justify="right")
    made.add_column("", style="yellow")
    for group in groups:
        first = group.entries[0]
        cells = [
            f"{len(group.entries)} ×" if len(group.entries) > 1 else "",
            first.dtype,
            dimensions(first.shape),
            size(sum(entry.bytes for entry in group.entries)),
        ]
        if with_values:
            cells += _values(group.entries)
        if len(number) > 1:
            cells.append(_shards(sorted({number[entry.file] for entry in group.entries})))
        signs = ("" if first.role == "model" else first.role, "cut" if first.cut else "")
        made.add_row(Text(group.name), *cells, ", ".join(filter(None, signs)))
    return Fit(made)


def _values(entries: Iterable[TensorEntry]) -> list[str]:
    """Mean, spread, largest size and share of zeros over the tensors of a line."""
    every = [entry.values for entry in entries if entry.values]
    if not every:
        return ["", "", "", ""]
    mean = sum(values.mean for values in every) / len(every)
    top = max(values.max_abs for values in every)
    scale = top or 1.0  # whose square may be more than a number holds
    square = sum((values.std / scale) ** 2 + (values.mean / scale) ** 2 for values in every) / len(every)
    zeros = sum(values.zeros for values in every)
    return [
        f"{mean:.2g}",
        f"{max(0.0, square - (mean / scale) ** 2) ** 0.5 * scale:.3g}",
        f"{top:.3g}",
        f"{zeros:,}" if zeros else "",
    ]


def _shards(numbers: list[int]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"


def view_differences(found: Differences) -> RenderableType:
    """What only one has, how the outputs are tied, and the largest differences."""
    from rich.console import Group
    from rich.text import Text

    from llmcli.mapping import grouped

    rows = facts()
    rows.add_row("a", Text(found.a))
    rows.add_row("b", Text(found.b))
    retyped = f" ({found.retyped:,} of them in another type)" if found.retyped else ""
    compared = found.equal + len(found.different)
    rows.add_row("equal", f"{found.equal:,} of {compared:,} tensors{retyped}")
    for label, names in (("only in a", found.only_a), ("only in b", found.only_b)):
        if names:
            rows.add_row(label, Text(f"{len(names):,}: {', '.join(grouped(names))}"))
    for other in found.misshapen:
        a, b = map(dimensions, other.shapes)
        rows.add_row("shape", Text(f"{other.name}: {a} in a, {b} in b"))
    for label, tie in zip(("output of a", "output of b"), found.ties, strict=True):
        rows.add_row(label, Text(tie_line(tie)) if tie else "not known: no config.json that can be read")
    for change in found.config:
        values = ", ".join(  # as a config file spells them
            str(value).lower() if value is None or isinstance(value, bool) else str(value)
            for value in (change.a, change.b)
        )
        rows.add_row("config differs", Text(f"{change.field} {values}"))
    if found.tokenizer:
        rows.add_row("tokenizer differs", Text(found.tokenizer))
    for label, problems in zip(("problem in a", "problem in b"), found.problems, strict=True):
        for problem in problems:
            rows.add_row(Text(label, "red"), Text(problem))
    if not found.different:
        return rows
    made = table()
    made.add_column("tensor", overflow="fold", min_width=24)
    for title in ("type", "max |a-b|", "|a-b| / |a|"):
        made.add_column(title, justify="right")
    made.add_column("", style="yellow")
    for difference in found.different[:MOST]:
        made.add_row(
            Text(difference.name),
            " / ".join(dict.fromkeys(difference.dtypes)),
            f"{difference.largest:.3g}",
            f"{difference.relative:.3g}",
            "transposed" if difference.transposed else "",
        )
    more = len(found.different) - MOST
    return Group(rows, "", Fit(made), *([f"and {more:,} more; --json lists them all"] if more > 0 else []))
