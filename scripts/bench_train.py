#!/usr/bin/env python
"""Training against nanoGPT's loop, transformers and litgpt in one run: tokens a second, share of the peak, memory.

    .venv/bin/python scripts/bench_train.py [--peers-python PYTHON] [--shapes a b c] [--only WHO ...] [--rounds 5]
        [--seconds 4] [--threads N] [--retries 3] [--json FILE]
    .venv/bin/python scripts/bench_train.py --whole-run TEXT [--rounds 3] [--threads N]

A step is all that training does: batch, forward, backward, clipping, AdamW. Shapes: `a` nanoGPT's Shakespeare model for
CPUs, `b` a LLaMA of 8.6 M parameters, `c` one whose vocabulary of 50,257 is most of it (tied). Each contestant is a
process that sets itself up, compiles, and then takes its turn in every round; medians are compared. Names may be
followed by `:compile` and `:bf16`; `llmcli` chooses by itself, `llmcli:fp32`, `llmcli:bf16` and `:compile` are told.
A round in which other processes took more than a tenth of a core is run again, up to --retries times; a row with such
rounds is marked with ~. `per CPU second` is what such rounds disturb least. The peak is the better of float32 and
bfloat16 in square matrix products, measured in turn with the others.

--whole-run trains shape a for nanoGPT's 2,000 steps from a cold process to the last evaluation, the compiler's cache
emptied before, and then compares the loss on all of the validation text, outside of the time; so it does with the
recipe shakespeare-llama, which is to reach a lower loss in nanoGPT's time.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

SHAPES: dict[str, dict[str, Any]] = {
    "a": {
        "family": "gpt2",
        "vocab_size": 65,
        "embed_dim": 128,
        "num_layers": 4,
        "num_heads": 4,
        "max_position_embeddings": 64,
        "bias": False,
        "tie_word_embeddings": True,
    },
    "b": {
        "family": "llama",
        "vocab_size": 8192,
        "embed_dim": 256,
        "num_layers": 6,
        "num_heads": 8,
        "num_kv_heads": 4,
        "hidden_dim": 688,
        "max_position_embeddings": 256,
    },
    "c": {
        "family": "llama",
        "vocab_size": 50257,
        "embed_dim": 256,
        "num_layers": 4,
        "num_heads": 8,
        "hidden_dim": 1024,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
    },
}
BATCHES = {"a": 12, "b": 16, "c": 8}
PEERS = ("transformers", "transformers:compile", "transformers:compile:bf16", "litgpt:compile", "litgpt:compile:bf16")
CONTESTANTS = {"a": ("llmcli", "nanogpt", "nanogpt:compile", *PEERS), "b": ("llmcli", *PEERS), "c": ("llmcli", *PEERS)}
BASELINE = {"a": "nanogpt", "b": "transformers", "c": "transformers"}
TARGETS = {"a": (1.5, None), "b": (3.0, 1.6), "c": (3.3, 1.7)}
"""Times the baseline, which is eager and float32, and times the best of the others."""

Steps = Iterator[float]
"""Each `next` trains one step (or a number of them, for llmcli) and gives its loss."""


# --- the text


def write_text(folder: Path, vocab_size: int, tokens: int = 300_000) -> None:
    """Random tokens, common ones as much more common as in language, for llmcli as a text of one character each."""
    random = np.random.default_rng(0)
    weights = 1 / np.arange(1, vocab_size + 1)
    ids = random.choice(vocab_size, tokens, p=weights / weights.sum())
    ids[:vocab_size] = np.arange(vocab_size)  # so that the tokenizer has them all
    ids.astype(np.uint16).tofile(folder / "train.bin")
    first = 0x10000  # a plane of characters without surrogates, spaces or newlines to normalise
    (folder / "text.txt").write_text("".join(map(chr, (ids + first).tolist())), encoding="utf-8")


def batches(folder: Path, batch: int, context: int) -> Iterator[tuple[Any, Any]]:
    """Random windows of the tokens, drawn the way such loops do: (B, T) inputs and targets."""
    import torch

    tokens = np.memmap(folder / "train.bin", dtype=np.uint16, mode="r")
    while True:
        begins = torch.randint(len(tokens) - context, (batch,)).tolist()
        rows = torch.from_numpy(np.stack([tokens[b : b + context + 1] for b in begins]).astype(np.int64))
        yield rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


# --- the contestants


def by_llmcli(shape: str, options: list[str], folder: Path, every: int) -> Steps:
    """`llmcli.train.train` itself: each `next` is `every` steps."""
    from llmcli.config import DataConfig, ModelConfig, Recipe, TrainConfig
    from llmcli.train import Step, train

    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    chosen = {"precision": next((o for o in options if o in ("fp32", "bf16")), "auto")}
    chosen["compile"] = next((o for o in options if o in ("on", "off")), "on" if "compile" in options else "auto")
    many = 10**7
    recipe = Recipe(
        model=ModelConfig(**SHAPES[shape]),
        data=DataConfig(path=str(folder / "text.txt"), tokenizer="char"),
        train=TrainConfig(
            batch_size=BATCHES[shape],
            max_steps=many,
            eval_every=many,
            log_every=every,
            beta2=0.99,
            **chosen,  # type: ignore[arg-type]
        ),
    )
    for event in train(recipe, folder / f"out-{os.getpid()}"):
        if isinstance(event, Step) and event.step % every == 0:
            yield event.loss
        elif not isinstance(event, Step):
            print(event, file=sys.stderr)


def nanogpt(sizes: dict[str, Any]) -> Any:
    """nanoGPT's architecture: fused q, k, v, learned positions, LayerNorm without bias, exact GELU, tied output."""
    import torch
    import torch.nn.functional as F
    from torch import Tensor, nn

    d, heads, depth = sizes["embed_dim"], sizes["num_heads"], sizes["num_layers"]

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList(nn.LayerNorm(d, bias=False) for _ in range(2))
            self.qkv, self.mix = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
            self.up, self.down = nn.Linear(d, 4 * d, bias=False), nn.Linear(4 * d, d, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            batch, length, _ = x.shape
            parts = self.qkv(self.norms[0](x)).split(d, dim=2)
            q, k, v = (part.view(batch, length, heads, d // heads).transpose(1, 2) for part in parts)
            seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.mix(seen.transpose(1, 2).contiguous().view(batch, length, d))
            return x + self.down(F.gelu(self.up(self.norms[1](x))))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(sizes["vocab_size"], d)
            self.positions = nn.Embedding(sizes["max_position_embeddings"], d)
            self.layers = nn.ModuleList(Layer() for _ in range(depth))
            self.norm = nn.LayerNorm(d, bias=False)
            for name, weight in self.named_parameters():
                if weight.dim() == 2:
                    last = name.endswith(("mix.weight", "down.weight"))
                    nn.init.normal_(weight, std=0.02 / math.sqrt(2 * depth) if last else 0.02)

        def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
            x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
            for layer in self.layers:
                x = layer(x)
            logits = F.linear(self.norm(x), self.tokens.weight)
            return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1))

    return Model()


def transformers_model(sizes: dict[str, Any]) -> Any:
    """The model of transformers with the same sizes."""
    import transformers

    common = {"vocab_size": sizes["vocab_size"], "tie_word_embeddings": sizes.get("tie_word_embeddings", False)}
    if sizes["family"] == "gpt2":
        config: Any = transformers.GPT2Config(
            n_embd=sizes["embed_dim"],
            n_layer=sizes["num_layers"],
            n_head=sizes["num_heads"],
            n_positions=sizes["max_position_embeddings"],
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            **common,
        )
    else:
        config = transformers.LlamaConfig(
            hidden_size=sizes["embed_dim"],
            num_hidden_layers=sizes["num_layers"],
            num_attention_heads=sizes["num_heads"],
            num_key_value_heads=sizes.get("num_kv_heads", sizes["num_heads"]),
            intermediate_size=sizes["hidden_dim"],
            max_position_embeddings=sizes["max_position_embeddings"],
            **common,
        )
    config.use_cache = False
    return transformers.AutoModelForCausalLM.from_config(config)


def litgpt_model(sizes: dict[str, Any]) -> Any:
    """litgpt's model with the same sizes. It has no learned positions: shape a turns its heads instead."""
    from litgpt import GPT, Config

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
        bias=False,
        norm_class_name="RMSNorm" if llama else "LayerNorm",
        mlp_class_name="LLaMAMLP" if llama else "GptNeoxMLP",
    )
    model = GPT(config)
    if sizes.get("tie_word_embeddings"):
        model.lm_head.weight = model.transformer.wte.weight
    return model


