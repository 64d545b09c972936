"""llmcli trace: one forward pass, every stage of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from llmcli.commands import (
    OUTPUT,
    AsJson,
    Checkpoint,
    Device,
    Dtype,
    Ids,
    Keep,
    Offline,
    Revision,
    Seed,
    Temperature,
    Tie,
    ToRead,
    choose_sampling,
    given_ids,
    one_text,
    open_model,
    open_tokenizer,
    tokenizer_if_any,
    warn_of_length,
)
from llmcli.errors import LlmcliError, UsageError, dimensions, unwritable
from llmcli.output import Fit, emit, note, progress, size, table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from llmcli.lab import Lab
    from llmcli.model import Decoder
    from llmcli.trace import Pass, Stage

GROUP = "Look inside"
VALUES = "Values of one stage"

ROWS, COLUMNS = 10, 8
"""How many of a stage's rows and columns a table shows unless told; JSON has them all."""


class TracedPass(msgspec.Struct, frozen=True):
    """A pass in numbers: the new positions `start ...`, their ids and tokens, and every stage in order."""

    kind: str
    start: int
    ids: list[int]
    tokens: list[str]
    stages: list[Stage]


class Traced(msgspec.Struct, frozen=True):
    """The prompt's pass, and a cached pass for each token after it."""

    checkpoint: str
    tied: bool
    passes: list[TracedPass]


class Slice(msgspec.Struct, frozen=True):
    """Some of a stage's values: rows and columns [start, stop), in one head where the stage has heads.

    The labels are the tokens that rows or columns stand for, null where they stand for none.
    """

    number: int = msgspec.field(name="pass")
    stage: Stage
    head: int | None
    rows: tuple[int, int]
    columns: tuple[int, int]
    values: list[list[float]]
    row_labels: list[str] | None
    column_labels: list[str] | None


def run(
    checkpoint: Checkpoint,
    text: ToRead = None,
    ids: Ids = None,
    stage: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Show values of one stage: embed, blocks.0.weights, logits.",
            rich_help_panel=VALUES,
        ),
    ] = None,
    head: Annotated[
        int,
        typer.Option(metavar="N", min=0, help="Show this head, where the stage has several.", rich_help_panel=VALUES),
    ] = 0,
    rows: Annotated[str | None, typer.Option(metavar="A:B", help="Show rows A to B-1.", rich_help_panel=VALUES)] = None,
    columns: Annotated[
        str | None, typer.Option(metavar="A:B", help="Show columns A to B-1.", rich_help_panel=VALUES)
    ] = None,
    new: Annotated[
        int, typer.Option("--generate", "-n", metavar="N", min=0, help="Go on for N tokens, each a cached pass.")
    ] = 0,
    number: Annotated[int, typer.Option("--pass", metavar="N", help="Show this pass: 0 is the prompt's.")] = 0,
    temperature: Temperature = 0.0,
    seed: Seed = None,
    save: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Save every stage's whole tensor to a .safetensors file.", rich_help_panel=OUTPUT
        ),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write the lab's page with these passes to an .html file.", rich_help_panel=OUTPUT
        ),
    ] = None,
    tie: Tie = "auto",
    keep: Keep = None,
    dtype: Dtype = None,
    device: Device = "cpu",
    revision: Revision = None,
    offline: Offline = False,
    as_json: AsJson = False,
) -> None:
    """Record every stage of a forward pass, from ids and embeddings to logits and probabilities.

    Example: llmcli trace runs/glasslm/best "Once upon a time" --stage blocks.0.weights --head 2
    """
    one_text("trace", text, ids)
    from llmcli import trace
    from llmcli.lab import Lab, Limits
    from llmcli.targets import find_checkpoint

    for option, value in (("--head", head), ("--rows", rows), ("--columns", columns)):
        if stage is None and value:
            raise UsageError(f"{option} {value}: of which stage?", "Name it: --stage. Without options all are listed.")
    row_range, column_range = _range("--rows", rows), _range("--columns", columns)
    given = None if ids is None else given_ids(ids)
    for file, suffix in ((save, ".safetensors"), (html, ".html")):
        _check_place(file, suffix)
    sampling = choose_sampling(temperature=temperature, seed=seed)
    path = find_checkpoint(checkpoint, revision=revision, offline=offline)
    tokenizer = open_tokenizer(path) if given is None else tokenizer_if_any(path)
    model, plan = open_model(str(path), tie, keep, dtype, device=device)
    lab = Lab(
        model,
        tokenizer,
        name=path.resolve().name,
        tie=plan.tie.reason,
        path=path,
        limits=Limits(prompt_tokens=1 << 30, prompt_characters=1 << 30, passes=new + 1, values=1 << 60),
    )
    begun = lab.start(text or ids or "", given)
    new = _as_far_as_it_goes(model, len(lab.text(begun.id).ids), new)
    with progress("tracing", new, "passes") as advance:
        for _ in range(new):
            advance(1)
            if (chosen := lab.step(begun.id, sampling).chosen) and chosen.ends:
                break
    recorded = [lab.recorded(begun.id, n) for n in range(len(lab.text(begun.id).passes))]
    place = _index("--pass", number, len(recorded))
    if save is not None:
        trace.save(recorded, save)
        note(f"saved {save}: {sum(len(made.tensors) for made in recorded):,} tensors, {size(save.stat().st_size)}")
    if html is not None:
        _write_page(lab, begun.id, html)
    if stage is None:
        passes = [_in_numbers(lab, made) for made in recorded]
        traced = Traced(checkpoint, model.output_projection is None, passes)
        emit(traced, lambda traced: view(traced, place), as_json)
        return
    if not as_json:
        row_range = row_range or slice(0, ROWS)
        column_range = column_range or slice(0, COLUMNS)
    result = _cut(lab, begun.id, place, stage, head, row_range or slice(None), column_range or slice(None))
    shape = (*result.stage.shape, 1)[-2:] if len(result.stage.shape) == 1 else result.stage.shape[-2:]
    for option, asked, (start, stop), count in zip(
        ("--rows", "--columns"), (rows, columns), (result.rows, result.columns), shape, strict=True
    ):
        if asked is not None and start == stop and count:
            raise _empty(option, asked, count)
    emit(result, view_slice, as_json)


