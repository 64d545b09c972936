"""Safetensors files without torch: headers checked, and one tensor at a time.

The format: eight bytes of header length (little-endian), a JSON header, the data (huggingface/safetensors README).
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable, Iterable, Iterator
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from llmcli.errors import CheckpointError, clip, listing, remedy

# numpy is imported where values are read: checking headers must cost neither its time nor its memory.
if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

MAX_HEADER = 16_000_000
"""The longest header read, in bytes: enough for some 100,000 tensors in one file. (The format allows 100 MB.)"""

SIZES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1,
    "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "C64": 8,
}  # fmt: skip
"""Bytes per element of the format's types."""

_NUMPY = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1",
    "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1", "BOOL": "?",
}  # fmt: skip

_CHUNK = 1 << 22  # bytes read at a time where a whole tensor is gone through
_SAMPLE = 16  # rows by which two different matrices are nearly always told apart


class TensorInfo(msgspec.Struct, frozen=True):
    """Where one tensor lies: `start` and `end` are byte offsets in `file` (in a pickle: 0 and the tensor's size)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    end: int


class CutShort(CheckpointError):
    """A file that ends before its tensors do; `infos` is what its header says, `cut` names those that are not whole."""

    def __init__(self, path: Path, infos: dict[str, TensorInfo], size: int) -> None:
        self.infos = infos
        self.cut = frozenset(name for name, info in infos.items() if info.end > size)
        end = max(info.end for info in infos.values())
        names = listing([name for name in infos if name in self.cut], 8)
        super().__init__(
            f"{path}: {size:,} bytes of the {end:,} that its header promises: it is truncated; "
            f"{len(self.cut):,} of its {len(infos):,} tensors are not whole: {names}",
            "Get the file again.",
        )


_Count = Annotated[int, Meta(ge=0, le=2**62)]


class _Entry(msgspec.Struct):
    """A tensor as a header describes it."""

    dtype: str
    shape: list[_Count]
    data_offsets: tuple[_Count, _Count]


_ENTRY = msgspec.json.Decoder(_Entry)
_HEADER = msgspec.json.Decoder(dict[str, msgspec.Raw])


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file by name. Raises CheckpointError, naming the file and what is wrong.

    Everything is checked against the file's real size before a byte of data is touched: the header's length, each
    type, each shape against its offsets, and that the tensors cover the data without gap or overlap.
    """
    try:
        if not path.is_file():  # a pipe would be waited for, a device has no end
            raise CheckpointError(f"{path}: not a regular file", "Give a safetensors file.")
        size = path.stat().st_size
        with path.open("rb") as file:
            first = file.read(8)
            if size < 8:
                raise CheckpointError(
                    f"{path}: {size} bytes, too short for a safetensors file", "It is truncated or empty; get it again."
                )
            length = int.from_bytes(first, "little")
            if length > size - 8:
                _refuse_other_formats(first, path)
                raise CheckpointError(
                    f"{path}: its header claims {length:,} bytes, the file has {size:,}",
                    "It is not a safetensors file, or it is truncated; get it again.",
                )
            if length > MAX_HEADER:
                raise CheckpointError(
                    f"{path}: its header of {length:,} bytes is longer than the {MAX_HEADER:,} that are read",
                    "No checkpoint of a known family has a header of that length.",
                )
            raw = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})", remedy(error)) from None
    return parse_header(raw, path, size)


def _refuse_other_formats(first: bytes, path: Path) -> None:
    """Name what is often found under the name of a safetensors file, from its first eight bytes.

    Only once they cannot be a header's length: a header of 640 bytes begins as a pickle does.
    """
    if first == b"version ":
        raise CheckpointError(
            f"{path}: a Git LFS pointer instead of the file it points to", "Fetch the file itself: git lfs pull."
        )
    if first[:4] == b"PK\x03\x04" or first[:2] in (b"\x80\x02", b"\x80\x04"):
        raise CheckpointError(f"{path}: a PyTorch pickle under another name", "Give it the ending .bin.")
    if (
        first.lstrip()[:1] in (b"{", b"[")
        and first.isascii()
        and all(byte >= 32 or byte in b"\t\n\r" for byte in first)
    ):
        raise CheckpointError(f"{path}: JSON text, not weights", f"Give its folder: {path.parent}.")
    if first[:4] == b"GGUF":
        raise CheckpointError(f"{path}: a GGUF file", "llmcli reads safetensors; get the original checkpoint.")


