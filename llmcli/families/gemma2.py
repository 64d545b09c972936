"""Gemma 2 (Google, 2024; arXiv:2408.00118): norms before and behind, soft caps, a window in every other layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llmcli.config import ModelConfig
from llmcli.families import Family, Weight, gemma, llama
from llmcli.families.qwen2 import FULL, SLIDING

if TYPE_CHECKING:
    from llmcli.layers import Attention, Block

LAYER = "model.layers.{i}"
NORMS = (
    Weight("blocks.{i}.attention_norm.weight", f"{LAYER}.input_layernorm.weight", "embed_dim"),
    Weight("blocks.{i}.attention_post_norm.weight", f"{LAYER}.post_attention_layernorm.weight", "embed_dim"),
    Weight("blocks.{i}.feed_forward_norm.weight", f"{LAYER}.pre_feedforward_layernorm.weight", "embed_dim"),
    Weight("blocks.{i}.feed_forward_post_norm.weight", f"{LAYER}.post_feedforward_layernorm.weight", "embed_dim"),
)
PROJECTIONS = tuple(weight for weight in llama.ATTENTION if "norm" not in weight.name)


def sandwich(config: ModelConfig, attention: Attention) -> Block:
    """A block whose attention and feed-forward stand between two norms each, all multiplying by 1 + w."""
    from llmcli.layers import Block, GatedFeedForward, rms_norm

    return Block(
        attention_norm=rms_norm(config, plus_one=True),
        attention=attention,
        attention_post_norm=rms_norm(config, plus_one=True),
        feed_forward_norm=rms_norm(config, plus_one=True),
        feed_forward=GatedFeedForward(config, activation="gelu_tanh", bias=False),
        feed_forward_post_norm=rms_norm(config, plus_one=True),
        dropout=config.dropout,
    )


def block(config: ModelConfig, layer: int) -> Block:
    """x + norm(attention(norm(x))), then x + norm(geglu(norm(x)))."""
    from llmcli.layers import Attention

    return sandwich(config, Attention(config, layer))


def window_layers(num_layers: int, every: int) -> list[int]:
    """The layers with a window where each `every`-th has none."""
    return [layer for layer in range(num_layers) if (layer + 1) % every]


def read_kinds(table: dict[str, Any], every: int) -> dict[str, Any]:
    """`layer_types` as the layers that have the window; absent, each `every`-th has none."""
    table = dict(table)
    kinds = table.pop("layer_types", None)
    if isinstance(kinds, list):
        table["_window_layers"] = [layer for layer, kind in enumerate(kinds) if kind == SLIDING]
    else:
        table["_window_layers"] = window_layers(table.get("num_hidden_layers", 26), every)
    return table


def write_kinds(config: ModelConfig) -> dict[str, Any]:
    """The inverse of `read_kinds`."""
    return {"layer_types": [SLIDING if config.window_of(layer) else FULL for layer in range(config.num_layers)]}


KEYS = gemma.FAMILY.keys | {"window_size", "window_layers", "query_scale"}
HF_FIELDS = {
    **gemma.FAMILY.hf_fields,
    "window_size": "sliding_window",
    "window_layers": "_window_layers",
    "query_scale": "query_pre_attn_scalar",
}
HF_DEFAULTS = {
    **gemma.FAMILY.hf_defaults,
    "embed_dim": 2304,
    "num_layers": 26,
    "num_heads": 8,
    "num_kv_heads": 4,
    "hidden_dim": 9216,
    "window_size": 4096,
    "query_scale": 256,
}

FAMILY = Family(
    name="gemma2",
    hf_model_type="gemma2",
    hf_architecture="Gemma2ForCausalLM",
    tied_in_hf=True,
    weights=(*llama.BEFORE, *NORMS, *PROJECTIONS, *llama.FEED_FORWARD, *llama.AFTER),
    alternatives=llama.HEAD_NAMES,
    ignorable=llama.ROPE_BUFFERS,
    norm="rms_plus_one",
    block=block,
    keys=KEYS | {"attention_softcap", "logit_softcap"},
    defaults={
        **gemma.FAMILY.defaults,
        "hidden_dim": lambda config: 4 * config.embed_dim,
        "query_scale": lambda config: config.head_size or config.embed_dim // config.num_heads,
        "window_layers": lambda config: tuple(window_layers(config.num_layers, 2)) if config.window_size else None,
    },
    hf_fields={**HF_FIELDS, "attention_softcap": "attn_logit_softcapping", "logit_softcap": "final_logit_softcapping"},
    hf_defaults={**HF_DEFAULTS, "attention_softcap": 50.0, "logit_softcap": 30.0},
    hf_requires=gemma.FAMILY.hf_requires,
    hf_writes=gemma.FAMILY.hf_writes,
    hf_read=lambda table: read_kinds(table, 2),
    hf_write=write_kinds,
)
