"""The only place where weights cross the disk: a checkpoint into a model, and a model into a checkpoint.

The one format is Hugging Face's: config.json, model.safetensors (or shards with an index), the tokenizer's files.
PyTorch's pickles are read too, and never written.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import re
import shutil
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from llmcli import families, hf_config, hub, mapping, targets, tensors, weight_files
from llmcli.config import ModelConfig
from llmcli.errors import CheckpointError, LlmcliError, UsageError, clip, listing, unwritable
from llmcli.model import Decoder
from llmcli.tensors import TensorInfo
from llmcli.tying import Request, Side

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
SHORT_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}
SHARD_BYTES = 5 * 10**9
"""The largest file written; above it a checkpoint is sharded, as transformers does."""

CARRIED_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""The keys of config.json that mean nothing to the model and go along where its weights are written anew."""


def dtype_of(name: str | torch.dtype) -> torch.dtype:
    """ "float32" or "fp32", ... as torch's type. Raises UsageError naming the known ones."""
    found = name if isinstance(name, torch.dtype) else getattr(torch, SHORT_NAMES.get(name, name), None)
    if found not in DTYPES.values():
        raise UsageError(f"unknown dtype '{name}'", f"Known: {', '.join((*SHORT_NAMES.values(), *SHORT_NAMES))}.")
    assert isinstance(found, torch.dtype)
    return found


def device_of(name: str | torch.device) -> torch.device:
    """A device that is here, by its name. Raises UsageError."""
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type == "meta":  # which holds no values
        raise UsageError(f"device {name}: no such device", "Give cpu, cuda, cuda:1 or mps.")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UsageError(f"device {name}: not here ({reason})", "Leave it out to compute on the CPU.") from None
    return device


def plan(path: Path, tie: Request = "auto", keep: Side | None = None) -> mapping.Plan:
    """How the checkpoint at `path` fills a model, from headers alone. Raises CheckpointError or ConfigError.

    For safetensors this needs no torch: `mapping.plan` of what `weight_files.read_checkpoint` finds.
    """
    return Reader().plan(path, tie, keep)


def load(
    path: Path,
    *,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device = "cpu",
    tie: Request = "auto",
    keep: Side | None = None,
) -> tuple[Decoder, mapping.Plan]:
    """A model in eval mode with the checkpoint's weights, and how they were found.

    `dtype` None keeps the file's type (the widest where the file mixes types). On the CPU the weights stay
    memory-mapped (copied on write) where neither type nor layout changes. Raises CheckpointError or ConfigError for
    anything that does not fit, and UsageError for a type or device that does not exist.
    """
    asked = dtype_of(dtype) if dtype is not None else None
    device = device_of(device)
    reader = Reader()
    made = reader.plan(path, tie, keep)
    wanted = asked or widest(source.info.dtype for source in made.sources.values())
    with torch.device("meta"):
        model = Decoder(made.config)
    weights: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, source in made.sources.items():
        value = _converted(reader.read(source), device, wanted)
        # One tensor of the file may fill two of ours (--tie untie, or a pickle with a tied pair): each gets its own.
        weights[name] = value.clone() if value.data_ptr() in seen else value
        seen.add(value.data_ptr())
    model.load_state_dict(weights, strict=True, assign=True)
    model.requires_grad_(True)
    model.source = path
    return model.eval(), made


def widest(types: Iterator[str]) -> torch.dtype:
    """The type that holds the values of all these (safetensors' names) exactly."""
    found = {DTYPES[name] for name in types}
    if len(found) == 1:
        return found.pop()
    return torch.float64 if torch.float64 in found else torch.float32


def _converted(value: Tensor, device: str | torch.device, dtype: torch.dtype) -> Tensor:
    try:
        return value.to(device=device, dtype=dtype)
    except (RuntimeError, MemoryError) as error:  # no room on it, or a type that it does not have
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise CheckpointError(f"device {device}: {reason}", "Choose another device, or a smaller type.") from None


def in_file(model: Decoder, name: str) -> str:
    """One of a model's tensors as the checkpoint it was read from calls it, and the file; else by our own name."""
    if model.source is not None:
        with suppress(LlmcliError):  # it may be gone since, or have been opened with --tie
            info = plan(model.source).sources[name].info
            return f"{info.name} of {info.file}"
    return name


