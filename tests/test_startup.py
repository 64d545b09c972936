"""What a command may import and touch before it does its work: no torch, no network, no other project's model code."""

from __future__ import annotations

import ast
import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from llmcli import commands, families, hf_config, targets, tensors, tokenizer

HEAVY = (
    "torch",
    "transformers",
    "huggingface_hub",
    "httpx",
    "httpx2",
    "requests",
    "tensorflow",
    "pandas",
    "matplotlib",
)
PACKAGE = Path(commands.__file__).parents[1]
COMMANDS = sorted(path.stem.replace("_", "-") for path in Path(commands.__file__).parent.glob("*.py"))[1:]

RUN = """
import socket, sys

def refuse(*args, **kwargs):
    raise AssertionError("a socket was opened")

socket.socket.__init__ = socket.create_connection = socket.getaddrinfo = refuse
from llmcli import cli
code = cli.run(sys.argv[1:])
loaded = sorted({".".join(name.split(".")[:n]) for name in sys.modules for n in (1, 2)})
try:  # not getrusage: its peak begins with that of the process that started this one
    memory = next(int(line.split()[1]) / 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
except OSError:
    memory = 0
import json
print(json.dumps([code, loaded, memory]), file=sys.stderr)
"""


def run(*arguments: str | Path) -> tuple[str, set[str], float]:
    """One command in a process of its own, sockets blocked: its output, its modules, its peak memory in MB."""
    done = subprocess.run(
        [sys.executable, "-c", RUN, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "HF_HUB_OFFLINE": "0"},
    )
    code, loaded, memory = json.loads(done.stderr.splitlines()[-1])
    assert code == 0, done.stderr
    return done.stdout, set(loaded), memory


