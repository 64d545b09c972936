"""Qwen 3's mixtures (Alibaba, 2025; arXiv:2505.09388): its attention, and many narrow experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llmcli.config import ModelConfig
from llmcli.families import Family, Weight, llama, mixtral, qwen2, qwen3

if TYPE_CHECKING:
    from llmcli.layers import Block

OURS, THEIRS = "blocks.{i}.feed_forward", "model.layers.{i}.mlp"
EXPERTS = (
    Weight(f"{OURS}.router.weight", f"{THEIRS}.gate.weight", "num_experts embed_dim"),
    Weight(f"{OURS}.experts.{{e}}.gate.weight", f"{THEIRS}.experts.{{e}}.gate_proj.weight", "hidden_dim embed_dim"),
    Weight(f"{OURS}.experts.{{e}}.up.weight", f"{THEIRS}.experts.{{e}}.up_proj.weight", "hidden_dim embed_dim"),
    Weight(f"{OURS}.experts.{{e}}.down.weight", f"{THEIRS}.experts.{{e}}.down_proj.weight", "embed_dim hidden_dim"),
)


def block(config: ModelConfig, layer: int) -> Block:
    """Qwen 3's attention, then the chosen experts' weighted sum."""
    from llmcli.layers import Block, Experts, rms_norm

    return Block(
        attention_norm=rms_norm(config),
        attention=qwen3.attention(config, layer),
        feed_forward_norm=rms_norm(config),
        feed_forward=Experts(config, activation="silu"),
        dropout=config.dropout,
    )


def read(table: dict[str, Any]) -> dict[str, Any]:
    """A window, where one is used, holds in every layer; null for `mlp_only_layers` means that there are none."""
    table = dict(table)
    if not table.pop("use_sliding_window", False):
        table["sliding_window"] = None
    table["mlp_only_layers"] = table.get("mlp_only_layers") or []
    return table


FAMILY = Family(
    name="qwen3_moe",
    hf_model_type="qwen3_moe",
    hf_architecture="Qwen3MoeForCausalLM",
    tied_in_hf=False,
    weights=(*llama.BEFORE, *llama.ATTENTION, *qwen3.QK_NORMS, *EXPERTS, *llama.AFTER),
    alternatives=(*llama.HEAD_NAMES, *mixtral.STACKED_EXPERTS),
    ignorable=llama.ROPE_BUFFERS,
    block=block,
    keys=mixtral.FAMILY.keys | {"bias", "renormalise_experts"},
    defaults={**mixtral.FAMILY.defaults, "norm_eps": 1e-6, "num_experts": 128, "top_k_experts": 8},
    hf_fields={
        **mixtral.FAMILY.hf_fields,
        "hidden_dim": "moe_intermediate_size",
        "num_experts": ("num_experts", "num_local_experts"),
        "renormalise_experts": "norm_topk_prob",
        "bias": "attention_bias",
    },
    hf_defaults={
        **qwen2.HF_DEFAULTS,
        "embed_dim": 2048,
        "num_layers": 24,
        "num_kv_heads": 4,
        "hidden_dim": 768,
        "num_experts": 128,
        "top_k_experts": 8,
        "renormalise_experts": False,
        "bias": False,
    },
    hf_requires={"hidden_act": ("silu", "swish"), "decoder_sparse_step": (1,), "mlp_only_layers": ([],)},
    hf_writes={"hidden_act": "silu", "decoder_sparse_step": 1, "mlp_only_layers": []},
    hf_read=read,
    hf_write=lambda config: {"use_sliding_window": config.window_size is not None},
)
