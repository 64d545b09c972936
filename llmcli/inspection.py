"""What is in a checkpoint, fitting or not, without loading it: headers, and as many values as there is time for.

Nothing here refuses a checkpoint that has any tensor to show: what would make loading refuse it is listed as a
problem, because "why does it not load, or load wrongly" is the question that is asked of it. Values are read by numpy
only where all of them are; a sample of rows is small enough for the standard library, at half the start-up.
"""

from __future__ import annotations

import fnmatch
import math
import re
import struct
from collections.abc import Callable, Iterable, Iterator
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from llmcli import families, params, targets, tensors, weight_files
from llmcli.config import ModelConfig
from llmcli.errors import CheckpointError, LlmcliError, UsageError, listing
from llmcli.hf_config import HfConfig
from llmcli.mapping import (
    EMBEDDING,
    HEAD,
    HEAD_BIAS,
    NUMBER,
    Match,
    canonical,
    grouped,
    left_alone,
    match,
    may_be_zero,
    mismatches,
    ranges,
    resembled,
)
from llmcli.tensors import ReadRows, TensorInfo, read_rows
from llmcli.tying import Decision, Evidence, Side, decide
from llmcli.weight_files import Checkpoint

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

SAMPLE_VALUES = 1 << 19
"""How many values of a matrix are looked at unless all are asked for: some 30 ms of work for any size."""
CHUNK_VALUES = 1 << 20
"""How many values stand in memory at a time where a tensor is read whole."""

Role = Literal["model", "misshapen", "copy", "ignored", "left over", "unknown"]
"""What a tensor of the files is to the config's model: part of it, part of it in a wrong shape, an output matrix equal
to a tied embedding, a buffer that nothing trains, or nothing; unknown without a config that can be read."""

_FLOATS = {"F64": "d", "F32": "f", "F16": "e", "BF16": "f"}  # with struct's letters


class Values(msgspec.Struct, frozen=True):
    """A tensor's values: mean and spread of the finite ones, the largest size, how many are zero or not finite."""

    mean: float
    std: float
    max_abs: float
    zeros: int
    non_finite: int


class TensorEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor of the files: as its header describes it, and what it is to the model. `bytes` as stored.

    `cut` is true of one that the file ends before or within.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    file: str
    role: Role
    cut: bool = False
    values: Values | None = None


class FileEntry(msgspec.Struct, frozen=True):
    """One file of weights: its name, its size in bytes and how many tensors it holds."""

    name: str
    bytes: int
    tensors: int


class Amount(msgspec.Struct, frozen=True):
    """How much there is of something: tensors, the numbers in them, and their bytes as stored."""

    tensors: int
    values: int
    bytes: int


class TieStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What config and files say of the output matrix, and what loading makes of it.

    `flag` is None where config.json is silent, `tied_in_family` then holds. `equal` and `max_difference` compare the
    two matrices in `rows_compared` of their `rows`; they are None where there are not two, or they cannot be read.
    `decision` is None where loading refuses it (`refused`, and `reason` says why), or where it hangs on values that
    are not here.
    """

    flag: bool | None
    tied_in_family: bool
    embedding: str | None
    head: str | None
    equal: bool | None = None
    max_difference: float | None = None
    rows_compared: int = 0
    rows: int = 0
    decision: Decision | None = None
    refused: bool = False
    reason: str


class MatrixHealth(msgspec.Struct, frozen=True, kw_only=True):
    """The rows of an embedding or output matrix. The norms' mean, spread and range leave zero and broken rows out.

    All of it is said of `rows_read` of the `rows`, evenly spaced; 0 where there was nothing to read.
    """

    side: Side
    name: str
    rows: int
    width: int
    rows_read: int
    zero_rows: int
    non_finite_rows: int
    norm_mean: float | None
    norm_std: float | None
    norm_min: float | None
    norm_max: float | None


class Inspection(msgspec.Struct, frozen=True, kw_only=True):
    """What is in a checkpoint. `problems` is why loading refuses it, and where values are not finite.

    `total` is everything stored, `parameters` what count-params says of these files. `dtypes` is by stored type.
    `missing` are tensors (by Hugging Face's names) that the config's model has and the files lack, `left_over` the
    other way, `ignored` buffers. `config` is None where config.json cannot be read as a known family's.
    """

    target: str
    family: str | None
    config: ModelConfig | None
    files: tuple[FileEntry, ...]
    total: Amount
    parameters: int
    dtypes: dict[str, Amount]
    tie: TieStatus | None
    matrices: tuple[MatrixHealth, ...]
    missing: tuple[str, ...]
    left_over: tuple[str, ...]
    misshapen: tuple[str, ...]
    ignored: tuple[str, ...]
    problems: tuple[str, ...]
    notes: tuple[str, ...]
    tensors: tuple[TensorEntry, ...]


ReadFile = Callable[[Path], dict[str, TensorInfo]]


def inspect(
    path: Path,
    target: str | None = None,
    *,
    remote: Checkpoint | None = None,
    full: bool = False,
    read_file: ReadFile = tensors.read_header,
    read: ReadRows = read_rows,
    progress: Callable[[float], None] = lambda amount: None,
) -> Inspection:
    """What is in the checkpoint at `path`, a folder or a file.

    With `full` every value is read; otherwise a sample of the embedding's and the output matrix' rows. `remote` are
    headers whose files are elsewhere: then no values at all. `read_file` gives the tensors of one file and `read` the
    bytes of a tensor's rows, `progress` is called with each number of bytes gone through by `full`. Raises
    CheckpointError where there is not one tensor to show.
    """
    checkpoint, problems = (remote, []) if remote else open_files(path, read_file)
    here = remote is None
    where = target or str(path)
    notes = list(checkpoint.notes)
    hf = None
    try:
        hf = targets.read_hf_config(path)
        notes += (*hf.notes, *hf.warnings)
    except LlmcliError as error:
        problems.append(_said(error))
        if alike := resembled(checkpoint.infos):
            notes.append(f"the tensors are named as those of {', '.join(alike)}")
    matched = None
    if hf:
        try:
            matched = match(checkpoint.infos, hf.config, where, hf.wrapped)
            notes += left_alone(matched)
            problems += _mismatches(matched, checkpoint.infos, hf.config)
        except CheckpointError as error:
            problems.append(_said(error).removeprefix(f"{where}: "))

    tie = None
    if hf and matched:
        cut = any(name in matched.found and matched.found[name][1].name in checkpoint.cut for name in (EMBEDDING, HEAD))
        tie = tie_status(matched, hf, full=full, read=read if here and not cut else None)
        if tie.refused:
            problems.append(tie.reason)
    roles = _roles(matched, tie)
    values = _all_values(checkpoint, read, progress) if full and here else {}
    for name, found in values.items():
        if found.non_finite:  # which matters where a model is made of them
            place = notes if roles.get(name) == "ignored" else problems
            place.append(f"{name} holds {found.non_finite:,} values that are not finite")
    if hf and matched and (empty := _only_zeros(matched, values, hf.config.family)):
        notes.append(f"nothing but zeros in {listing(grouped(empty), 8)}")
    matrices = _matrices(matched, checkpoint.cut, full=full, read=read) if matched and here else ()
    if not values:
        problems += [
            f"{health.name}: {health.non_finite_rows:,} of {health.rows_read:,} rows hold values that are not finite"
            for health in matrices
            if health.non_finite_rows
        ]
    entries = [
        TensorEntry(
            name=info.name,
            dtype=info.dtype,
            shape=info.shape,
            bytes=info.end - info.start,
            file=info.file.name,
            role=roles.get(info.name, "left over" if matched else "unknown"),
            cut=info.name in checkpoint.cut,
            values=values.get(info.name),
        )
        for info in _in_order(checkpoint.infos.values(), matched)
    ]
    return Inspection(
        target=where,
        family=hf.config.family if hf else None,
        config=hf.config if hf else None,
        files=tuple(_file_entry(file, checkpoint, here) for file in checkpoint.files),
        total=_amount(entries),
        parameters=_parameters(entries, checkpoint, hf, where),
        dtypes={
            dtype: _amount([e for e in entries if e.dtype == dtype])
            for dtype in dict.fromkeys(e.dtype for e in entries)
        },
        tie=tie,
        matrices=matrices,
        missing=matched.missing if matched else (),
        left_over=matched.left_over if matched else (),
        misshapen=matched.misshapen if matched else (),
        ignored=matched.ignored if matched else (),
        problems=tuple(problems),
        notes=tuple(notes),
        tensors=tuple(entries),
    )


def open_files(path: Path, read_file: ReadFile = tensors.read_header) -> tuple[Checkpoint, list[str]]:
    """The tensors of a checkpoint and what is wrong with its files; whatever can be read is, beside what cannot.

    Raises CheckpointError where that leaves nothing.
    """
    try:
        return weight_files.read_checkpoint(path, read_file), []
    except CheckpointError as error:
        if not path.is_dir() and not isinstance(error, tensors.CutShort):
            raise
        refusal = error
    problems = [_said(refusal)]
    infos: dict[str, TensorInfo] = {}
    cut: set[str] = set()
    files = []
    for file in sorted(path.glob("*.safetensors")) if path.is_dir() else [path]:
        try:
            found = tensors.read_header(file) if file == path or weight_files.inside(path, file.name) else {}
        except tensors.CutShort as error:
            problems.append(_said(error))
            found = error.infos
            cut |= error.cut - infos.keys()
        except CheckpointError as error:
            problems.append(_said(error))
            continue
        files.append(file)
        if twice := sorted(infos.keys() & found.keys()):
            problems.append(f"{file.name} holds tensors that another file holds too: {', '.join(grouped(twice))}")
        infos |= {key: info for key, info in found.items() if key not in infos}
    if not infos:
        raise refusal
    return Checkpoint(infos, tuple(files), cut=frozenset(cut)), list(dict.fromkeys(problems))


def tie_status(matched: Match, hf: HfConfig, *, full: bool = False, read: ReadRows | None = read_rows) -> TieStatus:
    """What is said of the output matrix, and what loading decides; `read` None compares nothing."""
    embedding, head = (matched.found[name][1] if name in matched.found else None for name in (EMBEDDING, HEAD))
    equal = difference = None
    compared = 0
    rows = embedding.shape[0] if embedding and len(embedding.shape) == 2 else 0
    if embedding and head and read and rows and embedding.shape == head.shape:
        if full or {embedding.dtype, head.dtype} - _FLOATS.keys():
            equal = tensors.equal(embedding, head, read)
            difference, compared = (0.0 if equal else tensors.max_difference(embedding, head, read)), rows
        else:
            picked = _sample(rows, embedding.shape[1])
            differences = [_row_difference(embedding, head, row, read) for row in picked]
            difference, compared = _largest(differences), len(picked)
            equal = difference == 0
    family = families.get(hf.config.family)
    status = TieStatus(
        flag=hf.tie_flag,
        tied_in_family=family.tied_in_hf,
        embedding=embedding.name if embedding else None,
        head=head.name if head else None,
        equal=equal,
        max_difference=difference,
        rows_compared=compared,
        rows=rows,
        reason="",
    )
    try:
        tie = decide(
            Evidence(
                embedding=embedding.shape if embedding else None,
                head=head.shape if head else None,
                equal=equal,
                max_difference=difference,
                flag=hf.tie_flag,
                tied_in_family=family.tied_in_hf,
            )
        )
    except LlmcliError as error:
        # Two matrices that are not here are nobody's fault.
        return msgspec.structs.replace(status, reason=_said(error), refused=bool(read) or not (embedding and head))
    return msgspec.structs.replace(status, decision=tie.decision, reason=tie.reason)


def matrix_health(info: TensorInfo, side: Side, *, full: bool = False, read: ReadRows = read_rows) -> MatrixHealth:
    """The norms of a matrix' rows: of all of them, or of as many as `SAMPLE_VALUES` allows."""
    rows, width = info.shape
    if full:
        norms = [norm for chunk in _row_norms(info, read) for norm in chunk]
    else:
        norms = [math.hypot(*_row(info, row, read)) for row in _sample(rows, width)]
    sound = [norm for norm in norms if norm and math.isfinite(norm)]
    mean = math.fsum(sound) / len(sound) if sound else None
    return MatrixHealth(
        side=side,
        name=info.name,
        rows=rows,
        width=width,
        rows_read=len(norms),
        zero_rows=norms.count(0.0),
        non_finite_rows=sum(not math.isfinite(norm) for norm in norms),
        norm_mean=mean,
        norm_std=math.sqrt(math.fsum((n - mean) ** 2 for n in sound) / len(sound)) if mean is not None else None,
        norm_min=min(sound, default=None),
        norm_max=max(sound, default=None),
    )


def _sample(rows: int, width: int) -> list[int]:
    """Evenly spaced rows, the first and the last among them (padding stands at the end); all where they are few."""
    count = min(rows, max(2, SAMPLE_VALUES // max(1, width)))
    return [n * (rows - 1) // max(1, count - 1) for n in range(count)]


def _row(info: TensorInfo, row: int, read: ReadRows) -> tuple[float, ...]:
    """One row's numbers, without numpy; exact for every type."""
    raw = read(info, row, row + 1)
    if info.dtype == "BF16":  # the upper half of a float32
        wide = bytearray(2 * len(raw))
        wide[2::4], wide[3::4] = raw[::2], raw[1::2]
        raw = bytes(wide)
    return struct.unpack(f"<{info.shape[1]}{_FLOATS[info.dtype]}", raw)


def _row_difference(a: TensorInfo, b: TensorInfo, row: int, read: ReadRows) -> float:
    """The largest |a - b| in one row, 0 where both hold the same (NaN or infinity too), NaN where only one is NaN."""
    if a.dtype == b.dtype and read(a, row, row + 1) == read(b, row, row + 1):
        return 0.0
    pairs = zip(_row(a, row, read), _row(b, row, read), strict=True)
    return _largest(0.0 if x == y or (x != x and y != y) else abs(x - y) for x, y in pairs)


def _largest(differences: Iterable[float]) -> float:
    """The largest of some numbers; NaN where there is one, which max() would keep or lose as it happens to stand."""
    largest = 0.0
    for difference in differences:
        if not difference <= largest:
            largest = difference
            if largest != largest:
                break
    return largest


def _chunks(info: TensorInfo, read: ReadRows) -> Iterator[npt.NDArray[np.float64]]:
    """A tensor's values as float64 of shape (rows, width), a chunk of rows at a time."""
    import numpy as np

    if not prod(info.shape):
        return
    shape = info.shape or (1,)
    whole = msgspec.structs.replace(info, shape=shape)
    step = max(1, CHUNK_VALUES // max(1, prod(shape[1:])))
    for start in range(0, shape[0], step):
        stop = min(start + step, shape[0])
        with np.errstate(invalid="ignore"):  # a NaN that signals is a NaN
            yield tensors.read_values(whole, start, stop, read).astype(np.float64).reshape(stop - start, -1)


def _row_norms(info: TensorInfo, read: ReadRows) -> Iterator[list[float]]:
    import numpy as np

    for chunk in _chunks(info, read):
        with np.errstate(over="ignore", invalid="ignore"):
            yield np.sqrt(np.einsum("ij,ij->i", chunk, chunk)).tolist()


def values(info: TensorInfo, read: ReadRows = read_rows) -> Values:
    """The statistics of one tensor, read whole but never standing whole in memory."""
    import numpy as np

    count = zeros = non_finite = 0
    total = squares = np.longdouble(0)  # with room for the squares of float64's largest
    largest = 0.0
    for chunk in _chunks(info, read):
        finite = chunk[np.isfinite(chunk)]
        non_finite += chunk.size - finite.size
        zeros += int(chunk.size - np.count_nonzero(chunk))
        count += finite.size
        top = float(np.abs(finite).max(initial=0.0))
        if top > 1e100:
            finite = finite.astype(np.longdouble)
        total += finite.sum()
        squares += np.einsum("i,i->", finite, finite)
        largest = max(largest, top)
    mean = float(total / count) if count else 0.0
    spread = float(np.sqrt(max(np.longdouble(0), squares / count - (total / count) ** 2))) if count else 0.0
    return Values(mean=mean, std=spread, max_abs=largest, zeros=zeros, non_finite=non_finite)


def _all_values(checkpoint: Checkpoint, read: ReadRows, progress: Callable[[float], None]) -> dict[str, Values]:
    result = {}
    for info in checkpoint.infos.values():
        if info.dtype in _FLOATS and info.name not in checkpoint.cut:
            result[info.name] = values(info, read)
        progress(info.end - info.start)
    return result


def _only_zeros(matched: Match, values: dict[str, Values], family: str) -> list[str]:
    """The file's tensors that hold nothing but zeros, of those that should not."""
    sound = {info.name for name, (_, info) in matched.found.items() if may_be_zero(name, family)}
    infos = {info.name: info for _, info in matched.found.values()}
    return [
        name
        for name, info in infos.items()
        if name not in sound and name in values and 0 < prod(info.shape) == values[name].zeros
    ]


def _matrices(matched: Match, cut: frozenset[str], *, full: bool, read: ReadRows) -> tuple[MatrixHealth, ...]:
    sides: tuple[tuple[Side, str], ...] = (("input", EMBEDDING), ("output", HEAD))
    infos = [(side, matched.found[name][1]) for side, name in sides if name in matched.found]
    return tuple(
        matrix_health(info, side, full=full, read=read)
        for side, info in infos
        if len(info.shape) == 2 and min(info.shape) and info.dtype in _FLOATS and info.name not in cut
    )


def _mismatches(matched: Match, infos: dict[str, TensorInfo], config: ModelConfig) -> list[str]:
    """What loading would refuse, a line each; the number of layers first, for it explains most of the rest."""
    there = _layers(infos, config.family)
    explained = there and (matched.missing or matched.left_over) and there != set(range(config.num_layers))
    layers = f"config.json says {config.num_layers} layers, the files hold {len(there)}: {ranges(there)}"
    return [*([layers] if explained else []), *mismatches(matched)]


def _layers(infos: dict[str, TensorInfo], family: str) -> set[int]:
    """The layers of which the files hold any tensor that the family knows."""
    table = families.get(family)
    names = {canonical(weight.hf_name) for weight in (*table.weights, *table.alternatives) if "{i}" in weight.hf_name}
    known = re.compile(
        "|".join(re.escape(n).replace(r"\{i\}", r"(\d+)").replace(r"\{e\}", r"\d+") for n in sorted(names))
    )
    found = (known.fullmatch(canonical(name)) for name in infos)
    return {int(next(filter(None, one.groups()))) for one in found if one}


def _roles(matched: Match | None, tie: TieStatus | None) -> dict[str, Role]:
    """The role of each of the files' tensors by its name; those that have none are not in it."""
    if not matched:
        return {}
    roles: dict[str, Role] = dict.fromkeys(matched.ignored, "ignored")
    for name, (_, info) in matched.found.items():
        roles[info.name] = "model" if name in matched.sources else "misshapen"
    both = tie and tie.embedding and tie.head
    if both and tie and tie.decision == "tie" and tie.head:
        roles[tie.head] = "copy"
        if HEAD_BIAS in matched.found:
            roles[matched.found[HEAD_BIAS][1].name] = "ignored"
    return roles


def _parameters(entries: list[TensorEntry], checkpoint: Checkpoint, hf: HfConfig | None, where: str) -> int:
    """The total that count-params gives for these files: all but buffers and a second copy of the embedding."""
    if any(entry.role == "unknown" for entry in entries):  # names of every family are then looked through
        return params.count_files(checkpoint, hf, where, readable=False).count.total
    return sum(prod(entry.shape) for entry in entries if entry.role not in ("copy", "ignored"))


def _in_order(infos: Iterable[TensorInfo], matched: Match | None) -> list[TensorInfo]:
    """In the order of the forward pass, then what is not part of it, by name, with 2 before 10."""
    place: dict[str, int] = {}
    for n, (_, info) in enumerate(matched.found.values() if matched else ()):
        place.setdefault(info.name, n)
    return sorted(infos, key=lambda info: (place.get(info.name, len(place) + 1 << 40), natural(info.name)))


def natural(name: str) -> list[tuple[int, int, str]]:
    """A key that sorts the numbers in names as numbers."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", name) if part]


def _file_entry(file: Path, checkpoint: Checkpoint, here: bool) -> FileEntry:
    infos = [info for info in checkpoint.infos.values() if info.file == file]
    size = file.stat().st_size if here else max((info.end for info in infos), default=0)
    return FileEntry(file.name, size, len(infos))


def _amount(entries: list[TensorEntry]) -> Amount:
    return Amount(len(entries), sum(prod(entry.shape) for entry in entries), sum(entry.bytes for entry in entries))


def _said(error: LlmcliError) -> str:
    return f"{error.message}. {error.hint}" if error.hint else error.message


class Folded(msgspec.Struct, frozen=True):
    """Tensors that differ only in the numbers in their names, in one line: `h.{0-11}.ln_1.weight`."""

    name: str
    entries: tuple[TensorEntry, ...]


def fold(entries: Iterable[TensorEntry]) -> list[Folded]:
    """Tensors alike but for the layer and expert in their names, together in one line; order is kept."""
    groups: dict[tuple[tuple[str, ...], str, tuple[int, ...], Role, bool], list[TensorEntry]] = {}
    for entry in entries:
        pieces = tuple(NUMBER.split(entry.name))
        groups.setdefault((pieces, entry.dtype, entry.shape, entry.role, entry.cut), []).append(entry)
    folded = []
    for (pieces, *_), group in groups.items():
        numbers = zip(*(NUMBER.findall(entry.name) for entry in group), strict=True)
        shown = [ranges(set(map(int, column))) for column in numbers]
        name = "".join(piece + number for piece, number in zip(pieces, [*shown, ""], strict=True))
        folded.append(Folded(name if len(group) > 1 else group[0].name, tuple(group)))
    return folded


def select(inspection: Inspection, patterns: Iterable[str]) -> Inspection:
    """The inspection with only the tensors whose names fit one of the glob patterns. Raises UsageError for none."""
    patterns = list(patterns)
    fitting = tuple(e for e in inspection.tensors if any(fnmatch.fnmatchcase(e.name, p) for p in patterns))
    if not fitting:
        raise UsageError(
            f"no tensor's name fits {' or '.join(map(repr, patterns))}",
            f"Names are, for example: {', '.join(entry.name for entry in inspection.tensors[:3])}.",
        )
    return msgspec.structs.replace(inspection, tensors=fitting)
