"""The command line as a shell meets it: exit codes, streams, refusals without tracebacks."""

from __future__ import annotations

import importlib.machinery
import io
import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import hf
import pytest
from safetensors.torch import load_file, save_file
from terminals import on_a_terminal

from llmcli import cli, commands, errors, output


def llmcli(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """One run of the real entry point."""
    return subprocess.run(
        [sys.executable, "-m", "llmcli", *map(str, arguments)],
        capture_output=True,
        encoding="utf-8",
        env={**os.environ, **environment},
        timeout=120,
    )


def test_what_is_not_unicode_is_spelled_out_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    output.emit_json({"a\udcff": ["caf\udce9", {"b": ("\udc80", 1)}, "é"]})
    assert json.loads(capsys.readouterr().out) == {"a\\udcff": ["caf\\udce9", {"b": ["\\udc80", 1]}, "é"]}


def test_where_a_table_does_not_fit_its_rows_are_blocks_with_a_line_between() -> None:
    from rich.console import Console

    def shown(width: int) -> list[str]:
        made = output.table()
        made.add_column("name", no_wrap=True)
        made.add_column("empty")
        made.add_column("number", justify="right")
        for name, number in (("the first of them", "1,000,000"), ("the second", "2")):
            made.add_row(name, "", number)
        console = Console(width=width, record=True, file=io.StringIO())
        console.print(output.Fit(made))
        return [line.rstrip() for line in console.export_text().splitlines()]

    assert [line.split() for line in shown(60)] == [
        ["name", "empty", "number"],
        ["the", "first", "of", "them", "1,000,000"],
        ["the", "second", "2"],
    ]
    assert shown(26) == [
        "name    the first of them",
        "number  1,000,000",
        "",
        "name    the second",
        "number  2",
    ]


def test_help_names_every_file_in_commands() -> None:
    shown = llmcli("--help").stdout
    files = [path.stem for path in Path(commands.__file__).parent.glob("*.py") if path.stem != "__init__"]
    assert len(files) >= 5
    for name in files:
        assert name.replace("_", "-") in shown


def test_every_command_explains_itself_with_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    for path in Path(commands.__file__).parent.glob("*.py"):
        if path.stem != "__init__":
            name = path.stem.replace("_", "-")
            assert cli.run([name, "--help"]) == 0
            assert f"llmcli {name}" in capsys.readouterr().out.split("Usage", 1)[1].split("\n", 1)[1], name


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["count-params", "gpt-two"], 2, "gpt-two: no such file or folder"),
        (["count-params"], 2, "missing argument"),
        (["count-params", "gpt2", "--bogus"], 2, "--bogus"),
        (["cuont-params"], 2, "count-params"),
        (["generate", "/nowhere/at all"], 2, "/nowhere/at all"),
        (["load-hf", "/nowhere"], 2, "/nowhere"),
        (["nearest-tokens", "/nowhere", "x"], 2, "/nowhere"),
    ],
)
def test_a_refusal_is_a_message_and_a_hint_on_stderr(arguments: list[str], code: int, said: str) -> None:
    result = llmcli(*arguments)
    assert result.returncode == code
    assert result.stdout == ""
    assert said in result.stderr
    assert result.stderr.startswith("error: ")
    assert "hint: " in result.stderr
    assert "Traceback" not in result.stderr


def test_failure_and_usage_have_codes_of_their_own(tmp_path: Path) -> None:
    broken = tmp_path / "config.json"
    broken.write_text("{")
    assert llmcli("count-params", broken).returncode == errors.ConfigError.exit_code == 1
    assert errors.UsageError.exit_code == 2


def test_a_fault_of_our_own_is_a_message_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise RuntimeError("the wheels came off, and nobody can allocate others")

    monkeypatch.setattr(cli, "make_app", fail)
    monkeypatch.delenv("LLMCLI_TRACEBACK", raising=False)
    assert cli.run([]) == 1
    said = capsys.readouterr().err
    assert "RuntimeError: the wheels came off, and nobody can allocate others" in said
    assert "report" in said


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError(), "not enough memory"),
        (RuntimeError("you tried to allocate 4000 bytes. Error code 12"), "4000 bytes were wanted at once"),
        (RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB."), "20.00 GiB were wanted at once"),
    ],
)
def test_what_does_not_fit_into_memory_is_no_fault_of_ours(
    error: Exception, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(cli, "make_app", fail)
    assert cli.run([]) == 1
    shown = capsys.readouterr().err
    assert said in shown and "report" not in shown


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, cli.typer.Abort])
def test_an_interrupt_ends_with_130(monkeypatch: pytest.MonkeyPatch, interrupt: type[BaseException]) -> None:
    def fail() -> None:
        raise interrupt

    monkeypatch.setattr(cli, "make_app", fail)
    assert cli.run([]) == 130


