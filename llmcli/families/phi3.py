"""Phi-3 and Phi-4-mini (Microsoft, 2024; arXiv:2404.14219): LLaMA's block, fused matrices in the file."""

from __future__ import annotations

from typing import Any

from llmcli.config import ModelConfig
from llmcli.families import Family, Weight, llama

QKV, GATE_UP = "q_dim kv_dim kv_dim", "hidden_dim hidden_dim"
OURS, THEIRS = "blocks.{i}", "model.layers.{i}"
BLOCK = (
    Weight(f"{OURS}.attention_norm.weight", f"{THEIRS}.input_layernorm.weight", "embed_dim"),
    Weight(f"{OURS}.attention.q.weight", f"{THEIRS}.self_attn.qkv_proj.weight", "q_dim embed_dim", False, QKV, 0),
    Weight(f"{OURS}.attention.k.weight", f"{THEIRS}.self_attn.qkv_proj.weight", "kv_dim embed_dim", False, QKV, 1),
    Weight(f"{OURS}.attention.v.weight", f"{THEIRS}.self_attn.qkv_proj.weight", "kv_dim embed_dim", False, QKV, 2),
    Weight(f"{OURS}.attention.output.weight", f"{THEIRS}.self_attn.o_proj.weight", "embed_dim q_dim"),
    Weight(f"{OURS}.feed_forward_norm.weight", f"{THEIRS}.post_attention_layernorm.weight", "embed_dim"),
    Weight(
        f"{OURS}.feed_forward.gate.weight",
        f"{THEIRS}.mlp.gate_up_proj.weight",
        "hidden_dim embed_dim",
        False,
        GATE_UP,
        0,
    ),
    Weight(
        f"{OURS}.feed_forward.up.weight", f"{THEIRS}.mlp.gate_up_proj.weight", "hidden_dim embed_dim", False, GATE_UP, 1
    ),
    Weight(f"{OURS}.feed_forward.down.weight", f"{THEIRS}.mlp.down_proj.weight", "embed_dim hidden_dim"),
)


def read(table: dict[str, Any]) -> dict[str, Any]:
    """`partial_rotary_factor`, at the top or among RoPE's parameters, as the number of dimensions that turn."""
    table = dict(table)
    rope = dict(table.get("rope_parameters") or {})
    share = rope.pop("partial_rotary_factor", table.pop("partial_rotary_factor", 1.0))
    if rope:
        table["rope_parameters"] = rope
    size = table.get("head_dim") or table.get("hidden_size", 3072) // table.get("num_attention_heads", 32)
    if share != 1.0:
        table["_rotary_size"] = int(size * share)
    return table


def write(config: ModelConfig) -> dict[str, Any]:
    """The inverse of `read`."""
    if config.rotary_size is None:
        return {}
    share = config.rotary_size / (config.head_size or 1)
    rope = {"rope_type": "default", "rope_theta": config.rope_theta, "partial_rotary_factor": share}
    return {"partial_rotary_factor": share, "rope_parameters": rope}


FAMILY = Family(
    name="phi3",
    hf_model_type="phi3",
    hf_architecture="Phi3ForCausalLM",
    tied_in_hf=False,
    weights=(*llama.BEFORE, *BLOCK, *llama.AFTER),
    alternatives=llama.HEAD_NAMES,
    ignorable=llama.ROPE_BUFFERS,
    block=llama.block,
    keys=frozenset({"num_kv_heads", "head_size", "rope_theta", "rotary_size", "window_size"}),
    defaults={**llama.DEFAULTS, "norm_eps": 1e-5, "bias": False, "head_bias": False},
    hf_fields={
        **llama.HF_FIELDS,
        "window_size": "sliding_window",
        "rotary_size": "_rotary_size",
        "dropout": ("resid_pdrop", "embd_pdrop", "attention_dropout"),
    },
    hf_defaults={
        **llama.HF_DEFAULTS,
        "vocab_size": 32064,
        "embed_dim": 3072,
        "hidden_dim": 8192,
        "max_position_embeddings": 4096,
        "norm_eps": 1e-5,
    },
    hf_requires={"hidden_act": ("silu", "swish")},
    hf_writes={"hidden_act": "silu"},
    hf_read=read,
    hf_write=write,
)