class Finding(msgspec.Struct, frozen=True):
    """How many of a tensor's values are no numbers, and whether it holds nothing but zeros where it should not.

    `size` is the tensor's bytes in memory.
    """

    name: str
    size: int
    nan: int
    infinite: int
    empty: bool


def findings(model: Decoder, made: mapping.Plan) -> Iterator[Finding]:
    """Every tensor of a loaded model, under the file's name, with its values that are not finite counted."""
    for name, value in model.state_dict().items():
        nan = infinite = 0
        # One pass without a copy, along the memory: a matrix that the file holds the other way round is turned back.
        lying = value.mT if value.dim() == 2 and value.stride(0) == 1 else value
        low, high = torch.aminmax(lying)  # NaN comes through
        if not (low.isfinite() and high.isfinite()):
            nan, infinite = int(value.isnan().sum()), int(value.isinf().sum())
        empty = bool(low == high == 0) and not mapping.may_be_zero(name, made.config.family)
        yield Finding(made.sources[name].info.name, value.nbytes, nan, infinite, empty)


def not_finite(found: Iterable[Finding], where: str = "") -> list[str]:
    """A line for each tensor of the file with values that are no numbers."""
    counts: dict[str, tuple[int, int]] = {}
    for one in found:
        nan, infinite = counts.get(one.name, (0, 0))
        counts[one.name] = nan + one.nan, infinite + one.infinite
    return [
        f"{name} holds {' and '.join(f'{n:,} {what}' for n, what in ((nan, 'NaN'), (infinite, 'infinite')) if n)} "
        f"values{where}"
        for name, (nan, infinite) in counts.items()
        if nan or infinite
    ]


def only_zeros(found: Iterable[Finding]) -> list[str]:
    """The file's tensors all of whose parts hold nothing but zeros and should not, in one line, if there are any."""
    empty: dict[str, bool] = {}
    for one in found:
        empty[one.name] = empty.get(one.name, True) and one.empty
    names = [name for name, nothing in empty.items() if nothing]
    what = "tensor holds" if len(names) == 1 else "tensors hold"
    return [f"{len(names)} {what} nothing but zeros: {listing(mapping.grouped(names), 8)}"] if names else []


