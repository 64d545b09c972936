"""One new position at a time, for as little as it can cost: the decoder's forward pass with T = 1, written flat.

A forward pass of one position does little arithmetic; in a small model its time goes into calls. Here every matrix is
called once, into buffers that stay, without a module around it; matrices that take the same input are called as one
where they lie side by side in memory (GPT-2's do in its files) or are small enough to be laid so. `layers` says what is
computed; tests hold the two to the same logits, family by family.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmcli.cache import BLOCK, LayerCache
from llmcli.layers import (
    Attention,
    Block,
    FeedForward,
    GatedFeedForward,
    NormAfterSumBlock,
    RMSNorm,
    Rotary,
    softcap,
    visible,
)
from llmcli.model import Decoder

KNOWN = (Block, NormAfterSumBlock)

Rows = Callable[[Tensor], Tensor]
"""A function of rows, (B, in) -> (B, out)."""


class Packed:
    """bfloat16 matrices laid out once more, in the order in which oneDNN multiplies them with few rows.

    Read as they lie in a checkpoint, products in bfloat16 take as long as in float32 on a processor with AVX-512; in
    oneDNN's own order they are a third faster. A copy costs as much as three to ten products and the matrix's memory
    again, so it is made only of what is used often, a few at a time while decoding goes on, and not where it would
    take more than half of the memory that is free. Whoever holds on to this object between generations copies once;
    the weights must not change meanwhile.
    """

    def __init__(self, model: Decoder) -> None:
        weight = model.token_embeddings.weight
        self._bytes = sum(p.nbytes for p in model.parameters())
        here = weight.device.type == "cpu" and weight.dtype == torch.bfloat16
        able = torch._C._has_mkldnn and torch.cpu._is_avx512_bf16_supported()
        self._fits = here and able and 2 * self._bytes < _free_memory()
        self._copies: dict[tuple[int, ...], Tensor] = {}
        self._wanted: dict[tuple[int, ...], tuple[Tensor, ...]] = {}

    def get(self, *weights: Tensor) -> Tensor | None:
        """The copy of matrices (out, in) of one input as one, for `_through`; None where there is none yet."""
        if not self._fits or sum(weight.numel() for weight in weights) <= COPIED:
            return None
        key = tuple(weight.data_ptr() for weight in weights)
        if key not in self._copies:
            self._wanted.setdefault(key, weights)
        return self._copies.get(key)

    def copy_some(self) -> bool:
        """Copy a few of the matrices that were asked for and not there; whether there were any."""
        if not self._wanted:
            return False
        left: float = SHARE * self._bytes
        while self._wanted and left > 0:
            key, weights = self._wanted.popitem()
            whole = torch.cat(weights) if len(weights) > 1 else weights[0]
            self._copies[key] = torch.ops.mkldnn._reorder_linear_weight(whole, 1)
            left -= whole.nbytes
        return True


PATIENCE = 16
"""Steps after which matrices are used often enough to be copied."""

SHARE = 1 / 12
"""The part of the model copied in a step from then on, at least one matrix: a step takes about twice as long, and the
text is not seen to halt."""


def _free_memory() -> int:
    """Bytes that can be had without swapping; 0 where nobody says."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), 0)


