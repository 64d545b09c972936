"""Hostile hands: whatever stands on the command line, a result comes or a message with a hint, never a fault."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import hf
import pytest
import typer.main

from llmcli import cli, tokenizer

APP: Any = typer.main.get_command(cli.make_app())

HUGE = 10**30
WORDS = {
    "whole": ["", " ", "abc", "-1", "0", "1.5", "nan", str(2**63), str(2**70), str(HUGE), str(-HUGE), "1e3"],
    "real": ["", "abc", "-1", "0", "nan", "inf", "-inf", "1e400", "1e-320", str(HUGE)],
    "choice": ["", "bogus", "AUTO"],
    "text": ["", " ", "\x1b[2J", "[bold]", "[/x]", ":smile:", "\udcff", "#-1", "a" * 5000, "0", "-1", "日本"],
}
"""What is tried for each kind of option."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a sound checkpoint `good`, a text, a run, and things that are none of these."""
    folder = tmp_path_factory.mktemp("hostile")
    hf.make("gpt2", folder / "good", vocab_size=256)
    tokenizer.bytes_tokenizer().save(folder / "good")
    (folder / "text.txt").write_text("Once upon a time there was a small model. " * 3)
    run = folder / "run"
    run.mkdir()
    rows: list[dict[str, Any]] = [
        {"event": "step", "step": n, "tokens": n, "loss": 2.0, "lr": 0.1, "tokens_per_second": 1.0} for n in (1, 2)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "empty folder").mkdir()
    (folder / "empty.safetensors").touch()
    (folder / "garbage.bin").write_bytes(bytes(range(256)) * 40)
    (folder / "garbage.json").write_bytes(b"\xff\xfe{" + bytes(100))
    (folder / "number.json").write_text("5")
    (folder / "model.json").write_text('{"model": 5}')
    (folder / "[red] é=b").mkdir()
    os.mkdir(os.fsencode(folder) + b"/\xff\xfe")
    config = folder / "only config"
    config.mkdir()
    (config / "config.json").write_text((folder / "good" / "config.json").read_text())
    return folder


PLACES = [
    "nowhere",
    "nowhere/at/all",
    "empty folder",
    "empty.safetensors",
    "garbage.bin",
    "garbage.json",
    "number.json",
    "model.json",
    "only config",
    "text.txt",
    "good",
    "good/config.json",
    "good/model.safetensors",
    "[red] é=b",
    "\udcff\udcfe",
    "/dev/null",
    "/dev/full",
    "text.txt/under",
    "a" * 300,
    "x" * 5000,
    "",
    " ",
    ".",
    "org/",
    "hf://",
]
"""What is tried wherever a file, a folder or a name belongs."""

SOUND = {
    "count-params": ["good"],
    "curves": ["run"],
    "embedding-report": ["good"],
    "evaluate": ["good", "text.txt"],
    "generate": ["good", "Once", "--max-new-tokens", "3"],
    "gradient-report": ["good", "--text", "Once"],
    "inspect": ["good"],
    "lab": ["good", "--port", "0", "--no-browser"],
    "load-hf": ["good"],
    "logits": ["good", "Once"],
    "nearest-tokens": ["good", "a"],
    "presets": [],
    "trace": ["good", "Once"],
    "train": ["glasslm", "--data", "text.txt", "--print-config"],
    "train-tokenizer": ["text.txt", "--kind", "char", "--out", "made"],
}
"""A command line of each command that works."""


