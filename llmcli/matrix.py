"""Which tensor of a checkpoint is the embedding matrix, which the output projection: from headers alone, no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from llmcli import families, targets, weight_files
from llmcli.config import ModelConfig
from llmcli.errors import CheckpointError, ConfigError, dimensions, listing
from llmcli.mapping import EMBEDDING, HEAD, canonical
from llmcli.tensors import TensorInfo

Side = Literal["input", "output"]

# What public checkpoints call the two matrices, without the names of the models around them. Where the family's table
# does not say (an unknown family, a file without config.json), a tensor whose name ends in one of these is taken.
_KNOWN: dict[Side, tuple[str, ...]] = {
    "input": (
        "embed_tokens.weight", "wte.weight", "token_embeddings.weight", "tokens_embed.weight", "word_embeddings.weight",
        "tok_embeddings.weight", "embed_in.weight", "token_embedding.weight", "tok_emb.weight", "shared.weight",
        "backbone.embeddings.weight", "model.embeddings.weight",
    ),
    "output": ("lm_head.weight", "output_projection.weight", "embed_out.weight", "output.weight"),
}  # fmt: skip


class Matrix(msgspec.Struct, frozen=True):
    """One matrix of token vectors in a file, (V, d), and what is worth saying of how it was found."""

    info: TensorInfo
    side: Side
    scale: float = 1.0
    """What the model multiplies a row by when it looks it up (Gemma: the root of d)."""
    tied: bool = False
    """Whether the same matrix is both the input's and the output's."""
    notes: tuple[str, ...] = ()

    @property
    def rows(self) -> int:
        """V: the number of rows, padding included."""
        return self.info.shape[0]

    @property
    def width(self) -> int:
        """d: the length of a row."""
        return self.info.shape[1]


def find_matrix(path: Path, side: Side = "input") -> Matrix:
    """The matrix of token vectors that a checkpoint looks up going in, or scores against coming out.

    Found by the family's table; where there is none, by the names that public checkpoints use, and a note says so.
    Only headers are read. Raises CheckpointError when there is no such matrix, or more than one.
    """
    checkpoint = weight_files.read_checkpoint(path)
    notes = list(checkpoint.notes)
    config: ModelConfig | None = None
    try:
        config = targets.read_hf_config(path).config
    except (CheckpointError, ConfigError) as error:
        notes.append(f"the matrix is found by its name alone: {error.message}")
    sides: dict[Side, TensorInfo | None] = {which: _find(checkpoint.infos, which, config) for which in _KNOWN}
    found, other = sides[side], sides["output" if side == "input" else "input"]
    tied = config is not None and config.tie_word_embeddings and None in sides.values()
    if found is None and other is not None and (tied or config is None):
        # Tied files hold one matrix under either name; a file that says nothing more than that may well be one.
        found = other
        if side == "input":
            notes.append(f"no embedding in the file: the output matrix '{other.name}' serves as both")
        elif config is None:
            notes.append(f"no output matrix in the file: '{other.name}' is taken to serve as both")
    if found is None:
        kind = "embedding" if side == "input" else "output"
        why = " (its config says that the output is not tied to the embedding)" if other is not None else ""
        hint = f"It holds {listing(checkpoint.infos, 8)}."
        if other is not None:
            hint = (
                f"Look at --matrix {'output' if side == 'input' else 'input'}. If '{other.name}' is meant to serve as "
                f"both, write that down: llmcli load-hf {path} --tie tie --out DIR."
            )
        raise CheckpointError(f"{path}: no {kind} matrix among its {len(checkpoint.infos)} tensors{why}", hint)
    if len(found.shape) != 2 or found.dtype not in ("F64", "F32", "F16", "BF16"):
        raise CheckpointError(
            f"{found.file}: tensor '{found.name}' is {found.dtype} of shape {dimensions(found.shape)}, "
            "not a matrix of numbers",
            "Quantised checkpoints are not read; get the original one.",
        )
    if config is not None and found.shape[1] != config.embed_dim:
        raise CheckpointError(
            f"{found.file}: the rows of '{found.name}' are {found.shape[1]} long, the config says {config.embed_dim}",
            "The file and its config.json do not belong together.",
        )
    if 0 in found.shape:
        raise CheckpointError(f"{found.file}: tensor '{found.name}' is empty", "Get the file again.")
    scale = float(found.shape[1] ** 0.5) if config is not None and config.scale_embeddings else 1.0
    return Matrix(found, side, scale, tied, tuple(notes))


def _find(infos: dict[str, TensorInfo], side: Side, config: ModelConfig | None) -> TensorInfo | None:
    found: list[TensorInfo] = []
    if config is not None:
        family = families.get(config.family)
        ours = EMBEDDING if side == "input" else HEAD
        names = {canonical(weight.hf_name) for weight in (*family.weights, *family.alternatives) if weight.name == ours}
        found = [info for name, info in infos.items() if canonical(name) in names]
    if not found:
        found = [info for name, info in infos.items() if any(f".{name}".endswith(f".{end}") for end in _KNOWN[side])]
    if len(found) > 1:
        raise CheckpointError(
            f"{found[0].file.parent}: {len(found)} tensors may be the {side} matrix: "
            f"{', '.join(info.name for info in found)}",
            "Keep one of them in the file.",
        )
    return found[0] if found else None
