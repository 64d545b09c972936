"""Qwen 3 (Alibaba, 2025; arXiv:2505.09388): queries and keys normalised a head each, no biases, a head size apart."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmcli.config import ModelConfig
from llmcli.families import Family, Weight, llama, qwen2

if TYPE_CHECKING:
    from llmcli.layers import Attention, Block

QK_NORMS = (
    Weight("blocks.{i}.attention.q_norm.weight", "model.layers.{i}.self_attn.q_norm.weight", "head_size"),
    Weight("blocks.{i}.attention.k_norm.weight", "model.layers.{i}.self_attn.k_norm.weight", "head_size"),
)


def attention(config: ModelConfig, layer: int, plus_one: bool = False) -> Attention:
    """Attention with an RMSNorm of each query and key head before RoPE."""
    from llmcli.layers import Attention, rms_norm

    q_norm, k_norm = (rms_norm(config, plus_one, config.head_size) for _ in range(2))
    return Attention(config, layer, q_norm=q_norm, k_norm=k_norm)


def block(config: ModelConfig, layer: int) -> Block:
    """LLaMA's block with normalised queries and keys."""
    from llmcli.layers import Block, GatedFeedForward, rms_norm

    return Block(
        attention_norm=rms_norm(config),
        attention=attention(config, layer),
        feed_forward_norm=rms_norm(config),
        feed_forward=GatedFeedForward(config, activation="silu", bias=False),
        dropout=config.dropout,
    )


FAMILY = Family(
    name="qwen3",
    hf_model_type="qwen3",
    hf_architecture="Qwen3ForCausalLM",
    tied_in_hf=False,
    weights=(*llama.BEFORE, *llama.ATTENTION, *QK_NORMS, *llama.FEED_FORWARD, *llama.AFTER),
    alternatives=llama.HEAD_NAMES,
    ignorable=llama.ROPE_BUFFERS,
    block=block,
    keys=qwen2.KEYS | {"bias"},
    defaults={**llama.DEFAULTS, "bias": False, "head_bias": False},
    hf_fields={**qwen2.FAMILY.hf_fields, "bias": "attention_bias"},
    hf_defaults={**qwen2.HF_DEFAULTS, "head_size": 128, "bias": False},
    hf_requires={"hidden_act": ("silu", "swish")},
    hf_writes={"hidden_act": "silu"},
    hf_read=qwen2.read_windows,
    hf_write=qwen2.write_windows,
)
