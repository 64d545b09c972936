"""What follows a run's events, in its first process: lines, JSON or a live display, and files beside the run."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from llmcli import events, output
from llmcli.errors import LlmcliError
from llmcli.output import quantity, size, sparkline, warn

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType

    from llmcli.events import Event


def leads() -> bool:
    """Whether this is the process that shows things, of several that torchrun started the first."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def shown(as_json: bool) -> Iterator[Callable[[Event], None]]:
    """A function that shows events: as JSON, as plain lines in a pipe, live on a terminal. Only one process shows."""
    if not leads():
        yield lambda event: None
    elif as_json:
        yield as_json_line
    elif not sys.stdout.isatty() or os.environ.get("TERM") in ("dumb", "unknown"):  # where nothing is drawn anew
        yield lambda event: output.write("".join(f"{line}\n" for line in lines_of(event)))
    else:
        from rich.live import Live

        screen = Screen()
        with Live(screen, console=output.console(), refresh_per_second=4, redirect_stderr=False) as live:

            def show(event: Event) -> None:
                screen(event)
                if isinstance(event, events.Start | events.Done):
                    live.console.print("\n".join(lines_of(event)), markup=False)

            yield show


def as_json_line(event: Event) -> None:
    """One event as one line of JSON."""
    if not isinstance(event, events.Progress):
        output.emit_json(event, indent=False)


def lines_of(event: Event) -> list[str]:
    """An event as plain lines; none for what a pipe need not see."""
    match event:
        case events.Start():
            tied = "tied" if event.tie_word_embeddings else "untied"
            how = f"{event.device}, {event.precision}{', compiled' if event.compiled else ''}"
            many = f", {event.processes} processes" if event.processes > 1 else ""
            return [
                *(f"note: {note}" for note in event.notes),
                f"model: {quantity(event.parameters)} parameters, {tied}, vocabulary {event.vocab_size:,}; {how}{many}",
                f"text: {read_from(event.source)}; {event.train_tokens:,} tokens and {event.validation_tokens:,} "
                f"held out; {event.step_tokens:,} a step",
                *(f"  {group.name}: {amount(group)}" for group in event.groups),
            ]
        case events.Step():
            return [
                f"step {event.step}  loss {event.loss:.4f}  lr {event.lr:.3g}  grad {event.grad_norm:.3g}  "
                f"{quantity(round(event.tokens_per_second))} tokens/s  mfu {event.mfu:.0%}  {size(event.memory)}"
            ]
        case events.Eval():
            return [
                f"step {event.step}  val loss {event.val_loss:.4f}  perplexity {event.perplexity:,.2f}  "
                f"{event.bits_per_byte:.4f} bits/byte"
            ]
        case events.Saved():
            return [f"step {event.step}  saved {event.path}"]
        case events.Sample():
            return [f"step {event.step}  sample {event.prompt + event.text!r}"]
        case events.Done():
            best = "" if event.best_loss is None else f", best val loss {event.best_loss:.4f} at step {event.best_step}"
            resumed = event.seconds_in_all - event.seconds > 0.05
            took = f"{event.seconds:.1f} s{f' ({event.seconds_in_all:.1f} s in all)' if resumed else ''}"
            line = f"{event.reason} at step {event.step} after {took}{best}: {event.out}"
            if not (event.reason.startswith("SIG") or event.reason == "time limit"):
                return [line]
            if never_began(event):
                return [line, "nothing was trained, so nothing is saved: begin it again with the same command"]
            return [line, f"to go on: the same command with --resume --out {event.out}"]
    return []


def never_began(done: events.Done) -> bool:
    """Whether a run ended before its first step."""
    return not done.tokens and done.best_step is None


def read_from(source: events.Source) -> str:
    """What text was read: 2 files, 1.1 MB in 3 documents."""
    where = many(source.files, "file") if source.files else "Python's help pages"
    return f"{where}, {size(source.bytes)} in {many(source.documents, 'document')}"


def amount(group: events.Group) -> str:
    """What an optimiser's group holds: 131,072 in 1 tensor, decay 0.1."""
    return f"{group.parameters:,} in {many(group.tensors, 'tensor')}, decay {group.weight_decay:g}"


