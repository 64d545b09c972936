"""llmcli presets: the models and recipes that have a name."""

from __future__ import annotations

import difflib
from typing import Annotated

import msgspec
import typer

from llmcli import completion
from llmcli.commands import AsJson
from llmcli.output import Fit, emit, quantity, table, write

GROUP = "Checkpoints"


class Preset(msgspec.Struct, frozen=True, kw_only=True):
    """A preset as it is listed; `source` is the first line of its file."""

    name: str
    family: str
    total: int
    active: int
    tie_word_embeddings: bool
    source: str


def run(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="A preset, to print its file.", autocompletion=completion.presets),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the models and recipes that have a name, with family, size and source, or print one.

    Example: llmcli presets gemma-2b
    """
    from llmcli.config import presets, read_table
    from llmcli.errors import UsageError
    from llmcli.params import count
    from llmcli.targets import read_config

    files = presets()
    if name is None:
        counts = {preset: count(read_config(preset)) for preset in files}
        listed = [
            Preset(
                name=preset,
                family=counts[preset].family,
                total=counts[preset].total,
                active=counts[preset].active,
                tie_word_embeddings=counts[preset].tie_word_embeddings,
                source=path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# "),
            )
            for preset, path in files.items()
        ]
        emit(sorted(listed, key=lambda preset: (preset.family, preset.total)), view, as_json)
    elif name not in files:
        near = difflib.get_close_matches(name, files, n=1)
        raise UsageError(
            f"{name}: no preset of that name",
            (f"Did you mean '{near[0]}'? " if near else "") + f"Presets: {', '.join(files)}.",
        )
    elif as_json:
        emit(read_table(files[name]), lambda _: "", as_json)
    else:
        write(files[name].read_text(encoding="utf-8"))


def view(presets: list[Preset]) -> Fit:
    """One row a preset."""
    made = table()
    for column in ("preset", "family"):
        made.add_column(column, no_wrap=True)
    made.add_column("parameters", justify="right", no_wrap=True)
    made.add_column("active", justify="right", no_wrap=True)
    made.add_column("output", no_wrap=True)
    made.add_column("what it is", style="dim")
    for preset in presets:
        active = quantity(preset.active) if preset.active != preset.total else ""
        tied = "tied" if preset.tie_word_embeddings else "untied"
        made.add_row(preset.name, preset.family, quantity(preset.total), active, tied, preset.source)
    return Fit(made)
