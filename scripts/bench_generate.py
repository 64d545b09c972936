#!/usr/bin/env python
"""Generation against transformers and litgpt in one run: prefill and decode apart, batch 1, greedy.

    .venv/bin/python scripts/bench_generate.py [--peers-python PYTHON] [--models tiny gpt2 1b]
        [--dtypes float32 bfloat16] [--rounds 5] [--tokens 64] [--prompt 128] [--threads N] [--clock cpu]
        [--stories DIR] [--json FILE]

Models are random in the shapes of stories260K, GPT-2 (124 M, tied) and a LLaMA of 1.1 B (22 layers, 32 heads, 4 key
heads), unless --stories names a folder with the real stories260K. Each contestant is a process that loads once and then
takes its turn in every round; medians are compared. The prefill is the time to a first token, decoding the further
tokens' time without it. A round in which other processes took more than a tenth of a core is run again, up to --retries
times; a row with such rounds is marked with ~. The bound is the bytes of weights that a token needs over the rate at
which a matrix-vector product reads memory, measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "family": "llama",
        "vocab_size": 512,
        "embed_dim": 64,
        "num_layers": 5,
        "num_heads": 8,
        "num_kv_heads": 4,
        "hidden_dim": 172,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
    },
    "gpt2": {
        "family": "gpt2",
        "vocab_size": 50257,
        "embed_dim": 768,
        "num_layers": 12,
        "num_heads": 12,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
    },
    "1b": {
        "family": "llama",
        "vocab_size": 32000,
        "embed_dim": 2048,
        "num_layers": 22,
        "num_heads": 32,
        "num_kv_heads": 4,
        "hidden_dim": 5632,
        "max_position_embeddings": 2048,
    },
}
CONTESTANTS = ("llmcli", "transformers", "litgpt")
TARGETS = {("tiny", "float32"): 1.8, ("gpt2", "float32"): 1.3, ("gpt2", "bfloat16"): 1.8}
"""Decoding, times transformers; stories260K compiled: 6."""


def contestant(name: str, folder: Path, dtype: str, threads: int | None, compiled: bool) -> None:
    """A process: load, then answer each line of stdin, "prompt tokens", with seconds and CPU seconds on stdout."""
    import torch

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries may print what they like
    if threads:
        torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(0)

    def prompt(length: int, vocab_size: int) -> list[int]:
        return torch.randint(3, vocab_size, (length,), generator=generator).tolist()

    if name == "llmcli":
        from llmcli import decode, load_model
        from llmcli.generate import Sampling, generate

        model = load_model(folder, dtype=dtype)
        if not threads:
            torch.set_num_threads(decode.threads(model))
        vocab_size, packed = model.config.vocab_size, decode.Packed(model)

        def run(ids: list[int], tokens: int) -> int:
            greedy = Sampling(temperature=0, max_new_tokens=tokens)
            return sum(1 for _ in generate(model, [ids], greedy, packed=packed))

    elif name == "transformers":
        import transformers

        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
        vocab_size = theirs.config.vocab_size
        theirs.generation_config.eos_token_id = theirs.generation_config.pad_token_id = None
        extra = {"cache_implementation": "static"} if compiled else {}

        def run(ids: list[int], tokens: int) -> int:
            x = torch.tensor([ids])
            options = {"max_new_tokens": tokens, "do_sample": False, "attention_mask": torch.ones_like(x), **extra}
            return theirs.generate(x, **options).shape[1] - len(ids)

    else:
        from litgpt import GPT, Config
        from litgpt.generate.base import generate as litgpt_generate

        sizes = json.loads((folder / "shape.json").read_text())
        llama = sizes["family"] == "llama"
        config = Config(
            name="bench",
            block_size=sizes["max_position_embeddings"],
            vocab_size=sizes["vocab_size"],
            padded_vocab_size=sizes["vocab_size"],
            n_layer=sizes["num_layers"],
            n_head=sizes["num_heads"],
            n_query_groups=sizes.get("num_kv_heads", sizes["num_heads"]),
            n_embd=sizes["embed_dim"],
            intermediate_size=sizes.get("hidden_dim", 4 * sizes["embed_dim"]),
            rotary_percentage=1.0,
            parallel_residual=False,
            bias=not llama,
            norm_class_name="RMSNorm" if llama else "LayerNorm",
            mlp_class_name="LLaMAMLP" if llama else "GptNeoxMLP",
        )
        vocab_size = sizes["vocab_size"]
        torch.set_default_dtype(getattr(torch, dtype))
        gpt = GPT(config).eval().requires_grad_(False)
        gpt.max_seq_length = config.block_size
        gpt.set_kv_cache(batch_size=1)

        def run(ids: list[int], tokens: int) -> int:
            x = torch.tensor(ids)
            made = litgpt_generate(gpt, x, len(ids) + tokens, temperature=0.0, top_p=0.0, include_prompt=False)
            return len(made)

    with torch.no_grad():
        for line in sys.stdin:
            length, tokens = map(int, line.split())
            ids = prompt(length, vocab_size)
            wall, cpu = time.perf_counter(), time.process_time()
            made = run(ids, tokens)
            print(json.dumps([time.perf_counter() - wall, time.process_time() - cpu, made]), file=answers, flush=True)


class Process:
    """A contestant's process."""

    def __init__(self, python: str, arguments: list[str]) -> None:
        command = [python, __file__, "--contestant", *arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, length: int, tokens: int, clock: str = "wall") -> tuple[float, float]:
        """Seconds by the clock, and how much of a core other processes took meanwhile."""
        assert self._process.stdin and self._process.stdout
        before = busy_seconds()
        self._process.stdin.write(f"{length} {tokens}\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit("a contestant died")
        wall, cpu, made = json.loads(answer)
        if made != tokens:
            raise SystemExit(f"asked for {tokens} tokens, got {made}")
        return wall if clock == "wall" else cpu, max(0.0, busy_seconds() - before - cpu) / wall

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


def busy_seconds() -> float:
    """Seconds for which the machine's cores have worked."""
    user, nice, system = map(int, Path("/proc/stat").read_text().split()[1:4])
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")


def write_model(shape: dict[str, Any], folder: Path) -> None:
    """A random checkpoint of the shape."""
    from llmcli import checkpoint
    from llmcli.config import ModelConfig
    from llmcli.model import build

    checkpoint.save(build(ModelConfig(**shape)), folder)
    (folder / "shape.json").write_text(json.dumps(shape))


def memory_rate(threads: int | None) -> float:
    """Bytes a second that a matrix-vector product of 512 MB in float32 reads: the best of ten."""
    import torch

    if threads:
        torch.set_num_threads(threads)
    matrix, vector = torch.ones(1 << 15, 1 << 12), torch.ones(1 << 12)
    best = float("inf")
    for _ in range(10):
        begin = time.perf_counter()
        torch.mv(matrix, vector)
        best = min(best, time.perf_counter() - begin)
    return matrix.nbytes / best


def weights_per_token(shape: dict[str, Any], dtype: str) -> int:
    """Bytes of matrices that one token goes through: all but the embeddings' rows, the output included."""
    from llmcli import count

    counted = count(shape)
    learned = shape["max_position_embeddings"] * shape["embed_dim"] if shape["family"] == "gpt2" else 0
    unread = 0 if shape.get("tie_word_embeddings") else shape["vocab_size"] * shape["embed_dim"]
    return (counted.total - learned - unread) * (4 if dtype == "float32" else 2)


def measure(arguments: argparse.Namespace, model: str, dtype: str, folder: Path, rate: float) -> list[dict[str, Any]]:
    """A row for each contestant."""
    options = [str(folder), dtype, str(arguments.threads or 0)]
    processes = {
        name: Process(sys.executable if name == "llmcli" else arguments.peers_python, [name, *options])
        for name in arguments.only
    }
    for process in processes.values():
        process.ask(arguments.prompt, 4)
        process.ask(arguments.prompt, arguments.tokens)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in processes}
    noisy = dict.fromkeys(processes, False)
    for _ in range(arguments.rounds):
        for name, process in processes.items():
            for attempt in range(arguments.retries + 1):
                first, noise = process.ask(arguments.prompt, 1, arguments.clock)
                whole, more = process.ask(arguments.prompt, 1 + arguments.tokens, arguments.clock)
                if max(noise, more) <= 0.1:
                    break
                noisy[name] |= attempt == arguments.retries
            times[name].append((arguments.prompt / first, arguments.tokens / max(1e-9, whole - first)))
    for process in processes.values():
        process.close()
    shape = SHAPES[model]
    bound = rate / weights_per_token(shape, dtype)
    rows = []
    for name, values in times.items():
        prefill, decode = (statistics.median(column) for column in zip(*values, strict=True))
        rows.append({"model": model, "dtype": dtype, "who": name, "prefill": prefill, "decode": decode})
        rows[-1] |= {"bound": bound, "noisy": noisy[name]}
    for row in rows:
        peer = next((other["decode"] for other in rows if other["who"] == "transformers"), None)
        row["ratio"] = row["decode"] / peer if peer else None
    return rows


