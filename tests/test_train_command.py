"""llmcli train through its real entry point: signals, kills, full disks, streams, and what it shows."""

from __future__ import annotations

import json
import os
import pty
import random
import resource
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from llmcli import cli, curves, events, followers, output, run_folder, tensors, weight_files
from llmcli.commands import train as command
from llmcli.errors import UsageError

RECIPE = """
[model]
family = "llama"
vocab_size = 257
embed_dim = 16
num_layers = 2
num_heads = 4
num_kv_heads = 2
hidden_dim = 24
max_position_embeddings = 16
tie_word_embeddings = true
dropout = 0.1
[data]
tokenizer = "byte"
[train]
batch_size = 4
max_steps = 40
warmup_steps = 2
eval_every = 2
eval_batches = 1
log_every = 1
keep = 1
precision = "fp32"
compile = "off"
"""
TEXT = "".join(f"{n} green bottles hanging on the wall.\n" for n in range(99, 0, -1))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(TEXT)
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE.replace("[data]", f'[data]\npath = "{tmp_path / "text.txt"}"'))
    return path


def llmcli(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "llmcli", *map(str, arguments)],
        capture_output=True,
        encoding="utf-8",
        env={**os.environ, **environment},
        timeout=200,
    )


def started(*arguments: str | Path) -> subprocess.Popen[str]:
    """A run whose events can be read as they come."""
    return subprocess.Popen(
        [sys.executable, "-m", "llmcli", "train", *map(str, arguments), "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
    )


def read_until(process: subprocess.Popen[str], step: int) -> None:
    assert process.stdout
    for line in process.stdout:
        event = json.loads(line)
        if event["event"] == "step" and event["step"] >= step:
            return
    raise AssertionError(process.communicate())


def run(*arguments: str | Path) -> int:
    return cli.run(["train", *map(str, arguments)])


def same(a: Path, b: Path) -> bool:
    pairs = [(load_file(a / file), load_file(b / file)) for file in ("model.safetensors", run_folder.MOMENTS)]
    return all(x.keys() == y.keys() and all(x[key].equal(y[key]) for key in x) for x, y in pairs)


# Signals and kills


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_finishes_the_step_saves_once_and_ends_with_its_code(
    recipe: Path, tmp_path: Path, number: int, code: int
) -> None:
    process = started(
        recipe, "--out", tmp_path / "run", "--set", "train.max_steps=100000", "--set", "train.eval_every=100000"
    )
    read_until(process, 3)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code
    events = [json.loads(line) for line in out.splitlines()]
    saved = [event for event in events if event["event"] == "saved"]
    done = events[-1]
    assert len(saved) == 1 and not saved[0]["best"]
    assert (
        done["event"] == "done" and done["reason"] == signal.Signals(number).name and done["step"] == saved[0]["step"]
    )
    assert run_folder.read_state(tmp_path / "run" / "last").step == done["step"]
    assert "Traceback" not in err and "a second one leaves at once" in err


def test_a_second_signal_leaves_at_once(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A step that lasts: the first signal waits for its end, the second does not.
    script = (
        "import sys, time\n"
        "from llmcli import cli, train\n"
        "real = train.Run.update\n"
        "def slow(self, step):\n"
        "    result = real(self, step)\n"
        "    if step == 4:\n"
        "        sys.stderr.write('now\\n'); sys.stderr.flush()\n"
        "        end = time.monotonic() + 50\n"
        "        while time.monotonic() < end: time.sleep(0.01)\n"
        "    return result\n"
        "train.Run.update = slow\n"
        "sys.exit(cli.run(sys.argv[1:]))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, "train", str(recipe), "--out", str(tmp_path / "run")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        encoding="utf-8",
    )
    assert process.stderr
    assert process.stderr.readline() == "now\n"
    process.send_signal(signal.SIGINT)
    assert "SIGINT" in process.stderr.readline()
    assert process.poll() is None
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=20) == 130
    assert time.monotonic() - began < 10
    assert run_folder.read_state(tmp_path / "run" / "last").step == 4  # of before: nothing was saved in haste
    assert "SIGINT again: left at once; what came after the last save is lost" in process.stderr.read()
    process.stderr.close()


@pytest.mark.parametrize("deaf", ["stdout", "both"])
@pytest.mark.parametrize("form", [[], ["--json"]])
def test_where_nobody_reads_on_the_run_is_saved(recipe: Path, tmp_path: Path, deaf: str, form: list[str]) -> None:
    endless = ["--set", "train.max_steps=100000", "--set", "train.eval_every=100000"]
    process = subprocess.Popen(
        [sys.executable, "-m", "llmcli", "train", str(recipe), "--out", str(tmp_path / "run"), *form, *endless],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if deaf == "stdout" else subprocess.STDOUT,
        encoding="utf-8",
    )
    assert process.stdout
    while "step 3 " not in (line := process.stdout.readline()) and '"step":3' not in line:
        assert line
    process.stdout.close()
    assert process.wait(timeout=60) == 141
    told = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert told[-1]["event"] == "done" and told[-1]["reason"] == "SIGPIPE"
    assert run_folder.read_state(tmp_path / "run" / "last").step == told[-1]["step"] >= 3
    if process.stderr:
        first, ended, how, *rest = process.stderr.read().splitlines()
        assert first == "note: nobody reads the output any more: the run ends after this step, and is saved"
        assert ended.startswith(f"note: SIGPIPE at step {told[-1]['step']} ")
        assert how == f"note: to go on: the same command with --resume --out {tmp_path / 'run'}" and not rest
        process.stderr.close()


def test_a_closed_terminal_finishes_the_step_and_saves(recipe: Path, tmp_path: Path) -> None:
    pid, terminal = pty.fork()
    if not pid:
        steps = ["--set", "train.max_steps=100000", "--set", "train.eval_every=100000"]
        command = [sys.executable, "-m", "llmcli", "train", str(recipe), "--out", str(tmp_path / "run"), *steps]
        os.execv(sys.executable, command)
    metrics = tmp_path / "run" / "metrics.jsonl"
    end = time.monotonic() + 60
    while not (metrics.exists() and '"step":9' in metrics.read_text()):
        assert time.monotonic() < end
        if select.select([terminal], [], [], 0.05)[0]:
            os.read(terminal, 65536)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 129
    told = json.loads(metrics.read_text().splitlines()[-1])
    assert told["event"] == "done" and told["reason"] in ("SIGHUP", "SIGPIPE")
    assert run_folder.read_state(tmp_path / "run" / "last").step == told["step"] >= 9


def test_a_signal_that_was_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with command.interruptible() as interrupted:
            interrupted()
            signal.raise_signal(signal.SIGHUP)
            assert interrupted() is None
            signal.raise_signal(signal.SIGTERM)
            assert interrupted() == "SIGTERM"
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_before_there_is_anything_to_save_a_signal_ends_at_once(
    number: int, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as caught, command.interruptible():
        signal.raise_signal(number)
        time.sleep(1)
    assert caught.value.code == code
    assert signal.getsignal(number) == before
    assert capsys.readouterr().err == f"note: {signal.Signals(number).name}: ended before the first step\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no full device")
def test_a_full_disk_in_place_of_a_reader_is_named_and_nothing_is_called_saved(recipe: Path, tmp_path: Path) -> None:
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-m", "llmcli", "train", str(recipe), "--out", str(tmp_path / "run")]
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, encoding="utf-8", timeout=60)
    assert result.returncode == 141
    first, ended, how = result.stderr.splitlines()
    assert first.startswith("note: the output cannot be written (No space left on device): ")
    assert ended.startswith("note: SIGPIPE at step 0 ")
    assert how == "note: nothing was trained, so nothing is saved: begin it again with the same command"
    assert not (tmp_path / "run" / "last").exists()


