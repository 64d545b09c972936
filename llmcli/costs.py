"""What a model costs before it is built: bytes of weights, cache and training, operations per token. Arithmetic only.

Every number follows from the family's table and the config. Operations are those of matrix products, a multiplication
and an addition each; norms, activations, softmax and RoPE are left out (below 1 % at the published sizes).
"""

from __future__ import annotations

from math import prod
from typing import Literal

import msgspec

from llmcli import families, params
from llmcli.config import ModelConfig
from llmcli.errors import ConfigError, UsageError

Dtype = Literal["float32", "bfloat16", "float16"]
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8": 1}
"""Bytes of one number. int8 costs what float8 does, and scales beside them are not counted."""

LOGITS_BUFFER, LEAST_ROWS = 2**25, 128
"""Bytes of logits that the chunked loss keeps at once on a CPU, and the fewest positions in a chunk (loss.py)."""


class KvCache(msgspec.Struct, frozen=True, kw_only=True):
    """Keys and values of all layers: what a token adds, and what the whole batch holds at the context."""

    bytes_per_token: int
    bytes: int


class TrainingMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of one training step with AdamW. `attention_matrices` come on top where attention is not fused."""

    weights: int
    gradients: int
    moments: int
    activations: int
    attention_matrices: int
    logits: int
    logits_chunked: int
    total: int
    total_chunked: int


class Flops(msgspec.Struct, frozen=True, kw_only=True):
    """Operations for one token. `attention_share` is that of `attention` in `forward`."""

    attention_projections: int
    feed_forward: int
    attention: int
    attention_causal: int
    head: int
    forward: int
    training: int
    attention_share: float
    head_share: float


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """All costs of one model at a type of numbers, a context (positions) and a batch (sequences)."""

    dtype: Dtype
    context: int
    batch: int
    weights: dict[str, int]
    kv_cache: KvCache
    training: TrainingMemory
    flops: Flops


def costs(config: ModelConfig, *, dtype: Dtype = "bfloat16", context: int | None = None, batch: int = 1) -> Costs:
    """What a model costs. `context` None is the longest the config knows.

    Raises UsageError for a context past the learned positions, ConfigError for an impossible config.
    """
    config = families.complete(config)
    length = context or config.max_position_embeddings
    if families.get(config.family).learned_positions and length > config.max_position_embeddings:
        raise UsageError(
            f"--context {length}: the model has {config.max_position_embeddings} learned positions",
            f"Choose a context up to {config.max_position_embeddings}.",
        )
    total = params.count(config).total
    return Costs(
        dtype=dtype,
        context=length,
        batch=batch,
        weights={name: total * size for name, size in BYTES.items()},
        kv_cache=kv_cache(config, dtype=dtype, context=length, batch=batch),
        training=training_memory(config, dtype=dtype, context=length, batch=batch),
        flops=flops(config, context=length),
    )


def kv_cache(config: ModelConfig, *, dtype: Dtype, context: int, batch: int = 1) -> KvCache:
    """The memory of attention: a key and a value of every key/value head, for each layer and position.

    2 · layers · kv_dim numbers per token (arXiv:2305.13245 on why fewer heads matter). A layer with a sliding window
    keeps no more than the window's positions (arXiv:2310.06825, section 2, rolling buffer cache).
    """
    one = 2 * config.kv_dim * BYTES[dtype]
    kept = sum(visible_keys(config, layer, context) for layer in range(config.num_layers))
    return KvCache(bytes_per_token=config.num_layers * one, bytes=batch * kept * one)


def training_memory(config: ModelConfig, *, dtype: Dtype, context: int, batch: int) -> TrainingMemory:
    """The memory of a training step: what stays between steps, and what the forward pass leaves for the backward.

    Weights, gradients and AdamW's two moments are float32 whatever `dtype` is: 16 bytes a parameter. Below float32,
    autocast keeps a copy of every matrix in `dtype` besides, which makes 18 (arXiv:1910.02054, section 3.1, counts 16
    with gradients in half precision too). Activations and logits: `activation_bytes`, `logits_bytes`.

    `total` is the sum of the lines: what a step needs while gradients accumulate. Without accumulation gradients come
    as activations go, and the peak may be lower, by at most the size of the gradients. Resident memory of real float32
    steps (four families, 6 to 17 million parameters, batch 4 and 8, context 256, with and without accumulation) peaked
    within 6 % of `total`, and within 4 % of `total_chunked` but for one case of 16 % below it (a tied V of 50,257
    without accumulation). In bfloat16 under eager autocast the peak is 9 to 15 % above either: see `activation_bytes`.
    """
    stored = 4 * params.count(config).total
    copies = 0 if dtype == "float32" else BYTES[dtype] * _matrices(config)
    activations, matrices = activation_bytes(config, dtype=dtype, context=context, batch=batch)
    tokens = batch * context
    full = logits_bytes(config, dtype=dtype, tokens=tokens)
    chunked = chunked_logits_bytes(config, dtype=dtype, tokens=tokens)
    steady = 4 * stored + copies + activations
    return TrainingMemory(
        weights=stored + copies,
        gradients=stored,
        moments=2 * stored,
        activations=activations,
        attention_matrices=matrices,
        logits=full,
        logits_chunked=chunked,
        total=steady + full,
        total_chunked=steady + chunked,
    )


def require_room(config: ModelConfig, *, context: int, batch: int, memory: int) -> None:
    """Raise ConfigError where training cannot fit into so many bytes of memory: a typing error, or another machine's.

    Half of what is reckoned is asked for, so that what swap, sharing or a smaller type would make possible is tried.
    """
    needed = training_memory(config, dtype="float32", context=context, batch=batch)
    if needed.total_chunked <= 2 * memory:
        return
    fixed = needed.weights + needed.gradients + needed.moments
    model = fixed > needed.total_chunked // 2
    raise ConfigError(
        f"training would take some {gigabytes(needed.total_chunked)} GB, {gigabytes(fixed)} GB of it for the model's "
        f"{params.count(config).total:,} parameters, and there are {gigabytes(memory)} GB of memory",
        "Take a smaller model: model.embed_dim, num_layers, vocab_size."
        if model
        else f"Take a smaller train.batch_size (now {batch:,}) or train.context (now {context:,}).",
    )


def gigabytes(size: int) -> str:
    """A number of bytes in GB, rounded for a message."""
    return f"{size / 1e9:,.1f}" if size < 10**11 else f"{size / 1e9:,.0f}"


def activation_bytes(config: ModelConfig, *, dtype: Dtype, context: int, batch: int) -> tuple[int, int]:
    """(what every layer keeps for its backward pass, what attention keeps besides where it is not fused), in bytes.

    The count of Korthikanti et al. (arXiv:2205.05198, section 4.1), for any of the families: a matrix product keeps
    its input (q, k and v share one), attention its q, k, v and what it mixed, an activation function its input, a
    product both its factors, a norm its input. For GPT-2 these are their 34·s·b·h bytes: 16·d numbers of 2 bytes, and
    two dropout masks of 1. Here norms work in float32, RMSNorm keeps the normalised values too (w's gradient needs
    them), and a dropout mask is as wide as what it masks. Attention that is not fused keeps the (T, T) weights of
    every head, and under dropout a mask and the masked weights, their 5·a·s²·b; fused attention computes them again
    (arXiv:2205.14135).

    In float32 within 3 % of the bytes autograd really saves here. In bfloat16 eager autocast saves 15 to 25 % more: it
    casts the input of q, k and v anew for each.
    """
    size = BYTES[dtype]
    layers: dict[int, list[families.Tensor]] = {}
    for tensor in families.get(config.family).tensors(config):
        if tensor.layer is not None:
            layers.setdefault(tensor.layer, []).append(tensor)
    per_token = sum(_layer_bytes(config, tensors, size) for tensors in layers.values())
    per_token += size * config.embed_dim * (2 if config.dropout else 1)  # the head's input, the embeddings' mask
    if families.get(config.family).final_norm and config.num_layers:
        per_token += _norm_bytes(config, config.embed_dim)
    weights = size * ((3 if config.dropout else 1) + (1 if config.attention_softcap else 0))
    matrices = config.num_layers * config.num_heads * context * weights
    return batch * context * per_token, batch * context * matrices


def _layer_bytes(config: ModelConfig, tensors: list[families.Tensor], size: int) -> int:
    """What one layer keeps of each token, `size` bytes a number (norms: 4)."""
    d, hidden = config.embed_dim, config.hidden_dim or 0
    names = {tensor.name.partition(".")[2].partition(".")[2] for tensor in tensors}
    feed_forward = (4 if any(name.endswith("gate.weight") for name in names) else 2) * hidden
    if any(tensor.part == "experts" for tensor in tensors):
        # A chosen expert gathers its input, and its output is kept as it is and weighted.
        feed_forward = (config.top_k_experts or 0) * (feed_forward + 3 * d)
    attention = 2 * config.q_dim + 2 * config.kv_dim
    masks = 2 * d if config.dropout else 0
    widths = {"attention.q_norm.weight": config.q_dim, "attention.k_norm.weight": config.kv_dim}
    norms = sum(_norm_bytes(config, widths.get(name, d)) for name in names if name.endswith("norm.weight"))
    return size * (2 * d + attention + feed_forward + masks) + norms


def _norm_bytes(config: ModelConfig, width: int) -> int:
    kept: dict[families.Norm, int] = {"layer": 1, "rms": 2, "rms_plus_one": 2}
    return 4 * width * kept[families.get(config.family).norm]


def logits_bytes(config: ModelConfig, *, dtype: Dtype, tokens: int) -> int:
    """Cross-entropy of all logits at once: logits, their log-probabilities and a gradient, each (N, V).

    The logits are of `dtype`, the log-softmax and its gradient float32, as autocast has them; a cap on the logits
    keeps one more.
    """
    return tokens * config.vocab_size * (BYTES[dtype] * (2 if config.logit_softcap else 1) + 4 + 4)


def chunked_logits_bytes(config: ModelConfig, *, dtype: Dtype, tokens: int) -> int:
    """The same by a loss that works on a few rows of logits at a time and leaves gradients instead (loss.py).

    One buffer serves every chunk, whatever batch and context (the idea of arXiv:2411.09009). Beside it stand what the
    loss leaves, the gradients by the states (N, d) and by the head's matrix (V, d), in float32, and below float32 the
    matrix in `dtype`.
    """
    size = BYTES[dtype]
    row, matrix = config.vocab_size * size, config.vocab_size * config.embed_dim
    buffer = min(tokens, max(LEAST_ROWS, LOGITS_BUFFER // row)) * row
    return buffer + 4 * tokens * config.embed_dim + matrix * (4 if size == 4 else 4 + size)


def flops(config: ModelConfig, *, context: int) -> Flops:
    """Matrix operations for one token.

    A weight matrix costs 2 · rows · columns (Kaplan et al., arXiv:2001.08361, section 2.1), the head 2·V·d of it
    whether the output is tied or not: tying saves parameters, no work. Of a mixture's experts the chosen ones count.
    Attention's own products, scores and mixing, cost 4 · keys · q_dim a layer for a token that sees `keys` positions
    (PaLM, arXiv:2204.02311, appendix B): `attention` is for the last token of the context, which is also what dense
    kernels do for every token; `attention_causal` is the mean over the context when hidden positions are skipped.
    Training is three times the forward pass: the backward pass multiplies twice for each product.
    """
    experts, top_k = config.num_experts or 1, config.top_k_experts or 1
    projections = feed_forward = 0
    for tensor in families.get(config.family).tensors(config):
        if len(tensor.shape) == 2 and tensor.layer is not None:
            work = 2 * prod(tensor.shape)
            if tensor.part == "attention":
                projections += work
            else:
                feed_forward += work * (top_k if tensor.part == "experts" else experts)
    feed_forward //= experts
    seen = sum(visible_keys(config, layer, context) for layer in range(config.num_layers))
    pairs = sum(_visible_pairs(config, layer, context) for layer in range(config.num_layers))
    attention = 4 * config.q_dim * seen
    head = 2 * config.vocab_size * config.embed_dim
    forward = projections + feed_forward + attention + head
    return Flops(
        attention_projections=projections,
        feed_forward=feed_forward,
        attention=attention,
        attention_causal=4 * config.q_dim * pairs // context,
        head=head,
        forward=forward,
        training=3 * forward,
        attention_share=attention / forward,
        head_share=head / forward,
    )


def visible_keys(config: ModelConfig, layer: int, context: int) -> int:
    """How many positions the last token of a context sees in a layer, itself among them."""
    return min(context, config.window_of(layer) or context)


def _visible_pairs(config: ModelConfig, layer: int, context: int) -> int:
    """How many (query, key) pairs a layer's causal mask leaves of a context."""
    window = visible_keys(config, layer, context)
    return window * (window + 1) // 2 + (context - window) * window


def _matrices(config: ModelConfig) -> int:
    """How many parameters enter matrix products: not norms, biases, positions, nor an embedding that is only read."""
    total = 0 if not config.tie_word_embeddings else config.vocab_size * config.embed_dim
    for tensor in families.get(config.family).tensors(config):
        if len(tensor.shape) == 2 and tensor.part not in ("embedding", "positions"):
            total += prod(tensor.shape)
    return total
