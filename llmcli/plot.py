"""One style for every picture: sizes, colours and saving. matplotlib comes with the extra `plot`, imported when used.

A command that draws calls `check` before its long work and draws inside `drawing`:

    with drawing(path, 8, 5) as figure:
        axes = figure.add_subplot()
        axes.plot(steps, losses, color=PALETTE[0], label=readable(name))
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmcli.errors import LlmcliError, UsageError, unwritable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".svg", ".png", ".pdf")

PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#666666")
"""Eight colours that stay apart for colour-blind readers (Okabe and Ito, "Color Universal Design"; grey for black).

Never by colour alone: a label, a marker or a place says the same thing again.
"""
SEQUENTIAL = "cividis"
"""The colour map of values that run one way (similarities, norms): even in lightness, in print and colour-blind."""

STYLE: Any = {
    "figure.dpi": 150,
    "figure.constrained_layout.use": True,
    "figure.facecolor": "white",
    "font.family": ["DejaVu Sans"],  # comes with matplotlib, so a picture is the same on every machine
    "font.size": 10,
    "text.parse_math": False,  # a token may hold any number of dollar signs
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.axisbelow": True,
    "grid.color": "#DDDDDD",
    "legend.frameon": False,
    "savefig.bbox": "tight",  # nothing cut, however long a label is
    "savefig.pad_inches": 0.15,
    "svg.fonttype": "path",  # letters as shapes: no reader's own font can push them out of their boxes
    "svg.hashsalt": "llmcli",  # the same picture is the same file
}


def check(path: str | Path) -> Path:
    """The path, if a picture can be saved there; for asking before long work.

    Raises UsageError for a suffix that is no picture's or a folder that does not exist, LlmcliError without matplotlib.
    """
    path = Path(path)
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(
            f"{path}: a picture's name ends in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}",
            f"For example: {path.with_suffix('.svg') if path.name else 'picture.svg'}.",
        )
    if not path.parent.is_dir():
        raise UsageError(f"{path}: there is no folder {path.parent}", "Make it first, or choose another place.")
    if path.is_dir():
        raise UsageError(f"{path}: a folder, not a file", "Give the name of a file.")
    if importlib.util.find_spec("matplotlib") is None:
        raise LlmcliError(
            "pictures need matplotlib, which is not installed", 'Install the extra: pip install "llmcli[plot]"'
        )
    return path


@contextmanager
def drawing(path: str | Path, width: float, height: float) -> Iterator[Figure]:
    """An empty figure of so many inches, saved to `path` when the block ends without an exception.

    Drawn without a window system. Raises as `check` does, and LlmcliError when the file cannot be written.
    """
    path = check(path)
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, height))
        yield figure
        _save(figure, path)


def readable(text: str) -> str:
    """Text whose characters the font has; any other, and whatever moves the pen, as its number: U+4E2D."""
    return "".join(c if c.isprintable() and _in_font(c) else f"U+{ord(c):04X}" for c in text)


def _save(figure: Figure, path: Path) -> None:
    """The whole file or none: written beside its place and moved into it."""
    suffix = path.suffix.lower()
    dates = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    try:
        number, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=suffix, dir=path.parent)
        os.close(number)
        aside = Path(name)
        try:
            figure.savefig(aside, metadata=dates.get(suffix))
            aside.chmod(0o666 & ~_umask())
            aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)
    except OSError as error:
        raise unwritable(path, error, LlmcliError, "Choose another place.") from None


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@cache
def _in_font(character: str) -> bool:
    from matplotlib import font_manager

    path = font_manager.findfont(STYLE["font.family"][0])
    return font_manager.get_font(path).get_char_index(ord(character)) != 0