def test_json_is_the_only_thing_on_stdout_and_tables_have_no_colour_in_a_pipe() -> None:
    assert json.loads(llmcli("count-params", "glasslm", "--json", FORCE_COLOR="1").stdout)["total"] == 852_608
    table = llmcli("count-params", "glasslm", "gpt2").stdout
    assert "\x1b" not in table
    assert "852,608" in table
    assert "124,439,808" in table


def test_in_a_pipe_a_table_is_whole_whatever_columns_says() -> None:
    """Python that has read a line by hand hands COLUMNS=80 on, and nobody asked for it."""
    wide, narrow = (llmcli("presets", COLUMNS=columns).stdout for columns in ("200", "40"))
    assert wide == narrow and max(map(len, wide.splitlines())) > 100


COLOUR = re.compile(r"\x1b\[(?:[\d;]*;)?(?:3\d|4\d|9\d|10\d)(?:;[\d;]*)?m")


def test_no_color_leaves_colours_out_and_a_dumb_terminal_gets_no_codes(tmp_path: Path) -> None:
    """A table with colours, a refusal, help and a progress bar."""
    hf.make("llama", tmp_path)
    values = load_file(tmp_path / "model.safetensors")
    values["model.norm.weight"][0] = float("nan")
    save_file(values, tmp_path / "model.safetensors")
    for arguments in (["inspect", tmp_path, "--full"], ["inspect", tmp_path / "nowhere"], ["train", "--help"]):
        assert COLOUR.search(on_a_terminal(*arguments)[1]), arguments
        assert COLOUR.search(on_a_terminal(*arguments, NO_COLOR="")[1]), "an empty value asks for nothing"
        plain = on_a_terminal(*arguments, NO_COLOR="1")[1]
        assert "\x1b[" in plain and not COLOUR.search(plain), plain
        assert "\x1b" not in on_a_terminal(*arguments, TERM="dumb")[1]


def test_a_locale_without_utf8_is_no_obstacle() -> None:
    result = llmcli("count-params", "gpt1", "mixtral-8x7b", LC_ALL="C", PYTHONIOENCODING="ascii")
    assert result.returncode == 0
    assert "46,702,792,704" in result.stdout


@pytest.mark.parametrize(
    ("end", "code", "said"), [(">&-", 0, ""), ("2>&-", 0, ""), (">/dev/full", 1, "standard output: No space left")]
)
def test_a_closed_or_full_output_is_no_fault_of_ours(end: str, code: int, said: str) -> None:
    run = f"{sys.executable} -m llmcli count-params gpt2 --json {end}"
    result = subprocess.run(["bash", "-c", run], capture_output=True, text=True, timeout=60)
    assert result.returncode == code
    assert said in result.stderr
    assert "fault in llmcli" not in result.stderr
    assert "Exception ignored" not in result.stderr


@pytest.mark.parametrize("initializing", [True, False])
def test_an_interrupt_while_torch_is_imported_is_not_lost(monkeypatch: pytest.MonkeyPatch, initializing: bool) -> None:
    spec = importlib.machinery.ModuleSpec("torch", None)
    spec._initializing = initializing  # type: ignore[attr-defined]
    module = types.ModuleType("torch")
    module.__spec__ = spec
    monkeypatch.setitem(sys.modules, "torch", module)

    def leave(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", leave)
    with pytest.raises(SystemExit if initializing else KeyboardInterrupt):
        cli.interrupt(2, None)


@pytest.mark.parametrize(
    "arguments", [["count-params", ""], ["load-hf", ""], ["generate", " "], ["train", "--data", ""]]
)
def test_an_empty_name_does_not_mean_the_working_folder(arguments: list[str], tmp_path: Path) -> None:
    result = llmcli(*arguments, *(["--out", tmp_path / "out"] if arguments[0] == "train" else []))
    assert result.returncode in (1, 2)
    assert "name" in result.stderr
    assert "fault in llmcli" not in result.stderr


def test_a_closed_pipe_is_no_error() -> None:
    run = f"{sys.executable} -m llmcli count-params gpt2 --json | head -c 1; exit ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", run], capture_output=True, text=True, timeout=60)
    assert result.returncode in (0, 141)
    assert result.stderr == ""


def test_paths_with_spaces_equals_and_accents_work(tmp_path: Path) -> None:
    path = tmp_path / "a b=c é" / "config.json"
    path.parent.mkdir()
    path.write_text('{"family": "gpt", "vocab_size": 50, "embed_dim": 32, "num_heads": 4, "num_layers": 2}')
    assert json.loads(llmcli("count-params", path, "--json").stdout)["saved_by_tying"] == 50 * 32 + 50


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0"), (999, "999"), (1000, "1 k"), (852_608, "852.6 k"), (2_506_172_416, "2.506 B")]
)
def test_quantities_are_written_with_a_unit(number: int, text: str) -> None:
    assert output.quantity(number) == text