def _as_far_as_it_goes(model: Decoder, read: int, new: int) -> int:
    """How many of `new` passes after `read` tokens there will be: said before the first. Raises UsageError."""
    from llmcli.generate import positions
    from llmcli.lab import Limits, pass_bytes

    if new > positions(model) - read:
        most = int(positions(model))
        note(f"the model's {most:,} learned positions are used up after {most - read:,} new tokens")
        new = most - read
    ends = (pass_bytes(model, 1, read + n) for n in (1, new))  # what a pass takes grows evenly
    wanted, most = pass_bytes(model, read, read) + new * sum(ends) // 2, Limits().memory
    if new and wanted > most:
        raise UsageError(
            f"-n {new}: the recorded values would take {size(wanted)}, the most is {size(most)}", "Ask for fewer."
        )
    warn_of_length(model, read, new)
    return new


def _in_numbers(lab: Lab, made: Pass) -> TracedPass:
    return TracedPass(made.kind, made.start, list(made.ids), [lab.token(id).spelling for id in made.ids], made.stages())


def _cut(lab: Lab, text: str, number: int, name: str, head: int, rows: slice, columns: slice) -> Slice:
    made = lab.recorded(text, number)
    shape = made.tensor(name).shape
    heads = [slice(_index("--head", head, shape[0]), head + 1)] if len(shape) == 3 else []
    at = [*heads, rows, columns] if len(shape) > 1 else [rows]
    found = lab.values(text, number, name, at)
    values = found.values[0] if heads else [[value] for value in found.values] if len(shape) == 1 else found.values
    places = [(start, max(start, stop)) for start, stop, _ in found.at[len(heads) :]]
    return Slice(
        number=number,
        stage=lab.stage(made, name),
        head=head if heads else None,
        rows=places[0],
        columns=places[1] if len(shape) > 1 else (0, 1),
        values=values,
        row_labels=found.labels[len(heads)],
        column_labels=found.labels[-1] if len(shape) > 1 else None,
    )


def _range(option: str, text: str | None) -> slice | None:
    """ "2:5", ":5", "-3:" or "4" as a slice."""
    if text is None:
        return None
    try:
        parts = [int(part) if part.strip() else None for part in text.split(":")]
        if len(parts) == 1 and parts[0] is not None:
            return slice(parts[0], parts[0] + 1 or None)
        start, stop = parts
    except ValueError:
        raise UsageError(f"{option} {text}: not of the form A:B", f"For example: {option} 0:8") from None
    if stop is not None and ((start or 0) < 0) == (stop < 0) and stop <= (start or 0):
        raise _empty(option, text)
    return slice(start, stop)


def _empty(option: str, text: str, count: int | None = None) -> UsageError:
    what = option.strip("-").removesuffix("s") + ("" if count is None else f" of {count:,}")
    return UsageError(f"{option} {text}: no {what} lies there", f"A:B is from A to B-1, for example: {option} 0:8")