def many(count: int, what: str) -> str:
    """1 file, 2 files."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


class Screen:
    """The live display: what the last events said, drawn anew four times a second."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.seen: dict[str, Any] = {}
        self.began = self.told = time.monotonic()
        self.first = 0  # the step at `began`, from which the pace is taken

    def __call__(self, event: Event) -> None:
        """Take one event in."""
        kind = type(event).__name__
        self.seen[kind] = event
        if kind == "Start":
            self.first = self.seen[kind].step
        elif kind == "Step":
            self.losses.append(self.seen[kind].loss)
            self.told, step = time.monotonic(), self.seen[kind].step
            if len(self.losses) == 1:  # the first step also sets things up: the pace is that of the others
                self.began, self.first = self.told, step
        elif kind == "Eval":
            best = self.seen.get("Best")
            if best is None or self.seen[kind].val_loss < best.val_loss:
                self.seen["Best"] = event

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        from rich.text import Text

        if "Done" in self.seen:
            return
        start, step = self.seen.get("Start"), self.seen.get("Step")
        if start is None:
            doing = self.seen.get("Progress")
            share = f" {doing.done / doing.total:.0%}" if doing and doing.total else ""
            yield Text(f"{doing.what if doing else 'starting'}{share}", style="dim")
            return
        grid = output.facts()
        at = step.step if step else start.step
        share = at / max(1, start.max_steps)
        left = self.time_left(at, start.max_steps)
        grid.add_row("step", f"{at:,} of {start.max_steps:,}  {output.bar(share, 24):24} {share:.0%}  {left}")
        if step:
            width = max(8, min(48, options.max_width - 24))
            grid.add_row("loss", Text.assemble((f"{step.loss:.4f}", "bold"), f"  {sparkline(self.losses, width)}"))
        if value := self.seen.get("Eval"):
            best = self.seen["Best"]
            grid.add_row(
                "val",
                Text.assemble(
                    (f"{value.val_loss:.4f}", "bold"),
                    f"  perplexity {value.perplexity:,.2f}  {value.bits_per_byte:.4f} bits/byte"
                    f"  best {best.val_loss:.4f} at step {best.step:,}",
                ),
            )
        if step:
            grid.add_row(
                "",
                f"lr {step.lr:.3g}  grad {step.grad_norm:.3g}  {quantity(round(step.tokens_per_second))} tokens/s  "
                f"mfu {step.mfu:.0%}  {size(step.memory)}",
            )
        if sample := self.seen.get("Sample"):
            text = "".join(c if c.isprintable() else "·" for c in " ".join((sample.prompt + sample.text).split()))
            grid.add_row("writes", Text(text[: 2 * options.max_width], style="italic"))
        yield grid

    def time_left(self, step: int, steps: int) -> str:
        """How long the rest will take from now on at the pace so far, evaluations and saves included."""
        if step <= self.first:
            return ""
        pace = (self.told - self.began) / (step - self.first)
        seconds = round(max(0.0, pace * (steps - step) - (time.monotonic() - self.told)))
        hours, rest = divmod(seconds, 3600)
        return f"{hours}:{rest // 60:02}:{rest % 60:02} left" if hours else f"{rest // 60}:{rest % 60:02} left"


def followers_of(folder: Path, plot: Path | None, csv: bool, tensorboard: bool) -> Iterator[Callable[[Event], None]]:
    """What else is written of a run, by the first process. Raises LlmcliError for what is not installed."""
    from llmcli import curves
    from llmcli.plot import check

    if not leads():
        return

    if plot:
        picture = check(plot)

        def draw(event: Event) -> None:
            if isinstance(event, events.Done) and not never_began(event):
                curves.draw([curves.read(folder)], picture)

        yield draw
    if csv:

        def write(event: Event) -> None:
            if isinstance(event, events.Eval) or (isinstance(event, events.Done) and not never_began(event)):
                (folder / "metrics.csv").write_text(curves.as_csv(curves.read(folder)), encoding="utf-8")

        yield write
    if tensorboard:
        yield tensorboard_writer(folder)


def kept_up(follow: Callable[[Event], None], event: Event) -> bool:
    """Tell a follower; whether it can be told more. A run does not end for a file beside it that cannot be written."""
    try:
        follow(event)
    except OSError as error:
        warn(f"{error.filename or 'a file beside the run'}: cannot be written ({error.strerror}); the run goes on")
        return False
    return True


def tensorboard_writer(folder: Path) -> Callable[[Event], None]:
    """A function that tells TensorBoard of steps and evaluations. Raises LlmcliError where it is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise LlmcliError(
            "--tensorboard needs tensorboard, which is not installed",
            'Install the extra: pip install "llmcli[tensorboard]"',
        ) from None
    writers: list[Any] = []

    def write(event: Event) -> None:
        if isinstance(event, events.Start):  # what a killed run wrote after its last checkpoint will come again
            writers.append(SummaryWriter(str(folder / "tensorboard"), purge_step=event.step + 1))
        elif isinstance(event, events.Step | events.Eval):
            part = "training" if isinstance(event, events.Step) else "validation"
            for key, value in msgspec.structs.asdict(event).items():
                if key != "step":
                    writers[0].add_scalar(f"{part}/{key}", value, event.step)
        elif isinstance(event, events.Sample):
            writers[0].add_text("sample", f"{event.prompt}{event.text}", event.step)
        elif isinstance(event, events.Done):
            writers[0].close()

    return write
