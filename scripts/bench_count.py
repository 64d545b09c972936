#!/usr/bin/env python
"""Counting LLaMA 3.1 405B (405,853,388,800 parameters) from its config.json, against transformers and litgpt on meta.

    .venv/bin/python scripts/bench_count.py [--rounds 7] [--peers PYTHON]

Every contestant is a new process and they take turns in every round; medians of wall time, processor time and peak
memory of the whole process. `--peers` is the Python of another environment that has transformers and litgpt; one that
is not installed there is left out. A contestant that counts another number fails the run.
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

TOTAL = 405_853_388_800
TARGET_SECONDS, TARGET_MEGABYTES = 0.3, 45

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128_256,
    "hidden_size": 16_384,
    "intermediate_size": 53_248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
TRANSFORMERS = """
import sys, torch
from transformers import AutoConfig, AutoModelForCausalLM
with torch.device("meta"):
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(sys.argv[1]))
print(sum(parameter.numel() for parameter in model.parameters()))
"""
LITGPT = """
import torch
from litgpt import GPT, Config
with torch.device("meta"):
    model = GPT(Config.from_name("Llama-3.1-405B"))
print(sum(parameter.numel() for parameter in model.parameters()))
"""


def run(command: list[str]) -> tuple[float, float, float, str]:
    """(wall seconds, processor seconds, peak megabytes, stdout) of one process."""
    begin = time.perf_counter()
    read, write = os.pipe()
    actions = [(os.POSIX_SPAWN_DUP2, write, 1), (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0)]
    process = os.posix_spawn(command[0], command, os.environ, file_actions=actions)
    os.close(write)
    with os.fdopen(read) as stdout:
        said = stdout.read()
    _, status, usage = os.wait4(process, 0)
    if status:
        raise SystemExit(f"failed: {' '.join(command)[:200]}")
    return time.perf_counter() - begin, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1000, said


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--rounds", type=int, default=7)
    arguments.add_argument("--peers", default=sys.executable)
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(CONFIG))
        contestants = {
            "llmcli": [sys.executable, "-m", "llmcli", "count-params", str(path)],
            "llmcli --json": [sys.executable, "-m", "llmcli", "count-params", str(path), "--json"],
        }
        for name, program in (("transformers", TRANSFORMERS), ("litgpt", LITGPT)):
            there = subprocess.run([options.peers, "-c", f"import {name}"], capture_output=True).returncode == 0
            if there:
                contestants[name] = [options.peers, "-c", program, folder]
            else:
                print(f"{name}: not installed for {options.peers}, left out")
        measured: dict[str, list[tuple[float, float, float, str]]] = {name: [] for name in contestants}
        for _ in range(options.rounds):
            for name, command in contestants.items():
                measured[name].append(run(command))
                if f"{TOTAL}" not in measured[name][-1][3].replace(",", ""):
                    raise SystemExit(f"{name} does not count {TOTAL:,}")

    print(f"{'':14} {'wall s':>8} {'cpu s':>8} {'peak MB':>8} {'wall / llmcli':>14}")
    ours = statistics.median(wall for wall, *_ in measured["llmcli"])
    for name, rounds in measured.items():
        wall, cpu, peak = (statistics.median(each[n] for each in rounds) for n in range(3))
        print(f"{name:14} {wall:8.2f} {cpu:8.2f} {peak:8.1f} {wall / ours:14.1f}")
    peak = statistics.median(each[2] for each in measured["llmcli"])
    fits = ours <= TARGET_SECONDS and peak <= TARGET_MEGABYTES
    print(f"target: {TARGET_SECONDS} s and {TARGET_MEGABYTES} MB, {'met' if fits else 'not met'}")


if __name__ == "__main__":
    main()
