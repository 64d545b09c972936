#!/usr/bin/env python
"""What tying the output to the embeddings costs and saves (Press and Wolf, 2017, arXiv:1608.05859), in some minutes.

    .venv/bin/python scripts/experiment_tying.py [--text FILE] [--seeds 1 2 3] [--steps 1000] [--vocabulary 2048]
        [--dim 128] [--json FILE]

Small LLaMAs on the same text, batches and learning rate: untied and tied of the same width, the tied one also as wide
as the untied one's parameters allow, and the tied ones with embeddings scaled by √d going in (Vaswani et al., 2017;
Gemma) or not. Printed are parameters, the loss on all held-out text (mean and standard deviation over the seeds) and
its perplexity. Without --text the corpus that comes with Python is learned.
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

LAYERS, HEADS, CONTEXT, BATCH = 2, 4, 64, 16


def sizes(vocabulary: int, dim: int, tied: bool, scaled: bool = False) -> dict[str, Any]:
    """A model of the experiment in the words of a config."""
    return {
        "family": "llama",
        "vocab_size": vocabulary,
        "embed_dim": dim,
        "num_layers": LAYERS,
        "num_heads": HEADS,
        "hidden_dim": round(dim * 8 / 3),
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": tied,
        "scale_embeddings": scaled,
    }


def parameters(model: dict[str, Any]) -> int:
    from llmcli import count

    return count(model).total


def as_wide_as(total: int, vocabulary: int) -> int:
    """The width at which a tied model comes closest to so many parameters."""
    widths = range(2 * HEADS, 4096, 2 * HEADS)  # heads of an even size, for RoPE
    return min(widths, key=lambda dim: abs(parameters(sizes(vocabulary, dim, tied=True)) - total))


def variants(vocabulary: int, dim: int) -> dict[str, dict[str, Any]]:
    """Every model of the table by its name."""
    untied = sizes(vocabulary, dim, tied=False)
    wide = as_wide_as(parameters(untied), vocabulary)
    return {
        "untied": untied,
        "tied, same width": sizes(vocabulary, dim, tied=True),
        "tied, same width, √d": sizes(vocabulary, dim, tied=True, scaled=True),
        "tied, same parameters": sizes(vocabulary, wide, tied=True),
        "tied, same parameters, √d": sizes(vocabulary, wide, tied=True, scaled=True),
    }


def train_one(model: dict[str, Any], text: Path | None, steps: int, seed: int) -> float:
    """The loss on all held-out text after the last step, in nats a token."""
    from llmcli.config import DataConfig, ModelConfig, Recipe, TrainConfig
    from llmcli.train import Eval, train

    recipe = Recipe(
        model=ModelConfig(**model),
        data=DataConfig(path=str(text) if text else None, tokenizer="bpe"),
        train=TrainConfig(
            batch_size=BATCH,
            max_steps=steps,
            lr=2e-3,
            min_lr=2e-4,
            warmup_steps=min(100, steps // 10),
            eval_every=10**7,  # after the last step only
            eval_batches=0,
            log_every=10**7,
            seed=seed,
            precision="fp32",
            compile="off",
        ),
    )
    with tempfile.TemporaryDirectory() as folder:
        losses = [event.val_loss for event in train(recipe, Path(folder)) if isinstance(event, Eval)]
    return losses[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True
    ).stdout.strip()
    print(
        f"commit {commit or 'unknown'}, seeds {' '.join(map(str, arguments.seeds))}, {arguments.steps} steps of"
        f" {BATCH * CONTEXT:,} tokens, vocabulary {arguments.vocabulary:,}, {LAYERS} layers"
    )
    print(f"{'':26} {'d':>4} {'parameters':>11} {'loss':>16} {'perplexity':>11} {'to untied':>10} {'seconds':>8}")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        for name, model in variants(arguments.vocabulary, arguments.dim).items():
            began = time.perf_counter()
            losses = []
            for seed in arguments.seeds:
                losses.append(train_one(model, arguments.text, arguments.steps, seed))
                print(f"{name}, seed {seed}: {losses[-1]:.4f}", file=sys.stderr)
            mean, spread = statistics.mean(losses), statistics.stdev(losses) if len(losses) > 1 else math.nan
            row = {"who": name, "model": model, "parameters": parameters(model), "losses": losses, "loss": mean}
            rows.append(row | {"perplexity": math.exp(mean), "commit": commit})
            print(
                f"{name:26} {model['embed_dim']:>4} {row['parameters']:>11,} {mean:>8.4f} ± {spread:.4f}"
                f" {math.exp(mean):>11.2f} {mean - rows[0]['loss']:>+10.4f} {time.perf_counter() - began:>8.0f}",
                flush=True,
            )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2, ensure_ascii=False))


if __name__ == "__main__":
    main()
