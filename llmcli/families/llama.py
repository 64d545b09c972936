"""LLaMA (Meta, 2023; arXiv:2302.13971): RMSNorm, RoPE, SwiGLU, grouped key/value heads since Llama 2 (70B)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmcli.config import ModelConfig
from llmcli.families import Family, Weight

if TYPE_CHECKING:
    from llmcli.layers import Block

BEFORE = (Weight("token_embeddings.weight", "model.embed_tokens.weight", "vocab_size embed_dim"),)
ATTENTION = (
    Weight("blocks.{i}.attention_norm.weight", "model.layers.{i}.input_layernorm.weight", "embed_dim"),
    Weight("blocks.{i}.attention.q.weight", "model.layers.{i}.self_attn.q_proj.weight", "q_dim embed_dim"),
    Weight("blocks.{i}.attention.q.bias", "model.layers.{i}.self_attn.q_proj.bias", "q_dim", when="bias"),
    Weight("blocks.{i}.attention.k.weight", "model.layers.{i}.self_attn.k_proj.weight", "kv_dim embed_dim"),
    Weight("blocks.{i}.attention.k.bias", "model.layers.{i}.self_attn.k_proj.bias", "kv_dim", when="bias"),
    Weight("blocks.{i}.attention.v.weight", "model.layers.{i}.self_attn.v_proj.weight", "kv_dim embed_dim"),
    Weight("blocks.{i}.attention.v.bias", "model.layers.{i}.self_attn.v_proj.bias", "kv_dim", when="bias"),
    Weight("blocks.{i}.attention.output.weight", "model.layers.{i}.self_attn.o_proj.weight", "embed_dim q_dim"),
    Weight("blocks.{i}.attention.output.bias", "model.layers.{i}.self_attn.o_proj.bias", "embed_dim", when="bias"),
    Weight("blocks.{i}.feed_forward_norm.weight", "model.layers.{i}.post_attention_layernorm.weight", "embed_dim"),
)
FEED_FORWARD = (
    Weight("blocks.{i}.feed_forward.gate.weight", "model.layers.{i}.mlp.gate_proj.weight", "hidden_dim embed_dim"),
    Weight("blocks.{i}.feed_forward.up.weight", "model.layers.{i}.mlp.up_proj.weight", "hidden_dim embed_dim"),
    Weight("blocks.{i}.feed_forward.down.weight", "model.layers.{i}.mlp.down_proj.weight", "embed_dim hidden_dim"),
)
FEED_FORWARD_BIAS = (
    Weight("blocks.{i}.feed_forward.gate.bias", "model.layers.{i}.mlp.gate_proj.bias", "hidden_dim", when="bias"),
    Weight("blocks.{i}.feed_forward.up.bias", "model.layers.{i}.mlp.up_proj.bias", "hidden_dim", when="bias"),
    Weight("blocks.{i}.feed_forward.down.bias", "model.layers.{i}.mlp.down_proj.bias", "embed_dim", when="bias"),
)
AFTER = (
    Weight("final_norm.weight", "model.norm.weight", "embed_dim", when="num_layers"),
    Weight("output_projection.weight", "lm_head.weight", "vocab_size embed_dim", unless_tied=True),
)
# Other projects' names for the output matrix.
HEAD_NAMES = tuple(
    Weight("output_projection.weight", name, "vocab_size embed_dim", unless_tied=True)
    for name in ("output.weight", "embed_out.weight")
)
ROPE_BUFFERS = ("model.layers.{i}.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq")
HF_FIELDS = {
    "vocab_size": "vocab_size",
    "embed_dim": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_size": "head_dim",
    "hidden_dim": "intermediate_size",
    "max_position_embeddings": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "dropout": "attention_dropout",
    "initializer_range": "initializer_range",
}
HF_DEFAULTS = {
    "vocab_size": 32000,
    "embed_dim": 4096,
    "num_layers": 32,
    "num_heads": 32,
    "hidden_dim": 11008,
    "max_position_embeddings": 2048,
    "norm_eps": 1e-6,
    "rope_theta": 10000.0,
}
DEFAULTS = {
    "hidden_dim": lambda config: max(8, config.embed_dim // 3 * 8),  # about 8/3 d, and a multiple of 8 for fast kernels
    "norm_eps": 1e-6,
    "rope_theta": 10000.0,
}


def block(config: ModelConfig, layer: int) -> Block:
    """x + attention(norm(x)), then x + swiglu(norm(x))."""
    from llmcli.layers import Attention, Block, GatedFeedForward, rms_norm

    return Block(
        attention_norm=rms_norm(config),
        attention=Attention(config, layer),
        feed_forward_norm=rms_norm(config),
        feed_forward=GatedFeedForward(config, activation="silu"),
        dropout=config.dropout,
    )


FAMILY = Family(
    name="llama",
    hf_model_type="llama",
    hf_architecture="LlamaForCausalLM",
    tied_in_hf=False,
    weights=(*BEFORE, *ATTENTION, *FEED_FORWARD, *FEED_FORWARD_BIAS, *AFTER),
    alternatives=HEAD_NAMES,
    ignorable=ROPE_BUFFERS,
    block=block,
    keys=frozenset({"num_kv_heads", "head_size", "rope_theta", "rope_scaling", "bias"}),
    defaults={**DEFAULTS, "bias": False, "head_bias": False},
    hf_fields={**HF_FIELDS, "bias": ("attention_bias", "mlp_bias")},
    hf_defaults={**HF_DEFAULTS, "bias": False},
    hf_requires={"hidden_act": ("silu", "swish")},
    hf_writes={"hidden_act": "silu"},
)
