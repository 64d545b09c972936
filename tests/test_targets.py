"""What a word on the command line means: a preset, something here, or a repository of the Hub."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import hf
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmcli import cli, errors, hub, targets
from llmcli.hub import RepoId

CONFIG = {"model_type": "llama", "vocab_size": 8, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, RepoId, bool]]:
    """What is asked of the Hub, which answers every time with a folder that exists."""
    asked: list[tuple[str, RepoId, bool]] = []
    folder = Path("from-the-hub")
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    for name in ("fetch", "fetch_config"):

        def ask(repo: RepoId, offline: bool = False, name: str = name) -> Path:
            asked.append((name, repo, offline))
            return folder

        monkeypatch.setattr(hub, name, ask)
    return asked


@pytest.mark.parametrize(
    ("text", "name", "revision"),
    [
        ("org/name", "org/name", None),
        ("openai-community/gpt2", "openai-community/gpt2", None),
        ("meta-llama/Llama-3.1-8B@main", "meta-llama/Llama-3.1-8B", "main"),
        ("org/name@refs/pr/1", "org/name", "refs/pr/1"),
        ("hf://org/name", "org/name", None),
        ("hf://org/name@v1.0", "org/name", "v1.0"),
        ("org/name_2.5-x", "org/name_2.5-x", None),
    ],
)
def test_org_name_is_a_repository(text: str, name: str, revision: str | None) -> None:
    assert targets.repo_id(text) == RepoId(name, revision)


@pytest.mark.parametrize(
    "text",
    ["gpt2", "./org/name", "../org/name", "/org/name", "~/org/name", "a/b/c", "org/", "/name", "", ".", "..", "a b/c",
     "org\\name", "org/.hidden", "name@main", "o\0g/name", "x" * 5000, "ö/name"],
)  # fmt: skip
def test_everything_else_is_local(text: str) -> None:
    assert targets.repo_id(text) is None


def test_what_exists_here_is_local_even_when_it_looks_like_a_repository() -> None:
    Path("org/name").mkdir(parents=True)
    assert targets.repo_id("org/name") is None
    assert targets.find_checkpoint("org/name") == Path("org/name")
    Path("org/name@v1").mkdir()
    assert targets.repo_id("org/name@v1") is None


def test_a_broken_link_is_local() -> None:
    Path("org").mkdir()
    Path("org/name").symlink_to("nowhere")
    assert targets.repo_id("org/name") is None
    with pytest.raises(errors.UsageError, match="no such file"):
        targets.find_checkpoint("org/name")


def test_a_slip_in_a_local_path_is_not_looked_up_on_the_hub(fetched: list[tuple[str, RepoId, bool]]) -> None:
    Path("runs/best").mkdir(parents=True)
    with pytest.raises(errors.UsageError, match=r"runs/bset: no such file or folder") as refusal:
        targets.find_checkpoint("runs/bset")
    assert "Did you mean 'runs/best'?" in refusal.value.hint
    assert "hf://runs/bset" in refusal.value.hint
    assert fetched == []


def test_hf_means_the_hub_whatever_exists_here(fetched: list[tuple[str, RepoId, bool]]) -> None:
    Path("org/name").mkdir(parents=True)
    Path("hf:/org/name").mkdir(parents=True)
    targets.find_checkpoint("hf://org/name")
    assert fetched == [("fetch", RepoId("org/name"), False)]


@pytest.mark.parametrize("text", ["hf://name", "hf://a/b/c", "hf://", "hf:///name", "hf://org/name@"])
def test_what_is_no_repository_behind_hf_is_refused(text: str) -> None:
    with pytest.raises(errors.UsageError, match="not a repository of the Hub") as refusal:
        targets.find_checkpoint(text)
    assert "hf://org/name" in refusal.value.hint


def test_revision_and_offline_are_passed_on(fetched: list[tuple[str, RepoId, bool]]) -> None:
    targets.find_checkpoint("org/name", revision="v1", offline=True)
    targets.find_checkpoint("org/name@v2")
    targets.read_config("org/name", revision="v3")
    assert fetched == [
        ("fetch", RepoId("org/name", "v1"), True),
        ("fetch", RepoId("org/name", "v2"), False),
        ("fetch_config", RepoId("org/name", "v3"), False),
    ]


def test_a_revision_named_twice_must_be_the_same_one(fetched: list[tuple[str, RepoId, bool]]) -> None:
    targets.find_checkpoint("org/name@v1", revision="v1")
    assert fetched[0][1] == RepoId("org/name", "v1")
    with pytest.raises(errors.UsageError, match="already names a revision"):
        targets.find_checkpoint("org/name@v1", revision="v2")


def test_a_revision_of_something_local_is_refused() -> None:
    Path("here").mkdir()
    for target in ("here", "gone"):
        with pytest.raises(errors.UsageError, match="--revision v1"):
            targets.find_checkpoint(target, revision="v1")


def test_a_preset_is_not_a_checkpoint_and_the_refusal_says_so() -> None:
    with pytest.raises(errors.UsageError) as refusal:
        targets.find_checkpoint("gpt2")
    assert "preset" in refusal.value.hint and "org/name" in refusal.value.hint


def test_config_comes_from_preset_folder_file_or_hub(fetched: list[tuple[str, RepoId, bool]]) -> None:
    Path("folder").mkdir()
    Path("folder/config.json").write_text(json.dumps(CONFIG | {"vocab_size": 9}))
    assert targets.read_config("gpt2").vocab_size == 50257
    assert targets.read_config("folder").vocab_size == 9
    assert targets.read_config("folder/config.json").vocab_size == 9
    assert fetched == []
    assert targets.read_config("org/name").vocab_size == 8


def test_a_folder_named_like_a_preset_wins() -> None:
    Path("gpt2").mkdir()
    Path("gpt2/config.json").write_text(json.dumps(CONFIG))
    assert targets.read_config("gpt2").family == "llama"


def test_headers_of_a_local_checkpoint_are_here() -> None:
    model = Path("model")
    model.mkdir()
    header = json.dumps({"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}).encode()
    (model / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"xy")
    for target in (model, str(model), model / "model.safetensors"):
        headers = targets.read_headers(target)
        assert headers.here and list(headers.checkpoint.infos) == ["a"] and headers.path == Path(target)


@given(st.text(max_size=40))
def test_any_text_is_a_repository_or_local_and_never_a_crash(text: str) -> None:
    try:
        repo = targets.repo_id(text)
    except errors.UsageError:
        assert text.startswith("hf://")
        return
    if repo is not None:
        assert repo.name.count("/") == 1
        assert not os.path.lexists(text)


BLOCKED = """
import socket, sys
def no(*args, **kwargs):
    raise AssertionError("a socket was opened")
