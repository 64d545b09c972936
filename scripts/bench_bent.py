#!/usr/bin/env python
"""How many bent checkpoints load into a model that is wrong, in llmcli and in transformers.

Each is a tiny checkpoint bent in one of the ways that real ones are (tests/bent.py). A reader that neither refuses it
nor computes what the straight one computes has loaded a wrong model: the user notices by its output, or never.

Usage: scripts/bench_bent.py [--json]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import torch
import transformers
from bent import BENDS, Bend, Straight

from llmcli import checkpoint
from llmcli.errors import LlmcliError

TOLERANCE = 2e-4
OUTCOMES = ("right", "refused", "said", "WRONG")


def by_llmcli(folder: Path, bend: Bend, straight: Straight) -> tuple[str, str]:
    """What llmcli makes of it, and its message."""
    try:
        model, plan = checkpoint.load(folder)
    except LlmcliError as error:
        return "refused", error.message
    if bad := [f for f in checkpoint.findings(model, plan) if f.nan or f.infinite]:
        return "said", f"{bad[0].name} holds {bad[0].nan} NaN"
    return verdict(model(straight.ids), bend, straight), "; ".join(plan.warnings)


def by_transformers(folder: Path, bend: Bend, straight: Straight) -> tuple[str, str]:
    """What transformers makes of it, and what it says."""
    try:
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            folder, output_loading_info=True, attn_implementation="eager", local_files_only=True
        )
        logits = model(straight.ids).logits
    except Exception as error:
        return "refused", f"{type(error).__name__}: {error}"
    said = "; ".join(f"{what}: {len(names)}" for what, names in report.items() if names)
    return verdict(logits, bend, straight), said


def verdict(logits: torch.Tensor, bend: Bend, straight: Straight) -> str:
    want = straight.logits(bend.family, bend.tied)
    same = logits.shape == want.shape and bool((logits - want).abs().max() <= TOLERANCE)
    return "right" if same and bend.right != "refuse" else "WRONG"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity(50)
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    rows = []
    with tempfile.TemporaryDirectory() as root, torch.inference_mode():
        os.chdir(root)  # where a pickle that runs leaves its mark
        straight = Straight(Path(root))
        for number, bend in enumerate(BENDS):
            folder = straight.bent(bend, Path(root) / f"bent-{number}")
            with contextlib.redirect_stdout(sys.stderr):
                ours, theirs = by_llmcli(folder, bend, straight), by_transformers(folder, bend, straight)
            rows.append({"name": bend.name, "family": bend.family, "llmcli": ours, "transformers": theirs})
        ran = Path("it-ran").exists()
    counts = {
        tool: {o: sum(row[tool][0] == o for row in rows) for o in OUTCOMES} for tool in ("llmcli", "transformers")
    }
    if arguments.json:
        print(json.dumps({"checkpoints": rows, "counts": counts, "a pickle ran": ran}, indent=2))
        return
    width = max(len(bend.name) for bend in BENDS)
    print(f"{'':{width}}  {'':8}  {'llmcli':8}  transformers {transformers.__version__}")
    for row in rows:
        print(f"{row['name']:{width}}  {row['family']:8}  {row['llmcli'][0]:8}  {row['transformers'][0]}")
    for tool, outcomes in counts.items():
        print(f"{tool}: " + ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items()))
    logged = sum(row["transformers"][0] == "WRONG" and bool(row["transformers"][1]) for row in rows)
    print(f"Of transformers' wrong ones {logged} come with a table of keys in its log, and none with an error.")


if __name__ == "__main__":
    main()
