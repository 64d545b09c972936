"""Hostile hands: whatever stands on the command line, a result comes or a message with a hint, never a fault."""

from __future__ import annotations

import json
import os
import shutil
import signal
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
        {"event": "step", "step": n, "tokens": n, "loss": 2.0, "tokens_per_second": 1.0} for n in (1, 2)
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
