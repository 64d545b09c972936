"""Gemma (Google, 2024; arXiv:2403.08295): RMSNorm with 1 + w, RoPE, GeGLU, wide heads, scaled embeddings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmcli.config import ModelConfig
from llmcli.families import Family, llama

if TYPE_CHECKING:
    from llmcli.layers import Block


def block(config: ModelConfig, layer: int) -> Block:
    """x + attention(norm(x)), then x + geglu(norm(x)), with norms that multiply by 1 + w."""
    from llmcli.layers import Attention, Block, GatedFeedForward, rms_norm

    return Block(
        attention_norm=rms_norm(config, plus_one=True),
        attention=Attention(config, layer),
        feed_forward_norm=rms_norm(config, plus_one=True),
        feed_forward=GatedFeedForward(config, activation="gelu_tanh", bias=False),
        dropout=config.dropout,
    )


FAMILY = Family(
    name="gemma",
    hf_model_type="gemma",
    hf_architecture="GemmaForCausalLM",
    tied_in_hf=True,
    weights=(*llama.BEFORE, *llama.ATTENTION, *llama.FEED_FORWARD, *llama.AFTER),
    alternatives=llama.HEAD_NAMES,
    ignorable=llama.ROPE_BUFFERS,
    norm="rms_plus_one",
    block=block,
    keys=frozenset({"num_kv_heads", "head_size", "rope_theta", "rope_scaling", "bias"}),
    defaults={**llama.DEFAULTS, "hidden_dim": lambda config: 8 * config.embed_dim, "bias": False, "head_bias": False},
    hf_fields={**llama.HF_FIELDS, "bias": "attention_bias"},
    hf_defaults={
        **llama.HF_DEFAULTS,
        "vocab_size": 256000,
        "embed_dim": 3072,
        "num_layers": 28,
        "num_heads": 16,
        "num_kv_heads": 16,
        "head_size": 256,
        "hidden_dim": 24576,
        "max_position_embeddings": 8192,
        "bias": False,
        "scale_embeddings": True,
    },
    hf_requires={
        # Google's first files say "gelu" and mean the tanh form, as transformers reads them.
        "hidden_act": ("gelu", "gelu_pytorch_tanh"),
        "hidden_activation": (None, "gelu_pytorch_tanh"),
        "use_bidirectional_attention": (None, False),
    },
    hf_writes={"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"},
)
