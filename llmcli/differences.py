"""Two checkpoints side by side: which tensors only one has, which are equal, and how far apart the others are.

Tensors are paired by name without the prefixes that wrappers and base models put in front (`mapping.canonical`), so
that a checkpoint compares with its own clean copy. Values are compared as numbers: a bfloat16 copy of a float32 tensor
differs by its rounding, and the report says by how much.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from llmcli import tensors
from llmcli.errors import TokenizerError
from llmcli.mapping import canonical
from llmcli.tensors import ReadRows, TensorInfo, read_rows
from llmcli.weight_files import Checkpoint

if TYPE_CHECKING:
    import numpy.typing as npt

    from llmcli.config import ModelConfig
    from llmcli.inspection import Inspection, TieStatus

CHUNK_VALUES = 1 << 18
"""How many values of each side stand in memory at a time."""

Kind = Literal["equal", "different", "shape"]


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor in both, by its name in a. `kind` is "shape" where the shapes do not fit and no values were compared.

    `largest` is the largest |a - b| and `relative` the norm of a - b over the norm of a; NaN where one side has a NaN
    or an infinity that the other has not. `transposed` says that b was turned to a's shape first.
    """

    name: str
    kind: Kind
    dtypes: tuple[str, str]
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    transposed: bool = False
    largest: float = 0.0
    relative: float = 0.0


class ConfigDifference(msgspec.Struct, frozen=True):
    """One field of the model's config in which the two differ."""

    field: str
    a: Any
    b: Any


class Differences(msgspec.Struct, frozen=True, kw_only=True):
    """What lies between checkpoints `a` and `b`. `equal` counts tensors of equal values, `retyped` those of them that
    are stored in two types; `different` begins with the largest relative difference. `problems` are those of each."""

    a: str
    b: str
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    equal: int
    retyped: int
    different: tuple[Difference, ...]
    misshapen: tuple[Difference, ...]
    ties: tuple[TieStatus | None, TieStatus | None]
    config: tuple[ConfigDifference, ...]
    problems: tuple[tuple[str, ...], tuple[str, ...]]
    tokenizer: str = ""
    """What differs between their tokenizers, in words; empty where nothing does, and where one of them has none."""


class Pairs(msgspec.Struct, frozen=True):
    """The tensors that two checkpoints share by name (without prefixes), and the names that only one of them has."""

    both: dict[str, tuple[TensorInfo, TensorInfo]]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]


def pair(a: Checkpoint, b: Checkpoint, keep: Callable[[str], bool] = lambda name: True) -> Pairs:
    """Pair the tensors that are to be kept, by name without prefixes (or with, where two names would become one)."""
    by_a, by_b = ({key: info for key, info in _by_name(checkpoint).items() if keep(info.name)} for checkpoint in (a, b))
    return Pairs(
        {name: (info, by_b[name]) for name, info in by_a.items() if name in by_b},
        tuple(info.name for name, info in by_a.items() if name not in by_b),
        tuple(info.name for name, info in by_b.items() if name not in by_a),
    )


def _by_name(checkpoint: Checkpoint) -> dict[str, TensorInfo]:
    named = {canonical(name): info for name, info in checkpoint.infos.items()}
    return named if len(named) == len(checkpoint.infos) else checkpoint.infos


def compare(pairs: Pairs, read: ReadRows = read_rows) -> Iterator[tuple[Difference, int]]:
    """Each pair's difference and the bytes gone through for it, one at a time; only a chunk stands in memory.

    Raises CheckpointError for a file that can no longer be read.
    """
    for a, b in pairs.both.values():
        yield _difference(a.name, a, b, read), a.end - a.start + b.end - b.start


def summary(
    a: str,
    b: str,
    pairs: Pairs,
    found: list[Difference],
    sides: tuple[Inspection | None, Inspection | None],
    tokenizer: str = "",
) -> Differences:
    """All of them in one report; `sides` is what is known of each besides its tensors."""
    first, second = sides
    different = [difference for difference in found if difference.kind == "different"]
    return Differences(
        a=a,
        b=b,
        only_a=pairs.only_a,
        only_b=pairs.only_b,
        equal=sum(difference.kind == "equal" for difference in found),
        retyped=sum(d.kind == "equal" and d.dtypes[0] != d.dtypes[1] for d in found),
        different=tuple(sorted(different, key=_size, reverse=True)),
        misshapen=tuple(difference for difference in found if difference.kind == "shape"),
        ties=(first.tie if first else None, second.tie if second else None),
        config=differing(first.config if first else None, second.config if second else None),
        problems=(first.problems if first else (), second.problems if second else ()),
        tokenizer=tokenizer,
    )


