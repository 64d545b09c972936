"""A tensor made small enough to look at: cells, each shown by its farthest value, and pictures of some rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

POSITIVE = {"weights", "router", "expert_weights", "probabilities"}
"""Kinds whose values run from zero upwards; all others lie around zero."""
SKETCH_ROWS, SKETCH_COLUMNS, SKETCH_PANELS = 12, 48, 8


def farthest(tensor: Tensor, steps: Sequence[int]) -> Tensor:
    """Of each cell of so many steps along every axis the value that is farthest from zero."""
    for axis in reversed(range(tensor.dim())):  # the last axis first: its values lie side by side
        if (step := steps[axis]) > 1:
            rows = tensor.movedim(axis, -1)
            whole = rows.shape[-1] // step * step
            parts = [rows[..., :whole].reshape(*rows.shape[:-1], -1, step), rows[..., None, whole:]]
            found = [_farthest(part) for part in parts if part.numel()]
            tensor = torch.cat(found, -1).movedim(-1, axis)
    return tensor


def _farthest(cells: Tensor) -> Tensor:
    low, high = torch.aminmax(cells, dim=-1)
    return torch.where(-low > high, low, high)


def sketch(name: str, tensor: Tensor) -> list[list[list[int]]]:
    """A small picture of a tensor: up to eight panels (heads) of rows of values from -127 to 127, 0 in the middle.

    Rows, columns and heads are sampled at even distances; of attention and of the vocabulary the largest are taken.
    """
    kind = name.rpartition(".")[2]
    panels = tensor if tensor.dim() == 3 else tensor[None] if tensor.dim() == 2 else tensor[None, None]
    panels = _evenly(panels, 0, SKETCH_PANELS)
    columns = SKETCH_COLUMNS // panels.shape[0] if kind != "weights" else SKETCH_ROWS
    if kind == "weights":  # what counts is rare: the largest, not a sample
        panels = farthest(panels, [1, -(-panels.shape[1] // SKETCH_ROWS), 1])
    panels = _evenly(panels, 1, SKETCH_ROWS)
    if kind in ("weights", "logits", "probabilities"):
        panels = farthest(panels, [1, 1, -(-panels.shape[2] // columns)])
    panels = _evenly(panels, 2, columns).float()
    # A few dimensions are often far larger than all others: they may saturate, or nothing else would show.
    limit = float(panels.max()) if kind in POSITIVE or kind == "experts" else 3 * float(panels.square().mean().sqrt())
    scaled = (panels * (127 / limit if limit > 0 else 0)).nan_to_num(0).clamp(-127, 127).round().int()
    drawn: list[list[list[int]]] = scaled.tolist()
    return drawn


def _evenly(tensor: Tensor, axis: int, most: int) -> Tensor:
    """Up to `most` places along an axis, evenly apart, both ends included."""
    size = tensor.shape[axis]
    if size <= most:
        return tensor
    return tensor.index_select(axis, torch.linspace(0, size - 1, most, device=tensor.device).round().long())
