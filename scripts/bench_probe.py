#!/usr/bin/env python
"""The ten nearest rows of a large embedding, against gensim, faiss and torch in the same run.

    .venv/bin/python scripts/bench_probe.py [--rounds 5] [--rows 256000] [--width 2048] [--peers-python PYTHON]
                                            [--retries 3] [--later 8] [--only NAME ...] [--folder DIR] [--json FILE]

One bfloat16 matrix in a safetensors file, warm in the page cache. Each contestant is a new process that answers one
query and then several others: "first" is from the start of the process to its first answer, "later" the median of the
others. Contestants take turns in every round; medians are compared. A round in which other processes took more than
a tenth of a core is run again, up to --retries times; what could not be run undisturbed is marked with ~. Peak
anonymous memory comes from runs of their own, so that watching disturbs no clock. Every answer is checked against
float64 over all rows. Peers that are not installed are left out (gensim and faiss-cpu come from PyPI).
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

import numpy as np

from llmcli import tensors

TARGET_FIRST, TARGET_LATER, TARGET_MEMORY = 0.4, 60, 60
K = 10

# Every contestant defines `ask(id) -> [(id, cosine), ...]`; the query itself may be among the answers.
OURS = """
from pathlib import Path
from llmcli import dots, probe
from llmcli.matrix import find_matrix
{}
rows = probe.Rows(find_matrix(Path(FOLDER)))
def ask(id):
    return [(hit.id, hit.score) for hit in rows.nearest(rows.vectors([id]), K, exclude=[[id]])[0]]
"""
READ = """
import json, mmap
import numpy as np
file = open(FOLDER + "/model.safetensors", "rb")
length = int.from_bytes(file.read(8), "little")
shape = json.loads(file.read(length))[NAME]["shape"]
stored = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), "<u2", offset=8 + length).reshape(shape)
def widen(some):
    return (some.astype(np.uint32) << 16).view(np.float32)
"""
WIDEN_ALL = """
matrix = np.empty(shape, np.float32)
for start in range(0, len(stored), 4096):
    matrix[start:start + 4096] = widen(stored[start:start + 4096])
"""
CONTESTANTS = {
    "llmcli with simsimd": OURS.format("assert dots.Simd.fits(__import__('numpy').zeros((1, 2), 'u2'))"),
    "llmcli": OURS.format("dots.Simd.fits = staticmethod(lambda array: False)"),
    "numpy, chunks of 512": READ + """
norms = None
def ask(id):
    global norms
    query = widen(stored[id])
    scores, found = np.empty(len(stored), np.float32), []
    for start in range(0, len(stored), 512):
        block = widen(stored[start:start + 512])
        scores[start:start + 512] = block @ query
        if norms is None:
            found.append(np.linalg.norm(block, axis=1))
    if norms is None:
        norms = np.concatenate(found)
    scores /= norms * np.linalg.norm(query)
    top = np.argpartition(scores, -K - 1)[-K - 1:]
    return [(int(i), float(scores[i])) for i in top[np.argsort(-scores[top])]]
""",
    "torch, chunks of bf16": """
import torch
from safetensors import safe_open
matrix = safe_open(FOLDER + "/model.safetensors", "pt").get_tensor(NAME)
norms = torch.cat([part.float().norm(dim=1) for part in matrix.split(4096)])
def ask(id):
    query = matrix[id]
    scores = torch.cat([part @ query for part in matrix.split(4096)]).float() / (norms * norms[id])
    values, ids = scores.topk(K + 1)
    return list(zip(ids.tolist(), values.tolist()))
""",
    "torch": """
import torch
from safetensors.torch import load_file
matrix = torch.nn.functional.normalize(load_file(FOLDER + "/model.safetensors")[NAME].float())
def ask(id):
    values, ids = (matrix @ matrix[id]).topk(K + 1)
    return list(zip(ids.tolist(), values.tolist()))
""",
    "faiss": READ + WIDEN_ALL + """
import faiss
faiss.normalize_L2(matrix)
index = faiss.IndexFlatIP(shape[1])
index.add(matrix)
def ask(id):
    values, ids = index.search(matrix[id:id + 1], K + 1)
    return list(zip(ids[0].tolist(), values[0].tolist()))
