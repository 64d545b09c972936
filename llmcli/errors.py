"""What llmcli refuses, and how it says so: one exception family, each with a hint of what to do.

The one rule of exit codes. 2: the command line cannot be right as it stands: an option, value or name that there is
not, a path where nothing is or something of another kind (a folder for a file, a run for a checkpoint), a place that is
taken. 1: what it names is there, and is damaged, unfit or not what it should be, or cannot be read or written; or
something that it needs is not installed.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Sequence
from pathlib import Path


class LlmcliError(Exception):
    """Something llmcli will not do. `message` says what is wrong and where; `hint` says what to do about it.

    A command turns it into two lines on stderr and `exit_code`; a program catches it.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(f"{message}\n{hint}" if hint else message)
        self.message = message
        self.hint = hint


class UsageError(LlmcliError):
    """The command line asks for something that does not exist, does not fit together or is taken (exit code 2)."""

    exit_code = 2


class ConfigError(LlmcliError):
    """A configuration is unreadable, unknown, impossible, or asks for a computation llmcli does not have."""


class CheckpointError(LlmcliError):
    """A checkpoint's files are damaged, incomplete, or do not hold what their configuration says."""


class TokenizerError(LlmcliError):
    """A tokenizer is missing or unreadable, or cannot express what was asked."""


class DataError(LlmcliError):
    """A text, or a file of tokens or numbers, is missing, unreadable, too short or not what it should hold."""


class TrainingError(LlmcliError):
    """A training run cannot start, go on, or be resumed."""


_NOTHING_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP)


def misplaced(error: OSError) -> bool:
    """Whether the system refuses a path because nothing is there, or something of another kind."""
    return error.errno in (*_NOTHING_THERE, errno.EISDIR, errno.EEXIST)


def remedy(error: OSError, otherwise: str = "") -> str:
    """The hint of what the system refuses, by its reason: permissions, or room; `otherwise` is what helps too."""
    first = {
        errno.EACCES: "Check the permissions",
        errno.EPERM: "Check the permissions",
        errno.EROFS: "It is on a file system that is read-only: choose another place",
        errno.ENOSPC: "Make room on the disk",
        errno.EDQUOT: "Make room: the quota is used up",
    }.get(error.errno or 0)
    if first is None:
        return otherwise or "Check the path."
    return f"{first}, or {otherwise[0].lower()}{otherwise[1:]}" if otherwise else f"{first}."


def unreadable(path: Path, error: OSError, kind: type[LlmcliError], hint: str = "") -> LlmcliError:
    """The refusal of a path that was given to be read: a UsageError where it cannot be meant, else a `kind`."""
    if not misplaced(error):
        return kind(f"{path}: cannot be read ({error.strerror or error})", remedy(error, hint))
    what = "no such file or folder" if error.errno in _NOTHING_THERE else "a folder, not a file"
    return UsageError(f"{path}: {what}", "Check the path, or give another.")


def unwritable(path: Path, error: OSError, kind: type[LlmcliError], hint: str) -> LlmcliError:
    """The refusal of a path that was given to be written: a UsageError where it cannot be meant, else a `kind`.

    `hint` is what helps whatever the reason is ("Choose another folder."); `remedy` puts the reason's own before it.
    """
    folder = path.absolute().parent
    if not misplaced(error) or (error.errno == errno.ENOENT and folder.is_dir()):
        return kind(f"{path}: cannot be written ({error.strerror or error})", remedy(error, hint))
    if error.errno == errno.ENOENT:
        return UsageError(f"{path}: there is no folder {folder}", "Make it first.")
    what = {errno.EISDIR: "a folder, not a file", errno.ENAMETOOLONG: "the name is too long"}
    return UsageError(f"{path}: {what.get(error.errno or 0, 'a file is where a folder belongs')}", hint)


def listing(names: Iterable[str], most: int = 50, between: str = ", ") -> str:
    """Names in a row for a message; of very many the first, and how many more."""
    names = list(names)
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return between.join(clip(name) for name in names[:most]) + more


def clip(text: str, most: int = 200) -> str:
    """Text that a file holds, fit for a message: on one line, and not endless."""
    shown = text if text.isprintable() else ascii(text)[1:-1]
    return shown if len(shown) <= most else f"{shown[:most]}…"


def dimensions(shape: Sequence[int]) -> str:
    """A tensor's shape as it stands everywhere, in messages too: 32000 x 4096."""
    return " x ".join(map(str, shape)) or "scalar"
