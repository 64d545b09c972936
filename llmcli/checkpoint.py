"""The only place where weights cross the disk: a checkpoint into a model, and a model into a checkpoint.

The one format is Hugging Face's: config.json, model.safetensors (or shards with an index), the tokenizer's files.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from llmcli import families, hf_config, mapping, targets, tensors
from llmcli.config import ModelConfig
from llmcli.errors import CheckpointError, UsageError
from llmcli.model import Decoder
from llmcli.tensors import TensorInfo
from llmcli.tying import Request, Side

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
SHORT_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}
SHARD_BYTES = 5 * 10**9
"""The largest file written; above it a checkpoint is sharded, as transformers does."""


def dtype_of(name: str | torch.dtype) -> torch.dtype:
    """ "float32" or "fp32", ... as torch's type. Raises UsageError naming the known ones."""
    if isinstance(name, torch.dtype):
        return name
    found = getattr(torch, SHORT_NAMES.get(name, name), None)
    if found not in DTYPES.values():
        raise UsageError(f"unknown dtype '{name}'", f"Known: {', '.join((*SHORT_NAMES.values(), *SHORT_NAMES))}.")
    assert isinstance(found, torch.dtype)
    return found


def plan(path: Path, tie: Request = "auto", keep: Side | None = None) -> mapping.Plan:
    """How the checkpoint at `path` fills a model, from headers alone. Raises CheckpointError or ConfigError."""
    files = tensors.read_checkpoint(path)
    made = mapping.plan(files.infos, targets.read_hf_config(path), str(path), request=tie, keep=keep)
    return msgspec.structs.replace(made, notes=(*files.notes, *made.notes))


def load(
    path: Path,
    *,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device = "cpu",
    tie: Request = "auto",
    keep: Side | None = None,
) -> tuple[Decoder, mapping.Plan]:
    """A model in eval mode with the checkpoint's weights, and how they were found.

    `dtype` None keeps the file's type (float32 where the file mixes types). On the CPU the weights stay memory-mapped
    (copied on write) where neither type nor layout changes. Raises CheckpointError for anything that does not fit.
    """
    made = plan(path, tie, keep)
    types = {DTYPES[source.info.dtype] for source in made.sources.values()}
    wanted = dtype_of(dtype) if dtype is not None else types.pop() if len(types) == 1 else torch.float32
    reader = Reader()
    with torch.device("meta"):
        model = Decoder(made.config)
    weights = {name: reader.read(source).to(device=device, dtype=wanted) for name, source in made.sources.items()}
    if made.tie.embedding_from == made.tie.head_from:  # one matrix of the file fills two of ours
        weights[mapping.HEAD] = weights[mapping.HEAD].clone()
    model.load_state_dict(weights, strict=True, assign=True)
    model.requires_grad_(True)
    return model.eval(), made


class Reader:
    """Reads tensors of a checkpoint by memory map; a file is mapped once, privately, so writing to it is harmless."""

    def __init__(self) -> None:
        self._storages: dict[Path, torch.UntypedStorage] = {}

    def read(self, source: mapping.Source) -> Tensor:
        """One of our tensors: the file's, cut to our rows and turned to (out, in)."""
        whole = self._tensor(source.info)
        t = source.tensor
        if t.expert is not None:
            whole = whole[t.expert]
        if source.transposed:
            whole = whole.T
        return whole[t.start : t.start + t.shape[0]]

    def _tensor(self, info: TensorInfo) -> Tensor:
        dtype = DTYPES[info.dtype]
        if info.start % dtype.itemsize:  # a header of odd length: no view can start there
            raw = bytearray(info.file.read_bytes()[info.start : info.end])
            return torch.frombuffer(raw, dtype=dtype).reshape(info.shape)
        if info.file not in self._storages:
            size = info.file.stat().st_size
            self._storages[info.file] = torch.UntypedStorage.from_file(str(info.file), shared=False, nbytes=size)
        storage = self._storages[info.file]
        strides = torch.empty(info.shape, device="meta").stride()
        return torch.empty(0, dtype=dtype).set_(storage, info.start // dtype.itemsize, info.shape, strides)  # type: ignore[call-overload, no-any-return]


def to_hf(config: ModelConfig, weights: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Hugging Face's tensors of a model, by their names: ours renamed, transposed, put together where theirs are fused."""
    fused: dict[str, list[families.Tensor]] = {}
    for tensor in families.get(config.family).tensors(config):
        fused.setdefault(tensor.hf_name, []).append(tensor)
    for name, parts in fused.items():
        values = torch.cat([weights(part.name).detach() for part in sorted(parts, key=lambda part: part.start)])
        yield name, (values.T if parts[0].transposed else values).contiguous()


def save(
    model: Decoder,
    folder: Path,
    *,
    dtype: str | torch.dtype | None = None,
    extra_config: dict[str, Any] | None = None,
    extra_files: Callable[[Path], None] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a checkpoint that transformers opens (or refuses, for what its format cannot say).

    The folder appears whole or not at all, and an existing one is replaced whole: everything is written beside it,
    flushed to the disk, and renamed. `extra_config` goes into config.json (token ids); `extra_files` is called with
    the folder being written (tokenizer, training state). Raises CheckpointError when the disk refuses.
    """
    state = model.state_dict()
    wanted = dtype_of(dtype) if dtype is not None else model.token_embeddings.weight.dtype
    config = hf_config.write(model.config, str(wanted).removeprefix("torch.")) | (extra_config or {})
    with writing(folder) as aside:
        (aside / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        named = ((name, value.to("cpu", wanted)) for name, value in to_hf(model.config, state.__getitem__))
        _write_tensors(aside, named, shard_bytes)
        if extra_files:
            extra_files(aside)


def _write_tensors(folder: Path, named: Iterator[tuple[str, Tensor]], shard_bytes: int) -> None:
    from safetensors.torch import save_file

    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, value in named:
        if shards[-1] and size + value.nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = value
        size += value.nbytes
    if len(shards) == 1:
        save_file(shards[0], folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    total = sum(value.nbytes for shard in shards for value in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


class writing:
    """`with writing(folder) as aside`: fill the folder `aside`; on success it takes the place of `folder`, whole."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.aside = folder.with_name(f".{folder.name}.writing")
        self.old = folder.with_name(f".{folder.name}.old")

    def __enter__(self) -> Path:
        try:
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            recover(self.folder)
            shutil.rmtree(self.aside, ignore_errors=True)
            self.aside.mkdir()
        except OSError as error:
            raise CheckpointError(
                f"{self.folder}: cannot be written ({error.strerror})", "Choose another folder."
            ) from None
        return self.aside

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None:
            try:
                for path in self.aside.rglob("*"):
                    _flush(path)
                _flush(self.aside)
                if self.folder.exists():
                    self.folder.rename(self.old)
                self.aside.rename(self.folder)
                _flush(self.folder.parent)
                shutil.rmtree(self.old, ignore_errors=True)
                return
            except OSError as failure:
                error = failure
        shutil.rmtree(self.aside, ignore_errors=True)
        recover(self.folder)
        if isinstance(error, OSError) or type(error).__name__ == "SafetensorError":
            raise CheckpointError(f"{self.folder}: cannot be written ({error})", "Nothing older was touched.") from None


def recover(folder: Path) -> None:
    """Finish what a killed write left half done: between two renames the older checkpoint stands aside."""
    old = folder.with_name(f".{folder.name}.old")
    if old.exists():
        if folder.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            old.rename(folder)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
