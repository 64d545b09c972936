"""One voice: what holds of every command, checked by walking the app, so that a new command keeps it too."""

from __future__ import annotations

import ast
import json
import re
import shlex
from pathlib import Path
from typing import Any

import hf
import pytest
import typer.main

from llmcli import cli, commands, errors, output, tokenizer

APP: Any = typer.main.get_command(cli.make_app())
COMMANDS: dict[str, Any] = dict(sorted(APP.commands.items()))
PACKAGE = Path(commands.__file__).parents[1]

OTHERWISE = {
    ("--json", "train"): "events are a stream",
    ("--keep", "train"): "how many older checkpoints",
    ("--head", "trace"): "which head of attention",
    ("--csv", "train"): "kept beside metrics.jsonl",
    ("--context", "count-params"): "what costs are reckoned with",
    ("--dtype", "count-params"): "what costs are reckoned with",
    ("--text", "gradient-report"): "the one text, not one of several",
    ("--matrix", "embedding-report"): "one of the two, never both",
    ("--top-k", "generate"): "what is drawn from, not how many are shown",
}
"""The same name for another thing, where the thing has no better one."""
VARIED = {"--plot", "--out", "-k", "-n"}
"""Options that do the same in every command to what that command has: their help differs, their form does not."""


def options(command: Any) -> list[Any]:
    return [parameter for parameter in command.params if parameter.param_type_name == "option"]


def parameters() -> list[Any]:
    """Every argument and option of every command."""
    return [
        pytest.param(name, parameter, id=f"{name} {parameter.opts[0]}")
        for name, command in COMMANDS.items()
        for parameter in command.params
    ]


def form(option: Any) -> tuple[Any, ...]:
    """What of an option must not differ: how it is written, and what it takes."""
    return option.metavar, tuple(getattr(option.type, "choices", ())), option.type.name, option.is_flag


@pytest.mark.parametrize(("name", "parameter"), parameters())
def test_every_help_is_a_sentence(name: str, parameter: Any) -> None:
    text = parameter.help or ""
    assert re.fullmatch(r"[A-Z].*\.", text), text
    assert not re.search(r"\bdefault (is|:)|\(default", text), "say '; default: ...'"
    assert not text.startswith("With --"), "say what it does; then with what"
    if "extra" in text:
        assert re.search(r" \(extra: [a-z]+\)\.$", text)
    repeatable = parameter.param_type_name == "option" and parameter.multiple
    assert repeatable == text.endswith("May be repeated."), text
    if parameter.param_type_name == "argument":
        assert re.fullmatch(r"[A-Z.]+( [A-Z]+)?", parameter.metavar or ""), parameter.metavar
    elif not parameter.is_flag and not hasattr(parameter.type, "choices"):
        assert re.fullmatch(r"[A-Z]+|A:B|SECTION\.KEY=VALUE", parameter.metavar or ""), parameter.metavar


def test_the_same_option_is_the_same_everywhere() -> None:
    seen: dict[str, tuple[str, Any]] = {}
    for name, command in COMMANDS.items():
        for option in options(command):
            for spelling in option.opts:
                if (spelling, name) in OTHERWISE:
                    continue
                first, same = seen.setdefault(spelling, (name, option))
                where = f"{spelling} of {first} and of {name}"
                assert form(option) == form(same), where
                assert option.rich_help_panel == same.rich_help_panel or spelling in VARIED, where
                assert spelling in VARIED or option.help == same.help, where


def test_the_exceptions_are_real() -> None:
    for spelling, name in OTHERWISE:
        option = next(option for option in options(COMMANDS[name]) if spelling in option.opts)
        others = [o for other, c in COMMANDS.items() if other != name for o in options(c) if spelling in o.opts]
        assert any((form(other), other.help) != (form(option), option.help) for other in others), spelling


def test_a_picture_is_asked_for_and_named_alike() -> None:
    helps = [option.help for command in COMMANDS.values() for option in options(command) if "--plot" in option.opts]
    assert len(helps) >= 5
    assert all(text.startswith("Draw ") and text.endswith(" to an .svg, .png or .pdf (extra: plot).") for text in helps)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_heading_a_line_and_an_example_that_parses(name: str) -> None:
    command = COMMANDS[name]
    assert command.rich_help_panel in commands.GROUPS
    line, *_ = command.help.split("\n\n")
    assert re.fullmatch(r"[A-Z][^\n]{20,98}\.", line), line
    (example,) = re.findall(r"^Example: (.*)$", command.help, re.MULTILINE)
    program, used, *rest = shlex.split(example)
    assert (program, used) == ("llmcli", name)
    command.make_context(name, rest)  # raises for what is not understood


@pytest.mark.parametrize("name", COMMANDS)
def test_many_options_stand_under_headings(name: str) -> None:
    shown = [option for option in options(COMMANDS[name]) if not option.hidden]
    plain = [option for option in shown if option.rich_help_panel is None]
    assert len(plain) <= 7
    for option in shown:
        if "--json" in option.opts:
            assert option.rich_help_panel == commands.OUTPUT


