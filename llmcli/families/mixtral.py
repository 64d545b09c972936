"""Mixtral (Mistral AI, 2024; arXiv:2401.04088): Mistral's attention, SwiGLU experts, a few for each token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmcli.config import ModelConfig
from llmcli.families import Family, Weight, llama

if TYPE_CHECKING:
    from llmcli.layers import Block

MOE = "model.layers.{i}.block_sparse_moe"
OURS = "blocks.{i}.feed_forward"
EXPERTS = (
    Weight(f"{OURS}.router.weight", f"{MOE}.gate.weight", "num_experts embed_dim"),
    Weight(f"{OURS}.experts.{{e}}.gate.weight", f"{MOE}.experts.{{e}}.w1.weight", "hidden_dim embed_dim"),
    Weight(f"{OURS}.experts.{{e}}.up.weight", f"{MOE}.experts.{{e}}.w3.weight", "hidden_dim embed_dim"),
    Weight(f"{OURS}.experts.{{e}}.down.weight", f"{MOE}.experts.{{e}}.w2.weight", "embed_dim hidden_dim"),
)
# transformers 5 keeps the experts of a layer stacked, gate over up, under names of its own.
STACKED, GATE_UP = "model.layers.{i}.mlp", "hidden_dim hidden_dim"
STACKED_EXPERTS = (
    Weight(f"{OURS}.router.weight", f"{STACKED}.gate.weight", "num_experts embed_dim"),
    Weight(
        f"{OURS}.experts.{{e}}.gate.weight",
        f"{STACKED}.experts.gate_up_proj",
        "hidden_dim embed_dim",
        False,
        GATE_UP,
        0,
        True,
    ),
    Weight(
        f"{OURS}.experts.{{e}}.up.weight",
        f"{STACKED}.experts.gate_up_proj",
        "hidden_dim embed_dim",
        False,
        GATE_UP,
        1,
        True,
    ),
    Weight(f"{OURS}.experts.{{e}}.down.weight", f"{STACKED}.experts.down_proj", "embed_dim hidden_dim", stacked=True),
)


def block(config: ModelConfig, layer: int) -> Block:
    """x + attention(norm(x)), then x + the chosen experts' weighted sum of norm(x)."""
    from llmcli.layers import Attention, Block, Experts, rms_norm

    return Block(
        attention_norm=rms_norm(config),
        attention=Attention(config, layer),
        feed_forward_norm=rms_norm(config),
        feed_forward=Experts(config, activation="silu"),
        dropout=config.dropout,
    )


FAMILY = Family(
    name="mixtral",
    hf_model_type="mixtral",
    hf_architecture="MixtralForCausalLM",
    tied_in_hf=False,
    weights=(*llama.BEFORE, *llama.ATTENTION, *EXPERTS, *llama.AFTER),
    alternatives=(*llama.HEAD_NAMES, *STACKED_EXPERTS),
    ignorable=llama.ROPE_BUFFERS,
    block=block,
    keys=frozenset(
        {"num_kv_heads", "head_size", "rope_theta", "rope_scaling", "window_size", "num_experts", "top_k_experts"}
    ),
    defaults={
        **llama.DEFAULTS,
        "norm_eps": 1e-5,
        "rope_theta": 1e6,
        "num_experts": 8,
        "top_k_experts": 2,
        "renormalise_experts": True,
        "bias": False,
        "head_bias": False,
    },
    hf_fields={
        **llama.HF_FIELDS,
        "window_size": "sliding_window",
        "num_experts": "num_local_experts",
        "top_k_experts": "num_experts_per_tok",
    },
    hf_defaults={
        **llama.HF_DEFAULTS,
        "num_kv_heads": 8,
        "hidden_dim": 14336,
        "max_position_embeddings": 131072,
        "norm_eps": 1e-5,
        "rope_theta": 1e6,
        "num_experts": 8,
        "top_k_experts": 2,
    },
    hf_requires={"hidden_act": ("silu", "swish"), "norm_topk_prob": (True,)},
    hf_writes={"hidden_act": "silu"},
)
