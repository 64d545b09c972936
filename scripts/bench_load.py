#!/usr/bin/env python
"""Loading and looking, against transformers in the same run: time to a first logit, and peak memory.

    .venv/bin/python scripts/bench_load.py [--rounds 5] [--json FILE] [--folder DIR]

GPT-2's 124 M parameters (random values), in float32 and bfloat16, in one file and in four shards. Each contestant is a
new process; contestants take turns in every round, and medians are compared. "process" is the wall time of the whole
process, "inside" begins when the libraries are imported. A run in which other processes took more than a tenth of a
core is repeated, up to --retries times; what could not be run undisturbed is marked with ~, and its processor time says
more than its wall time. Then a look without loading (`inspect`, `load-hf --check`, `count-params`) at that model and at
checkpoints of 13 and 93 GB, which are holes in the disk.
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
from pathlib import Path
from typing import Any

import numpy as np

from llmcli import families, hf_config, targets, tensors

TARGET_LOAD, TARGET_LOOK, TARGET_MEMORY = 0.4, 0.25, 45

REPORT = """
import json, time
def report(begin, logits=None):
    now = time.perf_counter()
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    megabytes = {key: int(status[key].split()[0]) / 1000 for key in ("VmHWM", "RssAnon")}
    value = None if logits is None else [float(x) for x in logits[0, -1, :5].float()]
    print(json.dumps([now - begin, megabytes["VmHWM"], megabytes["RssAnon"], value]))