class Step:
    """The logits (B, V) after one new id in each of B rows; `cache` has seen the rows so far and sees the new ids.

    A part that is not known here is called as the module it is, and with an unknown kind of block the whole model is:
    every model can be decoded. Forward hooks see nothing of what is written flat.
    """

    @torch.inference_mode()
    def __init__(self, model: Decoder, cache: Sequence[LayerCache], batch: int, packed: Packed | None = None) -> None:
        self._model = model
        self._cache = cache
        self._packed = Packed(model) if packed is None else packed
        self._steps = 0
        self._flat = all(
            type(block) in KNOWN and type(cast(Block, block).attention) is Attention for block in model.blocks
        )
        if not self._flat:
            return
        self._embeddings = model.token_embeddings.weight.detach()
        self._scale = model.token_embeddings.scale if model.token_embeddings.scaled else None
        self._learned = None if model.position_embeddings is None else model.position_embeddings.weight.detach()
        x = self._embeddings.new_empty(batch, self._embeddings.shape[1])
        self._shared = _Shared(x, _Turns(model), self._packed)
        self._build()

    def _build(self) -> None:
        model, shared = self._model, self._shared
        self._blocks = [
            _block(cast(Block, block), layer, shared) for block, layer in zip(model.blocks, self._cache, strict=True)
        ]
        self._final_norm = _norm(model.final_norm, shared.x)
        head = model.output_projection
        weight, bias = (self._embeddings, None) if head is None else (head.weight, head.bias)
        self._head = _linear(weight, bias, self._packed)

    @torch.inference_mode()
    def __call__(self, ids: Tensor) -> Tensor:
        """Logits (B, V) after `ids` (B,). Raises UsageError for a position past the last learned one."""
        if not self._flat:
            return self._model.scores(self._model.hidden(ids[:, None], self._cache)[:, -1])
        self._steps += 1
        if self._steps > PATIENCE and self._packed.copy_some():
            self._build()
        x, turns = self._shared.x, self._shared.turns
        torch.index_select(self._embeddings, 0, ids, out=x)
        if self._scale is not None:
            x.mul_(self._scale)
        if self._cache:
            position, padding = self._cache[0].length, self._cache[0].padding
            self._model.check_position(position)
            places = position if padding is None else position - padding  # of each row, where they differ
            if self._learned is not None:
                x.add_(self._learned[places])
            turns.move(position, places)
        for block in self._blocks:
            block()
        return softcap(self._head(self._final_norm(x)), self._model.config.logit_softcap)


SMALL = 4_000_000
"""Parameters below which one thread decodes faster than several: to call the others takes longer than the work."""

COPIED = 1 << 17
"""Numbers up to which a matrix is laid out anew where that makes its products faster: a copy of it costs nothing."""


def threads(model: Decoder) -> int:
    """How many threads a model of this size is best decoded with, of those that torch has."""
    return 1 if sum(p.numel() for p in model.parameters()) < SMALL else torch.get_num_threads()


class _Turns:
    """The current position's rotations, made once for all layers: cos twice over and sin, (R) and (R/2) or one a row,
    (B, 1, R) and (B, 1, R/2)."""

    def __init__(self, model: Decoder) -> None:
        self._rotary = dict(model.rotary.items())
        self._like = model.token_embeddings.weight
        self._tables: dict[str, tuple[Tensor, ...]] = {}
        self._known = 0
        self.now: dict[str, tuple[Tensor, ...]] = {}

    def half(self, kind: str) -> int:
        """How many pairs of a head's dimensions turn."""
        return len(cast(Rotary, self._rotary[kind]).frequencies)

    def move(self, position: int, places: int | Tensor) -> None:
        """Go on to the position that is `places` in the rows."""
        if not self._rotary:
            return
        if position >= self._known:
            self._known = 2 * position + BLOCK
            positions = torch.arange(self._known, device=self._like.device)
            for kind, rotary in self._rotary.items():
                cos, sin = rotary(positions, self._like.dtype)
                self._tables[kind] = cos, sin[:, : self.half(kind)].contiguous(), -sin[:, : self.half(kind)]
        for kind, tables in self._tables.items():
            now = tuple(table[places] for table in tables)
            self.now[kind] = tuple(table.unsqueeze(1) for table in now) if isinstance(places, Tensor) else now


class _Shared(NamedTuple):
    """What the blocks have in common."""

    x: Tensor
    """The residual stream (B, d), changed in place."""
    turns: _Turns
    packed: Packed


def _linear(weight: Tensor, bias: Tensor | None, packed: Packed) -> Rows:
    """x @ weight.T + bias."""
    copy = packed.get(weight.detach())
    return _plain(weight, bias) if copy is None else _through(copy, bias)


