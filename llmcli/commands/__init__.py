"""One file, one command: `run` with its options and `view` with its table. Here are the options that several share.

Every option's help is a sentence that says what it does, then "; default: ..." where the value left out is not shown.
A command with many options puts them under headings; what opens a checkpoint and what is written have theirs here.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from llmcli import completion

if TYPE_CHECKING:
    from pathlib import Path

    from llmcli.generate import Sampling
    from llmcli.mapping import Plan
    from llmcli.model import Decoder
    from llmcli.tokenizer import Tokenizer

GROUPS = ("Train", "Checkpoints", "Ask a model", "Look inside")
"""The headings of `llmcli --help`, in order; a command's file says `GROUP = "..."`."""

OPENING = "Opening the checkpoint"
"""The heading of the options that say which checkpoint is meant and how it is opened."""
OUTPUT = "Output"
"""The heading of the options that say what is shown and written."""
SAMPLING = "Choosing tokens"
"""The heading of the options by which the next token is drawn."""

Checkpoint = Annotated[
    str,
    typer.Argument(
        metavar="CHECKPOINT",
        help="A checkpoint: a folder, a file of weights, or org/name on the Hub.",
        autocompletion=completion.checkpoints,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.", rich_help_panel=OUTPUT)]
Tie = Annotated[
    Literal["auto", "tie", "untie"],
    typer.Option(help="Tie the output to the embedding; auto: as file and config say.", rich_help_panel=OPENING),
]
Keep = Annotated[
    Literal["input", "output"] | None,
    typer.Option(help="Keep this one of two different matrices, with --tie tie.", rich_help_panel=OPENING),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        metavar="TYPE",
        help="Hold the weights in float32, bfloat16, float16 or float64; default: the file's type.",
        autocompletion=completion.dtypes,
        rich_help_panel=OPENING,
    ),
]
Device = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="Compute on this device: cpu, cuda, cuda:1 or mps.",
        autocompletion=completion.devices,
        rich_help_panel=OPENING,
    ),
]
Revision = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="Take this branch, tag or commit of a repository on the Hub.", rich_help_panel=OPENING
    ),
]
Offline = Annotated[
    bool,
    typer.Option("--offline", help="Do not touch the network: use what the cache holds.", rich_help_panel=OPENING),
]
Ids = Annotated[str | None, typer.Option(metavar="IDS", help="Give the text as token ids instead: '1,403,407'.")]
ToRead = Annotated[str | None, typer.Argument(metavar="TEXT", help="The text that the model reads.")]
Temperature = Annotated[
    float,
    typer.Option(
        metavar="X",
        min=0,
        max=1_000_000,
        help="Draw more freely (above 1) or less; 0: always the most probable token.",
        rich_help_panel=SAMPLING,
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(metavar="N", help="Draw by this seed: the same gives the same text.", rich_help_panel=SAMPLING),
]
Field = Annotated[str, typer.Option(metavar="NAME", help="Take the text from this key of JSON lines and parquet.")]


def given_ids(text: str) -> list[int]:
    """The numbers of `--ids`. Raises UsageError."""
    from llmcli.errors import UsageError

    try:
        return [int(word) for word in text.replace(",", " ").split()]
    except ValueError:
        raise UsageError(f"--ids {text}: not a list of numbers", "For example: --ids 1,403,407.") from None


def one_text(command: str, text: str | None, ids: str | None) -> None:
    """Raise UsageError unless there is a text or its ids, and not both."""
    from llmcli.errors import UsageError

    if (text is None) == (ids is None):
        raise UsageError(
            "give a text or --ids, one of them", f"For example: llmcli {command} CHECKPOINT 'Once upon a time'"
        )


def choose_sampling(**options: Any) -> Sampling:
    """How tokens are drawn, from the options that say it. Raises UsageError."""
    import msgspec

    from llmcli.errors import UsageError
    from llmcli.generate import Sampling

    try:
        return msgspec.convert(options, Sampling)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$.")
        name = where.rstrip("`")
        for theirs, ours in (("Expected `.*?`", "not a number"), (">=", "from"), (">", "above"), ("<=", "up to")):
            what = re.sub(theirs, ours, what)
        option = "--" + name.replace("_", "-")
        usual = {"temperature": 0.8, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.1}.get(name, 1)
        raise UsageError(
            f"{option} {options[name]:g}: {what.removesuffix('.0')}", f"For example: {option} {usual}."
        ) from None


def open_tokenizer(path: Path) -> Tokenizer:
    """A checkpoint's tokenizer. Raises TokenizerError where there is none that can be read, and CheckpointError where
    there are no weights either: what is no checkpoint is said to be none."""
    from llmcli import tensors, tokenizer, weight_files
    from llmcli.errors import TokenizerError

    try:
        return tokenizer.load(path)
    except TokenizerError:
        for file in weight_files.find_files(path).paths:
            if file.suffix not in weight_files.PICKLES:
                tensors.read_header(file)
        raise


def tokenizer_if_any(path: Path) -> Tokenizer | None:
    """A checkpoint's tokenizer; None, with a note, where there is none that can be read."""
    from llmcli import tokenizer
    from llmcli.errors import TokenizerError
    from llmcli.output import note

    try:
        return tokenizer.load(path)
    except TokenizerError as error:
        note(f"{error.message}; tokens are shown as ids")
        return None


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


def warn_of_length(model: Decoder, read: int, new: int = 0) -> None:
    """Rotary positions go on past those the model was trained on; the text rarely does."""
    from llmcli.output import warn

    trained = model.config.max_position_embeddings
    if model.position_embeddings is None and read + new > trained:
        what, expected = ("tokens, prompt and new ones,", "the text") if new else ("tokens", "what it predicts")
        warn(
            f"{read + new:,} {what} are more than the {trained:,} the model was trained for: "
            f"expect {expected} to get worse"
        )
