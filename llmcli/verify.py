"""Does llmcli compute what transformers computes? One probe through both, in float32."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from llmcli import checkpoint
from llmcli.errors import CheckpointError, LlmcliError

TOLERANCE = 1e-3
"""The largest difference of logits, as a share of the largest logit (or of 1), that rounding explains."""
TOKENS = 48
"""Length of the probe: past the positions where RoPE is nearly the identity."""
WITHOUT = "There is nothing to compare with: leave out --verify."


class Verification(msgspec.Struct, frozen=True):
    """How far apart the two are. `remarks` is what transformers itself said of the checkpoint.

    `written`: both read what was written, because something else was asked for than the source holds. Two that give
    only zeros do not agree: nothing could differ.
    """

    max_difference: float
    tolerance: float
    max_logit: float
    tokens: int
    agrees: bool
    remarks: tuple[str, ...]
    written: bool = False


def verify(source: Path, against: Path | None = None) -> Verification:
    """Compare the logits of `source`, loaded here, with those of transformers' model of `against` (or of the same).

    Raises LlmcliError where transformers is not installed, CheckpointError where it cannot load the checkpoint.
    """
    against = against or source
    model, _ = checkpoint.load(source, dtype=torch.float32)
    theirs, remarks = _transformers_model(against if against.is_dir() else against.parent)
    length = min(TOKENS, model.config.max_position_embeddings)
    ids = torch.randint(model.config.vocab_size, (2, length), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        ours: Tensor = model(ids)
        try:
            other: Tensor = theirs(ids).logits
        except Exception as error:
            raise CheckpointError(f"{against}: transformers cannot compute it: {_first_line(error)}", WITHOUT) from None
    if other.shape != ours.shape:
        shapes = f"transformers' logits are {tuple(other.shape)}, llmcli's {tuple(ours.shape)}"
        raise CheckpointError(f"{against}: {shapes}", "The two read the config differently.")
    largest = float(ours.abs().max())
    difference = float((ours - other).abs().max())
    tolerance = TOLERANCE * max(1.0, largest)
    agrees = difference <= tolerance and largest > 0
    return Verification(difference, tolerance, largest, length, agrees, remarks)


def _transformers_model(folder: Path) -> tuple[Any, tuple[str, ...]]:
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError:
        raise LlmcliError(
            "--verify compares with transformers, which is not installed", "Install it: pip install transformers"
        ) from None
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, trust_remote_code=False, output_loading_info=True
        )
    except Exception as error:
        raise CheckpointError(f"{folder}: transformers cannot load it: {_first_line(error)}", WITHOUT) from None
    remarks = []
    for what, names in info.items():
        if names:
            shown = sorted(str(name[0] if isinstance(name, tuple) else name) for name in names)
            remarks.append(f"transformers: {what.replace('_', ' ')}: {', '.join(shown[:8])}")
    return model.eval(), tuple(remarks)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
