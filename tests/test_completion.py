"""What Tab offers, asked for as the shells ask."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from test_startup import HEAVY, RUN

from llmcli import cli, completion
from llmcli.config import presets

Tab = Callable[..., list[str]]


@pytest.fixture
def tab(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Tab:
    """A function that gives what is offered for the last of some words, in a folder with two checkpoints."""
    for folder in ("runs/first/best", "runs/second one/last", ".hidden/model"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "config.json").write_text("{}")
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "model.safetensors").touch()
    (tmp_path / "gpt").mkdir()
    monkeypatch.chdir(tmp_path)

    def ask(*words: str, shell: str = "bash") -> list[str]:
        monkeypatch.setenv("_LLMCLI_COMPLETE", f"complete_{shell}")
        monkeypatch.setenv("COMP_WORDS", "\n".join(["llmcli", *words]))
        monkeypatch.setenv("COMP_CWORD", str(len(words)))
        monkeypatch.setenv("_TYPER_COMPLETE_ARGS", " ".join(["llmcli", *words]))
        monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
        with pytest.raises(SystemExit) as left:
            cli.run([])
        assert left.value.code in (0, None)
        return capsys.readouterr().out.split("\n")[:-1]

    return ask


def test_commands_and_options_are_offered(tab: Tab) -> None:
    assert sorted(tab("tra")) == ["trace", "train", "train-tokenizer"]
    assert tab("train", "--pl") == ["--plot"]


def test_presets_and_checkpoints_are_offered_where_a_target_belongs(tab: Tab) -> None:
    assert set(tab("count-params", "gemma")) == {name for name in presets() if name.startswith("gemma")}
    assert {"gpt2", "runs/first/best", "files"} <= set(tab("count-params", ""))
    assert tab("count-params", "gpt2", "runs/f") == ["runs/first/best"]
    assert tab("presets", "mixtral") == tab("train", "mixtral") == ["mixtral-8x7b"]


@pytest.mark.parametrize("command", ["generate", "inspect", "load-hf", "nearest-tokens", "lab", "evaluate"])
def test_checkpoints_are_offered_and_nothing_else_where_one_belongs(command: str, tab: Tab) -> None:
    assert sorted(tab(command, "")) == ["files", "runs/first/best", "runs/second\\ one/last"]
    assert tab(command, "./ru")[0] == "./runs/first/best"
    assert tab(command, "gpt") == [""]  # no preset: it has no weights
    assert tab(command, "nowhere/") == [""]
    assert tab(command, ".hid") == [".hidden/model"]
    assert tab("train", "--init-from", "runs/f") == ["runs/first/best"]


def test_home_is_looked_into_and_stays_as_it_was_typed(
    tab: Tab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert tab("generate", "~/runs/f") == ["~/runs/first/best"]


def test_only_bash_is_given_spaces_behind_backslashes(tab: Tab) -> None:
    assert tab("generate", "runs/s") == ["runs/second\\ one/last"]
    assert tab("generate", "runs/s", shell="fish") == ["runs/second one/last"]
    assert '"runs/second one/last"' in tab("generate", "runs/s", shell="zsh")[0]


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["nearest-tokens", "--metric", ""], ["cosine", "dot", "l2"]),
        (["logits", "--dtype", "b"], ["bfloat16"]),
        (["logits", "--device", "c"], ["cpu", "cuda"]),
        (["inspect", "--dtype", "b"], []),
        (["train", "--set", "train.warm"], ["train.warmup_steps="]),
        (["train", "--set", "model.tie"], ["model.tie_word_embeddings="]),
        (["train", "--set", "model.family=ge"], ["model.family=gemma", "model.family=gemma2", "model.family=gemma3"]),
        (["train", "--set", "train.precision="], [f"train.precision={value}" for value in ("auto", "fp32", "bf16")]),
        (["train", "--set", "model.bias=t"], ["model.bias=true"]),
        (["train", "--set", "train.lr="], []),
        (["train", "--set", "no.key="], []),
    ],
)
@pytest.mark.parametrize("shell", ["bash", "fish"])
def test_values_are_offered(words: list[str], offered: list[str], shell: str, tab: Tab) -> None:
    assert [found for found in tab(*words, shell=shell) if found] == offered


def test_a_large_disk_is_no_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in range(60):
        (tmp_path / f"{n}").mkdir()
        for m in range(30):
            (tmp_path / f"{n}" / f"{m}").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(completion, "MOST_ENTRIES", 100)
    looked = 0
    scandir = os.scandir

    def counting(path: str) -> object:
        nonlocal looked
        looked += 1
        return scandir(path)

    monkeypatch.setattr(os, "scandir", counting)
    assert completion.checkpoints("") == []
    assert looked < 10


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_folder_that_may_not_be_read_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "closed").mkdir(mode=0)
    monkeypatch.chdir(tmp_path)
    assert completion.checkpoints("") == []


def test_an_answer_imports_nothing_heavy_and_takes_no_time(tmp_path: Path) -> None:
    asked = {"_LLMCLI_COMPLETE": "complete_bash", "COMP_WORDS": "llmcli\ncount-params\n", "COMP_CWORD": "2"}
    code = RUN.replace("code = cli.run(sys.argv[1:])", "try:\n    cli.run([])\nexcept SystemExit:\n    code = 0")
    times = []
    for _ in range(3):
        begun = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env={**os.environ, **asked}
        )
        times.append(time.perf_counter() - begun)
    assert "gpt2" in done.stdout.split()
    loaded = set(json.loads(done.stderr.splitlines()[-1])[1])
    assert loaded.isdisjoint({*HEAVY, "numpy", "tokenizers"})
    assert min(times) < 1.0  # 0.15 s on a quiet machine


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_a_real_bash_completes(tmp_path: Path) -> None:
    program = Path(sys.executable).parent / "llmcli"
    if not program.exists():
        pytest.skip("llmcli is not installed as a program")
    (tmp_path / "my runs" / "best").mkdir(parents=True)
    (tmp_path / "my runs" / "best" / "config.json").write_text("{}")
    script = f"""
        PATH={program.parent}:$PATH
        eval "$(llmcli --show-completion)"
        complete -p llmcli
        try() {{ COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _llmcli_completion llmcli; echo "${{COMPREPLY[*]}}"; }}
        try llmcli count-params mixtr
        try llmcli inspect my
        try llmcli nosuch ""
    """
    done = subprocess.run(["bash", "--norc", "-c", script], capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.stdout.splitlines()[:3] == [
        "complete -o default -F _llmcli_completion llmcli",
        "mixtral-8x7b",
        "my\\ runs/best",
    ]
    assert done.stderr == ""


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_installed_for_each_shell(shell: str, tmp_path: Path) -> None:
    """In a home of its own; the shell is what started the program, so it is told here."""
    run = (
        "import typer._completion_shared as shared, typer.completion as completion, sys\n"
        f"shared._get_shell_name = completion._get_shell_name = lambda: {shell!r}\n"
        "from llmcli import cli; sys.exit(cli.run(['--install-completion']))"
    )
    env = {**os.environ, "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", run], capture_output=True, text=True, env=env, timeout=60)
    assert done.returncode == 0, done.stderr
    assert f"{shell} completion installed in {tmp_path}" in done.stdout
    written = [path for path in tmp_path.rglob("*llmcli*") if path.is_file()]
    assert any("_LLMCLI_COMPLETE" in path.read_text() for path in written)


@pytest.mark.parametrize("asked", ["complete_nosuch", "bogus", "complete_bash"])
def test_a_shell_that_asks_wrongly_is_told_in_a_line(asked: str) -> None:
    env = {key: value for key, value in os.environ.items() if not key.startswith("COMP_")} | {"_LLMCLI_COMPLETE": asked}
    done = subprocess.run([sys.executable, "-m", "llmcli"], capture_output=True, text=True, env=env, timeout=60)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) <= 2
    assert "Traceback" not in done.stderr and "fault in llmcli" not in done.stderr


def test_the_working_folder_itself_is_not_offered(tab: Tab, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert "" not in completion.checkpoints("")
    assert sorted(tab("generate", "")) == ["files", "runs/first/best", "runs/second\\ one/last"]


def test_a_checkpoint_is_looked_for_four_folders_down_and_no_further(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("one/2/3/4", "uno/2/3/4/5"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "config.json").touch()
    monkeypatch.chdir(tmp_path)
    assert completion.checkpoints("") == ["one/2/3/4"]
    assert completion.checkpoints("uno/") == ["uno/2/3/4/5"], "from what is typed on"