def by_peer(who: str, shape: str, options: list[str], folder: Path) -> Steps:
    """A peer's model in the loop its users write: AdamW (fused, except where nanoGPT would not on a CPU), clipping."""
    import torch

    sizes = SHAPES[shape]
    model = {"nanogpt": nanogpt, "transformers": transformers_model, "litgpt": litgpt_model}[who](sizes)
    model.train()
    fused = who != "nanogpt"
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99), fused=fused)
    compute = torch.compile(model) if "compile" in options else model

    if who == "litgpt":
        from litgpt.utils import chunked_cross_entropy

    for inputs, targets in batches(folder, BATCHES[shape], sizes["max_position_embeddings"]):
        with torch.autocast("cpu", torch.bfloat16, enabled="bf16" in options):
            if who == "nanogpt":
                loss = compute(inputs, targets)
            elif who == "transformers":
                loss = compute(input_ids=inputs, labels=inputs).loss
            else:
                loss = chunked_cross_entropy(compute(inputs), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield loss.item()


def peaks(sizes: tuple[int, ...] = (512, 768, 1024)) -> Steps:
    """Operations a second of the best matrix product, float32 or bfloat16."""
    import torch

    pairs = [(torch.ones(n, n, dtype=t), 2 * n**3) for n in sizes for t in (torch.float32, torch.bfloat16)]
    while True:
        best = 0.0
        for matrix, operations in pairs:
            for _ in range(5):
                begin = time.perf_counter()
                torch.mm(matrix, matrix)
                best = max(best, operations / (time.perf_counter() - begin))
        yield best


def contestant(name: str, shape: str, folder: Path, threads: int, seconds: float) -> None:
    """A process: warm up, then answer each line of stdin with [steps, seconds, CPU seconds, value, peak megabytes]."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries may print what they like
    import torch

    if threads:
        torch.set_num_threads(threads)
    who, *options = name.split(":")
    every = 1
    if who == "peak":
        steps = peaks()
    elif who == "llmcli":
        every = {"a": 50, "b": 4, "c": 4}[shape]
        steps = by_llmcli(shape, options, folder, every)
    else:
        steps = by_peer(who, shape, options, folder)
    for _ in range(3):
        begin = time.perf_counter()
        value = next(steps)
        each = time.perf_counter() - begin
    count = max(1, round(seconds / each))
    for _ in sys.stdin:
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(count):
            value = next(steps)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        megabytes = int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) / 1000
        print(json.dumps([count * every, wall, cpu, value, megabytes]), file=answers, flush=True)


# --- the race


class Process:
    """A contestant's process."""

    def __init__(self, python: str, arguments: list[str], log: Path) -> None:
        command = [python, __file__, "--contestant", *arguments]
        self._log = log
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            )

    def ask(self) -> tuple[list[float], float]:
        """What the contestant answers, and how much of a core other processes took meanwhile."""
        assert self._process.stdin and self._process.stdout
        before = busy_seconds()
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise ChildProcessError("\n".join(self._log.read_text().splitlines()[-3:]))
        values = json.loads(answer)
        return values, max(0.0, busy_seconds() - before - values[2]) / values[1]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def busy_seconds() -> float:
    """Seconds for which the machine's cores have worked."""
    user, nice, system = map(int, Path("/proc/stat").read_text().split()[1:4])
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")