def test_every_reporting_command_takes_json() -> None:
    without = {name for name, command in COMMANDS.items() if not any("--json" in o.opts for o in options(command))}
    assert without == {"lab"}  # it serves


def test_a_checkpoint_is_opened_with_the_same_options_wherever_one_is_loaded() -> None:
    for name, command in COMMANDS.items():
        names = {spelling for option in options(command) for spelling in option.opts}
        if any(parameter.metavar == "CHECKPOINT" for parameter in command.params[:1]):
            assert {"--revision", "--offline"} <= names, name
        if {"--tie", "--keep"} <= names and name != "load-hf":  # which converts, on the CPU
            assert "--device" in names, name


def test_tables_are_made_in_one_place() -> None:
    """But for a table without headings in two columns, which is not a table of facts."""
    made = {
        path.name: len(re.findall(r"\bTable\(", path.read_text("utf-8")))
        for path in (PACKAGE / "commands").glob("*.py")
    }
    assert not any(made.values()), made


FREE = {"--seed", "--position", "--pass"}
"""Numbers that may be negative: a seed, and places counted from the end."""


def numeric() -> list[Any]:
    """Every option of every command that takes a number."""
    return [
        pytest.param(name, option, id=f"{name} {option.opts[0]}")
        for name, command in COMMANDS.items()
        for option in options(command)
        if option.type.name.split()[0] in ("int", "integer", "float")
    ]


