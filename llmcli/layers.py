"""The parts that decoders are built of. B is the batch, T the new positions, S all visible ones, d = embed_dim."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, assert_never, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmcli.cache import LayerCache
from llmcli.config import ModelConfig, RopeScaling

if TYPE_CHECKING:
    from llmcli import families


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU by its tanh formula (arXiv:1606.08415): x · (1 + tanh u) / 2, which is x · sigmoid(2u)."""
    if torch.compiler.is_compiling():  # there sigmoid is several times as fast as tanh
        return x * torch.sigmoid(math.sqrt(8 / math.pi) * x * (1 + 0.044715 * x * x))
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu_tanh": gelu_tanh}

MATMUL_KEYS = 1024
"""Up to so many keys plain products replace a slow kernel: they keep all scores, which grow with the square."""


class TokenEmbeddings(nn.Module):
    """The one matrix E of token vectors: looked up going in, scored against coming out.

    `scaled` multiplies what is looked up by √d in E's own type, as Gemma does (in bfloat16 √2048 is 45.25).
    """

    def __init__(self, vocab_size: int, embed_dim: int, scaled: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, embed_dim))
        self.scaled = scaled

    def forward(self, ids: Tensor) -> Tensor:  # (B, T) -> (B, T, d)
        rows = F.embedding(ids, self.weight)
        return rows * self.scale if self.scaled else rows

    def scores(self, hidden: Tensor) -> Tensor:  # (B, T, d) -> (B, T, V)
        return F.linear(hidden, self.weight)

    @property
    def scale(self) -> float:
        """√d, rounded to the weights' type."""
        return torch.tensor(math.sqrt(self.weight.shape[1])).to(self.weight.dtype).item()


