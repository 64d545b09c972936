"""Train and inspect decoder-only language models: the embedding matrix going in, the output projection coming out."""

from __future__ import annotations

import atexit
import gc

TYPE_CHECKING = False  # as typing's, which is not imported here: until `__main__` runs, Ctrl-C shows a traceback
if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

    import torch

    from llmcli.config import ModelConfig
    from llmcli.model import Decoder
    from llmcli.params import ParameterCount
    from llmcli.tokenizer import Tokenizer
    from llmcli.tying import Request, Side

# At the end of a process Python looks through all that is left for garbage, which is what was imported: with torch that
# takes a third of a second, and finds nothing.
atexit.register(gc.freeze)

__version__ = "0.1.0"
__all__ = ["__version__", "count", "load_model", "load_tokenizer", "read_config"]


def load_model(
    path: str | Path,
    *,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device = "cpu",
    tie: Request = "auto",
    keep: Side | None = None,
) -> Decoder:
    """The model of a checkpoint in eval mode: `model(ids (B, T)) -> logits (B, T, V)`.

    `dtype` None keeps the file's. What the tie decision was and why: `llmcli.checkpoint.load`, which this calls.
    What the headers say that may be wrong is a UserWarning; weights stay where they lie until they are used, so values
    that are no numbers are found by `llmcli load-hf`. Raises a subclass of `llmcli.errors.LlmcliError` for every
    refusal.
    """
    import warnings

    from llmcli import checkpoint, targets

    model, plan = checkpoint.load(targets.find_checkpoint(path), dtype=dtype, device=device, tie=tie, keep=keep)
    for warning in plan.warnings:
        warnings.warn(f"{path}: {warning}", stacklevel=2)
    return model


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a checkpoint. Raises TokenizerError when it has none that can be read."""
    from llmcli import targets, tokenizer

    return tokenizer.load(targets.find_checkpoint(path))


def read_config(target: str | Path) -> ModelConfig:
    """The complete config that a preset's name, a config file or a checkpoint means. Raises ConfigError, UsageError."""
    from llmcli import targets

    return targets.read_config(target)


def count(target: str | Path | dict[str, Any] | ModelConfig) -> ParameterCount:
    """The parameters of a preset, a config (struct, table of keys or file) or a checkpoint, tied and untied.

    A checkpoint is counted by the headers of its files, whatever its config says (`llmcli.params.take` tells both).
    """
    from llmcli import config, families, hf_config, params

    if isinstance(target, dict):
        table = config.model_table(target, "config")
        if hf_config.is_hf(table):
            return params.count(hf_config.read(table, "config").config)
        target = families.complete(config.parse(table, config.ModelConfig, "config"))
    return params.count(target) if isinstance(target, config.ModelConfig) else params.take(target).count