@pytest.mark.parametrize(("name", "option"), numeric())
def test_what_is_no_number_or_too_small_or_too_large_is_refused_in_one_voice(
    name: str, option: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    low, high = (getattr(option.type, end, None) for end in ("min", "max"))
    assert (low is None) == (option.opts[0] in FREE), "a number has a least value, or is named above"
    what = "a whole number" if option.type.name.startswith("int") else "a number"
    ends = ("" if low is None else f" from {int(low):,}") + ("" if high is None else f" to {int(high):,}")
    given = ["abc", *([] if low is None else [str(low - 1)]), *([] if high is None else [str(high + 1)])]
    for spelling in option.opts:
        for value in given:
            assert cli.run([name, spelling, value]) == 2
            said, hint = capsys.readouterr().err.splitlines()
            assert said == f"error: {max(option.opts, key=len)} {value}: not {what}{ends}"
            assert hint == f"  hint: See llmcli {name} --help."


@pytest.mark.parametrize(
    ("line", "said", "hint"),
    [
        ("train --shuffle both", "--shuffle both: not one of windows, random", "See llmcli train --help."),
        ("generate", "missing argument 'CHECKPOINT'", "See llmcli generate --help."),
        ("generate one --zzz", "no such option: --zzz", "See llmcli generate --help."),
        (
            "generate one --seed",
            "option '--seed' requires an argument",
            "Write --seed N. See llmcli generate --help.",
        ),
        (
            "embedding-report one --plot",
            "option '--plot' requires an argument",
            "Write --plot FILE. See llmcli embedding-report --help.",
        ),
        ("generate one x --min-p nan", "--min-p nan: not a number from 0", "For example: --min-p 0.05."),
        ("generate one x --top-p 0", "--top-p 0: not a number above 0", "For example: --top-p 0.9."),
        ("trace one x --temperature nan", "--temperature nan: not a number from 0", "For example: --temperature 0.8."),
        ("generate one x --device foo", "device foo: no such device", "Give cpu, cuda, cuda:1 or mps."),
        ("generate one x --device meta", "device meta: no such device", "Give cpu, cuda, cuda:1 or mps."),
        (
            "evaluate text.txt one",
            "one: a checkpoint, where the text belongs",
            "The text comes last: llmcli evaluate CHECKPOINT... FILE.",
        ),
        ("curves .", ".: a folder of runs, not a run", "Give some of them: run"),
        ("train-tokenizer text.txt --out one", "--out one: a checkpoint, whose tokenizer would be lost", None),
        ("train-tokenizer text.txt --vocab-size 9", "--vocab-size 9: a byte-level BPE has at least 257 tokens", None),
        ("presets gtp2", "gtp2: no preset of that name", None),
    ],
)
def test_a_command_line_is_refused_as_anything_is_with_the_hint_that_fits(
    line: str,
    said: str,
    hint: str | None,
    place: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(place)
    assert cli.run(shlex.split(line)) == 2
    first, second = capfd.readouterr().err.splitlines()
    assert first == f"error: {said}"
    assert hint is None or second == f"  hint: {hint}"


@pytest.mark.parametrize("line", ["evaluate one", "generate one --prompt-file"])
def test_a_binary_file_is_no_text_and_is_told_no_option_that_is_not_there(
    line: str, place: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    binary = tmp_path / "binary"
    binary.write_bytes(bytes(range(256)))
    assert cli.run([*shlex.split(line), str(binary)]) == 1
    said, hint = capfd.readouterr().err.splitlines()
    assert said == f"error: {binary}: not text (it holds zero bytes)"
    assert hint.startswith("  hint: Give a file of text. ") and "iconv" in hint and "encoding" not in hint


KINDS = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Exception)}


def spelled(node: ast.expr) -> str:
    """A message as it stands in the source, what is put into it as {}."""
    match node:
        case ast.Constant():
            return str(node.value)
        case ast.JoinedStr():
            return "".join(spelled(part) if isinstance(part, ast.Constant) else "{}" for part in node.values)
        case ast.BinOp():
            return spelled(node.left) + spelled(node.right)
        case ast.IfExp():
            return spelled(node.body)
    return "{}"


def messages() -> list[Any]:
    """Every refusal in the package: where it is raised, its message, its hint."""
    return [
        pytest.param(spelled(node.args[0]), spelled(node.args[1]) if len(node.args) > 1 else "", id=f"{path.stem}:{n}")
        for path in sorted(PACKAGE.rglob("*.py"))
        for n, node in enumerate(ast.walk(ast.parse(path.read_text("utf-8"))))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in KINDS and node.args
    ]


@pytest.mark.parametrize(("message", "hint"), messages())
def test_a_refusal_is_what_is_wrong_then_sentences_of_what_to_do(message: str, hint: str) -> None:
    assert not message.endswith("."), "a message has no full stop: a hint follows"
    assert not re.match(r"[A-Z][a-z]", message), "a message begins with the thing, in small letters"
    if hint:
        assert re.match(r"[A-Z`'{]|llmcli ", hint), hint
        assert re.search(r"[.?}]$|\.\)$|: [^.]+$", hint), hint


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint, another, a text and a run."""
    folder = tmp_path_factory.mktemp("voice")
    for name, seed in (("one", 0), ("two", 1)):
        hf.make("gpt2", folder / name, vocab_size=257, seed=seed)
        tokenizer.bytes_tokenizer().save(folder / name)
    (folder / "text.txt").write_text("Once upon a time there was a small model. " * 3)
    events = (
        {"event": "step", "step": n, "tokens": n, "loss": 2.0, "lr": 0.1, "tokens_per_second": 1.0} for n in (1, 2)
    )
    (folder / "run").mkdir()
    (folder / "run" / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return folder


LINES = {
    "count-params": "count-params one gpt2 --by tensor --cost --files",
    "count-params --table": "count-params one gpt2 --table embeddings",
    "curves": "curves run run",
    "embedding-report": "embedding-report one",
    "evaluate": "evaluate one two text.txt --by-token --context-curve",
    "generate": "generate one Once -n 3 --logprobs 2 --num-samples 2 --seed 0",
    "gradient-report": "gradient-report one --text Once",
    "inspect": "inspect one",
    "inspect of two": "inspect one two",
    "load-hf": "load-hf one --out three",
    "logits": "logits one Once --why a",
    "nearest-tokens": "nearest-tokens one a b --baseline",
    "nearest-tokens --matrix": "nearest-tokens one a --matrix both",
    "presets": "presets",
    "trace": "trace one Once -n 2",
    "trace --stage": "trace one Once --stage logits",
    "train": "train glasslm --print-config",
    "train-tokenizer": "train-tokenizer text.txt --kind char --out made",
}


def keys(document: Any, path: str = "") -> list[str]:
    """Every key of a JSON document with the keys above it."""
    if isinstance(document, dict):
        return [found for key, value in document.items() for found in (f"{path}/{key}", *keys(value, f"{path}/{key}"))]
    return [found for value in document for found in keys(value, path)] if isinstance(document, list) else []


@pytest.mark.parametrize("what", LINES)
def test_json_has_keys_in_small_letters_and_nothing_beside_it(
    what: str, place: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    assert cli.run([*shlex.split(LINES[what]), "--json"]) == 0
    out = capfd.readouterr().out
    for key in keys(json.loads(out)):
        last = key.rpartition("/")[2]
        data = re.search(r"/(dtypes|origins|weights)/[^/]+$", key)  # names of types and of a recipe's keys
        assert data or re.fullmatch(r"[a-z][a-z0-9_]*", last), key
        assert last not in ("note", "warning", "problem"), f"{key}: there may be several, or none"
    assert "NaN" not in out and "Infinity" not in out


@pytest.mark.parametrize("what", LINES)
@pytest.mark.parametrize("columns", [40, 80])
def test_nothing_is_lost_in_a_narrow_terminal(
    what: str, columns: int, place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Every word of what a wide one shows is shown; no line is longer than the terminal."""
    monkeypatch.chdir(place)
    if what == "load-hf":
        monkeypatch.setitem(LINES, what, "load-hf one --check")
    shown = {}
    for width in (columns, 400):
        from rich.console import Console

        def sized(stderr: bool = False, width: int = width) -> Console:
            return Console(stderr=stderr, width=width, highlight=False, markup=False, emoji=False)

        monkeypatch.setattr(output, "console", sized)
        assert cli.run(shlex.split(LINES[what])) == 0
        shown[width] = capfd.readouterr().out
    narrow, wide = shown[columns], shown[400]
    if what not in ("generate",):  # which streams text as it is
        assert max(map(len, narrow.splitlines())) <= columns
    assert "…" not in narrow or "…" in wide
    close = re.sub(r"\s", "", narrow)
    for word in set(re.findall(r"\w+", wide)):
        assert word in close or word == "cap", word  # a column that is empty here
