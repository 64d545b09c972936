"""What llmcli refuses, and how it says so: one exception family, each with a hint of what to do."""

from __future__ import annotations

from collections.abc import Iterable


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
    """The command line asks for something that does not exist or does not fit together (exit code 2)."""

    exit_code = 2


class ConfigError(LlmcliError):
    """A configuration is unreadable, unknown, impossible, or asks for a computation llmcli does not have."""


class CheckpointError(LlmcliError):
    """A checkpoint's files are damaged, incomplete, or do not hold what their configuration says."""


class TokenizerError(LlmcliError):
    """A tokenizer is missing or unreadable, or cannot express what was asked."""


class DataError(LlmcliError):
    """Training or evaluation text is missing, unreadable or too short."""


class TrainingError(LlmcliError):
    """A training run cannot start, go on, or be resumed."""


def listing(names: Iterable[str], most: int = 50, between: str = ", ") -> str:
    """Names in a row for a message; of very many the first, and how many more."""
    names = list(names)
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return between.join(clip(name) for name in names[:most]) + more


def clip(text: str, most: int = 200) -> str:
    """Text that a file holds, fit for a message: on one line, and not endless."""
    shown = text if text.isprintable() else ascii(text)[1:-1]
    return shown if len(shown) <= most else f"{shown[:most]}…"
