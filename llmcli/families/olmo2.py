"""OLMo 2 (Ai2, 2024; arXiv:2501.00656): norms behind attention and feed-forward, q and k normalised over all heads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmcli.config import ModelConfig
from llmcli.families import Family, Weight, llama
from llmcli.families.gemma2 import PROJECTIONS

if TYPE_CHECKING:
    from llmcli.layers import Block

LAYER = "model.layers.{i}"
NORMS = (
    Weight("blocks.{i}.attention.q_norm.weight", f"{LAYER}.self_attn.q_norm.weight", "q_dim"),
    Weight("blocks.{i}.attention.k_norm.weight", f"{LAYER}.self_attn.k_norm.weight", "kv_dim"),
    Weight("blocks.{i}.attention_post_norm.weight", f"{LAYER}.post_attention_layernorm.weight", "embed_dim"),
    Weight("blocks.{i}.feed_forward_post_norm.weight", f"{LAYER}.post_feedforward_layernorm.weight", "embed_dim"),
)


def block(config: ModelConfig, layer: int) -> Block:
    """x + norm(attention(x)), then x + norm(swiglu(x))."""
    from llmcli.layers import Attention, Block, GatedFeedForward, rms_norm

    q_norm, k_norm = (rms_norm(config, width=width) for width in (config.q_dim, config.kv_dim))
    return Block(
        attention=Attention(config, layer, q_norm=q_norm, k_norm=k_norm),
        attention_post_norm=rms_norm(config),
        feed_forward=GatedFeedForward(config, activation="silu", bias=False),
        feed_forward_post_norm=rms_norm(config),
        dropout=config.dropout,
    )


FAMILY = Family(
    name="olmo2",
    hf_model_type="olmo2",
    hf_architecture="Olmo2ForCausalLM",
    tied_in_hf=False,
    weights=(*llama.BEFORE, *PROJECTIONS, *NORMS, *llama.FEED_FORWARD, *llama.AFTER),
    alternatives=llama.HEAD_NAMES,
    ignorable=llama.ROPE_BUFFERS,
    block=block,
    keys=frozenset({"num_kv_heads", "head_size", "rope_theta", "rope_scaling", "bias"}),
    defaults={**llama.DEFAULTS, "norm_eps": 1e-5, "bias": False, "head_bias": False},
    hf_fields={**llama.HF_FIELDS, "bias": "attention_bias"},
    hf_defaults={**llama.HF_DEFAULTS, "vocab_size": 50304, "norm_eps": 1e-5, "bias": False},
    hf_requires={"hidden_act": ("silu", "swish")},
    hf_writes={"hidden_act": "silu"},
)