def parse_header(raw: bytes, path: Path, size: int) -> dict[str, TensorInfo]:
    """The tensors that a header describes: `raw` is its JSON, `size` the bytes of the whole file `path`.

    Raises CheckpointError as `read_header` does, of which this is the part that needs no file.
    """
    try:
        header = _HEADER.decode(raw)
    except msgspec.ValidationError:
        raise CheckpointError(f"{path}: its header is not a table of tensors", "The file is damaged.") from None
    except (ValueError, RecursionError) as error:  # msgspec.DecodeError is a ValueError
        raise CheckpointError(
            f"{path}: its header is not JSON ({error})", "It is not a safetensors file, or it is damaged."
        ) from None
    header.pop("__metadata__", None)
    data = 8 + len(raw)
    infos = {name: _tensor_info(path, name, entry, data) for name, entry in header.items()}
    _refuse_twice(raw, len(infos), path)
    _check_cover(path, infos, data, size)
    return infos


def _refuse_twice(raw: bytes, count: int, path: Path) -> None:
    """Refuse a header that names a tensor twice: readers would disagree on which of the two holds."""
    if b"\\" not in raw and raw.count(b'"data_offsets"') == count:
        return  # every entry has one, and nothing can hide behind an escape: as many entries as names

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(items)
        if len(table) != len(items):
            names = [name for name, _ in items]
            twice = next(name for name in names if names.count(name) > 1)
            raise CheckpointError(f"{path}: its header names '{clip(twice)}' twice", "The file is damaged.")
        return table

    try:
        json.loads(raw, object_pairs_hook=pairs)
    except (ValueError, RecursionError):  # stricter in nothing that matters here; what is wrong is found below
        return


def _tensor_info(path: Path, name: str, entry: msgspec.Raw, data: int) -> TensorInfo:
    if len(name) > 500 or not name.isprintable():
        raise CheckpointError(f"{path}: {clip(repr(name))} is no tensor's name", "The file is damaged.")
    try:
        found = _ENTRY.decode(entry)
        if len(found.shape) > 64:
            raise ValueError
    except (ValueError, RecursionError):
        raise CheckpointError(
            f"{path}: tensor '{name}' is not described as dtype, shape and data_offsets", "The file is damaged."
        ) from None
    if found.dtype not in SIZES:
        raise CheckpointError(
            f"{path}: tensor '{name}' has the unknown type {clip(repr(found.dtype))}",
            f"Known types: {', '.join(SIZES)}.",
        )
    start, end = found.data_offsets
    wanted = prod(found.shape) * SIZES[found.dtype]
    if end - start != wanted:
        raise CheckpointError(
            f"{path}: tensor '{name}' of {found.dtype} {found.shape} has {end - start:,} bytes, not {wanted:,}",
            "The file is damaged; get it again.",
        )
    return TensorInfo(name, found.dtype, tuple(found.shape), path, data + start, data + end)


def _check_cover(path: Path, infos: dict[str, TensorInfo], data: int, size: int) -> None:
    position = data
    for info in sorted(infos.values(), key=lambda info: (info.start, info.end)):
        if info.start != position:
            kind = "overlaps another" if info.start < position else "leaves a gap before it"
            raise CheckpointError(
                f"{path}: tensor '{info.name}' {kind} (offset {info.start - data:,})", "The file is damaged."
            )
        position = info.end
    if position > size:
        raise CutShort(path, infos, size)
    if position < size:
        raise CheckpointError(
            f"{path}: its tensors end at byte {position:,} of {size:,}: those after it belong to no tensor",
            "Get the file again.",
        )