def race(arguments: argparse.Namespace, shape: str, folder: Path) -> list[dict[str, Any]]:
    """A row for each contestant."""
    from llmcli import costs, families
    from llmcli.config import ModelConfig

    processes, rounds = {}, {}
    options = [shape, str(folder), str(arguments.threads or 0), str(arguments.seconds)]
    for number, name in enumerate(("peak", *(arguments.only or CONTESTANTS[shape]))):
        python = sys.executable if name.partition(":")[0] in ("peak", "llmcli", "nanogpt") else arguments.peers_python
        processes[name] = Process(python, [name, *options], folder / f"{number}.log")
        try:
            processes[name].ask()  # one after the other: setting up and compiling take all cores
            rounds[name] = []
        except ChildProcessError as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
            processes.pop(name).close()
    noisy = dict.fromkeys(processes, False)
    for _ in range(arguments.rounds):
        for name, process in processes.items():
            for attempt in range(arguments.retries + 1):
                values, noise = process.ask()
                if noise <= 0.1:
                    break
                noisy[name] |= attempt == arguments.retries
            rounds[name].append(values)
    for process in processes.values():
        process.close()

    sizes = SHAPES[shape]
    context = sizes["max_position_embeddings"]
    operations = costs.flops(families.complete(ModelConfig(**sizes)), context=context).training
    peak = max(value for _, _, _, value, _ in rounds.pop("peak"))
    rows: list[dict[str, Any]] = []
    for name, values in rounds.items():
        tokens = BATCHES[shape] * context
        speed = statistics.median(steps * tokens / wall for steps, wall, *_ in values)
        cpu = statistics.median(steps * tokens / cpu for steps, _, cpu, *_ in values)
        row = {"shape": shape, "who": name, "tokens_per_second": speed, "tokens_per_cpu_second": cpu}
        row |= {"share_of_peak": speed * operations / peak, "megabytes": max(v[4] for v in values)}
        rows.append(row | {"noisy": noisy[name], "peak": peak})
    by_name = {row["who"]: row for row in rows}
    baseline = by_name.get(BASELINE[shape])
    others = [row for row in rows if not row["who"].startswith("llmcli")]
    best = max(others, key=lambda row: row["tokens_per_second"], default=None)
    for row in rows:
        for label, other in (("baseline", baseline), ("best", best)):
            row[f"of_{label}"] = row["tokens_per_second"] / other["tokens_per_second"] if other else None
        row["memory_of_baseline"] = row["megabytes"] / baseline["megabytes"] if baseline else None
    return rows


