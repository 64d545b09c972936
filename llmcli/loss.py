"""Cross-entropy of the output projection in chunks of positions: the logits (B·T, V) never exist whole.

In a small model with a large vocabulary the output projection is most of the work and nearly all of the memory. Here
one buffer of a few rows of logits serves every chunk in turn: it stays in the cache, costs no fresh pages, and the
gradients leave it before the next chunk enters, so that backward has nothing left to do but to scale them.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

BUFFER_BYTES = {"cpu": 2**25}
"""Size of the buffer of logits by device: on a CPU what its last cache holds, elsewhere (2²⁸) enough to fill a GPU."""
LEAST_ROWS = 128
"""Positions in a chunk whatever the vocabulary: with fewer, matrix products lose their speed."""


def cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    ignore_index: int = -100,
    chunk: int | None = None,
) -> Tensor:
    """Sum over positions of −log softmax(hidden @ weight.T + bias)[target], in nats: what
    `F.cross_entropy(..., reduction="sum")` says of the same logits.

    `hidden` is (..., d), `weight` (V, d), `bias` (V,) or None, `targets` (...) with ids below V or `ignore_index`;
    `chunk` is the number of positions at a time (by itself as many as keep the buffer in the cache). Under autocast
    the products run in its type. The sum is float32, or float64 for float64 inputs. Gradients come with the value, for
    those inputs that require them; a second derivative, or a second backward pass, is an error.
    """
    inputs = (hidden, weight) if bias is None else (hidden, weight, bias)
    hidden, targets = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    device = hidden.device.type
    dtype = torch.promote_types(hidden.dtype, weight.dtype)
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    wanted = [torch.is_grad_enabled() and tensor.requires_grad for tensor in inputs]
    if any(wanted):
        if dtype == torch.float16:
            dtype = torch.float32  # the exponentials below are not normalised: their sum leaves float16's range
        return cast(Tensor, _CrossEntropy.apply(hidden, weight, bias, targets, ignore_index, chunk or 0, dtype))
    return _chunked(hidden, weight, bias, targets, ignore_index, chunk or 0, dtype, False, False)[0]


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, ignore_index, chunk, dtype):
        total, *gradients = _chunked(
            hidden, weight, bias, targets, ignore_index, chunk, dtype, ctx.needs_input_grad[0], any(ctx.needs_input_grad[1:3])
        )
        ctx.has_bias = bias is not None
        ctx.save_for_backward(*gradients)
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        hidden, weight, bias = (g.mul_(gradient) for g in ctx.saved_tensors)
        return hidden, weight, bias if ctx.has_bias else None, None, None, None, None


@torch.library.custom_op("llmcli::cross_entropy", mutates_args=())
def _chunked(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    ignore_index: int,
    chunk: int,
    dtype: torch.dtype,
    hidden_gradient: bool,
    weight_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The loss, and its gradients by hidden (N, d), weight (V, d) and bias (V,); those not wanted are empty."""
    count, vocabulary = len(hidden), len(weight)
    wide = torch.promote_types(dtype, torch.float32)
    if not chunk:
        chunk = max(LEAST_ROWS, BUFFER_BYTES.get(hidden.device.type, 2**28) // (vocabulary * dtype.itemsize))
    chunk = -(-count // -(-count // chunk)) if count else 1  # equal chunks
    matrix, offset = weight.to(dtype), None if bias is None else bias.to(dtype)
    buffer = hidden.new_empty(chunk, vocabulary, dtype=dtype)
    total = hidden.new_zeros((), dtype=wide)
    by_hidden = torch.empty_like(hidden) if hidden_gradient else hidden.new_empty(0)
    by_weight = torch.zeros_like(weight) if weight_gradient else hidden.new_empty(0)
    by_bias = torch.zeros_like(bias) if weight_gradient and bias is not None else hidden.new_empty(0)
    for first in range(0, count, chunk):
        rows = slice(first, first + chunk)
        states = hidden[rows].to(dtype)
        counted = (targets[rows] != ignore_index)[:, None]
        target = targets[rows, None].where(counted, 0)
        logits = buffer[: len(states)]
        if offset is None:
            torch.mm(states, matrix.T, out=logits)
        else:
            torch.addmm(offset, states, matrix.T, out=logits)
        # softmax = e / norm, where e = exp(logits - highest): from here on the buffer holds e.
        highest = logits.amax(-1, keepdim=True)
        right = logits.gather(1, target).to(wide) - highest
        norm = logits.sub_(highest).exp_().sum(-1, keepdim=True, dtype=wide)
        total += (norm.log() - right).where(counted, 0).sum()
        if not (hidden_gradient or weight_gradient):
            continue
        # By the logits, the gradient is (e - norm at the target) / norm. Dividing the few columns of the states and of
        # the result, instead of the V columns of the buffer, saves a pass.
        logits.scatter_(1, target, (right.exp() - norm).to(dtype))
        scale = norm.reciprocal_().where(counted, 0)
        if hidden_gradient:
            by_hidden[rows] = torch.mm(logits, matrix) * scale
        if weight_gradient:
            scaled = (states * scale).to(dtype)
            if by_weight.dtype == dtype:
                by_weight.addmm_(logits.T, scaled)
            else:
                by_weight += torch.mm(logits.T, scaled)
            if bias is not None:
                by_bias += torch.mv(logits.T, scale[:, 0].to(dtype))
    return total, by_hidden, by_weight, by_bias


@_chunked.register_fake
def _(hidden, weight, bias, targets, ignore_index, chunk, dtype, hidden_gradient, weight_gradient):
    return (
        hidden.new_empty((), dtype=torch.promote_types(dtype, torch.float32)),
        torch.empty_like(hidden) if hidden_gradient else hidden.new_empty(0),
        torch.empty_like(weight) if weight_gradient else hidden.new_empty(0),
        torch.empty_like(bias) if weight_gradient and bias is not None else hidden.new_empty(0),
    )
