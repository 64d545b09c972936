"""Finds the commands, makes the app of them, and turns a refusal into a short message and an exit code."""

from __future__ import annotations

import errno
import importlib
import os
import pkgutil
import re
import signal
import sys
from contextlib import suppress
from typing import Annotated, Any

import typer

from llmcli import __version__, commands, output
from llmcli.errors import LlmcliError, UsageError, misplaced, remedy

INTERRUPTED = 130
_interrupts: list[int] = []
"""The signals that `interrupt` has seen. Typer makes an exit code of the exception, and says nothing."""


def make_app() -> typer.Typer:
    """The Typer app: every file in `commands/` is one command, named after the file."""
    app = typer.Typer(
        name="llmcli",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    files = sorted(module.name for module in pkgutil.iter_modules(commands.__path__))
    modules = {name.replace("_", "-"): importlib.import_module(f"{commands.__name__}.{name}") for name in files}
    for heading in (*commands.GROUPS, None):
        for name, module in modules.items():
            group = getattr(module, "GROUP", None)
            if heading == (group if group in commands.GROUPS else None):
                app.command(name, rich_help_panel=heading)(module.run)
    app.callback()(top)
    return app


def show_version(wanted: bool) -> None:
    """--version: print it and stop."""
    if wanted:
        output.write(f"llmcli {__version__}\n")
        raise typer.Exit


def top(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Train and inspect decoder-only language models."""


def main() -> None:
    """The console script: run the command line and exit with 0, 1 (failure), 2 (usage) or 130 (interrupted)."""
    signal.signal(signal.SIGINT, interrupt)
    if sys.stdout is None or sys.stderr is None:  # the shell has closed one (>&-)
        nowhere = open(os.devnull, "w")  # noqa: SIM115 (it stays open to the end)
        sys.stdout, sys.stderr = sys.stdout or nowhere, sys.stderr or nowhere
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115
    code = run(sys.argv[1:])
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing is left that could answer
    sys.exit(code)


def interrupt(number: int, frame: object) -> None:
    """Ctrl-C as Python knows it; but an exception raised while torch is being imported can be lost on its way."""
    _interrupts.append(number)
    spec = getattr(sys.modules.get("torch"), "__spec__", None)
    if getattr(spec, "_initializing", False):
        with suppress(OSError):
            os.write(2, b"note: interrupted\n")
        os._exit(INTERRUPTED)
    raise KeyboardInterrupt


def complaint(error: Any) -> str:
    """What Typer says of a command line, as every refusal is said: the option, its value, what it is not."""
    said = error.format_message().rstrip(".")
    option: Any = getattr(error, "param", None)
    given = re.match(r"(['\"]?)(.*)\1 is not ", getattr(error, "message", ""), re.DOTALL)
    if option is None or given is None or option.type.name in ("path", "file", "directory"):
        return f"{said[:1].lower()}{said[1:]}"
    if choices := getattr(option.type, "choices", ()):
        wanted = f"one of {', '.join(choices)}"
    else:
        wanted = "a whole number" if option.type.name.startswith("int") else "a number"
        for word, end in (("from", "min"), ("to", "max")):
            if (number := getattr(option.type, end, None)) is not None:
                wanted += f" {word} {int(number):,}"
    return f"{max(option.opts, key=len)} {given[2].removesuffix('.0')}: not {wanted}"


def _where_to_look(error: Any, arguments: list[str]) -> str:
    """The hint of a complaint: which help to see, and of an option without its value how it is written."""
    if context := getattr(error, "ctx", None):
        return f"See {context.command_path} --help."
    app, option = make_app(), getattr(error, "option_name", None)  # an option without its value has no context
    named: dict[str, Any] = vars(typer.main.get_command(app) if isinstance(app, typer.Typer) else app)["commands"]
    command = next((word for word in arguments if word in named), None)
    if command is None:
        return "See llmcli --help."
    known = [parameter.metavar for parameter in named[command].params if option in parameter.opts]
    return f"{f'Write {option} {known[0]}. ' if any(known) else ''}See llmcli {command} --help."


def require_folder() -> None:
    """Raise UsageError where the current folder was removed: libraries fail there in ways of their own."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UsageError("the current folder no longer exists", "Go to another one: cd DIR.") from None


def run(arguments: list[str]) -> int:
    """Run one command line and return its exit code; nothing but a message ever reaches the user."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal that cannot show a character gets its escape, not a crash
            stream.reconfigure(errors="backslashreplace")
    try:
        require_folder()
        code: Any = make_app()(arguments, prog_name="llmcli", standalone_mode=False)
        sys.stdout.flush()
        if code == INTERRUPTED and _interrupts:
            output.note("interrupted")
        return code if isinstance(code, int) else 0
    except LlmcliError as refusal:
        output.error(refusal)
        return refusal.exit_code
    except (KeyboardInterrupt, typer.Abort):
        output.note("interrupted")
        return INTERRUPTED
    except BrokenPipeError:  # the reader has seen enough
        output.silence()
        return 0
    except SystemExit as leaving:
        if not isinstance(leaving.__context__, BrokenPipeError):
            raise
        output.silence()  # rich printed, and leaves so
        return 0
    except OSError as error:
        if error.filename is None:  # a write to stdout: what is still buffered would fail again
            output.silence()
        named = isinstance(error.filename, str | bytes)
        written = not named and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EBADF, errno.EIO)
        where = f"{os.fsdecode(error.filename)}: " if named else "standard output: " if written else ""
        said = error.strerror or str(error)
        kind = UsageError if named and misplaced(error) else LlmcliError
        hint = "Send it elsewhere." if written else remedy(error)
        output.error(kind(where + said, hint))
        return kind.exit_code
    except UnicodeEncodeError as error:  # a name that is not UTF-8, where text is needed
        output.error(UsageError(f"{error.object!r}: not UTF-8 text", "Rename the file, or spell the word in UTF-8."))
        return UsageError.exit_code
    except Exception as error:
        if hasattr(error, "format_message"):  # Typer's own complaint about the command line
            output.error(UsageError(complaint(error), _where_to_look(error, arguments)))
            return UsageError.exit_code
        if os.environ.get("LLMCLI_TRACEBACK"):
            raise
        if os.environ.get("_LLMCLI_COMPLETE"):  # a shell that waits for completions: a message would garble its line
            return 1
        wanted = re.search(r"tried to allocate (\d[\d.]* ?\w+)", str(error), re.IGNORECASE)  # torch's, on any device
        if wanted or isinstance(error, MemoryError):
            said = f"not enough memory{f': {wanted[1]} were wanted at once' if wanted else ''}"
            output.error(LlmcliError(said, "Take a smaller model, batch, context or type of number."))
            return 1
        output.error(
            LlmcliError(
                f"{type(error).__name__}: {error}",
                "This is a fault in llmcli; set LLMCLI_TRACEBACK=1 to see where, and please report it.",
            )
        )
        return 1