def _index(option: str, number: int, count: int) -> int:
    if not -count <= number < count:
        raise UsageError(f"{option} {number}: there is no such one", f"They are numbered 0 to {count - 1}.")
    return number % count


def _check_place(file: Path | None, suffix: str) -> None:
    """Refuse a file that could not be written, before the work."""
    if file is None:
        return
    if file.suffix != suffix:
        raise UsageError(
            f"{file}: its name does not end in {suffix}",
            f"For example: {file.with_suffix(suffix) if file.name else f'trace{suffix}'}",
        )
    if not file.absolute().parent.is_dir():
        raise UsageError(f"{file}: there is no folder {file.absolute().parent}", "Make it first.")
    if file.is_dir():
        raise UsageError(f"{file}: a folder, not a file", "Give the name of a file.")


def _write_page(lab: Lab, text: str, file: Path) -> None:
    from llmcli.page import as_html

    content, rounded = as_html(lab, text)
    try:
        file.write_text(content, "utf-8")
    except OSError as error:
        raise unwritable(file, error, LlmcliError, "Choose another place.") from None
    note(f"wrote {file}, {size(file.stat().st_size)}" + ("; its values are rounded to float16" if rounded else ""))


def view(traced: Traced, number: int) -> RenderableType:
    """One pass stage by stage; then, where there are several, what each pass was."""
    from rich.console import Group
    from rich.text import Text

    made = traced.passes[number]
    rows = table()
    rows.add_column("stage", no_wrap=True)
    for heading in ("shape", "mean", "rms", "min", "max"):
        rows.add_column(heading, justify="right", no_wrap=True)
    rows.add_column("meaning", style="dim")
    for found in made.stages:
        numbers = [f"{value:.4g}" for value in (found.mean, found.rms, found.min, found.max)]
        if found.name == "ids" or found.name.endswith(".experts"):
            numbers[:2] = "", ""  # a mean of numbers that are names
        rows.add_row(found.name, dimensions(found.shape), *numbers, found.meaning)
    if len(traced.passes) == 1:
        return Fit(rows)
    steps = table()
    for heading in ("pass", "positions", "embed", "keys of block 0"):
        steps.add_column(heading, justify="right")
    steps.add_column("tokens", overflow="fold")
    for n, one in enumerate(traced.passes):
        shapes = {stage.name: dimensions(stage.shape) for stage in one.stages}
        last = one.start + len(one.ids) - 1
        positions = f"{one.start}-{last}" if last > one.start else str(last)
        steps.add_row(str(n), positions, shapes["embed"], shapes.get("blocks.0.keys", ""), Text(" ".join(one.tokens)))
    return Group(Text(f"pass {number}", "bold"), Fit(rows), "", Fit(steps))


def view_slice(found: Slice) -> RenderableType:
    """The values as a table, and what was cut off."""
    from rich.console import Group
    from rich.text import Text

    made = table()
    made.add_column("", justify="right", style="dim")
    if found.row_labels is not None:
        made.add_column("", no_wrap=True)
    for n, column in enumerate(range(*found.columns)):
        label = f" {found.column_labels[n]}" if found.column_labels is not None else ""
        made.add_column(Text(f"{column}{label}"), justify="right")
    for n, values in enumerate(found.values):
        spoken = [Text(found.row_labels[n])] if found.row_labels is not None else []
        made.add_row(str(found.rows[0] + n), *spoken, *(_number(value) for value in values))
    head = "" if found.head is None else f"head {found.head} of {found.stage.shape[0]}, "
    last = found.stage.shape[-2:] if len(found.stage.shape) > 1 else (*found.stage.shape, 1)
    rows, columns = (_part(*part) for part in (("row", found.rows, last[0]), ("column", found.columns, last[1])))
    axes = " x ".join(f"{size} ({axis})" for size, axis in zip(found.stage.shape, found.stage.axes, strict=True))
    title = Text(f"{found.stage.name}: {found.stage.meaning}; {axes}")
    return Group(title, Text(f"{head}{rows}, {columns}", "dim"), Fit(made))


def _part(what: str, part: tuple[int, int], size: int) -> str:
    if part == (0, size):
        return f"all {size:,} {what}s" if size != 1 else f"the one {what}"
    if part[1] - part[0] == 0:
        return f"no {what} of {size:,}"
    return f"{what}s {part[0]:,} to {part[1] - 1:,} of {size:,}"


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.4g}"
