"""The parts that decoders are built of. B is the batch, T the new positions, S all visible ones, d = embed_dim."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmcli.cache import Cache
from llmcli.config import ModelConfig, RopeScaling

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


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


def rms_norm(config: ModelConfig, plus_one: bool = False) -> RMSNorm:
    """A config's RMSNorm over the width d."""
    return RMSNorm(config.embed_dim, cast(float, config.norm_eps), plus_one)


def layer_norm(config: ModelConfig) -> nn.LayerNorm:
    """A config's LayerNorm over the width d, with a bias where the config has biases."""
    return nn.LayerNorm(config.embed_dim, eps=cast(float, config.norm_eps), bias=bool(config.bias))


class Rotary(nn.Module):
    """Rotary position embedding (arXiv:2104.09864) in the half-split form: dimension i turns with i + D/2."""

    def __init__(self, head_size: int, theta: float, scaling: RopeScaling | None) -> None:
        super().__init__()
        # A plain attribute and no buffer: nothing to load, nothing on the meta device, never rounded to bfloat16.
        self.frequencies, self.attention_factor = rope_frequencies(head_size, theta, scaling)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin for positions (T,), each (T, D): the angles are float32 whatever the model's type."""
        angles = torch.outer(positions.float(), self.frequencies.to(positions.device))
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


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (i, i + D/2) of x (B, H, T, D) by its position's angle."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def visible(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor | None:
    """Which keys each query may see, (T, S) bool; None when every query sees every key.

    Queries and keys end at the same position. A query sees itself and what came before, `window - 1` back at most.
    """
    if queries == 1 and (window is None or keys <= window):
        return None
    behind = torch.arange(keys - queries, keys, device=device)[:, None] - torch.arange(keys, device=device)[None, :]
    return (behind >= 0) if window is None else (behind >= 0) & (behind < window)


class Attention(nn.Module):
    """Causal self-attention with grouped key/value heads: each serves num_heads / num_kv_heads query heads."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        bias = bool(config.bias)
        self.q = nn.Linear(config.embed_dim, config.q_dim, bias)
        self.k = nn.Linear(config.embed_dim, config.kv_dim, bias)
        self.v = nn.Linear(config.embed_dim, config.kv_dim, bias)
        self.output = nn.Linear(config.q_dim, config.embed_dim, bias)
        self.head_size = cast(int, config.head_size)
        self.window = config.window_size
        self.grouped = config.num_kv_heads != config.num_heads
        self.dropout = config.dropout

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor] | None, cache: Cache | None) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            matrix(x).view(batch, length, -1, self.head_size).transpose(1, 2) for matrix in (self.q, self.k, self.v)
        )
        if rope:
            q, k = rotate(q, *rope), rotate(k, *rope)
        if cache:
            k, v = cache.append(k, v)
        plain = length == k.shape[2] > 1 and (self.window is None or length <= self.window)
        mixed = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=None if plain else visible(length, k.shape[2], self.window, x.device),
            is_causal=plain,
            dropout_p=self.dropout if self.training else 0.0,
            enable_gqa=self.grouped,
        )
        return cast(Tensor, self.output(mixed.transpose(1, 2).reshape(batch, length, -1)))


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
    """A sparse mixture (arXiv:2401.04088): the router's top k experts, weighted by their softmax renormalised."""

    def __init__(self, config: ModelConfig, activation: str) -> None:
        super().__init__()
        count = cast(int, config.num_experts)
        self.router = nn.Linear(config.embed_dim, count, bias=False)
        self.experts = nn.ModuleList(GatedFeedForward(config, activation) for _ in range(count))
        self.top_k = cast(int, config.top_k_experts)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])  # (N, d)
        weights, chosen = self.router(tokens).float().softmax(-1).topk(self.top_k, -1)  # (N, k) each
        weights = weights / weights.sum(-1, keepdim=True)
        mixed = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            row, rank = torch.where(chosen == number)
            if len(row):
                mixed.index_add_(0, row, (expert(tokens[row]) * weights[row, rank, None]).to(mixed.dtype))
        return mixed.view_as(x)


class Block(nn.Module):
    """Pre-norm: x + attention(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(
        self,
        *,
        attention: Attention,
        attention_norm: nn.Module,
        feed_forward: nn.Module,
        feed_forward_norm: nn.Module,
        dropout: float,
    ) -> None:
        super().__init__()
        self.attention_norm = attention_norm
        self.attention = attention
        self.feed_forward_norm = feed_forward_norm
        self.feed_forward = feed_forward
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor] | None, cache: Cache | None) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), rope, cache))
        return cast(Tensor, x + self.dropout(self.feed_forward(self.feed_forward_norm(x))))


class PostNormBlock(Block):
    """Post-norm (GPT-1): the norm stands after the sum."""

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor] | None, cache: Cache | None) -> Tensor:
        x = self.attention_norm(x + self.dropout(self.attention(x, rope, cache)))
        return cast(Tensor, self.feed_forward_norm(x + self.dropout(self.feed_forward(x))))
