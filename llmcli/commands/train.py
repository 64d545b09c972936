"""llmcli train: a model from text."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmcli import output
from llmcli.commands import AsJson

if TYPE_CHECKING:
    from llmcli.config import Layered
    from llmcli.train import Event

Recipe = Annotated[
    str | None, typer.Argument(metavar="[RECIPE]", help="A preset or a recipe file; GlassLM if none is given.")
]
DataPath = Annotated[
    list[str] | None,
    typer.Option("--data", metavar="PATH", help="Text to train on: a file, a folder or a pattern; may be repeated."),
]
Out = Annotated[Path | None, typer.Option("--out", help="The run's folder; runs/<recipe> if none is given.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change one value of the recipe; may be repeated."),
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from the run's last checkpoint.")]


def run(
    recipe: Recipe = None,
    data: DataPath = None,
    out: Out = None,
    settings: Settings = None,
    resume: Resume = False,
    as_json: AsJson = False,
) -> int:
    """Train a model, with checkpoints that transformers opens as they are.

    Example: llmcli train glasslm --data book.txt --out runs/book --set train.max_steps=2000
    """
    folder = out or Path("runs") / Path(recipe or "glasslm").stem
    given = put_together(recipe, folder, data, settings or [], resume)

    from llmcli.train import train

    with interruptible() as interrupted:
        show = Lines(as_json)
        for event in train(given.recipe, folder, resume=resume, stop=interrupted):
            show(event)
    return {"SIGINT": 130, "SIGTERM": 143}.get(interrupted() or "", 0)


def put_together(
    recipe: str | None, folder: Path, data: list[str] | None, settings: list[str], resume: bool
) -> Layered:
    """The recipe of a run from all that says something about it, later over earlier."""
    from llmcli import config

    base = config.find_recipe(recipe or "glasslm")
    if resume and recipe is None:
        base = stored_recipe(folder) or base
    options: dict[str, Any] = {}
    if data:
        options["path"] = data[0] if len(data) == 1 else tuple(data)
    return config.layered(
        base,
        ("--data", {"data": options} if options else {}),
        ("--set", config.with_settings({}, settings)),
    )


def stored_recipe(folder: Path) -> tuple[str, dict[str, Any]] | None:
    """The recipe of the run in a folder, None where there is no run to go on with."""
    import msgspec

    from llmcli.train import last_good, read_state

    last = last_good(folder, [])
    return (str(last), msgspec.to_builtins(read_state(last).recipe)) if last else None


@contextmanager
def interruptible() -> Iterator[Any]:
    """While the block runs, the first SIGINT or SIGTERM only leaves its name for who asks; a second one ends all."""
    names: list[str] = []

    def note(number: int, frame: FrameType | None) -> None:
        if names:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        names.append(signal.Signals(number).name)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: names[0] if names else None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Lines:
    """One plain line an event, or with `as_json` one JSON object."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json

    def __call__(self, event: Event) -> None:
        """Show one event."""
        if self.as_json:
            if type(event).__name__ != "Progress":
                output.emit_json(event, indent=False)
            return
        if line := text_of(event):
            output.write(line + "\n")


def text_of(event: Event) -> str:
    """An event as one line; empty for what a pipe need not see."""
    from llmcli import train
    from llmcli.output import quantity, size

    match event:
        case train.Start():
            lines = [f"note: {note}" for note in event.notes]
            lines.append(
                f"{quantity(event.parameters)} parameters, {'tied' if event.tie_word_embeddings else 'untied'}, "
                f"vocabulary {event.vocab_size:,}; {event.train_tokens:,} tokens to train on, "
                f"{event.validation_tokens:,} held out; {event.step_tokens:,} a step; {event.device}, {event.precision}"
            )
            lines += [
                f"  {group.name}: {group.parameters:,} in {group.tensors} tensors, weight decay {group.weight_decay:g}"
                for group in event.groups
            ]
            return "\n".join(lines)
        case train.Step():
            return (
                f"step {event.step}  loss {event.loss:.4f}  lr {event.lr:.3g}  grad {event.grad_norm:.3g}  "
                f"{quantity(event.tokens_per_second)} tokens/s  mfu {event.mfu:.0%}  {size(event.memory)}"
            )
        case train.Eval():
            return (
                f"step {event.step}  val loss {event.val_loss:.4f}  perplexity {event.perplexity:.4g}  "
                f"{event.bits_per_byte:.4f} bits/byte"
            )
        case train.Saved():
            return f"step {event.step}  saved {event.path}"
        case train.Sample():
            return f"step {event.step}  sample: {event.prompt}{event.text!r}"
        case train.Done():
            best = f", best val loss {event.best_loss:.4f} at step {event.best_step}" if event.best_loss else ""
            return f"{event.reason} at step {event.step} after {event.seconds:.1f} s{best}: {event.out}"
    return ""