def kill_and_resume(recipe: Path, tmp_path: Path, times: int, seed: int) -> None:
    """Kill a run at random moments; each time its checkpoints must load; in the end it is the undisturbed run."""
    out, draw = tmp_path / "killed", random.Random(seed)
    arguments = (recipe, "--out", out, "--set", f"train.max_steps={20 * times}", "--set", "train.sample_every=3")
    assert run(*arguments[:1], "--out", tmp_path / "whole", *arguments[3:], "--json") == 0
    reached = 0
    for _ in range(times):
        process = started(*arguments, "--resume")
        if draw.random() < 0.9:
            read_until(process, reached + 1)
        time.sleep(draw.uniform(0, 0.15))  # anywhere: in a step, an evaluation, a save, between two renames
        process.send_signal(signal.SIGKILL)
        _, err = process.communicate()
        assert process.returncode == -signal.SIGKILL, err
        for name in ("last", "best"):
            folder = out / name
            assert folder.is_dir() or not reached
            if folder.is_dir():
                weight_files.read_checkpoint(folder)
        if (out / "last").is_dir():
            tensors.read_header(out / "last" / run_folder.MOMENTS)
            step = run_folder.read_state(out / "last").step
            assert step >= reached
            reached = step
    assert reached < 20 * times
    assert run(*arguments, "--resume", "--json") == 0
    assert same(out / "last", tmp_path / "whole" / "last")
    assert {path.name for path in out.iterdir()} == {path.name for path in (tmp_path / "whole").iterdir()}
    ours, theirs = curves.read(out), curves.read(tmp_path / "whole")
    for a, b in ((ours.steps, theirs.steps), (ours.evaluations, theirs.evaluations)):
        assert [(row["step"], row.get("loss"), row.get("val_loss")) for row in a] == [
            (row["step"], row.get("loss"), row.get("val_loss")) for row in b
        ]


def test_a_run_killed_at_random_moments_ends_as_if_never_killed(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kill_and_resume(recipe, tmp_path, 4, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_run_killed_thirty_times_ends_as_if_never_killed(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kill_and_resume(recipe, tmp_path, 30, seed=2)


def limited(size: int) -> Any:
    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    return limit


def test_a_file_system_that_takes_no_more_bytes_loses_nothing_older(recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert run(recipe, "--out", out, "--set", "train.max_steps=4", "--set", "train.schedule_steps=40", "--json") == 0
    before = load_file(out / "last" / run_folder.MOMENTS)
    result = subprocess.run(
        [sys.executable, "-m", "llmcli", "train", "--resume", "--out", str(out), "--set", "train.max_steps=40"],
        preexec_fn=limited(30_000),
        capture_output=True,
        encoding="utf-8",
    )
    assert result.returncode == 1
    assert "cannot be written" in result.stderr and "Traceback" not in result.stderr
    after = load_file(out / "last" / run_folder.MOMENTS)
    assert all(before[key].equal(after[key]) for key in before)
    assert run("--resume", "--out", out, "--set", "train.max_steps=40", "--json") == 0
    assert run(recipe, "--out", tmp_path / "whole", "--set", "train.schedule_steps=40", "--json") == 0
    assert same(out / "last", tmp_path / "whole" / "last")


@pytest.mark.skipif(os.geteuid() != 0 or sys.platform != "linux", reason="mounting needs root on Linux")
def test_a_full_disk_loses_nothing_older(recipe: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("no mounting here")
    try:
        out = disk / "run"
        assert run(recipe, "--out", out, "--set", "train.max_steps=4", "--set", "train.keep=0", "--json") == 0
        before = run_folder.read_state(out / "last")
        room = os.statvfs(disk)
        (disk / "filler").write_bytes(b"x" * (room.f_bavail * room.f_bsize - 40_000))
        arguments = ("--resume", "--out", out, "--set", "train.max_steps=8", "--json")
        assert run(*arguments) == 1
        assert run_folder.read_state(out / "last") == before
        weight_files.read_checkpoint(out / "last")
        (disk / "filler").unlink()
        assert run(*arguments) == 0
        assert run_folder.read_state(out / "last").step == 8
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.skipif(os.geteuid() != 0 or sys.platform != "linux", reason="mounting needs root on Linux")
def test_a_read_only_folder_is_refused_and_what_it_holds_is_left(recipe: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("no mounting here")
    try:
        assert run(recipe, "--out", disk / "run", "--set", "train.max_steps=2", "--json") == 0
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        for out, more in (("new", []), ("run", ["--resume", "--set", "train.max_steps=4"])):
            result = llmcli("train", recipe, "--out", disk / out, *more)
            assert result.returncode == 1
            assert result.stderr.startswith(f"error: {disk / out}: cannot be written (Read-only file system)")
        assert run_folder.read_state(disk / "run" / "last").step == 2
        weight_files.read_checkpoint(disk / "run" / "last")
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


# Streams


def test_in_a_pipe_there_is_one_plain_line_an_event(recipe: Path, tmp_path: Path) -> None:
    result = llmcli(
        "train", recipe, "--out", tmp_path / "run", "--set", "train.max_steps=4", "--set", "train.log_every=2"
    )
    assert result.returncode == 0 and result.stderr == ""
    lines = result.stdout.splitlines()
    assert [line.split("  ")[0] for line in lines if "  loss" in line] == ["step 1", "step 2", "step 4"]
    assert all(word in lines[-1] for word in ("finished at step 4", "best val loss", str(tmp_path / "run")))
    assert "\x1b" not in result.stdout and "\r" not in result.stdout
    assert "norms and biases: 80 in 5 tensors, decay 0" in result.stdout
    assert " in 1 tensor, decay 0.1" in result.stdout and " 1 tensors" not in result.stdout


def test_with_json_each_line_is_an_event(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(recipe, "--out", tmp_path / "run", "--set", "train.max_steps=2", "--json") == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [event["event"] for event in events] == ["start", "step", "step", "eval", "saved", "saved", "done"]


def test_a_terminal_sees_the_state_of_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    screen, console = followers.Screen(), Console(width=100, record=True)

    def shown() -> str:
        console.print(screen)
        return console.export_text()

    assert "starting" in shown()
    screen(events.Progress("tokenising", 30, 60))
    assert "tokenising 50%" in shown()
    values: dict[str, Any] = {
        "step": 0,
        "max_steps": 100,
        "out": "o",
        "parameters": 10,
        "tie_word_embeddings": True,
        "vocab_size": 9,
    }
    values |= {"source": events.Source(0, 1, 9, 9)}
    values |= {"context": 8, "train_tokens": 1, "validation_tokens": 1, "step_tokens": 8, "device": "cpu", "notes": ()}
    screen(events.Start(**values, precision="fp32", compiled=False, processes=1, groups=()))  # type: ignore[arg-type]
    assert "0 of 100" in shown()
    rest: dict[str, Any] = {"lr": 1e-3, "grad_norm": 0.5, "tokens": 1, "mfu": 0.25, "memory": 2_000_000}
    for step, loss in ((10, 4.0), (20, 3.0), (30, 2.5)):
        screen(events.Step(step=step, loss=loss, tokens_per_second=1234.0, **rest))
    screen(events.Eval(step=20, val_loss=3.25, perplexity=25.8, bits_per_byte=1.5))
    screen(events.Eval(step=30, val_loss=3.5, perplexity=33.1, bits_per_byte=1.6))
    screen(events.Sample(step=30, prompt="Once", text=" upon\n\x1b[31m a time"))
    screen.began -= 60
    text = shown()
    for part in ("30 of 100", "30%", "3:30 left", "2.5000", "3.5000", "best 3.2500 at step 20", "1.234 k tokens/s"):
        assert part in text, part
    assert "Once upon ·[31m a time" in text  # no sample drives the terminal
    screen(
        events.Done(
            step=30, reason="x", tokens=1, best_loss=None, best_step=None, seconds=1.0, seconds_in_all=1.0, out="o"
        )
    )
    assert shown().strip() == ""


def test_a_sparkline_falls_from_high_to_low() -> None:
    class Utf8:
        encoding = "utf-8"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(output.sys, "stdout", Utf8)
        assert output.sparkline([4.0, 3.0, 2.0, 1.0], 4) == "█▆▃▁"
        assert output.sparkline([8, 8, 1, 1], 2) == "█▁"
        assert output.sparkline([4, 0, 3, 3, 0, 0], 3) == "▆█▁", "each the mean of its two"
        assert output.sparkline([5.0], 9) == "▁" and output.sparkline([], 9) == ""
        Utf8.encoding = "ascii"
        assert output.sparkline([2.0, 1.0], 2) == "@_"


def test_it_works_in_the_c_locale_with_strange_paths(recipe: Path, tmp_path: Path) -> None:
    folder = tmp_path / "a b=ü,'x'"
    folder.mkdir()
    text = recipe.parent.joinpath("text.txt").rename(folder / "te xt=ß.txt")
    arguments = ("train", recipe, "--data", text, "--out", folder / "run", "--set", "train.max_steps=1")
    result = llmcli(*arguments, LC_ALL="C", LANG="C")
    assert result.returncode == 0, result.stderr
    assert (folder / "run" / "last" / "model.safetensors").exists()
    state = run_folder.read_state(folder / "run" / "last")
    assert state.recipe.data.path == str(text)


def test_a_name_that_is_no_utf8_does_not_stop_a_run(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    folder.mkdir()
    text = (tmp_path / "text.txt").rename(folder / "text.txt")
    assert run(recipe, "--data", text, "--out", folder / "run", "--set", "train.max_steps=1", "--json") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["out"].endswith("caf\\udce9/run")


# Options


def test_without_arguments_it_is_glasslm_on_the_text_that_python_carries() -> None:
    made = command.put_together(None, Path("nowhere"), {}, [])
    assert made.recipe.model.embed_dim == 128 and made.recipe.model.vocab_size == 1024
    assert made.recipe.data.path is None and made.recipe.data.tokenizer == "bpe"


def test_resuming_takes_the_recipe_of_the_run(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("recipe.toml", "--data", "text.txt", "--out", "run", "--set", "train.max_steps=2", "--json") == 0
    recipe.unlink()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    capsys.readouterr()
    assert run("--resume", "--out", tmp_path / "run", "--set", "train.max_steps=4", "--json") == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [event["step"] for event in events if event["event"] == "step"] == [3, 4]


def test_resuming_does_without_the_tokenizer_it_was_given(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from llmcli import tokenizer

    tokenizer.bytes_tokenizer().save(tmp_path / "bytes")
    setting = f"data.tokenizer={tmp_path / 'bytes'}"
    assert run(recipe, "--out", tmp_path / "run", "--set", setting, "--set", "train.max_steps=2", "--json") == 0
    shutil.rmtree(tmp_path / "bytes")
    assert run("--resume", "--out", tmp_path / "run", "--set", "train.max_steps=4", "--json") == 0
    assert run_folder.read_state(tmp_path / "run" / "last").step == 4


def test_print_config_names_the_origin_of_every_value_and_is_a_recipe_itself(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = (recipe, "--set", "train.lr=0.5", "--data", "a.txt", "--shuffle", "random", "--print-config")
    assert run(*arguments) == 0
    text = capsys.readouterr().out
    origins = {line.split(" = ")[0]: line.rpartition("# ")[2] for line in text.splitlines() if " = " in line}
    assert origins["lr"] == "--set" and origins["path"] == "--data" and origins["shuffle"] == "--shuffle"
    assert origins["embed_dim"] == str(recipe) and origins["weight_decay"] == "default"
    assert origins["head_size"] == "family llama"
    (tmp_path / "printed.toml").write_text(text)
    assert run(*arguments, "--json") == 0
    first = json.loads(capsys.readouterr().out)
    assert run(tmp_path / "printed.toml", "--print-config", "--json") == 0
    second = json.loads(capsys.readouterr().out)
    assert first["recipe"] == second["recipe"]
    assert first["origins"]["train.lr"] == "--set"
    assert first["origins"].keys() == {f"{s}.{k}" for s, table in first["recipe"].items() for k in table}


def test_print_config_names_a_preset_and_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from hf import make

    make("llama", tmp_path / "start", vocab_size=257)
    assert run("--init-from", tmp_path / "start", "--print-config", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["origins"]["model.embed_dim"] == f"--init-from {tmp_path / 'start'}"
    assert shown["recipe"]["model"]["embed_dim"] == 16
    assert shown["recipe"]["data"]["tokenizer"] == str(tmp_path / "start")
    assert run("--print-config", "--json") == 0
    assert json.loads(capsys.readouterr().out)["origins"]["model.embed_dim"] == "preset glasslm"


def test_weights_are_tied_as_they_are_and_not_as_their_config_claims(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from hf import make

    start, text = tmp_path / "start", tmp_path / "text.txt"
    make("llama", start, vocab_size=257, tie_word_embeddings=False)
    text.write_text("Once upon a time. " * 200)
    said = json.loads((start / "config.json").read_text())
    (start / "config.json").write_text(json.dumps(said | {"tie_word_embeddings": True}))
    asked: list[Any] = ["--data", text, "--init-from", start, "--out", tmp_path / "run"]
    for setting in ("data.tokenizer=byte", "train.max_steps=1", "train.context=16", "train.batch_size=2"):
        asked += ["--set", setting]
    assert run(*asked) == 0
    assert "both are kept and the model is untied" in capsys.readouterr().err
    written = load_file(tmp_path / "run" / "last" / "model.safetensors")
    assert "lm_head.weight" in written
    assert not json.loads((tmp_path / "run" / "last" / "config.json").read_text())["tie_word_embeddings"]

    tensors_of = load_file(start / "model.safetensors")
    save_file({n: v for n, v in tensors_of.items() if n != "lm_head.weight"}, start / "model.safetensors")
    (start / "config.json").write_text(json.dumps(said | {"tie_word_embeddings": False}))
    assert run(*asked) == 1
    assert f"llmcli load-hf {start} --tie tie --out DIR" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["glaslm"], "Did you mean 'glasslm'"),
        (["--set", "lr=1"], "not of the form"),
        (["--set", "train.lrr=1"], "unknown key 'train.lrr'"),
        (["--set", "train.lr=fast"], "--set train.lr=fast: expected"),
        (["--set", "train.batch_size=0"], "train.batch_size"),
        (["--resume", "--init-from", "x"], "together"),
        (["--init-from", "nowhere"], "nowhere: no such file or folder"),
        (["--data", "nowhere.txt", "--out", "OUT"], "nowhere.txt: no such file"),
        (["--plot", "curve.doc"], "curve.doc"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line_and_a_hint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert run(*[str(tmp_path / "run") if word == "OUT" else word for word in arguments]) == 2
    shown = capsys.readouterr()
    assert message in shown.err and shown.out == ""
    assert shown.err.startswith("error: ") and "Traceback" not in shown.err


def test_dry_run_shows_an_estimate(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(recipe, "--out", tmp_path / "run", "--dry-run", "--json") == 0
    assert json.loads(capsys.readouterr().out)["parameters"] == 8032
    assert run(recipe, "--out", tmp_path / "run", "--dry-run") == 0
    shown = capsys.readouterr().out
    assert "tokens/s" in shown
    assert not (tmp_path / "run").exists()
    assert run(recipe, "--out", tmp_path / "run", "--set", "train.max_steps=1") == 0
    told = capsys.readouterr().out.splitlines()
    for beginning in ("model: ", "text: "):
        (line,) = (line for line in told if line.startswith(beginning))
        assert line in shown.splitlines(), "of a run the same is said"


def test_what_text_was_read_is_said(tmp_path: Path, recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("b.txt", "c.txt"):
        (tmp_path / name).write_text("é" * 2500)
    more = ("--data", tmp_path / "text.txt", "--data", tmp_path / "b.txt")
    more = (*more, "--set", f"data.validation_path={tmp_path / 'c.txt'}", "--set", "train.max_steps=1")
    assert run(recipe, *more, "--out", tmp_path / "run", "--json") == 0
    start = next(e for e in map(json.loads, capsys.readouterr().out.splitlines()) if e["event"] == "start")
    characters = len(TEXT) + 5000
    assert start["source"] == {"files": 3, "documents": 3, "characters": characters, "bytes": characters + 5000}
    assert run(recipe, *more, "--dry-run") == 0
    assert "text: 3 files, 13.8 kB in 3 documents; " in capsys.readouterr().out


def test_the_corpus_that_python_carries_is_named() -> None:
    assert followers.read_from(events.Source(0, 1, 460_000, 465_000)) == "Python's help pages, 465 kB in 1 document"
    assert followers.read_from(events.Source(1, 2, 10, 12)) == "1 file, 12 B in 2 documents"


@pytest.mark.parametrize("name", ["best", "last"])
def test_a_folder_with_either_checkpoint_of_a_run_is_not_begun_anew(tmp_path: Path, name: str) -> None:
    (tmp_path / "run" / name).mkdir(parents=True)
    with pytest.raises(UsageError, match="holds a run already"), run_folder.locked(tmp_path / "run", resume=False):
        pass
    with run_folder.locked(tmp_path / "run", resume=True):
        assert (tmp_path / "run" / name).is_dir()


@pytest.mark.parametrize(("reason", "goes_on"), [("finished", False), ("time limit", True), ("SIGTERM", True)])
def test_a_run_that_was_stopped_says_how_to_go_on(reason: str, goes_on: bool) -> None:
    done: Any = dict.fromkeys(events.Done.__struct_fields__, 1.0)
    lines = followers.lines_of(events.Done(**done | {"step": 3, "reason": reason, "best_loss": None, "out": "o"}))
    assert lines[0] == f"{reason} at step 3 after 1.0 s: o"
    assert lines[1:] == (["to go on: the same command with --resume --out o"] if goes_on else [])


def test_the_time_that_is_left_follows_the_steps_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = followers.Screen()
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    step: Any = dict.fromkeys(events.Step.__struct_fields__, 1.0)
    for now[0], at in ((100.0, 51), (136.0, 60)):  # a run that goes on at step 50, its first step slow
        screen(events.Step(**step | {"step": at}))
        assert bool(screen.time_left(at, 100)) == (at > 51)
    assert screen.time_left(60, 100) == "2:40 left", "four seconds a step, forty steps"
    assert screen.time_left(60, 2060) == "2:13:20 left"
    now[0] = 150.0
    assert screen.time_left(60, 100) == "2:26 left", "it counts down until the next step is told"
    now[0] = 999.0
    assert screen.time_left(60, 100) == "0:00 left"


def test_a_run_that_is_finished_has_nothing_left_to_do_and_says_so(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert run(recipe, "--out", out, "--set", "train.max_steps=2", "--json") == 0
    capsys.readouterr()
    assert run("--resume", "--out", out) == 0
    assert "nothing is left to do: finished at step 2; --set train.max_steps=N trains on" in capsys.readouterr().out
    assert run("--resume", "--out", out, "--set", "train.max_steps=3", "--shuffle", "random") == 0
    shown = capsys.readouterr().out
    assert "nothing is left" not in shown
    assert "data.shuffle was windows, is now random" in shown
    assert "train.max_steps was 2, is now 3" in shown
    assert "schedule moved: it ends at step 3 instead of 2" in shown


@pytest.mark.parametrize("kept", ["train.schedule_steps=2", "train.schedule=constant"])
def test_a_schedule_that_stays_is_not_said_to_have_moved(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kept: str
) -> None:
    arguments = ("--out", tmp_path / "run", "--set", kept, "--set")
    assert run(recipe, *arguments, "train.max_steps=2", "--json") == 0
    capsys.readouterr()
    assert run("--resume", *arguments, "train.max_steps=3") == 0
    assert "moved" not in capsys.readouterr().out


def test_plot_and_csv_are_made_of_the_metrics(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "run"
    assert run(recipe, "--out", out, "--set", "train.max_steps=4", "--csv", "--plot", tmp_path / "c.svg", "--json") == 0
    rows = (out / "metrics.csv").read_text().splitlines()
    assert rows[0] == ",".join(curves.COLUMNS) and len(rows) == 5
    steps = curves.read(out)
    for row, step in zip(rows[1:], steps.steps, strict=True):
        assert row.split(",")[:2] == [str(step["step"]), str(step["loss"])]
    assert rows[2].split(",")[8] == str(steps.evaluations[0]["val_loss"]) and rows[1].split(",")[8] == ""
    assert (tmp_path / "c.svg").read_text().startswith("<?xml")


def test_a_file_beside_the_run_that_cannot_be_written_does_not_end_it(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    (out / "metrics.csv").mkdir(parents=True)
    assert run(recipe, "--out", out, "--set", "train.max_steps=4", "--csv", "--json") == 0
    assert capsys.readouterr().err == (
        f"warning: {out / 'metrics.csv'}: cannot be written (Is a directory); the run goes on\n"
    )
    assert run_folder.read_state(out / "last").step == 4


def test_curves_of_a_run_without_a_step_are_left_out(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    out, picture = tmp_path / "run", tmp_path / "c.svg"
    assert run(recipe, "--out", out, "--set", "train.time_limit=1e-9", "--csv", "--plot", picture, "--json") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["step"] == 0
    assert not picture.exists() and not (out / "metrics.csv").exists()


def test_tensorboard_gets_steps_and_evaluations_once(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out = tmp_path / "run"
    for steps in (2, 4):
        assert (
            run(recipe, "--out", out, "--resume", "--set", f"train.max_steps={steps}", "--tensorboard", "--json") == 0
        )
    seen = EventAccumulator(str(out / "tensorboard"))
    seen.Reload()
    assert [event.step for event in seen.Scalars("training/loss")] == [1, 2, 3, 4]
    losses = [row["loss"] for row in curves.read(out).steps]
    assert [event.value for event in seen.Scalars("training/loss")] == pytest.approx(losses)
    assert [event.step for event in seen.Scalars("validation/val_loss")] == [2, 4]


# The commands beside it


def test_curves_compares_runs(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, steps, tied in (("a", 2, "true"), ("b", 4, "false")):
        settings = ("--set", f"train.max_steps={steps}", "--set", f"model.tie_word_embeddings={tied}")
        assert run(recipe, "--out", tmp_path / name, *settings, "--json") == 0
    with (tmp_path / "b" / "metrics.jsonl").open("a") as file:
        file.write('{"event":"st')  # as a killed run leaves it
    capsys.readouterr()
    assert cli.run(["curves", str(tmp_path / "a"), str(tmp_path / "b"), "--json"]) == 0
    a, b = json.loads(capsys.readouterr().out)
    assert (a["run"], a["steps"], b["steps"], b["best_step"]) == ("a", 2, 4, 4)
    assert (a["tied"], b["tied"]) == (True, False) and b["parameters"] > a["parameters"] > 0
    assert cli.run(["curves", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    shown = [line.split()[:2] for line in capsys.readouterr().out.splitlines()]
    assert shown == [["run", "output"], ["a", "tied"], ["b", "untied"]]
    assert b["best_loss"] == run_folder.read_state(tmp_path / "b" / "last").best_loss
    assert cli.run(["curves", str(tmp_path / "a"), "--plot", str(tmp_path / "a.png")]) == 0
    assert (tmp_path / "a.png").stat().st_size > 5000
    assert "best val loss" in capsys.readouterr().out
    assert cli.run(["curves", str(tmp_path / "nowhere")]) == 2
    (tmp_path / "empty").write_text("")
    assert cli.run(["curves", str(tmp_path / "empty")]) == 1
    capsys.readouterr()
    assert cli.run(["curves", str(tmp_path)]) == 2
    assert " runs, not a run" in capsys.readouterr().err


def test_train_tokenizer_gives_the_same_file_for_the_same_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "one.txt").write_text(TEXT)
    (tmp_path / "two.jsonl").write_text(json.dumps({"body": TEXT}))
    arguments = ["--vocab-size", "270", "--json"]
    assert cli.run(["train-tokenizer", str(tmp_path / "one.txt"), "--out", str(tmp_path / "a"), *arguments]) == 0
    first = json.loads(capsys.readouterr().out)
    second = [
        "train-tokenizer",
        str(tmp_path / "two.jsonl"),
        "--field",
        "body",
        "--out",
        str(tmp_path / "b"),
        *arguments,
    ]
    assert cli.run(second) == 0
    capsys.readouterr()
    assert first["vocab_size"] == 270 and first["characters"] == len(TEXT) and first["bytes_per_token"] > 1
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_no_token_reaches_from_one_document_into_the_next(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "docs.jsonl").write_text('{"text": "xy"}\n' * 50)
    (tmp_path / "one.txt").write_text("xy" * 50)
    for name, joined in (("docs.jsonl", False), ("one.txt", True)):
        arguments = ["train-tokenizer", str(tmp_path / name), "--out", str(tmp_path / "made"), "--vocab-size", "260"]
        assert cli.run(arguments) == 0
        vocabulary = json.loads((tmp_path / "made" / "tokenizer.json").read_text())["model"]["vocab"]
        assert "xy" in vocabulary and ("xyxy" in vocabulary) == joined


def test_train_tokenizer_says_when_the_text_gives_fewer_tokens_than_were_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "one.txt").write_text(TEXT)
    arguments = ["train-tokenizer", str(tmp_path / "one.txt"), "--out", str(tmp_path / "a"), "--json"]
    assert cli.run([*arguments, "--vocab-size", "9000"]) == 0
    shown = capsys.readouterr()
    size = json.loads(shown.out)["vocab_size"]
    assert size < 9000
    assert f"note: 9,000 tokens were asked for: the text gives {size:,}" in shown.err
    assert cli.run([*arguments, "--vocab-size", "270"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("kind, size", [("char", len(set(TEXT))), ("byte", 257)])
def test_train_tokenizer_knows_the_other_kinds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, size: int
) -> None:
    (tmp_path / "one.txt").write_text(TEXT)
    assert cli.run(["train-tokenizer", str(tmp_path / "one.txt"), "--kind", kind, "--out", str(tmp_path / "a")]) == 0
    assert f"{size} ({kind})" in capsys.readouterr().out


def test_a_run_is_not_begun_where_another_was_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoint, run = tmp_path / "runs" / "mine" / "last", tmp_path / "runs" / "mine"
    checkpoint.mkdir(parents=True)
    (checkpoint / "config.json").write_text("{}")
    (run / "metrics.jsonl").touch()
    assert cli.run(["train", "--resume"]) == 2
    assert "there is no run runs/glasslm\n  hint: Name it: --out runs/mine" in capsys.readouterr().err
    assert cli.run(["train", "--resume", "--out", str(tmp_path / "runs" / "mime")]) == 2
    assert f"there is no run {tmp_path}/runs/mime\n  hint: Name it: --out {run}." in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert cli.run(["train", "--resume", "--out", "empty"]) == 2
    assert "empty holds no checkpoint to go on from\n  hint: Begin it again" in capsys.readouterr().err
    assert not list((tmp_path / "empty").iterdir())
    for more in (["--resume"], []):
        assert cli.run(["train", "--out", str(checkpoint), *more]) == 2
        said = capsys.readouterr().err
        assert f"{checkpoint}: a checkpoint, not the folder of a run" in said and f"--out {run}." in said
    assert sorted(path.name for path in checkpoint.iterdir()) == ["config.json"]


def test_a_dry_run_of_a_run_that_goes_on_says_what_is_left(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert run(recipe, "--out", out, "--set", "train.max_steps=2") == 0
    capsys.readouterr()
    assert run("--resume", "--out", out, "--dry-run", "--set", "train.max_steps=6") == 0
    shown = capsys.readouterr().out
    assert "the 4 of 6 steps left, and evaluations" in shown and "epochs left" in shown
    assert run(recipe, "--out", out, "--dry-run", "--set", "train.max_steps=6") == 0
    assert "all steps and evaluations" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("setting", "code", "said"),
    [
        ("model.num_heads=3", 2, "--set: "),
        ("model.family=nothing", 2, "--set: unknown family 'nothing'"),
        ("train.seed=2", 0, ""),
    ],
)
def test_a_model_that_a_setting_makes_impossible_is_usage(
    setting: str, code: int, said: str, recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(recipe, "--print-config", "--set", setting) == code
    assert capsys.readouterr().err.startswith(f"error: {said}" if said else "")
    bad = tmp_path / "bad.toml"
    bad.write_text(recipe.read_text().replace("num_heads = ", "num_heads = 3 # "))
    assert run(bad, "--print-config", "--set", "train.seed=2") == 1  # the file's fault, whatever is set besides
    assert "--set" not in capsys.readouterr().err


def test_on_a_terminal_on_which_nothing_is_drawn_anew_a_run_is_lines(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "dumb")
    assert run(recipe, "--out", tmp_path / "run", "--set", "train.max_steps=2") == 0
    out = capsys.readouterr().out
    assert "step 1  loss" in out and "finished at step 2" in out and "\x1b" not in out


def test_a_run_that_went_on_tells_its_own_time_and_all_of_it() -> None:
    done = events.Done(
        step=3, reason="finished", tokens=9, best_loss=None, best_step=None, seconds=1, seconds_in_all=61, out="o"
    )
    assert followers.lines_of(done) == ["finished at step 3 after 1.0 s (61.0 s in all): o"]