def of_tokenizers(a: Path, b: Path) -> str:
    """What differs between the tokenizers of two checkpoints, as `Differences.tokenizer` has it."""
    files = [(path if path.is_dir() else path.parent) / "tokenizer.json" for path in (a, b)]
    if not all(file.is_file() for file in files) or files[0].read_bytes() == files[1].read_bytes():
        return ""
    from llmcli import tokenizer

    try:
        one, other = tokenizer.load(a), tokenizer.load(b)
    except TokenizerError as error:
        return error.message
    if one.fingerprint == other.fingerprint:
        return ""
    size = max(one.size, other.size)
    apart = sum(one.token(id) != other.token(id) for id in range(size))
    return f"{apart:,} of {size:,} tokens" if apart else "the same tokens, made of text in another way"


def differing(a: ModelConfig | None, b: ModelConfig | None) -> tuple[ConfigDifference, ...]:
    """The fields of two configs that are not the same; none where one of them is not known."""
    if a is None or b is None:
        return ()
    return tuple(
        ConfigDifference(field, getattr(a, field), getattr(b, field))
        for field in a.__struct_fields__
        if getattr(a, field) != getattr(b, field)
    )


def _size(difference: Difference) -> float:
    return math.inf if math.isnan(difference.relative) else difference.relative


def _difference(name: str, a: TensorInfo, b: TensorInfo, read: ReadRows) -> Difference:
    dtypes, shapes = (a.dtype, b.dtype), (a.shape, b.shape)
    transposed = a.shape != b.shape and a.shape == b.shape[::-1]
    if a.shape != b.shape and not transposed:
        return Difference(name=name, kind="shape", dtypes=dtypes, shapes=shapes)
    largest = squares = norm = 0.0
    # Equal tensors are the usual case, and as bytes they are compared several times as fast as as numbers.
    if transposed or not tensors.equal(a, b, read):
        for x, y in _chunks(a, b, read, transposed):
            chunk_largest, chunk_squares, chunk_norm = _distance(x, y)
            largest = chunk_largest if math.isnan(chunk_largest) or chunk_largest > largest else largest
            squares += chunk_squares
            norm += chunk_norm
    if largest == 0:
        return Difference(name=name, kind="equal", dtypes=dtypes, shapes=shapes, transposed=transposed)
    return Difference(
        name=name,
        kind="different",
        dtypes=dtypes,
        shapes=shapes,
        transposed=transposed,
        largest=largest,
        relative=math.sqrt(squares / norm) if norm else math.inf,
    )


def _distance(x: npt.NDArray[Any], y: npt.NDArray[Any]) -> tuple[float, float, float]:
    """The largest |x - y|, the sum of its squares, and that of x's; the same NaN or infinity is no distance."""
    import numpy as np

    with np.errstate(invalid="ignore", over="ignore"):
        apart = x - y
        largest = max(float(apart.max(initial=0.0)), -float(apart.min(initial=0.0)))
        if math.isfinite(largest):
            return largest, float(np.vdot(apart, apart)), float(np.vdot(x, x))
        apart = np.where((x == y) | (np.isnan(x) & np.isnan(y)), 0.0, np.abs(x - y))
        sound = np.where(np.isfinite(x), x, 0.0)
        return float(apart.max(initial=0.0)), float(np.vdot(apart, apart)), float(np.vdot(sound, sound))


def _chunks(
    a: TensorInfo, b: TensorInfo, read: ReadRows, transposed: bool
) -> Iterator[tuple[npt.NDArray[Any], npt.NDArray[Any]]]:
    """Both tensors' values as float64, flat and chunk by chunk; b in a's layout."""
    import numpy as np

    if not prod(a.shape):
        return
    a, b = (msgspec.structs.replace(info, shape=info.shape or (1,)) for info in (a, b))
    # A transposed matrix is read whole: its rows are the other's columns.
    turned = tensors.read_values(b, 0, b.shape[0], read).reshape(b.shape).T if transposed else None
    step = max(1, CHUNK_VALUES // prod(a.shape[1:]))
    for start in range(0, a.shape[0], step):
        stop = min(start + step, a.shape[0])
        x = tensors.read_values(a, start, stop, read).astype(np.float64)
        y = tensors.read_values(b, start, stop, read) if turned is None else turned[start:stop].ravel()
        yield x, y.astype(np.float64)