"""
LOOK = """
import sys
from llmcli import cli
code = cli.run(sys.argv[1:])
peak = next(int(line.split()[1]) / 1000 for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(f"\\n{peak}")
sys.exit(code)
"""
LOADERS = {
    "transformers": """
import torch, transformers, logging
from transformers import AutoModelForCausalLM
from transformers.models.gpt2 import modeling_gpt2
transformers.logging.set_verbosity_error(); transformers.utils.logging.disable_progress_bar()
begin = time.perf_counter()
model = AutoModelForCausalLM.from_pretrained(PATH, dtype="auto").eval()
with torch.no_grad():
    logits = model(torch.tensor([[5, 17, 300, 4]])).logits
report(begin, logits)
""",
    "llmcli": """
import torch, llmcli
from llmcli import checkpoint, targets
begin = time.perf_counter()
model = llmcli.load_model(PATH)
with torch.no_grad():
    logits = model(torch.tensor([[5, 17, 300, 4]]))
report(begin, logits)
""",
    "safetensors.load_file": """
import torch
from pathlib import Path
from safetensors.torch import load_file
begin = time.perf_counter()
weights = [load_file(path) for path in sorted(Path(PATH).glob("*.safetensors"))]
report(begin)
""",
    "import torch": "import torch\nreport(time.perf_counter())\n",
}


def make(folder: Path, preset: str, dtype: str, shards: int, holes: bool = False) -> Path:
    """A preset's checkpoint with random values (or, as `holes`, with none)."""
    folder.mkdir(parents=True)
    config = targets.read_config(preset)
    names = {"F32": "float32", "BF16": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(hf_config.write(config, names[dtype])))
    shapes = {tensor.hf_name: tensor.hf_shape for tensor in families.get(config.family).tensors(config)}
    generator = np.random.default_rng(0)
    every, weight_map = list(shapes.items()), {}
    for n in range(shards):
        part = every[n * len(every) // shards : (n + 1) * len(every) // shards]
        name = f"model-{n + 1:05d}-of-{shards:05d}.safetensors" if shards > 1 else "model.safetensors"
        header = tensors.write_header((tensor, dtype, shape) for tensor, shape in part)
        with (folder / name).open("wb") as file:
            file.write(header)
            if holes:
                size = sum(math.prod(s) * tensors.SIZES[dtype] for _, s in part)
                file.truncate(len(header) + size)
                # A head that differs from the embedding, as a trained one does in every row.
                file.seek(len(header) + size - math.prod(part[-1][1]) * tensors.SIZES[dtype])
                file.write(b"\x01" * 64)
            for tensor, shape in () if holes else part:
                values = generator.standard_normal(shape, dtype=np.float32) * np.float32(0.02)
                values += np.float32("ln_" in tensor and tensor.endswith("weight"))
                stored = values if dtype == "F32" else (values.view(np.uint32) >> 16).astype(np.uint16)
                file.write(stored.tobytes())
        weight_map |= {tensor: name for tensor, _ in part}
    if shards > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def busy() -> float:
    """Seconds that the machine's processors have worked so far."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    user, nice, system, _, _, irq, softirq, steal = map(int, fields[:8])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def run(command: list[str], environment: dict[str, str], retries: int) -> dict[str, Any]:
    """One process: wall and processor time, what it prints, and whether it was disturbed.

    Peak memory is for each process to report: what wait4 says of it begins with the memory of the one that started it.
    """
    for attempt in range(1 + retries):
        before, begin = busy(), time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)
        assert process.stdout
        out = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.perf_counter() - begin
        if status:
            raise SystemExit(f"{' '.join(command)[:200]}: failed")
        others = (busy() - before - usage.ru_utime - usage.ru_stime) / wall
        if others <= 0.1 or attempt == retries:
            break
        time.sleep(1)
    cpu = usage.ru_utime + usage.ru_stime
    return {"wall": wall, "cpu": cpu, "out": out, "disturbed": others > 0.1}


def median(runs: list[dict[str, Any]], key: str) -> float:
    return statistics.median(run[key] for run in runs)


def bench_loading(folder: Path, rounds: int, retries: int, environment: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Every loader on one checkpoint, taking turns."""
    code = {name: f"{REPORT}\nPATH = {str(folder)!r}\n{body}" for name, body in LOADERS.items()}
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in LOADERS}
    for n in range(rounds + 1):  # the first warms the page cache and the bytecode
        for name in LOADERS:
            found = run([sys.executable, "-c", code[name]], environment, retries if n else 0)
            inside, peak, anonymous, logits = json.loads(found["out"])
            if n:
                runs[name].append({**found, "inside": inside, "peak": peak, "anonymous": anonymous, "logits": logits})
    ours, theirs = (runs[name][0]["logits"] for name in ("llmcli", "transformers"))
    bfloat16 = "bf16" in folder.name
    assert np.allclose(ours, theirs, atol=0.05 if bfloat16 else 1e-4), (ours, theirs)
    return {
        name: {key: median(of, key) for key in ("wall", "cpu", "inside", "peak", "anonymous")}
        | {"disturbed": sum(run["disturbed"] for run in of)}
        for name, of in runs.items()
    }


def bench_looking(
    folders: dict[str, Path], rounds: int, retries: int, environment: dict[str, str]
) -> dict[str, dict[str, Any]]:
    """`inspect`, `load-hf --check` and `count-params` on each, taking turns."""
    commands: dict[str, list[str]] = {}
    for name, folder in folders.items():
        for words in (["inspect"], ["load-hf", "--check"], ["count-params"]):
            commands[f"{' '.join(words)}, {name}"] = [sys.executable, "-c", LOOK, *words, str(folder)]
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in commands}
    for n in range(rounds + 1):
        for name, command in commands.items():
            found = run(command, environment, retries if n else 0)
            if n:
                runs[name].append({**found, "peak": float(found["out"].split()[-1])})
    return {
        name: {key: median(of, key) for key in ("wall", "cpu", "peak")} | {"disturbed": sum(r["disturbed"] for r in of)}
        for name, of in runs.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Time loading and looking, against transformers.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--retries", type=int, default=3, help="how often a disturbed run is run again (default 3)")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.add_argument("--folder", type=Path, help="where the checkpoints are made (2 GB; default: a temporary one)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as root:
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
        environment |= {"PYTHONPYCACHEPREFIX": f"{root}/bytecode", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
        figures: dict[str, Any] = {"loading": {}, "looking": {}}
        for dtype, shards in (("F32", 1), ("F32", 4), ("BF16", 1), ("BF16", 4)):
            name = f"gpt2-{'fp32' if dtype == 'F32' else 'bf16'}-{'single' if shards == 1 else 'sharded'}"
            figures["loading"][name] = bench_loading(
                make(Path(root) / name, "gpt2", dtype, shards), arguments.rounds, arguments.retries, environment
            )
            show_loading(name, figures["loading"][name])
        folders = {
            "0.5 GB": Path(root) / "gpt2-fp32-single",
            "13 GB": make(Path(root) / "7b", "llama-7b", "BF16", 3, holes=True),
            "93 GB": make(Path(root) / "8x7b", "mixtral-8x7b", "BF16", 19, holes=True),
        }
        figures["looking"] = bench_looking(folders, arguments.rounds, arguments.retries, environment)
        show_looking(figures["looking"])
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


def show_loading(title: str, figures: dict[str, dict[str, Any]]) -> None:
    """One table a checkpoint; the ratio is to transformers' whole process."""
    heads = f"{'process s':>11}{'ratio':>7}{'cpu s':>7}{'inside s':>10}{'ratio':>7}{'peak MB':>9}{'anonymous':>11}"
    print(f"\n{title}\n{'':24}{heads}")
    theirs = figures["transformers"]
    for name, of in figures.items():
        mark = "~" if of["disturbed"] else ""
        print(
            f"{name + mark:24}{of['wall']:11.2f}{of['wall'] / theirs['wall']:7.2f}{of['cpu']:7.2f}{of['inside']:10.3f}"
            f"{of['inside'] / theirs['inside']:7.2f}{of['peak']:9.0f}{of['anonymous']:11.0f}"
        )
    ratio = figures["llmcli"]["wall"] / theirs["wall"]
    print(f"target: at most {TARGET_LOAD} of transformers' wall time; {'met' if ratio <= TARGET_LOAD else 'not met'}")


def show_looking(figures: dict[str, dict[str, Any]]) -> None:
    print(f"\nlooking without loading\n{'':32}{'process s':>11}{'cpu s':>7}{'peak MB':>9}")
    for name, of in figures.items():
        over = "" if of["wall"] <= TARGET_LOOK and of["peak"] <= TARGET_MEMORY else "over"
        mark = "~" if of["disturbed"] else ""
        print(f"{name + mark:32}{of['wall']:11.3f}{of['cpu']:7.3f}{of['peak']:9.1f}  {over}")
    print(f"target: at most {TARGET_LOOK} s and {TARGET_MEMORY} MB")


if __name__ == "__main__":
    main()
