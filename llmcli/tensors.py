"""Safetensors files without torch: headers checked, and one tensor at a time by memory map.

The format: eight bytes of header length (little-endian), a JSON header, the data (huggingface/safetensors README).
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from llmcli.errors import CheckpointError

# numpy is imported where values are read: checking headers must cost neither its time nor its memory.
if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

MAX_HEADER = 100_000_000
"""The longest header that safetensors' own reader accepts, in bytes."""

SIZES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1,
    "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip
"""Bytes per element of the format's types."""

_NUMPY = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1",
    "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1", "BOOL": "?",
}  # fmt: skip


class TensorInfo(msgspec.Struct, frozen=True):
    """Where one tensor lies: `start` and `end` are byte offsets in `file`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    end: int


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file by name. Raises CheckpointError, naming the file and what is wrong.

    Everything is checked against the file's real size before a byte of data is touched: the header's length, each
    type, each shape against its offsets, and that the tensors cover the data without gap or overlap.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8:
                raise CheckpointError(
                    f"{path}: {size} bytes, too short for a safetensors file", "It is truncated or empty; get it again."
                )
            if length > min(size - 8, MAX_HEADER):
                raise CheckpointError(
                    f"{path}: its header claims {length:,} bytes, the file has {size:,}",
                    "It is not a safetensors file, or it is truncated; get it again.",
                )
            raw = file.read(length)
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be read ({error.strerror})", "Check the path and its permissions."
        ) from None
    return parse_header(raw, path, size)


def parse_header(raw: bytes, path: Path, size: int) -> dict[str, TensorInfo]:
    """The tensors that a header describes: `raw` is its JSON, `size` the bytes of the whole file `path`.

    Raises CheckpointError as `read_header` does, of which this is the part that needs no file.
    """
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: its header is not JSON ({error})", "It is not a safetensors file, or it is damaged."
        ) from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: its header is not a table of tensors", "The file is damaged; get it again.")
    header.pop("__metadata__", None)
    data = 8 + len(raw)
    infos = {name: _tensor_info(path, name, entry, data) for name, entry in header.items()}
    _check_cover(path, infos, data, size)
    return infos


def _tensor_info(path: Path, name: str, entry: Any, data: int) -> TensorInfo:
    try:
        dtype, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        numbers = [*shape, start, end]
        if not all(type(n) is int and 0 <= n < 1 << 63 for n in numbers):
            raise ValueError
    except (TypeError, KeyError, ValueError):
        raise CheckpointError(
            f"{path}: tensor '{name}' is not described as dtype, shape and data_offsets", "The file is damaged."
        ) from None
    if dtype not in SIZES:
        raise CheckpointError(
            f"{path}: tensor '{name}' has the unknown type {dtype!r}", f"Known types: {', '.join(SIZES)}."
        )
    if end - start != prod(shape) * SIZES[dtype]:
        raise CheckpointError(
            f"{path}: tensor '{name}' of {dtype} {shape} has {end - start:,} bytes, not {prod(shape) * SIZES[dtype]:,}",
            "The file is damaged; get it again.",
        )
    return TensorInfo(name, dtype, tuple(shape), path, data + start, data + end)


def _check_cover(path: Path, infos: dict[str, TensorInfo], data: int, size: int) -> None:
    position = data
    for info in sorted(infos.values(), key=lambda info: (info.start, info.end)):
        if info.start != position:
            kind = "overlaps another" if info.start < position else "leaves a gap before it"
            raise CheckpointError(
                f"{path}: tensor '{info.name}' {kind} (offset {info.start - data:,})", "The file is damaged."
            )
        position = info.end
    if position != size:
        what = "truncated" if position > size else "followed by bytes that belong to no tensor"
        raise CheckpointError(
            f"{path}: its tensors end at byte {position:,}, the file at {size:,}: it is {what}", "Get the file again."
        )


def read_array(info: TensorInfo) -> npt.NDArray[Any]:
    """The stored values, memory-mapped and read-only; bfloat16 as the uint16 of its bits. Raises CheckpointError."""
    import numpy as np

    if info.dtype not in _NUMPY:
        raise CheckpointError(f"{info.file}: tensor '{info.name}' is {info.dtype}, a type that is not read here")
    dtype = np.dtype(_NUMPY[info.dtype])
    if info.end == info.start:
        return np.empty(info.shape, dtype)
    with info.file.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), info.end, access=mmap.ACCESS_READ)
    return np.frombuffer(mapped, dtype, count=prod(info.shape), offset=info.start).reshape(info.shape)


def as_float32(array: npt.NDArray[Any], dtype: str) -> npt.NDArray[np.float32]:
    """Stored values (as `read_array` gives them) as float32; exact for bfloat16 and float16."""
    import numpy as np

    if dtype == "BF16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    return np.ascontiguousarray(array, dtype=np.float32)


def row_chunks(info: TensorInfo, rows: int) -> Iterator[tuple[int, npt.NDArray[np.float32]]]:
    """(first row, those rows as float32), at most `rows` at a time, so that a large matrix never stands whole."""
    array = read_array(info)
    for start in range(0, info.shape[0], rows):
        yield start, as_float32(array[start : start + rows], info.dtype)


class Comparison(msgspec.Struct, frozen=True):
    """Whether two tensors hold the same values, and the largest difference between them."""

    equal: bool
    max_difference: float


def compare(a: TensorInfo, b: TensorInfo) -> Comparison:
    """Two tensors of one shape, in chunks. NaN equals NaN in the same place; otherwise its difference is NaN."""
    import numpy as np

    rows = max(1, (1 << 22) // max(1, prod(a.shape[1:])))
    equal, largest = True, 0.0
    for (_, x), (_, y) in zip(row_chunks(a, rows), row_chunks(b, rows), strict=True):
        if not np.array_equal(x, y, equal_nan=True):
            equal = False
            largest = float(np.maximum(largest, np.max(np.abs(x - y))))
    return Comparison(equal, largest)


class Checkpoint(msgspec.Struct, frozen=True):
    """The tensors of a checkpoint by name, over all its files, and what is worth saying about the files."""

    infos: dict[str, TensorInfo]
    files: tuple[Path, ...]
    notes: tuple[str, ...] = ()


def read_checkpoint(path: Path) -> Checkpoint:
    """The headers of a checkpoint: one safetensors file, or a folder with one or with shards and their index.

    Raises CheckpointError: no such files, an index that names what is not there (all of it is listed), a file outside
    the folder, a tensor in two shards.
    """
    if path.is_file():
        return Checkpoint(read_header(path), (path,))
    single, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if index.exists():
        return _read_shards(path, index)
    if single.exists():
        return Checkpoint(read_header(single), (single,))
    here = sorted(p.name for p in path.iterdir())[:12] if path.is_dir() else []
    raise CheckpointError(
        f"{path}: no model.safetensors and no model.safetensors.index.json"
        + ("" if path.is_dir() else " (no such folder)"),
        f"The folder holds: {', '.join(here)}." if here else "Check the path.",
    )


def _read_shards(folder: Path, index: Path) -> Checkpoint:
    try:
        table = json.loads(index.read_bytes())
        weight_map = table["weight_map"]
        wrong = not all(isinstance(k, str) and isinstance(v, str) for k, v in weight_map.items())
    except OSError as error:
        raise CheckpointError(f"{index}: cannot be read ({error.strerror})", "Check its permissions.") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        wrong = True
    if wrong:
        raise CheckpointError(f"{index}: not an index (a JSON table with weight_map: tensor -> file)", "Get it again.")
    shards = sorted(set(weight_map.values()))
    root = folder.resolve()
    if outside := [name for name in shards if "/" in name or "\\" in name or name in ("", ".", "..")]:
        raise CheckpointError(
            f"{index}: names files outside its folder: {', '.join(outside)}", "Do not trust this checkpoint."
        )
    if missing := [name for name in shards if not (folder / name).is_file()]:
        raise CheckpointError(
            f"{index}: {len(missing)} of {len(shards)} shards are missing: {', '.join(missing)}",
            "Get the missing files.",
        )
    infos: dict[str, TensorInfo] = {}
    notes: list[str] = []
    for name in shards:
        for key, info in read_header(root / name).items():
            if key in infos:
                raise CheckpointError(
                    f"{folder}: tensor '{key}' is in {infos[key].file.name} and in {name}", "Remove one."
                )
            infos[key] = info
    if absent := sorted(key for key in weight_map if key not in infos):
        raise CheckpointError(
            f"{index}: names {len(absent)} tensors that no shard holds: {', '.join(absent)}",
            "The shards and the index do not belong together.",
        )
    if unnamed := sorted(key for key in infos if key not in weight_map):
        notes.append(f"the shards hold {len(unnamed)} tensors that the index does not name: {', '.join(unnamed)}")
    total = table.get("metadata", {}).get("total_size") if isinstance(table.get("metadata"), dict) else None
    real = sum(info.end - info.start for info in infos.values())
    if total is not None and total != real:
        notes.append(f"the index claims {total} bytes of tensors, the shards hold {real}")
    return Checkpoint(infos, tuple(root / name for name in shards), tuple(notes))
