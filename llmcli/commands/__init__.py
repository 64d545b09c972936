"""One file, one command: `run` with its options and `view` with its table. Here are the options that several share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from llmcli.mapping import Plan
    from llmcli.model import Decoder

Checkpoint = Annotated[
    str,
    typer.Argument(metavar="CHECKPOINT", help="A checkpoint: a folder with config.json and model.safetensors."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Tie = Annotated[
    Literal["auto", "tie", "untie"],
    typer.Option(help="Tie the output to the embedding: as file and config say, or as told."),
]
Revision = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Of a repository on the Hub: a branch, a tag or a commit."),
]
Offline = Annotated[bool, typer.Option("--offline", help="Do not touch the network: use what the cache holds.")]
Keep = Annotated[
    Literal["input", "output"] | None,
    typer.Option(help="With --tie tie on two different matrices: which one stays."),
]

Dtype = Annotated[
    str | None,
    typer.Option(metavar="TYPE", help="float32, bfloat16, float16 or float64; default: the file's."),
]
Device = Annotated[str, typer.Option(metavar="NAME", help="Where to compute: cpu, cuda, cuda:1, mps.")]


def open_model(
    checkpoint: str,
    tie: Literal["auto", "tie", "untie"] = "auto",
    keep: Literal["input", "output"] | None = None,
    dtype: str | None = None,
    revision: str | None = None,
    offline: bool = False,
    device: str = "cpu",
) -> tuple[Decoder, Plan]:
    """The model of a checkpoint that a command was given, in eval mode, and how it was found; warnings go to stderr.

    Raises a subclass of LlmcliError for every refusal.
    """
    from llmcli import checkpoint as checkpoints
    from llmcli.output import warn
    from llmcli.targets import find_checkpoint

    path = find_checkpoint(checkpoint, revision=revision, offline=offline)
    model, plan = checkpoints.load(path, dtype=dtype, device=device, tie=tie, keep=keep)
    for warning in plan.warnings:
        warn(warning)
    return model, plan