def show(row: dict[str, Any]) -> None:
    def ratio(key: str) -> str:
        return f"{row[key]:.2f} x" if row[key] is not None else ""

    wanted = zip(("baseline", "best peer"), TARGETS[row["shape"]], strict=True)
    target = ", ".join(f"{w} x {what}" for what, w in wanted if w) if row["who"] == "llmcli" else ""
    print(
        f"{row['shape']}  {row['who']:27} {row['tokens_per_second']:>9,.0f} {row['tokens_per_cpu_second']:>9,.0f}"
        f" {ratio('of_baseline'):>9} {ratio('of_best'):>8} {row['share_of_peak']:>7.0%} {row['megabytes']:>8,.0f}"
        f" {ratio('memory_of_baseline'):>7} {'~' if row['noisy'] else ' '} {'target ' + target if target else ''}",
        flush=True,
    )


# --- a whole run


def nanogpt_run(text: Path, out: Path) -> None:
    """nanoGPT's run of 2,000 steps on a CPU, written anew: every 250 steps the loss of 20 batches of each split."""
    import torch

    torch.manual_seed(1337)
    characters = text.read_text(encoding="utf-8")
    known = {character: id for id, character in enumerate(sorted(set(characters)))}
    ids = np.array([known[character] for character in characters], dtype=np.uint16)
    cut = int(0.9 * len(ids))
    sources = []
    for name, part in (("train", ids[:cut]), ("validation", ids[cut:])):
        (out / name).mkdir(parents=True, exist_ok=True)
        part.tofile(out / name / "train.bin")
        sources.append(batches(out / name, 12, 64))
    model = nanogpt(SHAPES["a"])
    decayed = [{"params": [p for p in model.parameters() if (p.dim() >= 2) == big]} for big in (True, False)]
    decayed[0]["weight_decay"], decayed[1]["weight_decay"] = 0.1, 0.0  # type: ignore[assignment]
    optimizer = torch.optim.AdamW(decayed, lr=1e-3, betas=(0.9, 0.99))
    for step in range(2001):
        rate = 1e-3 * (step + 1) / 101
        if step >= 100:
            rate = 1e-4 + 0.5 * (1 + math.cos(math.pi * (step - 100) / 1900)) * 9e-4
        for group in optimizer.param_groups:
            group["lr"] = rate
        if step % 250 == 0:
            model.eval()
            with torch.no_grad():
                means = [sum(model(*next(source)).item() for _ in range(20)) / 20 for source in sources]
            print(f"step {step}: train {means[0]:.4f}, validation {means[1]:.4f}", file=sys.stderr)
            model.train()
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, out / "ckpt.pt")
        if step == 2000:
            break
        loss = model(*next(sources[0]))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()