def _plain(weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Rows:
    """x @ weight.T + bias with the matrix as it lies, into `out` or a new tensor."""
    turned, bias = _turned(weight), None if bias is None else bias.detach()
    if bias is None:
        return lambda x: torch.mm(x, turned, out=out)
    return lambda x: torch.addmm(bias, x, turned, out=out)


def _through(copy: Tensor, bias: Tensor | None) -> Rows:
    """x @ weight.T + bias with the matrix's copy in oneDNN's own order."""
    multiply, bias = torch.ops.mkldnn._linear_pointwise.default, None if bias is None else bias.detach()
    return lambda x: multiply(x, copy, bias, "none", [], "")


def _turned(weight: Tensor) -> Tensor:
    """A matrix (out, in) as (in, out), laid out so when it is small: products with one row go through it as it lies."""
    turned = weight.detach().t()
    return turned.contiguous() if turned.numel() <= COPIED else turned


def _side_by_side(weights: Sequence[Tensor]) -> Tensor | None:
    """Matrices (out, in) as one view, where each begins at the row after the last of the one before."""
    first, rows = weights[0], 0
    for weight in weights:
        here = first.data_ptr() + rows * first.stride(0) * first.element_size()
        same = weight.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same or weight.data_ptr() != here or weight.stride() != first.stride():
            return None
        rows += len(weight)
    return first.as_strided((rows, first.shape[1]), first.stride())


def _adding(weight: Tensor, bias: Tensor | None, shared: _Shared) -> Rows:
    """x += y @ weight.T + bias; gives back x."""
    x, copy = shared.x, shared.packed.get(weight.detach())
    if copy is not None:
        add = torch.ops.mkldnn._linear_pointwise.binary
        bias = None if bias is None else bias.detach()
        return lambda y: x.copy_(add(y, x, copy, bias, "add"))
    turned, bias = _turned(weight), None if bias is None else bias.detach()
    if bias is None:
        return lambda y: x.addmm_(y, turned)
    return lambda y: x.addmm_(y, turned).add_(bias)


def _out(linear: nn.Linear, shared: _Shared, adding: bool) -> Rows:
    return _adding(linear.weight, linear.bias, shared) if adding else _linear(linear.weight, linear.bias, shared.packed)


def _norm(norm: nn.Module | None, x: Tensor) -> Rows:
    """A norm of rows like `x`."""
    if norm is None:
        return lambda x: x
    if type(norm) is nn.LayerNorm:
        shape, scale, bias, eps = norm.normalized_shape, norm.weight, norm.bias, norm.eps
        return lambda x: F.layer_norm(x, shape, scale, bias, eps)
    if type(norm) is RMSNorm and len(x) == 1 and x.device.type == "cpu":
        return _norm_of_one_row(norm, x)
    return cast(Rows, norm)


def _norm_of_one_row(norm: RMSNorm, x: Tensor) -> Rows:
    """RMSNorm where the root mean square is a number; rounded where RMSNorm rounds."""
    weight = 1.0 + norm.weight.detach().float() if norm.plus_one else norm.weight.detach()
    width, eps = x.shape[1], norm.eps
    if x.dtype == weight.dtype == torch.float32:
        zero, out = torch.zeros_like(x), torch.empty_like(x)

        def exact(x: Tensor) -> Tensor:
            row = x.view(-1)
            inverse = 1 / math.sqrt(torch.dot(row, row).item() / width + eps)
            return torch.addcmul(zero, x, weight, value=inverse, out=out)

        return exact

    def rounded(x: Tensor) -> Tensor:
        wide = x.float()
        row = wide.view(-1)
        wide.mul_(1 / math.sqrt(torch.dot(row, row).item() / width + eps))
        return wide.mul_(weight).type_as(x) if norm.plus_one else wide.type_as(x).mul_(weight)

    return rounded


def _block(block: Block, cache: LayerCache, shared: _Shared) -> Callable[[], object]:
    """One block's change of the residual stream x (B, d)."""
    x = shared.x
    norms = block.attention_norm, block.attention_post_norm, block.feed_forward_norm, block.feed_forward_post_norm
    before_attention, after_attention, before_feed, after_feed = (_norm(norm, x) for norm in norms)
    if type(block) is NormAfterSumBlock:
        attend = _attention(block.attention, cache, shared, adding=True)
        feed = _feed_forward(block.feed_forward, shared, adding=True)
        return lambda: x.copy_(before_feed(feed(x.copy_(before_attention(attend(x))))))
    attend = _attention(block.attention, cache, shared, adding=norms[1] is None)
    feed = _feed_forward(block.feed_forward, shared, adding=norms[3] is None)

    def step() -> None:
        mixed = attend(before_attention(x))
        if mixed is not x:
            x.add_(after_attention(mixed))
        fed = feed(before_feed(x))
        if fed is not x:
            x.add_(after_feed(fed))

    return step


def _attention(attention: Attention, cache: LayerCache, shared: _Shared, adding: bool) -> Rows:
    """Attention of one position a row; with `adding` the result goes onto x."""
    x, turns, packed = shared
    batch, size, kind = x.shape[0], attention.head_size, attention.rope
    q_dim, kv_dim = attention.q.out_features, attention.k.out_features
    # A row's queries, keys and values lie side by side: what turns is one view, what is remembered another.
    room = x.new_empty(batch, q_dim + 2 * kv_dim)
    project = _into(room, (attention.q, attention.k, attention.v), packed)
    q, k = room[:, :q_dim], room[:, q_dim : q_dim + kv_dim]
    both = room[:, q_dim:].view(batch, 2, -1, size).transpose(0, 1)
    by_group = q.view(batch, kv_dim // size, -1, size)  # the queries of a group stand as rows of their one key head
    half = turns.half(kind) if kind else 0
    heads = room[:, : q_dim + kv_dim].view(batch, -1, size)[..., : 2 * half]
    first, second = heads[..., :half], heads[..., half:]
    turned = torch.empty_like(heads, memory_format=torch.contiguous_format)
    from_first, from_second = turned[..., half:], turned[..., :half]
    output = _out(attention.output, shared, adding)
    q_norm, k_norm, scale, cap = attention.q_norm, attention.k_norm, attention.scale, attention.softcap

    def step(h: Tensor) -> Tensor:
        project(h)
        if q_norm is not None and k_norm is not None:
            q.copy_(q_norm.over_parts(q))
            k.copy_(k_norm.over_parts(k))
        if kind:
            cos, sin, minus_sin = turns.now[kind]
            torch.mul(first, sin, out=from_first)
            torch.mul(second, minus_sin, out=from_second)
            torch.addcmul(turned, heads, cos, out=heads)
        keys, values = cache.append_one(both)
        mask = None
        if cache.padding is not None:
            seen = keys.shape[2]
            mask = visible(1, seen, None, x.device, cache.padding - (cache.length - seen))
        if cap is None:
            mixed = F.scaled_dot_product_attention(by_group, keys, values, mask, scale=scale)
        else:
            scores = softcap(torch.matmul(by_group, keys.mT) * scale, cap)
            scores = scores if mask is None else scores.masked_fill(~mask, -torch.inf)
            mixed = torch.matmul(scores.softmax(-1, dtype=torch.float32).to(scores.dtype), values)
        return output(mixed.reshape(batch, q_dim))

    return step


def _into(room: Tensor, linears: Sequence[nn.Linear], packed: Packed) -> Callable[[Tensor], object]:
    """Fill the columns of `room` (B, n) with what layers of one input make of it, one beside the other: in one product
    where their matrices lie side by side, are small or are packed."""
    weights = [linear.weight.detach() for linear in linears]
    biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
    if len(biases) in (0, len(linears)):
        bias = torch.cat(biases) if biases else None
        copy = packed.get(*weights)
        if copy is not None:
            through = _through(copy, bias)
            return lambda h: room.copy_(through(h))
        whole = _side_by_side(weights)
        if whole is None and sum(weight.numel() for weight in weights) <= COPIED:
            whole = torch.cat(weights)
        if whole is not None:
            return _plain(whole, bias, room)
    ends = list(accumulate(len(weight) for weight in weights))
    columns = room.tensor_split(ends[:-1], dim=1)
    calls = [_plain(linear.weight, linear.bias, out) for linear, out in zip(linears, columns, strict=True)]

    def fill(h: Tensor) -> None:
        for call in calls:
            call(h)

    return fill


def _feed_forward(module: nn.Module, shared: _Shared, adding: bool) -> Rows:
    """A feed-forward part; with `adding` the result goes onto x."""
    x, _, packed = shared
    if type(module) is FeedForward:
        activation, up = module.activation, _linear(module.up.weight, module.up.bias, packed)
        down = _out(module.down, shared, adding)
        return lambda h: down(activation(up(h)))
    if type(module) is GatedFeedForward:
        activation, down = module.activation, _out(module.down, shared, adding)
        room = x.new_empty(x.shape[0], 2 * module.up.out_features)
        project = _into(room, (module.gate, module.up), packed)
        opened, values = room.chunk(2, dim=1)

        def gated(h: Tensor) -> Tensor:
            project(h)
            return down(activation(opened).mul_(values))

        return gated
    if adding:
        return lambda h: x.add_(module(h))
    return cast(Rows, module)