socket.socket.__init__ = no
socket.getaddrinfo = no
socket.create_connection = no
"""


def test_a_local_path_opens_no_socket_and_does_not_import_huggingface_hub() -> None:
    Path("org/name").mkdir(parents=True)
    Path("org/name/config.json").write_text(json.dumps(CONFIG))
    code = (
        BLOCKED
        + """
from llmcli import targets
from llmcli.errors import UsageError
for name in ("org/name", "org", "org/name/config.json"):
    targets.find_checkpoint(name)
targets.read_config("org/name")
for name in ("org/nam", "gpt2", "./x/y"):
    try:
        targets.find_checkpoint(name)
    except UsageError:
        continue
    raise SystemExit(name)
assert not {"huggingface_hub", "httpx", "httpx2", "requests"} & sys.modules.keys(), sys.modules.keys()
# The block is one that would be noticed:
try:
    targets.find_checkpoint("other/name")
except AssertionError:
    print("blocked")
except Exception as error:
    cause = error
    while cause is not None and not isinstance(cause, AssertionError):
        cause = cause.__cause__ or cause.__context__
    print("blocked" if cause is not None else repr(error))
"""
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stderr == "" and done.stdout == "blocked\n"


@pytest.mark.parametrize("command", ["count-params", "inspect", "generate", "evaluate", "nearest-tokens"])
def test_the_folder_of_a_run_is_no_checkpoint_and_its_checkpoints_are_named(
    tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    hf.make("llama", run / "best")
    (run / "metrics.jsonl").touch()
    more = {"generate": ["hello"], "evaluate": [str(run / "metrics.jsonl")], "nearest-tokens": ["#1"]}
    assert cli.run([command, str(run), *more.get(command, [])]) == 2
    assert f"the folder of a training run, not a checkpoint\n  hint: Give {run / 'best'}" in capsys.readouterr().err


def test_a_checkpoint_that_holds_another_in_a_folder_is_a_checkpoint(tmp_path: Path) -> None:
    for name in (".", "best", "last"):
        hf.make("llama", tmp_path / "made" / name)
    assert targets.find_checkpoint(tmp_path / "made") == tmp_path / "made"
