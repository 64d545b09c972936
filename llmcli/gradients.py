"""Where an embedding's gradient comes from: the rows looked up going in, and the scores coming out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import cast

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor

from llmcli.errors import UsageError
from llmcli.model import Decoder


class Gradients(msgspec.Struct, frozen=True):
    """The gradient of one loss by its two paths, (V, d) each.

    `input` reaches the embedding through the rows that were looked up; `output` reaches the matrix that scores:
    the embedding itself when tied (its gradient is then the sum), else the output projection.
    """

    loss: float
    input: Tensor
    output: Tensor


class Part(msgspec.Struct, frozen=True):
    """How many rows a path reaches with a gradient that is not zero, and the norm of all of it."""

    rows: int
    norm: float


class Row(msgspec.Struct, frozen=True):
    """A row of E: how often its token stood at a position that was read and was the one to predict, and the norm of
    its gradient by each path and, when tied, of the sum."""

    token: str
    id: int
    as_input: int
    as_target: int
    input_norm: float
    output_norm: float
    sum_norm: float | None


class GradientReport(msgspec.Struct, frozen=True, kw_only=True):
    """One backward pass seen from the embedding. `sum` and `cosine` (of the two parts) are None when not tied.

    `rows` are the tokens of the text; `others` the rows with the largest output gradient that do not occur in it.
    """

    tied: bool
    loss: float
    positions: int
    vocab_size: int
    input: Part
    output: Part
    sum: Part | None
    cosine: float | None
    rows: tuple[Row, ...]
    others: tuple[Row, ...]


def split(model: Decoder, ids: Tensor) -> Gradients:
    """The gradient of the mean next-token loss of ids (B, T), by its two paths. The model's own gradients stay as they
    were.

    The pass is cut at the hidden states: below the cut the embedding is only looked up, above it only scored against.
    Raises UsageError for fewer than two positions.
    """
    if ids.shape[1] < 2:
        raise UsageError("one token has no next one to predict", "Give a longer text.")
    model.check_ids(ids)
    parameters = list(model.parameters())
    wanted = [parameter.requires_grad for parameter in parameters]
    embedding = model.token_embeddings.weight
    head = embedding if model.output_projection is None else model.output_projection.weight
    try:
        for parameter in parameters:
            parameter.requires_grad_(parameter is embedding or parameter is head)
        with torch.enable_grad():
            hidden = model.hidden(ids[:, :-1])
            cut = hidden.detach().requires_grad_()
            logits = model.scores(cut)
            loss = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
            output, at_cut = torch.autograd.grad(loss, (head, cut))
            (below,) = torch.autograd.grad(hidden, (embedding,), at_cut)
    finally:
        for parameter, before in zip(parameters, wanted, strict=True):
            parameter.requires_grad_(before)
    return Gradients(float(loss.detach()), below, output)


def report(model: Decoder, ids: Tensor, names: Sequence[str], most: int = 10) -> GradientReport:
    """The report on ids (B, T); `names` has the name of every row, `most` bounds the rows that are not in the text."""
    parts = split(model, ids)
    tied = model.output_projection is None
    total = parts.input + parts.output if tied else None
    as_input, as_target = Counter(ids[:, :-1].flatten().tolist()), Counter(ids[:, 1:].flatten().tolist())
    input_norms, output_norms = _norms(parts.input), _norms(parts.output)
    sum_norms = None if total is None else _norms(total)

    def row(id: int) -> Row:
        both = None if sum_norms is None else float(sum_norms[id])
        return Row(names[id], id, as_input[id], as_target[id], float(input_norms[id]), float(output_norms[id]), both)

    occurring = sorted(as_input.keys() | as_target.keys())
    outside = output_norms.clone()
    outside[occurring] = -1
    order = outside.argsort(descending=True, stable=True)[: min(most, model.config.vocab_size - len(occurring))]
    by_size = output_norms + input_norms if sum_norms is None else sum_norms
    return GradientReport(
        tied=tied,
        loss=parts.loss,
        positions=ids[:, 1:].numel(),
        vocab_size=model.config.vocab_size,
        input=_part(parts.input),
        output=_part(parts.output),
        sum=None if total is None else _part(total),
        cosine=float(F.cosine_similarity(parts.input.flatten().double(), parts.output.flatten().double(), dim=0))
        if tied
        else None,
        rows=tuple(row(id) for id in sorted(occurring, key=lambda id: (-float(by_size[id]), id))),
        others=tuple(row(id) for id in cast(list[int], order.tolist())),
    )


def _norms(gradient: Tensor) -> Tensor:
    return cast(Tensor, gradient.double().norm(dim=1))


def _part(gradient: Tensor) -> Part:
    return Part(int((gradient != 0).any(1).sum()), float(gradient.double().norm()))
