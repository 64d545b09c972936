"""How everything is printed: results to stdout (a table or JSON), all else to stderr. All that prints asks here."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

import msgspec

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.table import Table

    from llmcli.errors import LlmcliError

T = TypeVar("T")


def console(stderr: bool = False) -> Console:
    """A rich console for stdout or stderr; without a terminal it neither colours nor wraps.

    What it is given is shown as it is: a path or a token may hold `[bold]` or `:smile:`.
    """
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    # In a pipe a table must not be folded: whoever reads it wants whole lines. COLUMNS says nothing there: GNU readline
    # sets it, so it comes from any Python that was used by hand or runs pytest.
    width = None if stream.isatty() else 200
    return Console(stderr=stderr, width=width, highlight=False, soft_wrap=False, markup=False, emoji=False)


def emit(result: T, view: Callable[[T], RenderableType], as_json: bool) -> None:
    """Show a command's result: its view on a console, or the result itself as JSON."""
    if as_json:
        emit_json(result)
    else:
        out = console()
        with out.capture() as captured:
            out.print(view(result))
        shown = captured.get()
        write(_harmless_lines(shown) if out.is_terminal else "\n".join(line.rstrip() for line in shown.split("\n")))


def emit_json(result: Any, indent: bool = True) -> None:
    """A result as JSON on stdout; without `indent` one line, flushed, for streams of events."""
    try:
        encoded = msgspec.json.encode(result)
    except UnicodeEncodeError:  # a path's name that is not UTF-8: JSON is, so its bytes are spelled out
        encoded = msgspec.json.encode(_encodable(msgspec.to_builtins(result)))
    write((msgspec.json.format(encoded, indent=2) if indent else encoded).decode() + "\n")


def write(text: str) -> None:
    """Text to stdout as it is, at once. Where nobody reads on (`| head`) the command ends, without a complaint."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        silence()
        raise NobodyReads(0) from None


class NobodyReads(SystemExit):
    """Whoever read stdout has seen enough. For most commands that is the end; a run is saved first."""


def silence(stream: TextIO | None = None) -> None:
    """Let what is still buffered for stdout (or stderr) go nowhere, so that the interpreter does not complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), (stream or sys.stdout).fileno())


def paint(text: str, style: str = "") -> None:
    """Text to stdout at once: on a terminal in a style and harmless, elsewhere as it is, byte for byte."""
    if not sys.stdout.isatty():
        write(text)
        return
    text = harmless(text)
    if not style:
        write(text)
        return
    from rich.text import Text

    console().print(Text(text, style), end="", soft_wrap=True)
    sys.stdout.flush()


def harmless(text: str) -> str:
    """Text whose control characters, by which it could steer a terminal, are spelled out: `\\x1b`."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda found: f"\\x{ord(found[0]):02x}", text)


def _harmless_lines(text: str) -> str:
    """What rich made for a terminal, its colours kept and any other control characters spelled out."""
    parts = re.split(r"(\x1b\[[0-9;]*m)", text)
    return "".join(part if n % 2 else harmless(part) for n, part in enumerate(parts))


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_encodable(key): _encodable(inner) for key, inner in value.items()}
    return [_encodable(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def note(text: str) -> None:
    """Something worth knowing, on stderr."""
    _say("note", "cyan", text)


def warn(text: str) -> None:
    """Something that may be wrong, on stderr."""
    _say("warning", "yellow", text)


def error(refusal: LlmcliError) -> None:
    """A refusal on stderr: what is wrong, then what to do."""
    _say("error", "bold red", refusal.message)
    if refusal.hint:
        _say("  hint", "dim", refusal.hint)


def _say(label: str, style: str, text: str) -> None:
    from rich.text import Text

    console(stderr=True).print(Text.assemble((f"{label}: ", style), harmless(text)), soft_wrap=True)


def table(**options: Any) -> Table:
    """An empty table in the one style of all commands: bold headings, no lines."""
    from rich.table import Table

    return Table(box=None, pad_edge=False, header_style="bold", **options)


def facts() -> Table:
    """An empty table of two columns, a fact a row: its label, then what there is to say."""
    from rich.table import Table

    made = Table.grid(padding=(0, 2))
    made.add_column(style="bold", no_wrap=True)
    made.add_column(overflow="fold")
    return made


def quantity(number: float) -> str:
    """A count with a unit a person reads: 124.4 M, 2.51 B."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:.4g} {unit}"
    return f"{number:g}"