""",
    "gensim": READ + WIDEN_ALL + """
from gensim.models import KeyedVectors
vectors = KeyedVectors(shape[1], count=0)
vectors.add_vectors([str(id) for id in range(shape[0])], matrix)
def ask(id):
    return [(int(word), score) for word, score in vectors.most_similar(str(id), topn=K)]
""",
}  # fmt: skip
RUN = """
import sys, time
for n, id in enumerate(IDS):
    begin = time.perf_counter()
    found = ask(id)
    took = time.perf_counter() - begin
    found = [pair for pair in found if pair[0] != id][:K]
    print(json.dumps([took, found]), flush=True)
"""
NEEDS = {"llmcli with simsimd": "simsimd", "faiss": "faiss", "gensim": "gensim", "torch": "torch"}


def make(folder: Path, rows: int, width: int) -> None:
    """N(0, 0.02) rows and a config.json and tokenizer beside them, so that the command has all it reads."""
    from llmcli import tokenizer

    generator = np.random.default_rng(0)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(tensors.write_header([("model.embed_tokens.weight", "BF16", (rows, width))]))
        for start in range(0, rows, 4096):
            values = generator.standard_normal((min(4096, rows - start), width), dtype=np.float32) * np.float32(0.02)
            file.write((values.view(np.uint32) >> 16).astype(np.uint16).tobytes())
    sizes = {"vocab_size": rows, "hidden_size": width, "num_hidden_layers": 1, "num_attention_heads": 8}
    table = {"model_type": "llama", "intermediate_size": 64, "tie_word_embeddings": True, **sizes}
    (folder / "config.json").write_text(json.dumps(table))
    tokenizer.bytes_tokenizer().save(folder)


def truth(folder: Path, ids: list[int]) -> dict[int, list[tuple[int, float]]]:
    """The answers by float64 over every row."""
    info = tensors.read_header(folder / "model.safetensors")["model.embed_tokens.weight"]
    array = tensors.read_array(info)
    queries = tensors.as_float32(array[ids], "BF16").astype(np.float64)
    queries /= np.linalg.norm(queries, axis=1, keepdims=True)
    scores = np.empty((len(ids), len(array)))
    for start in range(0, len(array), 1024):
        block = tensors.as_float32(array[start : start + 1024], "BF16").astype(np.float64)
        scores[:, start : start + 1024] = queries @ block.T / np.linalg.norm(block, axis=1)
    answers = {}
    for id, row in zip(ids, scores, strict=True):
        row[id] = -2
        answers[id] = [(int(i), float(row[i])) for i in np.argsort(-row, kind="stable")[:K]]
    return answers


def busy() -> float:
    """Seconds that the machine's processors have worked so far."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    user, nice, system, _, _, irq, softirq, steal = map(int, fields[:8])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def once(command: list[str], retries: int) -> dict[str, Any]:
    """One process: seconds to its first line, the times it reports, its answers, and whether it was disturbed."""
    for attempt in range(1 + retries):
        before, begin = busy(), time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert process.stdout
        lines = [process.stdout.readline()]
        first = time.perf_counter() - begin
        lines += process.stdout.readlines()
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.perf_counter() - begin
        if status:
            raise SystemExit(f"{command[0]}: failed")
        others = (busy() - before - usage.ru_utime - usage.ru_stime) / wall
        if others <= 0.1 or attempt == retries:
            break
        time.sleep(1)
    answers = [json.loads(line) for line in lines]
    return {"first": first, "later": [took for took, _ in answers[1:]], "answers": [found for _, found in answers],
            "disturbed": others > 0.1}  # fmt: skip