def show(row: dict[str, Any]) -> None:
    ratio = f"{row['ratio']:.2f} x" if row["ratio"] else ""
    target = TARGETS.get((row["model"], row["dtype"])) if row["who"] == "llmcli" else None
    print(
        f"{row['model']:5} {row['dtype']:9} {row['who']:13} {row['prefill']:>10,.0f} {row['decode']:>10,.1f}"
        f" {ratio:>8} {row['decode'] / row['bound']:>8.0%} {'~' if row['noisy'] else ' '}"
        f" {f'target {target} x' if target else ''}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers-python", default=sys.executable, help="a Python with transformers and litgpt")
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    parser.add_argument("--only", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--threads", type=int, help="for everybody; default: each contestant's own choice")
    parser.add_argument("--retries", type=int, default=3)
    parser.add_argument(
        "--clock", choices=("wall", "cpu"), default="wall", help="cpu: for busy machines, with --threads 1"
    )
    parser.add_argument("--stories", type=Path, help="the folder of stories260K, in place of random weights")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--contestant", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.contestant:
        name, folder, dtype, threads = arguments.contestant
        contestant(name, Path(folder), dtype, int(threads) or None, compiled=False)
        return
    rate = memory_rate(arguments.threads)
    print(f"memory: {rate / 1e9:.1f} GB/s; {arguments.prompt} tokens of prompt, {arguments.tokens} new ones")
    print("model dtype     who              prefill     decode  of peer of bound (tokens/s)")
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for model in arguments.models:
            folder = Path(scratch, model)
            write_model(SHAPES[model], folder)
            if model == "tiny" and arguments.stories:
                for file in ("config.json", "model.safetensors"):
                    (folder / file).write_bytes((arguments.stories / file).read_bytes())
            for dtype in arguments.dtypes:
                found = measure(arguments, model, dtype, folder, rate)
                for row in found:
                    show(row)
                rows += found
            for file in folder.iterdir():
                file.unlink()
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