class RMSNorm(nn.Module):
    """x / rms(x) * w, or * (1 + w) (Gemma), computed in float32 (arXiv:1910.07467).

    LLaMA rounds to the input's type before it multiplies by w, Gemma after it: both as transformers does.
    """

    def __init__(self, dim: int, eps: float, plus_one: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.eps = eps
        self.plus_one = plus_one

    def forward(self, x: Tensor) -> Tensor:
        if self.plus_one:
            return F.rms_norm(x.float(), self.weight.shape, 1.0 + self.weight.float(), self.eps).type_as(x)
        if x.dtype == self.weight.dtype == torch.float32:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return F.rms_norm(x.float(), self.weight.shape, None, self.eps).type_as(x) * self.weight

    def over_parts(self, x: Tensor) -> Tensor:
        """The norm of each part of its width that x (..., n * width) is made of."""
        width = self.weight.shape[0]
        return cast(Tensor, self(x.view(*x.shape[:-1], -1, width))).flatten(-2)


def rms_norm(config: ModelConfig, plus_one: bool = False, width: int | None = None) -> RMSNorm:
    """A config's RMSNorm, over the width d or another."""
    return RMSNorm(width or config.embed_dim, cast(float, config.norm_eps), plus_one)


def layer_norm(config: ModelConfig) -> nn.LayerNorm:
    """A config's LayerNorm over the width d, with a bias where the config has biases."""
    return nn.LayerNorm(config.embed_dim, eps=cast(float, config.norm_eps), bias=bool(config.bias))


def norm_of(config: ModelConfig, kind: families.Norm) -> nn.Module:
    """A config's norm of that kind over the width d."""
    match kind:
        case "layer":
            return layer_norm(config)
        case "rms" | "rms_plus_one":
            return rms_norm(config, kind == "rms_plus_one")
    assert_never(kind)


class Rotary(nn.Module):
    """Rotary position embedding (arXiv:2104.09864) in the half-split form: dimension i turns with i + D/2."""

    def __init__(self, head_size: int, theta: float, scaling: RopeScaling | None) -> None:
        super().__init__()
        # A plain attribute and no buffer: nothing to load, nothing on the meta device, never rounded to bfloat16.
        self.frequencies, self.attention_factor = rope_frequencies(head_size, theta, scaling)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin for positions (T,) or (B, 1, T), each (..., T, R): the angles are float32 in any model."""
        angles = positions.float().unsqueeze(-1) * self.frequencies.to(positions.device)
        angles = torch.cat((angles, angles), dim=-1)
        return (angles.cos() * self.attention_factor).to(dtype), (angles.sin() * self.attention_factor).to(dtype)


def rope_frequencies(head_size: int, theta: float, scaling: RopeScaling | None) -> tuple[Tensor, float]:
    """The angle by which each pair of dimensions turns per position, (D/2,) float32, and the factor on cos and sin.

    The formulas and their order of rounding are those of transformers' `modeling_rope_utils`.
    """
    exponents = torch.arange(0, head_size, 2, dtype=torch.float32, device="cpu") / head_size
    plain = 1.0 / theta**exponents
    if scaling is None:
        return plain, 1.0
    if scaling.type == "linear":
        return plain / scaling.factor, 1.0
    original = cast(int, scaling.original_max_position_embeddings)
    if scaling.type == "llama3":
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        wavelength = 2 * math.pi / plain
        blend = (original / wavelength - low) / (high - low)
        between = (1 - blend) * plain / scaling.factor + blend * plain
        slow = torch.where(wavelength > original / low, plain / scaling.factor, between)
        return torch.where(wavelength < original / high, plain, slow), 1.0
    return _yarn(head_size, theta, scaling, original)


def _yarn(head_size: int, theta: float, scaling: RopeScaling, original: int) -> tuple[Tensor, float]:
    """YaRN (arXiv:2309.00071): dimensions that turn often keep their frequency, slow ones are interpolated."""

    def dimension(turns: float) -> float:  # the dimension that makes so many turns over the original context
        return head_size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_size - 1)
    span = high - low if high != low else 0.001
    ramp = ((torch.arange(head_size // 2, dtype=torch.float32, device="cpu") - low) / span).clamp(0, 1)
    powers = theta ** (torch.arange(0, head_size, 2, dtype=torch.float32, device="cpu") / head_size)
    kept = 1 - ramp
    frequencies = 1.0 / (scaling.factor * powers) * (1 - kept) + 1.0 / powers * kept
    factor = scaling.attention_factor
    if factor is None:
        factor = 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0
    return frequencies, factor


Rope = tuple[Tensor, Tensor]
"""cos and sin for each position, (T, R): R is the number of a head's dimensions that turn."""


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """Turn each pair (i, i + R/2) of the first R dimensions of x (B, H, T, D) by its position's angle."""
    cos, sin = rope
    size = cos.shape[-1]
    if size < x.shape[-1]:
        return torch.cat((rotate(x[..., :size], rope), x[..., size:]), dim=-1)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def softcap(x: Tensor, cap: float | None) -> Tensor:
    """c·tanh(x / c), which keeps x within ±c (Gemma 2, arXiv:2408.00118); x itself without a cap."""
    return x if cap is None else cap * torch.tanh(x / cap)


def visible(
    queries: int, keys: int, window: int | None, device: torch.device, empty: Tensor | None = None
) -> Tensor | None:
    """Which keys each query may see, (T, S) bool; None when every query sees every key.

    Queries and keys end at the same position. A query sees itself and what came before, `window - 1` back at most.
    The first `empty` (B,) keys of each row are none, and the mask is (B, 1, T, S).
    """
    if queries == 1 and (window is None or keys <= window) and empty is None:
        return None
    query, key = torch.arange(keys - queries, keys, device=device)[:, None], torch.arange(keys, device=device)
    mask = key <= query
    if window is not None:
        mask &= key > query - window
    if empty is not None:  # what stands in an empty place sees itself, lest its softmax have nothing to sum
        mask = mask & (key >= empty.to(device)[:, None, None, None]) | (key == query)
    return mask


class Attention(nn.Module):
    """Causal self-attention with grouped key/value heads: each serves num_heads / num_kv_heads query heads.

    `q_norm` and `k_norm` normalise queries and keys before RoPE, over whatever width they are made for: a head each
    (Qwen 3, Gemma 3) or all heads together (OLMo 2). `output_bias` None follows the config's `bias`.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        *,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
        output_bias: bool | None = None,
    ) -> None:
        super().__init__()
        bias = bool(config.bias)
        self.q = nn.Linear(config.embed_dim, config.q_dim, bias)
        self.k = nn.Linear(config.embed_dim, config.kv_dim, bias)
        self.v = nn.Linear(config.embed_dim, config.kv_dim, bias)
        self.output = nn.Linear(config.q_dim, config.embed_dim, bias if output_bias is None else output_bias)
        self.q_norm, self.k_norm = q_norm, k_norm
        self.head_size = cast(int, config.head_size)
        self.window = config.window_of(layer)
        self.rope = config.rope_of(layer)
        self.scale = (config.query_scale or self.head_size) ** -0.5
        self.softcap = config.attention_softcap
        self.grouped = config.num_kv_heads != config.num_heads
        self.dropout = config.dropout

    def forward(self, x: Tensor, ropes: Mapping[str, Rope], cache: LayerCache | None) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.q(x), self.k(x), self.v(x)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm.over_parts(q), self.k_norm.over_parts(k)
        q, k, v = (part.view(batch, length, -1, self.head_size).transpose(1, 2) for part in (q, k, v))
        if self.rope:
            # Under autocast cos and sin are float32; what they turn goes on in the type of the products.
            q, k = (rotate(part, ropes[self.rope]).to(v.dtype) for part in (q, k))
        empty = None
        if cache is not None:
            k, v = cache.append(k, v)
            empty = None if cache.padding is None else cache.padding - (cache.length - k.shape[2])
        mixed = self.mix(q, k, v, empty)
        return cast(Tensor, self.output(mixed.transpose(1, 2).reshape(batch, length, -1)))

    def mix(self, q: Tensor, k: Tensor, v: Tensor, empty: Tensor | None = None) -> Tensor:
        """What each query (B, Hq, T, D) takes from the values (B, Hkv, S, D) of the keys it sees: (B, Hq, T, D)."""
        queries, keys = q.shape[2], k.shape[2]
        dropout = self.dropout if self.training else 0.0
        # PyTorch's kernel for CPUs takes twice as long as plain products in bfloat16, forward and backward.
        slow = q.device.type == "cpu" and q.dtype == torch.bfloat16 and torch.is_grad_enabled() and keys <= MATMUL_KEYS
        if self.softcap is not None or slow:
            mask = visible(queries, keys, self.window, q.device, empty)
            return matmul_attention(q, k, v, mask, self.scale, self.softcap, dropout)
        plain = queries == keys > 1 and (self.window is None or queries <= self.window) and empty is None
        # One position's queries of a group see the same keys: as rows of one head they read them once, not once each.
        by_group = queries == 1 and self.grouped
        mixed = F.scaled_dot_product_attention(
            q.reshape(q.shape[0], k.shape[1], -1, q.shape[3]) if by_group else q,
            k,
            v,
            attn_mask=None if plain else visible(queries, keys, self.window, q.device, empty),
            is_causal=plain,
            scale=self.scale,
            dropout_p=dropout,
            enable_gqa=self.grouped and not by_group,
        )
        return mixed.reshape(q.shape) if by_group else mixed


def matmul_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, cap: float | None, dropout: float
) -> Tensor:
    """Attention by plain products; scores may be capped before the mask, as no fused kernel does. Shapes: `mix`."""
    batch, heads, length, size = q.shape
    by_group = q.reshape(batch, k.shape[1], heads // k.shape[1], length, size)
    scores = softcap(torch.matmul(by_group, k.unsqueeze(2).mT) * scale, cap)
    if mask is not None:
        scores = scores.masked_fill(~mask[..., None, :, :], float("-inf"))
    weights = F.dropout(scores.softmax(-1, dtype=torch.float32).to(q.dtype), dropout)
    return torch.matmul(weights, v.unsqueeze(2)).flatten(1, 2)


class FeedForward(nn.Module):
    """down(activation(up(x)))."""

    def __init__(self, config: ModelConfig, activation: str) -> None:
        super().__init__()
        hidden_dim = cast(int, config.hidden_dim)
        self.up = nn.Linear(config.embed_dim, hidden_dim, bool(config.bias))
        self.down = nn.Linear(hidden_dim, config.embed_dim, bool(config.bias))
        self.activation = ACTIVATIONS[activation]

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.down(self.activation(self.up(x))))


class GatedFeedForward(nn.Module):
    """down(activation(gate(x)) * up(x)) (arXiv:2002.05202): SwiGLU with silu, GeGLU with gelu."""

    def __init__(self, config: ModelConfig, activation: str, bias: bool | None = None) -> None:
        super().__init__()
        hidden_dim, bias = cast(int, config.hidden_dim), bool(config.bias if bias is None else bias)
        self.gate = nn.Linear(config.embed_dim, hidden_dim, bias)
        self.up = nn.Linear(config.embed_dim, hidden_dim, bias)
        self.down = nn.Linear(hidden_dim, config.embed_dim, bias)
        self.activation = ACTIVATIONS[activation]

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.down(self.activation(self.gate(x)) * self.up(x)))


class Experts(nn.Module):
    """A sparse mixture (arXiv:2401.04088): the router's top k experts, weighted by their share of its softmax.

    `renormalise_experts` makes the chosen shares sum to one.
    """

    def __init__(self, config: ModelConfig, activation: str) -> None:
        super().__init__()
        count = cast(int, config.num_experts)
        self.router = nn.Linear(config.embed_dim, count, bias=False)
        self.experts = nn.ModuleList(GatedFeedForward(config, activation, bias=False) for _ in range(count))
        self.top_k = cast(int, config.top_k_experts)
        self.renormalise = config.renormalise_experts

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])  # (N, d)
        weights, chosen = self.router(tokens).float().softmax(-1).topk(self.top_k, -1)  # (N, k) each
        if self.renormalise:
            weights = weights / weights.sum(-1, keepdim=True)
        mixed = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            row, rank = torch.where(chosen == number)
            if len(row):
                mixed.index_add_(0, row, (expert(tokens[row]) * weights[row, rank, None]).to(mixed.dtype))
        return mixed.view_as(x)


class Block(nn.Module):
    """x + attention(x), then x + feed_forward(x), each with a norm before it, behind it, or both.

    A norm before is `attention_norm` and `feed_forward_norm` (pre-norm), one behind, on what is added to x,
    `attention_post_norm` and `feed_forward_post_norm`.
    """

    def __init__(
        self,
        *,
        attention: Attention,
        feed_forward: nn.Module,
        attention_norm: nn.Module | None = None,
        attention_post_norm: nn.Module | None = None,
        feed_forward_norm: nn.Module | None = None,
        feed_forward_post_norm: nn.Module | None = None,
        dropout: float,
    ) -> None:
        super().__init__()
        self.attention_norm = attention_norm
        self.attention = attention
        self.attention_post_norm = attention_post_norm
        self.feed_forward_norm = feed_forward_norm
        self.feed_forward = feed_forward
        self.feed_forward_post_norm = feed_forward_post_norm
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, ropes: Mapping[str, Rope], cache: LayerCache | None) -> Tensor:
        mixed = self.attention(_normed(x, self.attention_norm), ropes, cache)
        x = x + self.dropout(_normed(mixed, self.attention_post_norm))
        fed = self.feed_forward(_normed(x, self.feed_forward_norm))
        return x + cast(Tensor, self.dropout(_normed(fed, self.feed_forward_post_norm)))


def _normed(x: Tensor, norm: nn.Module | None) -> Tensor:
    return x if norm is None else cast(Tensor, norm(x))


class NormAfterSumBlock(Block):
    """GPT-1's block: norm(x + attention(x)), then norm(x + feed_forward(x)); the norms stand behind the sums."""

    def forward(self, x: Tensor, ropes: Mapping[str, Rope], cache: LayerCache | None) -> Tensor:
        x = _normed(x + self.dropout(self.attention(x, ropes, cache)), self.attention_norm)
        return _normed(x + self.dropout(self.feed_forward(x)), self.feed_forward_norm)