def size(count: float) -> str:
    """A number of bytes with a unit: 1.05 GB (powers of ten)."""
    for factor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(count) >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count:g} B"


def bar(share: float, width: int = 12) -> str:
    """A share from 0 to 1 as a bar of at most `width` characters, to an eighth of one where stdout can show eighths."""
    if not (sys.stdout.encoding or "").lower().startswith("utf"):
        return "#" * round(share * width)
    full, rest = divmod(round(share * width * 8), 8)
    return "█" * full + " ▏▎▍▌▋▊▉"[rest].strip()


def sparkline(values: Sequence[float], width: int) -> str:
    """Values as a line of at most `width` bars from lowest to highest, each the mean of those it stands for."""
    bars = "▁▂▃▄▅▆▇█" if (sys.stdout.encoding or "").lower().startswith("utf") else "_.-~=*#@"
    count = min(width, len(values))
    parts = [values[i * len(values) // count : (i + 1) * len(values) // count] for i in range(count)]
    means = [sum(part) / len(part) for part in parts]
    low, high = min(means, default=0.0), max(means, default=0.0)
    steps = (len(bars) - 1) / (high - low) if high > low else 0.0
    return "".join(bars[round((mean - low) * steps)] for mean in means)


class Fitting:
    """What rich shows of several ways to say the same, widest first: the first that fits the console, else the last."""

    def __init__(self, *ways: Callable[[], RenderableType]) -> None:
        self._ways = ways

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        for way in self._ways:
            shown = way()
            if way is self._ways[-1] or console.measure(shown, options=options.update(max_width=9999)).maximum <= (
                options.max_width
            ):
                yield shown
                return


class Fit:
    """A table where the console is wide enough for it; where it is not, a block of lines for each of its rows.

    Right-justified columns hold numbers, which are never broken; others may wrap unless they are `no_wrap`.
    """

    def __init__(self, table: Table) -> None:
        self._table = table
        for column in table.columns:
            column.no_wrap = column.no_wrap or column.justify == "right"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        # Left to itself rich would cut numbers and drop columns before it breaks a line.
        columns, least, most = self._table.columns, [], []
        for column in columns:
            found = [
                console.measure(part, options=options.update(max_width=9999)) for part in (column.header, *column.cells)
            ]
            most.append(max(part.maximum for part in found))
            words = max(part.minimum for part in found) if column.overflow != "fold" else column.min_width or 8
            least.append(most[-1] if column.no_wrap else min(most[-1], words))
        left = options.max_width - 2 * (len(columns) - 1) - sum(least)
        if left < 0:
            yield self._blocks(options.max_width)
            return
        for column, low, high in zip(columns, least, most, strict=True):
            column.min_width, column.width = None, low + min(left, high - low)
            left -= column.width - low
        yield self._table

    def _blocks(self, width: int) -> Table:
        made = facts()
        made.columns[0].no_wrap, made.columns[0].max_width = False, max(8, 2 * width // 5)
        headings = [column.header for column in self._table.columns]
        rows = list(zip(*(column.cells for column in self._table.columns), strict=True))
        for number, cells in enumerate(rows):
            for heading, cell in zip(headings, cells, strict=True):
                if str(cell):
                    made.add_row(heading, cell)
            if number < len(rows) - 1:
                made.add_row()
        return made


@contextmanager
def progress(what: str, total: float | None = None, unit: str = "") -> Iterator[Callable[[float], None]]:
    """A progress bar on stderr while the block runs; call what it yields with each amount done.

    On a terminal only: in a pipe long work stays quiet.
    """
    if not sys.stderr.isatty():
        yield lambda amount: None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[done]}"), TimeRemainingColumn())
    with Progress(*columns, console=console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total, done="")

        def advance(amount: float) -> None:
            bar.advance(task, amount)
            bar.update(task, done=f"{quantity(bar.tasks[0].completed)} {unit}".rstrip())

        yield advance
