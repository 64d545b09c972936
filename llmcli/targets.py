"""What the user's word names: a preset, a config file, a checkpoint folder or file."""

from __future__ import annotations

import difflib
from pathlib import Path

from llmcli import families, hf_config
from llmcli.config import ModelConfig, model_table, parse, presets, read_table
from llmcli.errors import CheckpointError, UsageError
from llmcli.hf_config import HfConfig


def read_config(target: str | Path) -> ModelConfig:
    """The complete config that a preset's name, a config file (ours or Hugging Face's) or a checkpoint means.

    Raises UsageError when nothing of that name exists, and ConfigError when it cannot be read.
    """
    path = Path(target)
    if path.is_dir():
        return read_hf_config(path).config
    if path.is_file():
        if path.suffix == ".safetensors":
            return read_hf_config(path).config
        table = read_table(path)
        if hf_config.is_hf(table):
            return hf_config.read(table, str(path)).config
        return families.complete(parse(model_table(table), ModelConfig, str(path)), str(path))
    known = presets()
    if str(target) in known:
        source = known[str(target)]
        return families.complete(parse(model_table(read_table(source)), ModelConfig, source.name), source.name)
    near = difflib.get_close_matches(str(target), known, n=1)
    raise UsageError(
        f"{target}: no such file or folder, and no preset of that name",
        (f"Did you mean '{near[0]}'? " if near else "") + f"Presets: {', '.join(known)}.",
    )


def read_hf_config(checkpoint: Path) -> HfConfig:
    """The `config.json` of a checkpoint folder (or beside a single file), with what it says of tying."""
    path = (checkpoint if checkpoint.is_dir() else checkpoint.parent) / "config.json"
    if not path.is_file():
        raise CheckpointError(
            f"{path.parent}: no config.json", "A checkpoint is a folder with config.json and model.safetensors."
        )
    return hf_config.read(read_table(path), str(path))


def find_checkpoint(target: str | Path) -> Path:
    """The folder or file of a checkpoint. Raises UsageError when there is none of that name."""
    path = Path(target)
    if not path.exists():
        raise UsageError(f"{target}: no such checkpoint", "Give a folder that holds config.json and model.safetensors.")
    return path