def loss_of_all(loss: Callable[[Any, Any], Any], text: Path, context: int = 64) -> float:
    """Nats for each character of the last tenth of the text, in windows one after the other."""
    import torch

    characters = text.read_text(encoding="utf-8")
    known = {character: id for id, character in enumerate(sorted(set(characters)))}
    ids = torch.tensor([known[character] for character in characters[int(0.9 * len(characters)) :]])
    count = (len(ids) - 1) // context
    inputs, targets = (ids[i : i + count * context].view(count, context) for i in (0, 1))
    with torch.no_grad():
        return sum(loss(x, y).item() * len(x) for x, y in zip(inputs.split(64), targets.split(64), strict=True)) / count


def whole_run(arguments: argparse.Namespace) -> None:
    """Seconds and final validation loss of nanoGPT's run and of two recipes, by turns."""
    import torch
    import torch.nn.functional as F

    from llmcli import load_model

    text, results = arguments.whole_run.resolve(), {"nanogpt": [], "shakespeare-char": [], "shakespeare-llama": []}
    print("who                seconds  CPU seconds  validation loss", flush=True)
    for number in range(arguments.rounds):
        for who in results:
            with tempfile.TemporaryDirectory() as scratch:
                out = Path(scratch, "out")
                environment = dict(os.environ, XDG_CACHE_HOME=scratch, TORCHINDUCTOR_CACHE_DIR=f"{scratch}/inductor")
                if arguments.threads:
                    environment["OMP_NUM_THREADS"] = str(arguments.threads)
                command = [sys.executable, __file__, "--nanogpt-run", str(text), str(out)]
                if who != "nanogpt":
                    command = [sys.executable, "-m", "llmcli", "train", who, "--out", str(out)]
                    command += ["--set", f"data.path={json.dumps(str(text))}", "--set", f"train.seed={1337 + number}"]
                begin, before = time.perf_counter(), os.times()
                subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
                seconds, after = time.perf_counter() - begin, os.times()
                cpu = after.children_user - before.children_user + after.children_system - before.children_system
                if who != "nanogpt":
                    ours = load_model(out / "last")
                    value = loss_of_all(lambda x, y, m=ours: F.cross_entropy(m(x).flatten(0, 1), y.flatten()), text)
                else:
                    theirs = nanogpt(SHAPES["a"])
                    theirs.load_state_dict(torch.load(out / "ckpt.pt", weights_only=True)["model"])
                    value = loss_of_all(theirs, text)
            results[who].append((seconds, cpu, value))
            print(f"{who:17} {seconds:>8.1f} {cpu:>12.1f} {value:>16.4f}", flush=True)
    medians = {who: [statistics.median(column) for column in zip(*rows, strict=True)] for who, rows in results.items()}
    theirs = medians.pop("nanogpt")
    for who, ours in medians.items():
        seconds, cpu = (a / b for a, b in zip(ours[:2], theirs[:2], strict=True))
        print(
            f"{who} takes {seconds:.2f} of nanoGPT's time{' (target 0.75)' if who == 'shakespeare-char' else ''},"
            f" {cpu:.2f} of its CPU time; loss {ours[2]:.4f} against {theirs[2]:.4f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers-python", default=sys.executable, help="a Python with transformers and litgpt")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--only", nargs="+", metavar="WHO", help="contestants; default: all of the shape's")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="about how long a round is")
    parser.add_argument("--threads", type=int, help="for everybody; default: torch's own choice")
    parser.add_argument("--retries", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--whole-run", type=Path, metavar="TEXT", help="Tiny Shakespeare")
    parser.add_argument("--contestant", nargs=5, help=argparse.SUPPRESS)
    parser.add_argument("--nanogpt-run", nargs=2, type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.contestant:
        name, shape, folder, threads, seconds = arguments.contestant
        contestant(name, shape, Path(folder), int(threads), float(seconds))
    elif arguments.nanogpt_run:
        nanogpt_run(*arguments.nanogpt_run)
    elif arguments.whole_run:
        whole_run(arguments)
    else:
        rows: list[dict[str, Any]] = []
        print(
            "   who                          tokens/s   per CPU    of base  of best of peak       MB of base",
            flush=True,
        )
        for shape in arguments.shapes:
            with tempfile.TemporaryDirectory() as scratch:
                write_text(Path(scratch), SHAPES[shape]["vocab_size"])
                found = race(arguments, shape, Path(scratch))
            for row in found:
                show(row)
            if found:
                print(f"   best matrix product: {found[0]['peak'] / 1e9:,.0f} GFLOP/s", flush=True)
            rows += found
        if arguments.json:
            arguments.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
