"""Two processes on the CPU train what one trains: DDP and FSDP2, tied and untied, stopped, resumed, and left alone."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from llmcli import distributed, run_folder, train
from llmcli.config import DataConfig, ModelConfig, Recipe, TrainConfig
from llmcli.errors import TrainingError, UsageError
from llmcli.events import Event, Start

TEXT = "".join(f"{n} little ducks went swimming one day over the hills and far away.\n" for n in range(99, 0, -1))
LLAMA: dict[str, Any] = {
    "family": "llama",
    "vocab_size": 257,
    "embed_dim": 16,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "hidden_dim": 24,
    "max_position_embeddings": 16,
}
GPT2: dict[str, Any] = {key: LLAMA[key] for key in ("vocab_size", "embed_dim", "num_layers", "num_heads")}
GPT2 |= {"family": "gpt2", "max_position_embeddings": 16}
EXPERTS = {**LLAMA, "family": "mixtral", "num_experts": 4, "top_k_experts": 1}

# name: model, strategy, batch size of each of two processes, accumulation
CASES: dict[str, tuple[dict[str, Any], str, int, int]] = {
    "ddp tied": ({**LLAMA, "tie_word_embeddings": True}, "ddp", 4, 1),
    "ddp untied, accumulating": (LLAMA, "ddp", 1, 4),
    "ddp experts": (EXPERTS, "ddp", 1, 1),
    "fsdp tied": ({**LLAMA, "tie_word_embeddings": True}, "fsdp", 4, 1),
    "fsdp untied, accumulating": (GPT2, "fsdp", 2, 2),
    "fsdp tied gpt2": ({**GPT2, "tie_word_embeddings": True}, "fsdp", 2, 1),
    "fsdp experts": (EXPERTS, "fsdp", 1, 1),
}

WORKER = """
import json, os, sys
from pathlib import Path
import msgspec
from llmcli import train
from llmcli.config import Recipe
for port, job in zip(json.loads(sys.argv[1]), msgspec.json.decode(Path(sys.argv[2]).read_bytes())):
    os.environ["MASTER_PORT"] = str(port)
    steps = iter([None] * job["stop"])
    recipe = msgspec.convert(job["recipe"], Recipe)
    for event in train.train(recipe, Path(job["out"]), resume=job["resume"], stop=lambda: next(steps, "SIGINT")):
        pass
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("distributed")
    (folder / "text.txt").write_text(TEXT)
    return folder


@pytest.fixture(autouse=True)
def cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def recipe(
    folder: Path, model: dict[str, Any], strategy: str = "auto", size: int = 4, accumulation: int = 1, **changes: Any
) -> Recipe:
    settings: dict[str, Any] = {"max_steps": 6, "warmup_steps": 2, "eval_every": 3, "eval_batches": 2, "log_every": 1}
    settings |= {"lr": 3e-3, "precision": "fp32", "compile": "off", "sample_every": 3, "sample_tokens": 4}
    settings |= {"strategy": strategy, "batch_size": size, "accumulation": accumulation}
    return Recipe(
        model=ModelConfig(**model),
        data=DataConfig(path=str(folder / "text.txt"), tokenizer="byte"),
        train=TrainConfig(**{**settings, **changes}),
    )


def ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    numbers = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return numbers


def environment(rank: int, port: int = 0) -> dict[str, str]:
    """What torchrun gives to process `rank` of two."""
    given = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return {**os.environ, **{key: str(value) for key, value in given.items()}}


def together(folder: Path, jobs: list[dict[str, Any]]) -> None:
    """Run each job in two processes, the same two for all of them."""
    file = folder / "jobs.json"
    file.write_bytes(msgspec.json.encode(jobs))
    numbers = json.dumps(ports(len(jobs)))
    started = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, numbers, str(file)],
            env=environment(rank),
            stderr=subprocess.PIPE,
            encoding="utf-8",
        )
        for rank in range(2)
    ]
    try:
        errors = [process.communicate(timeout=250)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], errors


