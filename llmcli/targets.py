"""What the user's word names: a preset, a config file, a checkpoint folder or file, a repository on the Hub.

What exists here is never looked for elsewhere: a local path opens no socket and does not import huggingface_hub.
"""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path

from llmcli import families, hf_config, hub, weight_files
from llmcli.config import ModelConfig, model_table, parse, presets, read_table
from llmcli.errors import CheckpointError, ConfigError, UsageError
from llmcli.hf_config import HfConfig
from llmcli.hub import Headers, RepoId

HUB = "hf://"
"""In front of org/name: the Hub's repository is meant, whatever exists here."""

_REPO = re.compile(r"(?P<name>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>.+))?", re.ASCII)


def repo_id(target: str | Path, revision: str | None = None) -> RepoId | None:
    """The Hub's repository that a target means (`org/name`, `org/name@revision`), or None for anything local.

    A path that exists is local, whatever it looks like, and so is one whose first part exists: `runs/bset`
    beside `runs/best` is a slip, not a repository. Raises UsageError where `revision` does not go with the target.
    """
    text = str(target)
    found = _REPO.fullmatch(text.removeprefix(HUB))
    here = not text.startswith(HUB) and os.path.exists(text.partition("/")[0])
    if found is None and text.startswith(HUB):
        raise UsageError(f"{text}: not a repository of the Hub", f"Write {HUB}org/name or {HUB}org/name@revision.")
    if found is None or here:
        if revision is not None:
            raise UsageError(f"--revision {revision}: {text} is not a repository of the Hub", "Leave it out.")
        return None
    inline = found["revision"]
    if revision is not None and inline is not None and revision != inline:
        raise UsageError(f"--revision {revision}: {text} already names a revision", "Name one of them.")
    return RepoId(found["name"], revision or inline)


def read_config(target: str | Path, *, revision: str | None = None, offline: bool = False) -> ModelConfig:
    """The complete config that a preset's name, a config file (ours or Hugging Face's) or a checkpoint means.

    Of a repository on the Hub only config.json is fetched. Raises UsageError when nothing of that name exists, and
    ConfigError when it cannot be read.
    """
    path = Path(named(target))
    if path.is_dir():
        return read_hf_config(path).config
    if path.is_file():
        if path.suffix == ".safetensors":
            return read_hf_config(path).config
        table = read_table(path)
        if hf_config.is_hf(table):
            return hf_config.read(table, str(path)).config
        return families.complete(parse(model_table(table, str(path)), ModelConfig, str(path)), str(path))
    if path.exists():
        raise UsageError(f"{path}: neither a file nor a folder", "Give a config file or a checkpoint.")
    known = presets()
    if str(target) in known:
        source = known[str(target)]
        table = model_table(read_table(source), source.name)
        return families.complete(parse(table, ModelConfig, source.name), source.name)
    if repo := repo_id(target, revision):
        return read_hf_config(hub.fetch_config(repo, offline)).config
    near = difflib.get_close_matches(str(target), known, n=1)
    raise UsageError(
        f"{target}: no such file or folder, and no preset of that name",
        (f"Did you mean '{near[0]}'? " if near else "") + f"Presets: {', '.join(known)}.",
    )


def read_hf_config(checkpoint: Path) -> HfConfig:
    """The `config.json` of a checkpoint folder (or beside a single file), with what it says of tying."""
    folder = checkpoint if checkpoint.is_dir() else checkpoint.parent
    path = weight_files.inside(folder, "config.json")
    if path is None:
        _refuse_run(folder)
        raise CheckpointError(
            f"{folder}: no config.json", "A checkpoint is a folder with config.json and model.safetensors."
        )
    try:
        table = read_table(path)
    except ConfigError as error:
        raise ConfigError(error.message, hf_config.REPAIR) from None
    return hf_config.read(table, str(path))


def find_checkpoint(target: str | Path, *, revision: str | None = None, offline: bool = False) -> Path:
    """The folder or file of a checkpoint; a repository of the Hub is downloaded first, as far as the cache lacks it.

    With `offline` the network is not touched. Raises UsageError when there is none of that name, CheckpointError when
    it cannot be had.
    """
    repo = repo_id(named(target), revision)
    if repo:
        return hub.fetch(repo, offline)
    return _existing(target)


def read_headers(target: str | Path, *, revision: str | None = None, offline: bool = False) -> Headers:
    """The tensors of a checkpoint without their values; of one on the Hub only the files' beginnings are transferred.

    Raises as `find_checkpoint` does, and CheckpointError for damaged files.
    """
    repo = repo_id(named(target), revision)
    if repo:
        return hub.fetch_headers(repo, offline)
    path = _existing(target)
    return Headers(path, weight_files.read_checkpoint(path), here=True)


def named(target: str | Path) -> str:
    """The target as text. An empty name would mean the working folder, and anything but a name nothing at all."""
    if not isinstance(target, (str, Path)) or not str(target).strip():
        raise UsageError(f"{target!r}: not a name", "Give a path, a preset's name, or org/name on the Hub.")
    return str(target)


def _existing(target: str | Path) -> Path:
    path = Path(target)
    if os.path.exists(path):
        if not (path.is_dir() or path.is_file()):  # a pipe would be waited for, a device has no end
            raise UsageError(f"{path}: neither a file nor a folder", "Give a checkpoint.")
        _refuse_run(path)
        return path
    text = str(target)
    near = difflib.get_close_matches(path.name, _names(path.parent), n=1)
    hint = f"Did you mean '{path.parent / near[0]}'? " if near else ""
    if text in presets():
        hint += f"'{text}' is the name of a preset, which has sizes but no weights. "
    if _REPO.fullmatch(text):  # its first part is a folder here
        hint += f"Write {HUB}{text} to mean the Hub's repository."
    elif "/" not in text:
        hint += "Give a folder with config.json and model.safetensors, or org/name for one on the Hub."
    raise UsageError(
        f"{text}: no such file or folder",
        hint.strip() or "Give a folder that holds config.json and model.safetensors.",
    )


def _refuse_run(folder: Path) -> None:
    """Raise UsageError for the folder of a training run, which holds checkpoints and is none."""
    inside = [folder / name for name in ("best", "last") if os.path.isfile(folder / name / "config.json")]
    if inside and not os.path.exists(folder / "config.json"):
        raise UsageError(
            f"{folder}: the folder of a training run, not a checkpoint", f"Give {' or '.join(map(str, inside))}."
        )


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []
