"""Which files hold a checkpoint's weights: one, or shards with an index, inside its folder; and all their headers."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from llmcli.errors import CheckpointError, clip, listing, remedy
from llmcli.tensors import TensorInfo, read_header

MAX_INDEX = 64_000_000
"""The longest shard index read, in bytes."""

_INDEX = msgspec.json.Decoder(dict[str, msgspec.Raw])
_WEIGHT_MAP = msgspec.json.Decoder(dict[str, str])


class Checkpoint(msgspec.Struct, frozen=True):
    """The tensors of a checkpoint by name, over all its files.

    `notes` is what is odd about the files without making them unreadable. `cut` names tensors that are not whole: to
    look at, for a checkpoint that is read has none.
    """

    infos: dict[str, TensorInfo]
    files: tuple[Path, ...]
    notes: tuple[str, ...] = ()
    cut: frozenset[str] = frozenset()


class Files(msgspec.Struct, frozen=True):
    """The files that hold a checkpoint's weights, and what its index says of them (None: it has none)."""

    paths: tuple[Path, ...]
    index: Path | None = None
    notes: tuple[str, ...] = ()


PICKLES = (".bin", ".pt", ".pth")
"""Endings of PyTorch's pickles."""

_NAMES = ("model.safetensors", "pytorch_model.bin")
_OTHERS = {
    "adapter_model.safetensors": "an adapter, not a whole model: merge it into its base model first",
    "adapter_model.bin": "an adapter, not a whole model: merge it into its base model first",
    "consolidated*.safetensors": "the maker's own layout: get the Hugging Face form of this checkpoint",
    "consolidated*.pth": "the maker's own layout: get the Hugging Face form of this checkpoint",
    "*.gguf": "GGUF, which llmcli does not read: get the original checkpoint",
    "tf_model.h5": "TensorFlow weights: load them in transformers with from_tf=True and save again",
    "flax_model.msgpack": "Flax weights: load them in transformers with from_flax=True and save again",
    "*.safetensors": "weights under another name: give the file itself instead of the folder",
    "*.bin": "weights under another name: give the file itself instead of the folder",
    "*.pt*": "weights under another name: give the file itself instead of the folder",
}


def find_files(path: Path) -> Files:
    """Where a checkpoint's weights are: the file itself, or in a folder one file or shards, safetensors before pickles.

    Raises CheckpointError: nothing there (naming what is there instead), shards missing (all are listed), a file or
    link that leads out of the folder, a folder that may not be read.
    """
    try:
        return _find_files(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})", remedy(error)) from None


def _find_files(path: Path) -> Files:
    if path.is_file():
        return Files((path,))
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such folder", "Check the path.")
    for name in _NAMES:
        single, index = inside(path, name), inside(path, f"{name}.index.json")
        if single:
            stale = (f"{name} and an index of shards are both there: {name} is read",) if index else ()
            return Files((single,), None, stale)
        if index:
            return Files(_shards(path, index, set(_weight_map(index).values())), index)
        # Shards that lost their index: the numbers in their names say whether all are there.
        stem, ending = name.split(".")
        numbered = {
            p.name: int(found[1])
            for p in path.iterdir()
            if (found := re.fullmatch(rf"{stem}-\d{{5}}-of-(\d{{5}})\.{ending}", p.name))
        }
        if numbered:
            count = min(numbered.values())
            wanted = {f"{stem}-{n:05d}-of-{count:05d}.{ending}" for n in range(1, count + 1)}
            return Files(_shards(path, path, wanted), None, ("the shards have no index",))
    for pattern, meaning in _OTHERS.items():
        if there := sorted(p.name for p in path.glob(pattern)):
            what, _, hint = meaning.partition(": ")
            raise CheckpointError(
                f"{path}: no model.safetensors; {there[0]} is {what}", f"{hint[:1].upper()}{hint[1:]}."
            )
    here = sorted(p.name for p in path.iterdir())[:12]
    raise CheckpointError(
        f"{path}: no model.safetensors and no model.safetensors.index.json",
        f"The folder holds: {', '.join(here)}." if here else "The folder is empty.",
    )


def inside(folder: Path, name: str) -> Path | None:
    """A file of a checkpoint's folder, or None. Raises CheckpointError when it is a link that leads out of the folder.

    The Hub's cache is the one exception: its snapshots consist of links to the blobs beside them.
    """
    path = folder / name
    try:
        if not path.is_file():
            return None
        linked, root, target = path.is_symlink(), folder.resolve(), path.resolve()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})", remedy(error)) from None
    if linked:
        blobs = root.parent.parent / "blobs" if root.parent.name == "snapshots" else None
        if not target.is_relative_to(root) and target.parent != blobs:
            raise CheckpointError(
                f"{path}: a link out of the folder, to {target}",
                "Put the file itself into the folder, or give the folder that it is in.",
            )
    return path


def read_checkpoint(path: Path, read: Callable[[Path], dict[str, TensorInfo]] = read_header) -> Checkpoint:
    """The tensors of a checkpoint, from headers alone; `read` gives those of one file.

    Raises CheckpointError: what `find_files` and `read` refuse, an index that names what no shard holds (all of it is
    listed), a tensor in two shards, a pickle where `read` cannot open one.
    """
    files = find_files(path)
    if read is read_header and (pickles := [p.name for p in files.paths if p.suffix in PICKLES]):
        raise CheckpointError(
            f"{path}: {', '.join(pickles)}: PyTorch pickles, which are not opened without torch",
            f"Convert the checkpoint: llmcli load-hf {path} --out NEW_FOLDER.",
        )
    infos: dict[str, TensorInfo] = {}
    for file in files.paths:
        for key, info in read(file).items():
            if key in infos:
                raise CheckpointError(
                    f"{path}: tensor '{key}' is in {infos[key].file.name} and in {file.name}",
                    "Get the checkpoint again.",
                )
            infos[key] = info
    notes = [*files.notes, *(_check_index(files.index, infos) if files.index else ())]
    return Checkpoint(infos, files.paths, tuple(notes))


def _index_table(index: Path) -> dict[str, msgspec.Raw]:
    try:
        if (size := index.stat().st_size) > MAX_INDEX:
            raise CheckpointError(f"{index}: {size:,} bytes are too many for an index", "Get it again.")
        return _INDEX.decode(index.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{index}: cannot be read ({error.strerror})", remedy(error)) from None
    except (ValueError, RecursionError):
        raise CheckpointError(f"{index}: not a JSON table", "Get it again.") from None


def _weight_map(index: Path) -> dict[str, str]:
    try:
        return _WEIGHT_MAP.decode(_index_table(index)["weight_map"])
    except (ValueError, KeyError, RecursionError):
        raise CheckpointError(
            f"{index}: not an index (a JSON table with weight_map: tensor -> file)", "Get it again."
        ) from None


def _shards(folder: Path, source: Path, names: set[str]) -> tuple[Path, ...]:
    """The shards of those names. Raises CheckpointError, beginning with `source`, for any that is not there."""
    if outside := sorted(n for n in names if re.search(r"[/\\]", n) or n in ("", ".", "..") or not n.isprintable()):
        raise CheckpointError(
            f"{source}: names files outside its folder: {listing(map(repr, outside))}", "Do not trust this checkpoint."
        )
    if not names:
        raise CheckpointError(f"{source}: names no shards at all", "Get the checkpoint again.")
    try:
        missing = sorted(name for name in names if not (folder / name).is_file())
    except OSError as error:  # a name too long for the file system
        raise CheckpointError(f"{source}: names what cannot be a file ({error.strerror})", "Get it again.") from None
    if missing:
        raise CheckpointError(
            f"{source}: {len(missing)} of {len(names)} shards are missing: {listing(missing)}", "Get the missing files."
        )
    return tuple(path for name in sorted(names) if (path := inside(folder, name)))


def _check_index(index: Path, infos: dict[str, TensorInfo]) -> list[str]:
    """What an index says that its shards do not. Raises CheckpointError for tensors that no shard holds."""
    weight_map = _weight_map(index)
    if absent := sorted(key for key in weight_map if key not in infos):
        raise CheckpointError(
            f"{index}: names {len(absent)} tensors that no shard holds: {listing(absent)}",
            "The shards and the index do not belong together.",
        )
    notes = []
    if elsewhere := sorted(key for key, file in weight_map.items() if infos[key].file.name != file):
        notes.append(f"the index places {len(elsewhere)} tensors in another shard: {listing(elsewhere)}")
    if unnamed := sorted(key for key in infos if key not in weight_map):
        notes.append(f"the shards hold {len(unnamed)} tensors that the index does not name: {listing(unnamed)}")
    real = sum(info.end - info.start for info in infos.values())
    try:
        metadata = msgspec.json.decode(_index_table(index).get("metadata", msgspec.Raw(b"{}")), type=dict[str, Any])
    except (ValueError, RecursionError):
        metadata = {}
    claimed = metadata.get("total_size", real)
    if claimed != real:
        notes.append(f"the index claims {clip(str(claimed))} bytes of tensors, the shards hold {real}")
    return notes