def job(made: Recipe, out: Path, *, resume: bool = False, stop: int = 1000) -> dict[str, Any]:
    return {"recipe": msgspec.to_builtins(made), "out": str(out), "resume": resume, "stop": stop}


def alone(made: Recipe, out: Path, **options: Any) -> list[Event]:
    return list(train.train(made, out, **options))


def close(a: Path, b: Path, tolerance: float) -> bool:
    pairs = [(load_file(a / file), load_file(b / file)) for file in ("model.safetensors", run_folder.MOMENTS)]
    return all(
        x.keys() == y.keys() and all(torch.allclose(x[key], y[key], atol=tolerance, rtol=0) for key in x)
        for x, y in pairs
    )


def curve(out: Path) -> list[tuple[str, int, float]]:
    events = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [(e["event"], e["step"], e.get("loss", e.get("val_loss"))) for e in events if e["event"] in ("step", "eval")]


def begun(folder: Path) -> Recipe:
    return recipe(folder, {**LLAMA, "tie_word_embeddings": True}, "fsdp", 2, 2)


@pytest.fixture(scope="module")
def runs(folder: Path) -> Path:
    """Every case in two processes; and one run that is stopped there, resumed there, and one that is resumed alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.setenv("OMP_NUM_THREADS", "1")
        jobs = [job(recipe(folder, *case), folder / name) for name, case in CASES.items()]
        for name in ("fsdp tied", "ddp tied"):
            made = recipe(folder, *CASES[name])
            jobs.append(job(made, folder / f"{name} resumed", stop=2))
            jobs.append(job(made, folder / f"{name} resumed", resume=True))
            jobs.append(job(made, folder / f"{name} left", stop=4))
        steps = iter([None] * 3)
        alone(begun(folder), folder / "begun", stop=lambda: next(steps, "SIGINT"))
        together(folder, [*jobs, job(begun(folder), folder / "begun", resume=True)])
    return folder


@pytest.mark.parametrize("name", CASES)
def test_two_processes_train_what_one_trains_at_the_same_global_batch(runs: Path, name: str) -> None:
    model, strategy, size, accumulation = CASES[name]
    one = runs / f"{name} alone"
    alone(recipe(runs, model, strategy, 2 * size * accumulation), one)
    assert close(runs / name / "last", one / "last", 1e-5)
    for ours, theirs in zip(curve(runs / name), curve(one), strict=True):
        assert ours[:2] == theirs[:2] and ours[2] == pytest.approx(theirs[2], abs=1e-5)
    tied = bool(model.get("tie_word_embeddings"))
    assert ("lm_head.weight" in load_file(runs / name / "best" / "model.safetensors")) == (not tied)


@pytest.mark.parametrize("name", ["fsdp tied", "ddp tied"])
def test_a_run_resumes_in_two_processes_bit_for_bit_and_alone_to_rounding(runs: Path, name: str) -> None:
    assert close(runs / f"{name} resumed" / "last", runs / name / "last", 0)
    events = alone(recipe(runs, *CASES[name]), runs / f"{name} left", resume=True)
    start = next(event for event in events if isinstance(event, Start))
    assert start.step == 4 and start.step_tokens == 8 * 16
    assert any("a step keeps its 8 sequences: 2 batches of 4" in note for note in start.notes)
    assert close(runs / f"{name} left" / "last", runs / name / "last", 1e-5)


def test_what_one_process_began_two_go_on_with(runs: Path) -> None:
    alone(begun(runs), runs / "whole")
    assert close(runs / "begun" / "last", runs / "whole" / "last", 1e-5)


def test_when_a_process_is_killed_the_others_leave_with_a_message_and_the_run_resumes(folder: Path) -> None:
    out, (port,) = folder / "killed", ports(1)
    made = recipe(folder, {**LLAMA, "tie_word_embeddings": True}, size=2, max_steps=100_000, sample_every=0)
    (folder / "killed.json").write_bytes(msgspec.json.encode(made))
    command = [sys.executable, "-m", "llmcli", "train", str(folder / "killed.json"), "--out", str(out), "--json"]
    first, second = (
        subprocess.Popen(
            command, env=environment(rank, port), stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8"
        )
        for rank in range(2)
    )
    assert first.stdout
    for line in first.stdout:
        if json.loads(line).get("step") == 7:
            break
    second.send_signal(signal.SIGKILL)
    _, err = first.communicate(timeout=120)
    shown, _ = second.communicate()
    assert shown == ""  # only the first process shows events
    assert first.returncode == 1
    assert "another process of the run is gone" in err and "--resume" in err and "Traceback" not in err
    step = run_folder.read_state(out / "last").step
    assert step >= 6
    again = msgspec.structs.replace(made, train=msgspec.structs.replace(made.train, max_steps=step + 1))
    assert alone(again, out, resume=True)[-1].step == step + 1  # type: ignore[union-attr]


@pytest.mark.slow
def test_what_one_process_cannot_do_stops_the_other_too(folder: Path) -> None:
    (folder / "refused" / "last").mkdir(parents=True)
    (folder / "refused.json").write_bytes(msgspec.json.encode(recipe(folder, LLAMA)))
    (port,) = ports(1)
    command = [sys.executable, "-m", "llmcli", "train", str(folder / "refused.json"), "--out", str(folder / "refused")]
    both = [
        subprocess.Popen(
            command, env=environment(rank, port), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, encoding="utf-8"
        )
        for rank in range(2)
    ]
    errors = [process.communicate(timeout=120)[1] for process in both]
    assert [process.returncode for process in both] == [2, 1]
    assert "holds a run already" in errors[0]
    assert "another process of the run had to stop" in errors[1]


@pytest.mark.slow
def test_torchrun_starts_it(folder: Path) -> None:
    (folder / "torchrun.json").write_bytes(msgspec.json.encode(recipe(folder, LLAMA, "fsdp", 2)))
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    result = subprocess.run(
        [
            *torchrun,
            "-m",
            "llmcli",
            "train",
            str(folder / "torchrun.json"),
            "--out",
            str(folder / "torchrun"),
            "--json",
        ],
        capture_output=True,
        encoding="utf-8",
        timeout=200,
    )
    assert result.returncode == 0, result.stderr
    events = [json.loads(line) for line in result.stdout.splitlines()]
    assert events[0]["processes"] == 2 and events[-1]["event"] == "done"
    alone(recipe(folder, LLAMA, size=4), folder / "torchrun alone")
    assert close(folder / "torchrun" / "last", folder / "torchrun alone" / "last", 1e-5)


# Without processes


def test_alone_every_exchange_is_the_identity() -> None:
    with distributed.joined("cpu") as one:
        assert one.first and one.count == 1
        assert one.total(torch.tensor([2.0])).tolist() == [2.0]
        assert one.agree("SIGINT", ("SIGINT",)) == "SIGINT" and one.agree(None, ("SIGINT",)) is None
        one.require_equal("text", "x")
        one.outcome(None)
        with pytest.raises(TrainingError, match="so it is"):
            one.outcome(TrainingError("so it is"))


def test_a_gathering_gives_each_tensor_once_and_the_rest_at_the_end() -> None:
    gather = distributed.Gathering([("a", torch.ones(2)), ("b", torch.zeros(2))])
    assert gather("a").tolist() == [1, 1]
    with pytest.raises(KeyError):
        gather("a")
    gather.finish()


def test_a_device_that_is_not_there_is_refused() -> None:
    for name in ("nonsense", "cuda:99"):
        with pytest.raises(UsageError, match=r"train\.device"):
            distributed.find_device(name)
    assert distributed.find_device("cpu") == torch.device("cpu")
