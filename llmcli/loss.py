"""Cross-entropy of the output projection in chunks of positions: the logits (B·T, V) never exist whole.

In a small model with a large vocabulary the output projection is most of the work and nearly all of the memory. Here
one buffer of a few rows of logits serves every chunk in turn: it stays in the cache and costs no fresh pages. The
gradients are taken from it before the next chunk overwrites it, so that backward only has to scale them and no logit is
computed twice (the order of work of arXiv:2410.10989).
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from llmcli.costs import LEAST_ROWS, LOGITS_BUFFER

BUFFER = {"cpu": LOGITS_BUFFER}
"""Bytes of logits kept at once, by device: what stays in a CPU's last cache; elsewhere (2²⁸) what fills the device."""

BLOCK = 2**20
"""Bytes of the buffer that a CPU's inner caches hold."""


def cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    ignore_index: int = -100,
    chunk: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Sum over positions of -log softmax(hidden @ weight.T + bias)[target], in nats: a scalar.

    The same as `F.cross_entropy(logits, targets, reduction="sum")`, gradients included. `hidden` is (..., d), `weight`
    (V, d), `bias` (V,) or None, `targets` (...) with ids below V or `ignore_index`. `chunk` is the number of positions
    at a time, None for as many as fit the buffer; logits that are small anyway are then computed whole, which is
    faster. `softcap` is the model's cap on logits. Under autocast the products run in its type. The sum is float32, or
    float64 from float64 inputs. Gradients are computed with the value, for the inputs that require them; a second
    derivative is an error, and so is a second backward pass.
    """
    device = hidden.device.type
    hidden, targets = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    dtype = torch.promote_types(hidden.dtype, weight.dtype)
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    buffer, row = BUFFER.get(device, 2**28), weight.shape[0] * dtype.itemsize
    if chunk is None and len(hidden) * row <= buffer // 16:
        logits = F.linear(hidden, weight, bias)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        return F.cross_entropy(logits, targets, ignore_index=ignore_index, reduction="sum")
    chunk = chunk or max(LEAST_ROWS, buffer // row)
    learned = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (hidden, weight, bias))
    if not learned:
        total, *_ = _chunked(hidden, weight, bias, targets, ignore_index, chunk, softcap, dtype, [False, False])
        return cast(Tensor, total)
    if dtype == torch.float16:
        dtype = torch.float32  # sums of exponentials, which the gradients are made of, leave float16's range
    result = _CrossEntropy.apply(hidden, weight, bias, targets, ignore_index, chunk, softcap, dtype)  # type: ignore[no-untyped-call]
    return cast(Tensor, result)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        by_hidden, *by_output = ctx.needs_input_grad[:3]
        total, *gradients = _chunked(*inputs, [by_hidden, any(by_output)])
        ctx.save_for_backward(*gradients)
        return cast(Tensor, total)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        # In place: a second matrix as large as the embedding would be most of the memory. Autograd notices if these
        # are asked for again.
        scaled = [saved.mul_(gradient) for saved in ctx.saved_tensors]
        return (*(g if needed else None for g, needed in zip(scaled, ctx.needs_input_grad, strict=False)), *[None] * 5)


# An operator of its own, so that torch.compile calls it as it is instead of unrolling the loop over chunks.
@torch.library.custom_op("llmcli::cross_entropy", mutates_args=())
def _chunked(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    ignore_index: int,
    chunk: int,
    softcap: float | None,
    dtype: torch.dtype,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The loss of hidden (N, d), and its gradients by hidden, weight and bias in their own types.

    `wanted` says which gradients: by hidden, by weight and bias; the others are empty.
    """
    by_hidden, by_weight, by_bias = _no_gradients(hidden, weight, bias, wanted)
    count, vocabulary = len(hidden), len(weight)
    chunk = -(-count // max(1, -(-count // chunk)))  # as many chunks, of equal size
    wide = torch.promote_types(dtype, torch.float32)
    matrix, offset = weight.to(dtype), None if bias is None else bias.to(dtype)
    buffer = hidden.new_empty(chunk, vocabulary, dtype=dtype)
    total = hidden.new_zeros((), dtype=wide)
    for first in range(0, count, max(1, chunk)):
        rows = slice(first, first + chunk)
        states = hidden[rows].to(dtype)  # (C, d)
        counted = (targets[rows] != ignore_index)[:, None]
        target = targets[rows, None].where(counted, 0)
        logits = buffer[: len(states)]  # (C, V)
        if offset is None:
            torch.mm(states, matrix.T, out=logits)
        else:
            torch.addmm(offset, states, matrix.T, out=logits)
        slope = _cap(logits, softcap, any(wanted)) if softcap is not None else None

        # softmax = e / norm with e = exp(logits - highest). From here on the buffer holds e.
        right = logits.gather(1, target).to(wide)
        highest, norm = _exponentials(logits, wide)
        right -= highest
        total += (norm.log() - right).where(counted, 0).sum()
        if not any(wanted):
            continue

        # The gradient by the logits is (e - norm at the target) / norm. Dividing the states and their gradient, which
        # are narrow, spares the buffer a pass.
        logits[torch.arange(len(logits), device=logits.device), target[:, 0]] = (right.exp() - norm)[:, 0].to(dtype)
        if slope is not None:
            logits.mul_(slope)
        scale = norm.reciprocal().where(counted, 0)
        if wanted[0]:
            by_hidden[rows] = torch.mm(logits, matrix) * scale
        if wanted[1]:
            scaled = (states * scale).to(dtype)
            _add_product(by_weight, logits, scaled)
            if bias is not None:
                by_bias += torch.mv(logits.T, scale[:, 0].to(dtype))
    return total, by_hidden, by_weight, by_bias


def _cap(logits: Tensor, softcap: float, learned: bool) -> Tensor | None:
    """Cap logits in place, as c·tanh(logits / c); the derivative, where one is to be learned from."""
    logits.div_(softcap).tanh_()
    slope = 1 - logits * logits if learned else None
    logits.mul_(softcap)
    return slope


def _exponentials(logits: Tensor, wide: torch.dtype) -> tuple[Tensor, Tensor]:
    """exp(logits - highest) in place of the logits (C, V); the highest of each row and the row's sum, (C, 1) each."""
    if logits.device.type != "cpu":
        highest = logits.amax(-1, keepdim=True)
        return highest, logits.sub_(highest).exp_().sum(-1, keepdim=True, dtype=wide)
    # A CPU would go through memory once for each operation, and widen all of the buffer for the sum: so a few rows at a
    # time, as many as its inner caches hold.
    found = []
    for some in torch.split(logits, max(1, BLOCK // (logits.shape[1] * wide.itemsize))):
        highest = some.amax(-1, keepdim=True)
        exponentials = some.to(wide).sub_(highest).exp_()
        found.append((highest, exponentials.sum(-1, keepdim=True)))
        if exponentials.dtype != some.dtype:
            some.copy_(exponentials)
    return torch.cat([highest for highest, _ in found]), torch.cat([norm for _, norm in found])


def _add_product(sums: Tensor, rows: Tensor, states: Tensor) -> None:
    """sums (V, d) += rows (C, V).T @ states (C, d), in the type of `sums`."""
    if sums.dtype == rows.dtype:
        sums.addmm_(rows.T, states)
        return
    step = max(LEAST_ROWS, BLOCK // states[0].nbytes)  # in parts, because of the copies that a sum of two types makes
    for part, columns in zip(torch.split(sums, step), torch.split(rows, step, 1), strict=True):
        part += torch.mm(columns.T, states)


def _no_gradients(hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: list[bool]) -> list[Tensor]:
    """Zeros to add the gradients to: of an input's shape, or of none where it is not wanted."""
    by_hidden, by_output = wanted
    tensors = ((hidden, by_hidden), (weight, by_output), (bias, by_output))
    return [torch.zeros_like(t) if t is not None and want else hidden.new_empty(0) for t, want in tensors]


@_chunked.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    ignore_index: int,
    chunk: int,
    softcap: float | None,
    dtype: torch.dtype,
    wanted: list[bool],
) -> tuple[Tensor, ...]:
    total = hidden.new_empty((), dtype=torch.promote_types(dtype, torch.float32))
    return total, *_no_gradients(hidden, weight, bias, wanted)