class Reader:
    """Reads tensors of a checkpoint by memory map; a file is mapped once, privately, so writing to it is harmless."""

    def __init__(self) -> None:
        self._storages: dict[Path, torch.UntypedStorage] = {}
        self._pickles: dict[Path, dict[str, Tensor]] = {}
        self._beside: list[str] = []

    def plan(self, path: Path, tie: Request = "auto", keep: Side | None = None) -> mapping.Plan:
        """As the module's `plan`, remembering the pickles it had to open."""
        files = weight_files.read_checkpoint(path, self.headers)
        hf = targets.read_hf_config(path)
        made = mapping.plan(files, hf, str(path), request=tie, keep=keep, read=self.rows)
        return msgspec.structs.replace(made, ignored=(*made.ignored, *sorted(set(self._beside))))

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
        if info.file in self._pickles:
            return self._pickles[info.file][info.name]
        dtype = DTYPES[info.dtype]
        if info.start % dtype.itemsize:  # a header of odd length: no view can start there
            raw = bytearray(tensors.read_rows(msgspec.structs.replace(info, shape=(1,)), 0, 1))
            return torch.frombuffer(raw, dtype=dtype).reshape(info.shape)
        if info.file not in self._storages:
            size = info.file.stat().st_size
            self._storages[info.file] = torch.UntypedStorage.from_file(str(info.file), shared=False, nbytes=size)  # type: ignore[assignment]
        strides = torch.empty(info.shape, device="meta").stride()
        empty = torch.empty(0, dtype=dtype)
        return empty.set_(self._storages[info.file], info.start // dtype.itemsize, info.shape, strides)

    def headers(self, path: Path) -> dict[str, TensorInfo]:
        """The tensors of one file, a pickle or safetensors."""
        if path.suffix not in weight_files.PICKLES:
            return tensors.read_header(path)
        values, beside = read_pickle(path)
        self._pickles[path] = values
        self._beside += beside
        return {
            name: TensorInfo(name, _TYPE_NAMES.get(value.dtype, str(value.dtype)), tuple(value.shape), path, 0, size)
            for name, value in values.items()
            for size in [value.nbytes]
        }

    def rows(self, info: TensorInfo, start: int, stop: int) -> bytes:
        """As `tensors.read_rows`, of a pickle too."""
        if info.file in self._pickles:
            return bytes(_raw(self._pickles[info.file][info.name][start:stop]))
        return tensors.read_rows(info, start, stop)


_TYPE_NAMES = {
    **{dtype: name for name, dtype in DTYPES.items()},
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.bool: "BOOL", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip

_WRAPS = ("model", "state_dict", "model_state_dict", "module")  # where training scripts put the weights
_MAX_PICKLE = 64_000_000  # bytes of instructions in a zip's data.pkl: a thousand times what a large model needs


def read_pickle(path: Path) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors of a PyTorch file (.bin, .pt) by name, and the names of what else it holds (an optimizer's state).

    Nothing in the file is executed: torch's weights_only reader builds tensors and containers, and nothing else. A
    file of the zip form (torch 1.6 and later) is memory-mapped. Weights wrapped as `{"model": …}` or
    `{"state_dict": …}` are unwrapped. Raises CheckpointError.
    """
    try:
        if not path.is_file():
            raise CheckpointError(f"{path}: not a regular file", "Give a PyTorch file.")
        with path.open("rb") as file:
            is_zip = file.read(4) == b"PK\x03\x04"
        if is_zip:
            _check_zip(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own deprecated storages
            value = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})", "Check its permissions.") from None
    except pickle.UnpicklingError as error:
        wants = re.search(r"GLOBAL (\w+\.[\w.]+)|unrecognized function (<.*>)", str(error))
        if wants:
            name = clip(wants[1] or wants[2])
            raise CheckpointError(
                f"{path}: reading it would run code ({name}), which a file of weights has no need of; nothing was run",
                "Do not load it elsewhere either, unless you trust whoever made it.",
            ) from None
        raise CheckpointError(f"{path}: not a PyTorch file, or damaged", "Get it again.") from None
    except Exception as error:  # a damaged pickle can fail anywhere in torch's reader
        reason = clip(str(error).partition("\n")[0] or type(error).__name__)
        raise CheckpointError(f"{path}: not a PyTorch file, or damaged ({reason})", "Get it again.") from None
    return _unwrapped(value, path)


def _check_zip(path: Path) -> None:
    """Refuse archives that torch.save never writes: compressed, or with more in them than there is."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError, EOFError) as error:
        raise CheckpointError(f"{path}: a truncated or damaged PyTorch file ({error})", "Get it again.") from None
    odd = next((e for e in entries if e.compress_type != zipfile.ZIP_STORED or e.file_size > path.stat().st_size), None)
    long = next((e for e in entries if e.filename.endswith("data.pkl") and e.file_size > _MAX_PICKLE), None)
    if odd or long:
        raise CheckpointError(f"{path}: not an archive that torch.save writes", "Get it again.")


def _unwrapped(value: Any, path: Path) -> tuple[dict[str, Tensor], list[str]]:
    beside: list[str] = []
    for _ in range(4):
        inner = next((key for key in _WRAPS if isinstance(value, dict) and isinstance(value.get(key), dict)), None)
        if inner is None:
            break
        beside += [clip(str(key)) for key in value if key != inner]
        value = value[inner]
    if not isinstance(value, dict) or not any(isinstance(entry, Tensor) for entry in value.values()):
        raise CheckpointError(f"{path}: holds no tensors by name", "It is not a state dict; save model.state_dict().")
    found: dict[str, Tensor] = {}
    for key, entry in value.items():
        if not isinstance(entry, Tensor):
            beside.append(clip(str(key)))
            continue
        if not isinstance(key, str) or len(key) > 500 or not key.isprintable():
            raise CheckpointError(f"{path}: {clip(ascii(key))} is no tensor's name", "The file is damaged.")
        if entry.layout != torch.strided or entry.is_quantized or entry.device.type != "cpu":
            raise CheckpointError(
                f"{path}: tensor '{key}' is sparse, quantised or without data", "Save plain tensors on the CPU."
            )
        # Overlapping strides (an expanded tensor) cannot be trained; everything else stays as it lies.
        found[key] = entry.detach().contiguous() if 0 in entry.stride() else entry.detach()
    return found, beside


def _fused(config: ModelConfig, head_copy: bool = False) -> list[tuple[str, list[families.Tensor]]]:
    """Every tensor of Hugging Face's with those of ours that it is made of."""
    family = families.get(config.family)
    fused: dict[str, list[families.Tensor]] = {}
    for tensor in family.tensors(config):
        fused.setdefault(tensor.hf_name, []).append(tensor)
    if head_copy and config.tie_word_embeddings:
        by_name = {t.name: t for t in family.tensors(msgspec.structs.replace(config, tie_word_embeddings=False))}
        fused[by_name[mapping.HEAD].hf_name] = [by_name[mapping.EMBEDDING]]
    return [(name, sorted(parts, key=lambda part: part.start)) for name, parts in fused.items()]


def order(config: ModelConfig) -> list[str]:
    """Our tensors in the order in which `save` asks for them."""
    return [part.name for _, parts in _fused(config) for part in parts]


def _put_together(parts: list[families.Tensor], weights: Callable[[str], Tensor]) -> Tensor:
    values = [weights(part.name).detach() for part in parts]
    whole = values[0] if len(values) == 1 else torch.cat(values)
    return (whole.T if parts[0].transposed else whole).contiguous()


def save(
    model: Decoder,
    folder: Path,
    *,
    dtype: str | torch.dtype | None = None,
    head_copy: bool = False,
    extra_config: dict[str, Any] | None = None,
    extra_files: Callable[[Path], None] | None = None,
    weights: Callable[[str], Tensor] | None = None,
    shard_bytes: int = SHARD_BYTES,
    on_bytes: Callable[[float], None] | None = None,
) -> None:
    """Write a checkpoint that transformers opens (or refuses, for what its format cannot say).

    The folder appears whole or not at all, and an older checkpoint there is replaced whole: everything is written
    beside it, flushed to the disk, and renamed. A tied output is stored once, or with `head_copy` a second time under
    the output's name. `extra_config` goes into config.json (token ids); `extra_files` is called with the folder being
    written (tokenizer, training state); `on_bytes` with the size of each tensor written. `weights` gives our tensors,
    asked for as `order` has them, where the model does not hold them whole (shards). One tensor at a time is held
    beside the model. Raises CheckpointError when the disk refuses or something else than a checkpoint is there.
    """
    weights = weights or model.state_dict().__getitem__
    wanted = dtype_of(dtype) if dtype is not None else model.token_embeddings.weight.dtype
    config = hf_config.write(model.config, str(wanted).removeprefix("torch.")) | (extra_config or {})
    with writing(folder) as aside:
        (aside / "config.json").write_bytes(_json(config))
        pieces = _fused(model.config, head_copy)
        shards = _sharded(pieces, wanted.itemsize, shard_bytes)
        weight_map: dict[str, str] = {}
        for number, shard in enumerate(shards, 1):
            name = f"model-{number:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else "model.safetensors"
            weight_map |= dict.fromkeys((hf_name for hf_name, _ in shard), name)
            with (aside / name).open("wb", buffering=0) as file:
                header = [(hf_name, _TYPE_NAMES[wanted], parts[0].hf_shape) for hf_name, parts in shard]
                _write(file, memoryview(tensors.write_header(header)))
                for _, parts in shard:
                    value = _put_together(parts, weights).to("cpu", wanted)
                    if value.shape != parts[0].hf_shape:  # the header is written already, by the table
                        raise CheckpointError(
                            f"{parts[0].name}: the model's is {tuple(value.shape)} as the file has it, the table of"
                            f" family {model.config.family} says {parts[0].hf_shape}",
                            "Correct the table, or the model; nothing was saved.",
                        )
                    _write(file, _raw(value))
                    if on_bytes:
                        on_bytes(value.nbytes)
        if len(shards) > 1:
            total = sum(_size(parts, wanted.itemsize) for _, parts in pieces)
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (aside / "model.safetensors.index.json").write_bytes(_json(index))
        if extra_files:
            extra_files(aside)


def write_tensors(
    path: Path, infos: list[tuple[str, torch.dtype, tuple[int, ...]]], value: Callable[[str], Tensor]
) -> None:
    """One safetensors file of tensors that are asked for one after the other, each let go before the next."""
    with path.open("wb", buffering=0) as file:
        header = [(name, _TYPE_NAMES[dtype], shape) for name, dtype, shape in infos]
        _write(file, memoryview(tensors.write_header(header)))
        for name, dtype, _ in infos:
            _write(file, _raw(value(name).to("cpu", dtype)))


def carry(source: Path, folder: Path) -> None:
    """Copy what belongs to a checkpoint beside its weights. Raises CheckpointError for a link that leads out of it."""
    for name in hub.BESIDE:
        if found := weight_files.inside(source if source.is_dir() else source.parent, name):
            shutil.copyfile(found, folder / name)


Pieces = list[tuple[str, list[families.Tensor]]]


def _sharded(pieces: Pieces, itemsize: int, shard_bytes: int) -> list[Pieces]:
    shards: list[Pieces] = [[]]
    filled = 0
    for name, parts in pieces:
        size = _size(parts, itemsize)
        if shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append((name, parts))
        filled += size
    return shards


def _size(parts: list[families.Tensor], itemsize: int) -> int:
    return itemsize * torch.Size(parts[0].hf_shape).numel()


def _raw(value: Tensor) -> memoryview:
    """A CPU tensor's bytes, without a copy where it is contiguous."""
    return value.contiguous().reshape(-1).view(torch.uint8).numpy().data


def _write(file: Any, raw: memoryview) -> None:
    while raw:
        raw = raw[file.write(raw) :]


def _json(table: dict[str, Any]) -> bytes:
    return msgspec.json.format(msgspec.json.encode(table, order="sorted"), indent=2) + b"\n"


class writing:
    """`with writing(folder) as aside`: fill the folder `aside`; on success it takes the place of `folder`, whole."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        if not self.folder.name:
            raise CheckpointError(f"{folder}: cannot be a checkpoint's folder", "Name a new folder.")
        self.aside = self.folder.with_name(f".{self.folder.name}.writing")
        self.old = self.folder.with_name(f".{self.folder.name}.old")

    def __enter__(self) -> Path:
        try:
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            recover(self.folder)
            if self.folder.exists() and not (self.folder.is_dir() and is_replaceable(self.folder)):
                raise UsageError(
                    f"{self.folder}: is there already and is no checkpoint, so it is not replaced", "Name a new folder."
                )
            shutil.rmtree(self.aside, ignore_errors=True)
            self.aside.mkdir()
        except OSError as error:
            raise unwritable(self.folder, error, CheckpointError, "Choose another folder.") from None
        return self.aside

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None:
            try:
                readable = self.aside.stat().st_mode & 0o666  # as the umask has it; safetensors writes for us alone
                for path in self.aside.rglob("*"):
                    if path.is_file():
                        path.chmod(readable)
                    _flush(path)
                _flush(self.aside)
                if not (self.folder.exists() and _exchange(self.aside, self.folder)):
                    if self.folder.exists():
                        self.folder.rename(self.old)
                    self.aside.rename(self.folder)
                _flush(self.folder.parent)
                shutil.rmtree(self.old, ignore_errors=True)
                shutil.rmtree(self.aside, ignore_errors=True)
                return
            except OSError as failure:
                error = failure
        shutil.rmtree(self.aside, ignore_errors=True)
        recover(self.folder)
        if isinstance(error, OSError) or type(error).__name__ == "SafetensorError":
            reason = getattr(error, "strerror", None) or error
            raise CheckpointError(
                f"{self.folder}: cannot be written ({reason})", "Nothing older was touched."
            ) from None


def is_replaceable(folder: Path) -> bool:
    """Whether writing a checkpoint to this folder loses nothing else: it is empty, or holds a checkpoint."""
    return (folder / "config.json").is_file() or not any(folder.iterdir())


def recover(folder: Path) -> None:
    """Finish what a killed write left half done: between two renames the older checkpoint stands aside."""
    old = folder.with_name(f".{folder.name}.old")
    if old.exists():
        if folder.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            old.rename(folder)


def _exchange(a: Path, b: Path) -> bool:
    """Let two folders take each other's names in one step, so that neither name is ever missing; False if we cannot.

    Linux's renameat2 with RENAME_EXCHANGE (man 2 rename); Python has no name for it, some file systems do not do it.
    """
    if sys.platform != "linux":
        return False
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    here, exchange = -100, 2
    return bool(renameat2(here, os.fsencode(a), here, os.fsencode(b), exchange) == 0)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
