"""One file, one command: `run` with its options and `view` with its table. Here are the options that several share."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

Checkpoint = Annotated[
    str,
    typer.Argument(metavar="CHECKPOINT", help="A checkpoint: a folder with config.json and model.safetensors."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Tie = Annotated[
    Literal["auto", "tie", "untie"],
    typer.Option(help="Tie the output to the embedding: as file and config say, or as told."),
]
Keep = Annotated[
    Literal["input", "output"] | None,
    typer.Option(help="With --tie tie on two different matrices: which one stays."),
]