def write(folder: Path, preset: str, dtype: str, shards: int = 1, **changes: int) -> int:
    """A preset's checkpoint as holes in the disk: real headers and sizes, every value zero. Returns its bytes."""
    complete = msgspec.structs.replace(targets.read_config(preset), **changes)
    (folder / "config.json").write_text(json.dumps(hf_config.write(complete, "bfloat16")))
    shapes = {tensor.hf_name: tensor.hf_shape for tensor in families.get(complete.family).tensors(complete)}
    every, weight_map, total = list(shapes.items()), {}, 0
    for n in range(shards):
        part = every[n * len(every) // shards : (n + 1) * len(every) // shards]
        name = f"model-{n + 1:05d}-of-{shards:05d}.safetensors" if shards > 1 else "model.safetensors"
        header = tensors.write_header((tensor, dtype, shape) for tensor, shape in part)
        size = len(header) + sum(math.prod(shape) * tensors.SIZES[dtype] for _, shape in part)
        with (folder / name).open("wb") as file:
            file.write(header)
            file.truncate(size)
        weight_map |= {tensor: name for tensor, _ in part}
        total += size
    if shards > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return total


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole tiny checkpoint with a tokenizer of bytes, in a folder that is named like a repository of the Hub."""
    folder = tmp_path_factory.mktemp("home") / "org" / "name"
    folder.mkdir(parents=True)
    write(folder, "glasslm", "F32", vocab_size=256)
    embedding = tensors.read_header(folder / "model.safetensors")["model.embed_tokens.weight"]
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(embedding.start)
        values = random.Random(0).randbytes(embedding.end - embedding.start - 4)
        file.write(values.replace(b"\x7f", b"\x3f").replace(b"\xff", b"\xbf"))  # neither NaN nor infinite
    tokenizer.bytes_tokenizer().save(folder)
    return folder


TORCH_FREE = {
    "help": ["--help"],
    "version": ["--version"],
    "count a preset": ["count-params", "gpt2", "llama-7b"],
    "count a checkpoint": ["count-params", "CHECKPOINT"],
    "inspect": ["inspect", "CHECKPOINT"],
    "inspect whole": ["inspect", "CHECKPOINT", "--full", "--json"],
    "inspect two": ["inspect", "CHECKPOINT", "CHECKPOINT"],
    "count costs": ["count-params", "gemma-2b", "--cost"],
    "count single file": ["count-params", "CHECKPOINT/model.safetensors", "--by", "tensor"],
    "nearest": ["nearest-tokens", "CHECKPOINT", "#65"],
    "nearest, both matrices, centred": ["nearest-tokens", "CHECKPOINT", "#65", "--matrix", "both", "--center"],
    "analogy": ["nearest-tokens", "CHECKPOINT", "--analogy", "a - b + c"],
    "embedding report": ["embedding-report", "CHECKPOINT"],
    "check": ["load-hf", "CHECKPOINT", "--check"],
}


@pytest.mark.parametrize("name", TORCH_FREE)
def test_it_imports_neither_torch_nor_the_hub_and_opens_no_socket(name: str, checkpoint: Path) -> None:
    shown, loaded, _ = run(*(word.replace("CHECKPOINT", str(checkpoint)) for word in TORCH_FREE[name]))
    assert shown
    assert loaded.isdisjoint(HEAVY)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command_imports_nothing_heavy(command: str) -> None:
    shown, loaded, _ = run(command, "--help")
    assert f"llmcli {command}" in shown
    assert loaded.isdisjoint({*HEAVY, "numpy", "tokenizers", "safetensors"})


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "wait4"), reason="no processor time of a child here")
def test_help_takes_less_than_a_quarter_of_a_second() -> None:
    """Of the processor, the best of several: what else the machine does is no fault of it."""
    spent = []
    for _ in range(7):
        process = subprocess.Popen([sys.executable, "-m", "llmcli", "--help"], stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0
        spent.append(usage.ru_utime + usage.ru_stime)
    assert min(spent) < 0.25


def test_a_name_like_a_repository_is_local_where_it_exists(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(checkpoint.parents[1])
    for words in (["inspect", "org/name"], ["count-params", "org/name"], ["nearest-tokens", "org/name", "#65"]):
        _, loaded, _ = run(*words)
        assert loaded.isdisjoint(HEAVY)


def test_what_computes_with_torch_needs_no_other_project_and_no_network(checkpoint: Path) -> None:
    _, loaded, _ = run("load-hf", checkpoint)
    assert "torch" in loaded and loaded.isdisjoint({*HEAVY} - {"torch"})


def test_training_needs_no_other_project_and_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    start = Path("org/name")  # like a repository of the Hub
    start.mkdir(parents=True)
    write(start, "glasslm", "F32", vocab_size=257, num_layers=1)
    tokenizer.bytes_tokenizer().save(start)
    Path("text.txt").write_text("Nobody is called. " * 99)
    settings = ("train.max_steps=1", "train.context=16", "train.precision=fp32", "train.compile=off")
    options = [word for setting in settings for word in ("--set", setting)]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    _, loaded, _ = run("train", "--init-from", start, "--data", "text.txt", "--out", "run", *options)
    assert "torch" in loaded and loaded.isdisjoint({*HEAVY} - {"torch"})
    assert Path("run/last/model.safetensors").exists()


def test_loading_does_not_import_the_compiler_of_torch(tmp_path: Path) -> None:
    """It takes a second, and drawing a random number on the meta device is enough to import it."""
    write(tmp_path, "gpt2", "F32", vocab_size=64, num_layers=1)
    _, loaded, _ = run("load-hf", tmp_path)
    assert "torch.nn" in loaded and "torch._dynamo" not in loaded


def test_the_block_on_sockets_is_one_that_is_noticed() -> None:
    done = subprocess.run([sys.executable, "-c", RUN, "inspect", "org/not-here"], capture_output=True, text=True)
    assert "a socket was opened" in done.stderr or "cannot be reached" in done.stderr
    assert json.loads(done.stderr.splitlines()[-1])[0] == 1


def test_transformers_is_imported_only_to_compare_with_it() -> None:
    """`load-hf --verify` is the one place; everything that llmcli computes it computes itself."""
    places = set()
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(name.partition(".")[0] == "transformers" for name in names):
                places.add(file.relative_to(PACKAGE).as_posix())
    assert places <= {"commands/load_hf.py", "verify.py"}


LARGEST_MB = 45
"""What a look at a checkpoint may cost in memory, whatever its size."""


@pytest.mark.parametrize(
    ("preset", "dtype", "shards", "gigabytes"), [("llama-7b", "BF16", 3, 13), ("mixtral-8x7b", "BF16", 19, 93)]
)
def test_a_look_at_a_checkpoint_of_many_gigabytes_costs_headers(
    preset: str, dtype: str, shards: int, gigabytes: int, tmp_path: Path
) -> None:
    try:
        assert write(tmp_path, preset, dtype, shards) // 10**9 == gigabytes
    except OSError as error:  # a file system without holes
        pytest.skip(f"no sparse files here: {error}")
    for words in (["inspect"], ["count-params"], ["load-hf", "--check"]):
        _, loaded, memory = run(*words, tmp_path)
        assert loaded.isdisjoint({*HEAVY, "numpy"}), words
        assert memory <= LARGEST_MB, words