@pytest.fixture
def here(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of that folder as the working folder, without a network, and with a lab that ends at once."""
    server = pytest.importorskip("llmcli.server")
    monkeypatch.setattr(server, "serve", lambda *arguments: None)
    monkeypatch.setattr(cli, "make_app", lambda: APP)  # made once
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("LLMCLI_TRACEBACK", raising=False)
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def check(arguments: list[str], capfd: pytest.CaptureFixture[str]) -> int:
    """Run one command line; a refusal is what, where and a hint, and leaves stdout alone."""
    before = signal.getsignal(signal.SIGINT)
    code = cli.run(arguments)
    signal.signal(signal.SIGINT, before)
    _, err = capfd.readouterr()
    shown = f"{[word[:80] for word in arguments]}: {code}\n{err[-1500:]}"
    assert code in (0, 1, 2), shown
    assert "Traceback" not in err and "fault in llmcli" not in err, shown
    assert "\x1b" not in err, shown
    if code:
        assert "error: " in err, shown
        assert "  hint: " in err, shown
        assert len(err) < 4000 + 2 * max(map(len, arguments)), shown
    return code


def test_every_command_has_a_sound_line(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert sorted(SOUND) == sorted(APP.commands)
    for name, rest in SOUND.items():
        assert check([name, *rest], capfd) == 0, name


@pytest.mark.parametrize("name", sorted(APP.commands))
def test_any_place_as_an_argument_gives_a_result_or_a_refusal(
    name: str, here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for word in PLACES:
        rest = list(SOUND[name])
        if rest:
            rest[0] = word
        else:
            rest = [word]
        check([name, *rest], capfd)


def options() -> list[Any]:
    """Every option of every command that takes a value."""
    return [
        pytest.param(name, option, id=f"{name} {option.opts[0]}")
        for name, command in sorted(APP.commands.items())
        for option in command.params
        if option.param_type_name == "option" and not option.is_flag
    ]


def words(option: Any) -> list[str]:
    """What is tried for an option, by what it takes."""
    kind = option.type.name
    if hasattr(option.type, "choices"):
        return WORDS["choice"]
    if kind.startswith("int"):
        return WORDS["whole"]
    if kind.startswith("float"):
        return WORDS["real"]
    return [*WORDS["text"], *(PLACES if (option.metavar or "") in ("FILE", "DIR", "PATH", "CHECKPOINT") else [])]


@pytest.mark.parametrize(("name", "option"), options())
def test_any_value_of_any_option_gives_a_result_or_a_refusal(
    name: str, option: Any, here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for word in words(option):
        rest = [*SOUND[name]]
        if option.opts[0] in rest:  # a required one, or one that keeps it short: the last said holds
            rest = [*rest, option.opts[-1], word]
        check([name, *rest, option.opts[-1], word], capfd)


@pytest.mark.parametrize("name", sorted(APP.commands))
def test_unknown_options_and_too_many_words_are_usage(name: str, here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert check([name, *SOUND[name], "--no-such-option"], capfd) == 2
    assert check([name, "--jsno", *SOUND[name]], capfd) == 2
    assert check([name, "--", "--json", *["x"] * 9], capfd) in (1, 2)
    required = any(parameter.required for parameter in APP.commands[name].params)
    if required:
        assert check([name], capfd) == 2


@pytest.mark.parametrize("name", sorted(APP.commands))
def test_options_may_stand_before_arguments_and_twice(name: str, here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    flags = [] if name == "lab" else ["--json"]
    assert check([name, *flags, *reversed_order(name), *flags], capfd) == 0


def reversed_order(name: str) -> list[str]:
    """A sound line with its options first."""
    words = SOUND[name]
    first = next((n for n, word in enumerate(words) if word.startswith("-")), len(words))
    return [*words[first:], *words[:first]]


WRITING = {
    "count-params --plot": ["count-params", "good", "--plot", "PLACE.svg"],
    "curves --csv": ["curves", "run", "--csv", "PLACE.csv"],
    "curves --plot": ["curves", "run", "--plot", "PLACE.png"],
    "embedding-report --plot": ["embedding-report", "good", "--plot", "PLACE.pdf"],
    "load-hf --out": ["load-hf", "good", "--out", "PLACE"],
    "nearest-tokens --export": ["nearest-tokens", "good", "a", "--export", "PLACE"],
    "nearest-tokens --plot": ["nearest-tokens", "good", "a", "--plot", "PLACE.svg"],
    "trace --html": ["trace", "good", "Once", "--html", "PLACE.html"],
    "trace --save": ["trace", "good", "Once", "--save", "PLACE.safetensors"],
    "train --out": ["train", "glasslm", "--data", "text.txt", "--out", "PLACE", "--set", "train.context=8"],
    "train-tokenizer --out": ["train-tokenizer", "text.txt", "--kind", "char", "--out", "PLACE"],
}
"""Every option that writes."""


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs a folder that nobody may write to, not even root")
@pytest.mark.parametrize("what", WRITING)
def test_where_nothing_can_be_written_is_said(what: str, here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for place in ("/proc/llmcli-test", "text.txt/under", "nowhere/at/all/deep" if "out" not in what else "/proc/1/x"):
        if what == "nearest-tokens --export" and place.startswith("nowhere"):
            continue  # it makes the folder
        code = check([word.replace("PLACE", place) for word in WRITING[what]], capfd)
        assert code in (1, 2), place


def test_every_option_that_writes_is_tried() -> None:
    writing = {
        f"{name} {option.opts[0]}"
        for name, command in APP.commands.items()
        for option in command.params
        if option.param_type_name == "option"
        and option.metavar in ("FILE", "DIR")
        and (option.rich_help_panel == "Output" or option.opts[0] == "--out")
    }
    assert writing - {"train --plot"} == set(WRITING)  # which writes at the end of a run


READING = {
    "count-params targets": "count-params PLACE",
    "curves runs": "curves PLACE",
    "embedding-report checkpoint": "embedding-report PLACE",
    "evaluate targets": "evaluate PLACE text.txt",
    "evaluate targets, the text": "evaluate good PLACE",
    "generate checkpoint": "generate PLACE Once -n 1",
    "generate --prompt-file": "generate good -n 1 --prompt-file PLACE",
    "gradient-report checkpoint": "gradient-report PLACE --text Once",
    "inspect target": "inspect PLACE",
    "inspect other": "inspect good PLACE",
    "lab checkpoint": "lab PLACE --port 0 --no-browser",
    "load-hf source": "load-hf PLACE",
    "logits checkpoint": "logits PLACE Once",
    "nearest-tokens checkpoint": "nearest-tokens PLACE a",
    "nearest-tokens --among": "nearest-tokens good a --among PLACE",
    "nearest-tokens --analogies": "nearest-tokens good --analogies PLACE",
    "nearest-tokens --vector": "nearest-tokens good --vector PLACE",
    "trace checkpoint": "trace PLACE Once",
    "train recipe": "train PLACE --data text.txt --out made",
    "train --data": "train glasslm --data PLACE --out made",
    "train --init-from": "train --init-from PLACE --data text.txt --out made",
    "train-tokenizer files": "train-tokenizer PLACE --kind char --out made",
}
"""Every argument and option that names what is read."""

FILES_ONLY = {
    "generate --prompt-file",
    "train recipe",
    *(f"nearest-tokens --{n}" for n in ("among", "analogies", "vector")),
}


@pytest.mark.parametrize("what", READING)
def test_what_cannot_be_meant_is_usage_and_what_cannot_be_read_is_failure(
    what: str, here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The one rule of exit codes, for whatever is read: nothing there, another kind, nothing in it, no reading it."""
    tried = {"nowhere": 2, "text.txt/under": 2, "a" * 300: 2, "empty folder": 2 if what in FILES_ONLY else 1}
    if Path("/proc/self/mem").exists() and what not in ("train recipe", "count-params targets"):  # a size of 0
        tried["/proc/self/mem"] = 1  # which is a file, and gives an input/output error
    for place, code in tried.items():
        words = [place if word == "PLACE" else word for word in READING[what].split()]
        assert check(words, capfd) == code, place


@pytest.mark.parametrize("what", WRITING)
def test_where_nothing_can_be_written_is_usage_or_failure(
    what: str, here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The same rule for whatever is written."""
    (word,) = (word for word in WRITING[what] if word.startswith("PLACE"))
    suffix = word.removeprefix("PLACE")
    (here / f"taken{suffix}").mkdir()
    (here / f"taken{suffix}" / "a file").touch()
    tried = {"text.txt/under": 2} | ({"nowhere/x": 2, "taken": 2} if suffix else {})
    if not suffix:
        (here / "file").touch()
        tried["file"] = 2
    if (
        Path("/proc/self").is_dir() and what != "nearest-tokens --export"
    ):  # a folder in which nobody may make anything, not even root
        tried["/proc/llmcli-test"] = 1
    for place, code in tried.items():
        assert check([word.replace("PLACE", place) for word in WRITING[what]], capfd) == code, place


def test_every_path_is_tried() -> None:
    named = {
        f"{name} {parameter.opts[0]}"
        for name, command in APP.commands.items()
        for parameter in command.params
        if parameter.type.name == "path"
        or parameter.metavar in ("PATH", "CHECKPOINT", "TARGET...", "CHECKPOINT... FILE", "OTHER", "RECIPE", "FILE...")
    }
    assert named - {"train --plot"} == {what for what in (*READING, *WRITING) if "," not in what}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_said(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (here / "full.csv").symlink_to("/dev/full")
    assert check(["curves", "run", "--csv", "full.csv"], capfd) == 1
    (here / "full.html").symlink_to("/dev/full")
    assert check(["trace", "good", "Once", "--html", "full.html"], capfd) in (1, 2)


def shell(line: str, here: Path, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """One line of bash in which `llmcli` is the program."""
    program = f'llmcli() {{ "{sys.executable}" -m llmcli "$@"; }}; set -o pipefail; '
    return subprocess.run(
        ["bash", "-c", program + line],
        cwd=here,
        capture_output=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )


@pytest.mark.parametrize(
    ("line", "codes"),
    [
        ("llmcli --help | head -1", (0,)),
        ("llmcli train --help | head -1", (0,)),
        ("llmcli presets | head -1", (0, 141)),
        ("llmcli count-params good --by tensor --json | head -c 1", (0, 141)),
        ("llmcli generate good Once -n 40 | head -c 1", (0, 141)),
        ("llmcli nearest-tokens good --stdin <&-", (0, 1, 2)),
        ("llmcli generate good <&-", (0, 1, 2)),
        ("llmcli generate good - < garbage.bin", (1,)),
        ("llmcli nearest-tokens good --stdin < garbage.bin", (1,)),
        ("llmcli inspect good > /dev/full", (1,)),
        ("llmcli generate good Once -n 3 > /dev/full", (1,)),
        ("llmcli inspect good >&- 2>&-", (0,)),
        ("llmcli inspect nowhere 2> /dev/full", (1, 2)),
    ],
)
def test_streams_may_be_closed_full_or_garbage(line: str, codes: tuple[int, ...], here: Path) -> None:
    done = shell(line, here)
    assert done.returncode in codes, done.stderr[-800:]
    for word in (b"Traceback", b"fault in llmcli", b"Exception ignored"):
        assert word not in done.stderr, done.stderr[-800:]


@pytest.mark.skipif(sys.platform == "win32", reason="a folder in use cannot be removed there")
@pytest.mark.parametrize("line", ["presets", "generate {here}/good Once", "train --out run"])
def test_a_current_folder_that_was_removed_is_said_to_be(line: str, here: Path) -> None:
    done = shell(f"mkdir gone && cd gone && rmdir ../gone && llmcli {line.format(here=here)}", here)
    assert done.returncode == 2
    assert done.stderr.decode().splitlines()[0] == "error: the current folder no longer exists"


@pytest.mark.parametrize("line", ["nearest-tokens good '#200' -k 3", "logits good Éa -k 3", "inspect good"])
def test_a_locale_of_ascii_is_no_obstacle(line: str, here: Path) -> None:
    plain = shell(f"llmcli {line}", here, LC_ALL="C", PYTHONIOENCODING="ascii")
    assert plain.returncode == 0, plain.stderr
    plain.stdout.decode("ascii")


# The program, which says when its first act is done: to leave an interrupt to the system. Before that, Python answers
# one, and how long it takes to start depends on the machine.
BEGUN = """
import runpy, signal

def first(number, handler, real=signal.signal):
    real(number, handler)
    signal.signal = real
    print(handler == signal.SIG_DFL, flush=True)

signal.signal = first
runpy.run_module("llmcli", run_name="__main__")
"""


@pytest.mark.parametrize(
    ("arguments", "delays"),
    [
        (["count-params", "good"], (0, 0.04)),
        (["generate", "good", "--ids", "1", "-n", "60", "--temperature", "9"], (0, 0.2, 0.6, 1.2)),
        (["train", "glasslm", "--data", "text.txt", "--out", "stopped", "--set", "train.context=8"], (0, 0.5, 1.5)),
    ],
)
def test_an_interrupt_at_any_moment_ends_with_130_and_a_line(
    arguments: list[str], delays: tuple[float, ...], here: Path
) -> None:
    for delay in delays:
        run = subprocess.Popen(
            [sys.executable, "-c", BEGUN, *arguments],
            cwd=here,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert run.stdout and run.stdout.readline() == "True\n"
        time.sleep(delay)
        run.send_signal(signal.SIGINT)
        said = run.communicate(timeout=60)[1]
        assert run.returncode in (0, 130, -signal.SIGINT), said  # done already; answered; before there was an answer
        assert "Traceback" not in said
        assert len(said.splitlines()) <= 3, said
        if run.returncode == 130:
            assert said.startswith("note: "), said


def test_an_interrupted_command_says_so(
    here: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmcli.params.take", lambda *arguments, **options: os.kill(os.getpid(), signal.SIGINT))
    before = signal.signal(signal.SIGINT, cli.interrupt)
    try:
        assert cli.run(["count-params", "good"]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert capfd.readouterr().err == "note: interrupted\n"


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="needs a file without an end")
def test_a_file_without_an_end_is_not_read_to_it(
    here: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmcli.neighbours.MOST_BYTES", 1000)
    for option in ("--among", "--analogies", "--vector"):
        assert cli.run(["nearest-tokens", "good", "a", option, "/dev/zero"]) == 1
        assert "/dev/zero: more than 1,000 bytes" in capfd.readouterr().err
    (here / "words.txt").write_text("a\n" * 500)  # just short enough
    assert cli.run(["nearest-tokens", "good", "a", "--among", "words.txt"]) == 0