def write_header(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> bytes:
    """The first bytes of a safetensors file that holds these (name, type, shape) one behind the other.

    Padded with spaces so that the data begins at a multiple of eight, as the format asks.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, dtype, shape in tensors:
        end = position + prod(shape) * SIZES[dtype]
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, end]}
        position = end
    header = msgspec.json.encode(entries)
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header


def read_array(info: TensorInfo) -> npt.NDArray[Any]:
    """The stored values, memory-mapped and read-only; bfloat16 as the uint16 of its bits. Raises CheckpointError."""
    import numpy as np

    dtype = _numpy_type(info)
    if info.end == info.start:
        return np.empty(info.shape, dtype)
    try:
        with info.file.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), info.end, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{info.file}: cannot be read ({error})", "It changed while it was being read.") from None
    return np.frombuffer(mapped, dtype, count=prod(info.shape), offset=info.start).reshape(info.shape)


def _numpy_type(info: TensorInfo) -> np.dtype[Any]:
    import numpy as np

    if info.dtype not in _NUMPY:
        raise CheckpointError(
            f"{info.file}: tensor '{info.name}' is {info.dtype}, a type that is not read here", "Convert it to float32."
        )
    return np.dtype(_NUMPY[info.dtype])


def as_float32(array: npt.NDArray[Any], dtype: str) -> npt.NDArray[np.float32]:
    """Stored values (as `read_array` gives them) as float32; exact for bfloat16 and float16."""
    import numpy as np

    if dtype == "BF16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    return np.ascontiguousarray(array, dtype=np.float32)


ReadRows = Callable[[TensorInfo, int, int], bytes]
"""(tensor, first row, row behind the last) -> their bytes as stored."""


def read_rows(info: TensorInfo, start: int, stop: int) -> bytes:
    """The bytes of some rows (of its first axis). By reading, so that a matrix gone through costs no memory."""
    width = (info.end - info.start) // info.shape[0]
    try:
        with info.file.open("rb", buffering=0) as file:
            file.seek(info.start + start * width)
            raw = file.read((stop - start) * width)
    except OSError as error:
        raise CheckpointError(f"{info.file}: cannot be read ({error.strerror})", remedy(error)) from None
    if len(raw) != (stop - start) * width:
        raise CheckpointError(f"{info.file}: is shorter than it was", "It changed while it was being read.")
    return raw


class Comparison(msgspec.Struct, frozen=True):
    """Whether two tensors hold the same values, and the largest difference between them."""

    equal: bool
    max_difference: float


def compare(a: TensorInfo, b: TensorInfo) -> Comparison:
    """Two tensors of one shape. NaN equals NaN in the same place; otherwise its difference is NaN."""
    same = equal(a, b)
    return Comparison(same, 0.0 if same else max_difference(a, b))


def equal(a: TensorInfo, b: TensorInfo, read: ReadRows = read_rows) -> bool:
    """Whether two tensors of one shape hold the same bits, or the same values where their types differ.

    A few rows are compared first: two matrices that were trained apart cost almost nothing to tell apart.
    """
    if not prod(a.shape):
        return True
    if not a.shape:
        return equal(_flat(a), _flat(b), read)
    rows = a.shape[0]
    sample = sorted({n * (rows - 1) // (_SAMPLE - 1) for n in range(_SAMPLE)})
    for start, stop in (*((row, row + 1) for row in sample), *_chunks(a, b)):
        if a.dtype == b.dtype:
            if read(a, start, stop) != read(b, start, stop):
                return False
        else:
            import numpy as np

            if not np.array_equal(read_values(a, start, stop, read), read_values(b, start, stop, read), equal_nan=True):
                return False
    return True


def max_difference(a: TensorInfo, b: TensorInfo, read: ReadRows = read_rows) -> float:
    """The largest |a - b| of two tensors of one shape; where both hold the same (NaN or infinity too) it is 0."""
    import numpy as np

    if not prod(a.shape):
        return 0.0
    if not a.shape:
        return max_difference(_flat(a), _flat(b), read)
    largest = 0.0
    for start, stop in _chunks(a, b):
        x, y = read_values(a, start, stop, read), read_values(b, start, stop, read)
        with np.errstate(invalid="ignore", over="ignore"):
            differences = np.where((x == y) | (np.isnan(x) & np.isnan(y)), 0, np.abs(x - y))
        largest = float(np.maximum(largest, differences.max()))
    return largest


def _flat(info: TensorInfo) -> TensorInfo:
    return msgspec.structs.replace(info, shape=(prod(info.shape),))


def _chunks(a: TensorInfo, b: TensorInfo) -> Iterator[tuple[int, int]]:
    width = max(a.end - a.start, b.end - b.start) // a.shape[0]
    step = max(1, _CHUNK // max(1, width))
    return ((start, min(start + step, a.shape[0])) for start in range(0, a.shape[0], step))


def read_values(info: TensorInfo, start: int, stop: int, read: ReadRows) -> npt.NDArray[Any]:
    """Rows as numbers, flat: float64 stays, everything else becomes float32. Raises CheckpointError."""
    import numpy as np

    stored = np.frombuffer(read(info, start, stop), _numpy_type(info))
    return stored if info.dtype == "F64" else as_float32(stored, info.dtype)
