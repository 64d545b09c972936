"""llmcli train: a model from text."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import typer

from llmcli import completion, output
from llmcli.commands import OUTPUT
from llmcli.config import Recipe as RecipeStruct
from llmcli.errors import ConfigError, UsageError
from llmcli.events import METRICS
from llmcli.followers import followers_of, kept_up, leads, lines_of, shown
from llmcli.output import emit, quantity, size, warn

if TYPE_CHECKING:
    from rich.console import RenderableType

    from llmcli.config import Layered
    from llmcli.events import Event
    from llmcli.mapping import Plan
    from llmcli.train import Estimate

GROUP = "Train"
CHANGES = "Changes to the recipe"

Recipe = Annotated[
    str | None,
    typer.Argument(
        metavar="RECIPE", help="A preset or a recipe file; default: glasslm.", autocompletion=completion.presets
    ),
]
DataPath = Annotated[
    list[str] | None,
    typer.Option("--data", metavar="PATH", help="Train on this text: a file, folder or pattern. May be repeated."),
]
Out = Annotated[Path | None, typer.Option(metavar="DIR", help="Keep the run in this folder; default: runs/<recipe>.")]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="SECTION.KEY=VALUE",
        help="Change one value of the recipe. May be repeated.",
        autocompletion=completion.settings,
        rich_help_panel=CHANGES,
    ),
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from the run's last checkpoint.")]
InitFrom = Annotated[
    str | None,
    typer.Option(
        metavar="CHECKPOINT",
        help="Start from these weights, with their model and tokenizer.",
        autocompletion=completion.checkpoints,
    ),
]
Precision = Annotated[
    Literal["auto", "fp32", "bf16"] | None, typer.Option(help="Set train.precision.", rich_help_panel=CHANGES)
]
Compile = Annotated[
    bool | None, typer.Option("--compile/--no-compile", help="Set train.compile.", rich_help_panel=CHANGES)
]
Shuffle = Annotated[
    Literal["windows", "random"] | None, typer.Option(help="Set data.shuffle.", rich_help_panel=CHANGES)
]
KeepLast = Annotated[
    int | None,
    typer.Option(
        "--keep", metavar="N", min=0, help="Set train.keep: so many older checkpoints.", rich_help_panel=CHANGES
    ),
]
Plot = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Draw the curves at the end to an .svg, .png or .pdf (extra: plot).",
        rich_help_panel=OUTPUT,
    ),
]
Csv = Annotated[bool, typer.Option("--csv", help="Keep metrics.csv beside metrics.jsonl.", rich_help_panel=OUTPUT)]
TensorBoard = Annotated[
    bool,
    typer.Option(
        "--tensorboard",
        help="Write TensorBoard's events into the run's folder (extra: tensorboard).",
        rich_help_panel=OUTPUT,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one event a line, as JSON.", rich_help_panel=OUTPUT)]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Make a few steps, estimate time and memory, write nothing.")]
PrintConfig = Annotated[bool, typer.Option("--print-config", help="Show every value and where it comes from; stop.")]

EXIT_CODES = {"SIGHUP": 129, "SIGINT": 130, "SIGPIPE": 141, "SIGTERM": 143}
ENDING = "the run ends after this step, and is saved"
NOT_GIVEN = "default"


def run(
    recipe: Recipe = None,
    data: DataPath = None,
    out: Out = None,
    settings: Settings = None,
    resume: Resume = False,
    init_from: InitFrom = None,
    precision: Precision = None,
    compiled: Compile = None,
    shuffle: Shuffle = None,
    keep: KeepLast = None,
    plot: Plot = None,
    csv: Csv = False,
    tensorboard: TensorBoard = False,
    dry_run: DryRun = False,
    print_config: PrintConfig = False,
    as_json: AsJson = False,
) -> int:
    """Train a model, with checkpoints that transformers opens as they are.

    Example: llmcli train glasslm --data book.txt --out runs/book --set train.max_steps=2000
    """
    folder = out or Path("runs") / Path(recipe or "glasslm").stem
    options = {
        "--data": ("data", "path", data and (data[0] if len(data) == 1 else tuple(data))),
        "--shuffle": ("data", "shuffle", shuffle),
        "--precision": ("train", "precision", precision),
        "--compile": ("train", "compile", None if compiled is None else "on" if compiled else "off"),
        "--keep": ("train", "keep", keep),
    }
    if resume and init_from:
        raise UsageError("--resume and --init-from together", "Go on with a run, or start a new one from its weights.")
    if resume and not (recipe or data):
        require_run(folder, named=out is not None)
    source = None
    if init_from:
        from llmcli.targets import find_checkpoint

        source = find_checkpoint(init_from)
    made = put_together(recipe, folder, options, settings or [], resume, source)
    if print_config:
        if leads():
            emit(provenance(made), view_config, as_json)
        return 0

    from llmcli import train

    if dry_run:
        estimate = train.dry_run(made.recipe, resume=folder if resume else None, init_from=source)
        if leads():
            emit(estimate, view_estimate, as_json)
        return 0
    followers = list(followers_of(folder, plot, csv, tensorboard))
    with interruptible() as interrupted, shown(as_json) as show:
        audience = Audience(show)

        def stop() -> str | None:
            return interrupted() or audience.left

        for event in train.train(made.recipe, folder, resume=resume, init_from=source, stop=stop):
            audience(event)
            followers = [follow for follow in followers if kept_up(follow, event)]
        if audience.left:  # who does not read how it ended may read here
            for line in lines_of(event):
                say(line)
    return EXIT_CODES.get(stop() or "", 0)


def require_run(folder: Path, named: bool) -> None:
    """Raise UsageError where `--resume` alone would begin a run of its own in place of the one that is meant."""
    if not folder.exists():
        known = [str(path.parent) for path in sorted(folder.parent.glob(f"*/{METRICS}"))]
        raise UsageError(
            f"--resume: there is no run {folder}",
            f"Name it: --out {' or '.join(known[:8])}." if known else "Name the run's folder: --out.",
        )
    if (folder / "config.json").exists():  # a checkpoint, which is refused by its own name
        return
    if named and stored_recipe(folder) is None:
        raise UsageError(
            f"--resume: {folder} holds no checkpoint to go on from",
            f"Begin it again, with its recipe: llmcli train RECIPE --data TEXT --out {folder}.",
        )


class Audience:
    """Shows events for as long as somebody reads them. `left` is why nobody does: a reason to save and end the run."""

    def __init__(self, show: Callable[[Event], None]) -> None:
        self.show = show
        self.left: str | None = None

    def __call__(self, event: Event) -> None:
        """Show one event, unless nobody reads any more (`| head`, a closed terminal)."""
        if self.left:
            return
        try:
            self.show(event)
        except (OSError, output.NobodyReads) as error:
            self.left = "SIGPIPE"
            output.silence()
            why = "nobody reads the output any more"
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                why = f"the output cannot be written ({error.strerror})"
            say(f"{why}: {ENDING}")


def say(text: str) -> None:
    """A note on stderr, if it can be written: the terminal may be gone, or what was interrupted be writing there."""
    try:
        output.note(text)
    except RuntimeError:
        pass
    except (OSError, SystemExit):  # rich ends the program where a pipe is broken
        output.silence(sys.stderr)


def put_together(
    recipe: str | None,
    folder: Path,
    options: dict[str, tuple[str, str, Any]],
    settings: list[str],
    resume: bool = False,
    init_from: Path | None = None,
) -> Layered:
    """The recipe of a run from all that says something about it, later over earlier. Raises ConfigError, UsageError."""
    from llmcli import config

    base = (stored_recipe(folder) if resume and recipe is None else None) or config.find_recipe(recipe or "glasslm")
    layers = [base]
    if init_from:
        given = msgspec.to_builtins(_plan(init_from).config)
        layers.append((f"--init-from {init_from}", {"model": given, "data": {"tokenizer": str(init_from)}}))
    for name, (section, key, value) in options.items():
        if value is not None:
            layers.append((name, {section: {key: value}}))
    made = config.layered(*layers, ("--set", config.with_settings({}, settings)))
    if settings:
        _refuse_changes(layers, made)
    return made


def _refuse_changes(layers: list[tuple[str, dict[str, Any]]], made: Layered) -> None:
    """Raise UsageError where a model is possible without what --set makes of it, and impossible with it."""
    from llmcli import config, families

    try:
        families.complete(made.recipe.model)
    except ConfigError as error:
        with suppress(ConfigError):
            families.complete(config.layered(*layers).recipe.model)
            raise UsageError(f"--set: {error.message}", error.hint) from None
        raise


def _plan(init_from: Path) -> Plan:
    """How a checkpoint's weights are found, its output tied or not as they are and not as its config.json claims."""
    from llmcli import checkpoint
    from llmcli.errors import CheckpointError

    try:
        plan = checkpoint.plan(init_from)
    except CheckpointError as error:
        if "--tie tie" not in error.hint:
            raise
        written = f"(For training, write it so first: llmcli load-hf {init_from} --tie tie --out DIR.)"
        raise CheckpointError(error.message, f"{error.hint} {written}") from None
    if leads():
        for warning in plan.warnings:
            warn(warning)
    return plan


