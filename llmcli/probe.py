"""Which rows of an embedding matrix lie near a vector: exact scores, one tensor read, no torch.

The matrix stays in its file. It is scanned in chunks of a few megabytes; what is kept of a pass is one number a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from llmcli import families, targets, tensors
from llmcli.config import ModelConfig
from llmcli.errors import CheckpointError, ConfigError, UsageError
from llmcli.mapping import EMBEDDING, HEAD, canonical
from llmcli.tensors import TensorInfo

Floats = npt.NDArray[np.float64]
Side = Literal["input", "output"]

# What public checkpoints call the two matrices, without the names of the models around them. Where the family's table
# does not say (an unknown family, a file without config.json), a tensor whose name ends in one of these is taken.
_KNOWN: dict[Side, tuple[str, ...]] = {
    "input": (
        "embed_tokens.weight", "wte.weight", "token_embeddings.weight", "tokens_embed.weight", "word_embeddings.weight",
        "tok_embeddings.weight", "embed_in.weight", "token_embedding.weight", "tok_emb.weight", "shared.weight",
    ),
    "output": ("lm_head.weight", "output_projection.weight", "embed_out.weight", "output.weight"),
}  # fmt: skip


class Matrix(msgspec.Struct, frozen=True):
    """One matrix of token vectors in a file, (V, d), and what is worth saying of how it was found."""

    info: TensorInfo
    scale: float = 1.0
    """What the model multiplies a row by when it looks it up (Gemma: the root of d)."""
    tied: bool = False
    """Whether the same matrix is both the input's and the output's."""
    notes: tuple[str, ...] = ()

    @property
    def rows(self) -> int:
        return self.info.shape[0]

    def vectors(self, ids: Sequence[int] | npt.NDArray[np.intp]) -> Floats:
        """The rows `ids` as float64, (n, d)."""
        chosen = tensors.read_array(self.info)[np.asarray(ids, np.intp)]
        return tensors.as_float32(chosen, self.info.dtype).astype(np.float64)


def find_matrix(path: Path, side: Side = "input") -> Matrix:
    """The matrix of token vectors that a checkpoint looks up going in, or scores against coming out.

    Found by the family's table; where there is none, by the names that public checkpoints use, and a note says so.
    Raises CheckpointError when there is no such matrix, or more than one.
    """
    checkpoint = tensors.read_checkpoint(path)
    notes = list(checkpoint.notes)
    config, tied = _config(path, notes)
    found = {which: _find(checkpoint.infos, which, config, notes) for which in _KNOWN}
    wanted, other = found[side], found["output" if side == "input" else "input"]
    if wanted is None:
        if other is None or (side == "output" and tied is False):
            here = ", ".join(list(checkpoint.infos)[:8])
            kind = "embedding" if side == "input" else "output"
            raise CheckpointError(
                f"{path}: no {kind} matrix among its {len(checkpoint.infos)} tensors", f"It holds {here}."
            )
        if side == "input":
            notes.append(f"no embedding in the file: the output matrix {other.name} serves as both")
        wanted, other = other, None
    _check(wanted, config)
    same = other is None and tied is not False
    scale = float(np.sqrt(wanted.shape[1])) if config is not None and config.scale_embeddings else 1.0
    return Matrix(wanted, scale, same, tuple(notes))


def _config(path: Path, notes: list[str]) -> tuple[ModelConfig | None, bool | None]:
    try:
        hf = targets.read_hf_config(path)
    except (CheckpointError, ConfigError) as error:
        notes.append(f"the embedding is found by its name alone: {error.message}")
        return None, None
    return hf.config, hf.config.tie_word_embeddings


def _find(infos: dict[str, TensorInfo], side: Side, config: ModelConfig | None, notes: list[str]) -> TensorInfo | None:
    if config is not None:
        family = families.get(config.family)
        ours = EMBEDDING if side == "input" else HEAD
        names = {canonical(w.hf_name) for w in (*family.weights, *family.alternatives) if w.name == ours}
        found = [info for name, info in infos.items() if canonical(name) in names]
    else:
        found = []
        for ending in _KNOWN[side]:
            found += [info for name, info in infos.items() if f".{name}".endswith(f".{ending}")]
    if len(found) > 1:
        raise CheckpointError(
            f"{found[0].file.parent}: {len(found)} tensors may be the {side} matrix: "
            f"{', '.join(t.name for t in found)}",
            "Keep one of them in the file.",
        )
    return found[0] if found else None


def _check(info: TensorInfo, config: ModelConfig | None) -> None:
    if len(info.shape) != 2 or info.dtype not in ("F64", "F32", "F16", "BF16"):
        shape = " x ".join(map(str, info.shape))
        raise CheckpointError(
            f"{info.file}: tensor '{info.name}' is {info.dtype} of shape {shape}, not a matrix of floating-point rows",
            "Quantised checkpoints are not read; get the original one.",
        )
    if config is not None and info.shape[1] != config.embed_dim:
        raise CheckpointError(
            f"{info.file}: the rows of '{info.name}' have {info.shape[1]} columns, the config says {config.embed_dim}",
            "The file and its config.json do not belong together.",
        )


class Hit(msgspec.Struct, frozen=True):
    """A row and its score."""

    id: int
    score: float


def nearest(
    matrix: Matrix, query: Floats, k: int, *, rows: int | None = None, exclude: Sequence[int] = ()
) -> list[Hit]:
    """The `k` rows of highest cosine similarity to `query` (d), best first, equal scores in order of id."""
    if k < 0:
        raise UsageError(f"-k {k}: a number of neighbours is not negative")
    length = np.linalg.norm(query)
    if not np.isfinite(length) or length == 0:
        raise UsageError("the query is a zero or non-finite vector: it has no direction", "Choose another token.")
    count = matrix.rows if rows is None else min(rows, matrix.rows)
    scores = np.empty(count)
    array: npt.NDArray[Any] = tensors.read_array(matrix.info)
    for start in range(0, count, 512):
        block = tensors.as_float32(array[start : min(start + 512, count)], matrix.info.dtype).astype(np.float64)
        with np.errstate(invalid="ignore", divide="ignore"):
            scores[start : start + 512] = (block * query).sum(1) / (np.sqrt((block * block).sum(1)) * length)
    scores[list(exclude)] = np.nan
    order = np.argsort(-scores, kind="stable")[: min(k, int(np.isfinite(scores).sum()))]
    return [Hit(int(i), float(scores[i])) for i in order]