def command_once(arguments: list[str], retries: int) -> tuple[float, bool]:
    """The wall time of one whole run of our command, and whether it was disturbed."""
    for attempt in range(1 + retries):
        before, begin = busy(), time.perf_counter()
        process = subprocess.Popen([sys.executable, "-m", "llmcli", *arguments], stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.perf_counter() - begin
        if status:
            raise SystemExit("nearest-tokens: failed")
        others = (busy() - before - usage.ru_utime - usage.ru_stime) / wall
        if others <= 0.1 or attempt == retries:
            break
        time.sleep(1)
    return wall, others > 0.1


def memory(command: list[str]) -> float:
    """The peak anonymous memory of a process, in MB, looked at every two milliseconds."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    peak = 0
    while process.poll() is None:
        try:
            for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
                if line.startswith("RssAnon"):
                    peak = max(peak, int(line.split()[1]))
        except OSError:
            break
        time.sleep(0.002)
    process.wait()
    return peak * 1024 / 1e6


def has(python: str, module: str) -> bool:
    """Whether an interpreter can import a module, without importing it."""
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return subprocess.run([python, "-c", code]).returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the nearest rows of a large embedding, against peers.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=256_000)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--retries", type=int, default=3, help="how often a disturbed run is repeated")
    parser.add_argument("--later", type=int, default=8, help="further queries in a process")
    parser.add_argument("--only", nargs="+", choices=list(CONTESTANTS), help="these contestants alone")
    parser.add_argument("--peers-python", default=sys.executable, help="the interpreter that has gensim and faiss")
    parser.add_argument("--folder", type=Path, help="where the matrix is made (1 GB; default: a temporary place)")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as root:
        folder = Path(root)
        make(folder, arguments.rows, arguments.width)
        ids = [97 + 7 * n for n in range(1 + arguments.later)]
        right = truth(folder, ids)
        pythons = {
            name: sys.executable if name.startswith("llmcli") else arguments.peers_python for name in CONTESTANTS
        }
        asked_for = arguments.only or list(CONTESTANTS)
        there = [name for name in asked_for if name not in NEEDS or has(pythons[name], NEEDS[name])]
        head = f"import json\nFOLDER, NAME, K, IDS = {str(folder)!r}, 'model.embed_tokens.weight', {K}, {ids}\n"
        commands = {name: [pythons[name], "-c", head + CONTESTANTS[name] + RUN] for name in there}
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in there}
        whole: list[tuple[float, bool]] = []
        asked = ["nearest-tokens", str(folder), f"#{ids[0]}", "-k", str(K), "--all-rows", "--json"]
        for n in range(arguments.rounds + 1):  # the first warms the page cache and the bytecode
            for name, command in commands.items():
                found = once(command, arguments.retries)
                if n:
                    runs[name].append(found)
            timed = command_once(asked, arguments.retries)
            if n:
                whole.append(timed)
        figures = {}
        for name, of in runs.items():
            wrong = 0.0
            for id, found in zip(ids, of[0]["answers"], strict=True):
                scores = dict(right[id])
                wrong = max([wrong, *(abs(score - scores.get(row, 9)) for row, score in found)])
            figures[name] = {
                "first": statistics.median(run["first"] for run in of),
                "later": 1e3 * statistics.median(took for run in of for took in run["later"]),
                "anonymous": memory(commands[name]),
                "error": wrong,
                "disturbed": sum(run["disturbed"] for run in of),
            }
        figures["llmcli nearest-tokens"] = {
            "first": statistics.median(wall for wall, _ in whole),
            "later": None,
            "anonymous": memory([sys.executable, "-m", "llmcli", *asked]),
            "error": None,
            "disturbed": sum(disturbed for _, disturbed in whole),
        }
    show(figures, arguments.rows, arguments.width)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


def show(figures: dict[str, dict[str, Any]], rows: int, width: int) -> None:
    """One row a contestant; `error` is the largest distance of a score from float64's (over 2: a wrong row)."""
    print(
        f"\ntop {K} of {rows:,} x {width:,} bf16\n"
        f"{'':24}{'first s':>10}{'later ms':>10}{'anonymous MB':>14}{'error':>10}"
    )
    for name, of in figures.items():
        later = "–" if of["later"] is None else f"{of['later']:.0f}"
        error = "–" if of["error"] is None else "wrong row" if of["error"] > 2 else f"{of['error']:.1e}"
        mark = "~" if of["disturbed"] else ""
        print(f"{name + mark:24}{of['first']:10.2f}{later:>10}{of['anonymous']:14.0f}{error:>10}")
    print(f"target: first {TARGET_FIRST} s, later {TARGET_LATER} ms, anonymous memory {TARGET_MEMORY} MB, error 1e-6")


if __name__ == "__main__":
    main()