def stored_recipe(folder: Path) -> tuple[str, dict[str, Any]] | None:
    """The recipe of the run in a folder, None where there is no run to go on with."""
    from llmcli.run_folder import last_good, read_state

    last = last_good(folder, [])
    if last is None:
        return None
    table = msgspec.to_builtins(read_state(last).recipe)
    by = table["data"]["tokenizer"]
    if by not in ("bpe", "char", "byte") and not Path(by).exists():  # moved since: the checkpoint has a copy
        table["data"]["tokenizer"] = str(last)
    return str(last), table


@contextmanager
def interruptible() -> Iterator[Callable[[], str | None]]:
    """While the block runs, the first SIGINT, SIGTERM or SIGHUP only leaves its name for who asks; a second ends all.

    Before anybody has asked there is nothing to save: then the first one ends all. A signal that whoever started us
    had ignored (nohup) stays ignored.
    """
    names: list[str] = []
    asked = False

    def note(number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if names:
            say(f"{name} again: left at once; what came after the last save is lost")
            os._exit(EXIT_CODES[name])
        if not asked:
            say(f"{name}: ended before the first step")
            raise SystemExit(EXIT_CODES[name])
        names.append(name)
        say(f"{name}: {ENDING}; a second one leaves at once")

    def name() -> str | None:
        nonlocal asked
        asked = True
        return names[0] if names else None

    before: dict[int, Any] = {}
    with suppress(ValueError):  # outside the main thread there are no signals to catch
        for number in [getattr(signal, name) for name in EXIT_CODES if hasattr(signal, name)]:
            if signal.getsignal(number) != signal.SIG_IGN:
                before[number] = signal.signal(number, note)
    try:
        yield name
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Provenance(msgspec.Struct, frozen=True):
    """A complete recipe, and for each of its values ("train.lr") where it comes from."""

    recipe: RecipeStruct
    origins: dict[str, str]


def provenance(made: Layered) -> Provenance:
    """The recipe as it will be trained, with what the family fills in. Raises ConfigError for an impossible model."""
    from llmcli import families

    recipe = msgspec.structs.replace(made.recipe, model=families.complete(made.recipe.model))
    origins = {}
    for section in ("model", "data", "train"):
        for key, value in msgspec.structs.asdict(getattr(recipe, section)).items():
            filled = value != getattr(getattr(made.recipe, section), key)
            name = f"{section}.{key}"
            origins[name] = f"family {recipe.model.family}" if filled else made.origins.get(name, NOT_GIVEN)
    return Provenance(recipe, origins)


def view_config(shown: Provenance) -> RenderableType:
    """The recipe as TOML that can be trained from, with each value's origin as a comment."""
    from rich.text import Text

    text = Text()
    for section in ("model", "data", "train"):
        text.append(f"[{section}]\n", "bold")
        for key, value in msgspec.to_builtins(getattr(shown.recipe, section)).items():
            origin = shown.origins[f"{section}.{key}"]
            given = f"# {key} is not set" if value is None else f"{key} = {as_toml(value)}"
            text.append(f"{given:40}", "" if origin != NOT_GIVEN else "dim")
            text.append(f"  # {origin}\n" if value is not None else "\n", "dim")
        text.append("\n")
    return text


def as_toml(value: Any) -> str:
    """A value in TOML's spelling; a table inline."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {as_toml(inner)}" for key, inner in value.items() if inner is not None) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(as_toml, value)) + "]"
    return msgspec.json.encode(value).decode()


def view_estimate(estimate: Estimate) -> RenderableType:
    """What would be trained, and the estimate, a line each."""
    from rich.console import Group
    from rich.text import Text

    minutes = estimate.seconds / 60
    rows = output.facts()
    rows.add_row("a step", f"{estimate.seconds_per_step:.3f} s, {quantity(round(estimate.tokens_per_second))} tokens/s")
    step, steps = estimate.start.step, estimate.start.max_steps
    what = f"the {estimate.steps:,} of {steps:,} steps left, and evaluations" if step else "all steps and evaluations"
    rows.add_row(what, f"{minutes:.1f} min" if minutes < 120 else f"{minutes / 60:.1f} h")
    rows.add_row("epochs left" if step else "epochs", f"{estimate.epochs:.2f}")
    rows.add_row("memory, measured", size(estimate.memory))
    rows.add_row("memory, weights to logits", size(estimate.computed_memory))
    rows.add_row("a checkpoint with its state", size(estimate.checkpoint_bytes))
    return Group(*map(Text, lines_of(estimate.start)), rows)
