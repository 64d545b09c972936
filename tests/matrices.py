"""Matrices of token vectors written as safetensors without torch, and checked against plain float64."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from llmcli import tensors
from llmcli.matrix import Matrix, find_matrix

NAME = "model.embed_tokens.weight"
Values = npt.NDArray[Any]


def random(rows: int, width: int, seed: int = 0) -> Values:
    """Rows of normally distributed numbers, the same for the same seed."""
    return np.random.default_rng(seed).standard_normal((rows, width)).astype(np.float32)


def as_read(found: Matrix) -> Values:
    """The values that the file really holds, as float64."""
    array = tensors.read_array(found.info)
    return tensors.as_float32(array, found.info.dtype).astype(np.float64) if array.dtype != "f8" else array


def stored(values: Values, dtype: str) -> Values:
    """Values as a file of that type holds them; bfloat16 by cutting bits off."""
    if dtype == "BF16":
        bits: Values = (np.ascontiguousarray(values, "<f4").view("<u4") >> 16).astype("<u2")
        return bits
    return np.ascontiguousarray(values, {"F64": "<f8", "F32": "<f4", "F16": "<f2"}[dtype])


def write(folder: Path, matrices: dict[str, Values], dtype: str = "F32", before: int = 0) -> Path:
    """A folder whose model.safetensors holds the matrices, `before` numbers of a vector in front of them."""
    folder.mkdir(parents=True, exist_ok=True)
    arrays = ({"a": np.zeros(before)} if before else {}) | matrices
    raw = {name: stored(array, dtype) for name, array in arrays.items()}
    header = tensors.write_header((name, dtype, array.shape) for name, array in raw.items())
    (folder / "model.safetensors").write_bytes(header + b"".join(array.tobytes() for array in raw.values()))
    return folder


def matrix(folder: Path, values: Values, dtype: str = "F32", before: int = 0) -> Matrix:
    """A matrix written and found again."""
    return find_matrix(write(folder, {NAME: values}, dtype, before))


def config(folder: Path, vocab_size: int, embed_dim: int, **changes: Any) -> None:
    """A LLaMA's config.json beside a matrix; tied, unless told otherwise."""
    table = {
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": embed_dim,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(table | changes))


def plain(rows: Values, query: Values, metric: str = "cosine") -> Values:
    """The scores of all rows, in float64, as the definitions say. Larger is better (l2: minus the distance)."""
    rows, query = rows.astype(np.float64), query.astype(np.float64)
    if metric == "l2":
        return -np.linalg.norm(rows - query, axis=1)
    dots = (rows * query).sum(1)
    return dots if metric == "dot" else dots / (np.linalg.norm(rows, axis=1) * np.linalg.norm(query))


def ranking(scores: Values, leave_out: tuple[int, ...] = ()) -> list[int]:
    """The rows by falling score, equal ones by id."""
    order = np.argsort(-scores, kind="stable")
    return [int(id) for id in order if id not in leave_out]
